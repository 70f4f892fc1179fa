"""Brings late replicas, those without the fleet's weights, to these weights and into traffic, in the background.

Each late replica has one task, and is locked from the stage to the end. It stages from the fleet's own source or,
if that is gone (a finished push, a deleted folder), from another replica. Invariant: a quarantined replica returns
only after a commit of the fleet's version. With named adapters the base weights never change, so the version that
the replica reports is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog
from structlog.typing import FilteringBoundLogger
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import AgentLoopError, CheckpointUnreadable, Conflict, InvariantBroken
from agentloop.fleet.desired_state import WEIGHTS, UpdateSource
from agentloop.fleet.registry import Fleet, ReplicaRecord, ReplicaState
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.fleet.weight_update import READ_SLOWNESS

_MORE_PATIENCE = 4.0  # per attempt, so the fourth attempt has the whole stage timeout


class LateReplicas:
    """The tasks that catch late replicas up. Call `start` after every change, and `close` at the end."""

    def __init__(
        self,
        sync: ReplicaSync,
        fleet: Fleet,
        clock: Clock,
        *,
        on_change: Callable[[], None] = lambda: None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """`on_change` is called after each round of attempts."""
        self._sync = sync
        self._fleet = fleet
        self._clock = clock
        self._log = structlog.get_logger("fleet") if log is None else log
        self._on_change = on_change
        self._steps = sync.steps
        self._config = sync.config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, tuple[object, float]] = {}  # replica id -> (attempt key, next round at)

    def check_health(self) -> None:
        """Re-raise the error of a failed task. Only a bug lets a task fail."""
        for task in self._tasks.values():
            if task.done():
                task.result()

    async def close(self) -> None:
        """Cancel the tasks. Idempotent."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self) -> None:
        """Start a task for each late replica without one.

        After a failed round a replica waits until its pause ends or the inputs of an attempt change.
        """
        now = self._clock.now()
        for replica in self._fleet.behind():
            replica_id, trying = replica.replica_id, self._tried(replica)
            tried, not_before = self._not_before.get(replica_id, (None, 0.0))
            if replica_id in self._tasks or (tried == trying and now < not_before):
                continue
            running = self._run(replica_id, trying)
            self._tasks[replica_id] = asyncio.create_task(running, name=f"bring up {replica_id}")

    def forget(self, replica_id: str) -> None:
        """Clear the back-off of a replica that has registered or is gone."""
        self._not_before.pop(replica_id, None)

    async def bring_up(self, replica_id: str) -> bool:
        """Bring a JOINING or QUARANTINED replica to the fleet's weights and into traffic, with retries.

        A replica that already holds these weights is only resumed (or paused, if an operator paused the fleet).
        Returns False if the replica is gone, the fleet sleeps, or no source of the weights is left; its `error`
        then has the reason, and the next update delivers new weights. Raises the last attempt's error.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Exception),
            stop=stop_after_attempt(self._config.max_catch_up_attempts),
            wait=wait_random_exponential(multiplier=self._config.backoff_s, max=self._config.max_backoff_s),
            sleep=self._clock.sleep,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._attempt(replica_id, self._patience_s(attempt.retry_state.attempt_number))
        raise InvariantBroken("the retries ended without a result or an error")

    async def _run(self, replica_id: str, trying: object) -> None:
        try:
            is_ready = await self.bring_up(replica_id)
        except InvariantBroken:
            raise  # the failed task stays in the table for `check_health`
        except Exception as error:  # all attempts failed: the next round follows after a pause
            self._log.warning("catch_up_failed", replica=replica_id, error=repr(error))
            self._say_why(replica_id, error)
            is_ready = False
        del self._tasks[replica_id]
        replica = self._fleet.get(replica_id)
        if replica is None:
            return
        if is_ready:
            self._log.info("replica_ready", replica=replica_id, version=replica.weight_version)
        else:
            self._not_before[replica_id] = (trying, self._clock.now() + self._config.catch_up_pause_s)
        self._on_change()

    def _say_why(self, replica_id: str, error: Exception) -> None:
        replica = self._fleet.get(replica_id)
        if replica is not None and replica.error is None:
            self._fleet.note(replica, f"catching up with the fleet failed: {error or type(error).__name__}")

    def _tried(self, replica: ReplicaRecord) -> object:
        """Return everything that decides whether an attempt succeeds.

        If it changes, the next attempt starts at once.
        """
        of_replica = (replica.incarnation, replica.weight_version)
        has_peers = bool(self._fleet.placeable())
        wanted = self._fleet.weight_version, self._sync.adapters.served
        return of_replica, wanted, self._sync.desired.orders.asleep, has_peers

    def _patience_s(self, number: int) -> float:
        """Return the timeout of a stage: a straggler's in the fleet's update, multiplied with each attempt.

        The source of a late replica may be slower than the source of the fleet's update.
        """
        report, config = self._sync.desired.weights.report, self._config
        fleets_s = max((one.stage_ms / 1000.0 for one in report.replicas), default=0.0) if report else 0.0
        patience_s = config.straggler_grace_s + READ_SLOWNESS * fleets_s
        return min(config.stage_timeout_s, patience_s * _MORE_PATIENCE ** (number - 1))

    async def _attempt(self, replica_id: str, stage_timeout_s: float) -> bool:
        await self._sync.until_idle()
        replica = self._fleet.get(replica_id)
        if replica is None:
            return False
        if replica.state not in (ReplicaState.JOINING, ReplicaState.QUARANTINED):
            return replica.state is ReplicaState.READY
        with self._sync.claim([replica], "bringing it up was cut short"):
            is_serving = await self._update(replica, stage_timeout_s)
        now = self._fleet.get(replica_id)
        if is_serving is None or now is None or now.state is ReplicaState.ASLEEP:
            return False
        if not is_serving:
            raise Conflict(f"the fleet's weights changed while {replica_id} was catching up")
        return True

    async def _update(self, replica: ReplicaRecord, stage_timeout_s: float) -> bool | None:
        """Run one attempt. Returns True if the replica takes traffic now, and None if it cannot be helped yet."""
        is_asleep = bool(self._sync.desired.orders.asleep)
        # Other processes use the memory of a sleeping fleet, so a replica gets its weights after the wake.
        is_quarantined = replica.state is ReplicaState.QUARANTINED
        if is_asleep and is_quarantined:
            await self._sync.apply(replica)
            return None
        source, report = None, replica.report
        needs_weights = not is_asleep and (is_quarantined or not self._fleet.is_current(replica))
        if needs_weights and replica.registration.info.max_loras is not None:
            version = self._fleet.held_version(replica.registration, report.load.weight_version)
            # A commit cannot replace base weights here, because adapters were loaded for them.
            if report.load.weight_version is not None and version is None:
                note = (
                    f"its model folder differs from the fleet's: it has digest {replica.registration.weight_digest}"
                )
                self._fleet.note(replica, f"{note}, expected {self._fleet.weight_digest}; restore the folder")
                return None
            if report.is_usable and version is not None:
                self._fleet.committed(replica, version)  # the engine loaded them at its start
        elif needs_weights:
            source = await self._staged(replica, stage_timeout_s)
            if source is None:
                return None
            await self._steps.drain_pinned(replica, source.version)
        if self._fleet.begin_update(replica) is None:
            return False
        if source is not None:
            await self._steps.pause_for_commit(replica, source.kv_policy)
            await self._steps.commit(replica, source.version)
        return await self._sync.apply(replica)

    async def _stage(self, replica: ReplicaRecord, update: WeightUpdate, timeout_s: float) -> None:
        await self._steps.wake(replica, WEIGHTS)  # it may have been unreachable when the fleet woke
        await self._steps.stage(replica, update, timeout_s)

    # Sources of the weights

    async def _staged(self, replica: ReplicaRecord, timeout_s: float) -> UpdateSource | None:
        """Stage the fleet's weights on a replica. Returns their source, or None if no source is left.

        If the folder is gone or has changed, or the weights were pushed, another replica sends them. The record's
        `error` lists the sources that failed. Raises the last stage's error.
        """
        served = self._sync.served_source()
        if served is None:
            return None
        refusals, failure = [], None
        if served.update.is_repeatable:
            try:
                await self._stage(replica, served.update, timeout_s)
                return served
            except CheckpointUnreadable as error:
                failure = error
                refusals.append(error.message)
        for peer in self._peers(replica):
            try:
                relayed = await self._relayed(served.update, peer, replica)
            except (AgentLoopError, TimeoutError, OSError) as error:
                refusals.append(f"{peer.replica_id}: {error or 'no answer'}")
                continue
            await self._stage(replica, relayed, timeout_s)
            return replace(served, update=relayed)
        if self._sync.served_source() != served:
            raise Conflict("the fleet's weights changed while its replicas prepared to send them")
        tried = "; ".join(refusals) or "no peer"
        origin = "cannot be read" if served.update.is_repeatable else "was pushed"
        self._fleet.note(replica, f"version {served.version} {origin}, and no replica can send it ({tried})")
        if failure is not None:
            raise failure
        return None

    def _peers(self, replica: ReplicaRecord) -> list[ReplicaRecord]:
        """Return the replicas that can send the fleet's weights to `replica`, those on its host first.

        They need the same engine and the same parallelism.
        """
        info = replica.registration.info
        peers = [
            peer
            for peer in self._fleet.placeable()
            if peer.replica_id != replica.replica_id
            and peer.weight_version == self._fleet.weight_version  # a held one may have an older version
            and peer.registration.entry == replica.registration.entry
            and peer.registration.info.name == info.name
            and peer.registration.info.num_workers == info.num_workers
        ]
        return sorted(peers, key=lambda peer: peer.host != replica.host)

    async def _relayed(self, served: WeightUpdate, peer: ReplicaRecord, replica: ReplicaRecord) -> WeightUpdate:
        """Make an update that `replica` stages from `peer`.

        Raises Conflict if the peer cannot send its weights.
        """
        offer = await self._steps.offer(peer)
        if offer is None:
            raise Conflict("its engine cannot send its weights")
        now = self._fleet.get(peer.replica_id)
        if now is None or not now.weight_version == served.version == self._fleet.weight_version:
            raise Conflict("its weights changed while it prepared to send them")
        push = replace(offer, num_receivers=replica.registration.info.num_workers)
        return WeightUpdate(served.version, push=push, is_forced=served.is_forced, digest=served.digest)
