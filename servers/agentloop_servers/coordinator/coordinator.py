"""The coordinator: what replicas, workers and the front door call.

    FleetDesk  Fleet: who serves · Balancer: who runs where · ReplicaSync: updates and orders
    WorkDesk   RolloutQueue: what is still owed · the store: what is durable

Ownership: one event loop. The plain objects decide synchronously, the desks wait and wake, and this module owns the
tasks: the watch, which looks for silence every `heartbeat_interval_s`, and every call that must not stop half-way
(a submission, a hand-in, an update), which runs on here whatever becomes of its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from structlog.typing import FilteringBoundLogger

from agentloop.api import (
    Orders,
    Page,
    ReplicaRegistration,
    RolloutStatus,
    ServiceStatus,
    UpdateReport,
    WorkerReport,
)
from agentloop.clock import Clock
from agentloop.engine import MemoryTag, WeightUpdate
from agentloop.fleet import Connect
from agentloop.storage import TrajectoryStore
from agentloop.types import KVPolicy, Lease, Load, PauseMode, RolloutGroup, Trajectory
from agentloop_servers.coordinator.config import CoordinatorConfig
from agentloop_servers.coordinator.replicas import FleetDesk
from agentloop_servers.coordinator.rollouts import WorkDesk, session_holder
from agentloop_servers.coordinator.wakeup import Wakeup

__all__ = ["Coordinator", "CoordinatorConfig"]

T = TypeVar("T")


class Coordinator:
    """Construct, `await start()`, and in the end `await close()`, all on one event loop."""

    def __init__(
        self,
        store: TrajectoryStore,
        connect: Connect,
        config: CoordinatorConfig,
        clock: Clock,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """Takes over `store`."""
        self._config = config
        self._clock = clock
        self._log = log = structlog.get_logger("coordinator") if log is None else log
        self._store = store
        changed = Wakeup()
        self._fleet = FleetDesk(connect, config, clock, log, changed, self._store.save_weights)
        self._work = WorkDesk(self._store, self._fleet, config, clock, log, changed)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._endpoints: dict[int, str] = {}  # the private URLs of the endpoint's processes, by rank
        self._is_closed = False

    async def start(self) -> None:
        """Queue what an earlier coordinator left unfinished, and begin to watch."""
        saved = await self._store.saved_weights()
        if saved is not None:
            self._fleet.restore(*saved)
        await self._work.restore()
        self._watching = asyncio.create_task(self._watch(), name="coordinator-watch")

    async def close(self) -> None:
        """End the background tasks and close the store. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [task for task in (self._watching, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fleet.close()
        await self._store.close()

    async def check_health(self) -> None:
        """Raises what ended a background task, if something did: the coordinator must then be restarted."""
        if self._watching is not None and self._watching.done():
            self._watching.result()
        self._fleet.check_health()

    async def join_endpoint(self, rank: int, url: str) -> dict[int, str]:
        self._endpoints[rank] = url
        return dict(self._endpoints)

    # --- replicas ---

    async def register(self, registration: ReplicaRegistration) -> None:
        self._fleet.register(registration)

    async def heartbeat(self, replica_id: str, load: Load, is_usable: bool) -> bool:
        return self._fleet.heartbeat(replica_id, load, is_usable)

    async def deregister(self, replica_id: str) -> None:
        self._fleet.deregister(replica_id)

    # --- workers ---

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        return await self._work.take(report, wait_s)

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool) -> Lease:
        if is_failed:
            self._fleet.report_failure(lease)
        return await self._fleet.placed(lambda: self._work.move(assignment_id, lease, is_failed))

    async def finish(self, worker_id: str, trajectory: Trajectory) -> None:
        await self._to_its_end(self._work.finish(worker_id, trajectory), "finish")

    # --- the front door ---

    async def submit(self, rollout_id: str, groups: tuple[RolloutGroup, ...]) -> RolloutStatus:
        return await self._to_its_end(self._work.submit(rollout_id, groups), "submit")

    async def record(self, trajectory: Trajectory) -> None:
        await self._to_its_end(self._work.record(trajectory), "record")

    async def read(self, rollout_id: str, after: int, limit: int, wait_s: float) -> Page:
        return await self._work.read(rollout_id, after, limit, wait_s)

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        return await self._to_its_end(self._work.cancel(rollout_id), "cancel")

    async def lease(self, session_id: str, num_tokens: int) -> Lease:
        def grant() -> Lease:
            expires_at = self._clock.now() + self._config.direct_lease_ttl_s
            return self._fleet.balancer.acquire_direct(session_holder(session_id), num_tokens, expires_at)

        return await self._fleet.placed(grant)

    async def release(self, lease: Lease) -> None:
        self._fleet.balancer.release(lease)

    async def update_weights(self, update: WeightUpdate, kv_policy: KVPolicy | None) -> UpdateReport:
        policy = self._config.kv_policy if kv_policy is None else kv_policy
        return await self._to_its_end(self._update(update, policy), "update_weights")

    async def pause(self, mode: PauseMode) -> None:
        await self._to_its_end(self._fleet.pause(mode), "pause")

    async def resume(self) -> None:
        await self._to_its_end(self._fleet.resume(), "resume")

    async def sleep(self, level: int) -> None:
        await self._to_its_end(self._fleet.sleep(level), "sleep")

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        await self._to_its_end(self._fleet.wake(tags), "wake")

    async def status(self) -> ServiceStatus:
        return ServiceStatus(
            is_ready=self._fleet.is_ready,
            is_paused=self._fleet.is_paused,
            weight_version=self._fleet.weight_version,
            replicas=self._fleet.statuses(),
            num_workers=self._work.num_workers,
            rollouts=self._work.queue.rollouts,
            updates=self._fleet.reports,
            asleep=self._fleet.asleep,
        )

    async def _update(self, update: WeightUpdate, policy: KVPolicy) -> UpdateReport:
        with self._work.update_under_way(update.version):
            return await self._fleet.update(update, policy)

    # --- tasks ---

    async def _watch(self) -> None:
        interval_s = self._config.heartbeat_interval_s
        watched_at = self._clock.now()
        while True:
            await self._clock.sleep(interval_s)
            now = self._clock.now()
            was_stalled = now - watched_at > 2 * interval_s + 1.0
            watched_at = now
            if was_stalled:
                continue  # by our own doing: handle the heartbeats that it held up before judging anyone
            self._fleet.look(now)
            self._work.look(now)
            try:
                await self._work.write_owed()
            except Exception as error:  # the disk may come back; what is owed stays owed until then
                self._log.error("records_not_written", error=repr(error))

    async def _to_its_end(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run `work` in a task that outlives a cancelled caller, until `close`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.debug("call_failed", call=task.get_name(), error=repr(task.exception()))
