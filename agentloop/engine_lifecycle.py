"""The lifecycle of an engine: its phases, and the rules of pause, commit, sleep and KV reuse, for every adapter.

Ownership: an engine makes one of these, on the event loop it lives on. It alone says which phase the engine is in,
which weight version it serves, what memory sleeps, and how old the KV may be that a request uses. Methods decide at
once, without an await (but `drained`); the engine does the work between two of them. It holds `control` from the
check that allows a step to the method that says it is done.

Invariants: nothing is admitted outside SERVING; memory sleeps, and weights change, only while PAUSED; a commit that
does not succeed leaves no version; what is sampled under new weights is given out once they were looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from agentloop.engine import ALL_MEMORY, MemoryTag
from agentloop.errors import AgentLoopError, Conflict, EngineLost, EngineUnusable, InvalidRequest
from agentloop.types import KVPolicy


class EnginePhase(StrEnum):
    """The way an engine treats requests."""

    NEW = "new"
    SERVING = "serving"
    DRAINING = "draining"  # admits nothing; what began runs to its end
    FREEZING = "freezing"  # was asked to freeze, and has not said that it did
    PAUSED = "paused"
    CLOSED = "closed"


_MOVES = {
    EnginePhase.NEW: {EnginePhase.SERVING, EnginePhase.CLOSED},
    EnginePhase.SERVING: {EnginePhase.DRAINING, EnginePhase.FREEZING, EnginePhase.PAUSED, EnginePhase.CLOSED},
    EnginePhase.DRAINING: {EnginePhase.SERVING, EnginePhase.FREEZING, EnginePhase.PAUSED, EnginePhase.CLOSED},
    EnginePhase.FREEZING: {EnginePhase.SERVING, EnginePhase.PAUSED, EnginePhase.CLOSED},
    EnginePhase.PAUSED: {EnginePhase.SERVING, EnginePhase.CLOSED},
    EnginePhase.CLOSED: set(),
}


class _Stopwatch:
    """Seconds of the event loop's time for which something was true."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    @property
    def total_s(self) -> float:
        return self._total_s + (0.0 if self._since is None else asyncio.get_running_loop().time() - self._since)

    def run(self, is_running: bool) -> None:
        """Go on, or stand. No-op if it does already."""
        if is_running is (self._since is None):
            self._total_s, self._since = self.total_s, asyncio.get_running_loop().time() if is_running else None


class EngineLifecycle:
    """One engine's phase, weight version, sleeping memory and minimum KV version."""

    def __init__(self, has_begun: Callable[[], bool]) -> None:
        """`has_begun` tells whether a request that was admitted has not ended."""
        self.phase = EnginePhase.NEW
        self.version: int | None = None  # None: dummy, discarded, or of unknown state after a failed commit
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.control = asyncio.Lock()  # freeze, resume, commit, sleep and wake, one at a time
        self._has_begun = has_begun
        self._drain_over = asyncio.Event()
        self._end_reason = ""
        self._min_kv_version: int | None = None
        self._ends_older_kv = False
        self._is_unproved = False  # the weights were committed, and not looked at
        self._proof: asyncio.Future[None] | None = None  # of the look that tokens wait for; failed: they are void
        self._frozen, self._shut = _Stopwatch(), _Stopwatch()

    @property
    def frozen_s(self) -> float:
        """Seconds so far in which nothing was sampled because the engine was frozen, or was to be."""
        return self._frozen.total_s

    @property
    def shut_s(self) -> float:
        """Seconds so far in which nothing new was admitted: those of `frozen_s`, and those of drains."""
        return self._shut.total_s

    @property
    def is_serving(self) -> bool:
        return self.phase is EnginePhase.SERVING

    @property
    def is_paused(self) -> bool:
        return self.phase is EnginePhase.PAUSED

    @property
    def is_usable(self) -> bool:
        return self.version is not None and self.phase not in (EnginePhase.NEW, EnginePhase.CLOSED)

    # --- start and end ------------------------------------------------------------------------------------

    def started(self, version: int | None) -> None:
        """Serve from now on, under `version`. Raises Conflict for an engine that was started before."""
        self._move(EnginePhase.SERVING)
        self.version = version

    def close(self, reason: str) -> bool:
        """End: `require_alive` raises EngineLost with `reason` from now on. False if it had ended before."""
        if self.phase is EnginePhase.CLOSED:
            return False
        self._end_reason = reason
        self._void(EngineLost(reason))
        self._move(EnginePhase.CLOSED)
        return True

    def require_alive(self) -> None:
        """Raises EngineLost before the start and after the end."""
        if self.phase is EnginePhase.NEW:
            raise EngineLost("the engine is not started")
        if self.phase is EnginePhase.CLOSED:
            raise EngineLost(self._end_reason)

    def require_usable(self) -> int:
        """Return the served version. Raises EngineUnusable if there is none."""
        if self.version is None:
            raise EngineUnusable("the engine holds no weights of a known version")
        return self.version

    # --- pause and resume ---------------------------------------------------------------------------------

    def shut(self) -> None:
        """Admit nothing new; what began runs on."""
        if self.is_serving:
            self._move(EnginePhase.DRAINING)

    async def drained(self) -> None:
        """Wait until all that began before a `shut` has ended, or something else has frozen the engine.

        Raises Conflict if a resume comes meanwhile, EngineLost if the engine ends.
        """
        if self.phase is EnginePhase.DRAINING:
            await self._drain_over.wait()
            self.require_alive()
            if self.is_serving:
                raise Conflict("a resume came while the pause waited for requests to end")

    def refresh(self) -> None:
        """Look again whether a drain is over; the engine calls it whenever a request has ended."""
        if self.phase is EnginePhase.DRAINING and self._has_begun():
            self._drain_over.clear()
        else:
            self._drain_over.set()

    def freezing(self) -> None:
        """Note that the engine was asked to freeze, for one that takes time to do so."""
        if self.phase is not EnginePhase.FREEZING:
            self._move(EnginePhase.FREEZING)

    def paused(self, kv_policy: KVPolicy) -> None:
        """Note that no token can be sampled any more. Raises EngineLost.

        Of several pauses before a resume the strictest policy counts.
        """
        self.require_alive()
        if not self.is_paused:
            self._move(EnginePhase.PAUSED)
        self._ends_older_kv = self._ends_older_kv or kv_policy is not KVPolicy.KEEP

    def check_resume(self) -> None:
        """Raises Conflict while memory is asleep, or EngineLost."""
        self.require_alive()
        if self.asleep:
            names = ", ".join(sorted(self.asleep))
            raise Conflict(f"the engine cannot go on while its memory is asleep: {names}")

    def resumed(self) -> None:
        """Serve again. A KV policy that no commit has used is void. Raises EngineLost."""
        self.require_alive()
        self._ends_older_kv = False
        if not self.is_serving:
            self._move(EnginePhase.SERVING)

    # --- weights ------------------------------------------------------------------------------------------

    def check_stage(self) -> None:
        """Raises Conflict while the weights' memory is asleep, or EngineLost."""
        self.require_alive()
        if MemoryTag.WEIGHTS in self.asleep:
            raise Conflict("the memory of the weights is asleep")

    def check_commit(self, version: int, staged_version: int | None) -> None:
        """Raises Conflict unless the engine is paused, its weights awake, and `version` staged; or EngineLost."""
        self.check_stage()
        if not self.is_paused:
            raise Conflict("weights are committed to a paused engine only")
        if staged_version != version:
            held = "nothing" if staged_version is None else f"version {staged_version}"
            raise Conflict(f"version {version} cannot be committed: {held} is staged")

    @contextmanager
    def committing(self, version: int, *, is_forced: bool = False) -> Iterator[None]:
        """Stamp `version` if the block succeeds, to be looked at unless it `is_forced`. If the block fails or is
        cancelled, the weights are of unknown state."""
        try:
            yield
            self.require_alive()
        except BaseException:
            self.refuse()
            raise
        self.version = version
        self._is_unproved = not is_forced
        if self._ends_older_kv:
            self._min_kv_version = version

    @property
    def ends_older_kv(self) -> bool:
        """True if a commit during this pause ends the use of older KV."""
        return self._ends_older_kv

    def kv_version(self, asked: int | None, served: int) -> int:
        """Return the version whose KV a request uses that asked for `asked` (None: for the served one).

        A version newer than the served one is of weights that were taken back: its number will name others.
        """
        version = served if asked is None else min(asked, served)
        return version if self._min_kv_version is None else min(max(version, self._min_kv_version), served)

    # --- the look at new weights --------------------------------------------------------------------------

    @property
    def is_proved(self) -> bool:
        """False while what is sampled is held back, or was refused."""
        return self._proof is None

    def begin_look(self) -> bool:
        """Hold back what is sampled from now on, if it is of weights that were not looked at: True then. Call
        before anything can be sampled under new weights."""
        if not self._is_unproved:
            self.proved()
        elif self._proof is None or self._proof.done():
            self._proof = asyncio.get_running_loop().create_future()
        return self._is_unproved

    def proved(self) -> None:
        """Give out what was held back."""
        proof, self._proof, self._is_unproved = self._proof, None, False
        if proof is not None and not proof.done():
            proof.set_result(None)

    def refuse(self) -> None:
        """Give out nothing of what was held back: the weights are of unknown state."""
        self.version = None
        self._void(EngineUnusable("its weights are of unknown state"))

    async def until_proved(self) -> None:
        """Wait until new weights were looked at. Raises EngineUnusable if they were refused, or EngineLost."""
        if self._proof is not None:
            await asyncio.shield(self._proof)

    def _void(self, error: AgentLoopError) -> None:
        if self._proof is not None and not self._proof.done():
            self._proof.set_exception(error)
            self._proof.exception()  # marks it as seen: there may be no token that waits

    # --- sleep --------------------------------------------------------------------------------------------

    def check_sleep(self, level: int, *, can_sleep: bool) -> None:
        """Raises InvalidRequest for a level that is not 1 or 2, or an engine that cannot sleep; or EngineLost."""
        self.require_alive()
        if level not in (1, 2):
            raise InvalidRequest(f"sleep levels are 1 and 2, not {level}", param="level")
        if not can_sleep:
            raise InvalidRequest("this engine was started without sleep: only modes hybrid and colocated have it")

    def has_to_sleep(self, level: int) -> bool:
        """False if the paused engine sleeps as deep already. Raises Conflict if discarded weights are awake."""
        self.require_alive()
        if self.asleep == ALL_MEMORY and (level == 1 or self.version is None):
            return False
        if self.asleep and self.version is None:
            raise Conflict("weights are committed before the engine sleeps again: these were discarded")
        return True

    def slept(self, level: int) -> None:
        """Note that all memory was given back; level 2 has discarded the weights."""
        self.asleep = ALL_MEMORY
        if level == 2:
            self.version, self._is_unproved = None, False

    def wakeable(self, tags: frozenset[MemoryTag]) -> frozenset[MemoryTag]:
        """Return those of `tags` that are asleep. Raises Conflict for the KV cache while nobody knows the weights,
        which would have to fill it; or EngineLost."""
        self.require_alive()
        wanted = self.asleep & tags
        if MemoryTag.KV_CACHE in wanted and self.version is None:
            raise Conflict("weights are committed before the KV cache wakes: these are unknown")
        return wanted

    def woken(self, tags: frozenset[MemoryTag]) -> None:
        """Note that memory was taken back."""
        self.asleep -= tags

    def _move(self, phase: EnginePhase) -> None:
        if phase not in _MOVES[self.phase]:
            raise Conflict(f"the engine is {self.phase} and cannot become {phase}")
        self.phase = phase
        is_frozen = phase in (EnginePhase.FREEZING, EnginePhase.PAUSED)
        self._frozen.run(is_frozen)
        self._shut.run(is_frozen or phase is EnginePhase.DRAINING)
        self.refresh()
