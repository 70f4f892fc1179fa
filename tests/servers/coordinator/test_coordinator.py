"""The coordinator end to end: real store, fake engines, virtual time."""

import asyncio
import sqlite3
import sys
import time
from dataclasses import replace

import msgspec
import pytest

from agentloop.api.coordinator import MAX_CALL_BYTES, LeaseReport, Orders, RolloutTerms
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.findings import UNREAD_S, Cause, findings
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    DeadlineExceeded,
    Gone,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServiceUnavailable,
    UnsupportedParameter,
)
from agentloop.storage.retention import RetentionPolicy
from agentloop.storage.summary import summarize
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import Message, OnStale, RolloutGroup, StalenessLimit, StopReason
from agentloop.values import codec
from agentloop_servers.coordinator.coordinator import Coordinator
from tests.support.engine.engines import FakeEngine
from tests.support.fleet.service import CONFIG, assignment_ids, hand_in, read_page, record, report, service
from tests.support.records.samples import make_group, make_trajectory


@service("a", "b")
async def test_submit_take_finish_read(site, coordinator):
    status = await coordinator.rollouts.submit("r", (make_group("g0", 2), make_group("g1", 1)))
    assert (status.num_accepted, status.num_queued, status.is_done) == (3, 3, False)
    orders = await coordinator.rollouts.take(report(), 1.0)
    assert assignment_ids(orders.start) == ["r/g0/0", "r/g0/1", "r/g1/0"]
    assert orders.start[0].rollout_id == "r"
    assert (await coordinator.status()).rollouts[0].num_running == 3
    for assignment in orders.start:
        await hand_in(coordinator.rollouts, "w", record(assignment))
        await hand_in(coordinator.rollouts, "w", record(assignment))  # the answer was lost
    page = await read_page(coordinator, "r", 0, 2, 0.0)
    assert [(t.group_id, t.sample_index) for t in page.trajectories] == [("g0", 0), ("g0", 1)]
    page = await read_page(coordinator, "r", page.cursor, 2, 0.0)
    assert [t.group_id for t in page.trajectories] == ["g1"]
    assert page.status.is_done
    last = await read_page(coordinator, "r", page.cursor, 2, 60.0)
    assert (last.trajectories, last.cursor) == ((), page.cursor)
    assert [one.num_leases for one in (await coordinator.status()).replicas] == [0, 0]


@service("a")
async def test_the_tasks_of_a_submission_are_encoded_once(site, coordinator):
    groups, num_encoded = tuple(make_group(f"g{number}", 1) for number in range(40)), 0

    def hear(frame, event, called):
        nonlocal num_encoded
        num_encoded += event == "c_call" and isinstance(called.__self__, msgspec.msgpack.Encoder)

    sys.setprofile(hear)
    try:
        await coordinator.rollouts.submit("r", groups)
    finally:
        sys.setprofile(None)
    assert 40 <= num_encoded < 60
    ((_, stored),) = {group.rollout_id: group for group, _ in await site.store.unfinished()}.items()
    assert replace(stored, rollout_id="") == replace(groups[-1], rollout_id="")


@pytest.mark.long
async def test_as_many_tasks_as_may_wait_are_accepted_in_one_private_call_in_time(tmp_path):
    """Near the size limit of a body; takes 5 s of CPU on an idle core."""
    store = TrajectoryStore(tmp_path / "trajectories.sqlite")
    config = replace(CONFIG, max_queued_trajectories=100_000)
    coordinator = Coordinator(store, lambda url: None, config, RealClock(), probe=lambda url: None)
    await coordinator.start()
    task = replace(make_group().task, messages=(Message("user", "x" * 1900),))
    body = codec.encode(("r", [RolloutGroup(f"g{number}", task, 1) for number in range(100_000)], None, None))
    assert 0.8 * MAX_CALL_BYTES < len(body) < MAX_CALL_BYTES
    began_s = time.process_time()
    name, groups, *_ = codec.decode(body, tuple[str, tuple[RolloutGroup, ...], None, None])
    status = await coordinator.rollouts.submit(name, groups)
    assert time.process_time() - began_s < 10
    assert status.num_queued == 100_000
    with pytest.raises(Overloaded, match="the queue has 100000 of at most 100000 trajectories, cannot add 1"):
        await coordinator.rollouts.submit("more", (make_group("g", 1),))
    await coordinator.close()


@service("a")
async def test_tasks_that_no_engine_can_serve_are_refused_at_once(site, coordinator):
    task = replace(make_group().task, priority=1)
    with pytest.raises(UnsupportedParameter, match="scheduling_policy: priority") as refused:
        await coordinator.rollouts.submit("r", (RolloutGroup("g", task, 1),))
    assert refused.value.param == "priority"


@service("a")
async def test_workers_that_wait_share_what_comes(site, coordinator):
    """Each worker has capacity for all samples; with several waiting workers, a call returns only a part."""
    take = coordinator.rollouts.take
    waiting = [asyncio.create_task(take(report(name, 512), 4.0)) for name in ("w0", "w1")]
    await site.clock.sleep(0.1)
    await coordinator.rollouts.submit("r", (make_group("g", 48),))
    found = [assignment_ids((await each).start) for each in waiting]
    assert list(map(len, found)) == [32, 16]
    await coordinator.rollouts.leave("w1")
    await coordinator.rollouts.submit("more", (make_group("g", 30),))
    alone = (await take(report("w0", 480, *found[0]), 1.0)).start
    assert len(alone) > 32  # includes the samples that the other worker has returned


@service("a")
async def test_take_waits_for_work_and_returns_empty_handed_in_time(site, coordinator):
    started = site.clock.now()
    assert (await coordinator.rollouts.take(report(), 2.0)).start == ()
    assert site.clock.now() - started == pytest.approx(2.0)
    taking = asyncio.create_task(coordinator.rollouts.take(report(), 4.0))
    await site.clock.sleep(1.0)
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    assert assignment_ids((await taking).start) == ["r/g/0"]
    assert site.clock.now() - started == pytest.approx(3.0)


@service("a")
async def test_only_the_newest_call_of_a_worker_gets_work(site, coordinator):
    old = asyncio.create_task(coordinator.rollouts.take(report(), 4.0))
    await site.clock.sleep(0.1)
    new = asyncio.create_task(coordinator.rollouts.take(report(), 4.0))
    await site.clock.sleep(0.1)
    await coordinator.rollouts.submit("r", (make_group("g", 2),))
    assert (await old).start == ()
    assert len((await new).start) == 2


@service()
async def test_without_a_replica_work_stays_queued(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    assert (await coordinator.rollouts.take(report(), 1.0)).start == ()
    assert not (await coordinator.status()).is_ready
    taking = asyncio.create_task(coordinator.rollouts.take(report(), 4.0))
    await site.clock.sleep(0.5)
    await site.join("a")
    assert len((await taking).start) == 1


@service("a")
async def test_read_waits_for_a_record(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    assert (await read_page(coordinator, "r", 0, 10, 1.0)).trajectories == ()
    reading = asyncio.create_task(read_page(coordinator, "r", 0, 10, 30.0))
    (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
    await site.clock.sleep(1.0)
    started = site.clock.now()
    await hand_in(coordinator.rollouts, "w", record(assignment))
    assert len((await reading).trajectories) == 1
    assert site.clock.now() == started
    with pytest.raises(NotFound):
        await read_page(coordinator, "nobody", 0, 10, 1.0)
    with pytest.raises(InvalidRequest):
        await read_page(coordinator, "r", 0, 0, 1.0)
    with pytest.raises(InvalidRequest):
        await read_page(coordinator, "r", -1, 1, 1.0)


@service("a")
async def test_records_that_nobody_reads_are_found(site, coordinator):
    rollouts = coordinator.rollouts

    async def found():
        flights = await coordinator.flight(1)
        return [one.text for one in findings(await coordinator.status(), flights) if one.cause is Cause.UNREAD]

    await rollouts.submit("r", (make_group("g", 3),))
    for assignment in (await rollouts.take(report("w", 3), 0.0)).start:
        await hand_in(rollouts, "w", record(assignment))
    await site.clock.sleep(UNREAD_S + 1.0)
    assert await found() == ["the records of r are not read: the oldest has waited for 301 s"]
    page = await read_page(coordinator, "r", 0, 2, 0.0)
    assert await found() == []
    await site.clock.sleep(UNREAD_S)
    assert await found() == ["the records of r are not read: the oldest has waited for 300 s"]
    await read_page(coordinator, "r", page.cursor, 2, 0.0)
    await site.clock.sleep(UNREAD_S)
    assert (await coordinator.status()).unread == ()


@service("a")
async def test_submissions_are_checked(site, coordinator):
    groups = (make_group("g", 2),)
    first = await coordinator.rollouts.submit("r", groups)
    assert await coordinator.rollouts.submit("r", groups) == first  # the answer was lost
    with pytest.raises(Conflict):
        await coordinator.rollouts.submit("r", (make_group("other", 2),))
    with pytest.raises(Overloaded):
        await coordinator.rollouts.submit("big", (make_group("g", 49),))
    with pytest.raises(NotFound):
        await read_page(coordinator, "big", 0, 1, 0.0)
    with pytest.raises(InvalidRequest):
        await coordinator.rollouts.submit("none", ())
    await coordinator.rollouts.submit("fits", (make_group("g", 48),))
    with pytest.raises(InvalidRequest):
        await coordinator.rollouts.take(report(""), 0.0)


@service("a")
async def test_cancel_ends_everything_with_one_record_each(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g0", 2), make_group("g1", 2)))
    running = (await coordinator.rollouts.take(report(num_free=2), 1.0)).start
    taking = asyncio.create_task(coordinator.rollouts.take(report("w", 0, *assignment_ids(running)), 4.0))
    await site.clock.sleep(0.1)
    status = await coordinator.rollouts.cancel("r")
    assert (status.num_finished, status.num_running, status.num_queued) == (2, 2, 0)
    orders = await taking
    assert list(orders.cancel) == assignment_ids(running)
    await hand_in(coordinator.rollouts, "w", record(running[0], StopReason.CANCELLED))
    await hand_in(coordinator.rollouts, "w", record(running[1]))  # the worker was faster than the order
    page = await read_page(coordinator, "r", 0, 10, 0.0)
    reasons = {(t.group_id, t.sample_index): t.stop_reason for t in page.trajectories}
    assert reasons == {
        ("g0", 0): StopReason.CANCELLED,
        ("g0", 1): StopReason.COMPLETED,
        ("g1", 0): StopReason.CANCELLED,
        ("g1", 1): StopReason.CANCELLED,
    }
    assert not any(t.is_complete for t in page.trajectories if t.stop_reason is StopReason.CANCELLED)
    assert (await coordinator.rollouts.cancel("r")).is_done
    with pytest.raises(NotFound):
        await coordinator.rollouts.cancel("nobody")


@service("a")
async def test_a_told_cancellation_does_not_make_a_busy_loop(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    running = assignment_ids((await coordinator.rollouts.take(report(), 1.0)).start)
    await coordinator.rollouts.cancel("r")
    assert (await coordinator.rollouts.take(report("w", 7, *running), 2.0)).cancel == tuple(running)
    started = site.clock.now()
    assert (await coordinator.rollouts.take(report("w", 7, *running), 2.0)).cancel == tuple(running)
    assert site.clock.now() - started == pytest.approx(2.0)


@service("a")
async def test_a_silent_workers_work_goes_to_another(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 2),))
    first = (await coordinator.rollouts.take(report("w"), 1.0)).start
    taking = asyncio.create_task(coordinator.rollouts.take(report("v"), 5.0))
    second = (await taking).start
    while not second:
        second = (await coordinator.rollouts.take(report("v"), 5.0)).start
    assert assignment_ids(second) == assignment_ids(first)
    assert [assignment.attempt for assignment in second] == [1, 1]
    assert {a.lease.lease_id for a in first}.isdisjoint({a.lease.lease_id for a in second})
    # The lost worker was only slow: its record counts, its failure does not, and no record is stored twice.
    await hand_in(coordinator.rollouts, "w", record(first[0]))
    await hand_in(coordinator.rollouts, "w", record(first[1], StopReason.ENGINE_FAILED))
    orders = await coordinator.rollouts.take(report("v", 6, *assignment_ids(second)), 1.0)
    assert orders.cancel == ("r/g/0",)
    await hand_in(coordinator.rollouts, "v", record(second[0], StopReason.CANCELLED))
    await hand_in(coordinator.rollouts, "v", record(second[1]))
    page = await read_page(coordinator, "r", 0, 10, 0.0)
    assert [t.stop_reason for t in page.trajectories] == [StopReason.COMPLETED, StopReason.COMPLETED]
    assert page.status.is_done


@service("a")
async def test_a_worker_that_stalls_again_and_again_keeps_its_work(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    running = (await coordinator.rollouts.take(report("w"), 1.0)).start
    for _ in range(2 * CONFIG.max_attempts):
        await site.clock.sleep(CONFIG.worker_timeout_s + 2.0)
        assert (await coordinator.status()).num_workers == 0
        orders = await coordinator.rollouts.take(report("w", 7, *assignment_ids(running)), 1.0)
        assert (orders.start, orders.cancel) == ((), ())
    await hand_in(coordinator.rollouts, "w", record(running[0]))
    page = await read_page(coordinator, "r", 0, 10, 0.0)
    assert [(t.stop_reason, t.attempt) for t in page.trajectories] == [(StopReason.COMPLETED, 0)]


@service("a")
async def test_what_engines_failed_runs_again_while_attempts_are_left(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    for number in range(CONFIG.max_attempts):
        (assignment,) = (await coordinator.rollouts.take(report("w"), 1.0)).start
        assert assignment.attempt == number
        assert (await read_page(coordinator, "r", 0, 10, 0.0)).trajectories == ()
        failed = replace(record(assignment, StopReason.ENGINE_FAILED), error=f"the engine's, of attempt {number}")
        await hand_in(coordinator.rollouts, "w", failed)
    (kept,) = (await read_page(coordinator, "r", 0, 10, 5.0)).trajectories
    assert (kept.stop_reason, kept.error) == (StopReason.ENGINE_FAILED, "the engine's, of attempt 2")


@service("a")
async def test_what_kills_its_workers_fails_in_the_end(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    for number in range(CONFIG.max_attempts):
        (assignment,) = (await coordinator.rollouts.take(report(f"w{number}"), 1.0)).start
        assert assignment.attempt == number
        await site.clock.sleep(12.0)
    page = await read_page(coordinator, "r", 0, 10, 5.0)
    assert [t.stop_reason for t in page.trajectories] == [StopReason.LOOP_FAILED]
    assert page.trajectories[0].error == "worker w2 was lost, attempt 3 of 3"


@service("a")
async def test_a_worker_that_shuts_down_gives_its_work_back(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    (assignment,) = (await coordinator.rollouts.take(report("w"), 1.0)).start
    await hand_in(coordinator.rollouts, "w", record(assignment, StopReason.CANCELLED))  # no client had cancelled it
    (again,) = (await coordinator.rollouts.take(report("v"), 1.0)).start
    assert again.attempt == 1


@service("a")
async def test_a_worker_that_leaves_gives_its_work_back_at_once_and_for_free(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    for number in range(2 * CONFIG.max_attempts):
        worker_id = f"w{number}"
        orders = await coordinator.rollouts.take(report(worker_id), 1.0)
        assert assignment_ids(orders.start) == ["r/g/0"]
        for _ in range(2):
            await coordinator.rollouts.leave(worker_id)
        assert (await coordinator.rollouts.take(report(worker_id), 1.0)).start == (), "a late call gets no work"
        assert (await coordinator.status()).num_workers == 0
    (again,) = (await coordinator.rollouts.take(report("v"), 1.0)).start
    assert await hand_in(coordinator.rollouts, "v", record(again))


@service("a")
async def test_a_call_that_waits_ends_with_its_worker(site, coordinator):
    taking = asyncio.create_task(coordinator.rollouts.take(report("w"), 4.0))
    await site.clock.sleep(0.5)
    started = site.clock.now()
    await coordinator.rollouts.leave("w")
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    assert (await taking).start == ()
    assert site.clock.now() == started


@service("a")
async def test_a_broken_connection_is_a_death_unless_the_worker_calls_again(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    running = assignment_ids((await coordinator.rollouts.take(report("w"), 1.0)).start)

    async def cut():
        taking = asyncio.create_task(coordinator.rollouts.take(report("w", 7, *running), 5.0))
        await site.clock.sleep(0.5)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)

    await cut()
    await site.clock.sleep(CONFIG.worker_cut_s / 2)
    await coordinator.rollouts.take(report("w", 7, *running), 0.0)
    await site.clock.sleep(CONFIG.worker_cut_s + 1.0)
    assert (await coordinator.status()).num_workers == 1
    await cut()
    started = site.clock.now()
    (again,) = (await coordinator.rollouts.take(report("v"), 5.0)).start
    assert again.attempt == 1
    assert site.clock.now() - started <= 5.0


def test_deadlines_of_a_workers_silence_nest():
    with pytest.raises(InvalidRequest, match="worker_cut_s"):
        replace(CONFIG, worker_cut_s=6.0)


@service("a")
async def test_orders_that_never_arrived_are_given_again(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    assert len((await coordinator.rollouts.take(report("w"), 1.0)).start) == 1
    orders = await coordinator.rollouts.take(report("w"), 1.0)  # the report does not name it
    assert orders.start == ()
    while not orders.start:
        orders = await coordinator.rollouts.take(report("w"), 5.0)
    assert assignment_ids(orders.start) == ["r/g/0"]


def limited_group(limit, group_id="g", num_samples=1):
    return replace(make_group(group_id, num_samples), staleness=limit)


@service("a")
async def test_on_policy_work_waits_for_the_commit_and_goes_out_then(site, coordinator):
    await coordinator.rollouts.submit("r", (limited_group(StalenessLimit(0)),))
    await coordinator.rollouts.submit("other", (limited_group(StalenessLimit(1)),))
    site.engines["a"].seconds = {"stage": 3.0}
    updating = asyncio.create_task(coordinator.replicas.update_weights(WeightUpdate(1, "dir1"), None))
    await site.clock.sleep(0.5)
    assert assignment_ids((await coordinator.rollouts.take(report(), 1.0)).start) == ["other/g/0"]
    assert [status.num_held for status in (await coordinator.status()).rollouts] == [1, 0]
    taking = asyncio.create_task(coordinator.rollouts.take(report("w", 8, "other/g/0"), 5.0))
    await updating
    assert site.clock.now() == pytest.approx(3.1, abs=0.5)
    began = site.clock.now()
    assert assignment_ids((await taking).start) == ["r/g/0"]
    assert site.clock.now() == began
    assert (await coordinator.status()).weight_version == 1


@service("a")
async def test_an_update_that_fails_or_is_refused_holds_nothing_for_long(site, coordinator):
    await coordinator.rollouts.submit("r", (limited_group(StalenessLimit(0)),))
    for version in (-1, 1 << 63):
        with pytest.raises(InvalidRequest):
            await coordinator.replicas.update_weights(WeightUpdate(version, "dir"), None)
    site.engines["a"].fail("stage", 1)
    with pytest.raises(CheckpointUnreadable):
        await coordinator.replicas.update_weights(WeightUpdate(1, "dir1"), None)
    assert assignment_ids((await coordinator.rollouts.take(report(), 1.0)).start) == ["r/g/0"]


@service("a")
async def test_a_failure_makes_room_for_the_next_at_once(site, coordinator):
    await coordinator.rollouts.submit(
        "r", (limited_group(StalenessLimit(0, trajectories_per_version=1), num_samples=3),)
    )
    (first,) = (await coordinator.rollouts.take(report(), 1.0)).start
    assert first.staleness == StalenessLimit(0, trajectories_per_version=1)
    taking = asyncio.create_task(coordinator.rollouts.take(report("w", 8, first.assignment_id), 5.0))
    await site.clock.sleep(0.5)
    assert not taking.done()
    await hand_in(coordinator.rollouts, "w", record(first, StopReason.DEADLINE))  # an incomplete record
    (second,) = (await taking).start
    await hand_in(coordinator.rollouts, "w", record(second))
    assert (await coordinator.rollouts.take(report(), 1.0)).start == ()
    await coordinator.replicas.update_weights(WeightUpdate(1, "dir1"), None)
    assert len((await coordinator.rollouts.take(report(), 1.0)).start) == 1


@service("a", "b")
async def test_a_dropped_sample_is_given_out_again_and_ends_as_stale(site, coordinator):
    limit = StalenessLimit(0, OnStale.DROP)
    await coordinator.rollouts.submit("r", (limited_group(limit),))
    for attempt in range(3):
        (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
        assert (assignment.attempt, assignment.num_stale_attempts) == (attempt, attempt)
        dropped = replace(record(assignment, StopReason.STALE), paths=(), max_staleness=0)
        assert not dropped.is_complete
        await hand_in(coordinator.rollouts, "w", dropped)
        await hand_in(coordinator.rollouts, "w", dropped)  # the answer was lost
        await hand_in(coordinator.rollouts, "v", dropped)  # not its own sample
    assert (await coordinator.rollouts.take(report(), 1.0)).start == ()
    page = await read_page(coordinator, "r", 0, 10, 10.0)
    (trajectory,) = page.trajectories
    assert (trajectory.stop_reason, trajectory.is_complete, trajectory.paths) == (StopReason.STALE, False, ())
    assert (trajectory.attempt, trajectory.num_stale_attempts, trajectory.max_staleness) == (3, 3, 0)
    assert page.status.is_done
    assert [one.num_leases for one in (await coordinator.status()).replicas] == [0, 0]


@service("a")
async def test_a_record_that_became_stale_on_its_way_is_kept_and_told(site, coordinator):
    await coordinator.rollouts.submit("r", (limited_group(StalenessLimit(0, OnStale.DROP), num_samples=2),))
    early, late = (await coordinator.rollouts.take(report(), 1.0)).start
    await hand_in(coordinator.rollouts, "w", replace(record(early), max_staleness=0))
    await coordinator.replicas.update_weights(WeightUpdate(1, "dir1"), None)
    await hand_in(coordinator.rollouts, "w", replace(record(late), max_staleness=0))
    records = (await read_page(coordinator, "r", 0, 10, 1.0)).trajectories
    assert [one.staleness for one in records] == [0, 1]
    stale = summarize(records, num_accepted=2, wall_s=1.0).stale
    assert stale is not None
    assert (stale.late, stale.given_up) == (1, 0)


@service("a")
async def test_a_finished_trajectory_of_a_stale_run_is_a_record(site, coordinator):
    await coordinator.rollouts.submit("r", (limited_group(StalenessLimit(0)),))
    (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
    finished = record(assignment, StopReason.STALE)
    await hand_in(coordinator.rollouts, "w", finished)
    (trajectory,) = (await read_page(coordinator, "r", 0, 10, 1.0)).trajectories
    assert (trajectory.stop_reason, bool(trajectory.paths)) == (StopReason.STALE, True)


@service("a")
async def test_a_restart_counts_what_was_begun_before(site, coordinator):
    limit = StalenessLimit(0, trajectories_per_version=2)
    await coordinator.rollouts.submit("r", (limited_group(limit, num_samples=6),))
    begun = (await coordinator.rollouts.take(report(), 1.0)).start
    await hand_in(coordinator.rollouts, "w", record(begun[0]))
    await coordinator.replicas.update_weights(WeightUpdate(1, "dir1"), None)
    await site.stop()
    coordinator = await site.start()
    # One sample of version 0 is finished and one is running: of (0 + 1 + 1) * 2, two are left.
    assert (await coordinator.rollouts.take(report("w", 7, begun[1].assignment_id), 1.0)).start == ()
    orders = await coordinator.rollouts.take(report("w", 7, begun[1].assignment_id), 5.0)
    assert len(orders.start) == 2
    running = [begun[1].assignment_id, *assignment_ids(orders.start)]
    assert (await coordinator.rollouts.take(report("w", 5, *running), 2.0)).start == ()
    assert (await coordinator.status()).rollouts[0].num_held == 2


@service("a")
async def test_a_restart_loses_nothing_and_adopts_what_runs(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g0", 2), make_group("g1", 1)))
    running = (await coordinator.rollouts.take(report(num_free=2), 1.0)).start
    await hand_in(coordinator.rollouts, "w", record(running[0]))
    await site.stop()
    coordinator = await site.start()
    await site.clock.sleep(0.5)
    assert await site.states() == {"a": "ready"}
    restored = (await coordinator.status()).rollouts[0]
    assert (restored.num_accepted, restored.num_finished, restored.num_queued) == (3, 1, 2)
    # No sample is assigned before the workers had time to report their running samples.
    orders = await coordinator.rollouts.take(report("w", 7, running[1].assignment_id), 1.0)
    assert orders.start == ()
    moved = await coordinator.rollouts.move(running[1].assignment_id, running[1].lease, False)
    assert moved.replica_id == "a"
    orders = await coordinator.rollouts.take(report("w", 7, running[1].assignment_id), 5.0)
    assert assignment_ids(orders.start) == ["r/g1/0"]
    await hand_in(coordinator.rollouts, "w", record(running[0]))  # repeated after the restart
    await hand_in(coordinator.rollouts, "w", record(running[1]))
    await hand_in(coordinator.rollouts, "w", record(orders.start[0]))
    page = await read_page(coordinator, "r", 0, 10, 0.0)
    assert sorted((t.group_id, t.sample_index) for t in page.trajectories) == [("g0", 0), ("g0", 1), ("g1", 0)]
    assert page.status.is_done
    assert (await coordinator.status()).replicas[0].num_leases == 0
    with pytest.raises(NotFound):
        await hand_in(coordinator.rollouts, "w", make_trajectory(rollout_id="nobody"))


@service("a")
async def test_a_record_is_not_acknowledged_before_the_disk_has_it(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1), make_group("h", 1)))
    one, other = (await coordinator.rollouts.take(report(), 1.0)).start
    site.store.is_broken = True
    with pytest.raises(ServiceUnavailable):
        await hand_in(coordinator.rollouts, "w", record(one))
    assert (await read_page(coordinator, "r", 0, 1, 0.0)).status.num_finished == 0
    with pytest.raises((ServiceUnavailable, sqlite3.OperationalError)):
        await asyncio.gather(coordinator.rollouts.cancel("r"), hand_in(coordinator.rollouts, "w", record(other)))
    site.store.is_broken = False
    await hand_in(coordinator.rollouts, "w", record(one))
    await hand_in(coordinator.rollouts, "w", record(other))
    assert (await read_page(coordinator, "r", 0, 5, 0.0)).status.is_done


@service("a")
async def test_a_failure_at_a_worker_that_does_not_hold_the_sample_is_not_its_end(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
    last = replace(record(assignment, StopReason.ENGINE_FAILED), attempt=CONFIG.max_attempts - 1)
    assert not await hand_in(coordinator.rollouts, "stray", last)
    assert (await read_page(coordinator, "r", 0, 5, 0.0)).trajectories == ()
    assert await hand_in(coordinator.rollouts, "w", record(assignment))
    (kept,) = (await read_page(coordinator, "r", 0, 5, 0.0)).trajectories
    assert kept.stop_reason is StopReason.COMPLETED


@service("a")
async def test_nothing_is_handed_out_before_the_disk_has_its_submission(site, coordinator):
    taking = asyncio.create_task(coordinator.rollouts.take(report(), 5.0))
    await site.clock.sleep(0.1)
    site.store.stalled = asyncio.Event()
    submitting = asyncio.create_task(coordinator.rollouts.submit("r", (make_group("g", 1),)))
    await site.clock.sleep(0.5)
    assert not taking.done()
    assert (await coordinator.rollouts.take(report("other"), 0.1)).start == ()
    site.store.stalled.set()
    await submitting
    assert len((await taking).start) == 1


@service("a")
async def test_records_owed_are_written_when_the_disk_is_back(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 2),))
    site.store.is_broken = True
    with pytest.raises(sqlite3.OperationalError):
        await coordinator.rollouts.cancel("r")
    await site.clock.sleep(3.0)
    assert (await read_page(coordinator, "r", 0, 5, 0.0)).status.num_finished == 0
    site.store.is_broken = False
    await site.clock.sleep(1.5)
    page = await read_page(coordinator, "r", 0, 5, 0.0)
    assert [t.stop_reason for t in page.trajectories] == [StopReason.CANCELLED] * 2


async def test_many_workers_on_a_real_clock(tmp_path):
    """Exactly once with threads, real time, and workers that repeat their reports."""
    engine = FakeEngine(RealClock(), "fake://a")
    coordinator = Coordinator(
        TrajectoryStore(tmp_path / "s.sqlite"),
        lambda url: engine,
        CONFIG,
        RealClock(),
        probe=lambda url: engine.sample(),
    )
    await coordinator.start()
    await coordinator.replicas.register(engine.registration())
    await coordinator.rollouts.submit("r", tuple(make_group(f"g{i}", 5) for i in range(8)))

    async def work(worker_id):
        while not (await read_page(coordinator, "r", 0, 1, 0.0)).status.is_done:
            for assignment in (await coordinator.rollouts.take(report(worker_id, 7), 0.05)).start:
                await asyncio.gather(
                    *(hand_in(coordinator.rollouts, worker_id, record(assignment)) for _ in range(2))
                )

    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(work(f"w{i}") for i in range(4)))
    except TimeoutError as error:
        raise DeadlineExceeded("the rollout did not end") from error
    page = await read_page(coordinator, "r", 0, 100, 0.0)
    assert len({(t.group_id, t.sample_index) for t in page.trajectories}) == len(page.trajectories) == 40
    await coordinator.close()


@service("a")
async def test_a_finished_session_is_recorded_durably_and_once(site, coordinator):
    with pytest.raises(NotFound):
        await read_page(coordinator, "sessions", 0, 10, 0.0)
    one, other = make_trajectory("s-1", rollout_id="sessions"), make_trajectory("s-2", rollout_id="sessions")
    await coordinator.rollouts.record(EncodedRecord.of(one))
    await coordinator.rollouts.record(EncodedRecord.of(other))
    await coordinator.rollouts.record(EncodedRecord.of(one))  # the answer was lost
    page = await read_page(coordinator, "sessions", 0, 10, 30.0)
    assert [(t.group_id, t.staleness) for t in page.trajectories] == [("s-1", 0), ("s-2", 0)]
    assert (page.status.num_accepted, page.status.num_finished, page.status.is_done) == (2, 2, True)
    last = await read_page(coordinator, "sessions", page.cursor, 10, 30.0)
    assert (last.trajectories, last.cursor) == ((), page.cursor)
    await site.stop()
    coordinator = await site.start()
    assert len((await read_page(coordinator, "sessions", 0, 10, 0.0)).trajectories) == 2
    assert (await coordinator.rollouts.take(report(), 0.0)).start == ()


@service("a")
async def test_a_rollout_is_of_sessions_or_of_submitted_work(site, coordinator):
    await coordinator.rollouts.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id="run")))
    with pytest.raises(Conflict):
        await coordinator.rollouts.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id="run", reward=0.25)))
    with pytest.raises(Conflict):
        # As many as were recorded: no submit is repeated.
        await coordinator.rollouts.submit("run", (make_group("g", 1),))
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    with pytest.raises(Conflict):
        await coordinator.rollouts.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id="r")))
    assert (await read_page(coordinator, "r", 0, 1, 0.0)).status.num_finished == 0


@service("a", "b")
async def test_a_session_moves_from_a_failed_replica_and_learns_that_its_lease_expired(site, coordinator):
    lease = await coordinator.rollouts.lease("s", 100, "ingress")
    assert await coordinator.rollouts.lease("s", 100, "ingress") == lease
    moved = await coordinator.rollouts.move("s", lease, True)
    assert moved.replica_id != lease.replica_id
    assert await coordinator.rollouts.move("s", lease, True) == moved  # already moved
    await coordinator.rollouts.report_leases(LeaseReport("ingress", 1, leases=(), released=(moved.lease_id,)))
    with pytest.raises(NotFound):
        await coordinator.rollouts.move("s", moved, True)


@service("a")
async def test_terms_and_owners_outlive_a_restart(site, coordinator):
    await coordinator.rollouts.submit("done", (make_group("g", 1),), RolloutTerms("alice"), ("alice",))
    (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
    await hand_in(coordinator.rollouts, "w", record(assignment))
    await coordinator.rollouts.submit("train", (make_group("g", 4),), RolloutTerms("alice"), ("alice",))
    eval_terms = RolloutTerms("bob", priority=1, max_running=2)
    await coordinator.rollouts.submit("eval", (make_group("g", 4),), eval_terms, ("bob",))
    await site.stop()
    coordinator = await site.start()
    await site.clock.sleep(5.0)
    orders = await coordinator.rollouts.take(report("w", 4), 1.0)
    first = [f"bob~eval/g/{index}" for index in (0, 1)] + [f"alice~train/g/{index}" for index in (0, 1)]
    assert assignment_ids(orders.start) == first
    owners = {one.rollout_id: one.owner for one in (await coordinator.status()).rollouts}
    assert owners == {"alice~train": "alice", "bob~eval": "bob"}
    for rollout_id, owner in {"train": "alice", "eval": "bob", "done": "alice"}.items():
        other = {"alice": "bob", "bob": "alice"}[owner]
        assert (await coordinator.rollouts.read(rollout_id, 0, 1, 0.0, (owner,))).status.owner == owner
        with pytest.raises(NotFound):
            await coordinator.rollouts.read(rollout_id, 0, 1, 0.0, (other,))
        with pytest.raises(NotFound):
            await coordinator.rollouts.cancel(rollout_id, (other,))


@service("a")
async def test_sessions_records_belong_to_the_owner_in_their_rollouts_id(site, coordinator):
    await coordinator.rollouts.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id="alice~run")))
    with pytest.raises(NotFound):
        await coordinator.rollouts.read("run", 0, 1, 0.0, ("bob",))
    assert (await coordinator.rollouts.read("run", 0, 1, 0.0, ("alice",))).status.num_finished == 1


@service("a")
async def test_an_id_of_a_rollout_is_one_users_own(site, coordinator):
    rollouts = coordinator.rollouts
    for name in ("alice", "bob"):
        status = await rollouts.submit("step-1", (make_group("g", 1),), RolloutTerms(name), (name,))
        assert (status.rollout_id, status.owner) == (f"{name}~step-1", name)
        assert await rollouts.submit("step-1", (make_group("g", 1),), RolloutTerms(name), (name,)) == status
    await rollouts.cancel("step-1", ("alice",))
    finished = [
        (await rollouts.read("step-1", 0, 9, 0.0, (name,))).status.num_finished for name in ("alice", "bob")
    ]
    assert finished == [1, 0]
    for call in (rollouts.read("alice~step-1", 0, 1, 0.0, ("bob",)), rollouts.cancel("alice~step-1", ("bob",))):
        with pytest.raises(NotFound):
            await call


@service("a")
async def test_sessions_of_no_rollout_are_their_owners(site, coordinator):
    rollouts = coordinator.rollouts
    for name in ("alice", "bob"):
        await rollouts.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id=f"{name}~sessions")))
    page = (await rollouts.read("sessions", 0, 9, 0.0, ("alice",))).decoded()
    assert (page.status.owner, [one.rollout_id for one in page.trajectories]) == ("alice", ["alice~sessions"])
    await rollouts.acknowledge("sessions", page.cursor, ("alice",))
    for names in (("carol",), ("",)):
        for call in (
            rollouts.read("sessions", 0, 9, 0.0, names),
            rollouts.acknowledge("sessions", 99, names),
            rollouts.cancel("sessions", names),
        ):
            with pytest.raises(NotFound):
                await call


@service("a")
async def test_a_claimed_rollout_is_for_sessions_from_then_on(site, coordinator):
    rollouts = coordinator.rollouts
    assert await rollouts.claim("run", ("alice", "digest")) == "alice~run"
    with pytest.raises(Conflict):
        await rollouts.submit("run", (make_group("g", 1),), RolloutTerms("alice"), ("alice", "digest"))
    # As before there was a users' file.
    await rollouts.submit("step", (make_group("g", 1),), RolloutTerms("key-1"), ("key-1",))
    with pytest.raises(Conflict):
        await rollouts.claim("step", ("alice", "key-1"))
    assert await rollouts.claim("step", ("bob",)) == "bob~step"
    status = await rollouts.submit("step", (make_group("g", 1),), RolloutTerms("alice"), ("alice", "key-1"))
    assert (status.rollout_id, status.owner) == ("key-1~step", "key-1")  # a repeat starts no work
    assert (await rollouts.read("run", 0, 1, 0.0, ("alice",))).status.num_finished == 0


@service("a")
async def test_a_record_is_held_once_however_often_it_is_offered(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 8),))
    assignments = (await coordinator.rollouts.take(report(), 1.0)).start
    site.store.stalled = asyncio.Event()
    for _ in range(19):  # like workers, whose calls end after 30 s without an answer
        offers = [asyncio.create_task(hand_in(coordinator.rollouts, "w", record(one))) for one in assignments]
        await site.clock.sleep(30.0)
        for offer in offers:
            offer.cancel()
    assert site.store.num_commits == 8
    last = [asyncio.create_task(hand_in(coordinator.rollouts, "w", record(one))) for one in assignments]
    await site.clock.sleep(1.0)
    site.store.stalled.set()
    assert await asyncio.gather(*last) == [True] * 8
    assert site.store.num_commits == 8
    assert (await read_page(coordinator, "r", 0, 10, 0.0)).status.is_done


@service(
    "a", config=replace(CONFIG, retention=RetentionPolicy(deletes_acknowledged=True), retention_interval_s=5.0)
)
async def test_what_a_trainer_acknowledges_is_deleted_beside_the_work(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 4),))
    assignments = (await coordinator.rollouts.take(report(), 1.0)).start
    for one in assignments[:3]:
        await hand_in(coordinator.rollouts, "w", record(one))
    page = await read_page(coordinator, "r", 0, 2, 0.0)
    await coordinator.rollouts.acknowledge("r", page.cursor)
    await site.clock.sleep(8.0)
    left = await read_page(coordinator, "r", 0, 10, 0.0)
    assert (len(left.trajectories), left.status.num_finished) == (1, 3)
    assert await hand_in(coordinator.rollouts, "w", record(assignments[0]))  # the answer was lost
    await hand_in(coordinator.rollouts, "w", record(assignments[3]))
    page = await read_page(coordinator, "r", left.cursor, 10, 0.0)
    with pytest.raises(NotFound):
        await coordinator.rollouts.acknowledge("r", page.cursor, ("somebody",))
    await coordinator.rollouts.acknowledge("r", page.cursor)
    await site.clock.sleep(8.0)
    for call in (coordinator.rollouts.read("r", 0, 1, 0.0), coordinator.rollouts.acknowledge("r", 1)):
        with pytest.raises(Gone):
            await call
    with pytest.raises(Gone):
        await coordinator.rollouts.submit("r", (make_group("g", 4),))
    assert await hand_in(coordinator.rollouts, "w", record(assignments[3]))


@service("a")
async def test_a_known_id_with_other_work_is_refused_live_or_done(site, coordinator):
    """B1: a trainer that reused a step's name trained silently on the old records."""
    rollouts = coordinator.rollouts
    work, other = (make_group("g0", 1), make_group("g1", 2)), (make_group("g0", 2), make_group("g1", 1))
    task = replace(work[0], task=replace(work[0].task, reference="another answer"))
    await rollouts.submit("r", work)
    for is_done in (False, True):
        if is_done:
            for assignment in (await rollouts.take(report(), 1.0)).start:
                await hand_in(rollouts, "w", record(assignment))
        assert (await rollouts.submit("r", work)).is_done == is_done
        assert (await rollouts.submit("r", work[::-1])).num_accepted == 3
        for changed in (other, (task, work[1]), (replace(work[0], keep=1), work[1])):
            with pytest.raises(Conflict, match="already exists with other groups"):
                await rollouts.submit("r", changed)


@service("a", config=replace(CONFIG, retention=RetentionPolicy(deletes_acknowledged=True)))
async def test_an_acknowledged_cursor_is_of_what_exists(site, coordinator):
    """B1: a cursor beyond the newest record deleted records that finished later, unread."""
    await coordinator.rollouts.submit("r", (make_group("g", 2),))
    first, second = (await coordinator.rollouts.take(report(), 1.0)).start
    await hand_in(coordinator.rollouts, "w", record(first))
    await coordinator.rollouts.acknowledge("r", 2**60)
    await hand_in(coordinator.rollouts, "w", record(second))
    await site.clock.sleep(2 * CONFIG.retention_interval_s)
    page = await read_page(coordinator, "r", 0, 10, 0.0)
    assert [one.sample_index for one in page.trajectories] == [1]


@service("a")
async def test_a_record_of_a_sample_that_does_not_exist_is_refused(site, coordinator):
    """B8: a sample index or a group that was never submitted."""
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
    trajectory = record(assignment)
    for changed in (replace(trajectory, sample_index=1), replace(trajectory, group_id="other")):
        with pytest.raises(InvalidRequest, match="never accepted"):
            await hand_in(coordinator.rollouts, "w", changed)
    assert await hand_in(coordinator.rollouts, "w", trajectory)
    assert await hand_in(coordinator.rollouts, "w", trajectory)


@service("a")
async def test_workers_that_ask_a_store_that_does_not_answer_are_not_lost(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 2),))
    (running,) = (await coordinator.rollouts.take(report("w", 1), 1.0)).start
    site.store.silent = asyncio.Event()
    deadline_at = site.clock.now() + 5 * CONFIG.worker_timeout_s
    while site.clock.now() < deadline_at:
        assert await coordinator.rollouts.take(report("w", 1, running.assignment_id), 5.0) == Orders()
    assert coordinator.rollouts.num_workers == 1
    assert coordinator.rollouts.queue.is_running_at("w", running.assignment_id)
    site.store.silent.set()
    assert len((await coordinator.rollouts.take(report("w", 1, running.assignment_id), 0.0)).start) == 1
