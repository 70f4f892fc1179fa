"""The coordinator's handling of replicas: real store, fake engines, virtual time."""

import asyncio
from dataclasses import replace

import pytest

from agentloop.api.coordinator import LeaseReport, ReplicaRegistration
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.errors import (
    Conflict,
    EngineLost,
    InvalidRequest,
    NoHealthyReplica,
    NotFound,
    ServiceUnavailable,
    StorageFull,
    WeightUpdateFailed,
)
from agentloop.fleet.desired_state import FleetWeights
from agentloop.types import KVPolicy, PauseMode
from agentloop_servers.cluster.host import software_of_process
from agentloop_servers.coordinator.coordinator import FLEET_WEIGHTS
from tests.support.engine.engines import INFO, SLEEPER, FakeEngine
from tests.support.fleet.service import CONFIG, hand_in, record, report, service
from tests.support.fleet.weights import push_source
from tests.support.records.samples import counted, make_group

SOFTWARE = software_of_process()


@service("a", "b")
async def test_a_lost_replicas_trajectories_move(site, coordinator):
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    (assignment,) = (await coordinator.rollouts.take(report(), 1.0)).start
    lost = assignment.lease.replica_id
    moved = await coordinator.rollouts.move(assignment.assignment_id, assignment.lease, True)
    assert moved.replica_id != lost
    # the request is repeated
    assert await coordinator.rollouts.move(assignment.assignment_id, assignment.lease, True) == moved
    site.silent.add(lost)
    await site.clock.sleep(4.5)
    assert (await site.states())[lost] == "suspect"
    await site.clock.sleep(4.0)
    assert lost not in await site.states()
    await coordinator.rollouts.take(report("w", 7, assignment.assignment_id), 0.0)
    site.silent.clear()
    await site.clock.sleep(2.0)
    assert (await site.states())[lost] == "ready"
    await hand_in(coordinator.rollouts, "w", record(assignment))


@service("a", "b")
async def test_a_replica_that_accepts_everything_and_answers_nothing_is_taken_out(site, coordinator):
    hung = site.engines["a"]
    hung.hangs.add("sample")
    lease = await coordinator.rollouts.lease("s", 100, "ingress")
    for number in range(20):  # every session placed on `a` gets no answer and reports the failure
        lease = await coordinator.rollouts.lease(f"s{number}", 100, "ingress")
        if lease.replica_id == "a":
            assert (await coordinator.rollouts.move(f"s{number}", lease, True)).replica_id == "b"
    assert await site.states() == {"a": "suspect", "b": "ready"}
    await site.clock.sleep(60.0)  # its heartbeats continue, without effect
    assert (await coordinator.status()).degraded == (
        "replica a is suspect: 3 calls without an answer within 600 s",
    )
    assert {
        (await coordinator.rollouts.lease(f"t{number}", 100, "ingress")).replica_id for number in range(10)
    } == {"b"}
    hung.hangs.clear()
    await site.clock.sleep(15.0)
    assert await site.states() == {"a": "ready", "b": "ready"}


@service("a")
async def test_a_move_waits_for_the_proof_that_clears_the_only_replica(site, coordinator):
    lease = await coordinator.rollouts.lease("s", 100, "ingress")
    for _ in range(CONFIG.fleet.max_failures):
        lease = await coordinator.rollouts.move("s", lease, True)
    assert (await site.states())["a"] == "ready"


@service("a")
async def test_nobody_is_proved_while_the_operator_pauses(site, coordinator):
    lease = await coordinator.rollouts.lease("s", 100, "ingress")
    for _ in range(CONFIG.fleet.max_failures):
        coordinator.replicas.report_failure(lease)
    await coordinator.replicas.pause(PauseMode.KEEP)
    await site.clock.sleep(30.0)
    assert "sample" not in site.engines["a"].calls
    await coordinator.replicas.resume()
    await site.clock.sleep(10.0)
    assert "sample" in site.engines["a"].calls


@service("a", info=SLEEPER)
async def test_a_replica_that_starts_while_the_fleet_sleeps_takes_no_memory(site, coordinator):
    await coordinator.replicas.sleep(1)
    assert not await coordinator.replicas.starting("b", SOFTWARE)
    (held,) = (await coordinator.status()).starting
    assert (held.replica_id, held.reason) == ("b", "the fleet sleeps")
    assert "replica b has been waiting to start for 0 s: the fleet sleeps" in (await coordinator.status()).degraded
    await coordinator.replicas.wake(ALL_MEMORY)
    assert await coordinator.replicas.starting("b", SOFTWARE)
    await site.join("b")
    assert (await coordinator.status()).starting == ()


@service("a")
async def test_a_replica_of_other_software_is_refused_by_name_before_it_loads(site, coordinator):
    with pytest.raises(InvalidRequest, match=f"replica b runs Python 3.9, the service {SOFTWARE}"):
        await coordinator.replicas.starting("b", "Python 3.9")
    assert (await coordinator.status()).starting == ()


@service("a", info=SLEEPER)
async def test_a_sleep_waits_for_a_replica_that_is_loading(site, coordinator):
    assert await coordinator.replicas.starting("b", SOFTWARE)
    sleeping = asyncio.create_task(coordinator.replicas.sleep(1))
    await site.clock.sleep(2.0)
    assert site.engines["a"].asleep == ALL_MEMORY
    assert not sleeping.done()
    await coordinator.replicas.starting("b", SOFTWARE)
    await site.join("b")
    await sleeping
    assert site.engines["b"].asleep == ALL_MEMORY
    assert await site.states() == {"a": "asleep", "b": "asleep"}


@service("a", info=SLEEPER)
async def test_a_sleep_says_which_replica_is_still_loading(site, coordinator):
    assert await coordinator.replicas.starting("b", SOFTWARE)

    async def load():
        while True:
            await coordinator.replicas.starting("b", SOFTWARE)
            await site.clock.sleep(1.0)

    loading = asyncio.create_task(load())
    with pytest.raises(EngineLost, match="starting: b"):
        await coordinator.replicas.sleep(1)
    loading.cancel()
    assert site.engines["a"].asleep == ALL_MEMORY


@service("a")
async def test_direct_leases(site, coordinator):
    lease = await coordinator.rollouts.lease("s", 100, "ingress")
    assert await coordinator.rollouts.lease("s", 100, "ingress") == lease
    await coordinator.rollouts.report_leases(LeaseReport("ingress", 1, leases=()))
    news = LeaseReport("ingress", 2, taken=(lease.lease_id,), released=(lease.lease_id,))
    await coordinator.rollouts.report_leases(news)
    await coordinator.rollouts.report_leases(news)
    assert (await coordinator.status()).replicas[0].num_leases == 0
    with pytest.raises(NotFound):
        await coordinator.rollouts.move("s", lease, True)
    await coordinator.replicas.deregister("a", "the engine hangs")
    await coordinator.replicas.deregister("a")
    (lost,) = (await coordinator.status()).lost
    assert (await coordinator.status()).degraded == (
        "no replica takes traffic; the last one that left: the engine hangs",
    )
    assert (lost.replica_id, lost.reason) == ("a", "the engine hangs")
    site.silent.add("a")
    started = site.clock.now()
    with pytest.raises(NoHealthyReplica):
        await coordinator.rollouts.lease("s", 100, "ingress")
    assert site.clock.now() == started + site.config.placement_wait_s
    waiting = asyncio.create_task(coordinator.rollouts.lease("s", 100, "ingress"))
    await site.clock.sleep(3.0)
    await site.join("b")
    assert (await waiting).replica_id == "b"  # a waiting call accepts any replica that joins


@service("a", "b")
async def test_an_update_from_end_to_end(site, coordinator):
    for engine in site.engines.values():
        engine.seconds = {"commit": 2.0}
    await coordinator.rollouts.lease("before", 10, "ingress")
    updating = asyncio.create_task(coordinator.replicas.update_weights(WeightUpdate(1, "dir"), None))
    await site.clock.sleep(1.0)
    started = site.clock.now()
    # `b` serves the old version during the update
    lease = await coordinator.rollouts.lease("during", 10, "ingress")
    assert (site.clock.now() - started, lease.replica_id) == (0.0, "b")
    result = await updating
    assert result.kv_policy is KVPolicy.RECOMPUTE
    assert result.stall_ms == pytest.approx(2000.0)
    status = await coordinator.status()
    assert (status.weight_version, status.is_ready, status.updates) == (1, True, (result,))


@service("a")
async def test_during_the_commit_of_all_there_is_a_caller_waits(site, coordinator):
    site.engines["a"].seconds = {"commit": 2.0}
    updating = asyncio.create_task(coordinator.replicas.update_weights(WeightUpdate(1, "dir"), None))
    await site.clock.sleep(1.0)
    started = site.clock.now()
    await coordinator.rollouts.lease("during", 10, "ingress")  # waits for the end of the commit instead of failing
    assert site.clock.now() - started == pytest.approx(1.0)
    await updating


@service("a", "b")
async def test_a_failed_replica_is_brought_back_without_being_asked(site, coordinator):
    site.engines["b"].fail("commit", times=1)
    result = await coordinator.replicas.update_weights(WeightUpdate(1, "dir"), KVPolicy.KEEP)
    assert [one.replica_id for one in result.replicas if one.error] == ["b"]
    await site.clock.sleep(60.0)
    assert await site.states() == {"a": "ready", "b": "ready"}
    assert site.engines["b"].weight_version == 1
    await site.join("late", version=0)
    await site.clock.sleep(1.0)
    assert (await site.states())["late"] == "ready"
    assert site.engines["late"].weight_version == 1


@service("a")
async def test_an_update_goes_on_when_its_caller_is_gone(site, coordinator):
    site.engines["a"].seconds = {"commit": 2.0}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(coordinator.replicas.update_weights(WeightUpdate(1, "dir"), None), timeout=1.0)
    await site.clock.sleep(2.0)
    assert await site.states() == {"a": "ready"}
    assert (await coordinator.status()).weight_version == 1


@service("a")
async def test_an_update_that_nobody_takes(site, coordinator):
    site.engines["a"].fail("commit")
    with pytest.raises(WeightUpdateFailed):
        await coordinator.replicas.update_weights(WeightUpdate(1, "dir"), None)
    status = await coordinator.status()
    assert (status.is_ready, status.weight_version) == (False, 0)
    await site.clock.sleep(30.0)
    assert await site.states() == {"a": "quarantined"}
    site.engines["a"].failures.clear()
    await coordinator.replicas.update_weights(WeightUpdate(1, "dir"), None)
    assert await site.states() == {"a": "ready"}


@service("a")
async def test_operator_pause(site, coordinator):
    await coordinator.replicas.pause(PauseMode.KEEP)
    assert site.engines["a"].is_paused
    assert (await coordinator.status()).is_paused
    await coordinator.replicas.resume()
    assert not site.engines["a"].is_paused


@service("a")
async def test_a_replica_restarted_under_its_name_gets_its_leases_moved(site, coordinator):
    lease = await coordinator.rollouts.lease("s", 10, "ingress")
    engine = FakeEngine(site.clock, "fake://a2")
    site.engines = {"a": engine, "a2": engine}
    site.silent.add("a2")
    await coordinator.replicas.register(ReplicaRegistration("a", "fake://a2", INFO, 0))
    await site.clock.sleep(0.1)
    again = await coordinator.rollouts.lease("s", 10, "ingress")
    assert (lease.url, again.url) == ("fake://a", "fake://a2")


@service("a", "b")
async def test_a_restart_remembers_the_weights_and_late_replicas_catch_up(site, coordinator):
    first = await coordinator.replicas.update_weights(WeightUpdate(4, "/weights/4"), None)
    second = await coordinator.replicas.update_weights(WeightUpdate(5, "/weights/5"), None)
    await site.stop()
    coordinator = await site.start()
    await site.join("late", version=0)
    await site.clock.sleep(10)
    status = await coordinator.status()
    assert (status.weight_version, status.updates[:2]) == (5, (first, second))
    assert await site.states() == {"a": "ready", "b": "ready", "late": "ready"}
    assert site.engines["late"].weight_version == 5


def push(version):
    return WeightUpdate(version, push=push_source())


@service("a", "b", info=SLEEPER)
async def test_sleep_keeps_leases_and_a_caller_waits_for_the_wake(site, coordinator):
    lease = await coordinator.rollouts.lease("s", 10, "ingress")
    await coordinator.replicas.sleep(1)
    status = await coordinator.status()
    assert (status.is_ready, set(status.asleep)) == (False, {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE})
    assert [(one.state, one.num_workers, one.weight_dtype) for one in status.replicas] == [
        ("asleep", 2, "bfloat16"),
        ("asleep", 2, "bfloat16"),
    ]
    assert sum(one.num_leases for one in status.replicas) == 1
    await site.clock.sleep(10.0)  # heartbeats continue, but they do not quarantine a replica
    waiting = asyncio.create_task(coordinator.rollouts.lease("other", 10, "ingress"))
    await site.clock.sleep(1.0)
    await coordinator.replicas.wake(ALL_MEMORY)
    await waiting
    assert await coordinator.rollouts.lease("s", 10, "ingress") == lease
    assert (await coordinator.status()).asleep == ()
    assert await site.states() == {"a": "ready", "b": "ready"}


@service("a", "b")
async def test_a_fleet_without_sleep_says_so(site, coordinator):
    with pytest.raises(InvalidRequest, match="a, b"):
        await coordinator.replicas.sleep(1)
    assert (await coordinator.status()).asleep == ()


@service("a", info=SLEEPER)
async def test_who_joins_while_the_fleet_sleeps_is_brought_up_as_soon_as_it_wakes(site, coordinator):
    await coordinator.replicas.update_weights(WeightUpdate(1, "dir"), None)
    await coordinator.replicas.sleep(2)
    await site.join("late", version=0)
    await site.clock.sleep(5.0)
    assert await site.states() == {"a": "asleep", "late": "asleep"}
    await coordinator.replicas.wake(ALL_MEMORY)
    await site.clock.sleep(0.1)
    assert await site.states() == {"a": "ready", "late": "ready"}
    assert site.engines["late"].weight_version == 1


@service("a", "b", info=SLEEPER)
async def test_pushed_weights_are_given_on_to_who_joins_late(site, coordinator):
    await coordinator.replicas.update_weights(push(1), None)
    await site.join("late", version=0)
    await site.clock.sleep(3.0)
    (late,) = [one for one in (await coordinator.status()).replicas if one.replica_id == "late"]
    assert late.state == "joining"
    assert "version 1 was pushed" in late.error
    site.engines["b"].offered = push_source("relay")
    await site.clock.sleep(CONFIG.weights.catch_up_pause_s)
    assert (await site.states())["late"] == "ready"


@service("a", "b", info=SLEEPER)
async def test_a_restart_goes_on_with_pushed_weights_and_their_secret_is_not_kept(site, coordinator):
    await coordinator.replicas.update_weights(push(1), None)
    for engine in site.engines.values():
        engine.offered = push_source("relay")
    await site.stop()
    coordinator = await site.start()
    saved = (await site.store.saved_state(FLEET_WEIGHTS, FleetWeights)).served
    assert (saved.version, saved.update.push.token, saved.update.push.tensors) == (1, "", ())
    await site.clock.sleep(2.0)
    await site.join("late", version=0)
    await site.clock.sleep(2.0)
    assert await site.states() == {"a": "ready", "b": "ready", "late": "ready"}
    assert (await coordinator.status()).weight_version == 1


@service("a", info=SLEEPER, config=replace(CONFIG, initial_weights=WeightUpdate(0, "/models/judge")))
async def test_a_judge_sleeps_deeply_and_comes_back_from_its_checkpoint(site, coordinator):
    await coordinator.replicas.sleep(2)
    await coordinator.replicas.wake(ALL_MEMORY)
    assert await site.states() == {"a": "ready"}
    assert [update.directory for update in site.engines["a"].updates] == ["/models/judge"]


@service("a", info=SLEEPER)
async def test_without_its_checkpoint_a_deep_sleep_ends_with_a_push(site, coordinator):
    await coordinator.replicas.sleep(2)
    with pytest.raises(Conflict):
        await coordinator.replicas.wake(ALL_MEMORY)
    await coordinator.replicas.update_weights(push(1), None)
    assert await site.states() == {"a": "ready"}


@service("a", "b")
async def test_a_replica_that_missed_the_operators_resume_gets_it_later(site, coordinator):
    await coordinator.replicas.pause(PauseMode.KEEP)
    site.engines["b"].fail("resume", times=1)
    with pytest.raises(EngineLost, match="b"):
        await coordinator.replicas.resume()
    await site.clock.sleep(1.0)
    assert await site.states() == {"a": "ready", "b": "ready"}
    assert not site.engines["b"].is_paused


# Updates when the coordinator stops


@service("a", "b")
async def test_a_failed_push_does_not_come_true_after_a_restart(site, coordinator):
    await coordinator.replicas.update_weights(push(1), None)
    for engine in site.engines.values():
        engine.fail("commit", times=1)
        engine.hangs = {"pause"}
    with pytest.raises(WeightUpdateFailed):
        await coordinator.replicas.update_weights(push(2), None)
    for engine in site.engines.values():
        engine.hangs = set()
    await site.stop()
    coordinator = await site.start()
    await site.clock.sleep(CONFIG.weights.settle_s + 5.0)
    assert await site.states() == {"a": "ready", "b": "ready"}
    assert (coordinator.replicas.fleet.weight_version, [one.weight_version for one in site.engines.values()]) == (
        1,
        [1, 1],
    )


async def restarted_before_a_commit(site, coordinator, update):
    """Stop the coordinator while an update pauses the replicas. Returns the next coordinator."""
    for engine in site.engines.values():
        engine.seconds = {"pause": 20.0}
    updating = asyncio.create_task(coordinator.replicas.update_weights(update, None))
    await site.clock.sleep(1.0)
    await site.stop()
    await asyncio.gather(updating, return_exceptions=True)
    coordinator = await site.start()
    for engine in site.engines.values():
        engine.seconds = {}
    return coordinator


@service("a", "b")
async def test_a_coordinator_that_dies_before_the_first_commit_leaves_the_fleet_where_it_was(site, coordinator):
    await coordinator.replicas.update_weights(push(1), None)
    coordinator = await restarted_before_a_commit(site, coordinator, push(2))
    await site.clock.sleep(1.5)
    assert (await site.states(), coordinator.replicas.is_ready) == ({"a": "joining", "b": "joining"}, False)
    # waits until the update is settled
    again = asyncio.create_task(coordinator.replicas.update_weights(push(3), None))
    await site.clock.sleep(CONFIG.weights.settle_s + 1.0)
    assert (await again).previous_version == 1
    assert await site.states() == {"a": "ready", "b": "ready"}


@service("a", "b", "c")
async def test_a_coordinator_that_dies_after_the_first_commit_brings_the_others_after_it(site, coordinator):
    await coordinator.replicas.update_weights(push(1), None)
    for name in "bc":
        site.engines[name].seconds = {"pause": 20.0}
    # The outcome is not written to disk; the replicas report it.
    site.engines["a"].on_commit = lambda: setattr(site.store, "is_broken", True)
    updating = asyncio.create_task(coordinator.replicas.update_weights(push(2), None))
    await site.clock.sleep(1.0)
    await site.stop()
    await asyncio.gather(updating, return_exceptions=True)
    coordinator = await site.start()
    for engine in site.engines.values():
        engine.seconds, engine.offered = {}, push_source("relay")
    await site.clock.sleep(CONFIG.weights.settle_s + 5.0)
    assert coordinator.replicas.fleet.weight_version == 2
    assert await site.states() == {"a": "ready", "b": "ready", "c": "ready"}
    answer = await coordinator.replicas.update_weights(push(2), None)  # the answer was lost with the coordinator
    assert (answer.version, answer.previous_version) == (2, 1)
    assert [(one.replica_id, one.error) for one in answer.replicas] == [("a", None), ("b", None), ("c", None)]


@service("a", "b")
async def test_a_repeat_of_an_update_whose_report_was_not_written_gets_its_replicas(site, coordinator):
    site.engines["b"].seconds = {"pause": 20.0}  # the outcome is durable once `a` holds it; the report is not
    updating = asyncio.create_task(coordinator.replicas.update_weights(push(1), None))
    await site.clock.sleep(1.0)
    await site.stop()
    await asyncio.gather(updating, return_exceptions=True)
    coordinator = await site.start()
    site.engines["b"].seconds = {}
    await site.clock.sleep(1.0)
    answer = await coordinator.replicas.update_weights(push(1), None)
    assert (answer.version, [one.replica_id for one in answer.replicas]) == (1, ["a", "b"])
    assert answer.replicas[0].error is None


@service("a", "b")
async def test_no_version_is_told_until_it_is_known_which_one_an_update_has_left(site, coordinator):
    site.engines["b"].seconds = {"pause": 20.0}
    site.engines["a"].on_commit = lambda: setattr(site.store, "is_broken", True)
    updating = asyncio.create_task(coordinator.replicas.update_weights(push(1), None))
    await site.clock.sleep(1.0)
    assert (await coordinator.status()).weight_version == 1
    site.silent.add("a")
    await site.stop()
    await asyncio.gather(updating, return_exceptions=True)
    coordinator = await site.start()
    told = []
    for _ in range(8):
        await site.clock.sleep(0.5)
        told.append((await coordinator.status()).weight_version)
    assert told == [None] * 8  # only `b` has reported, and it holds version 0
    site.silent.clear()
    await site.clock.sleep(2.5)
    assert (await coordinator.status()).weight_version == 1


@service("a", "b")
async def test_an_update_of_which_nothing_came_leaves_what_replicas_brought_along(site, coordinator):
    coordinator = await restarted_before_a_commit(site, coordinator, push(1))
    await site.clock.sleep(CONFIG.weights.settle_s - 1.0)
    assert (await coordinator.status()).weight_version is None
    await site.clock.sleep(3.0)
    assert (await coordinator.status()).weight_version == 0
    assert await site.states() == {"a": "ready", "b": "ready"}


@service("a", "b")
async def test_a_repeat_gets_its_report_from_the_next_coordinator_too(site, coordinator):
    first = await coordinator.replicas.update_weights(push(1), None)
    await site.stop()
    coordinator = await site.start()
    await site.clock.sleep(2.0)
    assert await coordinator.replicas.update_weights(push(1), None) == first
    assert coordinator.replicas.sync.reports == (first,)


@service("a", "b")
async def test_an_update_that_cannot_be_recorded_does_not_begin(site, coordinator):
    site.store.is_broken = True
    with pytest.raises(ServiceUnavailable, match="cannot be stored"):
        await coordinator.replicas.update_weights(push(1), None)
    assert await site.states() == {"a": "ready", "b": "ready"}
    assert [engine.calls for engine in site.engines.values()] == [["resume", "stage"]] * 2


@service("a", info=SLEEPER)
async def test_weights_are_not_discarded_while_the_outcome_of_their_update_is_unsaved(site, coordinator):
    site.engines["a"].on_commit = lambda: setattr(site.store, "is_broken", True)
    await coordinator.replicas.update_weights(push(1), None)
    with pytest.raises(StorageFull, match="not stored yet"):
        await coordinator.replicas.sleep(2)
    assert coordinator.replicas.sync.desired.orders.asleep == frozenset()
    site.store.is_broken = False
    await site.clock.sleep(5.0)
    await coordinator.replicas.sleep(2)


@service("a", "b")
async def test_a_replica_that_is_not_as_ordered_is_brought_back_to_its_orders(site, coordinator):
    site.engines["a"].is_paused = True  # paused by an unknown caller
    await site.clock.sleep(5.0)
    assert not site.engines["a"].is_paused
    assert await site.states() == {"a": "ready", "b": "ready"}
    await coordinator.replicas.pause(PauseMode.KEEP)
    site.engines["b"].is_paused = False
    await site.clock.sleep(5.0)
    assert site.engines["b"].is_paused
    assert await site.states() == {"a": "ready", "b": "ready"}


@service("a")
async def test_a_pause_that_waits_for_requests_is_no_disobedience(site, coordinator):
    site.engines["a"].seconds = {"pause": 30.0}
    pausing = asyncio.create_task(coordinator.replicas.pause(PauseMode.WAIT))
    await site.clock.sleep(20.0)
    assert await site.states() == {"a": "ready"}
    await pausing
    assert site.engines["a"].calls == ["resume", "pause:wait:keep"]


@service("a", "b")
async def test_a_process_that_alone_reports_failures_condemns_no_replica(site, coordinator):
    """B10: a worker with a broken link took every healthy replica out of traffic."""
    rollouts = coordinator.rollouts
    await rollouts.submit("r", (make_group("g", 40),))
    (await rollouts.take(report("healthy", 20), 1.0))
    broken = (await rollouts.take(report("broken", 20), 1.0)).start
    for assignment in broken:
        lease = assignment.lease
        for _ in range(CONFIG.fleet.max_failures):
            lease = await rollouts.move(assignment.assignment_id, lease, True)
    assert await site.states() == {"a": "ready", "b": "ready"}
    healthy = await rollouts.take(report("healthy", 0), 1.0)
    assert healthy.cancel == ()
    assert {one.num_leases > 0 for one in (await coordinator.status()).replicas} == {True}


@service("a", "b")
async def test_what_a_worker_given_up_for_lost_reports_of_replicas_counts_not(site, coordinator):
    """B10: the worker rejoined and reported for each lease that its replica had not answered."""
    rollouts = coordinator.rollouts
    await rollouts.submit("r", (make_group("g", 8),))
    held = (await rollouts.take(report("lost"), 1.0)).start
    await site.clock.sleep(CONFIG.worker_timeout_s + 2.0)
    for assignment in held:
        coordinator.replicas.report_failure(assignment.lease)
    assert await site.states() == {"a": "ready", "b": "ready"}
    fresh = (await rollouts.take(report("next"), 1.0)).start
    for _ in range(3):
        coordinator.replicas.report_failure(fresh[0].lease)
    assert (await site.states())[fresh[0].lease.replica_id] == "suspect"


@service("a", "b")
async def test_a_replica_that_samples_noise_is_named(site, coordinator):
    report = replace(site.engines["b"].report(), is_noise=True)
    await coordinator.replicas.heartbeat("b", report)
    assert (await coordinator.status()).degraded == (
        "replica b has broken weights: its sampled logprobs stay at -ln(vocabulary)",
    )
    await coordinator.replicas.heartbeat("b", report)
    assert counted(coordinator.replicas.tally)["logprob_problems_total", ()] == 1


@service("a")
async def test_starts_are_counted_by_their_reason(site, coordinator):
    def starts():
        found = counted(coordinator.replicas.tally).items()
        return {labels[1]: num for (name, labels), num in found if name == "replica_starts_total"}

    assert starts() == {"return": 1}  # it never asked: an earlier coordinator allowed its start
    for name, reason in (("b", "new"), ("c", "replacement"), ("d", "new")):
        await coordinator.replicas.starting(name, SOFTWARE)
        await site.join(name)
        assert starts()[reason] == 1 + (name == "d")
        if name == "b":
            site.silent.add("b")
            await site.clock.sleep(CONFIG.fleet.dead_after_s + 1.0)
