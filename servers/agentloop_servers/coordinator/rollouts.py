"""Rollouts: the coordinator's interface to clients and workers. Accepts work, dispatches it, and stores its
records.

Owns the RolloutQueue and the store. A submission is durable before it is queued, and a record before its sample is
finished; only the queue decides which worker owns a sample. Leases come from `Replicas`. Submissions and submitted
records complete even if their caller leaves.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
from structlog.typing import FilteringBoundLogger

from agentloop.api.annotations import SampleAnnotation
from agentloop.api.coordinator import (
    MAX_HAND_IN,
    EncodedPage,
    HeldLease,
    LeaseOrders,
    LeaseReport,
    Orders,
    Prefix,
    Refusal,
    RolloutStatus,
    RolloutTerms,
    TurnEnded,
    WorkerReport,
    assignment_id_of,
    group_key,
    is_session_holder,
    session_holder,
)
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.flight import Doing, Flight, FlightPage, FlightRow, doing_of
from agentloop.api.owners import adapter_named, own_id, owner_of, possible_ids, shown_id
from agentloop.concurrency.aio import ChangeSignal, KeyedLocks, OwnedTasks, deadline_after, is_set_by, to_its_end
from agentloop.concurrency.clock import Clock, SteadyTime
from agentloop.errors import AgentLoopError, Conflict, Gone, InvalidRequest, NotFound, ServiceUnavailable
from agentloop.scheduling.lease_table import Demand, ReportDesk
from agentloop.scheduling.rollout_queue import COORDINATOR, RolloutQueue
from agentloop.scheduling.samples import NoPlace, Sample
from agentloop.score import ended
from agentloop.storage.retention import Unfinished
from agentloop.storage.trajectory_store import MAX_RECORD_BATCH, TrajectoryStore, encoded_groups, groups_digest
from agentloop.types import (
    FAILURES,
    Assignment,
    Lease,
    RolloutGroup,
    StopReason,
    Trajectory,
)
from agentloop.values import codec
from agentloop.values.capabilities import NO_NEEDS, Needs
from agentloop_servers.coordinator.assignments import (
    assignment,
    demand,
    needs_of_task,
    pending_record,
)
from agentloop_servers.coordinator.replicas import CoordinatorConfig, Replicas

_UNHEARD_S = 8.0  # workers without a call for this long are shown as silent: they poll every few seconds
_TRIM_GAP_S = 0.02  # pause between two batches of deletions
_MAX_UNREAD = 1000  # rollouts; the oldest is dropped
_MAX_UNREAD_TOLD = 4
_GIVEN_UP = FAILURES | {StopReason.CANCELLED}

MAX_TAKEN = 32  # samples per call if there are several workers; a worker asks again in milliseconds


@dataclass(slots=True)
class _Poll:
    """A worker's poll for work. Only its last `take` call gets work."""

    seen_at: float
    number: int = 0
    cut_at: float | None = None  # when the connection of its last `take` broke during the wait
    host: str = ""
    num_free: int = 0
    flights: dict[str, Flight] = field(default_factory=dict)  # assignment id -> activity, as of `told_at`
    told_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _StoredCounts:
    """The counts of a rollout's records that an earlier coordinator stored."""

    num_trained: int = 0  # can be trained on
    first_version: int | None = None  # the oldest version in the trained records
    num_complete: Mapping[str, int] = field(default_factory=dict)  # group id -> complete records


class Rollouts:
    """Implements WorkerPort, RolloutPort and LeasePort.

    Call `restore` once, then `look` and `flush_pending` repeatedly.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        replicas: Replicas,
        config: CoordinatorConfig,
        clock: Clock,
        log: FilteringBoundLogger,
        changed: ChangeSignal,
        tasks: OwnedTasks,
    ) -> None:
        self.tasks = tasks
        self._store = store
        self._replicas = replicas
        self._config = config
        self._clock = clock
        self._log = log
        self._changed = changed
        self.queue = RolloutQueue(
            max_queued=config.max_queued_trajectories,
            max_queued_bytes=config.max_queued_bytes,
            max_attempts=config.max_attempts,
            missing_after_s=config.worker_timeout_s,
            users=replicas.users,
        )
        replicas.sync.adapters.in_use = self.queue.adapters
        self._reports = ReportDesk(config.balancer.lease_ttl_s)
        self._polls: dict[str, _Poll] = {}
        self._left: deque[str] = deque(maxlen=1000)  # workers that have shut down: their late calls get no work
        self._doubtful: set[str] = set()  # samples whose commit failed, so that their record may be stored
        self._settling = asyncio.Lock()
        self._hand_ins: dict[str, asyncio.Task[bool]] = {}  # assignment id -> running submission of its record
        self._submitting = KeyedLocks()  # locks by rollout id
        self._readers: dict[str, asyncio.Event] = {}  # live rollout -> event for its readers
        self._unread: dict[str, float] = {}  # rollout with unread records -> since when
        self._grace_until: float | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._trim_at = 0.0
        self._time = SteadyTime(time.time, clock.now)  # for the age of records
        self.is_draining = False  # no work is accepted or dispatched, because the service stops

    @property
    def num_workers(self) -> int:
        return len(self._polls)

    def flights(self, limit: int, name: str = "") -> FlightPage:
        """Return the live trajectories as workers last reported them, and the sessions."""
        now, balancer = self._clock.now(), self._replicas.balancer
        live = [
            (assignment_id, flight, worker_id, now - poll.told_at)
            for worker_id, poll in self._polls.items()
            for assignment_id, flight in poll.flights.items()
            if self.queue.is_live(assignment_id)
        ]

        def row(assignment_id: str, flight: Flight, worker_id: str, since_s: float) -> FlightRow:
            lease = balancer.lease_of(assignment_id)
            told = replace(flight, for_s=flight.for_s + since_s, age_s=flight.age_s + since_s)
            return FlightRow(assignment_id, told, worker_id, "" if lease is None else lease.replica_id)

        oldest = heapq.nlargest(limit, live, key=lambda one: one[1].age_s + one[3])
        named = [one for one in live if one[0] == name and one not in oldest]
        users = [one for one in live if one[1].doing in (Doing.TOOL, Doing.REWARD, Doing.LOOP)]
        longest = heapq.nlargest(limit, users, key=lambda one: one[1].for_s + one[3])
        ages = {worker_id: now - poll.seen_at for worker_id, poll in self._polls.items()}
        return FlightPage(
            oldest=tuple(row(*one) for one in (*oldest, *named)),
            sessions=(*self._replicas.waiting.rows(limit, name), *balancer.sessions(limit, now, name)),
            doing=doing_of(flight for _, flight, _, _ in live),
            num_free=sum(poll.num_free for poll in self._polls.values()),
            silent=tuple(one for one in ages.items() if one[1] > _UNHEARD_S),
            longest_tools=tuple(row(*one) for one in longest),
        )

    def unread(self) -> tuple[tuple[str, float], ...]:
        """Return the rollouts whose records have waited longest for a reader, with the seconds."""
        now = self._clock.now()
        oldest = heapq.nsmallest(_MAX_UNREAD_TOLD, self._unread.items(), key=lambda one: one[1])
        return tuple((rollout_id, now - since) for rollout_id, since in oldest)

    def running_by_host(self) -> Counter[str]:
        """Return the number of running trajectories per host address."""
        running: Counter[str] = Counter()
        for worker_id, poll in self._polls.items():
            running[poll.host] += self.queue.num_running_at(worker_id)
        return running

    async def restore(self) -> None:
        """Queue an earlier coordinator's unfinished work.

        It is dispatched after a grace period in which workers report the samples that they still run.
        """
        now = self._clock.now()
        by_rollout: dict[str, list[tuple[RolloutGroup, tuple[int, ...]]]] = {}
        for group, sample_indexes in await self._store.unfinished():
            by_rollout.setdefault(group.rollout_id, []).append((group, sample_indexes))
        for rollout_id, work in by_rollout.items():
            await self._restore(rollout_id, work, now)
        if by_rollout:
            self._grace_until = now + self._config.restart_grace_s
            self._log.info("work_restored", num_rollouts=len(by_rollout), num_queued=self.queue.num_queued)

    async def _restore(self, rollout_id: str, work: list[tuple[RolloutGroup, tuple[int, ...]]], now: float) -> None:
        """Queue a rollout's unfinished samples, with the counts of its stored records."""
        _, num_finished = await self._store.counts(rollout_id)
        limit = work[0][0].staleness
        is_counted = limit is not None and limit.trajectories_per_version is not None
        keeps = any(group.keep is not None for group, _ in work)
        stored = await self._stored(rollout_id) if is_counted or keeps else _StoredCounts()
        terms = await self._store.terms(rollout_id)
        self.queue.restore(
            rollout_id,
            work,
            now,
            num_finished,
            stored.num_trained if is_counted else 0,
            stored.first_version if is_counted else None,
            terms=terms,
            num_complete=stored.num_complete,
        )
        if terms.is_cancelled:
            self.queue.cancel(rollout_id)

    # Calls of workers

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        worker_id, now = report.worker_id, self._clock.now()
        if worker_id == COORDINATOR:
            raise InvalidRequest("worker_id must not be empty", param="worker_id")
        if report.num_sampled and len(report.num_sampled) != len(report.running):
            raise InvalidRequest(
                f"num_sampled has {len(report.num_sampled)} numbers for {len(report.running)} running samples",
                param="num_sampled",
            )
        if worker_id in self._left:
            return Orders()
        poll = self._polls.setdefault(worker_id, _Poll(now))
        poll.seen_at, poll.cut_at, poll.host = now, None, report.host
        poll.number += 1
        poll.num_free = report.num_free
        if report.flights:
            poll.flights, poll.told_at = dict(zip(report.running, report.flights, strict=False)), now
        number = poll.number
        self._lost(self.queue.report(worker_id, report.running, now, report.num_sampled))
        deadline_at = deadline_after(min(wait_s, self._config.worker_timeout_s / 2))
        start: tuple[Assignment, ...] = ()
        while True:
            if self.queue.num_queued and not self.is_draining:
                is_answered = False
                with suppress(TimeoutError):
                    # If another coordinator has taken over, it may have dispatched the queued samples, so nothing
                    # is dispatched here.
                    async with asyncio.timeout(self._config.worker_timeout_s / 3):
                        await self._store.check_owner()
                        is_answered = True
                if poll.number != number:
                    return Orders()
                if not is_answered:
                    break  # the worker asks again, which also shows that it is alive
            is_drained = report.host in self._replicas.sync.desired.orders.drained
            start = () if is_drained else self._assign(worker_id, self._at_once(report.num_free))
            if start or self.queue.has_new_cancels(worker_id):
                break
            try:
                is_changed = await self._changed.wait_until(deadline_at)
            except asyncio.CancelledError:
                if poll.number == number:
                    poll.cut_at = self._clock.now()
                raise
            if poll.number != number:
                return Orders()  # the worker's newer call gets the work, or the worker has left
            if not is_changed:
                break
        self._polls.setdefault(worker_id, poll).seen_at = self._clock.now()
        cancel = self.queue.cancels(worker_id)
        self.queue.cancels_told(worker_id, cancel)
        return Orders(start, cancel)

    async def leave(self, worker_id: str) -> None:
        self._left.append(worker_id)
        poll = self._polls.pop(worker_id, None)
        if poll is not None:
            poll.number += 1
        given_back = self.queue.worker_left(worker_id)
        self._log.info("worker_left", worker=worker_id, num_running=len(given_back))
        self._lost(given_back)
        self._changed.notify()

    async def finish(self, worker_id: str, records: tuple[EncodedRecord, ...]) -> tuple[bool | Refusal, ...]:
        if len(records) > MAX_HAND_IN:
            raise InvalidRequest(
                f"a call can submit at most {MAX_HAND_IN} records, not {len(records)}", param="records"
            )
        under_way = [self._hand_in(worker_id, record) for record in records]
        await asyncio.wait(under_way)
        return tuple(map(self._answer, under_way))

    def _hand_in(self, worker_id: str, record: EncodedRecord) -> asyncio.Task[bool]:
        """Start to store a sample's record, or join the running submission, so that a slow disk holds one copy of
        each."""
        assignment_id = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
        under_way = self._hand_ins.get(assignment_id)
        if under_way is None:
            under_way = self.tasks.start(self._finish(worker_id, assignment_id, record))
            self._hand_ins[assignment_id] = under_way
            under_way.add_done_callback(lambda _: self._hand_ins.pop(assignment_id, None))
        return under_way

    def _answer(self, hand_in: asyncio.Task[bool]) -> bool | Refusal:
        error = hand_in.exception()
        if error is None:
            return hand_in.result()
        if not isinstance(error, AgentLoopError):  # an error of the store, or a bug
            self._log.error("record_not_stored", exc_info=error)
            error = ServiceUnavailable(
                f"the coordinator could not store the record ({type(error).__name__}): submit it again"
            )
        return Refusal.of(error)

    async def _finish(self, worker_id: str, assignment_id: str, record: EncodedRecord) -> bool:
        if self._doubtful:
            await self._settle()
        if not self.queue.is_live(assignment_id):
            with suppress(Gone):  # stored and deleted by the retention policy
                if not await self._store.has_record(record):
                    raise InvalidRequest(
                        f"unknown sample {assignment_id}: it was never accepted", param="sample_index"
                    )
            return True
        if _is_dropped(record):
            times = record.decoded().times  # cheap: the record has no tokens
            lost_tokens = None if times is None else times.lost_tokens
            if self.queue.drop_stale(worker_id, assignment_id, record.attempt, lost_tokens):
                self._log.info("trajectory_dropped", assignment=assignment_id, attempt=record.attempt)
                self._lost((assignment_id,))
            return False  # otherwise it is queued or runs at another worker
        if record.stop_reason in _GIVEN_UP and not self.queue.is_cancelled(assignment_id):
            if not self.queue.is_running_at(worker_id, assignment_id):
                return False  # it is queued or runs at another worker, so this failure does not end it
            if record.stop_reason is StopReason.CANCELLED or self._is_run_again(record):
                self.queue.give_back(worker_id, assignment_id)  # it was not cancelled, so another worker runs it
                self._lost((assignment_id,))
                return False
        record = self._aged(record)
        if record.is_sound:
            is_wanted = self.queue.take_keep_place(assignment_id)
        else:
            is_wanted = not self.queue.is_cancelled(assignment_id)
        if record.is_complete and not is_wanted:
            record = _surplus(record)
        try:
            is_new = await self._store.add_records([record]) > 0
        except BaseException:
            # It may be stored, so its group keeps the slot until `_settle` knows.
            self._doubtful.add(assignment_id)
            raise
        # If it is not new, another record was stored first, and that one counts.
        stored = record if is_new else await self._store.stored(assignment_id)
        self._recorded(assignment_id, stored or record, counts=stored is not None)
        return True

    async def _settle(self) -> None:
        """Check which records of failed commits are stored, and count these once. The others release their `keep`
        slots.

        Re-raises the store's errors.
        """
        async with self._settling:
            for assignment_id in tuple(self._doubtful):
                stored = await self._store.stored(assignment_id)
                self._doubtful.discard(assignment_id)
                if stored is None:
                    self.queue.give_back_keep_place(assignment_id)
                else:
                    self._recorded(assignment_id, stored)

    async def unfinished(self, assignment_ids: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(assignment_id for assignment_id in assignment_ids if self.queue.is_live(assignment_id))

    def look(self, now: float) -> None:
        """Detect silent workers and processes, and end the grace period after a restart."""
        self._reports.expire(now)
        self.queue.set_versions(self._replicas.versions, now)
        for worker_id, poll in list(self._polls.items()):
            is_cut = poll.cut_at is not None and now - poll.cut_at >= self._config.worker_cut_s
            if is_cut or now - poll.seen_at >= self._config.worker_timeout_s:
                del self._polls[worker_id]
                lost = self.queue.worker_lost(worker_id, now, poll.seen_at if poll.cut_at is None else poll.cut_at)
                self._log.warning("worker_lost", worker=worker_id, num_running=len(lost))
                self._lost(lost)
        if self._grace_until is not None and now >= self._grace_until:
            self._grace_until = None
            self._changed.notify()

    def begin_trim(self, now: float) -> None:
        """Start to delete records by the retention policy, if it is due and not running."""
        is_due = now >= self._trim_at and self._config.retention.deletes
        if is_due and (self._trimming is None or self._trimming.done()):
            self._trim_at = now + self._config.retention_interval_s
            self._trimming = self.tasks.start(self._trim())

    async def _trim(self) -> None:
        """Delete in batches, so that other writes reach the store between them."""
        self._time.not_before(await self._store.last_mark())
        num_deleted = 0
        while True:
            live = {one.rollout_id: one for one in self.queue.live}
            counted = {name for name, one in live.items() if one.budget is not None}
            num_freed = await self._store.trim(self._config.retention, self._time(), Unfinished(live, counted))
            if num_freed == 0:
                break
            num_deleted += num_freed
            await self._clock.sleep(_TRIM_GAP_S)
        if num_deleted:
            self._log.info("records_deleted", num_rows_and_pages=num_deleted)

    async def flush_pending(self) -> None:
        """Write the pending records of samples that no worker finishes.

        Re-raises the store's errors; failed records stay pending.
        """
        if self._doubtful:
            await self._settle()
        owed = self.queue.pending_records(self._clock.now())
        for start in range(0, len(owed), MAX_RECORD_BATCH):
            items = owed[start : start + MAX_RECORD_BATCH]
            made = [pending_record(item) for item in items]
            records = [EncodedRecord.of(one) for one in made]
            is_new = await self._store.add_records(records) == len(records)
            for item, one, record in zip(items, made, records, strict=True):
                self._replicas.tally.trace(one)
                # If a worker's record was stored although its commit failed, that record counts.
                stored = None if is_new else await self._store.stored(item.sample.assignment_id)
                self._recorded(item.sample.assignment_id, stored or record)

    # Calls of clients

    @to_its_end
    async def submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        user_names: tuple[str, ...] | None = None,
    ) -> RolloutStatus:
        if self.is_draining:
            raise ServiceUnavailable("the service is stopping: submit again after its restart")
        # A repeat waits until the first call is durable, and returns its rollout
        async with self._submitting.of(rollout_id):
            own_rollout_id, owner = await self._whole_id(rollout_id, terms.owner, user_names)
            return await self._submit(own_rollout_id, groups, replace(terms, owner=owner), user_names)

    async def _submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms,
        user_names: tuple[str, ...] | None,
    ) -> RolloutStatus:
        num_new, encoded = sum(group.num_samples for group in groups), encoded_groups(groups)
        try:
            known = await self._by_id(rollout_id)
        except NotFound:
            for group in groups:
                self._replicas.fleet.check_needs(needs_of_task(group.task))
            if terms.adapter:
                terms = replace(
                    terms, adapter=adapter_named(terms.adapter, user_names, self._replicas.fleet.adapters)
                )
            self.queue.reserve(rollout_id, groups, terms, tuple(map(len, encoded)))
        else:
            is_live = self.queue.status(rollout_id) is not None
            if not is_live and await self._store.holds_sessions(rollout_id):
                raise Conflict(
                    f"rollout {rollout_id} has recorded sessions: use another rollout id", param="rollout_id"
                )
            stored = await self._store.terms(rollout_id)
            is_same = stored.groups_digest == groups_digest(encoded)
            is_same &= shown_id(stored.adapter) == shown_id(terms.adapter)
            if is_same and known.owner == terms.owner:
                if not is_live and not known.is_done:
                    await self._queue_stored(rollout_id)
                return await self._by_id(rollout_id)  # a repeated submission, whose response was lost
            raise Conflict(
                f"rollout {rollout_id} already exists with other groups, another adapter or another owner: use "
                "another rollout id",
                param="rollout_id",
            )
        try:
            await self._store.accept(rollout_id, groups, terms, encoded)
            self.queue.add(rollout_id, self._clock.now())
        finally:
            self.queue.unreserve(rollout_id)
        self._changed.notify()
        self._log.info("rollout_accepted", rollout=rollout_id, num_groups=len(groups), num_trajectories=num_new)
        return await self._by_id(rollout_id)

    async def _queue_stored(self, rollout_id: str) -> None:
        """Queue accepted work that is missing in the queue, because the commit's response was lost."""
        work = [one for one in await self._store.unfinished() if one[0].rollout_id == rollout_id]
        if work:
            await self._restore(rollout_id, work, self._clock.now())
            self._changed.notify()

    @to_its_end
    async def claim(self, rollout_id: str, user_names: tuple[str, ...]) -> str:
        own_rollout_id, owner = await self._whole_id(rollout_id, user_names[0], user_names)
        await self._store.claim(own_rollout_id, owner)
        return own_rollout_id

    @to_its_end
    async def record(self, record: EncodedRecord) -> None:
        """Store the record of a finished session. Does not wake readers: the number of sessions is not known."""
        if await self._store.record(self._aged(record)):
            assignment_id = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
            self._log.info("session_recorded", assignment=assignment_id, is_complete=record.is_complete)

    async def read(
        self, rollout_id: str, after: int, limit: int, wait_s: float, user_names: tuple[str, ...] | None = None
    ) -> EncodedPage:
        if after < 0:
            raise InvalidRequest(f"cursor is {after}, expected 0 or more", param="after")
        if limit < 1:
            raise InvalidRequest(f"limit is {limit}, expected 1 or more", param="limit")
        rollout_id = (await self._status(rollout_id, user_names)).rollout_id
        limit = min(limit, self._config.max_page)
        deadline_at = deadline_after(min(wait_s, self._config.max_wait_s))
        while True:
            # The status is read before the records: a reader that gets `is_done` and no record has read all. A
            # record that is committed after this point sets the event.
            is_live = self.queue.status(rollout_id) is not None
            event = self._readers.setdefault(rollout_id, asyncio.Event()) if is_live else None
            status = await self._by_id(rollout_id)
            self._unread.pop(rollout_id, None)  # before the read: later records are unread
            rows = await self._store.read(rollout_id, after, limit)
            if len(rows) == limit:
                self._note_unread(rollout_id)
            if rows or event is None or not await is_set_by(event, deadline_at):
                cursor = rows[-1][0] if rows else after
                return EncodedPage(tuple(msgspec.Raw(record) for _, record in rows), cursor, status)

    @to_its_end
    async def acknowledge(self, rollout_id: str, cursor: int, user_names: tuple[str, ...] | None = None) -> None:
        rollout_id = (await self._status(rollout_id, user_names)).rollout_id
        await self._store.acknowledge(rollout_id, cursor)

    @to_its_end
    async def annotate(
        self, rollout_id: str, given: tuple[SampleAnnotation, ...], user_names: tuple[str, ...] | None = None
    ) -> RolloutStatus:
        status = await self._status(rollout_id, user_names)
        await self._store.annotate(status.rollout_id, given)
        return status

    @to_its_end
    async def cancel(self, rollout_id: str, user_names: tuple[str, ...] | None = None) -> RolloutStatus:
        rollout_id = (await self._status(rollout_id, user_names)).rollout_id
        cancellation = self.queue.cancel(rollout_id)
        self._changed.notify()
        await self._store.cancel(rollout_id)  # before the response, so that the next coordinator also cancels
        await self.flush_pending()
        num_dropped, num_running = len(cancellation.dropped), len(cancellation.running)
        self._log.info("rollout_cancelled", rollout=rollout_id, num_queued=num_dropped, num_running=num_running)
        return await self._by_id(rollout_id)

    # Leases of trajectories and sessions

    async def lease(
        self,
        session_id: str,
        num_tokens: int,
        process_id: str,
        needs: Needs = NO_NEEDS,
        prefixes: tuple[Prefix, ...] = (),
    ) -> Lease:
        if self.is_draining and self._replicas.balancer.lease_of(session_holder(session_id)) is None:
            raise ServiceUnavailable("the service is stopping: call again after its restart")
        wait_s = self._config.placement_wait_s
        demand = Demand(
            holder_id=session_holder(session_id),
            process_id=process_id,
            num_prompt_tokens=num_tokens,
            is_session=True,
            expires_at=self._clock.now() + wait_s + self._config.balancer.lease_ttl_s,
            needs=needs,
            prefixes=prefixes,
        )
        return await self._replicas.waiting.begin_call(demand, wait_s)

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Raises NoHealthyReplica, UnsupportedParameter, or NotFound if the holder has no lease."""
        if is_failed:
            self._replicas.report_failure(lease)
        return await self._replicas.waiting.go_on(
            self._holder_of(assignment_id),
            lambda: self._moved(assignment_id, lease, is_failed, needs),
            self._config.placement_wait_s,
        )

    async def report_leases(self, report: LeaseReport) -> LeaseOrders:
        now = self._clock.now()
        if self._reports.is_news(report, now):
            self._count_tokens(report)
            news = replace(report, leases=self._known(report.leases))
        else:
            news = LeaseReport(report.process_id, report.sequence)  # renews the leases only
        orders = self._replicas.balancer.took(news, now)
        self._replicas.waiting.changed()
        return replace(orders, send_all=self._reports.needs_full_report(report.process_id))

    def _count_tokens(self, report: LeaseReport) -> None:
        """Count the tokens of finished turns for their users."""
        balancer, users = self._replicas.balancer, self._replicas.users
        for turn in report.turns:
            if isinstance(turn, TurnEnded) and (holder_id := balancer.holder_of(turn.lease_id)) is not None:
                users.count_tokens(users.name_of(owner_of(holder_id)), turn.num_context_tokens)

    def _known(self, leases: tuple[HeldLease, ...] | None) -> tuple[HeldLease, ...] | None:
        """Return the leases of sessions and live trajectories.

        A trajectory with a durable record needs no lease.
        """
        if leases is None:
            return None
        return tuple(one for one in leases if is_session_holder(one.holder_id) or self.queue.is_live(one.holder_id))

    def _holder_of(self, given_id: str) -> str:
        """Return the holder id: the assignment with this id, otherwise the session."""
        return given_id if self.queue.is_live(given_id) else session_holder(given_id)

    def _moved(self, given_id: str, lease: Lease, is_failed: bool, needs: Needs) -> Lease:
        balancer = self._replicas.balancer
        holder_id = self._holder_of(given_id)
        held = balancer.lease_of(holder_id)
        if held is None and holder_id != given_id:
            raise NotFound(
                f"{given_id} is neither a running trajectory nor a session with a lease", param="assignment_id"
            )
        if held is None:  # granted by an earlier coordinator
            balancer.adopt(Demand(given_id, group_id=group_key(given_id)), lease, self._clock.now())
        elif held.lease_id != lease.lease_id:
            return held  # it has moved already, and that response was lost
        return balancer.move(lease, is_failed, needs)

    def _at_once(self, num_free: int) -> int:
        """Return the number of slots that a worker may fill in one call, so that other workers get work too."""
        return num_free if self.num_workers <= 1 else min(num_free, MAX_TAKEN)

    def _assign(self, worker_id: str, num_free: int) -> tuple[Assignment, ...]:
        """Dispatch samples that get a lease.

        Nothing is dispatched without a replica or during the grace period.
        """
        if self.is_draining or self._grace_until is not None or not self._replicas.is_ready:
            return ()
        waiting, now, versions = self._replicas.waiting, self._clock.now(), self._replicas.versions
        self.queue.set_versions(versions, now)
        are_others_full = False  # only held replicas may have capacity

        def place(sample: Sample) -> Lease | NoPlace:
            nonlocal are_others_full
            wanted = sample.group.task.weight_version
            if sample.rollout.awaits_weights(wanted, versions, now):
                return NoPlace.LATER
            if wanted is not None and wanted.exact_version in versions.held:
                return waiting.try_to_place(demand(worker_id, sample))
            found = NoPlace.FULL if are_others_full else waiting.try_to_place(demand(worker_id, sample))
            are_others_full = found is NoPlace.FULL
            # Without capacity nothing overtakes this sample, except the samples of held replicas.
            return NoPlace.LATER if are_others_full and versions.held else found

        placed = self.queue.take(worker_id, num_free, now, place)
        return tuple(assignment(sample, lease) for sample, lease in placed)

    def _aged(self, record: EncodedRecord) -> EncodedRecord:
        """Return the record with its staleness by the current versions.

        An update may have finished since its worker checked it; the record is then kept and only labeled. Tokens
        with a version above the served one, after a rollback, count as stale by the difference.
        """
        versions = self._replicas.versions.of(record.adapter)
        served, coming = versions.served, versions.coming
        oldest, newest = record.oldest_version, record.newest_version
        if served is None or oldest is None or newest is None:
            return record
        staleness = max(0, served - oldest)
        if newest > max(served, coming or 0) + 1:  # a replica commits a moment before the fleet's version changes
            staleness = max(staleness, newest - served)
        limit = record.max_staleness
        if limit is not None and staleness > limit:
            assignment_id = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
            self._log.info("record_is_stale", assignment=assignment_id, staleness=staleness, max_staleness=limit)
        return replace(record, staleness=staleness)

    async def _stored(self, rollout_id: str) -> _StoredCounts:
        """Count the records that an earlier coordinator stored."""
        num_trained, oldest, cursor = 0, list[int](), 0
        num_complete: Counter[str] = Counter()
        while page := await self._store.read(rollout_id, cursor, MAX_RECORD_BATCH):
            cursor = page[-1][0]
            for record in (codec.decode(record, Trajectory) for _, record in page):
                num_complete[record.group_id] += record.is_sound
                num_trained += record.is_trained
                if record.is_trained and (version := record.oldest_trained_version) is not None:
                    oldest.append(version)
        return _StoredCounts(num_trained, min(oldest, default=None), num_complete)

    def _is_run_again(self, record: EncodedRecord) -> bool:
        """Return True if a trajectory with failed engines has an attempt left.

        The last attempt's record is stored.
        """
        is_failed = record.stop_reason is StopReason.ENGINE_FAILED
        return is_failed and record.attempt + 1 < self._config.max_attempts

    def _recorded(self, assignment_id: str, record: EncodedRecord, *, counts: bool = True) -> None:
        """Finish the sample of a durable record, end its lease and wake its readers.

        `counts` is False if the stored row cannot be read.
        """
        is_trained, is_kept = counts and record.is_trained, counts and record.is_sound
        num_tokens = record.num_response_tokens if counts and record.is_complete else None
        if not self.queue.finished(assignment_id, is_trained=is_trained, is_kept=is_kept):
            return
        if record.staleness is not None:
            self._replicas.tally.observe("trajectory_staleness", record.staleness)
        self._replicas.end_lease(assignment_id, num_tokens)
        if record.stop_reason is not StopReason.CANCELLED:
            self._note_unread(record.rollout_id)
        self._changed.notify()
        event = self._readers.pop(record.rollout_id, None)
        if event is not None:
            event.set()

    def _note_unread(self, rollout_id: str) -> None:
        self._unread.setdefault(rollout_id, self._clock.now())
        if len(self._unread) > _MAX_UNREAD:
            del self._unread[next(iter(self._unread))]

    def _lost(self, assignment_ids: tuple[str, ...]) -> None:
        """End the leases of samples that have left their worker."""
        for assignment_id in assignment_ids:
            self._replicas.end_lease(assignment_id)
        if assignment_ids:
            self._changed.notify()

    async def _status(self, rollout_id: str, user_names: tuple[str, ...] | None) -> RolloutStatus:
        """Return a rollout's status. Raises NotFound if it is unknown or another user's."""
        for possible_id, owner in possible_ids(rollout_id, user_names):
            with suppress(NotFound):
                status = await self._by_id(possible_id)
                if owner in (None, status.owner):
                    return status
        raise NotFound(f"unknown rollout {rollout_id!r}", param="rollout_id")

    async def _whole_id(self, rollout_id: str, owner: str, user_names: tuple[str, ...] | None) -> tuple[str, str]:
        """Return the full id and the owner of a known or new rollout that a user names."""
        try:
            known = await self._status(rollout_id, user_names)
        except NotFound:
            return rollout_id if user_names is None else own_id(owner, rollout_id), owner
        return known.rollout_id, owner if user_names is None else known.owner

    async def _by_id(self, rollout_id: str) -> RolloutStatus:
        self.queue.set_versions(self._replicas.versions, self._clock.now())
        status = self.queue.status(rollout_id)
        if status is not None:
            return status
        num_accepted, num_finished = await self._store.counts(rollout_id)
        terms = await self._store.terms(rollout_id)
        return RolloutStatus(
            rollout_id, num_accepted, num_finished, 0, 0, owner=terms.owner, priority=terms.priority
        )


def _is_dropped(record: EncodedRecord) -> bool:
    """Return True if the worker dropped the tokens as too old. A stopped trajectory keeps its tokens."""
    return record.stop_reason is StopReason.STALE and record.num_response_tokens == 0


def _surplus(record: EncodedRecord) -> EncodedRecord:
    """Return a complete record of a full group as a cancelled one, which is not trained on.

    Only here is a record decoded and encoded again.
    """
    cancelled = replace(record.decoded(), stop_reason=StopReason.CANCELLED, is_complete=False, reward=None)
    surplus = EncodedRecord.of(
        ended(replace(cancelled, error="its group already had the complete samples that it keeps"))
    )
    return replace(surplus, digest=record.digest)
