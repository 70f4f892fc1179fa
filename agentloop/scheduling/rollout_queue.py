"""The rollout queue: every accepted sample, until its terminal record is stored.

Ownership: one object, in the coordinator's event loop, synchronous; time is passed in. Invariant, proven by
`check`: every accepted (group, sample) is in exactly one of

    QUEUED ──► RUNNING ──► FINISHED        RUNNING ──► QUEUED  lost or dropped, and attempts are left
       └──────────────────────▲            QUEUED ──► FINISHED a worker given up for lost came back with it
                                           RUNNING ──► RUNNING such a worker has more of it than the one after it

A sample that no worker can finish any more (cancelled while queued, or out of attempts) is RUNNING at the
coordinator itself, which owes it a record: see `pending_records`. Nothing is FINISHED before its record is durable.

Bound: `max_queued` samples wait; a client whose work does not fit gets Overloaded and waits outside. Groups go
out first in, first out, and whole: a group waits until one worker has room for all of it, unless it is larger
than that worker ever could hold. What a run's staleness limit holds back is passed by, and divides a group if only
a part of it is admitted.

A worker's silence costs an attempt only until the worker is heard again. If the sample went to another worker
meanwhile, the one that has sampled more tokens of it keeps it, the later one if they are equal: fewer tokens are
sampled twice. The other is told to cancel.

A sample is one trajectory still to be made: (rollout, group, index), from its acceptance to its terminal record.
Samples and live rollouts are the queue's own; nothing else changes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from agentloop.api import RolloutStatus
from agentloop.errors import Conflict, InvalidRequest, InvariantBroken, Overloaded
from agentloop.scheduling.staleness_budget import FleetVersions, StalenessBudget, StalenessBudgets
from agentloop.types import RolloutGroup, StopReason

COORDINATOR = ""  # the worker id under which the coordinator holds samples whose record it writes itself


class SampleState(StrEnum):
    """States of a sample; `_MOVES` says which follows which."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


_MOVES: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.QUEUED: frozenset({SampleState.RUNNING, SampleState.FINISHED}),
    SampleState.RUNNING: frozenset({SampleState.QUEUED, SampleState.RUNNING, SampleState.FINISHED}),
    SampleState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sample:
    """One sample that lacks its record."""

    assignment_id: str
    rollout: LiveRollout
    group: RolloutGroup
    sample_index: int
    queued_at: float
    queued_s: float = 0.0  # how long it had waited when it was last handed out
    state: SampleState = SampleState.QUEUED
    worker_id: str | None = None
    attempt: int = 0  # the number of the run that it is in, or begins next
    last_attempt: int = 0  # the highest of those numbers
    num_failed: int = 0  # runs that count: after `max_attempts` of them there is no other
    silent: dict[str, int] = field(default_factory=dict)  # workers given up for lost, and their attempts
    num_sampled: int = 0  # tokens, as its worker last reported
    num_stale_attempts: int = 0
    is_begun: bool = False  # counted in its run's budget
    missing_since: float | None = None  # its worker's reports do not name it since then
    error: str = ""
    lost_reason: StopReason = StopReason.LOOP_FAILED  # its record's, if no attempt is left

    def count_begun(self, is_begun: bool, served: int | None) -> None:
        """Take a place in the run's budget, or give it back."""
        budget = self.rollout.budget
        if budget is not None and is_begun != self.is_begun:
            self.is_begun = is_begun
            if is_begun:
                budget.begin(served)
            else:
                budget.give_back()

    def hand_out(self, now: float) -> Sample:
        """Note how long it has waited; returns itself, which only the queue changes."""
        self.queued_s = max(0.0, now - self.queued_at)
        return self


SampleQueue: TypeAlias = OrderedDict[str, list[Sample]]
"""Queued samples by group key, the next group first."""


@dataclass(slots=True, eq=False)
class LiveRollout:
    """A rollout that lacks records, and its counts."""

    rollout_id: str
    budget: StalenessBudget | None
    groups: dict[str, RolloutGroup] = field(default_factory=dict)
    num_accepted: int = 0
    num_finished_before: int = 0  # by a coordinator before this one
    num_queued: int = 0
    num_running: int = 0
    finished: set[str] = field(default_factory=set)
    is_cancelled: bool = False
    again: SampleQueue = field(default_factory=OrderedDict)  # samples that a worker had before
    waiting: SampleQueue = field(default_factory=OrderedDict)

    def queue_again(self, sample: Sample) -> None:
        """Put a sample that a worker had before everything else."""
        key = group_key(sample.assignment_id)
        self.again.setdefault(key, []).append(sample)
        self.again.move_to_end(key, last=False)

    def unqueue(self, sample: Sample) -> None:
        key = group_key(sample.assignment_id)
        for queue in (self.again, self.waiting):
            if sample in queue.get(key, ()):
                queue[key].remove(sample)
                if not queue[key]:
                    del queue[key]

    def status(self, num_held: int = 0) -> RolloutStatus:
        num_finished = self.num_accepted - self.num_queued - self.num_running
        counts = (self.num_accepted, num_finished, self.num_running, self.num_queued)
        return RolloutStatus(self.rollout_id, *counts, num_held=num_held)


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A sample whose terminal record the coordinator has to write.

    CANCELLED, or after `max_attempts` the reason of the last one: LOOP_FAILED if its worker died of it (a lost
    engine is answered by another lease and never ends up here), STALE if it was dropped for its age.
    """

    sample: Sample
    stop_reason: StopReason
    error: str


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The samples a cancel met: ids now owed a record by the coordinator, and ids that workers have to end."""

    dropped: tuple[str, ...]
    running: tuple[str, ...]


def assignment_id(rollout_id: str, group_id: str, sample_index: int) -> str:
    """Return the name of one sample. One-to-one, because a rollout id holds no slash."""
    return f"{rollout_id}/{group_id}/{sample_index}"


def group_key(name: str) -> str:
    """Return what the siblings of an assignment have in common, over all rollouts."""
    return name.rpartition("/")[0]


@dataclass(slots=True, eq=False)
class _WorkerSamples:
    running: dict[str, Sample] = field(default_factory=dict)
    strays: set[str] = field(default_factory=set)  # it runs them, but they are not, or no longer, its own
    ordered: set[str] = field(default_factory=set)  # cancellations it was already told


class RolloutQueue:
    """Groups, who runs what, and what each rollout still lacks."""

    def __init__(self, *, max_queued: int = 100_000, max_attempts: int = 3, missing_after_s: float = 30.0) -> None:
        self._max_queued = max_queued
        self._max_attempts = max_attempts
        self._missing_after_s = missing_after_s
        self._rollouts: dict[str, LiveRollout] = {}
        self._reserved: dict[str, Sequence[RolloutGroup]] = {}
        self._live: dict[str, Sample] = {}  # queued or running
        self._budgets = StalenessBudgets()
        self._versions = FleetVersions()
        self._workers: dict[str, _WorkerSamples] = {COORDINATOR: _WorkerSamples()}
        self._done: deque[RolloutStatus] = deque(maxlen=64)

    # --- accepting ---

    def reserve(self, rollout_id: str, groups: Sequence[RolloutGroup]) -> None:
        """Claim room and the name before the work is made durable; `add` or `unreserve` follows.

        Raises InvalidRequest (a bad id or limit, no groups, a group twice, no samples), Conflict (the rollout is
        live) or Overloaded, and then changes nothing.
        """
        if not rollout_id or "/" in rollout_id:
            raise InvalidRequest("a rollout id is not empty and holds no slash", param="rollout_id")
        group_ids = {group.group_id for group in groups}
        if not groups or any(group.num_samples < 1 for group in groups):
            raise InvalidRequest("a rollout needs at least one group, and a group one sample", param="groups")
        if len(group_ids) != len(groups):
            raise InvalidRequest("a group id occurs twice", param="groups")
        self._budgets.check(rollout_id, groups)
        if rollout_id in self._rollouts or rollout_id in self._reserved:
            raise Conflict(f"rollout {rollout_id} is already running", param="rollout_id")
        num_reserved = sum(g.num_samples for reserved in self._reserved.values() for g in reserved)
        num_new = sum(group.num_samples for group in groups)
        if self.num_queued + num_reserved + num_new > self._max_queued:
            raise Overloaded(f"{self.num_queued} trajectories are queued, of at most {self._max_queued}")
        self._reserved[rollout_id] = groups

    def unreserve(self, rollout_id: str) -> None:
        """Give up a reservation. Idempotent."""
        self._reserved.pop(rollout_id, None)

    def add(self, rollout_id: str, now: float) -> None:
        """Queue what was reserved under this id, in its order."""
        groups = self._reserved.pop(rollout_id)
        self.restore(rollout_id, [(group, tuple(range(group.num_samples))) for group in groups], now)

    def restore(
        self,
        rollout_id: str,
        work: Iterable[tuple[RolloutGroup, tuple[int, ...]]],
        now: float,
        num_finished: int = 0,
        num_trained: int = 0,
        first_version: int | None = None,
    ) -> None:
        """Queue what an earlier process accepted and did not finish. Past the bound: it was admitted.

        `num_trained` of the finished ones can be trained on, the first under `first_version`.
        """
        work = list(work)
        budget = self._budgets.join(rollout_id, next((group.staleness for group, _ in work), None))
        if budget is not None:
            budget.restore(num_trained, first_version)
        rollout = LiveRollout(rollout_id, budget, num_accepted=num_finished, num_finished_before=num_finished)
        self._rollouts[rollout_id] = rollout
        for group, sample_indexes in work:
            rollout.groups[group.group_id] = group
            for index in sample_indexes:
                name = assignment_id(rollout_id, group.group_id, index)
                self._live[name] = sample = Sample(name, rollout, group, index, now)
                rollout.waiting.setdefault(group_key(name), []).append(sample)
                rollout.num_accepted += 1
                rollout.num_queued += 1

    # --- workers ---

    def set_versions(self, versions: FleetVersions) -> None:
        """Measure staleness against what the fleet serves, and against what is coming."""
        self._versions = versions
        self._budgets.learn(versions.served)

    def take(self, worker_id: str, num_free: int, now: float) -> tuple[Sample, ...]:
        """The next groups that fit `num_free` places of a worker, whole and in order, as their runs admit them."""
        taken: list[Sample] = []
        capacity = num_free + self.num_running(worker_id)
        for queue, budget in self._queues():
            while queue:
                key, samples = next(iter(queue.items()))
                num_admitted = len(samples)
                if budget is not None:
                    num_admitted = min(num_admitted, budget.room(self._versions))
                if num_admitted == 0:
                    break
                num_left = num_free - len(taken)
                if num_left <= 0 or num_left < num_admitted <= capacity:
                    return tuple(sample.hand_out(now) for sample in taken)
                batch = samples[: min(num_left, num_admitted)]
                del samples[: len(batch)]
                if not samples:
                    del queue[key]
                for sample in batch:
                    self._run(sample, worker_id)
                taken.extend(batch)
        return tuple(sample.hand_out(now) for sample in taken)

    def report(
        self, worker_id: str, running: Iterable[str], now: float, num_sampled: Sequence[int] = ()
    ) -> tuple[str, ...]:
        """Hold a worker's own list against ours; returns the ids taken from it, whose leases end.

        Samples that it runs and nobody else has more of become its own (`adopt`); samples that it does not name for
        a while are lost (the answer that handed them out never arrived); what is not its own it is told to cancel.
        `num_sampled` has the tokens of each; without it, no worker is ahead of another.
        """
        reported = dict(zip(running, num_sampled, strict=True)) if num_sampled else dict.fromkeys(running, 0)
        self.adopt(worker_id, reported)
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
            sample.silent[worker_id] = sample.attempt
            self._lose(sample, f"worker {worker_id} does not know of it")
        return tuple(sample.assignment_id for sample in lost)

    def adopt(self, worker_id: str, running: Mapping[str, int]) -> None:
        """Samples that a worker runs become its own, with the tokens it has of each: after a restart of the
        coordinator those that are queued, and when a worker that was given up for lost is heard again also those
        that another worker has less of. Its silence then was a stall, which costs no attempt."""
        for name, num_sampled in running.items():
            sample = self._live.get(name)
            if sample is None or sample.worker_id == worker_id:
                continue
            attempt = sample.silent.pop(worker_id, None)
            if attempt is not None:
                sample.num_failed -= 1
            if sample.state is SampleState.QUEUED:
                sample.rollout.unqueue(sample)
                sample.last_attempt -= attempt is not None  # the one that it waited for is not begun
            elif attempt is None or sample.rollout.is_cancelled or not self._is_ahead(num_sampled, sample):
                continue
            else:
                holder = self._leave_worker(sample)
                if sample.worker_id != COORDINATOR:
                    holder.strays.add(name)
            sample.attempt = sample.attempt if attempt is None else attempt
            self._run(sample, worker_id)
            sample.num_sampled = num_sampled

    def _is_ahead(self, num_sampled: int, sample: Sample) -> bool:
        """Tell if a worker with so many tokens has more of a sample than who holds it now."""
        return sample.worker_id == COORDINATOR or num_sampled > sample.num_sampled

    def worker_lost(self, worker_id: str) -> tuple[str, ...]:
        """A worker is silent: what it ran is queued again, or owed a record. Returns the ids it ran."""
        worker = self._workers.pop(worker_id, None)
        lost = list(worker.running.values()) if worker is not None else []
        for sample in lost:
            sample.silent[worker_id] = sample.attempt
            self._lose(sample, f"worker {worker_id} was lost")
        return tuple(sample.assignment_id for sample in lost)

    def worker_left(self, worker_id: str) -> tuple[str, ...]:
        """A worker ends in order: what it ran is queued again, at no cost of an attempt. Returns the ids it ran."""
        worker = self._workers.pop(worker_id, None)
        left = list(worker.running.values()) if worker is not None else []
        for sample in left:
            sample.num_failed -= 1
            self._lose(sample, f"worker {worker_id} left")
        return tuple(sample.assignment_id for sample in left)

    def give_back(self, worker_id: str, name: str) -> bool:
        """A worker stopped a sample that nobody had cancelled. False: it was not its own, nothing changes."""
        if not self.is_running_at(worker_id, name):
            return False
        self._lose(self._live[name], f"worker {worker_id} gave it back")
        return True

    def drop_stale(self, worker_id: str, name: str, attempt: int) -> bool:
        """A worker threw away a sample's tokens for their age: it is begun anew, while attempts are left. False: it
        is not the worker's, or this attempt was dropped before; nothing changes."""
        if not self.is_running_at(worker_id, name) or attempt < self._live[name].attempt:
            return False
        sample = self._live[name]
        sample.num_failed += attempt - sample.attempt  # a restarted coordinator does not know of earlier ones
        sample.attempt, sample.last_attempt = attempt, max(attempt, sample.last_attempt)
        sample.num_stale_attempts += 1
        self._lose(sample, "its oldest tokens were older than the run allows", StopReason.STALE)
        return True

    def finished(self, name: str, *, is_trained: bool = True) -> bool:
        """The terminal record of a sample is durable. False: it was so before. If a worker other than the one
        who finished it runs it too, that one is told to cancel. `is_trained`: the trainer will consume it."""
        sample = self._live.pop(name, None)
        if sample is None:
            return False
        if sample.state is SampleState.QUEUED:
            sample.rollout.unqueue(sample)
        elif sample.worker_id is not None:
            worker = self._workers[sample.worker_id]
            del worker.running[name]
            if sample.worker_id != COORDINATOR:
                worker.strays.add(name)
        self._set_state(sample, SampleState.FINISHED)
        sample.count_begun(is_trained, self._versions.served)
        rollout = sample.rollout
        rollout.finished.add(name)
        if rollout.num_queued + rollout.num_running == 0:
            del self._rollouts[rollout.rollout_id]
            self._budgets.leave(rollout.rollout_id, rollout.budget)
            self._done.append(rollout.status())
        return True

    # --- cancelling ---

    def cancel(self, rollout_id: str) -> Cancellation:
        """End a rollout: its queued samples are owed a CANCELLED record, its workers are told to end the rest.
        Unknown or done rollouts: no-op."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return Cancellation((), ())
        rollout.is_cancelled = True
        mine = [sample for sample in self._live.values() if sample.rollout is rollout]
        dropped = [sample for sample in mine if sample.state is SampleState.QUEUED]
        running = [sample for sample in mine if sample.state is SampleState.RUNNING]
        for sample in dropped:
            rollout.unqueue(sample)
            self._run(sample, COORDINATOR)
            sample.error = "cancelled before it ran"
        ids = tuple(sample.assignment_id for sample in running if sample.worker_id != COORDINATOR)
        return Cancellation(tuple(sample.assignment_id for sample in dropped), ids)

    def is_cancelled(self, name: str) -> bool:
        """Return true if a client asked to end this live sample."""
        sample = self._live.get(name)
        return sample is not None and sample.rollout.is_cancelled

    def cancels(self, worker_id: str) -> tuple[str, ...]:
        """Return what a worker has to end, told before or not: an answer may have been lost."""
        worker = self._workers.get(worker_id)
        return () if worker is None else tuple(sorted(self._to_end(worker)))

    def has_new_cancels(self, worker_id: str) -> bool:
        """Return true if there is something to end that the worker was not yet told."""
        worker = self._workers.get(worker_id)
        return worker is not None and not self._to_end(worker) <= worker.ordered

    def cancels_told(self, worker_id: str, told: Iterable[str]) -> None:
        """The worker got these; they alone are no reason to answer it again."""
        self._workers.setdefault(worker_id, _WorkerSamples()).ordered = set(told)

    def pending_records(self, now: float) -> tuple[PendingRecord, ...]:
        """The samples whose terminal record the coordinator has to write, until `finished` is called."""
        result: list[PendingRecord] = []
        for sample in self._workers[COORDINATOR].running.values():
            reason = StopReason.CANCELLED if sample.rollout.is_cancelled else sample.lost_reason
            result.append(PendingRecord(sample.hand_out(now), reason, sample.error))
        return tuple(result)

    # --- looking ---

    @property
    def num_queued(self) -> int:
        return sum(rollout.num_queued for rollout in self._rollouts.values())

    def num_running(self, worker_id: str) -> int:
        worker = self._workers.get(worker_id)
        return 0 if worker is None else len(worker.running)

    def is_live(self, name: str) -> bool:
        """Return true if a sample was accepted and still lacks its record."""
        return name in self._live

    def is_running_at(self, worker_id: str, name: str) -> bool:
        sample = self._live.get(name)
        return sample is not None and sample.worker_id == worker_id

    def is_repeat(self, rollout_id: str, groups: Sequence[RolloutGroup]) -> bool:
        """Return true if a live rollout consists of these groups, as far as this process knows it."""
        rollout = self._rollouts.get(rollout_id)
        offered = {group.group_id: group.num_samples for group in groups}
        return rollout is not None and all(
            offered.get(group.group_id) == group.num_samples for group in rollout.groups.values()
        )

    def status(self, rollout_id: str) -> RolloutStatus | None:
        """Counts of a live rollout since this process knows it; None if it is unknown or done."""
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None else rollout.status(self._num_held(rollout))

    @property
    def rollouts(self) -> tuple[RolloutStatus, ...]:
        """The latest done ones, then the live ones; oldest first."""
        return (*self._done, *(rollout.status(self._num_held(rollout)) for rollout in self._rollouts.values()))

    def check(self) -> None:
        """Raises InvariantBroken unless every accepted sample is in exactly one place, and counted there."""
        waiting = [sample for queue, _ in self._queues() for samples in queue.values() for sample in samples]
        running = [sample for worker in self._workers.values() for sample in worker.running.values()]
        for samples, state in ((waiting, SampleState.QUEUED), (running, SampleState.RUNNING)):
            if any(sample.state is not state for sample in samples):
                raise InvariantBroken(f"a sample among the {state} ones is in another state")
            if any(sample.is_begun != _takes_a_place(sample) for sample in samples):
                raise InvariantBroken(f"a sample among the {state} ones is miscounted in its run's budget")
        names = [sample.assignment_id for sample in waiting + running]
        if len(names) != len(set(names)) or set(names) != set(self._live):
            raise InvariantBroken("a live sample is in no place, or in two")
        for rollout in self._rollouts.values():
            counted = (
                sum(sample.rollout is rollout for sample in waiting),
                sum(sample.rollout is rollout for sample in running),
                len(rollout.finished) + rollout.num_finished_before,
            )
            if counted[:2] != (rollout.num_queued, rollout.num_running) or sum(counted) != rollout.num_accepted:
                raise InvariantBroken(f"rollout {rollout.rollout_id}: counts {counted} do not add up")

    # --- inside ---

    def _run(self, sample: Sample, worker_id: str) -> None:
        self._set_state(sample, SampleState.RUNNING)
        sample.worker_id = worker_id
        sample.missing_since = None
        sample.num_sampled = 0
        sample.count_begun(worker_id != COORDINATOR, self._versions.served)
        self._workers.setdefault(worker_id, _WorkerSamples()).running[sample.assignment_id] = sample

    def _queues(self) -> Iterator[tuple[SampleQueue, StalenessBudget | None]]:
        """Yield the queues in their turn: what a worker had before goes first, then rollout by rollout."""
        rollouts = tuple(self._rollouts.values())
        yield from ((rollout.again, rollout.budget) for rollout in rollouts)
        yield from ((rollout.waiting, rollout.budget) for rollout in rollouts)

    def _num_held(self, rollout: LiveRollout) -> int:
        """Count the queued samples that their run does not admit now; its rollouts are admitted in their order."""
        if rollout.budget is None:
            return 0
        num_queued = 0
        for other in self._rollouts.values():
            num_queued += other.num_queued if other.budget is rollout.budget else 0
            if other is rollout:
                break
        return max(0, min(rollout.num_queued, num_queued - rollout.budget.room(self._versions)))

    def _lose(self, sample: Sample, error: str, reason: StopReason = StopReason.LOOP_FAILED) -> None:
        """Take a sample from its worker: queue it first in line, or hold it for its record."""
        self._leave_worker(sample)
        self._set_state(sample, SampleState.QUEUED)
        sample.count_begun(False, self._versions.served)
        sample.worker_id = None
        sample.num_failed += 1
        sample.last_attempt += 1
        sample.attempt = sample.last_attempt
        sample.error = f"{error}, attempt {sample.num_failed} of {self._max_attempts}"
        sample.lost_reason = reason
        if sample.rollout.is_cancelled or sample.num_failed >= self._max_attempts:
            self._run(sample, COORDINATOR)
        else:
            sample.rollout.queue_again(sample)

    def _leave_worker(self, sample: Sample) -> _WorkerSamples:
        """Take a sample from its worker's list. Returns what else that worker has."""
        worker = self._workers.get(sample.worker_id or COORDINATOR, _WorkerSamples())
        worker.running.pop(sample.assignment_id, None)
        return worker

    def _set_state(self, sample: Sample, state: SampleState) -> None:
        if state not in _MOVES[sample.state]:
            raise InvariantBroken(f"{sample.assignment_id} cannot go from {sample.state} to {state}")
        rollout = sample.rollout
        rollout.num_queued += (state is SampleState.QUEUED) - (sample.state is SampleState.QUEUED)
        rollout.num_running += (state is SampleState.RUNNING) - (sample.state is SampleState.RUNNING)
        sample.state = state

    def _to_end(self, worker: _WorkerSamples) -> set[str]:
        cancelled = {name for name, sample in worker.running.items() if sample.rollout.is_cancelled}
        return cancelled | worker.strays


def _takes_a_place(sample: Sample) -> bool:
    return sample.rollout.budget is not None and sample.worker_id not in (None, COORDINATOR)
