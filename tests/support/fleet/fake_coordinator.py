"""A coordinator in memory, as its callers see it: clients, workers, sessions and trainers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from agentloop.api.annotations import AnnotatedRecord, SampleAnnotation
from agentloop.api.coordinator import (
    AdapterPush,
    EncodedPage,
    HostDrain,
    JobState,
    LeaseOrders,
    LeaseReport,
    NamedAdapter,
    Orders,
    Refusal,
    ReplicaHold,
    ReplicaStatus,
    ReplicaUpdate,
    RolloutStatus,
    RolloutTerms,
    ServiceStatus,
    StoreStatus,
    UpdateJob,
    UpdateJobs,
    UpdateReport,
    WorkerReport,
)
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import FactsPage, FactsQuery, FactsTotal, RecordFacts
from agentloop.api.flight import FlightPage
from agentloop.api.history import HistoryPage
from agentloop.api.owners import UsersNews, UserUsage, own_id, owner_of, possible_ids
from agentloop.engine.interface import (
    ALL_MEMORY,
    GroupInit,
    MemoryTag,
    PublishedSource,
    PullVersion,
    TransferPart,
    WeightUpdate,
)
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    NoHealthyReplica,
    NotFound,
    Overloaded,
    ServiceUnavailable,
)
from agentloop.observability.metrics import MetricsPage, MetricsReport
from agentloop.scheduling.dispatch_order import UserTurns
from agentloop.storage import facts
from agentloop.types import (
    Assignment,
    KVPolicy,
    Lease,
    Load,
    PauseMode,
    RolloutGroup,
    RolloutTask,
    StalenessLimit,
    Trajectory,
)
from agentloop.values import codec
from agentloop.values.capabilities import NO_NEEDS, Needs
from agentloop.values.codec import encode
from agentloop_servers.coordinator.metrics import of_status
from tests.support.records.samples import make_trajectory


class FakeCoordinator:
    """The coordinator's ports without a fleet.

    Clients: every accepted sample is finished at once, unless `is_holding`; queue capacity is counted in groups.
    Sessions: every lease is on a new replica. Workers: the samples of `tasks` are assigned to `urls` in rotation,
    and `move` chooses the next URL that is not in `dead`; `is_done` is set once `records` has all of them.
    """

    def __init__(
        self,
        tasks: Sequence[RolloutTask] = (),
        urls: Sequence[str] = ("sim://a",),
        num_samples: int = 1,
        staleness: StalenessLimit | None = None,
    ) -> None:
        self.groups: dict[str, dict[str, RolloutGroup]] = {}
        self.finished: dict[str, list[Trajectory]] = {}
        self.terms: dict[str, RolloutTerms] = {}
        self.acknowledged: dict[str, int] = {}
        self.leases: dict[str, Lease] = {}
        self.held: dict[str, Lease] = {}  # session or call -> its latest lease
        self.num_leased = 0
        self.has_room = True
        self.num_refused = 0  # leases refused for lack of capacity
        self.moved: list[tuple[str, Lease, bool]] = []
        self.reports: list[LeaseReport] = []  # without duplicates
        self.report_delay_s = 0.0
        self.report_errors: list[AgentLoopError] = []
        self.is_answer_lost = False  # the answer to the next report is lost
        self.next_orders = LeaseOrders()
        self.updates: list[tuple[WeightUpdate, KVPolicy | None]] = []
        self.submitted: list[tuple[str, int]] = []
        self.listed: list[FactsQuery] = []
        self.annotated: list[tuple[SampleAnnotation, ...]] = []
        self.paused: PauseMode | None = None
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.sleep_levels: list[int] = []
        self.weight_dtypes: list[str | None] = [None]  # one per replica
        self.replica_error: str | None = None
        self.on_update: Callable[[WeightUpdate], Awaitable[None]] | None = None  # takes the part of the engines
        self.users = UserTurns()
        self.is_ready = True
        self.by_name: dict[str, NamedAdapter] = {}
        self.holds: tuple[ReplicaHold, ...] = ()
        self.jobs: dict[str, UpdateJob] = {}
        self.source: PublishedSource | None = None
        self.num_status_calls = 0
        self.status_delay_s = 0.0
        self.is_holding = False
        self.is_cancelled = False
        self.num_queue_groups = 1_000_000
        self.num_held = 0
        self.next_errors: list[Exception] = []
        self.update_error: AgentLoopError | None = None
        self._changed = asyncio.Event()
        self.urls = list(urls)
        self.dead: set[str] = set()
        self.records: dict[str, Trajectory] = {}  # submitted by the worker
        self.cancel_next: list[str] = []
        self.left: list[str] = []
        self.is_done = asyncio.Event()
        self._waiting = deque(
            Assignment(
                f"{task.task_id}/{sample}",
                task.task_id,
                sample,
                task,
                self._lease_on(self.urls[(place + sample) % len(self.urls)]),
                staleness=staleness,
            )
            for place, task in enumerate(tasks)
            for sample in range(num_samples)
        )
        self._num_expected = len(self._waiting)

    async def submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        user_names: tuple[str, ...] | None = None,
    ) -> RolloutStatus:
        self._raise_next()
        rollout_id = self._own(rollout_id, terms.owner, user_names)
        self.terms[rollout_id] = terms
        self.submitted.append((rollout_id, len(groups)))
        if len(groups) > self.num_queue_groups:
            raise Overloaded("the queue is full")
        given = {group.group_id: group for group in groups}
        if rollout_id not in self.groups:
            self.groups[rollout_id] = given
            self.finished[rollout_id] = []
            if not self.is_holding:
                self.finished[rollout_id] += [record for group in groups for record in self._records(group)]
        elif self.groups[rollout_id] != given:
            raise Conflict(f"rollout {rollout_id} already exists with other groups or terms", param="rollout_id")
        self._wake()
        return self._status(rollout_id)

    def finish_held(self, rollout_id: str) -> None:
        """Finish all samples that were held back."""
        for group in self.groups[rollout_id].values():
            self.finished[rollout_id] += self._records(group)
        self._wake()

    async def claim(self, rollout_id: str, names: tuple[str, ...]) -> str:
        self._raise_next()
        own = self._own(rollout_id, names[0], names)
        if self.groups.get(own):
            raise Conflict(f"rollout {rollout_id} was submitted", param="rollout_id")
        self.groups.setdefault(own, {})
        self.finished.setdefault(own, [])
        self.terms.setdefault(own, RolloutTerms(names[0]))
        return own

    def _own(self, rollout_id: str, owner: str, user_names: tuple[str, ...] | None) -> str:
        try:
            return self._status(rollout_id, user_names).rollout_id
        except NotFound:
            return own_id(owner, rollout_id)

    async def record(self, record: EncodedRecord) -> None:
        self._raise_next()
        trajectory = record.decoded()
        rollout_id = trajectory.rollout_id
        place = (trajectory.group_id, trajectory.sample_index)
        if self.groups.get(rollout_id):
            raise Conflict(f"rollout {rollout_id} was submitted", param="rollout_id")
        self.groups.setdefault(rollout_id, {})
        records = self.finished.setdefault(rollout_id, [])
        if place not in [(one.group_id, one.sample_index) for one in records]:
            records.append(trajectory)
            self._wake()

    async def read(
        self, rollout_id: str, after: int, limit: int, wait_s: float, user_names: tuple[str, ...] | None = None
    ) -> EncodedPage:
        self._raise_next()
        status = self._status(rollout_id, user_names)
        rollout_id = status.rollout_id
        if after >= len(self.finished[rollout_id]) and not status.is_done and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        found = tuple(self.finished[rollout_id][after : after + limit])
        records = tuple(msgspec.Raw(encode(trajectory)) for trajectory in found)
        return EncodedPage(records, after + len(found), self._status(rollout_id))

    async def acknowledge(self, rollout_id: str, cursor: int, user_names: tuple[str, ...] | None = None) -> None:
        rollout_id = self._status(rollout_id, user_names).rollout_id
        self.acknowledged[rollout_id] = cursor

    async def annotate(
        self, rollout_id: str, given: tuple[SampleAnnotation, ...], user_names: tuple[str, ...] | None = None
    ) -> RolloutStatus:
        self.annotated.append(given)
        return self._status(rollout_id, user_names)

    async def cancel(self, rollout_id: str, user_names: tuple[str, ...] | None = None) -> RolloutStatus:
        self.is_cancelled = True
        return self._status(rollout_id, user_names)

    async def lease(self, session_id, num_tokens, process_id, needs=NO_NEEDS, prefixes=()) -> Lease:
        self._raise_next()
        held = self.held.get(session_id)
        if not self.has_room:
            self.num_refused += 1
            raise NoHealthyReplica("no replica has KV capacity for another session now")
        return held if held is not None and held.lease_id in self.leases else self._grant(session_id)

    def _grant(self, session_id: str) -> Lease:
        self.num_leased += 1
        lease = Lease(f"lease-{self.num_leased}", f"replica-{self.num_leased}", f"url-{self.num_leased}")
        self.leases[lease.lease_id] = self.held[session_id] = lease
        return lease

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        start = tuple(self._waiting.popleft() for _ in range(min(report.num_free, len(self._waiting))))
        cancel, self.cancel_next = tuple(self.cancel_next), []
        if not start and not cancel:
            await asyncio.sleep(min(wait_s, 0.02))
        return Orders(start, cancel)

    async def leave(self, worker_id: str) -> None:
        self.left.append(worker_id)

    async def unfinished(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in self.records)

    async def finish(self, worker_id: str, records: tuple[EncodedRecord, ...]) -> tuple[bool | Refusal, ...]:
        outcomes = [self.finish_one(worker_id, record.decoded()) for record in records]
        found = await asyncio.gather(*outcomes, return_exceptions=True)
        answers = [Refusal.of(one) if isinstance(one, AgentLoopError) else one for one in found]
        if bugs := [one for one in answers if isinstance(one, BaseException)]:
            raise bugs[0]
        return tuple(answers)  # type: ignore[arg-type]

    async def finish_one(self, worker_id: str, trajectory: Trajectory) -> bool:
        self._raise_next()
        key = f"{trajectory.group_id}/{trajectory.sample_index}"
        assert key not in self.records, f"{key} finished twice"
        self.records[key] = trajectory
        if len(self.records) == self._num_expected:
            self.is_done.set()
        return True

    def _lease_on(self, url: str) -> Lease:
        return Lease(f"lease on {url}", replica_id=url, url=url)

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        self._raise_next()
        if lease.url in self.urls:  # a lease of an assignment
            others = [url for url in self.urls if url != lease.url and url not in self.dead]
            if not others:
                raise NoHealthyReplica("no other replica")
            return self._lease_on(others[0])
        if lease.lease_id not in self.leases:
            raise NotFound(f"{assignment_id} has no such lease", param="assignment_id")
        self.moved.append((assignment_id, lease, is_failed))
        del self.leases[lease.lease_id]
        return self._grant(assignment_id)

    async def report_leases(self, report: LeaseReport) -> LeaseOrders:
        await asyncio.sleep(self.report_delay_s)
        if self.report_errors:
            raise self.report_errors.pop(0)
        if report not in self.reports[-1:]:  # otherwise its answer was lost
            self.reports.append(report)
            for lease_id in report.released:
                del self.leases[lease_id]
        if self.is_answer_lost:
            self.is_answer_lost = False
            raise ServiceUnavailable("the answer was lost")
        orders, self.next_orders = self.next_orders, LeaseOrders()
        return orders

    async def update_weights(
        self, update: WeightUpdate, kv_policy: KVPolicy | None, force: bool = False
    ) -> UpdateReport:
        self._raise_next()
        if self.update_error is not None:
            raise self.update_error
        self.updates.append((update, kv_policy))
        if self.on_update is not None:
            await self.on_update(update)
        replica = ReplicaUpdate("replica-1", 10.0, 20.0)
        return UpdateReport(update.version, 0, kv_policy or KVPolicy.RECOMPUTE, (replica,), 40.0)

    async def push_adapter(self, push: AdapterPush) -> UpdateReport:
        self._raise_next()
        known = self.by_name.pop(push.name, None)
        before = None if known is None else known.version
        version = (-1 if before is None else before) + 1 if push.version is None else push.version
        self.by_name[push.name] = NamedAdapter(push.name, version, push.directory, 1.0)
        replica = ReplicaUpdate("replica-1", 10.0, 0.0)
        return UpdateReport(version, before, KVPolicy.FRESH, (replica,), 40.0, adapter=push.name)

    async def unload_adapter(self, name: str) -> None:
        if self.by_name.pop(name, None) is None:
            raise ModelNotFound(f"unknown adapter {name!r}: it is not served", param="name")

    async def adapters(self) -> tuple[NamedAdapter, ...]:
        return tuple(self.by_name.values())

    async def pause(self, mode: PauseMode, reason: str = "") -> None:
        self.paused = mode

    async def resume(self) -> None:
        self.paused = None

    async def drain_host(self, host: str, is_undone: bool = False) -> HostDrain:
        return HostDrain(host, 0, 0)

    async def hold(self, hold_id: str, num_replicas: int, timeout_s: float, lease_s: float) -> ReplicaHold:
        replicas = tuple(f"replica-{number}" for number in range(1, num_replicas + 1))
        self.holds = (ReplicaHold(hold_id, 0, replicas, (), timeout_s),)
        return self.holds[0]

    async def renew_hold(self, hold_id: str, lease_s: float) -> ReplicaHold:
        if not self.holds:
            raise NotFound(f"the hold {hold_id} is not in force", param="hold_id")
        [hold] = self.holds
        self.holds = self.holds if lease_s else ()
        return hold

    async def begin_update(self, job: UpdateJob) -> UpdateJob:
        self.jobs[job.job_id] = job
        return job

    async def update_jobs(self) -> UpdateJobs:
        return UpdateJobs(self.source, tuple(self.jobs.values()))

    async def cancel_update(self, job_id: str) -> UpdateJob:
        self.jobs[job_id] = replace(self.jobs[job_id], state=JobState.CANCELLED)
        return self.jobs[job_id]

    async def look_at_store(self) -> StoreStatus:
        raise Conflict("this service does not follow a store of versions", param="weights")

    async def init_group(self, group: GroupInit, is_replacement: bool = False) -> None:
        raise InvalidRequest(
            f"expected world_size {group.rank_offset} (rank_offset + workers), got {group.world_size}",
            param="world_size",
        )

    async def begin_transfer(self, group: str, is_repeatable: bool = False) -> None:
        raise NotFound(f"unknown group {group!r}: create it first", param="group_name")

    async def receive_part(self, part: TransferPart) -> None:
        raise Conflict(f"group {part.group!r} has no open transfer: start one first")

    async def end_transfer(self, group: str, version: int | None = None) -> UpdateReport:
        raise Conflict(f"group {group!r} has no open transfer: start one first")

    async def destroy_group(self, name: str) -> None:
        return None

    async def pull_version(self, order: PullVersion) -> None:
        return None

    async def sleep(self, level: int, reason: str = "") -> None:
        self._raise_next()
        self.sleep_levels.append(level)
        self.asleep = ALL_MEMORY

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        self._raise_next()
        self.asleep -= tags

    async def report_users(
        self, process_id: str, usage: tuple[UserUsage, ...], reads_again: bool = False
    ) -> UsersNews:
        if reads_again:
            self.users.read_again()
        return self.users.report(process_id, usage)

    async def drain(self) -> tuple[int, int]:
        return 0, 0

    async def flight(self, limit: int, name: str = "") -> FlightPage:
        return FlightPage((), (), (), 0)

    async def history(self, names: tuple[str, ...], since: float) -> HistoryPage:
        return HistoryPage(1.0, (), ())

    async def list_records(self, query: FactsQuery, user_names: tuple[str, ...] | None = None) -> FactsPage:
        self._raise_next()
        self.listed.append(query)
        row = facts.row_of(EncodedRecord.of(make_trajectory(reward=0.5)))
        one = RecordFacts(*(7, *row[:5], bool(row[5]), *row[6:]))
        total = FactsTotal("completed", None, 0, 1, 1, 0.5, 1.0, 6)
        return FactsPage((one,), "[7,7]", (total,))

    async def record_at(self, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
        self._raise_next()
        if seq != 7:
            raise NotFound(f"no record {seq}", param="seq")
        return AnnotatedRecord(codec.encode(make_trajectory(reward=0.5)))

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        return (await self.status()).updates

    async def metrics(self) -> MetricsPage:
        return MetricsPage(tuple(of_status(await self.status())), ())

    async def report_metrics(self, report: MetricsReport) -> None:
        pass

    async def status(self) -> ServiceStatus:
        self.num_status_calls += 1
        await asyncio.sleep(self.status_delay_s)
        self._raise_next()
        replicas = tuple(
            ReplicaStatus(
                f"replica-{index}",
                "ready" if self.replica_error is None else "quarantined",
                "simulated",
                0,
                Load(),
                len(self.leases),
                0.5,
                weight_dtype=dtype,
                error=self.replica_error,
            )
            for index, dtype in enumerate(self.weight_dtypes, 1)
        )
        rollouts = tuple(self._status(rollout_id) for rollout_id in self.groups)
        is_paused = self.paused is not None
        return ServiceStatus(
            self.is_ready,
            is_paused,
            0,
            replicas,
            1,
            rollouts,
            (),
            tuple(tag for tag in MemoryTag if tag in self.asleep),
            adapters=tuple(self.by_name.values()),
            holds=self.holds,
        )

    def _records(self, group: RolloutGroup) -> list[Trajectory]:
        return [make_trajectory(group.group_id, i, rollout_id=group.rollout_id) for i in range(group.num_samples)]

    def _status(self, rollout_id: str, user_names: tuple[str, ...] | None = None) -> RolloutStatus:
        for name, owner in possible_ids(rollout_id, user_names):
            terms = self.terms.get(name, RolloutTerms(owner_of(name)))
            if name in self.groups and owner in (None, terms.owner):
                break
        else:
            raise NotFound(f"unknown rollout {rollout_id!r}", param="rollout_id")
        rollout_id = name
        num_finished = len(self.finished[rollout_id])
        num_accepted = sum(group.num_samples for group in self.groups[rollout_id].values()) or num_finished
        counts = num_accepted, num_finished, 0, num_accepted - num_finished, self.num_held
        return RolloutStatus(rollout_id, *counts, terms.owner, terms.priority)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _raise_next(self) -> None:
        if self.next_errors:
            raise self.next_errors.pop(0)
