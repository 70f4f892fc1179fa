"""Samples: what the rollout queue holds, its states and names, and the values it hands out.

A sample is one trajectory still to be made: (rollout, group, index), from its acceptance to its terminal record.
Samples and rollouts are the queue's own; nobody else changes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from agentloop.api import RolloutStatus
from agentloop.scheduling.staleness_budget import Allowance
from agentloop.types import RolloutGroup, StopReason


class SampleState(StrEnum):
    """Where a sample is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


MOVES: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.QUEUED: frozenset({SampleState.RUNNING, SampleState.FINISHED}),
    SampleState.RUNNING: frozenset({SampleState.QUEUED, SampleState.FINISHED}),
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
    state: SampleState = SampleState.QUEUED
    worker_id: str | None = None
    attempt: int = 0
    num_stale_attempts: int = 0
    is_begun: bool = False  # counted in its run's allowance
    missing_since: float | None = None  # its worker's reports do not name it since then
    error: str = ""
    lost_reason: StopReason = StopReason.LOOP_FAILED  # its record's, if no attempt is left

    def count_begun(self, is_begun: bool, served: int | None) -> None:
        """Take a place in the run's allowance, or give it back."""
        allowance = self.rollout.allowance
        if allowance is not None and is_begun != self.is_begun:
            self.is_begun = is_begun
            if is_begun:
                allowance.begin(served)
            else:
                allowance.give_back()

    def handout(self, now: float) -> Handout:
        """What a worker is told of it."""
        queued_s = max(0.0, now - self.queued_at)
        attempts = (self.attempt, queued_s, self.num_stale_attempts)
        return Handout(self.assignment_id, self.group, self.sample_index, *attempts)


Lane: TypeAlias = OrderedDict[str, list[Sample]]
"""Queued samples by group key, the next group first."""


@dataclass(slots=True, eq=False)
class LiveRollout:
    """A rollout that lacks records, and its counts."""

    rollout_id: str
    allowance: Allowance | None
    groups: dict[str, RolloutGroup] = field(default_factory=dict)
    num_accepted: int = 0
    num_finished_before: int = 0  # by a coordinator before this one
    num_queued: int = 0
    num_running: int = 0
    finished: set[str] = field(default_factory=set)
    is_cancelled: bool = False
    again: Lane = field(default_factory=OrderedDict)  # samples that a worker had before
    waiting: Lane = field(default_factory=OrderedDict)

    def queue_again(self, sample: Sample) -> None:
        """Put a sample that a worker had before everything else."""
        key = group_key(sample.assignment_id)
        self.again.setdefault(key, []).append(sample)
        self.again.move_to_end(key, last=False)

    def unqueue(self, sample: Sample) -> None:
        key = group_key(sample.assignment_id)
        for lane in (self.again, self.waiting):
            if sample in lane.get(key, ()):
                lane[key].remove(sample)
                if not lane[key]:
                    del lane[key]

    def status(self, num_held: int = 0) -> RolloutStatus:
        num_finished = self.num_accepted - self.num_queued - self.num_running
        counts = (self.num_accepted, num_finished, self.num_running, self.num_queued)
        return RolloutStatus(self.rollout_id, *counts, num_held=num_held)


@dataclass(frozen=True, slots=True)
class Handout:
    """A sample as it leaves the queue."""

    assignment_id: str
    group: RolloutGroup
    sample_index: int
    attempt: int
    queued_s: float
    num_stale_attempts: int = 0


@dataclass(frozen=True, slots=True)
class Owed:
    """A sample whose terminal record the coordinator has to write: CANCELLED, or after `max_attempts` the reason of
    the last one: LOOP_FAILED if its worker died of it (a lost engine is answered by another lease and never ends up
    here), STALE if it was dropped for its age."""

    handout: Handout
    stop_reason: StopReason
    error: str


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What a cancel met: ids now owed a record by the coordinator, and ids that workers have to end."""

    dropped: tuple[str, ...]
    running: tuple[str, ...]


def assignment_id(rollout_id: str, group_id: str, sample_index: int) -> str:
    """The name of one sample. One-to-one, because a rollout id holds no slash."""
    return f"{rollout_id}/{group_id}/{sample_index}"


def group_key(name: str) -> str:
    """What the siblings of an assignment have in common, over all rollouts."""
    return name.rpartition("/")[0]
