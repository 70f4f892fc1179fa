"""Batches of a real service: the first complete groups form a batch; others follow later or are cancelled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.client import Batch, RolloutClient
from agentloop.errors import InvalidRequest, NotFound
from agentloop.rollout.context import LoopContext
from agentloop.types import Message, RolloutTask, StopReason
from tests.support.service.whole_service import simulated_config, whole_service

RELEASED: set[str] = set()
NUMBERS = itertools.count()


class WaitsIfLong:
    """A loop of one turn. A task named long-... waits until it is released before the turn."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        while rollout_task.task_id.startswith("long") and rollout_task.task_id not in RELEASED:
            await asyncio.sleep(0.01)
        await ctx.sample(max_tokens=4)


class LastSampleWaits:
    """A loop of one turn for the first two samples. The third sample ends only by cancellation."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        while ctx.trajectory_id.endswith("/2"):
            await asyncio.sleep(0.01)
        await ctx.sample(max_tokens=4)


def by_sample(task: RolloutTask, messages: Sequence[Message]) -> float:
    """Reward samples differently, unless the task is called `equal`."""
    if task.task_id.startswith("equal"):
        return 1.0
    return float(next(NUMBERS))


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


async def test_groups_without_signal_are_replaced_up_to_a_bound(client: RolloutClient) -> None:
    """All samples of a task called `equal-…` have the same reward; other samples have different rewards."""
    names = ("equal-0", "a", "equal-1", "equal-2", "b", "c", "equal-3")
    tasks = [replace(task, reward=f"{__name__}:by_sample") for task in tasks_of(*names)]
    found = [batch async for batch in client.batches(tasks, num_groups=2, num_samples=2, max_replaced=2)]
    assert [batch.num_replaced for batch in found] == [2, 0, 0]
    assert set(names_of(found[0])) == {"a", "equal-2"}  # the third one counts: the bound is reached
    assert set(names_of(found[1])) == {"b", "c"}
    assert names_of(found[2]) == ["equal-3"]  # no task is left that could replace it
    assert len((await client.list_records()).records) == 2 * len(names)


async def test_a_rule_that_cannot_be_is_refused(client: RolloutClient) -> None:
    wrong = {"num_groups": 0, "over_provision": 0.5, "max_replaced": -1}
    for options, named in (({name: value}, name) for name, value in wrong.items()):
        with pytest.raises(InvalidRequest) as refused:
            await anext(client.batches(tasks_of("a"), **{"num_groups": 1, "num_samples": 1, **options}))
        assert refused.value.param == named
    with pytest.raises(ValueError, match="carry"):
        await anext(client.batches(tasks_of("a"), num_groups=1, num_samples=1, carry="carry"))


async def test_another_process_continues_after_a_batch_and_finds_later_submissions(client: RolloutClient) -> None:
    """The first process is killed in its third batch; its last checkpoint is of the first one."""
    tasks, options = tasks_of(*"abcdefgh", "long-0"), {"num_groups": 2, "num_samples": 2, "over_provision": 1.5}
    batches = client.batches(tasks, cancel_on_close=False, **options)
    first, second = await anext(batches), await anext(batches)
    await batches.aclose()  # a killed process does not cancel either
    RELEASED.add("long-0")
    resumed = client.batches(tasks, resume=first.position, **options)
    rest = [batch async for batch in resumed]
    assert [batch.number for batch in rest] == [1, 2, 3, 4]
    names = [name for batch in (first, *rest) for name in names_of(batch)]
    assert sorted(names) == sorted(task.task_id for task in tasks)
    assert set(names_of(second)) <= {name for batch in rest for name in names_of(batch)}
    page = await client.list_records()
    assert page.totals[0].num_records == 2 * len(tasks)  # no task was submitted twice


async def test_a_position_of_another_service_is_refused(client: RolloutClient) -> None:
    [batch] = [one async for one in client.batches(tasks_of("a"), num_groups=1, num_samples=2)]
    other = batch.position.replace('"r-', '"x-').replace('"parts":[]', '"parts":[{}]')
    part = '{"rollout_id":"x-0","num_samples":2,"num_trajectories":2,"batch":0,"cursor":0,"delivered":[]}'
    with pytest.raises(NotFound):
        await anext(client.batches([], num_groups=1, num_samples=2, resume=other.replace("{}", part)))
    with pytest.raises(InvalidRequest, match="position of a batch, not 'step 3'"):
        await anext(client.batches([], num_groups=1, num_samples=2, resume="step 3"))


async def test_a_rollout_continues_in_another_process_at_its_position(client: RolloutClient) -> None:
    rollout = await client.submit(tasks_of("a", "long-0", "b"), num_samples=2)
    groups = rollout.groups()
    taken = [(await anext(groups))[0].task_id]
    while (await rollout.status()).num_finished < 4:
        await asyncio.sleep(0.01)
    again = client.rollout(rollout.position)
    assert again.rollout_ids == rollout.rollout_ids
    taken.append((await anext(again.groups()))[0].task_id)
    RELEASED.add("long-0")
    third = client.rollout(again.position)
    taken += [group[0].task_id async for group in third.groups()]
    assert sorted(taken) == ["a", "b", "long-0"]
    assert [one async for one in client.rollout(third.position)] == []
    with pytest.raises(InvalidRequest, match=r"expected Rollout.position, not '\[7\]'"):
        client.rollout("[7]")
