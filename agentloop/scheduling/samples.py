"""The data of samples and live rollouts. Only the rollout queue changes it.

A sample is one trajectory to be generated, identified by (rollout, group, index). It exists from the acceptance of
its rollout until its terminal record is durable.
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
    """The reason why a sample gets no lease now."""

    LATER = "later"  # only this group waits, for an engine or adapter that it needs; another group may start
    FULL = "full"  # no capacity: no other sample may start first


class SampleState(StrEnum):
    """The states of a sample; `_MOVES` has the allowed transitions."""

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
    """The record of a silent worker: the attempt that ran there and the failures counted for it.

    They are undone if the worker reports the attempt again.
    """

    attempt: int
    begun_at: float
    num_failed: int = 0
    num_deaths: int = 0


@dataclass(slots=True, eq=False)
class Sample:
    """A sample without a durable record."""

    assignment_id: str
    rollout: LiveRollout
    group: RolloutGroup
    sample_index: int
    queued_s: float = 0.0  # seconds in the queue before it was last dispatched
    is_restored: bool = False  # an earlier coordinator accepted it and may have dispatched it
    state: SampleState = SampleState.QUEUED
    worker_id: str | None = None
    attempt: int = 0  # the number of the current or next attempt
    last_attempt: int = 0  # the highest attempt number so far
    num_failed: int = 0  # failed attempts, without those that ended with the worker's death
    begun_at: float = 0.0  # time of the last dispatch
    num_deaths: int = 0  # consecutive worker deaths for which it is suspect
    outlived_s: float = 0.0  # seconds that it had run at the last of these deaths
    trial_size: int = 1  # number of suspects per isolation trial
    suspect_since: int = 0  # number of the first of these deaths
    is_only_suspect: bool = False
    silent: dict[str, Silence] = field(default_factory=dict)  # workers that were declared lost while they ran it
    num_sampled: int = 0  # tokens in its worker's last report
    lost_tokens: Counter[LossCause] = field(default_factory=Counter)  # tokens of earlier attempts
    num_sampled_before: int = 0  # `num_sampled` of the previous attempt
    num_stale_attempts: int = 0
    is_begun: bool = False  # counted in its run's staleness budget
    missing_since: float | None = None  # since when its worker's reports omit it
    error: str = ""
    lost_reason: StopReason = StopReason.LOOP_FAILED  # the stop reason of its record if no attempt is left

    @property
    def is_cancelled(self) -> bool:
        """True if its rollout is cancelled or its group is full."""
        if self.group.keep is None:
            return self.rollout.is_cancelled
        return self.rollout.is_cancelled or self.rollout.groups[self.group.group_id].is_full

    def count_begun(self, is_begun: bool, versions: FleetVersions) -> None:
        """Add the sample to its run's staleness budget, or remove it."""
        budget = self.rollout.budget
        if budget is not None and is_begun != self.is_begun:
            self.is_begun = is_begun
            if is_begun:
                budget.begin(versions.of(budget.adapter).served)
            else:
                budget.give_back()

    def note_wait(self, now: float) -> None:
        """Record how long the sample has waited, when it leaves the queue."""
        self.queued_s = max(0.0, now - self.rollout.queued_at)

    def forgive(self, silence: Silence) -> None:
        """Undo the failures that were counted for a worker's silence, after the worker has reported again."""
        self.num_failed -= silence.num_failed
        self.num_deaths = max(0, self.num_deaths - silence.num_deaths)

    def set_state(self, state: SampleState) -> None:
        """Change the state and update the rollout's counts. Raises InvariantBroken for a forbidden transition."""
        if state not in _MOVES[self.state]:
            raise InvariantBroken(f"{self.assignment_id} cannot change from {self.state} to {state}")
        rollout, num_queued = self.rollout, (state is SampleState.QUEUED) - (self.state is SampleState.QUEUED)
        rollout.num_queued += num_queued
        rollout.demands[self.group.task.weight_version] += num_queued
        rollout.num_running += (state is SampleState.RUNNING) - (self.state is SampleState.RUNNING)
        self.state = state


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group of a live rollout: the number of its samples, and of those without a record."""

    num_samples: int
    num_left: int
    num_bytes: int  # bytes of its task, counted until all records are durable
    keep: int | None = None  # number of complete samples that the group keeps; None: all
    num_complete: int = 0  # complete samples whose records are durable
    keep_places: set[str] = field(default_factory=set)  # complete samples whose records are being stored

    @property
    def is_full(self) -> bool:
        """True if the group has all the complete records that it keeps."""
        return self.keep is not None and self.num_complete >= self.keep


@dataclass(slots=True, eq=False)
class LiveRollout:
    """A rollout with samples that have no record yet, and its counts."""

    rollout_id: str
    terms: RolloutTerms
    budget: StalenessBudget | None
    queued_at: float
    # Version demand -> number of queued samples
    demands: Counter[VersionDemand | None] = field(default_factory=Counter)
    groups: dict[str, LiveGroup] = field(default_factory=dict)
    num_accepted: int = 0
    num_finished_before: int = 0  # finished under an earlier coordinator
    num_queued: int = 0
    num_running: int = 0
    finished: set[str] = field(default_factory=set)
    is_cancelled: bool = False

    def awaits_weights(self, demand: VersionDemand | None, versions: FleetVersions, now: float) -> bool:
        """Return True if samples with this demand stay queued because of the weights.

        Their adapter is not served, or they accept other versions than the served one and their wait has not
        ended.
        """
        versions = versions.of(self.terms.adapter)
        served = versions.served
        if self.terms.adapter and served is None:
            return True
        if demand is None or served is None or any(map(demand.accepts, (served, *versions.held))):
            return False
        return now - self.queued_at < demand.wait_s

    def num_awaiting_weights(self, versions: FleetVersions, now: float) -> int:
        """Return the number of queued samples that wait for an adapter or a version."""
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
    """A sample whose terminal record the coordinator must write.

    The stop reason is CANCELLED, or the reason of the last of `max_attempts` attempts: LOOP_FAILED if its worker
    died of it, STALE if its tokens were too old. A lost engine does not count as an attempt: the turn gets another
    lease.
    """

    sample: Sample
    stop_reason: StopReason
    error: str


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The samples of a cancelled rollout: those that were queued, and those that workers must cancel."""

    dropped: tuple[str, ...]
    running: tuple[str, ...]


def task_sizes(groups: Sequence[RolloutGroup], lengths: Sequence[int] = ()) -> list[int]:
    """Return the size of each group's task in bytes, with images.

    `lengths` are the encoded groups' sizes if known.
    """
    lengths = lengths or [len(codec.encode(group)) for group in groups]
    images = (sum(len(image.data) for image in group.task.images) for group in groups)
    return list(map(operator.add, lengths, images))
