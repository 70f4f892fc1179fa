"""The rollout queue: every accepted sample until its terminal record is durable.

    QUEUED ──► RUNNING ──► FINISHED        RUNNING ──► QUEUED  lost or dropped, with attempts left
       └──────────────────────▲            QUEUED ──► FINISHED a worker that was declared lost finished it
                                           RUNNING ──► RUNNING a worker that was declared lost has more of it

One synchronous object in the coordinator's event loop; callers pass the time. Invariant, verified by `check`:
every accepted (group, sample) is in exactly one state. A sample that no worker can finish (cancelled while queued,
or without attempts) is RUNNING at the coordinator, which writes its record (`pending_records`). A sample is
FINISHED only after its record is durable. At most `max_queued` samples and `max_queued_bytes` of their tasks wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentloop.api.coordinator import RolloutStatus, RolloutTerms, assignment_id_of
from agentloop.errors import Conflict, InvalidRequest, InvariantBroken, Overloaded
from agentloop.scheduling.dispatch_order import DispatchOrder, Placed, TryToPlace, UserTurns
from agentloop.scheduling.poison_isolation import PoisonIsolation, is_trial
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
from agentloop.types import Lease, LossCause, RolloutGroup, StopReason

_MOST_SHARED = 4  # in units of `max_attempts`: deaths shared with other samples after which a sample also fails

COORDINATOR = ""  # the worker id of samples whose record the coordinator writes


@dataclass(slots=True, eq=False)
class _WorkerSamples:
    running: dict[str, Sample] = field(default_factory=dict)
    # Samples that it runs although they belong to another worker or to none
    strays: set[str] = field(default_factory=set)
    ordered: set[str] = field(default_factory=set)  # cancellations that were sent to it


@dataclass(frozen=True, slots=True)
class _Reservation:
    groups: Sequence[RolloutGroup]
    terms: RolloutTerms
    sizes: Sequence[int]


class RolloutQueue:
    """The samples without a record: their groups, their workers, and the counts of each rollout."""

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
        self._live: dict[str, Sample] = {}  # the queued and running samples
        self._users = users or UserTurns()
        self._order = DispatchOrder(self._users)
        self._suspects = PoisonIsolation()
        self._num_bytes = 0  # bytes of the tasks without records
        self._budgets = StalenessBudgets()
        self._versions, self._now = FleetVersions(), 0.0  # as of the last `set_versions`
        self._workers: dict[str, _WorkerSamples] = {COORDINATOR: _WorkerSamples()}
        self._done: deque[RolloutStatus] = deque(maxlen=64)

    # Accepting work

    def reserve(
        self,
        rollout_id: str,
        groups: Sequence[RolloutGroup],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        lengths: Sequence[int] = (),
    ) -> None:
        """Reserve capacity and the id for a rollout that is not durable yet. Call `add` or `unreserve` afterwards.

        `lengths` are the sizes of the encoded groups, if known. Raises InvalidRequest (invalid id, limit or
        groups), Conflict (the rollout is live) or Overloaded (the client retries later), without a change.
        """
        if not rollout_id or "/" in rollout_id:
            raise InvalidRequest(
                "invalid rollout id {rollout_id!r}: it must not be empty or contain '/'", param="rollout_id"
            )
        group_ids = {group.group_id for group in groups}
        if not groups or any(group.num_samples < 1 for group in groups):
            raise InvalidRequest(
                "a rollout needs at least one group, and each group at least one sample", param="groups"
            )
        if len(group_ids) != len(groups):
            raise InvalidRequest("group ids of a rollout must be unique: rename the repeated one", param="groups")
        if any(group.keep is not None and not 1 <= group.keep <= group.num_samples for group in groups):
            raise InvalidRequest("'keep' must be between 1 and the group's num_samples", param="keep")
        self._budgets.check(rollout_id, groups, terms.adapter)
        if rollout_id in self._rollouts or rollout_id in self._reserved:
            raise Conflict(
                f"rollout {rollout_id} already exists and is not finished: use another id", param="rollout_id"
            )
        reserved = self._reserved.values()
        num_waiting = self.num_queued + sum(g.num_samples for one in reserved for g in one.groups)
        num_new, most = sum(group.num_samples for group in groups), self._max_queued
        if num_waiting + num_new > most:
            raise Overloaded(
                f"the queue has {num_waiting} of at most {most} trajectories, cannot add {num_new}: retry later"
            )
        num_bytes = self._num_bytes + sum(sum(one.sizes) for one in reserved)
        sizes = task_sizes(groups, lengths)
        if num_bytes > 0 and num_bytes + sum(sizes) > self._max_queued_bytes:
            raise Overloaded(
                f"unfinished tasks take {num_bytes} of at most {self._max_queued_bytes} bytes: retry later"
            )
        self._reserved[rollout_id] = _Reservation(groups, terms, sizes)

    def unreserve(self, rollout_id: str) -> None:
        """Cancel a reservation. Idempotent."""
        self._reserved.pop(rollout_id, None)

    def add(self, rollout_id: str, now: float) -> None:
        """Queue the groups of a rollout's reservation, in their order, and remove the reservation."""
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
        """Queue work that an earlier coordinator accepted and did not finish, without the limits.

        `num_trained` finished trajectories can be trained on, the first with `first_version`. `num_complete`
        counts the complete samples of groups with `keep`. `sizes` are the sizes of the tasks in bytes.
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

    # Workers

    def set_versions(self, versions: FleetVersions, now: float) -> None:
        """Set the versions that staleness is measured against."""
        self._now = now
        self._budgets.learn(versions)
        if versions != self._versions:
            self._versions = versions
            self._order.versions_changed()

    def take(self, worker_id: str, num_free: int, now: float, try_to_place: TryToPlace) -> tuple[Placed, ...]:
        """Dispatch the next samples to a worker with `num_free` free slots: suspects that it may run, then others.

        `try_to_place` is called with each sample. If it grants a lease, the sample runs at the worker and both are
        returned; with a `NoPlace` it stays queued.
        """
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
        """Reconcile a worker's list of samples with ours. Returns the ids taken from the worker, whose leases end.

        The worker keeps samples of which no other worker has more tokens (`adopt`), and is ordered to cancel the
        rest. `num_sampled` has the tokens of each sample; without it no worker is ahead.
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
            # The response that dispatched the sample never reached the worker.
            elif now - sample.missing_since >= self._missing_after_s:
                lost.append(sample)
        for sample in lost:
            sample.silent[worker_id] = Silence(sample.attempt, sample.begun_at, num_failed=1)
            self._fail(sample, f"worker {worker_id} did not receive it")
        return tuple(sample.assignment_id for sample in lost)

    def adopt(self, worker_id: str, running: Mapping[str, int], now: float) -> None:
        """Assign samples to a worker that already runs them. `running` maps their ids to numbers of tokens.

        A queued sample is assigned to the worker; after a coordinator restart all samples are queued. If the worker
        was declared lost and another worker runs the sample, the worker with more tokens keeps it. The failures
        that were counted for the lost worker's silence are undone.
        """
        for assignment_id, num_sampled in running.items():
            sample = self._live.get(assignment_id)
            if sample is None or sample.worker_id == worker_id:
                continue
            silence = sample.silent.pop(worker_id, None)
            if silence is not None:
                sample.forgive(silence)
            if sample.state is SampleState.QUEUED:
                self._unqueue(sample)
                sample.last_attempt -= silence is not None  # the attempt that it was queued for did not start
            # The worker with more tokens keeps the sample, so that fewer tokens are sampled twice; the other one
            # cancels it.
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
        return sample.worker_id == COORDINATOR or num_sampled > sample.num_sampled

    def worker_lost(self, worker_id: str, now: float, alive_at: float | None = None) -> tuple[str, ...]:
        """Queue the samples of a lost worker as suspects, or let the coordinator write their records. Returns
        their ids.

        `alive_at` is the time of the worker's last report; None: it died now.
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
        """Queue the samples of a worker that shut down, without counting an attempt. Returns their ids."""
        worker = self._workers.pop(worker_id, None)
        left = list(worker.running.values()) if worker is not None else []
        for sample in left:
            self._lose(sample, f"worker {worker_id} left")
            if sample.state is SampleState.QUEUED:
                self._order.add_again(sample)
        return tuple(sample.assignment_id for sample in left)

    def give_back(self, worker_id: str, assignment_id: str) -> bool:
        """Queue a sample that its worker stopped without a cancellation.

        Returns False if the worker did not have it.
        """
        if not self.is_running_at(worker_id, assignment_id):
            return False
        self._fail(self._live[assignment_id], f"worker {worker_id} returned it unfinished")
        return True

    def drop_stale(
        self, worker_id: str, assignment_id: str, attempt: int, lost_tokens: Mapping[LossCause, int] | None = None
    ) -> bool:
        """Queue a sample again after its worker dropped its tokens as too old, while attempts are left.

        `lost_tokens` are the lost tokens of all attempts so far. Returns False, without a change, if the worker
        does not have it or this attempt was dropped before.
        """
        if not self.is_running_at(worker_id, assignment_id) or attempt < self._live[assignment_id].attempt:
            return False
        sample = self._live[assignment_id]
        # A restarted coordinator has not counted the earlier attempts
        sample.num_failed += attempt - sample.attempt
        sample.attempt, sample.last_attempt = attempt, max(attempt, sample.last_attempt)
        sample.num_stale_attempts += 1
        sample.lost_tokens = Counter(lost_tokens or sample.lost_tokens)
        self._fail(sample, "its oldest tokens exceeded the run's max_staleness", StopReason.STALE)
        return True

    def take_keep_place(self, assignment_id: str) -> bool:
        """Reserve one of the `keep` slots of a sample's group, before its complete record is stored.

        Returns False if the group is full, so the sample is cancelled. Call `finished` once the record is stored,
        or `give_back_keep_place` if that failed.
        """
        group = self._group_of(assignment_id)
        if group is None or group.keep is None or assignment_id in group.keep_places:
            return True
        if group.num_complete + len(group.keep_places) >= group.keep:
            return False
        group.keep_places.add(assignment_id)
        return True

    def give_back_keep_place(self, assignment_id: str) -> None:
        """Release a slot that `take_keep_place` reserved. Idempotent."""
        group = self._group_of(assignment_id)
        if group is not None:
            group.keep_places.discard(assignment_id)

    def finished(self, assignment_id: str, *, is_trained: bool = True, is_kept: bool = False) -> bool:
        """Record that a sample's terminal record is durable. Returns False if it was recorded before.

        A worker that still runs the sample is ordered to cancel it. `is_trained` means that the trainer will
        consume the record, `is_kept` that the sample fills a `keep` slot of its group.
        """
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
            # The group has its samples, so its others are cancelled.
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

    # Cancellation

    def cancel(self, rollout_id: str) -> Cancellation:
        """Cancel a rollout: queued samples get a CANCELLED record, workers cancel the running ones.

        No effect on an unknown or finished rollout.
        """
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
        """Return True if a live sample is cancelled."""
        sample = self._live.get(assignment_id)
        return sample is not None and sample.is_cancelled

    def cancels(self, worker_id: str) -> tuple[str, ...]:
        """Return the samples that a worker must cancel, including those it was sent, because a response may be
        lost."""
        worker = self._workers.get(worker_id)
        return () if worker is None else tuple(sorted(self._to_end(worker)))

    def has_new_cancels(self, worker_id: str) -> bool:
        """Return True if a worker must cancel a sample and was not sent the cancellation yet."""
        worker = self._workers.get(worker_id)
        return worker is not None and not self._to_end(worker) <= worker.ordered

    def cancels_told(self, worker_id: str, told: Iterable[str]) -> None:
        """Record the cancellations that were sent to a worker; they do not trigger another response."""
        self._workers.setdefault(worker_id, _WorkerSamples()).ordered = set(told)

    def pending_records(self, now: float) -> tuple[PendingRecord, ...]:
        """Return the samples whose terminal record the coordinator must write, until `finished` is called."""
        result: list[PendingRecord] = []
        for sample in self._workers[COORDINATOR].running.values():
            reason = StopReason.CANCELLED if sample.is_cancelled else sample.lost_reason
            sample.note_wait(now)
            result.append(PendingRecord(sample, reason, sample.error))
        return tuple(result)

    # Queries

    @property
    def num_queued(self) -> int:
        return sum(rollout.num_queued for rollout in self._rollouts.values())

    def by_user(self) -> tuple[Counter[str], Counter[str]]:
        """Return the number of running and of queued samples per user."""
        running, queued = Counter[str](), Counter[str]()
        for rollout in self._rollouts.values():
            user = self._users.name_of(rollout.terms.owner)
            running[user] += rollout.num_running
            queued[user] += rollout.num_queued
        return running, queued

    def is_live(self, assignment_id: str) -> bool:
        """Return True if a sample was accepted and has no durable record."""
        return assignment_id in self._live

    def is_running_at(self, worker_id: str, assignment_id: str) -> bool:
        sample = self._live.get(assignment_id)
        return sample is not None and sample.worker_id == worker_id

    def num_running_at(self, worker_id: str) -> int:
        worker = self._workers.get(worker_id)
        return 0 if worker is None else len(worker.running)

    def status(self, rollout_id: str) -> RolloutStatus | None:
        """Return the counts of a live rollout; None if it is unknown or finished."""
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None else rollout.status(self._num_held(rollout))

    @property
    def live(self) -> tuple[LiveRollout, ...]:
        """The rollouts with unfinished samples. Only the queue changes them."""
        return tuple(self._rollouts.values())

    def adapters(self) -> set[str]:
        """Return the adapters of all live and reserved rollouts."""
        coming = {one.terms.adapter for one in self._reserved.values()}
        return coming | {one.terms.adapter for one in self._rollouts.values()}

    @property
    def rollouts(self) -> tuple[RolloutStatus, ...]:
        """The last finished rollouts, then the live ones; oldest first."""
        return (*self._done, *(rollout.status(self._num_held(rollout)) for rollout in self._rollouts.values()))

    def check(self) -> None:
        """Raise InvariantBroken unless every accepted sample is in exactly one state and all counts agree."""
        waiting = [*self._order, *self._suspects]
        running = [sample for worker in self._workers.values() for sample in worker.running.values()]
        for samples, state in ((waiting, SampleState.QUEUED), (running, SampleState.RUNNING)):
            if any(sample.state is not state for sample in samples):
                raise InvariantBroken(f"a sample in the {state} collection has another state")
            if any(sample.is_begun != _takes_a_place(sample) for sample in samples):
                raise InvariantBroken(f"a {state} sample is miscounted in its run's staleness budget")
        ids = [sample.assignment_id for sample in waiting + running]
        if len(ids) != len(set(ids)) or set(ids) != set(self._live):
            raise InvariantBroken("a live sample is in no collection, or in two")
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
            raise InvariantBroken("a group has more complete samples than its 'keep'")
        if sum(group.num_bytes for group in groups if group.num_left) != self._num_bytes:
            raise InvariantBroken("the byte count of unfinished tasks is wrong")

    def _place_suspect(self, sample: Sample, worker_id: str, now: float, try_to_place: TryToPlace) -> Lease | None:
        """Run a suspect at a worker if its limits admit it and it gets a lease."""
        lease = try_to_place(sample) if self._order.admits(sample, self._versions) else None
        if lease is None or isinstance(lease, NoPlace):
            return None
        self._run(sample, worker_id, now)
        return lease

    def _run(self, sample: Sample, worker_id: str, begun_at: float) -> None:
        """Move a sample to a worker, or to the coordinator that writes its record."""
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
        """Move the queued samples to the coordinator, which writes their records. Returns these samples."""
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
        """Return the number of queued samples that wait for weights.

        A run's budget admits its rollouts in their order. Samples that wait for a version or an adapter are
        skipped, so both counts overlap and the larger one is the result.
        """
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
        """Take a sample from its worker after a failure, and queue it ahead of samples that never started."""
        sample.num_failed += 1
        self._lose(sample, error, reason)
        if sample.state is SampleState.QUEUED:
            self._order.add_again(sample)

    def _lose(self, sample: Sample, error: str, reason: StopReason = StopReason.LOOP_FAILED) -> None:
        """End a sample's attempt at its worker.

        The caller queues it again, unless it is cancelled or has no attempt left: then the coordinator writes its
        record.
        """
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
        # A sample that shared its workers' deaths with others fails only after many more deaths.
        is_guilty = sample.is_only_suspect or sample.num_deaths >= _MOST_SHARED * self._max_attempts
        is_given_up = num_counted >= self._max_attempts if is_guilty else sample.num_failed >= self._max_attempts
        if sample.is_cancelled or is_given_up:
            self._run(sample, COORDINATOR, sample.begun_at)

    def _to_end(self, worker: _WorkerSamples) -> set[str]:
        cancelled = {assignment_id for assignment_id, sample in worker.running.items() if sample.is_cancelled}
        return cancelled | worker.strays


def _takes_a_place(sample: Sample) -> bool:
    return sample.rollout.budget is not None and sample.worker_id not in (None, COORDINATOR)
