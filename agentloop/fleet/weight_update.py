"""The weight controller: new weights on every replica, in one order, with no token of unknown weights.

    IDLE ─► STAGING ─► PAUSING ─► COMMITTING ─► RESUMING ─► IDLE        every state ─► IDLE on failure
            decoding   all        all           those that committed
            goes on    frozen

In two phases the bytes arrive while decoding goes on, and a commit only swaps; where memory does not allow that
(HeldIn.NOWHERE) they arrive in the commit. A sleeping fleet is woken by an update: its weights' memory before the
stage, the KV cache's after the commit.

Ownership: one object, in the coordinator's event loop; it owns the `FleetEngines`, through which alone engines are
asked to stage, pause, commit, resume, sleep or wake, and decides on the `Fleet` without awaits in between. Every
call has a deadline. Invariants:
- a replica whose stage, pause, commit or resume failed is quarantined and never resumed on unknown weights;
  `catch_up` brings it back through a commit of the fleet's version;
- a procedure that is cut short leaves no replica in UPDATING.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from agentloop.api import UpdateReport
from agentloop.clock import Clock
from agentloop.engine import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    InvalidRequest,
    InvariantBroken,
    NoHealthyReplica,
    WeightUpdateFailed,
)
from agentloop.fleet.catch_up import CatchUp
from agentloop.fleet.engines import Connect, FleetEngines, WeightConfig
from agentloop.fleet.parallel_step import Track, live, named, on_all
from agentloop.fleet.power import FleetPower
from agentloop.fleet.registry import Fleet, Replica, ReplicaState
from agentloop.types import KVPolicy, PauseMode

_WEIGHTS = frozenset({MemoryTag.WEIGHTS})


class UpdateState(StrEnum):
    """How far the update in progress is."""

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


class WeightController:
    """Updates, catching up, and the operator's orders."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Connect,
        clock: Clock,
        config: WeightConfig | None = None,
        on_commit: Callable[[], None] | None = None,
        on_staged: Callable[[WeightUpdate, KVPolicy], Awaitable[None]] | None = None,
        initial: tuple[WeightUpdate, KVPolicy] | None = None,
    ) -> None:
        """`on_staged` is awaited once an update can only go forward: from there a restarted controller goes on
        with it (`restore`). `on_commit` is called when the fleet has begun to serve the new version. `initial` is
        what engines load at their start."""
        self._fleet = fleet
        self._clock = clock
        self._config = config or WeightConfig()
        self._on_commit = on_commit
        self._on_staged = on_staged
        self._state = UpdateState.IDLE
        self._engines = FleetEngines(fleet, connect, clock, self._config, initial)
        self._power = FleetPower(self._engines)
        self._catch_up = CatchUp(self._engines, self._power)
        self._reports: deque[UpdateReport] = deque(maxlen=self._config.num_reports)

    @property
    def state(self) -> UpdateState:
        return self._state

    @property
    def is_paused(self) -> bool:
        """Whether the operator has paused the fleet."""
        return self._engines.operator_mode is not None

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The memory that the fleet has given back."""
        return self._engines.asleep

    @property
    def reports(self) -> tuple[UpdateReport, ...]:
        """The latest updates, oldest first."""
        return tuple(self._reports)

    def forget(self, replica_id: str) -> None:
        """A replica is gone: drop what was kept for it."""
        self._engines.forget(replica_id)

    def restore(self, update: WeightUpdate, kv_policy: KVPolicy) -> None:
        """Take over what an earlier controller was bringing the fleet to; replicas catch up as they register."""
        self._engines.current = (update, kv_policy)
        self._fleet.set_weight_version(update.version)

    async def catch_up(self, replica_id: str) -> bool:
        """Bring one late replica up: see `CatchUp.bring_up`."""
        return await self._catch_up.bring_up(replica_id)

    # --- the operator ---

    async def pause(self, mode: PauseMode) -> None:
        """Pause every replica until `resume`. Idempotent. Raises EngineLost naming those that did not follow."""
        await self._power.pause(mode)

    async def resume(self) -> None:
        """Undo `pause`. Idempotent. Raises EngineLost naming those that did not follow."""
        await self._power.resume()

    async def sleep(self, level: int) -> None:
        """Have every replica give its memory back: see `FleetPower.sleep`."""
        await self._power.sleep(level)

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory back; once all of it is, go on. Idempotent. Waits for a weight update to end.

        After a sleep(2) the weights are staged and committed again. Raises Conflict if that cannot be, EngineLost
        naming those that did not follow, or what an update raises.
        """
        engines = self._engines
        await engines.idle()
        with engines.fleet_wide("a wake"):
            replicas = engines.free(ReplicaState.ASLEEP)
            is_discarded = engines.sleep_level == 2 and not all(engines.is_current(one) for one in replicas)
            if not is_discarded:
                await self._power.wake(tags)
                return
            if MemoryTag.WEIGHTS not in tags:
                raise Conflict("the weights were discarded: wake them before the KV cache")
            served = engines.served()
            if served is None or not served[0].is_repeatable:
                raise Conflict("the weights were discarded: push new ones, which wakes the fleet")
            await self._bring(replicas, *served, tags)

    # --- updates ---

    async def update(self, update: WeightUpdate, kv_policy: KVPolicy) -> UpdateReport:
        """Bring all replicas to `update`, and wake them. Those that fail are quarantined and named in the report.

        Raises InvalidRequest (a version that does not grow, a source that engines do not know), Conflict (another
        update, a sleep or a wake is going on, or the version is served already), NoHealthyReplica,
        CheckpointUnreadable (no replica can read it; nothing has changed) or WeightUpdateFailed (no replica took
        it).
        """
        started_at, previous_version = self._clock.now(), self._fleet.weight_version
        with self._engines.fleet_wide("a weight update"):
            replicas = self._takers(update)
            if update.push is not None:
                num_receivers = sum(replica.registration.info.num_workers for replica in replicas)
                update = replace(update, push=replace(update.push, num_receivers=num_receivers))
            tracks = await self._bring(replicas, update, kv_policy, ALL_MEMORY, self._on_staged)
        report = UpdateReport(
            version=update.version,
            previous_version=previous_version,
            kv_policy=kv_policy,
            replicas=tuple(track.report() for track in tracks),
            total_ms=(self._clock.now() - started_at) * 1000.0,
        )
        self._reports.append(report)
        return report

    def _takers(self, update: WeightUpdate) -> list[Replica]:
        served = self._fleet.weight_version
        is_held = any(self._engines.is_current(replica) for replica in self._fleet.replicas)
        if served == update.version and is_held:
            raise Conflict(f"version {served} is what the fleet serves", param="version")
        if update.version < 0 or (served is not None and update.version < served):
            raise InvalidRequest(f"versions grow: {update.version} after {served}", param="version")
        replicas = self._engines.free(
            ReplicaState.READY, ReplicaState.JOINING, ReplicaState.QUARANTINED, ReplicaState.ASLEEP
        )
        if not replicas:
            raise NoHealthyReplica("no replica can take new weights now")
        return replicas

    async def _bring(
        self,
        replicas: Sequence[Replica],
        update: WeightUpdate,
        kv_policy: KVPolicy,
        tags: frozenset[MemoryTag],
        on_staged: Callable[[WeightUpdate, KVPolicy], Awaitable[None]] | None = None,
    ) -> list[Track]:
        """Take these replicas through all steps. Of what is asleep, `tags` are woken."""
        tracks = [Track(replica) for replica in replicas]
        replica_ids = {replica.replica_id for replica in replicas}
        self._engines.busy |= replica_ids
        self._move(UpdateState.STAGING)
        try:
            await self._wake_weights(tracks)
            await self._stage(tracks, update)
            if on_staged is not None:
                await on_staged(update, kv_policy)
            async with self._engines.gate:
                self._move(UpdateState.PAUSING)
                await self._pause(tracks, kv_policy)
                self._move(UpdateState.COMMITTING)
                await self._commit(tracks, update, kv_policy)
                self._move(UpdateState.RESUMING)
                await self._wake_rest(tracks, tags)
                await self._resume(tracks)
        finally:
            for track in tracks:
                self._engines.settle(track.replica, "the update was cut short")
            self._engines.busy -= replica_ids
            self._move(UpdateState.IDLE)
        return tracks

    # --- the steps ---

    async def _wake_weights(self, tracks: Sequence[Track]) -> None:
        """Memory to stage into: a replica that sleeps, or that may, takes it back."""

        async def wake(track: Track) -> None:
            await self._engines.engine(track.replica).wake(_WEIGHTS)

        await on_all(self._sleepers(tracks), "wake", wake, self._config.wake_timeout_s)
        self._engines.asleep -= _WEIGHTS

    async def _stage(self, tracks: Sequence[Track], update: WeightUpdate) -> None:
        started_at = self._clock.now()

        async def stage(track: Track) -> None:
            track.staged = await self._engines.engine(track.replica).stage(update)
            track.stage_s = self._clock.now() - started_at

        await on_all(live(tracks), "stage", stage, self._config.stage_timeout_s)
        failed = [track for track in tracks if track.error is not None]
        if len(failed) == len(tracks):
            for kind in (CheckpointUnreadable, InvalidRequest):
                if all(isinstance(track.failure, kind) for track in failed):
                    raise kind(named(failed), param="directory" if update.push is None else "push")
            raise WeightUpdateFailed(f"nothing has changed: {named(failed)}")
        for track in failed:
            self._fleet.quarantine(track.replica, track.error or "")

    async def _pause(self, tracks: Sequence[Track], kv_policy: KVPolicy) -> None:
        for track in live(tracks):
            if self._fleet.begin_update(track.replica) is None:
                track.error = "it left the fleet during the update"

        async def pause(track: Track) -> None:
            track.paused_at = self._clock.now()
            await self._engines.engine(track.replica).pause(PauseMode.KEEP, kv_policy)

        await on_all(live(tracks), "pause", pause, self._config.pause_timeout_s)
        self._drop_failed(tracks)

    async def _commit(self, tracks: Sequence[Track], update: WeightUpdate, kv_policy: KVPolicy) -> None:
        """On all at once: in one phase they receive the weights together."""
        for track in live(tracks):
            self._fleet.forget_version(track.replica)

        async def commit(track: Track) -> None:
            track.committed = await self._engines.engine(track.replica).commit(update.version)
            self._fleet.committed(track.replica, update.version)

        await on_all(live(tracks), "commit", commit, self._config.commit_timeout_s)
        self._drop_failed(tracks)
        self._engines.current = (update, kv_policy)
        self._fleet.set_weight_version(update.version)
        if self._on_commit is not None:
            self._on_commit()

    async def _wake_rest(self, tracks: Sequence[Track], tags: frozenset[MemoryTag]) -> None:
        """The memory that `stage` and `commit` did not need."""

        async def wake(track: Track) -> None:
            await self._engines.engine(track.replica).wake(tags)

        sleepers = self._sleepers(live(tracks))
        self._engines.asleep -= tags
        await on_all(sleepers, "wake", wake, self._config.wake_timeout_s)
        if not self._engines.asleep:
            self._engines.sleep_level = 0
        for track in sleepers:
            if track.error is not None:  # its weights are right: it only has to be woken
                track.end_stall(self._clock.now())
                self._fleet.rejoin(track.replica, track.error)
        if not live(tracks):
            raise WeightUpdateFailed(named(tracks))

    async def _resume(self, tracks: Sequence[Track]) -> None:
        async def resume(track: Track) -> None:
            if self._engines.asleep:
                self._fleet.fall_asleep(track.replica)
                return
            if not self.is_paused:
                await self._engines.engine(track.replica).resume()
            self._fleet.admit(track.replica)
            track.end_stall(self._clock.now())

        resuming = live(tracks)
        await on_all(resuming, "resume", resume, self._config.resume_timeout_s)
        self._drop_failed(resuming)

    def _sleepers(self, tracks: Sequence[Track]) -> list[Track]:
        """Those that are asleep, and those that may be: they were not with the others."""
        return [
            track
            for track in tracks
            if track.replica.registration.info.can_sleep
            and (self._engines.asleep or track.replica.state is not ReplicaState.READY)
        ]

    def _drop_failed(self, tracks: Sequence[Track]) -> None:
        """Quarantine those with an error; raises WeightUpdateFailed if that leaves nobody."""
        for track in tracks:
            if track.error is not None:
                track.end_stall(self._clock.now())
                self._fleet.quarantine(track.replica, track.error)
        if not live(tracks):
            raise WeightUpdateFailed(named(tracks))

    def _move(self, state: UpdateState) -> None:
        if state not in MOVES[self._state]:
            raise InvariantBroken(f"a weight update cannot go from {self._state} to {state}")
        self._state = state
