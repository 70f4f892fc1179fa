"""The batches of a trainer that does not wait for the last groups of each: `RolloutClient.batches`.

A batch is offered more groups than it takes. Those that are whole first make it, which favours short ones: ages
and `carried_share` say how much. What is unfinished then is the next batch's head start, or ends. The service needs
no word of this: groups go out in the order they came, so a later batch's take no place that an earlier one's need.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from agentloop.client.rollout import Rollout
from agentloop.errors import InvalidRequest
from agentloop.types import RolloutTask, Trajectory


class Carry(StrEnum):
    """The fate of groups that are not whole when a batch is."""

    NEXT = "next"  # they run on, and count in the batch after it
    CANCEL = "cancel"  # they end, and their tasks are not sampled again


@dataclass(frozen=True, slots=True)
class BatchRule:
    """The numbers of groups that a batch takes and is offered. Raises InvalidRequest."""

    num_groups: int
    over_provision: float = 1.0
    carry: Carry = Carry.NEXT

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise InvalidRequest("a batch has at least one group", param="num_groups")
        if not 1.0 <= self.over_provision <= 16.0:
            raise InvalidRequest("a batch is offered from 1 to 16 times its groups", param="over_provision")

    @property
    def num_offered(self) -> int:
        """The groups that are unfinished when a batch begins."""
        return math.ceil(self.num_groups * self.over_provision)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one batch, in the order in which they became whole."""

    number: int  # from 0
    groups: tuple[Sequence[Trajectory], ...]
    ages: tuple[int, ...]  # of each group: the batches since that for which it was submitted
    num_unfinished: int  # groups that were not whole when this batch was

    @property
    def carried_share(self) -> float:
        """The share of groups that an earlier batch has left."""
        return sum(age > 0 for age in self.ages) / len(self.ages)


async def batches_of(
    rollout: Rollout,
    tasks: Iterable[RolloutTask],
    rule: BatchRule,
    submit: Callable[[Sequence[RolloutTask]], Awaitable[Rollout]],
    *,
    acknowledge: bool,
) -> AsyncIterator[Batch]:
    """Yield batches until all tasks have ended; the last may be smaller. `rollout` holds what is not read yet."""
    source, num_open, first_kept, number = iter(tasks), 0, 0, 0
    while True:
        new = list(islice(source, rule.num_offered - num_open))
        if new:
            rollout.join(await submit(new), number)
            num_open += len(new)
        groups: list[Sequence[Trajectory]] = []
        ages: list[int] = []
        async for group in rollout.groups():
            made_for = rollout.batch_of(group[0])
            if made_for < first_kept:
                continue  # what is left of a cancelled one
            num_open -= 1
            groups.append(group)
            ages.append(number - made_for)
            if len(groups) == rule.num_groups:
                break
        if not groups:
            return
        num_unfinished = num_open
        if rule.carry is Carry.CANCEL and num_open:
            await rollout.cancel()
            num_open, first_kept = 0, number + 1
        yield Batch(number, tuple(groups), tuple(ages), num_unfinished)
        if acknowledge:
            await rollout.acknowledge()
        rollout.forget()
        number += 1
