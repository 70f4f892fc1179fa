"""Replicas: the coordinator's interface to replicas and operators, and the leases of slots on replicas.

Owns the Fleet (replica states), the Balancer (leases), the ReplicaSync (updates and orders), the LateReplicas and
the Starts (admission of replica starts). It notifies `changed` whenever slots may have become free or used.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import (
    AdapterPush,
    LostReplica,
    ReplicaHold,
    ReplicaRegistration,
    ReplicaReport,
    ReplicaStatus,
    UpdateReport,
)
from agentloop.api.owners import UserTable
from agentloop.concurrency.aio import ChangeSignal, OwnedTasks, deadline_after, to_its_end
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.errors import AgentLoopError, EngineLost, InvalidRequest, InvariantBroken, ServiceUnavailable
from agentloop.fleet.desired_state import FleetAdapters, FleetWeights, StandingOrders
from agentloop.fleet.holds import Holds
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, FleetConfig, ReplicaRecord, ReplicaState
from agentloop.fleet.replica_steps import Connect, WeightConfig
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.fleet.starts import Starts
from agentloop.fleet.store_follower import FollowedStore
from agentloop.fleet.trainer_groups import TrainerGroups
from agentloop.observability.metrics import MetricsTally
from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.dispatch_order import UserTurns
from agentloop.scheduling.staleness_budget import FleetVersions
from agentloop.scheduling.waiting import Waiting, WaitingConfig
from agentloop.storage.retention import RetentionPolicy
from agentloop.types import KVPolicy, Lease, PauseMode
from agentloop.values.capabilities import features_of
from agentloop_servers.cluster.host import software_of_process

Probe = Callable[[str], Awaitable[None]]
"""Samples one token on the replica at a URL. Raises the error if that fails."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The limits and deadlines of the control plane. All are finite."""

    kv_policy: KVPolicy = KVPolicy.RECOMPUTE  # for updates without a policy
    initial_weights: WeightUpdate | None = None  # the weights that engines load at their start, with their version
    begins_asleep: bool = False  # True for a new run whose models start one after another
    max_queued_trajectories: int = 100_000
    max_queued_bytes: int = 1 << 30  # the size of unfinished tasks, with images
    max_attempts: int = 3  # per trajectory, counting lost workers
    max_page: int = 1000
    heartbeat_interval_s: float = 1.0
    # A worker without a call for this long is lost; `take` waits at most half as long
    worker_timeout_s: float = 15.0
    worker_cut_s: float = 3.0  # the same after its connection broke while it waited for work
    max_wait_s: float = 60.0  # longest wait of a `read`
    # Longest wait of a call for a lease; shorter than the caller's deadline (`CoordinatorClient`)
    placement_wait_s: float = 20.0
    # After a restart: the time for workers to report running samples, before these are dispatched again
    restart_grace_s: float = 10.0
    probe_interval_s: float = 5.0  # between probes of suspect replicas
    probe_timeout_s: float = 10.0
    num_lost_shown: int = 16
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    retention_interval_s: float = 10.0
    fleet: FleetConfig = field(default_factory=FleetConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    waiting: WaitingConfig = field(default_factory=WaitingConfig)
    read_users: Callable[[], UserTable] = UserTable
    weights: WeightConfig = field(default_factory=WeightConfig)
    head: str = ""  # address of the host that has the run
    disk: str = ""  # the disk that has the run
    num_endpoint_processes: int = 0  # on all hosts
    is_encrypted: bool = False  # private connections use TLS
    follows: FollowedStore | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest unless the deadlines are consistent."""
        if not 2 * self.heartbeat_interval_s <= self.worker_cut_s <= self.worker_timeout_s / 2:
            raise InvalidRequest(
                "worker_cut_s must be at least 2 * heartbeat_interval_s and at most worker_timeout_s / 2",
                param="worker_cut_s",
            )


class Replicas:
    """Implements ReplicaPort and FleetPort. Call `tick` every heartbeat interval, and close `late` at the end."""

    def __init__(
        self,
        connect: Connect,
        config: CoordinatorConfig,
        clock: Clock,
        log: FilteringBoundLogger,
        changed: ChangeSignal,
        tasks: OwnedTasks,
        on_weights: Callable[[FleetWeights], Awaitable[None]],
        on_orders: Callable[[StandingOrders], Awaitable[None]],
        on_adapters: Callable[[FleetAdapters], Awaitable[None]],
    ) -> None:
        self.tasks = tasks
        self._config = config
        self._clock = clock
        self._log = log
        self._changed = changed
        self.tally = MetricsTally()  # the coordinator's own counters
        self.fleet = Fleet(config.fleet)
        self.balancer = Balancer(self.fleet, config.balancer)
        self.users = UserTurns(config.read_users, clock)
        self.waiting = Waiting(self.fleet, self.balancer, config.waiting, clock, changed, self.users)
        self.sync = ReplicaSync(
            self.fleet,
            connect,
            clock,
            config.weights,
            initial=None if config.initial_weights is None else (config.initial_weights, config.kv_policy),
            on_weights=on_weights,
            on_orders=on_orders,
            on_adapters=on_adapters,
            on_change=self._fleet_changed,
            log=log,
        )
        self.holds = Holds(self.fleet, log)
        self.starts = Starts()
        self._lost: deque[tuple[str, str, float]] = deque(maxlen=config.num_lost_shown)  # replica id, reason, time
        self._entry_of: dict[str, str] = {}  # replica id -> engine pool
        self._num_missing: Counter[str] = Counter()  # engine pool -> replicas that left and were not replaced
        self.groups = TrainerGroups(self.fleet, self.sync.steps, clock, self.update_weights)
        self.late = LateReplicas(self.sync, self.fleet, clock, on_change=self._fleet_changed, log=log)
        # Versions of running updates, briefly including refused ones.
        self._coming: list[int] = []
        self._epoch_version: int | None = None  # the version that the balancer received last
        self.dead_nodes: frozenset[str] = frozenset()  # nodes that Ray declared dead: Ray will end their processes

    @property
    def is_ready(self) -> bool:
        """True if a replica takes traffic."""
        return bool(self.fleet.placeable())

    @property
    def versions(self) -> FleetVersions:
        """The fleet's served versions, and the version of a running update."""
        fleet = self.fleet
        return FleetVersions(fleet.weight_version, fleet.coming_version, fleet.adapters, fleet.held_versions)

    # Registration and reports

    async def starting(self, replica_id: str, software: str) -> bool:
        if software != (own := software_of_process()):
            raise InvalidRequest(
                f"replica {replica_id} runs {software}, the service {own}: install the same versions",
                param="software",
            )
        return self.starts.ask(replica_id, self._clock.now(), is_asleep=bool(self.sync.desired.orders.asleep))

    async def register(self, registration: ReplicaRegistration) -> None:
        if registration.node_id in self.dead_nodes:
            raise ServiceUnavailable(f"Ray has declared the host of replica {registration.replica_id} dead")
        has_started = self.starts.ended(registration.replica_id)
        known = self.fleet.get(registration.replica_id)
        replica = self.fleet.register(registration, self._clock.now())
        if known is None:
            entry = self._entry_of[replica.replica_id] = registration.entry
            reason = "replacement" if self._num_missing[entry] else "new"
            self._num_missing[entry] -= reason == "replacement"
            self.tally.count("replica_starts_total", entry, reason if has_started else "return")
        elif known.incarnation != replica.incarnation:
            self.balancer.drop_replica(replica.replica_id)
        self._log.info("replica_registered", replica=replica.replica_id, version=registration.weight_version)
        self.late.forget(replica.replica_id)
        self.sync.keep_digest()
        self._fleet_changed()

    async def heartbeat(self, replica_id: str, report: ReplicaReport) -> bool:
        before = self.fleet.get(replica_id)
        if before is not None and before.registration.node_id in self.dead_nodes:
            return True  # ignored: Ray has declared the node dead
        if report.is_noise and before is not None and not before.report.is_noise:
            self.tally.count("logprob_problems_total")
        is_known = self.fleet.heartbeat(replica_id, report, self._clock.now(), self.sync.ordered_pause)
        after = self.fleet.get(replica_id)
        if before is not None and after is not None and before.state is not after.state:
            self._log.info("replica_state", replica=replica_id, state=after.state, before=before.state)
            self._fleet_changed()
        return is_known

    async def deregister(self, replica_id: str, reason: str = "") -> None:
        self.starts.ended(replica_id)
        if self.fleet.deregister(replica_id):
            self._forget(replica_id, reason or "it shut down")

    def tick(self, now: float) -> None:
        """Remove silent replicas and starts, end expired holds and leases, and adapt the KV share."""
        for replica_id in self.fleet.expire(now):
            self._forget(replica_id, "it sent no report")
        self.holds.expire(now)
        self.starts.expire(now)
        self.balancer.expire(now)
        self.balancer.look(now)
        self._fleet_changed()

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Return one row per replica."""
        now = self._clock.now()
        uses = {replica.replica_id: self.balancer.kv_use(replica.replica_id) for replica in self.fleet.replicas}
        return tuple(
            ReplicaStatus(
                replica_id=replica.replica_id,
                state=replica.state.value,
                engine=replica.registration.info.name,
                weight_version=replica.weight_version,
                load=replica.report.load,
                num_leases=self.balancer.num_leases(replica.replica_id),
                heartbeat_age_s=now - replica.seen_at,
                num_workers=replica.registration.info.num_workers,
                weight_dtype=replica.registration.info.weight_dtype,
                error=replica.error,
                is_paused=replica.report.is_paused,
                asleep=tuple(sorted(replica.report.asleep)),
                kv_predicted_tokens=uses[replica.replica_id].predicted_tokens,
                kv_limit_tokens=uses[replica.replica_id].limit_tokens,
                kv_hit_rate=uses[replica.replica_id].hit_rate,
                is_thrashing=uses[replica.replica_id].is_thrashing,
                entry=replica.registration.entry,
                features=features_of(replica.registration.info.can.features),
                max_context_tokens=replica.registration.info.max_context_tokens,
                lora_rank=replica.registration.info.lora_rank,
                max_loras=replica.registration.info.max_loras,
                quantization=replica.registration.info.quantization,
                is_noise=replica.report.is_noise,
                host=replica.host,
            )
            for replica in self.fleet.replicas
        )

    @property
    def num_refused(self) -> int:
        """The private calls and connections that the present replicas have refused."""
        return sum(replica.report.num_refused for replica in self.fleet.replicas)

    def lost(self) -> tuple[LostReplica, ...]:
        """Return the replicas that left most recently, oldest first."""
        now = self._clock.now()
        return tuple(LostReplica(replica_id, reason, now - lost_at) for replica_id, reason, lost_at in self._lost)

    async def probe_suspects(self, probe: Probe) -> None:
        """Probe each replica that is SUSPECT because of failed calls. One that answers takes traffic again."""
        if self.sync.desired.orders.is_paused or self.sync.desired.orders.asleep:
            return  # no engine samples
        async with asyncio.TaskGroup() as group:
            for replica in self.fleet.to_probe():
                group.create_task(self._probe_one(replica, probe), name=f"probe {replica.replica_id}")

    async def _probe_one(self, replica: ReplicaRecord, probe: Probe) -> None:
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                await probe(replica.url)
        except InvariantBroken:
            raise
        except Exception as error:  # the probe fails like the calls before
            self._log.info("replica_not_proved", replica=replica.replica_id, error=repr(error))
        else:
            self.fleet.probe_answered(replica)
            self._log.info("replica_proved", replica=replica.replica_id)
            self._fleet_changed()

    # Leases

    def report_failure(self, lease: Lease) -> None:
        """Count a failed call, unless its lease has ended."""
        replica, callers = self.fleet.get(lease.replica_id), self.balancer.callers(lease)
        if replica is not None and replica.url == lease.url and callers:
            is_shared = len(callers) > 1
            self.fleet.report_failure(lease.replica_id, self._clock.now(), callers[0], is_shared=is_shared)

    def end_lease(self, holder_id: str, num_tokens: int | None = None) -> None:
        """Release a holder's lease, if it has one."""
        lease = self.balancer.lease_of(holder_id)
        if lease is not None:
            self.balancer.release(lease, num_tokens, self._clock.now())
            self.waiting.changed()

    # Weights

    @to_its_end
    async def update_weights(
        self, update: WeightUpdate, kv_policy: KVPolicy | None = None, force: bool = False
    ) -> UpdateReport:
        return await self.run_update(update, kv_policy, force)

    async def run_update(
        self, update: WeightUpdate, kv_policy: KVPolicy | None = None, force: bool = False
    ) -> UpdateReport:
        """Update the weights. Cancelling the caller ends the update: only while `ReplicaSync.may_end_early`."""
        policy = self._config.kv_policy if kv_policy is None else kv_policy
        with self._update_under_way(update.version):
            try:
                report = await self.sync.update_weights(update, policy, force)
                policy = report.kv_policy
                return report
            except AgentLoopError:
                self.tally.count("weight_updates_total", "failed", "")
                raise
            finally:
                self._follow_version(policy)
                for replica in self.fleet.replicas:
                    if replica.state is ReplicaState.QUARANTINED:
                        self.balancer.drop_replica(replica.replica_id)
                        self._log.warning("replica_quarantined", replica=replica.replica_id, error=replica.error)

    @to_its_end
    async def push_adapter(self, push: AdapterPush) -> UpdateReport:
        try:
            report = await self.sync.push_adapter(push)
        except AgentLoopError:
            self.tally.count("weight_updates_total", "failed", "")
            raise
        if report.version != report.previous_version:  # otherwise a repeated push, which flushed no KV
            self.balancer.new_epoch(is_flushed=True, adapter=push.name)
        return report

    @to_its_end
    async def unload_adapter(self, name: str) -> None:
        await self.sync.unload_adapter(name)

    async def hold(self, hold_id: str, num_replicas: int, timeout_s: float, lease_s: float) -> ReplicaHold:
        await self.sync.until_idle()  # no await from here on: an update changes the replicas that it has begun with
        now = self._clock.now()
        return self.holds.begin(hold_id, num_replicas, timeout_s, lease_s, now, self.balancer.num_leases)

    async def renew_hold(self, hold_id: str, lease_s: float) -> ReplicaHold:
        shown = self.holds.renew(hold_id, lease_s, self._clock.now())
        self._fleet_changed()
        return shown

    @to_its_end
    async def pause(self, mode: PauseMode, reason: str = "") -> None:
        await self.sync.pause(mode, reason)

    @to_its_end
    async def resume(self) -> None:
        await self.sync.resume()

    @to_its_end
    async def sleep(self, level: int, reason: str = "") -> None:
        """Put the fleet to sleep. Replicas that are still starting sleep as soon as they have joined.

        Raises EngineLost with the names of replicas that have not joined by the deadline; they sleep later.
        """
        await self.sync.sleep(level, reason)
        starting = set(self.starts.under_way)
        deadline_at = deadline_after(self._config.weights.sleep_timeout_s)
        while awake := [one for one in starting if one in self.starts.under_way or self._is_awake(one)]:
            if not await self._changed.wait_until(deadline_at):
                raise EngineLost(
                    f"the fleet sleeps, except for replicas that are still starting: {', '.join(sorted(awake))}"
                )

    @to_its_end
    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        had_kv = MemoryTag.KV_CACHE not in self.sync.desired.orders.asleep
        await self.sync.wake(tags)
        if not had_kv and MemoryTag.KV_CACHE not in self.sync.desired.orders.asleep:
            self.balancer.new_epoch(is_flushed=True)

    @contextmanager
    def _update_under_way(self, version: int) -> Iterator[None]:
        """Within the block, start no sample that the update would make too stale. Wakes workers afterwards."""
        self._coming.append(version)
        self.fleet.coming_version = max(self._coming)
        try:
            yield
        finally:
            self._coming.remove(version)
            self.fleet.coming_version = max(self._coming, default=None)
            self._changed.notify()

    def _follow_version(self, policy: KVPolicy) -> None:
        """Report new weights to the balancer once the fleet serves them."""
        version = self.fleet.weight_version
        if version is not None and version != self._epoch_version:
            self._epoch_version = version
            self.balancer.new_epoch(is_flushed=policy is not KVPolicy.KEEP)

    async def until_joined(self, deadline_at: float) -> None:
        """Wait until a replica has joined, at most until the loop time `deadline_at`."""
        while not self.fleet.replicas and await self._changed.wait_until(deadline_at):
            pass

    def _is_awake(self, replica_id: str) -> bool:
        replica = self.fleet.get(replica_id)
        if replica is None:
            return False
        return replica.state is not ReplicaState.ASLEEP and replica.report.asleep != ALL_MEMORY

    def _forget(self, replica_id: str, reason: str) -> None:
        self._log.warning("replica_gone", replica=replica_id, reason=reason)
        self._num_missing[self._entry_of.pop(replica_id)] += 1
        self._lost.append((replica_id, reason, self._clock.now()))
        self.balancer.drop_replica(replica_id)
        self.late.forget(replica_id)
        self._fleet_changed()

    def _fleet_changed(self) -> None:
        """Wake requests that wait for a lease, and start the tasks of late replicas."""
        self._changed.notify()
        if self.is_ready:
            self.waiting.fleet_changed()
        self.late.start()
