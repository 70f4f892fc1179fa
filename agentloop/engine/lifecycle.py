"""The lifecycle of an engine: phases, and the rules of pause, commit, sleep and KV reuse that all engines share.

Each engine owns one `EngineLifecycle`, which holds its phase, served weight version, sleeping memory and minimum KV
version. Methods check or record a step and do not block, except `until_...` and `drain_pinned`; the engine does the
work in between, and holds `control` from the check of a step to the method that records its end.
Invariants: requests are admitted only in SERVING; memory sleeps and weights change only in PAUSED; a failed commit
leaves no version; tokens sampled with new weights are held until the canary check passes.
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
    """The phases of an engine."""

    NEW = "new"
    SERVING = "serving"
    DRAINING = "draining"  # admits no requests; admitted requests run to their end
    FREEZING = "freezing"  # a freeze or resume has started and is not confirmed yet
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
    """Measures the total time, on the event loop's clock, during which it was running."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    @property
    def total_s(self) -> float:
        return self._total_s + (0.0 if self._since is None else asyncio.get_running_loop().time() - self._since)

    def run(self, is_running: bool) -> None:
        """Start or stop the stopwatch. No-op if it is already in that state."""
        if is_running is (self._since is None):
            self._total_s, self._since = self.total_s, asyncio.get_running_loop().time() if is_running else None


class EngineLifecycle:
    """One engine's phase, weight version, sleeping memory and minimum KV version."""

    def __init__(self, has_begun: Callable[[], bool]) -> None:
        """`has_begun` returns True while an admitted request has not ended."""
        self.phase = EnginePhase.NEW
        self.version: int | None = None  # None: dummy or discarded weights, or unknown ones after a failed commit
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.control = asyncio.Lock()  # serializes freeze, resume, commit, sleep and wake
        self._has_begun = has_begun
        self._drain_over = asyncio.Event()
        self._end_reason = ""
        self._min_kv_version: int | None = None
        self._ends_older_kv = False
        self._incoming: int | None = None  # the version of the running commit
        self._needs_canary = False  # the committed weights have not passed the canary check
        # Resolved when the canary check ends; an exception means that held tokens are discarded.
        self._output_release: asyncio.Future[None] | None = None
        self._frozen, self._not_admitting = _Stopwatch(), _Stopwatch()
        self._pinned: dict[str, VersionDemand] = {}  # by id of a request in flight
        self._unpinned = ChangeSignal()

    @property
    def frozen_s(self) -> float:
        """Total seconds in the phases FREEZING and PAUSED."""
        return self._frozen.total_s

    @property
    def not_admitting_s(self) -> float:
        """Total seconds without admission: `frozen_s` plus the phase DRAINING."""
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

    # Start and end

    def started(self, version: int | None) -> None:
        """Enter SERVING with `version`. Raises Conflict if the engine was started before."""
        self._move(EnginePhase.SERVING)
        self.version = version

    def close(self, reason: str) -> bool:
        """Enter CLOSED: `require_alive` then raises EngineLost with `reason`. Returns False if already closed."""
        if self.phase is EnginePhase.CLOSED:
            return False
        self._end_reason = reason
        self._discard_output(EngineLost(reason))
        self._move(EnginePhase.CLOSED)
        return True

    def require_alive(self) -> None:
        """Raise EngineLost before the start and after the end."""
        if self.phase is EnginePhase.NEW:
            raise EngineLost("the engine is not started: call start() first")
        if self.phase is EnginePhase.CLOSED:
            raise EngineLost(self._end_reason)

    def require_usable(self) -> int:
        """Return the served version. Raises EngineUnusable if it is unknown."""
        if self.version is None:
            raise EngineUnusable("the engine's weight version is unknown: commit a version first")
        return self.version

    # Pause and resume

    def begin_drain(self) -> None:
        """Stop admitting requests. Admitted requests continue."""
        if self.is_serving:
            self._move(EnginePhase.DRAINING)

    async def until_drained(self) -> None:
        """Wait until all admitted requests have ended, or the engine is frozen.

        Raises Conflict if a resume ends the drain, and EngineLost if the engine ends.
        """
        if self.phase is EnginePhase.DRAINING:
            await self._drain_over.wait()
            self.require_alive()
            if self.is_serving:  # the pause's caller must not assume a paused engine
                raise Conflict("the pause was ended by a resume while it waited for requests to end")

    def refresh(self) -> None:
        """End a drain if no admitted request is left. The engine calls this after each request."""
        if self.phase is EnginePhase.DRAINING and self._has_begun():
            self._drain_over.clear()
        else:
            self._drain_over.set()

    def begin_freeze(self) -> None:
        """Enter FREEZING, in engines whose freeze or resume takes time; call `paused` or `resumed` afterwards."""
        if self.phase is not EnginePhase.FREEZING:
            self._move(EnginePhase.FREEZING)

    def paused(self, kv_policy: KVPolicy) -> None:
        """Enter PAUSED: no token is sampled from now on. Raises EngineLost.

        If there are several pauses before a resume, the strictest KV policy applies.
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
            raise Conflict(f"the engine cannot resume while its memory is asleep ({names}): wake it first")

    def resumed(self) -> None:
        """Enter SERVING, and discard a KV policy that was not applied by a commit. Raises EngineLost."""
        self.require_alive()
        self._ends_older_kv = False
        if not self.is_serving:
            self._move(EnginePhase.SERVING)

    # Weights

    def check_stage(self) -> None:
        """Raise Conflict while the weights' memory is asleep, or EngineLost."""
        self.require_alive()
        if MemoryTag.WEIGHTS in self.asleep:
            raise Conflict("the memory of the weights is asleep: wake it first")

    def check_commit(self, version: int, staged_version: int | None) -> None:
        """Raise Conflict unless the engine is paused with awake weights and `version` staged; or EngineLost."""
        self.check_stage()
        if not self.is_paused:
            raise Conflict(f"weights can only be committed while the engine is paused, but it is {self.phase}")
        if staged_version != version:
            held = "nothing" if staged_version is None else f"version {staged_version}"
            raise Conflict(f"version {version} cannot be committed: {held} is staged")

    @contextmanager
    def committing(self, version: int, *, is_forced: bool = False) -> Iterator[None]:
        """Set `version` if the block succeeds; if it fails, the state of the weights is unknown.

        The new weights need a canary check unless `is_forced`.
        """
        self._incoming = version
        try:
            yield
            self.require_alive()
        except BaseException:  # also a cancellation: some workers may have swapped the weights
            self.refuse()
            raise
        finally:
            self._incoming = None
        self.version = version
        self._needs_canary = not is_forced
        if self._ends_older_kv:  # a pause with FRESH or RECOMPUTE preceded the commit
            self._min_kv_version = version

    @property
    def ends_older_kv(self) -> bool:
        """True if a commit in this pause forbids KV of older versions."""
        return self._ends_older_kv

    def kv_version(self, asked: int | None, served: int) -> int:
        """Return the KV version of a request with the `kv_version` `asked`; None means the served version.

        It is at most `served`, and at least the minimum that a commit has set.
        """
        # A version above `served` was rolled back, and its number will be reused for other weights.
        version = served if asked is None else min(asked, served)
        return version if self._min_kv_version is None else min(max(version, self._min_kv_version), served)

    # Requests with a version demand

    def pin(self, request_id: str, demand: VersionDemand) -> None:
        """Register a request that accepts only some versions. Raises WeightVersionNotServed."""
        demand.check(self.version)
        self._pinned[request_id] = demand

    def unpin(self, request_id: str) -> None:
        """Remove an ended request. Idempotent."""
        if self._pinned.pop(request_id, None) is not None:
            self._unpinned.notify()

    def refusing(self, version: int) -> list[str]:
        """Return the ids of the requests in flight that do not accept `version`."""
        return [request_id for request_id, demand in self._pinned.items() if not demand.accepts(version)]

    def refuses(self, demand: VersionDemand | None) -> bool:
        """Return True if `demand` does not accept the served version, or the version of the running commit."""
        version = self.version if self._incoming is None else self._incoming
        return demand is not None and version is not None and not demand.accepts(version)

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        """See `EngineControl.drain_pinned`."""
        give_up_at = deadline_after(grace_s)
        while self.is_serving and self.refusing(version) and await self._unpinned.wait_until(give_up_at):
            pass

    # Canary check

    @property
    def is_output_held(self) -> bool:
        """True from `begin_canary` to the end of the check; after a refusal, until the next check."""
        return self._output_release is not None

    def begin_canary(self) -> bool:
        """Return True, and hold all sampled tokens, if the weights need a canary check; else return False.

        Call before any token can be sampled with new weights.
        """
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
        """End a canary check without a fault, and release held tokens."""
        release, self._output_release, self._needs_canary = self._output_release, None, False
        if release is not None and not release.done():
            release.set_result(None)

    def refuse(self) -> None:
        """Discard all held tokens, and record that the state of the weights is unknown."""
        self.version = None
        self._discard_output(EngineUnusable("the state of the engine's weights is unknown: commit a version first"))

    async def until_output_released(self) -> None:
        """Wait until the canary check ends. Raises EngineUnusable if the weights were refused, or EngineLost."""
        if self._output_release is not None:
            await asyncio.shield(self._output_release)

    def _discard_output(self, error: AgentLoopError) -> None:
        if self._output_release is not None and not self._output_release.done():
            self._output_release.set_exception(error)
            self._output_release.exception()  # mark the exception as retrieved: there may be no waiting token

    # Sleep

    def check_sleep(self, level: int, *, can_sleep: bool) -> None:
        """Raise InvalidRequest for a level other than 1 and 2, or if the engine cannot sleep."""
        if level not in (1, 2):
            raise InvalidRequest(f"invalid sleep level {level}: expected 1 or 2", param="level")
        if not can_sleep:
            raise InvalidRequest("this engine cannot sleep: only the modes hybrid and colocated support it")

    def has_to_sleep(self, level: int) -> bool:
        """Return True if the paused engine has memory to release for this level, or weights to discard."""
        self.require_alive()
        return self.asleep != ALL_MEMORY or (level == 2 and self.version is not None)

    def slept(self, level: int) -> None:
        """Record that all memory was released; at level 2 the weights are discarded."""
        self.asleep = ALL_MEMORY
        if level == 2:
            self.version, self._needs_canary = None, False

    def wakeable(self, tags: frozenset[MemoryTag]) -> frozenset[MemoryTag]:
        """Return the members of `tags` that are asleep.

        Raises Conflict for the KV cache while the weight version is unknown, and EngineLost.
        """
        self.require_alive()
        wanted = self.asleep & tags
        if MemoryTag.KV_CACHE in wanted and self.version is None:
            raise Conflict("the KV cache cannot wake while the weight version is unknown: commit a version first")
        return wanted

    def woken(self, tags: frozenset[MemoryTag]) -> None:
        """Record that memory was allocated again."""
        self.asleep -= tags

    def _move(self, phase: EnginePhase) -> None:
        if phase not in _MOVES[self.phase]:
            raise Conflict(f"the engine is {self.phase} and cannot become {phase}")
        self.phase = phase
        is_frozen = phase in (EnginePhase.FREEZING, EnginePhase.PAUSED)
        self._frozen.run(is_frozen)
        self._not_admitting.run(is_frozen or phase is EnginePhase.DRAINING)
        self.refresh()
