"""Batches of a real service: the groups that are whole first make one, and what is left counts next, or ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from agentloop.api.coordinator import Page, RolloutStatus
from agentloop.client import Batch, RolloutClient
from agentloop.client.batches import BatchRule, Carry, batches_of
from agentloop.client.rollout import Rollout
from agentloop.errors import InvalidRequest
from agentloop.rollout.context import LoopContext
from agentloop.types import Message, RolloutTask, StopReason, Trajectory
from tests.support.records.samples import make_trajectory
from tests.support.service.whole_service import simulated_config, whole_service

RELEASED: set[str] = set()


class WaitsIfLong:
    """A turn; before it, a task that is called long waits to be released."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        while rollout_task.task_id.startswith("long") and rollout_task.task_id not in RELEASED:
            await asyncio.sleep(0.01)
        await ctx.sample(max_tokens=4)


class LastSampleWaits:
    """A turn of the first two samples; the third one never ends by itself."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        while ctx.trajectory_id.endswith("/2"):
            await asyncio.sleep(0.01)
        await ctx.sample(max_tokens=4)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[RolloutClient]:
    RELEASED.clear()
    config = simulated_config(mode="standalone", workers={"allowed_imports": [__name__]})
    async with whole_service(config, tmp_path) as url, RolloutClient(url) as client, asyncio.timeout(60):
        yield client


def tasks_of(*names: str) -> list[RolloutTask]:
    return [RolloutTask(name, (Message("user", "Hi"),), loop=f"{__name__}:WaitsIfLong") for name in names]


async def num_live(client: RolloutClient) -> int:
    return sum(one.num_running + one.num_queued for one in (await client.status()).rollouts)


def names_of(batch: Batch) -> list[str]:
    assert all(len({one.sample_index for one in group}) == 2 for group in batch.groups)
    return [group[0].task_id for group in batch.groups]


async def test_what_is_unfinished_is_the_next_batchs_head_start(client: RolloutClient) -> None:
    tasks = tasks_of("long-0", "a", "b", "c", "d", "e", "f")
    batches = client.batches(tasks, num_groups=2, num_samples=2, over_provision=1.5)
    first = await anext(batches)
    assert set(names_of(first)) == {"a", "b"}
    assert (first.ages, first.num_unfinished, first.carried_share) == ((0, 0), 1, 0.0)
    RELEASED.add("long-0")
    while await num_live(client):  # it ends while the caller trains
        await asyncio.sleep(0.01)
    second = await anext(batches)
    assert names_of(second)[0] == "long-0"
    assert (second.number, second.ages[0], second.carried_share) == (1, 1, 0.5)
    rest = [batch async for batch in batches]
    assert [len(batch.groups) for batch in rest] == [2, 1]
    names = [name for batch in (first, second, *rest) for name in names_of(batch)]
    assert sorted(names) == sorted(task.task_id for task in tasks)


class RecordedService:
    """A service whose rollouts have groups of two samples. Only the samples in `records` have ended."""

    def __init__(self, *, page_size: int = 64) -> None:
        self._page_size = page_size
        self.records: dict[str, list[Trajectory]] = {}
        self.submitted: dict[str, list[str]] = {}  # the task ids of each rollout
        self.acknowledged: list[tuple[str, int]] = []

    async def submit(self, tasks: Sequence[RolloutTask]) -> Rollout:
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
        return (await self.read(rollout_id)).status

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        return await self.rollout_status(rollout_id)

    async def resubmit_damaged(self, rollout_id: str) -> RolloutStatus:
        return await self.rollout_status(rollout_id)


async def test_carried_groups_are_offered_in_place_of_new_ones_and_read_parts_are_forgotten() -> None:
    service = RecordedService()
    rollout, tasks = Rollout(service), tasks_of("a", "b", "long-0", "c", "d", "e")
    rule = BatchRule(2, over_provision=1.5, carry=Carry.NEXT)
    async with asyncio.timeout(60):
        batches = [one async for one in batches_of(rollout, tasks, rule, service.submit, acknowledge=False)]
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


async def test_what_is_unfinished_ends_if_it_is_not_carried(client: RolloutClient) -> None:
    tasks = tasks_of("long-0", "a", "b", "long-1", "c", "d")
    batches = client.batches(
        tasks, num_groups=2, num_samples=2, over_provision=1.5, carry="cancel", acknowledge=True
    )
    found = [(names_of(batch), batch.ages, batch.num_unfinished) async for batch in batches]
    assert [(set(names), ages, num) for names, ages, num in found] == [
        ({"a", "b"}, (0, 0), 1),
        ({"c", "d"}, (0, 0), 1),
    ]
    page = await client.list_records()
    ended = {(one.task_id, one.stop_reason) for one in page.records}
    assert {("long-0", StopReason.CANCELLED), ("long-1", StopReason.CANCELLED)} <= ended


async def test_a_group_that_keeps_some_is_whole_with_them(client: RolloutClient) -> None:
    task = RolloutTask("a", (Message("user", "Hi"),), loop=f"{__name__}:LastSampleWaits")
    batches = client.batches([task], num_groups=1, num_samples=3, keep=2)
    (group,) = (await anext(batches)).groups
    assert [one.is_complete for one in sorted(group, key=lambda one: one.sample_index)] == [True, True, False]


async def test_to_leave_the_batches_ends_what_runs(client: RolloutClient) -> None:
    batches = client.batches(tasks_of("a", "long-0"), num_groups=1, num_samples=2, over_provision=2)
    assert names_of(await anext(batches)) == ["a"]
    await batches.aclose()
    while await num_live(client):
        await asyncio.sleep(0.01)


async def test_a_rule_that_cannot_be_is_refused(client: RolloutClient) -> None:
    for options, named in (({"num_groups": 0}, "num_groups"), ({"over_provision": 0.5}, "over_provision")):
        with pytest.raises(InvalidRequest) as refused:
            await anext(client.batches(tasks_of("a"), **{"num_groups": 1, "num_samples": 1, **options}))
        assert refused.value.param == named
    with pytest.raises(ValueError, match="carry"):
        await anext(client.batches(tasks_of("a"), num_groups=1, num_samples=1, carry="carry"))
