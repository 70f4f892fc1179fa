"""The lifecycle of an engine: its phases, and the rules of pause, commit, sleep and KV reuse, for every adapter.

Ownership: an engine makes one of these, on the event loop it lives on. It alone says which phase the engine is in,
which weight version it serves, what memory sleeps, and how old the KV may be that a request uses. Methods decide at
once; only the two `until_...` await. The engine does the work between two methods, and holds `control` from the
check that allows a step to the method that records its end.

Invariants: nothing is admitted outside SERVING; memory sleeps, and weights change, only while PAUSED; a commit that
does not succeed leaves no version; tokens sampled under new weights are held until the canary check passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from agentloop.concurrency.aio import ChangeSignal, deadline_after
from agentloop.engine.interface import ALL_MEMORY, MemoryTag
from agentloop.errors import AgentLoopError, Conflict, EngineLost, EngineUnusable, InvalidRequest
from agentloop.types import KVPolicy
from agentloop.values.sampling import VersionDemand


class EnginePhase(StrEnum):
    """The phases of an engine, by what it does with requests."""

    NEW = "new"
    SERVING = "serving"
    DRAINING = "draining"  # admits nothing; what began runs to its end
    FREEZING = "freezing"  # was asked to freeze, or to resume, and has not reported that it did
    PAUSED = "paused"
    CLOSED = "closed"


_MOVES = {
    EnginePhase.NEW: {EnginePhase.SERVING, EnginePhase.CLOSED},
    EnginePhase.SERVING: {EnginePhase.DRAINING, EnginePhase.FREEZING, EnginePhase.PAUSED, EnginePhase.CLOSED},
    EnginePhase.DRAINING: {EnginePhase.SERVING, EnginePhase.FREEZING, EnginePhase.PAUSED, EnginePhase.CLOSED},
    EnginePhase.FREEZING: {EnginePhase.SERVING, EnginePhase.PAUSED, EnginePhase.CLOSED},
    EnginePhase.PAUSED: {EnginePhase.FREEZING, EnginePhase.SERVING, EnginePhase.CLOSED},
    EnginePhase.CLOSED: set(),
}


class _Stopwatch:
    """A sum of the event loop's seconds in which it was running."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    @property
    def total_s(self) -> float:
        return self._total_s + (0.0 if self._since is None else asyncio.get_running_loop().time() - self._since)

    def run(self, is_running: bool) -> None:
        """Start or stop counting. No-op if the stopwatch does so already."""
        if is_running is (self._since is None):
            self._total_s, self._since = self.total_s, asyncio.get_running_loop().time() if is_running else None


class EngineLifecycle:
    """One engine's phase, weight version, sleeping memory and minimum KV version."""

    def __init__(self, has_begun: Callable[[], bool]) -> None:
        """`has_begun` tells if an admitted request has not ended yet."""
        self.phase = EnginePhase.NEW
        self.version: int | None = None  # None: dummy, discarded, or of unknown state after a failed commit
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.control = asyncio.Lock()  # freeze, resume, commit, sleep and wake, one at a time
        self._has_begun = has_begun
        self._drain_over = asyncio.Event()
        self._end_reason = ""
        self._min_kv_version: int | None = None
        self._ends_older_kv = False
        self._incoming: int | None = None  # the version of the commit under way
        self._needs_canary = False  # the committed weights have not passed the canary check
        self._output_release: asyncio.Future[None] | None = (
            None  # set when the canary check ends; an error: discarded
        )
        self._frozen, self._not_admitting = _Stopwatch(), _Stopwatch()
        self._pinned: dict[str, VersionDemand] = {}  # by the id of a request in flight
        self._unpinned = ChangeSignal()

    @property
    def frozen_s(self) -> float:
        """Seconds so far in phases FREEZING and PAUSED."""
        return self._frozen.total_s

    @property
    def not_admitting_s(self) -> float:
        """Seconds so far in which no request was admitted: those of `frozen_s`, and those of drains."""
        return self._not_admitting.total_s

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
        """Enter SERVING under `version`. Raises Conflict for an engine that was started before."""
        self._move(EnginePhase.SERVING)
        self.version = version

    def close(self, reason: str) -> bool:
        """Enter CLOSED: `require_alive` then raises EngineLost with `reason`. False if it was closed before."""
        if self.phase is EnginePhase.CLOSED:
            return False
        self._end_reason = reason
        self._discard_output(EngineLost(reason))
        self._move(EnginePhase.CLOSED)
        return True

    def require_alive(self) -> None:
        """Raise EngineLost before the start and after the end."""
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

    def begin_drain(self) -> None:
        """Stop admitting requests; those that were admitted run on."""
        if self.is_serving:
            self._move(EnginePhase.DRAINING)

    async def until_drained(self) -> None:
        """Wait until all admitted requests have ended, or the engine was frozen meanwhile.

        Raises Conflict if a resume ends the drain, EngineLost if the engine ends.
        """
        if self.phase is EnginePhase.DRAINING:
            await self._drain_over.wait()
            self.require_alive()
            if self.is_serving:
                raise Conflict("a resume came while the pause waited for requests to end")

    def refresh(self) -> None:
        """End a drain if no admitted request is left. The engine calls this whenever a request has ended."""
        if self.phase is EnginePhase.DRAINING and self._has_begun():
            self._drain_over.clear()
        else:
            self._drain_over.set()

    def begin_freeze(self) -> None:
        """Enter FREEZING, in engines that take time to freeze or to resume; `paused` or `resumed` follows."""
        if self.phase is not EnginePhase.FREEZING:
            self._move(EnginePhase.FREEZING)

    def paused(self, kv_policy: KVPolicy) -> None:
        """Enter PAUSED: no token can be sampled any more. Raises EngineLost.

        Of several pauses before a resume, the strictest KV policy counts.
        """
        self.require_alive()
        if not self.is_paused:
            self._move(EnginePhase.PAUSED)
        self._ends_older_kv = self._ends_older_kv or kv_policy is not KVPolicy.KEEP

    def check_resume(self) -> None:
        """Raise Conflict while memory is asleep, or EngineLost."""
        self.require_alive()
        if self.asleep:
            names = ", ".join(sorted(self.asleep))
            raise Conflict(f"the engine cannot go on while its memory is asleep: {names}")

    def resumed(self) -> None:
        """Enter SERVING, and drop a KV policy that no commit has used. Raises EngineLost."""
        self.require_alive()
        self._ends_older_kv = False
        if not self.is_serving:
            self._move(EnginePhase.SERVING)

    # --- weights ------------------------------------------------------------------------------------------

    def check_stage(self) -> None:
        """Raise Conflict while the weights' memory is asleep, or EngineLost."""
        self.require_alive()
        if MemoryTag.WEIGHTS in self.asleep:
            raise Conflict("the memory of the weights is asleep")

    def check_commit(self, version: int, staged_version: int | None) -> None:
        """Raise Conflict unless the engine is paused, its weights awake and `version` staged; or EngineLost."""
        self.check_stage()
        if not self.is_paused:
            raise Conflict("weights are committed to a paused engine only")
        if staged_version != version:
            held = "nothing" if staged_version is None else f"version {staged_version}"
            raise Conflict(f"version {version} cannot be committed: {held} is staged")

    @contextmanager
    def committing(self, version: int, *, is_forced: bool = False) -> Iterator[None]:
        """Set `version` if the block succeeds; else the weights are of unknown state.

        The new weights need a canary check unless the update `is_forced`.
        """
        self._incoming = version
        try:
            yield
            self.require_alive()
        except BaseException:
            self.refuse()
            raise
        finally:
            self._incoming = None
        self.version = version
        self._needs_canary = not is_forced
        if self._ends_older_kv:
            self._min_kv_version = version

    @property
    def ends_older_kv(self) -> bool:
        """True if a commit in this pause forbids KV of older versions."""
        return self._ends_older_kv

    def kv_version(self, asked: int | None, served: int) -> int:
        """Return the KV version for a request that asked for `asked`; None asks for the served version.

        A version above `served` names weights that were rolled back, and will name others: it counts as `served`.
        """
        version = served if asked is None else min(asked, served)
        return version if self._min_kv_version is None else min(max(version, self._min_kv_version), served)

    # --- requests that demand a version -------------------------------------------------------------------

    def pin(self, request_id: str, demand: VersionDemand) -> None:
        """Note a request that accepts some versions only. Raises WeightVersionNotServed."""
        demand.check(self.version)
        self._pinned[request_id] = demand

    def unpin(self, request_id: str) -> None:
        """Forget a request that has ended. Idempotent."""
        if self._pinned.pop(request_id, None) is not None:
            self._unpinned.notify()

    def refusing(self, version: int) -> list[str]:
        """Return the ids of the requests in flight that do not accept `version`."""
        return [request_id for request_id, demand in self._pinned.items() if not demand.accepts(version)]

    def refuses(self, demand: VersionDemand | None) -> bool:
        """Return True if the served version, or that of the commit under way, is known and not accepted."""
        version = self.version if self._incoming is None else self._incoming
        return demand is not None and version is not None and not demand.accepts(version)

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        """Wait as `EngineControl.drain_pinned` does."""
        give_up_at = deadline_after(grace_s)
        while self.is_serving and self.refusing(version) and await self._unpinned.wait_until(give_up_at):
            pass

    # Canary check

    @property
    def is_output_held(self) -> bool:
        """True from `begin_canary` until the check ends; after a refusal, until the next check."""
        return self._output_release is not None

    def begin_canary(self) -> bool:
        """Hold all sampled tokens and return True if the weights still need the canary check; else return False.
        Call before anything can be sampled under new weights."""
        if self._needs_canary:
            self.hold_output()
        else:
            self.release_output()
        return self._needs_canary

    def hold_output(self) -> None:
        """Hold all sampled tokens until the next canary check ends."""
        if self._output_release is None or self._output_release.done():
            self._output_release = asyncio.get_running_loop().create_future()

    def release_output(self) -> None:
        """End a canary check that found no fault: held tokens are released."""
        release, self._output_release, self._needs_canary = self._output_release, None, False
        if release is not None and not release.done():
            release.set_result(None)

    def refuse(self) -> None:
        """Discard all tokens that were held back: the weights are of unknown state."""
        self.version = None
        self._discard_output(EngineUnusable("its weights are of unknown state"))

    async def until_output_released(self) -> None:
        """Wait until the canary check ends. Raises EngineUnusable if the weights were refused, or EngineLost."""
        if self._output_release is not None:
            await asyncio.shield(self._output_release)

    def _discard_output(self, error: AgentLoopError) -> None:
        if self._output_release is not None and not self._output_release.done():
            self._output_release.set_exception(error)
            self._output_release.exception()  # marks it as seen: no token may be waiting

    # --- sleep --------------------------------------------------------------------------------------------

    def check_sleep(self, level: int, *, can_sleep: bool) -> None:
        """Raise InvalidRequest for a level other than 1 and 2 or an engine without sleep."""
        if level not in (1, 2):
            raise InvalidRequest(f"sleep levels are 1 and 2, not {level}", param="level")
        if not can_sleep:
            raise InvalidRequest("this engine was started without sleep: only modes hybrid and colocated have it")

    def has_to_sleep(self, level: int) -> bool:
        """Return True if the paused engine has memory to release for this level, or weights to discard."""
        self.require_alive()
        return self.asleep != ALL_MEMORY or (level == 2 and self.version is not None)

    def slept(self, level: int) -> None:
        """Record that all memory was given back; level 2 has discarded the weights."""
        self.asleep = ALL_MEMORY
        if level == 2:
            self.version, self._needs_canary = None, False

    def wakeable(self, tags: frozenset[MemoryTag]) -> frozenset[MemoryTag]:
        """Return those of `tags` that are asleep.

        Raises Conflict for the KV cache while the weights, which fill it, are of unknown version; or EngineLost.
        """
        self.require_alive()
        wanted = self.asleep & tags
        if MemoryTag.KV_CACHE in wanted and self.version is None:
            raise Conflict("weights are committed before the KV cache wakes: these are unknown")
        return wanted

    def woken(self, tags: frozenset[MemoryTag]) -> None:
        """Record that memory was taken back."""
        self.asleep -= tags

    def _move(self, phase: EnginePhase) -> None:
        if phase not in _MOVES[self.phase]:
            raise Conflict(f"the engine is {self.phase} and cannot become {phase}")
        self.phase = phase
        is_frozen = phase in (EnginePhase.FREEZING, EnginePhase.PAUSED)
        self._frozen.run(is_frozen)
        self._not_admitting.run(is_frozen or phase is EnginePhase.DRAINING)
        self.refresh()
