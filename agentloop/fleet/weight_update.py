"""One weight update: new weights on a set of replicas, in one order, with no token of unknown weights.

    IDLE ─► STAGING ─► PAUSING ─► COMMITTING ─► RESUMING ─► IDLE        every state ─► IDLE on failure
            decoding   all        all           those that committed
            goes on    frozen

In two phases the bytes arrive while decoding goes on, and a commit only swaps; where memory does not allow that
(HeldIn.NOWHERE) they arrive in the commit. A sleeping fleet is woken by an update: its weights' memory before the
stage, the KV cache's after the commit.

Ownership: a `FleetUpdate` belongs to the `ReplicaSync` that made it, which calls its steps and writes the desired
state in between. The steps decide on the `Fleet` without awaits in between, and every call to an engine has a
deadline. Invariant: a replica whose stage, pause, commit or resume failed is quarantined and never resumed on
unknown weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentloop.clock import Clock
from agentloop.engine import EngineControl, MemoryTag, WeightUpdate
from agentloop.errors import CheckpointUnreadable, InvalidRequest, InvariantBroken, WeightUpdateFailed
from agentloop.fleet.desired_state import WEIGHTS
from agentloop.fleet.parallel_step import ReplicaProgress, failures, on_all, unfailed
from agentloop.fleet.registry import Fleet, ReplicaRecord, ReplicaState
from agentloop.types import KVPolicy, PauseMode


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Deadlines of each step on one replica, and how often a late one is tried."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0  # in one phase the commit transfers
    resume_timeout_s: float = 60.0
    sleep_timeout_s: float = 120.0
    wake_timeout_s: float = 120.0
    offer_timeout_s: float = 30.0
    save_timeout_s: float = 5.0  # of an order, into the store; the fleet obeys also one that is not saved
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT runs requests to their end
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    catch_up_pause_s: float = 60.0  # between two rounds of such attempts
    num_reports: int = 16


class UpdateState(StrEnum):
    """Progress of the update under way."""

    IDLE = "idle"
    STAGING = "staging"
    PAUSING = "pausing"
    COMMITTING = "committing"
    RESUMING = "resuming"


MOVES: Mapping[UpdateState, frozenset[UpdateState]] = {
    UpdateState.IDLE: frozenset({UpdateState.STAGING}),
    UpdateState.STAGING: frozenset({UpdateState.PAUSING, UpdateState.IDLE}),
    UpdateState.PAUSING: frozenset({UpdateState.COMMITTING, UpdateState.IDLE}),
    UpdateState.COMMITTING: frozenset({UpdateState.RESUMING, UpdateState.IDLE}),
    UpdateState.RESUMING: frozenset({UpdateState.IDLE}),
}


class FleetUpdate:
    """One update on its way. Call its steps in order, and `end` whatever happened.

    A step raises if it leaves no replica to go on with: WeightUpdateFailed, from `stage` also CheckpointUnreadable
    or InvalidRequest if that is what every replica says.
    """

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[str], EngineControl],
        clock: Clock,
        config: WeightConfig,
        replicas: Sequence[ReplicaRecord],
    ) -> None:
        self.progress = [ReplicaProgress(replica) for replica in replicas]
        self._fleet = fleet
        self._connect = connect
        self._clock = clock
        self._config = config
        self._state = UpdateState.IDLE

    @property
    def state(self) -> UpdateState:
        return self._state

    async def wake_weights(self, asleep: frozenset[MemoryTag]) -> None:
        """Take back the memory to stage into, of a fleet that has given back `asleep`."""
        self._move(UpdateState.STAGING)

        async def wake(one: ReplicaProgress) -> None:
            await self._connect(one.replica.url).wake(WEIGHTS)

        await on_all(_sleepers(self.progress, asleep), "wake", wake, self._config.wake_timeout_s)

    async def stage(self, update: WeightUpdate) -> None:
        """Have the weights received and checked while decoding goes on. Nothing has changed if it raises."""
        started_at = self._clock.now()

        async def stage(one: ReplicaProgress) -> None:
            one.staged = await self._connect(one.replica.url).stage(update)
            one.stage_s = self._clock.now() - started_at

        await on_all(unfailed(self.progress), "stage", stage, self._config.stage_timeout_s)
        failed = [one for one in self.progress if one.error is not None]
        if len(failed) == len(self.progress):
            for kind in (CheckpointUnreadable, InvalidRequest):
                if all(isinstance(one.failure, kind) for one in failed):
                    raise kind(failures(failed), param="directory" if update.push is None else "push")
            raise WeightUpdateFailed(f"nothing has changed: {failures(failed)}")
        for one in failed:
            self._fleet.quarantine(one.replica, one.error or "")

    async def pause(self, kv_policy: KVPolicy) -> None:
        """Take all replicas out of traffic and freeze them."""
        self._move(UpdateState.PAUSING)
        for one in unfailed(self.progress):
            if self._fleet.begin_update(one.replica) is None:
                one.error = "it left the fleet during the update"

        async def pause(one: ReplicaProgress) -> None:
            one.paused_at = self._clock.now()
            await self._connect(one.replica.url).pause(PauseMode.KEEP, kv_policy)

        await on_all(unfailed(self.progress), "pause", pause, self._config.pause_timeout_s)
        self._drop_failed(self.progress)

    async def commit(self, version: int) -> None:
        """Swap on all replicas at once: in one phase they receive the weights together."""
        self._move(UpdateState.COMMITTING)
        for one in unfailed(self.progress):
            self._fleet.forget_version(one.replica)

        async def commit(one: ReplicaProgress) -> None:
            one.committed = await self._connect(one.replica.url).commit(version)
            self._fleet.committed(one.replica, version)

        await on_all(unfailed(self.progress), "commit", commit, self._config.commit_timeout_s)
        self._drop_failed(self.progress)

    async def wake_rest(self, asleep: frozenset[MemoryTag], tags: frozenset[MemoryTag]) -> None:
        """Take back the memory that `stage` and `commit` did not need: of a fleet that has given back `asleep`."""
        self._move(UpdateState.RESUMING)

        async def wake(one: ReplicaProgress) -> None:
            await self._connect(one.replica.url).wake(tags)

        sleepers = _sleepers(unfailed(self.progress), asleep)
        await on_all(sleepers, "wake", wake, self._config.wake_timeout_s)
        for one in sleepers:
            if one.error is not None:  # its weights are right: it only has to be woken
                one.end_stall(self._clock.now())
                self._fleet.rejoin(one.replica, one.error)
        if not unfailed(self.progress):
            raise WeightUpdateFailed(failures(self.progress))

    async def resume(self, *, is_asleep: bool, is_paused: bool) -> None:
        """Have all replicas go on, or stay asleep or paused as the fleet is."""

        async def resume(one: ReplicaProgress) -> None:
            if is_asleep:
                self._fleet.fall_asleep(one.replica)
                return
            if not is_paused:
                await self._connect(one.replica.url).resume()
            self._fleet.admit(one.replica)
            one.end_stall(self._clock.now())

        resuming = unfailed(self.progress)
        await on_all(resuming, "resume", resume, self._config.resume_timeout_s)
        self._drop_failed(resuming)

    def end(self) -> None:
        self._move(UpdateState.IDLE)

    def _drop_failed(self, progress: Sequence[ReplicaProgress]) -> None:
        """Quarantine those with an error. Raises WeightUpdateFailed if none is left."""
        for one in progress:
            if one.error is not None:
                one.end_stall(self._clock.now())
                self._fleet.quarantine(one.replica, one.error)
        if not unfailed(progress):
            raise WeightUpdateFailed(failures(progress))

    def _move(self, state: UpdateState) -> None:
        if state not in MOVES[self._state]:
            raise InvariantBroken(f"a weight update cannot go from {self._state} to {state}")
        self._state = state


def _sleepers(progress: Sequence[ReplicaProgress], asleep: frozenset[MemoryTag]) -> list[ReplicaProgress]:
    """Return the replicas that are asleep, and those that may be because they were not with the others."""
    return [
        one
        for one in progress
        if one.replica.registration.info.can_sleep and (asleep or one.replica.state is not ReplicaState.READY)
    ]
