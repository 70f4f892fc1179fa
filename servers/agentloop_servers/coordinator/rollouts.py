"""Rollouts: the coordinator's side towards clients and workers: accepted work, its workers, and its records.

Ownership: the RolloutQueue and the store. A submission is durable before it is queued, a record before it counts as
finished; the queue alone decides which worker owns a sample. Leases come from, and go back to, the Replicas. A call
that must not stop half-way (a submission, a hand-in) runs on, whatever becomes of its caller.
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
    owed_record,
)
from agentloop_servers.coordinator.replicas import CoordinatorConfig, Replicas

_UNHEARD_S = 8.0  # a worker that was not heard of for so long is told of: it asks for work every few seconds
_TRIM_GAP_S = 0.02  # between two batches of deletions
_MAX_UNREAD = 1000  # rollouts, of which the oldest is forgotten
_MAX_UNREAD_TOLD = 4
_GIVEN_UP = FAILURES | {StopReason.CANCELLED}

MAX_TAKEN = 32  # samples that one of several workers takes in one call; it asks again in a few milliseconds


@dataclass(slots=True)
class _Poll:
    """A worker's place at the door. Only its newest `take` is answered with work."""

    seen_at: float
    number: int = 0
    cut_at: float | None = None  # its newest `take` was cut off while it waited
    host: str = ""
    num_free: int = 0
    flights: dict[str, Flight] = field(default_factory=dict)  # by assignment id, as of `told_at`
    told_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _StoredCounts:
    """The records that an earlier coordinator stored of a rollout, as its run and its groups count them."""

    num_trained: int = 0  # can be trained on
    first_version: int | None = None  # the oldest in these
    num_complete: Mapping[str, int] = field(default_factory=dict)  # by group


class Rollouts:
    """The WorkerPort, RolloutPort and LeasePort of a coordinator.

    Construct, `await restore()`, then call `look` and `write_owed` now and then.
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
        self._left: deque[str] = deque(maxlen=1000)  # workers that ended: a late call of theirs gets no work
        self._doubtful: set[str] = set()  # samples whose record may be stored: its commit failed
        self._settling = asyncio.Lock()
        self._hand_ins: dict[str, asyncio.Task[bool]] = {}  # under way, by their samples
        self._submitting = KeyedLocks()  # by rollout id
        self._readers: dict[str, asyncio.Event] = {}  # of live rollouts that are read
        self._unread: dict[str, float] = {}  # rollouts with a record that no reader had, and since when
        self._grace_until: float | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._trim_at = 0.0
        self._time = SteadyTime(time.time, clock.now)  # of ages
        self.is_draining = False  # nothing is accepted or given out any more: the service stops

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
        """Return the rollouts whose records wait for a reader for longest, and the seconds since then."""
        now = self._clock.now()
        oldest = heapq.nsmallest(_MAX_UNREAD_TOLD, self._unread.items(), key=lambda one: one[1])
        return tuple((rollout_id, now - since) for rollout_id, since in oldest)

    def running_by_host(self) -> Counter[str]:
        """Count the trajectories that workers run, by the addresses of their hosts."""
        running: Counter[str] = Counter()
        for worker_id, poll in self._polls.items():
            running[poll.host] += self.queue.num_running_at(worker_id)
        return running

    async def restore(self) -> None:
        """Queue an earlier coordinator's unfinished work. It is given out after a grace period in which workers may
        name what they still run."""
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
        """Queue a rollout's unfinished samples, beside the counts of its stored records."""
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

    # --- workers ---

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        worker_id, now = report.worker_id, self._clock.now()
        if worker_id == COORDINATOR:
            raise InvalidRequest("a worker needs an id", param="worker_id")
        if report.num_sampled and len(report.num_sampled) != len(report.running):
            raise InvalidRequest("num_sampled has a number for each that is running", param="num_sampled")
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
                    # A coordinator that was replaced gives out nothing: its successor may have given it out.
                    async with asyncio.timeout(self._config.worker_timeout_s / 3):
                        await self._store.check_owner()
                        is_answered = True
                if poll.number != number:
                    return Orders()
                if not is_answered:
                    break  # the worker asks again, and so shows that it lives
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
                return Orders()  # a newer call of this worker is answered in its place, or it has left
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
            raise InvalidRequest(f"one call hands in at most {MAX_HAND_IN} records", param="records")
        under_way = [self._hand_in(worker_id, record) for record in records]
        await asyncio.wait(under_way)
        return tuple(map(self._answer, under_way))

    def _hand_in(self, worker_id: str, record: EncodedRecord) -> asyncio.Task[bool]:
        """Begin the hand-in of a sample, or join the one under way. A slow disk holds one copy of each."""
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
        if not isinstance(error, AgentLoopError):  # the store's, or a bug
            self._log.error("record_not_stored", exc_info=error)
            error = ServiceUnavailable(f"{type(error).__name__} in the coordinator")
        return Refusal.of(error)

    async def _finish(self, worker_id: str, assignment_id: str, record: EncodedRecord) -> bool:
        if self._doubtful:
            await self._settle()
        if not self.queue.is_live(assignment_id):
            with suppress(Gone):  # it was stored, and is deleted
                if not await self._store.has_record(record):
                    raise InvalidRequest(f"{assignment_id} was never accepted", param="sample_index")
            return True
        if _is_dropped(record):
            times = record.decoded().times  # it has no tokens
            lost_tokens = None if times is None else times.lost_tokens
            if self.queue.drop_stale(worker_id, assignment_id, record.attempt, lost_tokens):
                self._log.info("trajectory_dropped", assignment=assignment_id, attempt=record.attempt)
                self._lost((assignment_id,))
            return False  # else it is queued or run by another worker already
        if record.stop_reason in _GIVEN_UP and not self.queue.is_cancelled(assignment_id):
            if not self.queue.is_running_at(worker_id, assignment_id):
                return False  # it is queued, or another worker runs it: a failure here is not its end
            if record.stop_reason is StopReason.CANCELLED or self._is_run_again(record):
                self.queue.give_back(worker_id, assignment_id)  # it was not cancelled: another worker shall run it
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
            self._doubtful.add(assignment_id)  # it may be stored: its group keeps the place until that is known
            raise
        # Otherwise the sample has another record, which was written meanwhile: that one counts, not this one.
        stored = record if is_new else await self._store.stored(assignment_id)
        self._recorded(assignment_id, stored or record, counts=stored is not None)
        return True

    async def _settle(self) -> None:
        """Ask the store which records are stored although their commit failed, and count these once, as they are
        stored. The others give their keep places back. Raises the store's errors."""
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
        """Count the silence of workers and of processes that report, and end the grace of a restart."""
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
        """Begin to delete what the retention policy lets go, if that is due and not under way."""
        is_due = now >= self._trim_at and self._config.retention.deletes
        if is_due and (self._trimming is None or self._trimming.done()):
            self._trim_at = now + self._config.retention_interval_s
            self._trimming = self.tasks.start(self._trim())

    async def _trim(self) -> None:
        """Delete in batches, with what waits for the store between them."""
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

    async def write_owed(self) -> None:
        """Write the records that the coordinator owes. Raises the store's errors; what failed stays owed."""
        if self._doubtful:
            await self._settle()
        owed = self.queue.pending_records(self._clock.now())
        for start in range(0, len(owed), MAX_RECORD_BATCH):
            items = owed[start : start + MAX_RECORD_BATCH]
            made = [owed_record(item) for item in items]
            records = [EncodedRecord.of(one) for one in made]
            is_new = await self._store.add_records(records) == len(records)
            for item, one, record in zip(items, made, records, strict=True):
                self._replicas.tally.trace(one)
                # A worker's record whose commit answer was lost is stored in place of ours, and counts.
                stored = None if is_new else await self._store.stored(item.sample.assignment_id)
                self._recorded(item.sample.assignment_id, stored or record)

    # --- clients ---

    @to_its_end
    async def submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        user_names: tuple[str, ...] | None = None,
    ) -> RolloutStatus:
        if self.is_draining:
            raise ServiceUnavailable("the service is stopping")
        async with self._submitting.of(rollout_id):  # a repeat waits until the first is durable, and is told of it
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
                raise Conflict(f"rollout {rollout_id} holds recorded sessions", param="rollout_id")
            stored = await self._store.terms(rollout_id)
            is_same = stored.groups_digest == groups_digest(encoded)
            is_same &= shown_id(stored.adapter) == shown_id(terms.adapter)
            if is_same and known.owner == terms.owner:
                if not is_live and not known.is_done:
                    await self._queue_stored(rollout_id)
                return await self._by_id(rollout_id)  # the same submission again: its answer was lost
            raise Conflict(f"rollout {rollout_id} exists with other work", param="rollout_id")
        try:
            await self._store.accept(rollout_id, groups, terms, encoded)
            self.queue.add(rollout_id, self._clock.now())
        finally:
            self.queue.unreserve(rollout_id)
        self._changed.notify()
        self._log.info("rollout_accepted", rollout=rollout_id, num_groups=len(groups), num_trajectories=num_new)
        return await self._by_id(rollout_id)

    async def _queue_stored(self, rollout_id: str) -> None:
        """Queue accepted work that the queue does not have: the database lost the answer of the commit."""
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
        """Store a finished session's record. Readers do not wait for more: their number is not known."""
        if await self._store.record(self._aged(record)):
            assignment_id = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
            self._log.info("session_recorded", assignment=assignment_id, is_complete=record.is_complete)

    async def read(
        self, rollout_id: str, after: int, limit: int, wait_s: float, user_names: tuple[str, ...] | None = None
    ) -> EncodedPage:
        if after < 0:
            raise InvalidRequest("a cursor is not negative", param="after")
        if limit < 1:
            raise InvalidRequest("a page holds at least one record", param="limit")
        rollout_id = (await self._status(rollout_id, user_names)).rollout_id
        limit = min(limit, self._config.max_page)
        deadline_at = deadline_after(min(wait_s, self._config.max_wait_s))
        while True:
            # The status first, then the records: a reader of `is_done` and no record has had them all. A record
            # that is committed from here on sets the event.
            is_live = self.queue.status(rollout_id) is not None
            event = self._readers.setdefault(rollout_id, asyncio.Event()) if is_live else None
            status = await self._by_id(rollout_id)
            self._unread.pop(rollout_id, None)  # before the read: what comes meanwhile is unread
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
        await self._store.cancel(rollout_id)  # before the answer: the next coordinator goes on with it
        await self.write_owed()
        num_dropped, num_running = len(cancellation.dropped), len(cancellation.running)
        self._log.info("rollout_cancelled", rollout=rollout_id, num_queued=num_dropped, num_running=num_running)
        return await self._by_id(rollout_id)

    # --- leases of trajectories and sessions ---

    async def lease(
        self,
        session_id: str,
        num_tokens: int,
        process_id: str,
        needs: Needs = NO_NEEDS,
        prefixes: tuple[Prefix, ...] = (),
    ) -> Lease:
        if self.is_draining and self._replicas.balancer.lease_of(session_holder(session_id)) is None:
            raise ServiceUnavailable("the service is stopping")
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
        """Raises NoHealthyReplica, UnsupportedParameter, or NotFound for a holder that has nothing to move."""
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
            news = LeaseReport(report.process_id, report.sequence)  # a sign of life
        orders = self._replicas.balancer.took(news, now)
        self._replicas.waiting.changed()
        return replace(orders, send_all=self._reports.needs_full_report(report.process_id))

    # --- inside ---

    def _count_tokens(self, report: LeaseReport) -> None:
        """Count the turns that have ended for their users."""
        balancer, users = self._replicas.balancer, self._replicas.users
        for turn in report.turns:
            if isinstance(turn, TurnEnded) and (holder_id := balancer.holder_of(turn.lease_id)) is not None:
                users.count_tokens(users.name_of(owner_of(holder_id)), turn.num_context_tokens)

    def _known(self, leases: tuple[HeldLease, ...] | None) -> tuple[HeldLease, ...] | None:
        """Return those whose holders there are: a trajectory that has its record needs no place any more."""
        if leases is None:
            return None
        return tuple(one for one in leases if is_session_holder(one.holder_id) or self.queue.is_live(one.holder_id))

    def _holder_of(self, given_id: str) -> str:
        """Return the holder of a lease: the assignment of this id, or else the session."""
        return given_id if self.queue.is_live(given_id) else session_holder(given_id)

    def _moved(self, given_id: str, lease: Lease, is_failed: bool, needs: Needs) -> Lease:
        balancer = self._replicas.balancer
        holder_id = self._holder_of(given_id)
        held = balancer.lease_of(holder_id)
        if held is None and holder_id != given_id:
            raise NotFound(f"{given_id} is neither running nor a session with a lease", param="assignment_id")
        if held is None:  # granted by a coordinator before this one
            balancer.adopt(Demand(given_id, group_id=group_key(given_id)), lease, self._clock.now())
        elif held.lease_id != lease.lease_id:
            return held  # it has moved already; that answer was lost
        return balancer.move(lease, is_failed, needs)

    def _at_once(self, num_free: int) -> int:
        """Return how many of its free places a worker may fill in one call: others shall have theirs."""
        return num_free if self.num_workers <= 1 else min(num_free, MAX_TAKEN)

    def _assign(self, worker_id: str, num_free: int) -> tuple[Assignment, ...]:
        """Hand out what fits. Without a replica nothing leaves the queue; during the restart's grace neither."""
        if self.is_draining or self._grace_until is not None or not self._replicas.is_ready:
            return ()
        waiting, now, versions = self._replicas.waiting, self._clock.now(), self._replicas.versions
        self.queue.set_versions(versions, now)

        def place(sample: Sample) -> Lease | NoPlace:
            if sample.rollout.awaits_weights(sample.group.task.weight_version, versions, now):
                return NoPlace.LATER
            return waiting.try_to_place(demand(worker_id, sample))

        placed = self.queue.take(worker_id, num_free, now, place)
        return tuple(assignment(sample, lease) for sample, lease in placed)

    def _aged(self, record: EncodedRecord) -> EncodedRecord:
        """The record with its staleness by what the fleet serves now: an update may have come since its worker
        judged it, and it is then told, not dropped. Tokens of weights that were taken back are as stale as these
        are far ahead."""
        versions = self._replicas.versions.of(record.adapter)
        served, coming = versions.served, versions.coming
        oldest, newest = record.oldest_version, record.newest_version
        if served is None or oldest is None or newest is None:
            return record
        staleness = max(0, served - oldest)
        if newest > max(served, coming or 0) + 1:  # a replica commits a moment before the fleet does
            staleness = max(staleness, newest - served)
        limit = record.max_staleness
        if limit is not None and staleness > limit:
            assignment_id = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
            self._log.info("record_is_stale", assignment=assignment_id, staleness=staleness, max_staleness=limit)
        return replace(record, staleness=staleness)

    async def _stored(self, rollout_id: str) -> _StoredCounts:
        """Count what an earlier coordinator stored of a rollout."""
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
        """Tell if a trajectory that its engines failed has an attempt left; the record of the last one is kept."""
        is_failed = record.stop_reason is StopReason.ENGINE_FAILED
        return is_failed and record.attempt + 1 < self._config.max_attempts

    def _recorded(self, assignment_id: str, record: EncodedRecord, *, counts: bool = True) -> None:
        """Finish the sample of a durable record, end its lease and wake its readers. `counts` is False if its row
        cannot be read."""
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
        """These left their worker: queued again or owed a record, in either case without a place."""
        for assignment_id in assignment_ids:
            self._replicas.end_lease(assignment_id)
        if assignment_ids:
            self._changed.notify()

    async def _status(self, rollout_id: str, user_names: tuple[str, ...] | None) -> RolloutStatus:
        """Raises NotFound for a rollout that is unknown, or another user's."""
        for possible_id, owner in possible_ids(rollout_id, user_names):
            with suppress(NotFound):
                status = await self._by_id(possible_id)
                if owner in (None, status.owner):
                    return status
        raise NotFound(f"unknown rollout {rollout_id!r}", param="rollout_id")

    async def _whole_id(self, rollout_id: str, owner: str, user_names: tuple[str, ...] | None) -> tuple[str, str]:
        """Return the whole id and the owner of a rollout that a user names, known or new."""
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
    """Return True if the worker discarded the tokens for their age. A stopped trajectory keeps its tokens."""
    return record.stop_reason is StopReason.STALE and record.num_response_tokens == 0


def _surplus(record: EncodedRecord) -> EncodedRecord:
    """Return a complete record as that of a sample which its group needs no more: cancelled, and not trained on.

    The one case in which a record is decoded here, and encoded again.
    """
    cancelled = replace(record.decoded(), stop_reason=StopReason.CANCELLED, is_complete=False, reward=None)
    surplus = EncodedRecord.of(ended(replace(cancelled, error="its group had the samples that it keeps")))
    return replace(surplus, digest=record.digest)
