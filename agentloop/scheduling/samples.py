"""Samples and live rollouts: what the rollout queue keeps of work that lacks records.

Ownership: the queue alone changes them. A sample is one trajectory still to be made: (rollout, group, index), from
its acceptance to its terminal record.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentloop.api.coordinator import RolloutStatus, RolloutTerms
from agentloop.errors import InvariantBroken
from agentloop.scheduling.staleness_budget import FleetVersions, StalenessBudget
from agentloop.types import LossCause, RolloutGroup, StopReason
from agentloop.values import codec
from agentloop.values.sampling import VersionDemand


class NoPlace(StrEnum):
    """The reason for which a sample gets no lease now."""

    LATER = "later"  # its group waits for a place that only this group needs; another group may begin
    FULL = "full"  # no sample may begin, so none overtakes this one


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


@dataclass(frozen=True, slots=True)
class Silence:
    """One run of a sample at a worker that was given up for lost, and the losses counted for it."""

    attempt: int
    begun_at: float
    num_failed: int = 0
    num_deaths: int = 0


@dataclass(slots=True, eq=False)
class Sample:
    """One sample that lacks its record."""

    assignment_id: str
    rollout: LiveRollout
    group: RolloutGroup
    sample_index: int
    queued_s: float = 0.0  # how long it had waited when it was last handed out
    is_restored: bool = False  # an earlier coordinator accepted it, and may have handed it out
    state: SampleState = SampleState.QUEUED
    worker_id: str | None = None
    attempt: int = 0  # the number of the run that it is in, or begins next
    last_attempt: int = 0  # the highest of those numbers
    num_failed: int = 0  # runs that count, but for the deaths of workers
    begun_at: float = 0.0  # when it was last handed out
    num_deaths: int = 0  # of workers in a row for which it is suspect; of the last one:
    outlived_s: float = 0.0  # how long it had run then
    trial_size: int = 1  # how many are tried together
    suspect_since: int = 0  # the number of the first of these deaths
    is_only_suspect: bool = False
    silent: dict[str, Silence] = field(default_factory=dict)  # workers given up for lost
    num_sampled: int = 0  # tokens, as its worker last reported
    lost_tokens: Counter[LossCause] = field(default_factory=Counter)  # of earlier attempts
    num_sampled_before: int = 0  # `num_sampled` of the attempt before
    num_stale_attempts: int = 0
    is_begun: bool = False  # counted in its run's budget
    missing_since: float | None = None  # its worker's reports do not name it since then
    error: str = ""
    lost_reason: StopReason = StopReason.LOOP_FAILED  # its record's, if no attempt is left

    @property
    def is_cancelled(self) -> bool:
        """True once its rollout is cancelled, or its group has the samples that it keeps."""
        if self.group.keep is None:
            return self.rollout.is_cancelled
        return self.rollout.is_cancelled or self.rollout.groups[self.group.group_id].is_full

    def count_begun(self, is_begun: bool, versions: FleetVersions) -> None:
        """Take a place in the run's budget, or give it back."""
        budget = self.rollout.budget
        if budget is not None and is_begun != self.is_begun:
            self.is_begun = is_begun
            if is_begun:
                budget.begin(versions.of(budget.adapter).served)
            else:
                budget.give_back()

    def note_wait(self, now: float) -> None:
        """Note how long the sample has waited, as it leaves the queue."""
        self.queued_s = max(0.0, now - self.rollout.queued_at)

    def forgive(self, silence: Silence) -> None:
        """Take back the losses that were counted for a worker's silence."""
        self.num_failed -= silence.num_failed
        self.num_deaths = max(0, self.num_deaths - silence.num_deaths)

    def set_state(self, state: SampleState) -> None:
        """Change the state, and the rollout's counts. Raises InvariantBroken for a move that cannot be."""
        if state not in _MOVES[self.state]:
            raise InvariantBroken(f"{self.assignment_id} cannot go from {self.state} to {state}")
        rollout, num_queued = self.rollout, (state is SampleState.QUEUED) - (self.state is SampleState.QUEUED)
        rollout.num_queued += num_queued
        rollout.demands[self.group.task.weight_version] += num_queued
        rollout.num_running += (state is SampleState.RUNNING) - (self.state is SampleState.RUNNING)
        self.state = state


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group of a live rollout: the samples it was accepted with, and those that lack records here."""

    num_samples: int
    num_left: int
    num_bytes: int  # that its task takes, until none is left
    keep: int | None = None  # complete samples that make the group; None: all
    num_complete: int = 0  # whose records are durable
    keep_places: set[str] = field(default_factory=set)  # complete samples that are about to be stored as such

    @property
    def is_full(self) -> bool:
        """True once the group has all the durable samples that it keeps."""
        return self.keep is not None and self.num_complete >= self.keep


@dataclass(slots=True, eq=False)
class LiveRollout:
    """A rollout that lacks records, and its counts."""

    rollout_id: str
    terms: RolloutTerms
    budget: StalenessBudget | None
    queued_at: float
    demands: Counter[VersionDemand | None] = field(default_factory=Counter)  # queued samples by demanded version
    groups: dict[str, LiveGroup] = field(default_factory=dict)
    num_accepted: int = 0
    num_finished_before: int = 0  # by a coordinator before this one
    num_queued: int = 0
    num_running: int = 0
    finished: set[str] = field(default_factory=set)
    is_cancelled: bool = False

    def awaits_weights(self, demand: VersionDemand | None, versions: FleetVersions, now: float) -> bool:
        """Return True if samples with this demand stay queued: their adapter is not served, or other versions than
        they accept are and their wait is not over."""
        served = versions.of(self.terms.adapter).served
        if self.terms.adapter and served is None:
            return True
        if demand is None or served is None or demand.accepts(served):
            return False
        return now - self.queued_at < demand.wait_s

    def num_awaiting_weights(self, versions: FleetVersions, now: float) -> int:
        """Count the queued samples that wait for an adapter or a version that they demand."""
        return sum(num for demand, num in self.demands.items() if self.awaits_weights(demand, versions, now))

    def status(self, num_held: int = 0) -> RolloutStatus:
        num_finished = self.num_accepted - self.num_queued - self.num_running
        counts = (self.num_accepted, num_finished, self.num_running, self.num_queued)
        terms = self.terms
        return RolloutStatus(
            self.rollout_id, *counts, num_held=num_held, owner=terms.owner, priority=terms.priority
        )


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
    """The samples that a cancel met: ids that are owed a record, and ids that workers have to end."""

    dropped: tuple[str, ...]
    running: tuple[str, ...]


def task_sizes(groups: Sequence[RolloutGroup], lengths: Sequence[int] = ()) -> list[int]:
    """Return the bytes that each group's task takes, its images too; `lengths` are those of its encoding."""
    lengths = lengths or [len(codec.encode(group)) for group in groups]
    images = (sum(len(image.data) for image in group.task.images) for group in groups)
    return list(map(operator.add, lengths, images))
