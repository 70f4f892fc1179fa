"""The coordinator: serves the calls of replicas, workers and the ingress, and owns the background tasks.

    Replicas  Fleet: replica states · Balancer: leases · ReplicaSync: updates and orders
    Rollouts  RolloutQueue: unfinished samples · the store: durable records

One event loop. The objects of the fleet and the scheduler decide synchronously; `Replicas` and `Rollouts`
implement the calls and their waits. The tasks here are the watch for silent processes, the probes of suspect
replicas, the metrics, and every call that must complete after its caller has left.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import (
    HostDrain,
    NamedAdapter,
    ServiceStatus,
    StoreStatus,
    UpdateJob,
    UpdateReport,
)
from agentloop.api.findings import degraded
from agentloop.api.flight import FlightPage
from agentloop.api.history import HistoryPage
from agentloop.api.owners import UsersNews, UserUsage
from agentloop.concurrency.aio import ChangeSignal, OwnedTasks
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import Conflict, InvalidRequest, NotFound, ServiceUnavailable, StorageFull
from agentloop.fleet.desired_state import TURN_REASON, FleetAdapters, FleetWeights, StandingOrders
from agentloop.fleet.registry import ReplicaState
from agentloop.fleet.replica_steps import Connect
from agentloop.fleet.store_follower import FollowedStore, StoreFollower
from agentloop.observability.metrics import REPORT_S, MetricsPage, SavedMetrics
from agentloop.storage.trajectory_store import METRICS, UPDATES, TrajectoryStore
from agentloop_servers.coordinator.endpoint_places import EndpointPlaces, SavedPlaces
from agentloop_servers.coordinator.history import History
from agentloop_servers.coordinator.metrics import MetricsBook, count_update
from agentloop_servers.coordinator.replicas import CoordinatorConfig, Probe, Replicas
from agentloop_servers.coordinator.rollouts import Rollouts
from agentloop_servers.coordinator.update_jobs import UpdateJobTable

FLEET_WEIGHTS = "fleet_weights"
STANDING_ORDERS = "standing_orders"
FLEET_ADAPTERS = "fleet_adapters"
FOLLOWED_VERSION = "followed_version"
ENDPOINT_PLACES = "endpoint_places"
UPDATE_JOBS = "update_jobs"
"""The keys under which the store keeps the state for the next coordinator."""


class Coordinator:
    """The coordinator of one run. Call `start` once and `close` at the end, on one event loop."""

    def __init__(
        self,
        store: TrajectoryStore,
        connect: Connect,
        config: CoordinatorConfig,
        clock: Clock,
        log: FilteringBoundLogger | None = None,
        *,
        probe: Probe,
        find_dead_nodes: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        """Takes ownership of `store`. `probe` samples a token on a suspect replica.

        `find_dead_nodes` returns the ids of dead Ray nodes; it blocks and runs in a thread.
        """
        self._find_dead_nodes = find_dead_nodes
        self._probe = probe
        self._config = config
        self._clock = clock
        self._is_encrypted = config.is_encrypted
        self._log = log = structlog.get_logger("coordinator") if log is None else log
        self._store = store
        self._tasks = OwnedTasks("coordinator")
        changed = ChangeSignal()
        save_weights = partial(store.save_state, FLEET_WEIGHTS)
        save_orders = partial(store.save_state, STANDING_ORDERS)
        save_adapters = partial(store.save_state, FLEET_ADAPTERS)
        saves = save_weights, save_orders, save_adapters
        self.replicas = Replicas(connect, config, clock, log, changed, self._tasks, *saves)
        self.rollouts = Rollouts(store, self.replicas, config, clock, log, changed, self._tasks)
        self._background: list[asyncio.Task[None]] = []
        save_places = partial(store.save_state, ENDPOINT_PLACES)
        self.places = EndpointPlaces(
            config.disk,
            config.num_endpoint_processes,
            clock.now,
            save_places,
            log,
            are_taken_over=store.is_shared,
        )
        store.time_commits(partial(self.replicas.tally.observe, "commit_seconds"))
        self.metrics_book = MetricsBook(partial(store.save_state, METRICS), clock.now)
        self._history = History()
        store_followed = config.follows if config.follows is not None and config.follows.is_followed else None
        self._follower = None if store_followed is None else self._follow(store_followed)
        save_jobs = partial(store.save_state, UPDATE_JOBS)
        self.jobs = UpdateJobTable(self.replicas, config.follows, save_jobs, self._tasks, log)
        self._saved_reports: tuple[UpdateReport, ...] = ()
        self._is_closed = False
        self.refused: Counter[int] = Counter()  # HTTP status -> calls that its server refused

    def answering(self, call: str) -> Callable[..., Awaitable[Any]]:
        """Return the method that implements a call of the ports in `api/coordinator.py`."""
        fleet, work = (self.replicas, self.replicas.groups), (self.rollouts, self)
        owners = (*fleet, *work, self.metrics_book, self.places, self.jobs, self._store)
        return cast(Callable[..., Awaitable[Any]], next(getattr(one, call) for one in owners if hasattr(one, call)))

    async def start(self) -> None:
        """Load the weights, orders and work of an earlier coordinator, and start the background tasks."""
        weights = await self._store.saved_state(FLEET_WEIGHTS, FleetWeights)
        orders = await self._store.saved_state(STANDING_ORDERS, StandingOrders)
        # The replicas of a new run wait until their model is woken
        if orders is None and self._config.begins_asleep:
            orders = StandingOrders().put_to_sleep(1, TURN_REASON, time.time())
        self._saved_reports = await self._store.saved_state(UPDATES, tuple[UpdateReport, ...]) or ()
        self.replicas.sync.restore(weights, orders, self._saved_reports)
        if (adapters := await self._store.saved_state(FLEET_ADAPTERS, FleetAdapters)) is not None:
            self.replicas.sync.adapters.restore(adapters)
        self.jobs.restore(await self._store.saved_state(UPDATE_JOBS, tuple[UpdateJob, ...]) or ())
        self.places.restore(await self._store.saved_state(ENDPOINT_PLACES, SavedPlaces))
        await self.rollouts.restore()
        self.metrics_book.restore(await self._store.saved_state(METRICS, SavedMetrics))
        self._background = [
            asyncio.create_task(self._keep_metrics(), name="coordinator-metrics"),
            asyncio.create_task(self._keep_history(), name="coordinator-history"),
            asyncio.create_task(self._watch(), name="coordinator-watch"),
            asyncio.create_task(self._probe_suspects(), name="coordinator-probe"),
        ]
        if self._follower is not None:
            self._follower.restore(await self._store.saved_state(FOLLOWED_VERSION, WeightUpdate))
            self._background.append(asyncio.create_task(self._follower.run(), name="coordinator-follow"))

    async def close(self) -> None:
        """Cancel the background tasks and close the store. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._tasks.close(cancels=True)
        await self.replicas.late.close()
        await self._save_metrics()
        await self._store.close()

    async def check_health(self) -> None:
        """Raise the error of a failed background task; the coordinator must then be restarted.

        Raises ServiceUnavailable if another coordinator has taken over the run.
        """
        if (epoch := self._store.successor) is not None:
            raise ServiceUnavailable(f"another coordinator has taken over this run (epoch {epoch})")
        for task in self._background:
            if task.done():
                task.result()
        self.replicas.late.check_health()

    async def status(self) -> ServiceStatus:
        """Return the current state of the service."""
        replicas, desired = self.replicas, self.replicas.sync.desired
        orders, now = desired.orders, time.time()
        status = ServiceStatus(
            is_ready=replicas.is_ready,
            is_paused=desired.orders.is_paused,
            weight_version=replicas.fleet.weight_version,
            replicas=replicas.statuses(),
            num_workers=self.rollouts.num_workers,
            rollouts=self.rollouts.queue.rollouts,
            updates=replicas.sync.reports,
            update=replicas.sync.progress,
            groups=replicas.groups.names,
            transfer=replicas.groups.open_transfer,
            asleep=tuple(sorted(desired.orders.asleep)),
            paused_s=max(0.0, now - orders.paused_at) if orders.is_paused else None,
            pause_reason=orders.pause_reason,
            asleep_s=max(0.0, now - orders.asleep_at) if orders.asleep else None,
            sleep_reason=orders.sleep_reason,
            starting=replicas.starts.statuses(self._clock.now()),
            lost=replicas.lost(),
            queue=replicas.waiting.status(self.rollouts.queue.num_queued),
            users=replicas.users.usage(*self.rollouts.queue.by_user(), replicas.waiting.by_user()),
            public_urls=self.places.public_urls,
            is_encrypted=self._is_encrypted,
            num_refused=self.refused.total() + replicas.num_refused,
            is_stopping=self.rollouts.is_draining,
            is_disk_full=self._store.is_full,
            store_away=self._store.away,
            drained=tuple(sorted(orders.drained)),
            unread=self.rollouts.unread(),
            store=None if self._follower is None else self._follower.status,
            adapters=replicas.sync.adapters.served,
            num_awaiting_turn=replicas.sync.num_awaiting_turn,
            holds=replicas.holds.shown(self._clock.now()),
        )
        return replace(status, degraded=degraded(status))

    async def adapters(self) -> tuple[NamedAdapter, ...]:
        """Return the adapters that are served by name."""
        return self.replicas.sync.adapters.served

    async def flight(self, limit: int, name: str = "") -> FlightPage:
        """Return the current activity of live trajectories and sessions."""
        return replace(self.rollouts.flights(limit, name), blocked=self.metrics_book.blocked())

    async def metrics(self) -> MetricsPage:
        """Return the current metrics of the service."""
        return self.metrics_book.page(await self.status(), self.rollouts.flights(1))

    async def history(self, names: tuple[str, ...], since: float) -> HistoryPage:
        """Return the metric history of the last 15 minutes."""
        return self._history.page(names, since)

    async def drain(self) -> tuple[int, int]:
        """Stop accepting and dispatching work until this process ends. Queued work is for the next one.

        Returns the number of running and of queued trajectories.
        """
        rollouts = self.rollouts.queue.rollouts
        num_running = sum(rollout.num_running for rollout in rollouts)
        if not self.rollouts.is_draining:
            self._log.info("draining", num_running=num_running)
        self.rollouts.is_draining = True
        return num_running, sum(rollout.num_queued for rollout in rollouts)

    def read_users_again(self) -> None:
        """Load the users again. If that fails, the earlier ones stay."""
        try:
            self.replicas.users.read_again()
        except InvalidRequest as error:
            self._log.error("users_not_read", error=str(error))
        else:
            self._log.info("users_read_again", num_users=len(self.replicas.users.table.limits))

    async def report_users(
        self, process_id: str, usage: tuple[UserUsage, ...], reads_again: bool = False
    ) -> UsersNews:
        """Record the open calls and sessions of users in one ingress process; with `reads_again` load the users
        first."""
        if reads_again:
            self.replicas.users.read_again()
        return self.replicas.users.report(process_id, usage)

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        """Return the reports of the last weight updates."""
        return self.replicas.sync.reports

    async def drain_host(self, host: str, is_undone: bool = False) -> HostDrain:
        """Stop new work on a host, or undo that. Returns the work that it still has."""
        replicas, running = self.replicas.fleet.replicas, self.rollouts.running_by_host()
        drained = self.replicas.sync.desired.orders.drained
        if host not in {*running, *(one.host for one in replicas), *drained}:
            raise NotFound(
                f"unknown host {host}, expected {', '.join(sorted({*running, *(r.host for r in replicas)}))}"
            )
        if not is_undone and host == self._config.head:
            raise Conflict(f"{host} cannot be drained, because it has the run's files: stop the service instead")
        # A joining, silent or quarantined replica may never take traffic, so it does not count.
        able = (ReplicaState.READY, ReplicaState.UPDATING, ReplicaState.ASLEEP)
        serving = {one.host for one in replicas if one.state in able} or {one.host for one in replicas}
        if not is_undone and host in serving and not serving - drained - {host}:
            raise Conflict(
                f"{host} is the last host with a replica in traffic: add another one before you drain it"
            )
        hosts = drained - {host} if is_undone else drained | {host}
        if hosts != drained:
            self._log.info("host_drained", host=host, is_undone=is_undone)
            await self.replicas.sync.drain(hosts)
        num_leases = sum(self.replicas.balancer.num_leases(one.replica_id) for one in replicas if one.host == host)
        return HostDrain(host, running[host], num_leases)

    async def look_at_store(self) -> StoreStatus:
        """Poll the store of published versions now. Returns the status before the poll."""
        if self._follower is None:
            raise Conflict(
                "this service does not follow a store of versions: its config has no `weights`", param="weights"
            )
        self._follower.wake()
        return self._follower.status

    def _follow(self, store: FollowedStore) -> StoreFollower:
        replicas = self.replicas

        def is_asleep() -> bool:
            return bool(replicas.sync.desired.orders.asleep)

        save = partial(self._store.save_state, FOLLOWED_VERSION)
        served, update = (lambda: replicas.fleet.weight_version), replicas.update_weights
        return StoreFollower(store, served, is_asleep, update, save, self._log)

    async def _probe_suspects(self) -> None:
        """Probe replicas in a separate task, so that waits of `_watch` do not delay it."""
        while True:
            await self._clock.sleep(self._config.probe_interval_s)
            if self._find_dead_nodes is not None:
                self.replicas.dead_nodes = await asyncio.to_thread(self._find_dead_nodes)
            await self.replicas.probe_suspects(self._probe)

    async def _keep_metrics(self) -> None:
        tally, counted, looked_at = self.replicas.tally, self.replicas.sync.reports, self._clock.now()
        while True:
            await self._clock.sleep(REPORT_S)
            passed_s, looked_at = self._clock.now() - looked_at, self._clock.now()
            orders, reports = self.replicas.sync.desired.orders, self.replicas.sync.reports
            for report in reports:
                if report not in counted:
                    count_update(tally, report)
            counted = reports
            for cause, holds in (("pause", orders.is_paused), ("sleep", bool(orders.asleep))):
                if holds:
                    tally.count("paused_seconds_total", cause, by=passed_s)
            await self._save_metrics()

    async def _save_metrics(self) -> None:
        reports = self.replicas.sync.reports
        try:
            await self.metrics_book.save()
            if reports != self._saved_reports:
                await self._store.save_state(UPDATES, reports)
                self._saved_reports = reports
        except Exception as error:  # the disk may recover
            self._log.debug("metrics_not_saved", error=repr(error))

    async def _keep_history(self) -> None:
        while True:
            samples = self.metrics_book.samples(await self.status(), self.rollouts.flights(1))
            self._history.add(time.time(), samples)
            await self._clock.sleep(self._history.interval_s)

    async def _watch(self) -> None:
        interval_s = self._config.heartbeat_interval_s
        watched_at = self._clock.now()
        while True:
            await self._clock.sleep(interval_s)
            now = self._clock.now()
            was_stalled = now - watched_at > 2 * interval_s + 1.0
            watched_at = now
            if was_stalled:
                # This process itself was blocked: handle the delayed heartbeats before replicas are declared
                # silent.
                continue
            self.replicas.tick(now)
            self.rollouts.look(now)
            self.rollouts.begin_trim(now)
            await self.replicas.sync.resolve_interrupted_update()
            try:
                await self.places.look()
                await self.rollouts.flush_pending()
                await self.replicas.sync.save_pending()
            except StorageFull as error:  # logged by the store
                self._log.debug("records_not_written", error=repr(error))
            except Exception as error:  # the disk may recover; pending writes stay pending
                self._log.error("not_written", error=repr(error))
