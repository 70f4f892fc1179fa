"""The rollout queue: every accepted sample, until its terminal record is stored.

Ownership: one object, in the coordinator's event loop, synchronous; time is passed in. Invariant, proven by
`check`: every accepted (group, sample) is in exactly one of

    QUEUED ──► RUNNING ──► FINISHED        RUNNING ──► QUEUED  lost or dropped, and attempts are left
       └──────────────────────▲            QUEUED ──► FINISHED a worker given up for lost came back with it
                                           RUNNING ──► RUNNING such a worker has more of it than the one after it

A sample that no worker can finish any more (cancelled while queued, or out of attempts) is RUNNING at the
coordinator itself, which owes it a record: see `pending_records`. Nothing is FINISHED before its record is durable.

A group that keeps fewer samples than it has is full with the first so many whose complete records are durable: the
others are cancelled. No more than these become complete records: each claims a place before it is stored.

Bound: `max_queued` samples and `max_queued_bytes` of their tasks wait; a client whose work does not fit gets
Overloaded and waits outside. `DispatchOrder` says which sample goes out next. What a dead worker ran is not queued
there but in `SuspectTrials`: only a sample that shared its workers' deaths time and again is given up for them.

A worker's silence costs an attempt only until the worker is heard again. If the sample went to another worker
meanwhile, the one that has sampled more tokens of it keeps it, the later one if they are equal: fewer tokens are
sampled twice. The other is told to cancel.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentloop.api.coordinator import RolloutStatus, RolloutTerms, assignment_id_of
from agentloop.errors import Conflict, InvalidRequest, InvariantBroken, Overloaded
from agentloop.scheduling.dispatch_order import DispatchOrder, Placed, TryToPlace, UserTurns
from agentloop.scheduling.samples import (
    Cancellation,
    LiveGroup,
    LiveRollout,
    NoPlace,
    PendingRecord,
    Sample,
    SampleState,
    Silence,
    task_sizes,
)
from agentloop.scheduling.staleness_budget import FleetVersions, StalenessBudgets
from agentloop.scheduling.suspect_trials import SuspectTrials, is_trial
from agentloop.types import Lease, LossCause, RolloutGroup, StopReason

_MOST_SHARED = 4  # times `max_attempts`: deaths that a sample may share with others before it is given up too

COORDINATOR = ""  # the worker id under which the coordinator holds samples whose record it writes itself


@dataclass(slots=True, eq=False)
class _WorkerSamples:
    running: dict[str, Sample] = field(default_factory=dict)
    strays: set[str] = field(default_factory=set)  # it runs them, but they are not, or no longer, its own
    ordered: set[str] = field(default_factory=set)  # cancellations it was already told


@dataclass(frozen=True, slots=True)
class _Reservation:
    groups: Sequence[RolloutGroup]
    terms: RolloutTerms
    sizes: Sequence[int]


class RolloutQueue:
    """The samples that lack records: their groups, their workers, and what each rollout still needs."""

    def __init__(
        self,
        *,
        max_queued: int = 100_000,
        max_queued_bytes: int = 1 << 30,
        max_attempts: int = 3,
        missing_after_s: float = 30.0,
        users: UserTurns | None = None,
    ) -> None:
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._max_attempts = max_attempts
        self._missing_after_s = missing_after_s
        self._rollouts: dict[str, LiveRollout] = {}
        self._reserved: dict[str, _Reservation] = {}
        self._live: dict[str, Sample] = {}  # queued or running
        self._users = users or UserTurns()
        self._order = DispatchOrder(self._users)
        self._suspects = SuspectTrials()
        self._num_bytes = 0  # of the tasks that lack records
        self._budgets = StalenessBudgets()
        self._versions, self._now = FleetVersions(), 0.0  # as of the last `set_versions`
        self._workers: dict[str, _WorkerSamples] = {COORDINATOR: _WorkerSamples()}
        self._done: deque[RolloutStatus] = deque(maxlen=64)

    # --- accepting ---

    def reserve(
        self,
        rollout_id: str,
        groups: Sequence[RolloutGroup],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        lengths: Sequence[int] = (),
    ) -> None:
        """Hold room and the id for work that is not durable yet; `add` or `unreserve` follows.

        `lengths` are the encoded groups', where known. Raises InvalidRequest (a bad id or limit, no groups, a group
        twice, no samples), Conflict (the rollout is live) or Overloaded, and then changes nothing.
        """
        if not rollout_id or "/" in rollout_id:
            raise InvalidRequest("a rollout id is not empty and holds no slash", param="rollout_id")
        group_ids = {group.group_id for group in groups}
        if not groups or any(group.num_samples < 1 for group in groups):
            raise InvalidRequest("a rollout needs at least one group, and a group one sample", param="groups")
        if len(group_ids) != len(groups):
            raise InvalidRequest("a group id occurs twice", param="groups")
        if any(group.keep is not None and not 1 <= group.keep <= group.num_samples for group in groups):
            raise InvalidRequest("a group keeps at least one sample, and no more than it has", param="keep")
        self._budgets.check(rollout_id, groups, terms.adapter)
        if rollout_id in self._rollouts or rollout_id in self._reserved:
            raise Conflict(f"rollout {rollout_id} is already running", param="rollout_id")
        reserved = self._reserved.values()
        num_waiting = self.num_queued + sum(g.num_samples for one in reserved for g in one.groups)
        num_new, most = sum(group.num_samples for group in groups), self._max_queued
        if num_waiting + num_new > most:
            raise Overloaded(f"no room for {num_new} more trajectories: {num_waiting} wait, of at most {most}")
        num_bytes = self._num_bytes + sum(sum(one.sizes) for one in reserved)
        sizes = task_sizes(groups, lengths)
        if num_bytes > 0 and num_bytes + sum(sizes) > self._max_queued_bytes:
            raise Overloaded(f"unfinished tasks take {num_bytes} bytes, of at most {self._max_queued_bytes}")
        self._reserved[rollout_id] = _Reservation(groups, terms, sizes)

    def unreserve(self, rollout_id: str) -> None:
        """Give up a reservation. Idempotent."""
        self._reserved.pop(rollout_id, None)

    def add(self, rollout_id: str, now: float) -> None:
        """Queue what was reserved under this id, in its order."""
        one = self._reserved.pop(rollout_id)
        self.restore(
            rollout_id,
            [(group, tuple(range(group.num_samples))) for group in one.groups],
            now,
            terms=one.terms,
            is_restored=False,
            sizes=one.sizes,
        )

    def restore(
        self,
        rollout_id: str,
        work: Iterable[tuple[RolloutGroup, tuple[int, ...]]],
        now: float,
        num_finished: int = 0,
        num_trained: int = 0,
        first_version: int | None = None,
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        num_complete: Mapping[str, int] = MappingProxyType({}),
        is_restored: bool = True,
        sizes: Sequence[int] = (),
    ) -> None:
        """Queue the work that an earlier process accepted and did not finish, past the bounds.

        `num_trained` of the finished ones can be trained on, the first under `first_version`; `num_complete` counts
        the complete ones of groups that keep fewer than they have. `sizes` are of their tasks.
        """
        work = list(work)
        sizes = sizes or task_sizes([group for group, _ in work])
        limit = next((group.staleness for group, _ in work), None)
        budget = self._budgets.join(rollout_id, limit, terms.adapter)
        if budget is not None:
            budget.restore(num_trained, first_version)
        rollout = LiveRollout(
            rollout_id, terms, budget, now, num_accepted=num_finished, num_finished_before=num_finished
        )
        self._rollouts[rollout_id] = rollout
        self._order.join(rollout)
        for (group, sample_indexes), size in zip(work, sizes, strict=True):
            rollout.groups[group.group_id] = one = LiveGroup(
                group.num_samples,
                len(sample_indexes),
                size,
                group.keep,
                num_complete.get(group.group_id, 0),
            )
            self._num_bytes += one.num_bytes
            ids = [assignment_id_of(rollout_id, group.group_id, index) for index in sample_indexes]
            samples = [
                Sample(assignment_id, rollout, group, index, is_restored=is_restored)
                for assignment_id, index in zip(ids, sample_indexes, strict=True)
            ]
            self._live |= zip(ids, samples, strict=True)
            rollout.num_accepted += len(samples)
            rollout.num_queued += len(samples)
            rollout.demands[group.task.weight_version] += len(samples)
            if samples:
                self._order.add_group(samples)
            if one.is_full:
                self._drop(samples)

    # --- workers ---

    def set_versions(self, versions: FleetVersions, now: float) -> None:
        """Measure staleness against what the fleet serves, and against what is coming."""
        self._now = now
        self._budgets.learn(versions)
        if versions != self._versions:
            self._versions = versions
            self._order.versions_changed()

    def take(self, worker_id: str, num_free: int, now: float, try_to_place: TryToPlace) -> tuple[Placed, ...]:
        """Give a worker with `num_free` free places its next samples: suspects that it may try, then the others.
        `try_to_place` is called with each sample whose turn it is. With a lease the sample runs at the worker, and
        both are returned; with a `NoPlace` it stays queued."""
        running = self._workers.setdefault(worker_id, _WorkerSamples()).running.values()
        placed = self._suspects.take(
            running, num_free, now, lambda sample: self._place_suspect(sample, worker_id, now, try_to_place)
        )
        later: set[str] = set()
        while len(placed) < num_free and not is_trial(running, now):
            following = self._order.next(self._versions, try_to_place, later)
            if following is None:
                break
            self._run(following[0], worker_id, now)
            placed.append(following)
        for sample, _ in placed:
            sample.note_wait(now)
        return tuple(placed)

    def report(
        self, worker_id: str, running: Iterable[str], now: float, num_sampled: Sequence[int] = ()
    ) -> tuple[str, ...]:
        """Compare a worker's list of samples with ours. Returns the ids taken from the worker, whose leases end.

        The worker adopts samples of which no other has more (`adopt`). Samples that it does not name for a while
        are lost: the answer that handed them out never arrived. It is told to cancel what is not its own.
        `num_sampled` has the tokens of each; without it, no worker is ahead of another.
        """
        reported = dict(zip(running, num_sampled, strict=True)) if num_sampled else dict.fromkeys(running, 0)
        self.adopt(worker_id, reported, now)
        worker = self._workers.setdefault(worker_id, _WorkerSamples())
        worker.strays = reported.keys() - worker.running.keys()
        lost: list[Sample] = []
        for sample in worker.running.values():
            if sample.assignment_id in reported:
                sample.missing_since = None
                sample.num_sampled = reported[sample.assignment_id]
            elif sample.missing_since is None:
                sample.missing_since = now
            elif now - sample.missing_since >= self._missing_after_s:
                lost.append(sample)
        for sample in lost:
            sample.silent[worker_id] = Silence(sample.attempt, sample.begun_at, num_failed=1)
            self._fail(sample, f"worker {worker_id} does not know of it")
        return tuple(sample.assignment_id for sample in lost)

    def adopt(self, worker_id: str, running: Mapping[str, int], now: float) -> None:
        """Give a worker samples that it runs already, with the tokens that it has of each. After a restart of the
        coordinator these are queued ones. A worker that was given up for lost and is heard again gets back also
        those of which the worker after it has fewer tokens: its silence costs no attempt."""
        for assignment_id, num_sampled in running.items():
            sample = self._live.get(assignment_id)
            if sample is None or sample.worker_id == worker_id:
                continue
            silence = sample.silent.pop(worker_id, None)
            if silence is not None:
                sample.forgive(silence)
            if sample.state is SampleState.QUEUED:
                self._unqueue(sample)
                sample.last_attempt -= silence is not None  # the one that it waited for is not begun
            elif silence is None or sample.is_cancelled or not self._is_ahead(num_sampled, sample):
                continue
            else:
                holder_id = sample.worker_id or COORDINATOR
                self._leave_worker(sample)
                if holder_id != COORDINATOR:
                    self._workers[holder_id].strays.add(assignment_id)
            sample.attempt = sample.attempt if silence is None else silence.attempt
            self._run(sample, worker_id, now if silence is None else silence.begun_at)
            sample.num_sampled = num_sampled

    def _is_ahead(self, num_sampled: int, sample: Sample) -> bool:
        """Tell if a worker with so many tokens has more of a sample than its present worker."""
        return sample.worker_id == COORDINATOR or num_sampled > sample.num_sampled

    def worker_lost(self, worker_id: str, now: float, alive_at: float | None = None) -> tuple[str, ...]:
        """Queue the samples of a silent worker again, as suspects, or owe them a record. Returns their ids.

        `alive_at` is the last sign of the worker's life; None: it died this moment.
        """
        worker = self._workers.pop(worker_id, None)
        lost = list(worker.running.values()) if worker is not None else []
        for sample in self._suspects.note_death(lost, now, now if alive_at is None else alive_at):
            self._order.add_again(sample)
        for sample in lost:
            sample.silent[worker_id] = Silence(
                sample.attempt, sample.begun_at, num_deaths=min(1, sample.num_deaths)
            )
            self._lose(sample, f"worker {worker_id} was lost")
            if sample.state is SampleState.QUEUED and sample.num_deaths:
                self._suspects.add(sample, now)
            elif sample.state is SampleState.QUEUED:
                self._order.add_again(sample)
        return tuple(sample.assignment_id for sample in lost)

    def worker_left(self, worker_id: str) -> tuple[str, ...]:
        """Queue the samples of a worker that ends in order again, at no cost of an attempt. Returns their ids."""
        worker = self._workers.pop(worker_id, None)
        left = list(worker.running.values()) if worker is not None else []
        for sample in left:
            self._lose(sample, f"worker {worker_id} left")
            if sample.state is SampleState.QUEUED:
                self._order.add_again(sample)
        return tuple(sample.assignment_id for sample in left)

    def give_back(self, worker_id: str, assignment_id: str) -> bool:
        """Queue a sample again that its worker stopped without a cancel. False: it was not the worker's."""
        if not self.is_running_at(worker_id, assignment_id):
            return False
        self._fail(self._live[assignment_id], f"worker {worker_id} gave it back")
        return True

    def drop_stale(
        self, worker_id: str, assignment_id: str, attempt: int, lost_tokens: Mapping[LossCause, int] | None = None
    ) -> bool:
        """Begin a sample anew whose worker threw its tokens away for their age, while attempts are left. False,
        without a change: it is not the worker's, or this attempt was dropped before. `lost_tokens` are those of all
        attempts so far."""
        if not self.is_running_at(worker_id, assignment_id) or attempt < self._live[assignment_id].attempt:
            return False
        sample = self._live[assignment_id]
        sample.num_failed += attempt - sample.attempt  # a restarted coordinator does not know of earlier ones
        sample.attempt, sample.last_attempt = attempt, max(attempt, sample.last_attempt)
        sample.num_stale_attempts += 1
        sample.lost_tokens = Counter(lost_tokens or sample.lost_tokens)
        self._fail(sample, "its oldest tokens were older than the run allows", StopReason.STALE)
        return True

    def take_keep_place(self, assignment_id: str) -> bool:
        """Take one of the `keep` places of a sample's group, before its complete record is stored. False: the group
        has its samples, so this one is cancelled. `finished` follows once the record is stored, or
        `give_back_keep_place` if that failed."""
        group = self._group_of(assignment_id)
        if group is None or group.keep is None or assignment_id in group.keep_places:
            return True
        if group.num_complete + len(group.keep_places) >= group.keep:
            return False
        group.keep_places.add(assignment_id)
        return True

    def give_back_keep_place(self, assignment_id: str) -> None:
        """Give a place back that `take_keep_place` took. Idempotent."""
        group = self._group_of(assignment_id)
        if group is not None:
            group.keep_places.discard(assignment_id)

    def finished(self, assignment_id: str, *, is_trained: bool = True, is_kept: bool = False) -> bool:
        """Note that a sample's terminal record is durable. False: it was so before. A worker that still runs the
        sample is told to cancel. `is_trained`: the trainer will consume the record; `is_kept`: the sample fills a
        keep place of its group."""
        sample = self._live.pop(assignment_id, None)
        if sample is None:
            return False
        if sample.state is SampleState.QUEUED:
            self._unqueue(sample)
        else:
            worker = self._workers[sample.worker_id or COORDINATOR]
            if sample.worker_id != COORDINATOR:
                worker.strays.add(assignment_id)
        sample.count_begun(is_trained, self._versions)
        self._leave_worker(sample)
        sample.set_state(SampleState.FINISHED)
        rollout = sample.rollout
        rollout.finished.add(assignment_id)
        group = rollout.groups[sample.group.group_id]
        group.num_left -= 1
        group.keep_places.discard(assignment_id)
        if is_kept and group.keep is not None:
            group.num_complete += 1
            if group.is_full:
                ids = (
                    assignment_id_of(rollout.rollout_id, sample.group.group_id, i) for i in range(group.num_samples)
                )
                self._drop(self._live[other] for other in ids if other in self._live)
        self._num_bytes -= group.num_bytes if group.num_left == 0 else 0
        if rollout.num_queued + rollout.num_running == 0:
            del self._rollouts[rollout.rollout_id]
            self._order.leave(rollout)
            self._budgets.leave(rollout.rollout_id, rollout.budget)
            self._done.append(rollout.status())
        return True

    # --- cancelling ---

    def cancel(self, rollout_id: str) -> Cancellation:
        """End a rollout: queued samples are owed a CANCELLED record, workers are told to end the others. Unknown or
        done rollouts: no-op."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return Cancellation((), ())
        rollout.is_cancelled = True
        mine = [sample for sample in self._live.values() if sample.rollout is rollout]
        running = [sample for sample in mine if sample.state is SampleState.RUNNING]
        dropped = self._drop(mine)
        ids = tuple(sample.assignment_id for sample in running if sample.worker_id != COORDINATOR)
        return Cancellation(tuple(sample.assignment_id for sample in dropped), ids)

    def is_cancelled(self, assignment_id: str) -> bool:
        """Tell if a live sample is to be ended."""
        sample = self._live.get(assignment_id)
        return sample is not None and sample.is_cancelled

    def cancels(self, worker_id: str) -> tuple[str, ...]:
        """Return the samples that a worker has to end. They are repeated: an answer may have been lost."""
        worker = self._workers.get(worker_id)
        return () if worker is None else tuple(sorted(self._to_end(worker)))

    def has_new_cancels(self, worker_id: str) -> bool:
        """Tell if a worker has to end a sample that it was not told of yet."""
        worker = self._workers.get(worker_id)
        return worker is not None and not self._to_end(worker) <= worker.ordered

    def cancels_told(self, worker_id: str, told: Iterable[str]) -> None:
        """Note the cancellations that a worker was told of: they are no reason to answer it again."""
        self._workers.setdefault(worker_id, _WorkerSamples()).ordered = set(told)

    def pending_records(self, now: float) -> tuple[PendingRecord, ...]:
        """Return the samples whose terminal record the coordinator has to write, until `finished` is called."""
        result: list[PendingRecord] = []
        for sample in self._workers[COORDINATOR].running.values():
            reason = StopReason.CANCELLED if sample.is_cancelled else sample.lost_reason
            sample.note_wait(now)
            result.append(PendingRecord(sample, reason, sample.error))
        return tuple(result)

    # --- looking ---

    @property
    def num_queued(self) -> int:
        return sum(rollout.num_queued for rollout in self._rollouts.values())

    def by_user(self) -> tuple[Counter[str], Counter[str]]:
        """Count the samples of each user: those that run, and those that are queued."""
        running, queued = Counter[str](), Counter[str]()
        for rollout in self._rollouts.values():
            user = self._users.name_of(rollout.terms.owner)
            running[user] += rollout.num_running
            queued[user] += rollout.num_queued
        return running, queued

    def is_live(self, assignment_id: str) -> bool:
        """Tell if a sample was accepted and still lacks its record."""
        return assignment_id in self._live

    def is_running_at(self, worker_id: str, assignment_id: str) -> bool:
        sample = self._live.get(assignment_id)
        return sample is not None and sample.worker_id == worker_id

    def num_running_at(self, worker_id: str) -> int:
        """Count the samples that a worker runs."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else len(worker.running)

    def status(self, rollout_id: str) -> RolloutStatus | None:
        """Return the counts of a live rollout; None if it is unknown or done."""
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None else rollout.status(self._num_held(rollout))

    @property
    def live(self) -> tuple[LiveRollout, ...]:
        """The rollouts that lack records. Only the queue changes them."""
        return tuple(self._rollouts.values())

    def adapters(self) -> set[str]:
        """Return the adapters of the rollouts that lack records, and of those that are not durable yet."""
        coming = {one.terms.adapter for one in self._reserved.values()}
        return coming | {one.terms.adapter for one in self._rollouts.values()}

    @property
    def rollouts(self) -> tuple[RolloutStatus, ...]:
        """The latest done ones, then the live ones; oldest first."""
        return (*self._done, *(rollout.status(self._num_held(rollout)) for rollout in self._rollouts.values()))

    def check(self) -> None:
        """Raises InvariantBroken unless every accepted sample is in exactly one place, and counted there."""
        waiting = [*self._order, *self._suspects]
        running = [sample for worker in self._workers.values() for sample in worker.running.values()]
        for samples, state in ((waiting, SampleState.QUEUED), (running, SampleState.RUNNING)):
            if any(sample.state is not state for sample in samples):
                raise InvariantBroken(f"a sample among the {state} ones is in another state")
            if any(sample.is_begun != _takes_a_place(sample) for sample in samples):
                raise InvariantBroken(f"a sample among the {state} ones is miscounted in its run's budget")
        ids = [sample.assignment_id for sample in waiting + running]
        if len(ids) != len(set(ids)) or set(ids) != set(self._live):
            raise InvariantBroken("a live sample is in no place, or in two")
        for rollout in self._rollouts.values():
            counted = (
                sum(sample.rollout is rollout for sample in waiting),
                sum(sample.rollout is rollout for sample in running),
                len(rollout.finished) + rollout.num_finished_before,
            )
            noted = rollout.num_queued, rollout.num_running, rollout.demands.total()
            if noted != (*counted[:2], counted[0]) or sum(counted) != rollout.num_accepted:
                raise InvariantBroken(f"rollout {rollout.rollout_id}: counts {counted} do not add up")
        groups = [group for rollout in self._rollouts.values() for group in rollout.groups.values()]
        if any(one.keep is not None and one.num_complete + len(one.keep_places) > one.keep for one in groups):
            raise InvariantBroken("a group keeps more samples than it was asked for")
        if sum(group.num_bytes for group in groups if group.num_left) != self._num_bytes:
            raise InvariantBroken("the bytes of unfinished tasks are miscounted")

    # --- inside ---

    def _place_suspect(self, sample: Sample, worker_id: str, now: float, try_to_place: TryToPlace) -> Lease | None:
        """Give a suspect to a worker, if its limits admit it now and it gets a lease."""
        lease = try_to_place(sample) if self._order.admits(sample, self._versions) else None
        if lease is None or isinstance(lease, NoPlace):
            return None
        self._run(sample, worker_id, now)
        return lease

    def _run(self, sample: Sample, worker_id: str, begun_at: float) -> None:
        """Note that a sample, queued no more, runs at a worker, or waits at the coordinator for its record."""
        sample.set_state(SampleState.RUNNING)
        sample.worker_id = worker_id
        sample.begun_at = begun_at
        sample.missing_since = None
        sample.num_sampled = 0
        if worker_id != COORDINATOR:
            self._order.begun(sample)
        sample.count_begun(worker_id != COORDINATOR, self._versions)
        self._workers.setdefault(worker_id, _WorkerSamples()).running[sample.assignment_id] = sample

    def _leave_worker(self, sample: Sample) -> None:
        worker = self._workers.get(sample.worker_id) if sample.worker_id is not None else None
        if worker is not None:
            worker.running.pop(sample.assignment_id, None)
        if sample.worker_id not in (None, COORDINATOR):
            self._order.ended(sample)
        sample.worker_id = None

    def _group_of(self, assignment_id: str) -> LiveGroup | None:
        sample = self._live.get(assignment_id)
        return None if sample is None else sample.rollout.groups[sample.group.group_id]

    def _drop(self, samples: Iterable[Sample]) -> list[Sample]:
        """Take those that are queued out: the coordinator owes them a record. Returns them."""
        dropped = [sample for sample in samples if sample.state is SampleState.QUEUED]
        for sample in dropped:
            self._unqueue(sample)
            self._run(sample, COORDINATOR, sample.begun_at)
            sample.error = "cancelled before it ran"
        return dropped

    def _unqueue(self, sample: Sample) -> None:
        self._order.discard(sample)
        self._suspects.discard(sample)

    def _num_held(self, rollout: LiveRollout) -> int:
        """Count the queued samples that wait for weights: those that their run does not admit now, whose rollouts
        are admitted in their order, or those that wait for a version or an adapter. What waits for these is passed
        by, so the larger number is that of both."""
        num_awaiting = rollout.num_awaiting_weights(self._versions, self._now)
        if rollout.budget is None:
            return num_awaiting
        num_queued = 0
        for other in self._rollouts.values():
            num_queued += other.num_queued if other.budget is rollout.budget else 0
            if other is rollout:
                break
        return max(num_awaiting, min(rollout.num_queued, num_queued - rollout.budget.room(self._versions)))

    def _fail(self, sample: Sample, error: str, reason: StopReason = StopReason.LOOP_FAILED) -> None:
        """Take a sample from its worker for a reason of its own: it goes out again before what was never begun."""
        sample.num_failed += 1
        self._lose(sample, error, reason)
        if sample.state is SampleState.QUEUED:
            self._order.add_again(sample)

    def _lose(self, sample: Sample, error: str, reason: StopReason = StopReason.LOOP_FAILED) -> None:
        """End a sample's attempt at its worker. The caller queues it again, unless it is cancelled or out of
        attempts: the coordinator then owes it a record."""
        sample.count_begun(False, self._versions)
        sample.num_sampled_before = 0 if reason is StopReason.STALE else sample.num_sampled
        sample.lost_tokens[LossCause.KILL] += sample.num_sampled_before
        self._leave_worker(sample)
        sample.set_state(SampleState.QUEUED)
        sample.last_attempt += 1
        sample.attempt = sample.last_attempt
        num_counted = sample.num_failed + sample.num_deaths
        sample.error = f"{error}, attempt {num_counted} of {self._max_attempts}"
        sample.lost_reason = reason
        is_guilty = sample.is_only_suspect or sample.num_deaths >= _MOST_SHARED * self._max_attempts
        is_given_up = num_counted >= self._max_attempts if is_guilty else sample.num_failed >= self._max_attempts
        if sample.is_cancelled or is_given_up:
            self._run(sample, COORDINATOR, sample.begun_at)

    def _to_end(self, worker: _WorkerSamples) -> set[str]:
        cancelled = {assignment_id for assignment_id, sample in worker.running.items() if sample.is_cancelled}
        return cancelled | worker.strays


def _takes_a_place(sample: Sample) -> bool:
    return sample.rollout.budget is not None and sample.worker_id not in (None, COORDINATOR)
