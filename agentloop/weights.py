"""The weight controller: new weights on every replica, in one order, with no token of unknown weights.

    IDLE ─► STAGING ─► PAUSING ─► COMMITTING ─► RESUMING ─► IDLE        every state ─► IDLE on failure
            decoding   all        all           those that committed
            goes on    frozen

Ownership: one object, in the coordinator's event loop. It alone asks engines to stage, pause, commit or resume;
it decides on the `Fleet` without awaits in between. Engines come from `connect` and belong to whoever made it.
Every call has a deadline. Invariants:
- a replica whose pause, commit or resume failed is quarantined and never resumed on unknown weights; `catch_up`
  brings it back through a commit of the fleet's version;
- no two of these procedures work on one replica at once (`_busy`), and operator pauses exclude the stretch from
  pause to resume (`_gate`);
- a procedure that is cut short leaves no replica in UPDATING.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from agentloop.clock import Clock
from agentloop.control import UpdateReport
from agentloop.engine import Engine, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineLost,
    InvalidRequest,
    InvariantBroken,
    NoHealthyReplica,
    WeightUpdateFailed,
)
from agentloop.fanout import Track, live, named, on_all, within
from agentloop.fleet import Fleet, Replica, ReplicaState
from agentloop.types import KVPolicy, PauseMode

Connect = Callable[[str], Engine]


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


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Deadlines of each step on one replica, and how often a late one is tried."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0
    resume_timeout_s: float = 60.0
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT runs requests to their end
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    num_reports: int = 16


class WeightController:
    """Updates, catching up, and the operator's pause."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Connect,
        clock: Clock,
        config: WeightConfig | None = None,
        on_commit: Callable[[], None] | None = None,
        on_staged: Callable[[WeightUpdate, KVPolicy], Awaitable[None]] | None = None,
    ) -> None:
        """`on_staged` is awaited once an update can only go forward: from there a restarted controller goes on
        with it (`restore`). `on_commit` is called when the fleet has begun to serve the new version."""
        self._fleet = fleet
        self._connect = connect
        self._clock = clock
        self._config = config or WeightConfig()
        self._on_commit = on_commit
        self._on_staged = on_staged
        self._state = UpdateState.IDLE
        self._idle = asyncio.Event()
        self._idle.set()
        self._gate = asyncio.Lock()
        self._busy: set[str] = set()
        self._engines: dict[str, tuple[str, Engine]] = {}  # replica id -> (url, engine)
        self._current: tuple[WeightUpdate, KVPolicy] | None = None
        self._operator_mode: PauseMode | None = None
        self._reports: deque[UpdateReport] = deque(maxlen=self._config.num_reports)

    @property
    def state(self) -> UpdateState:
        return self._state

    @property
    def is_paused(self) -> bool:
        """Whether the operator has paused the fleet."""
        return self._operator_mode is not None

    @property
    def reports(self) -> tuple[UpdateReport, ...]:
        """The latest updates, oldest first."""
        return tuple(self._reports)

    def forget(self, replica_id: str) -> None:
        """A replica is gone: drop what was kept for it."""
        self._engines.pop(replica_id, None)

    def restore(self, update: WeightUpdate, kv_policy: KVPolicy) -> None:
        """Take over what an earlier controller was bringing the fleet to; replicas catch up as they register."""
        self._current = (update, kv_policy)
        self._fleet.set_weight_version(update.version)

    # --- updates ---

    async def update(self, update: WeightUpdate, kv_policy: KVPolicy) -> UpdateReport:
        """Bring all replicas to `update`. Replicas that fail on the way are quarantined and named in the report.

        Raises InvalidRequest (a version that does not grow), Conflict (an update is going on, or the version is
        served already), NoHealthyReplica, CheckpointUnreadable (no replica can read it; nothing has changed) or
        WeightUpdateFailed (no replica took it).
        """
        tracks = self._begin(update)
        previous_version = self._fleet.weight_version
        started_at = self._clock.now()
        replica_ids = {track.replica.replica_id for track in tracks}
        self._busy |= replica_ids
        self._idle.clear()
        self._move(UpdateState.STAGING)
        try:
            await self._stage(tracks, update)
            if self._on_staged is not None:
                await self._on_staged(update, kv_policy)
            async with self._gate:
                self._move(UpdateState.PAUSING)
                await self._pause(tracks, kv_policy)
                self._move(UpdateState.COMMITTING)
                await self._commit(tracks, update, kv_policy)
                self._move(UpdateState.RESUMING)
                await self._resume(tracks)
        finally:
            for track in tracks:
                self._settle(track.replica, "the update was cut short")
            self._busy -= replica_ids
            self._move(UpdateState.IDLE)
            self._idle.set()
        report = UpdateReport(
            version=update.version,
            previous_version=previous_version,
            kv_policy=kv_policy,
            replicas=tuple(track.report() for track in tracks),
            total_ms=(self._clock.now() - started_at) * 1000.0,
        )
        self._reports.append(report)
        return report

    def _begin(self, update: WeightUpdate) -> list[Track]:
        served = self._fleet.weight_version
        if self._state is not UpdateState.IDLE:
            raise Conflict(f"a weight update is {self._state}")
        if served == update.version:
            raise Conflict(f"version {served} is what the fleet serves", param="version")
        if update.version < 0 or (served is not None and update.version < served):
            raise InvalidRequest(f"versions grow: {update.version} after {served}", param="version")
        states = (ReplicaState.READY, ReplicaState.JOINING, ReplicaState.QUARANTINED)
        reachable = [replica for replica in self._fleet.replicas if replica.state in states]
        tracks = [Track(replica) for replica in reachable if replica.replica_id not in self._busy]
        if not tracks:
            raise NoHealthyReplica("no replica can take new weights now")
        return tracks

    async def _stage(self, tracks: Sequence[Track], update: WeightUpdate) -> None:
        started_at = self._clock.now()

        async def stage(track: Track) -> None:
            await self._engine(track.replica).stage(update)
            track.stage_s = self._clock.now() - started_at

        await on_all(tracks, "stage", stage, self._config.stage_timeout_s)
        failed = [track for track in tracks if track.error is not None]
        if len(failed) == len(tracks):
            if all(isinstance(track.failure, CheckpointUnreadable) for track in failed):
                raise CheckpointUnreadable(named(failed), param="directory")
            raise WeightUpdateFailed(f"nothing has changed: {named(failed)}")
        for track in failed:
            self._fleet.quarantine(track.replica, track.error or "")

    async def _pause(self, tracks: Sequence[Track], kv_policy: KVPolicy) -> None:
        for track in live(tracks):
            if self._fleet.begin_update(track.replica) is None:
                track.error = "it left the fleet during the update"

        async def pause(track: Track) -> None:
            track.paused_at = self._clock.now()
            await self._engine(track.replica).pause(PauseMode.KEEP, kv_policy)

        await on_all(live(tracks), "pause", pause, self._config.pause_timeout_s)
        self._drop_failed(tracks)

    async def _commit(self, tracks: Sequence[Track], update: WeightUpdate, kv_policy: KVPolicy) -> None:
        for track in live(tracks):
            self._fleet.forget_version(track.replica)

        async def commit(track: Track) -> None:
            await self._engine(track.replica).commit(update.version)
            self._fleet.committed(track.replica, update.version)

        await on_all(live(tracks), "commit", commit, self._config.commit_timeout_s)
        self._drop_failed(tracks)
        self._current = (update, kv_policy)
        self._fleet.set_weight_version(update.version)
        if self._on_commit is not None:
            self._on_commit()

    async def _resume(self, tracks: Sequence[Track]) -> None:
        async def resume(track: Track) -> None:
            if not self.is_paused:
                await self._engine(track.replica).resume()
            self._fleet.admit(track.replica)
            track.end_stall(self._clock.now())

        await on_all(live(tracks), "resume", resume, self._config.resume_timeout_s)
        self._drop_failed(tracks)

    def _drop_failed(self, tracks: Sequence[Track]) -> None:
        """Quarantine those with an error; raises WeightUpdateFailed if that leaves nobody."""
        for track in tracks:
            if track.error is not None:
                track.end_stall(self._clock.now())
                self._fleet.quarantine(track.replica, track.error)
        if not live(tracks):
            raise WeightUpdateFailed(named(tracks))

    # --- catching up ---

    async def catch_up(self, replica_id: str) -> bool:
        """Bring a JOINING or QUARANTINED replica to the fleet's weights and into traffic, with retries.

        A replica that already holds them is only resumed (or paused, if the operator has paused the fleet). False
        if it is gone, or if there is no update that could bring it there: the next `update` will. Raises the
        last attempt's error.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Exception),
            stop=stop_after_attempt(self._config.max_catch_up_attempts),
            wait=wait_random_exponential(multiplier=self._config.backoff_s, max=self._config.max_backoff_s),
            sleep=self._clock.sleep,
            reraise=True,
        )
        return await retrying(self._catch_up_once, replica_id)

    async def _catch_up_once(self, replica_id: str) -> bool:
        while self._state is not UpdateState.IDLE:
            await self._idle.wait()  # bounded: every step of an update has a deadline
        replica = self._fleet.get(replica_id)
        if replica is None:
            return False
        if replica.state not in (ReplicaState.JOINING, ReplicaState.QUARANTINED):
            return replica.state is ReplicaState.READY
        served = self._fleet.weight_version
        is_current = served is not None and replica.weight_version == served
        update = None
        if not is_current or replica.state is ReplicaState.QUARANTINED:
            if self._current is None:
                return False
            update = self._current
        if replica_id in self._busy:
            raise Conflict(f"replica {replica_id} is being brought up already")
        self._busy.add(replica_id)
        try:
            is_admitted = await self._bring_up(replica, update)
        finally:
            self._busy.discard(replica_id)
            self._settle(replica, "bringing it up was cut short")
        if not is_admitted and self._fleet.get(replica_id) is not None:
            raise Conflict(f"the fleet has moved on while {replica_id} was brought up")
        return is_admitted

    async def _bring_up(self, replica: Replica, update: tuple[WeightUpdate, KVPolicy] | None) -> bool:
        engine, config = self._engine(replica), self._config
        if update is not None:
            await within(config.stage_timeout_s, engine.stage(update[0]))
        if self._fleet.begin_update(replica) is None:
            return False
        if update is not None:
            await within(config.pause_timeout_s, engine.pause(PauseMode.KEEP, update[1]))
            self._fleet.forget_version(replica)
            await within(config.commit_timeout_s, engine.commit(update[0].version))
            self._fleet.committed(replica, update[0].version)
        async with self._gate:
            if self._operator_mode is None:
                await within(config.resume_timeout_s, engine.resume())
            else:
                await within(config.operator_pause_timeout_s, engine.pause(self._operator_mode))
            return self._fleet.admit(replica)

    def _settle(self, replica: Replica, error: str) -> None:
        """After a procedure on `replica`: never UPDATING. With weights as they were it gets its state back."""
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.incarnation != replica.incarnation and now.url == replica.url:
            self._fleet.forget_version(now)  # it left and came back meanwhile: what it said may precede our commit
        if now is None or now.state is not ReplicaState.UPDATING:
            return
        is_untouched = now.weight_version == replica.weight_version and now.weight_version is not None
        if replica.state is ReplicaState.JOINING and is_untouched:
            self._fleet.put_back(replica)
        else:
            self._fleet.quarantine(replica, error)

    # --- the operator ---

    async def pause(self, mode: PauseMode) -> None:
        """Pause every replica until `resume`; replicas that join or update meanwhile end paused. Idempotent.

        Raises EngineLost naming those that did not follow; the pause holds for all others.
        """
        async with self._gate:
            self._operator_mode = mode
            await self._order("pause", lambda engine: engine.pause(mode), self._config.operator_pause_timeout_s)

    async def resume(self) -> None:
        """Undo `pause`. Idempotent. Raises EngineLost naming those that did not follow."""
        async with self._gate:
            self._operator_mode = None
            await self._order("resume", lambda engine: engine.resume(), self._config.resume_timeout_s)

    async def free_strays(self) -> tuple[str, ...]:
        """Resume READY replicas that are paused although nobody wants it, and name them.

        A pause whose caller gave up, or a copy of one, can reach an engine after the resume that was to undo it.
        A replica that does not answer is left to its heartbeats.
        """
        if self._state is not UpdateState.IDLE or self.is_paused:
            return ()
        freed: list[str] = []

        async def free(track: Track) -> None:
            engine, replica = self._engine(track.replica), track.replica
            await engine.check_health()
            if not engine.is_paused:
                return
            async with self._gate:  # nobody pauses a READY replica without it
                now = self._fleet.get(replica.replica_id)
                if now is None or now.incarnation != replica.incarnation or self.is_paused:
                    return
                if now.state is ReplicaState.READY:
                    await engine.resume()
                    freed.append(replica.replica_id)

        tracks = [Track(replica) for replica in self._fleet.replicas if replica.state is ReplicaState.READY]
        await on_all(tracks, "free", free, self._config.resume_timeout_s)
        return tuple(freed)

    async def _order(self, verb: str, ask: Callable[[Engine], Awaitable[None]], timeout_s: float) -> None:
        states = (ReplicaState.READY, ReplicaState.SUSPECT)
        tracks = [Track(replica) for replica in self._fleet.replicas if replica.state in states]

        async def follow(track: Track) -> None:
            await ask(self._engine(track.replica))

        await on_all(tracks, verb, follow, timeout_s)
        if failed := [track for track in tracks if track.error is not None]:
            raise EngineLost(named(failed))

    # --- inside ---

    def _engine(self, replica: Replica) -> Engine:
        known = self._engines.get(replica.replica_id)
        if known is None or known[0] != replica.url:
            known = (replica.url, self._connect(replica.url))
            self._engines[replica.replica_id] = known
        return known[1]

    def _move(self, state: UpdateState) -> None:
        if state not in MOVES[self._state]:
            raise InvariantBroken(f"a weight update cannot go from {self._state} to {state}")
        self._state = state
