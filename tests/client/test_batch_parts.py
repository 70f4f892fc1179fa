"""Batches and the parts of a rollout: submission, acknowledgement, and removal of parts that were read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentloop.api.coordinator import Page, RolloutStatus
from agentloop.client.batches import BatchPosition, BatchRule, batches_of
from agentloop.client.rollout import Rollout
from agentloop.errors import NotFound
from agentloop.types import Message, RolloutTask, Trajectory
from tests.support.records.samples import make_trajectory


def tasks_of(*names: str) -> list[RolloutTask]:
    return [RolloutTask(name, (Message("user", "Hi"),)) for name in names]


class RecordedService:
    """A service whose rollouts have groups of two samples. Only the samples in `records` have ended."""

    def __init__(self, *, page_size: int = 64) -> None:
        self._page_size = page_size
        self.records: dict[str, list[Trajectory]] = {}
        self.submitted: dict[str, list[str]] = {}  # the task ids of each rollout
        self.acknowledged: list[tuple[str, int]] = []

    async def submit(self, tasks: Sequence[RolloutTask], first: int = 0) -> Rollout:
        """Accept tasks. A task named long-... ends with the next submission."""
        for rollout_id, names in self.submitted.items():
            self.end(rollout_id, *(name for name in names if name.startswith("long")))
        name = f"r{len(self.submitted)}"
        self.submitted[name], self.records[name] = [task.task_id for task in tasks], []
        self.end(name, *(one for one in self.submitted[name] if not one.startswith("long")))
        rollout = Rollout(self)
        rollout.expect(name, len(tasks), 2)
        return rollout

    def end(self, rollout_id: str, *names: str) -> None:
        self.records[rollout_id] += [
            make_trajectory(name, index, rollout_id=rollout_id) for name in names for index in range(2)
        ]

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        await asyncio.sleep(0)
        records, num_accepted = self.records[rollout_id], 2 * len(self.submitted[rollout_id])
        page = records[after : after + self._page_size]
        status = RolloutStatus(rollout_id, num_accepted, len(records), num_accepted - len(records), 0)
        return Page(tuple(page), after + len(page), status)

    async def acknowledge(self, rollout_id: str, cursor: int) -> RolloutStatus:
        self.acknowledged.append((rollout_id, cursor))
        return await self.rollout_status(rollout_id)

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        if rollout_id not in self.records:
            raise NotFound(rollout_id)
        return (await self.read(rollout_id)).status

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        return await self.rollout_status(rollout_id)


async def test_carried_groups_are_offered_in_place_of_new_ones_and_read_parts_are_forgotten() -> None:
    service = RecordedService()
    rollout, tasks = Rollout(service), tasks_of("a", "b", "long-0", "c", "d", "e")
    rule = BatchRule(2, over_provision=1.5)
    async with asyncio.timeout(60):
        start = BatchPosition("run")
        found = batches_of(rollout, tasks, rule, service.submit, acknowledge=False, position=start, num_samples=2)
        batches = [one async for one in found]
    assert [len(names) for names in service.submitted.values()] == [3, 2, 1]
    assert [(batch.num_unfinished, batch.ages) for batch in batches] == [(1, (0, 0)), (1, (1, 0)), (0, (1, 0))]
    assert rollout.rollout_ids == ()


async def test_a_page_is_acknowledged_once_every_group_that_it_begins_is_complete() -> None:
    service = RecordedService(page_size=2)
    rollout = await service.submit(tasks_of("a", "b"))
    (first_a, second_a, first_b, second_b) = service.records["r0"]
    service.records["r0"] = [first_a, first_b, second_a, second_b]
    groups, names = rollout.groups(), []
    for acknowledged in ([], [("r0", 4)]):
        names.append((await anext(groups))[0].group_id)
        await rollout.acknowledge()
        assert service.acknowledged == acknowledged
    assert names == ["a", "b"]
