"""Batches of the groups that finish first, for `RolloutClient.batches`.

For each batch, more groups are in progress than the batch needs, and the first complete ones form the batch. This
favors short trajectories: `Batch.ages` and `Batch.carried_share` measure by how much. The unfinished groups carry
over to the next batch or are cancelled. The service does not know about batches; it starts groups in submit order,
so that groups of a later batch do not delay those of an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TypeAlias

import msgspec

from agentloop.client.rollout import PartPosition, Rollout
from agentloop.errors import InvalidRequest
from agentloop.types import RolloutTask, Trajectory


class Carry(StrEnum):
    """The policy for groups that are unfinished when a batch is complete."""

    NEXT = "next"  # they continue and count for the next batch
    CANCEL = "cancel"  # they are cancelled, and their tasks are not sampled again


@dataclass(frozen=True, slots=True)
class BatchRule:
    """The size of a batch and the number of groups in progress. Raises InvalidRequest."""

    num_groups: int
    over_provision: float = 1.0
    carry: Carry = Carry.NEXT
    max_replaced: int = 0  # groups without signal that are replaced per batch

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise InvalidRequest(f"num_groups must be at least 1, not {self.num_groups}", param="num_groups")
        if not 1.0 <= self.over_provision <= 16.0:
            raise InvalidRequest(
                f"over_provision must be from 1 to 16, not {self.over_provision:g}", param="over_provision"
            )
        if self.max_replaced < 0:
            raise InvalidRequest(f"max_replaced must be at least 0, not {self.max_replaced}", param="max_replaced")

    @property
    def num_offered(self) -> int:
        """The number of unfinished groups at the start of a batch."""
        return math.ceil(self.num_groups * self.over_provision)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one batch, in the order in which they were completed."""

    number: int  # starts at 0
    groups: tuple[Sequence[Trajectory], ...]
    ages: tuple[int, ...]  # for each group, the number of batches since the one it was submitted for
    num_unfinished: int  # groups in progress when this batch was complete
    num_replaced: int = 0  # groups without signal that were left out, each replaced by the group of another task
    position: str = (
        ""  # JSON text for a checkpoint; `RolloutClient.batches(resume=position)` continues after the batch
    )

    @property
    def carried_share(self) -> float:
        """The share of groups that were submitted for an earlier batch."""
        return sum(age > 0 for age in self.ages) / len(self.ages)


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """The state after a batch, with which another process continues.

    A part's id is `name` and the number of its first task, so parts that were submitted later are found again.
    """

    name: str
    number: int = 0  # the next batch
    num_taken: int = 0  # submitted tasks
    num_open: int = 0  # undelivered groups
    first_kept: int = 0  # groups of earlier batches are cancelled
    parts: tuple[PartPosition, ...] = ()

    def encode(self) -> str:
        """Return the position as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> BatchPosition:
        """Decode `Batch.position`. Raises InvalidRequest."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"resume must be the position of a batch, not {text[:80]!r}: {error}", param="resume"
            ) from error


Submit: TypeAlias = Callable[[Sequence[RolloutTask], int], Awaitable[Rollout]]
"""Submits tasks; the number is that of the first one among all tasks."""


def has_signal(group: Sequence[Trajectory]) -> bool:
    """Return True if the complete samples of a group have different rewards.

    Otherwise all advantages of a group-relative algorithm are 0, and the group trains nothing.
    """
    return len({trajectory.reward for trajectory in group if trajectory.is_complete}) > 1


async def batches_of(
    rollout: Rollout,
    tasks: Iterable[RolloutTask],
    rule: BatchRule,
    submit: Submit,
    *,
    acknowledge: bool,
    position: BatchPosition,
    num_samples: int,
) -> AsyncIterator[Batch]:
    """Yield batches until all tasks have ended. The last batch may be smaller. `rollout` owns the unread groups.

    `position` is the state at the start; its parts are already in `rollout`. Submissions have the ids that
    `BatchPosition` describes.
    """
    number, first_kept = position.number, position.first_kept
    num_found = await rollout.find_parts(position.name, position.num_taken, num_samples, number)
    num_taken, num_open = position.num_taken + num_found, position.num_open + num_found
    source = islice(tasks, num_taken, None)

    async def submit_next(count: int) -> int:
        """Submit up to `count` further tasks for this batch, and return their number."""
        nonlocal num_taken, num_open
        if new := list(islice(source, count)):
            rollout.join(await submit(new, num_taken), number)
            num_taken, num_open = num_taken + len(new), num_open + len(new)
        return len(new)

    while True:
        await submit_next(max(0, rule.num_offered - num_open))
        groups: list[Sequence[Trajectory]] = []
        ages: list[int] = []
        num_replaced = 0
        async for group in rollout.groups():
            intended_batch = rollout.batch_of(group[0])
            if intended_batch < first_kept:
                continue  # cancelled together with an earlier batch
            num_open -= 1
            is_replaceable = num_replaced < rule.max_replaced and not has_signal(group)
            # If no task is left to replace it, the group counts: a batch must not shrink.
            if is_replaceable and await submit_next(1):
                num_replaced += 1
                continue
            groups.append(group)
            ages.append(number - intended_batch)
            if len(groups) == rule.num_groups:
                break
        if not groups:
            return
        num_unfinished = num_open
        if rule.carry is Carry.CANCEL and num_open:
            await rollout.cancel()
            num_open, first_kept = 0, number + 1
        after = BatchPosition(position.name, number + 1, num_taken, num_open, first_kept, tuple(rollout.positions))
        yield Batch(number, tuple(groups), tuple(ages), num_unfinished, num_replaced, after.encode())
        # The caller requests the next batch, so it has finished with this one.
        if acknowledge:
            await rollout.acknowledge()
        rollout.forget()
        number += 1
