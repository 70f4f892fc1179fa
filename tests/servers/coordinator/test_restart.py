"""Orders that remain valid after a restart of the coordinator: real store, fake engines, virtual time."""

import sqlite3
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from agentloop.api.coordinator import HeldLease, LeaseReport, TurnBegun, session_holder
from agentloop.engine.interface import ALL_MEMORY, MemoryTag
from agentloop.errors import ServiceUnavailable, StorageFull
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import Lease, PauseMode, StopReason
from tests.support.engine.engines import SLEEPER
from tests.support.fleet.service import CONFIG, Inline, hand_in, read_page, record, report, service
from tests.support.records.samples import make_group


async def restart(site):
    """Start another coordinator on the same directory. The replicas find it with their heartbeats."""
    await site.stop()
    calls = {name: len(engine.calls) for name, engine in site.engines.items()}
    coordinator = await site.start()
    await site.clock.sleep(5.0)
    return coordinator, {name: engine.calls[calls[name] :] for name, engine in site.engines.items()}


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_fleet_is_not_woken(tmp_path, level):
    @service("a", "b", info=SLEEPER)
    async def run(site, coordinator):
        await coordinator.replicas.sleep(level, "a training step")
        coordinator, calls = await restart(site)
        assert all(engine.asleep == ALL_MEMORY for engine in site.engines.values())
        assert not any(call.startswith(("wake", "resume")) for made in calls.values() for call in made)
        assert await site.states() == {"a": "asleep", "b": "asleep"}
        status = await coordinator.status()
        assert (status.asleep, status.sleep_reason) == (tuple(sorted(ALL_MEMORY)), "a training step")
        assert status.degraded == ("asleep for 0 s (kv_cache, weights): a training step",)
        if level == 1:
            await coordinator.replicas.wake(ALL_MEMORY)
            assert await site.states() == {"a": "ready", "b": "ready"}
            coordinator, _ = await restart(site)
            assert await site.states() == {"a": "ready", "b": "ready"}

    run(tmp_path)


@service("a", info=SLEEPER)
async def test_a_part_that_was_woken_stays_awake(site, coordinator):
    await coordinator.replicas.sleep(1)
    await coordinator.replicas.wake(frozenset({MemoryTag.WEIGHTS}))
    coordinator, _ = await restart(site)
    assert site.engines["a"].asleep == {MemoryTag.KV_CACHE}
    await coordinator.replicas.wake(ALL_MEMORY)
    assert await site.states() == {"a": "ready"}


@service("a", "b")
async def test_an_operators_pause_holds(site, coordinator):
    await coordinator.replicas.pause(PauseMode.KEEP, "looking at a bad batch")
    coordinator, calls = await restart(site)
    assert all(engine.is_paused for engine in site.engines.values())
    assert "resume" not in [call for made in calls.values() for call in made]
    await site.join("late")
    await site.clock.sleep(1.0)
    assert site.engines["late"].is_paused
    status = await coordinator.status()
    assert (status.is_paused, status.pause_reason) == (True, "looking at a bad batch")
    assert status.degraded == ("paused for 0 s: looking at a bad batch",)
    await coordinator.replicas.resume()
    assert not any(engine.is_paused for engine in site.engines.values())
    coordinator, _ = await restart(site)
    status = await coordinator.status()
    assert (status.is_paused, status.paused_s, status.pause_reason) == (False, None, "")
    assert not any(engine.is_paused for engine in site.engines.values())


@service("a", config=replace(CONFIG, heartbeat_interval_s=1.0))
async def test_the_fleet_obeys_while_the_disk_fails_and_the_order_is_saved_later(site, coordinator):
    site.store.is_broken = True
    with pytest.raises(StorageFull, match="not stored"):
        await coordinator.replicas.pause(PauseMode.KEEP)
    assert site.engines["a"].is_paused
    site.store.is_broken = False
    await site.clock.sleep(3.0)
    _, calls = await restart(site)
    assert site.engines["a"].is_paused
    assert "resume" not in calls["a"]


async def test_a_store_that_was_taken_over_takes_nothing_more(tmp_path):
    path = tmp_path / "trajectories.sqlite"
    old, new = TrajectoryStore(path, Inline), TrajectoryStore(path, Inline)
    epoch = await old.take_over()
    await old.save_state("x", 1)
    taken = await new.take_over()
    assert taken > epoch
    with pytest.raises(ServiceUnavailable, match="another coordinator"):
        await old.save_state("x", 2)
    with pytest.raises(ServiceUnavailable):
        await old.take_over(1000)  # not even with a greater epoch
    assert await new.saved_state("x", int) == 1
    assert await new.take_over(500) == 501
    await new.save_state("x", 3)
    await new.close()
    await old.close()


@service("a")
async def test_a_coordinator_whose_run_was_taken_over_says_so_once_and_asks_to_be_ended(site, coordinator):
    await site.store.take_over()
    await coordinator.check_health()
    other = TrajectoryStore(site.path / "trajectories.sqlite", Inline)
    epoch = await other.take_over()
    with capture_logs() as logs:
        for number in range(3):
            with pytest.raises(ServiceUnavailable, match="another coordinator"):
                await coordinator.rollouts.submit(f"r{number}", (make_group("g", 1),))
    assert [entry["epoch"] for entry in logs if entry["log_level"] == "error"] == [epoch], logs
    with pytest.raises(ServiceUnavailable, match="another coordinator"):
        await coordinator.check_health()
    await other.close()
    site.heartbeats.cancel()
    await coordinator.close()
    await site.start()  # Serve starts the next coordinator, which takes the run over again
    await site.coordinator.check_health()


@service("a")
async def test_a_service_that_stops_begins_nothing_and_leaves_the_rest_to_the_next(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 4),))
    (first, *_) = (await coordinator.rollouts.take(report("w", 1), 1.0)).start
    held = await coordinator.rollouts.lease("s", 10, "ingress")
    assert await coordinator.drain() == (1, 3)
    assert (await coordinator.rollouts.take(report("w", 5, first.assignment_id), 0.0)).start == ()
    with pytest.raises(ServiceUnavailable, match="stopping"):
        await coordinator.rollouts.submit("r2", (make_group("g", 1),))
    with pytest.raises(ServiceUnavailable, match="stopping"):
        await coordinator.rollouts.lease("new", 10, "ingress")
    assert await coordinator.rollouts.lease("s", 10, "ingress") == held
    await hand_in(coordinator.rollouts, "w", record(first))
    assert await coordinator.drain() == (0, 3)
    await site.stop()
    coordinator = await site.start()
    await site.clock.sleep(CONFIG.restart_grace_s + 2.0)
    assert len((await coordinator.rollouts.take(report("w", 5), 1.0)).start) == 3


@service("a", "b")
async def test_leases_are_held_over_a_restart_by_what_processes_report(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 3),))
    started = (await coordinator.rollouts.take(report("w", 3), 1.0)).start
    session = await coordinator.rollouts.lease("s", 100, "ingress")
    placed = {one.assignment_id: one.lease for one in started} | {session_holder("s"): session}
    coordinator, _ = await restart(site)
    names = tuple(one.assignment_id for one in started)
    await coordinator.rollouts.take(report("w", 0, *names), 0.0)
    for process_id, holders in (("w", names), ("ingress", (session_holder("s"),))):
        late = LeaseReport(process_id, 7, turns=tuple(TurnBegun(placed[name].lease_id) for name in holders))
        assert (await coordinator.rollouts.report_leases(late)).send_all
        assert (await coordinator.rollouts.report_leases(late)).send_all, "the answer was lost"
        held = tuple(HeldLease(placed[name], name, "", 10) for name in holders)
        unknown = HeldLease(Lease("old", "a", "sim://a"), "r/g/9", "r/g", 10)  # its record is stored
        orders = await coordinator.rollouts.report_leases(LeaseReport(process_id, 8, leases=(*held, unknown)))
        assert not orders.send_all
    balancer = coordinator.replicas.balancer
    assert {name: balancer.lease_of(name) for name in placed} == placed
    assert sum(one.num_leases for one in (await coordinator.status()).replicas) == balancer.num_holders == 4
    for one in started:
        await hand_in(coordinator.rollouts, "w", record(one))
    for sequence in range(9, 200):  # the worker is silent, the other process is not
        await coordinator.rollouts.report_leases(LeaseReport("ingress", sequence))
        await site.clock.sleep(1.0)
    assert balancer.num_holders == 1
    await site.clock.sleep(site.config.balancer.lease_ttl_s + 2.0)
    assert balancer.num_holders == 0, "silence ended it"
    assert (await coordinator.rollouts.report_leases(LeaseReport("ingress", 200))).send_all


@service("a")
async def test_a_lease_that_nobody_says_to_hold_ends(site, coordinator):
    await coordinator.rollouts.report_leases(LeaseReport("ingress", 1, leases=()))
    await coordinator.rollouts.lease("s", 100, "ingress")  # the answer was lost, and the caller has disconnected
    heard = await coordinator.rollouts.lease("t", 100, "ingress")
    await coordinator.rollouts.report_leases(LeaseReport("ingress", 2, taken=(heard.lease_id,)))
    for sequence in range(3, 70):
        await coordinator.rollouts.report_leases(LeaseReport("ingress", sequence))
        await site.clock.sleep(1.0)
    balancer = coordinator.replicas.balancer
    assert (balancer.lease_of(session_holder("s")), balancer.lease_of(session_holder("t"))) == (None, heard)


@service("a")
async def test_a_cancel_holds_over_a_restart(site, coordinator):
    """B1: the next coordinator refused the records of a cancelled rollout, and all samples restarted."""
    await coordinator.rollouts.submit("r", (make_group("g", 4),))
    running = (await coordinator.rollouts.take(report(num_free=2), 1.0)).start
    site.store.is_broken = True  # the records of the queued samples are not yet written when the coordinator dies
    with pytest.raises(sqlite3.OperationalError):
        await coordinator.rollouts.cancel("r")
    site.store.is_broken = False
    coordinator, _ = await restart(site)
    for assignment in running:
        ended = replace(record(assignment), stop_reason=StopReason.CANCELLED, is_complete=False, paths=())
        await hand_in(coordinator.rollouts, "w", ended)
    await site.clock.sleep(CONFIG.restart_grace_s)
    status = await coordinator.rollouts.submit("r", (make_group("g", 4),))
    assert (status.num_finished, status.is_done) == (4, True)
    assert (await coordinator.rollouts.take(report(), 1.0)).start == ()


@service("a")
async def test_what_a_cancel_left_unwritten_is_written_by_the_next_coordinator(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 3),))
    await site.store.cancel("r")  # then it was killed
    coordinator, _ = await restart(site)
    await site.clock.sleep(CONFIG.heartbeat_interval_s + CONFIG.restart_grace_s)
    page = await read_page(coordinator, "r", 0, 10, 0.0)
    assert [one.stop_reason for one in page.trajectories] == [StopReason.CANCELLED] * 3


@service("a")
async def test_a_coordinator_whose_run_was_taken_over_hands_out_nothing(site, coordinator):
    """B6: the old coordinator detected the takeover only with its next write."""
    await site.store.take_over()
    await coordinator.rollouts.submit("r", (make_group("g", 4),))
    other = TrajectoryStore(site.path / "trajectories.sqlite", Inline)
    await other.take_over()
    await other.close()
    with pytest.raises(ServiceUnavailable, match="another coordinator"):
        await coordinator.rollouts.take(report(), 1.0)
    assert coordinator.rollouts.queue.num_queued == 4
    site.heartbeats.cancel()
    await coordinator.close()
    coordinator = await site.start()
    await site.join("a")
    await site.clock.sleep(CONFIG.restart_grace_s)
    assert len((await coordinator.rollouts.take(report(), 1.0)).start) == 4
