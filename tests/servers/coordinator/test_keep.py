"""Groups that keep the first complete samples of a larger number, with a coordinator and in live runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import Conflict, InvalidRequest, ServiceUnavailable
from agentloop.storage.summary import summarize
from agentloop.types import Assignment, RolloutGroup, StalenessLimit, StopReason, Trajectory
from agentloop_servers.coordinator.coordinator import Coordinator
from tests.support.fleet.live_run import live_run, talk, write_checkpoint
from tests.support.fleet.service import CONFIG, Service, hand_in, read_page, record, report, service
from tests.support.records.samples import encoded, make_task


def groups(num_samples: int, keep: int | None, num_groups: int = 1) -> tuple[RolloutGroup, ...]:
    return tuple(
        RolloutGroup(f"g{number}", make_task(f"t{number}"), num_samples, "r", keep=keep)
        for number in range(num_groups)
    )


async def begun(coordinator: Coordinator, num_samples: int, keep: int) -> list[Assignment]:
    """Return the samples of a group, all of them assigned to worker w."""
    await coordinator.rollouts.submit("r", groups(num_samples, keep))
    return list((await coordinator.rollouts.take(report("w", num_samples), 1.0)).start)


async def stored(coordinator: Coordinator) -> list[Trajectory]:
    return list((await read_page(coordinator, "r", 0, 100, 0.0)).trajectories)


def complete(records: list[Trajectory]) -> list[int]:
    return sorted(one.sample_index for one in records if one.is_complete)


@service("a")
async def test_the_rest_is_cancelled_once_the_first_are_durable(site: Service, coordinator: Coordinator) -> None:
    one, two, three, four = await begun(coordinator, 4, 2)
    running = [one.assignment_id for one in (one, two, three, four)]
    await hand_in(coordinator.rollouts, "w", record(one))
    assert (await coordinator.rollouts.take(report("w", 0, *running[1:]), 0.0)).cancel == ()
    await hand_in(coordinator.rollouts, "w", record(three))
    orders = await coordinator.rollouts.take(report("w", 0, running[1], running[3]), 0.0)
    assert set(orders.cancel) == {running[1], running[3]}
    cancelled = replace(record(two), stop_reason=StopReason.CANCELLED, is_complete=False, reward=None)
    assert await hand_in(coordinator.rollouts, "w", cancelled)
    assert await hand_in(coordinator.rollouts, "w", record(four))  # it had ended before it received the order
    records = await stored(coordinator)
    assert complete(records) == [0, 2]
    late = next(record for record in records if record.sample_index == 3)
    assert (late.stop_reason, late.reward, late.failure) == (StopReason.CANCELLED, None, None)
    assert late.paths
    assert not any(path.is_trainable for path in late.paths)
    assert late.error is not None
    assert "keeps" in late.error
    status = (await read_page(coordinator, "r", 0, 1, 0.0)).status
    assert status.is_done


@service("a")
async def test_what_is_queued_has_its_record_without_having_run(site: Service, coordinator: Coordinator) -> None:
    await coordinator.rollouts.submit("r", groups(5, 1))
    (one,) = (await coordinator.rollouts.take(report("w", 1), 1.0)).start
    await hand_in(coordinator.rollouts, "w", record(one))
    assert (await coordinator.rollouts.take(report("w", 4), 1.0)).start == ()
    await site.clock.sleep(2.0)
    records = await stored(coordinator)
    assert Counter(one.stop_reason for one in records) == {StopReason.COMPLETED: 1, StopReason.CANCELLED: 4}
    assert not any(one.paths for one in records if not one.is_complete)


@service("a")
async def test_of_many_that_end_at_once_no_more_than_wanted_are_complete(
    site: Service, coordinator: Coordinator
) -> None:
    started = await begun(coordinator, 4, 2)
    site.store.stalled = asyncio.Event()
    ending = [asyncio.create_task(hand_in(coordinator.rollouts, "w", record(one))) for one in started]
    await site.clock.sleep(1.0)
    coordinator.rollouts.queue.check()
    site.store.stalled.set()
    assert await asyncio.gather(*ending) == [True] * 4
    records = await stored(coordinator)
    assert len(records) == 4
    assert len(complete(records)) == 2


@service("a")
async def test_a_record_that_could_not_be_stored_gives_its_place_back(
    site: Service, coordinator: Coordinator
) -> None:
    one, two, three = await begun(coordinator, 3, 1)
    site.store.is_broken = True
    with pytest.raises(ServiceUnavailable):
        await hand_in(coordinator.rollouts, "w", record(one))
    site.store.is_broken = False
    await hand_in(coordinator.rollouts, "w", record(two))
    await hand_in(coordinator.rollouts, "w", record(one))
    await hand_in(coordinator.rollouts, "w", record(three))
    assert complete(await stored(coordinator)) == [1]


@service("a")
async def test_work_whose_acceptance_was_not_answered_is_queued_by_the_repeated_submission(
    site: Service, coordinator: Coordinator
) -> None:
    work = groups(2, 1)
    site.store.loses_answers = True
    with pytest.raises(ServiceUnavailable):
        await coordinator.rollouts.submit("r", work)
    site.store.loses_answers = False
    for _ in range(2):
        status = await coordinator.rollouts.submit("r", work)
        assert (status.num_accepted, status.num_queued) == (2, 2)
    started = (await coordinator.rollouts.take(report("w", 4), 1.0)).start
    assert len(started) == 2


@pytest.mark.parametrize("then", ["resubmitted", "another ends first", "worker lost", "another record", "restart"])
def test_a_commit_whose_answer_is_lost_counts_once(tmp_path: Path, then: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        site = Service(clock, tmp_path, CONFIG)
        coordinator = await site.start()
        await site.join("a")
        limit = StalenessLimit(max_staleness=0, trajectories_per_version=2)  # two samples may start
        work = tuple(replace(group, staleness=limit) for group in groups(4, 2))
        await coordinator.rollouts.submit("r", work)
        one, two = (await coordinator.rollouts.take(report("w", 4), 1.0)).start
        worker_id = "w"
        site.store.loses_answers = True
        with pytest.raises(ServiceUnavailable):
            await hand_in(coordinator.rollouts, "w", record(one))
        site.store.loses_answers = False
        if then == "resubmitted":
            assert await hand_in(coordinator.rollouts, "w", record(one))
        elif then == "another record":
            assert await hand_in(coordinator.rollouts, "w", replace(record(one), attempt=1, reward=0.0))
        elif then == "restart":
            await site.stop()
            coordinator = await site.start()
            await site.join("a")
            assert await hand_in(coordinator.rollouts, "w", record(one))
            await coordinator.rollouts.take(report("w", 0, two.assignment_id), 0.0)
            await clock.sleep(CONFIG.restart_grace_s + 1.0)
        elif then == "worker lost":
            await clock.sleep(2.0)
            await coordinator.rollouts.leave("w")
            worker_id = "v"
            (two,) = (await coordinator.rollouts.take(report("v", 4), 1.0)).start
        if then != "another ends first":
            assert (await coordinator.rollouts.take(report(worker_id, 4, two.assignment_id), 0.0)).start == ()
        assert await hand_in(coordinator.rollouts, worker_id, record(two))
        await clock.sleep(2.0)
        records = await stored(coordinator)
        assert complete(records) == [0, 1], then
        assert [one.reward for one in records if one.is_complete] == [1.0, 1.0]
        assert len(records) == 4
        await site.stop()

    clock.run(main())


@service("a")
async def test_what_failed_takes_no_place(site: Service, coordinator: Coordinator) -> None:
    one, two, three = await begun(coordinator, 3, 2)
    failed = replace(record(one, StopReason.LOOP_FAILED), reward=None)
    for done in (failed, record(two), record(three)):
        await hand_in(coordinator.rollouts, "w", done)
    assert complete(await stored(coordinator)) == [1, 2]


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_restart_counts_what_the_group_has(tmp_path: Path, num_before: int) -> None:
    """With two complete records before it, the crash came between their records and the others' cancellation."""
    clock = VirtualClock()

    async def main() -> None:
        site = Service(clock, tmp_path, CONFIG)
        await site.start()
        await site.join("a")
        started = await begun(site.coordinator, 4, 2)
        await site.coordinator.rollouts.submit("s", (replace(groups(2, 1)[0], rollout_id="s"),))
        for one in started[:num_before]:
            await site.store.add_records(encoded([record(one)]))
        await site.stop()
        coordinator = await site.start()
        await site.join("a")
        running = [one.assignment_id for one in started[num_before:]]
        orders = await coordinator.rollouts.take(report("w", 0, *running), 0.0)
        assert set(orders.cancel) == (set(running) if num_before == 2 else set())
        for one in started[num_before:]:
            await hand_in(coordinator.rollouts, "w", record(one))
        await clock.sleep(5.0)
        assert complete(await stored(coordinator)) == [0, 1]
        assert len(await stored(coordinator)) == 4
        assert coordinator.rollouts.queue.num_queued == 2, "the other rollout still waits"
        await site.stop()

    clock.run(main())


@service("a")
async def test_a_repeat_is_the_same_work_only_if_it_keeps_as_many(site: Service, coordinator: Coordinator) -> None:
    await coordinator.rollouts.submit("r", groups(4, 2))
    assert (await coordinator.rollouts.submit("r", groups(4, 2))).num_accepted == 4
    with pytest.raises(Conflict):
        await coordinator.rollouts.submit("r", groups(4, 3))


@service("a")
async def test_a_group_cannot_keep_more_than_it_has(site: Service, coordinator: Coordinator) -> None:
    with pytest.raises(InvalidRequest):
        await coordinator.rollouts.submit("r", groups(2, 3))
    with pytest.raises(InvalidRequest):
        await coordinator.rollouts.submit("r", groups(2, 0))


def test_real_workers_end_the_rest_and_every_group_has_its_samples(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def main() -> list[Trajectory]:
        async with live_run(clock, write_checkpoint(tmp_path), num_workers=2, capacity=4) as run:
            work = [RolloutGroup(f"g{number}", talk(), 5, "r", keep=2) for number in range(6)]
            await run.coordinator.rollouts.submit("r", tuple(work))
            await run.until_done("r")
            return list(run.store.records.values())

    records = clock.run(main())
    assert len(records) == 30
    by_group = Counter(one.group_id for one in records if one.is_complete)
    assert by_group == {f"g{number}": 2 for number in range(6)}
    rest = [one for one in records if not one.is_complete]
    assert {one.stop_reason for one in rest} == {StopReason.CANCELLED}
    assert any(one.num_sampled_tokens for one in rest), "some were running"
    assert any(not one.num_sampled_tokens for one in rest), "some had not begun"
    summary = summarize(records, num_accepted=30, wall_s=1.0)
    assert summary.lengths.trained.num_trajectories == 12
    assert summary.failures == {}
