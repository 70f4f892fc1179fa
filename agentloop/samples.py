"""Samples: the states and names of what the rollout queue holds, and the values it hands out.

A sample is one trajectory still to be made: (rollout, group, index), from its acceptance to its terminal record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class Handout:
    """A sample as it leaves the queue."""

    assignment_id: str
    group: RolloutGroup
    sample_index: int
    attempt: int
    queued_s: float


@dataclass(frozen=True, slots=True)
class Owed:
    """A sample whose terminal record the coordinator has to write: CANCELLED, or LOOP_FAILED if its workers
    died of it `max_attempts` times (a lost engine is answered by another lease and never ends up here)."""

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
