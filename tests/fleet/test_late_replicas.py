"""Replicas catch up with the fleet's weights outside an update."""

import asyncio
from dataclasses import replace

import pytest

from agentloop.engine.interface import WeightUpdate
from agentloop.errors import CheckpointUnreadable, WeightUpdateFailed
from agentloop.fleet.desired_state import FleetWeights, UpdateSource
from agentloop.fleet.registry import ReplicaState
from agentloop.types import KVPolicy, PauseMode
from tests.support.engine.engines import SLEEPER, FakeEngine
from tests.support.fleet.weights import CONFIG, FleetSite, push_source, virtual


@virtual
async def test_all_fail_and_the_version_before_is_brought_back(clock):
    site = FleetSite(clock, "a")
    await site.update(1)
    site.engines["a"].fail("commit", times=1)
    with pytest.raises(WeightUpdateFailed):
        await site.update(2)
    assert await site.late.bring_up("a")
    assert site.engines["a"].weight_version == 1
    assert site.placeable() == ["a"]


@virtual
async def test_a_late_joiner_is_brought_to_the_fleets_version(clock):
    site = FleetSite(clock, "a")
    await site.update(1, KVPolicy.RECOMPUTE)
    late = site.register("late", version=0)
    assert site.placeable() == ["a"]
    assert await site.late.bring_up("late")
    assert late.calls == ["stage", "pause:keep:recompute", "commit", "resume"]
    assert late.weight_version == 1
    assert site.placeable() == ["a", "late"]


@virtual
async def test_a_replica_at_the_fleets_version_is_only_resumed(clock):
    site = FleetSite(clock)
    engine = site.register("a", version=0)  # its version becomes the fleet's, as no other replica exists
    engine.is_paused = True  # an earlier coordinator died while the replica was paused
    assert await site.late.bring_up("a")
    assert engine.calls == ["resume"]
    assert site.placeable() == ["a"]
    assert await site.late.bring_up("a")  # no work is needed
    assert engine.calls == ["resume"]


@virtual
async def test_without_an_update_there_is_nothing_to_catch_up_to(clock):
    site = FleetSite(clock, "a")
    site.register("dummy", version=None)
    assert not await site.late.bring_up("dummy")
    assert not await site.late.bring_up("unknown")
    assert site.state("dummy") is ReplicaState.JOINING


@virtual
async def test_catching_up_is_tried_again_with_a_pause_in_between(clock):
    site = FleetSite(clock, "a")
    await site.update(1)
    late = site.register("late")
    late.fail("stage", times=2)
    assert await site.late.bring_up("late")
    assert late.calls.count("stage") == 3


@virtual
async def test_a_stage_that_hangs_is_given_up_after_a_stragglers_time(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"stage": 5.0}
    await site.update(1)
    late, begun_at = site.register("late"), clock.now()
    late.seconds = {"stage": 1e9}
    catching_up = asyncio.create_task(site.late.bring_up("late"))
    await clock.sleep(1.0)
    late.seconds = {}  # applies to the next attempt: only this one hangs
    assert await catching_up
    assert late.calls.count("stage") == 2
    assert clock.now() - begun_at < CONFIG.straggler_grace_s + 2.0 * 5.0 + CONFIG.max_backoff_s < 100.0


@virtual
async def test_a_stage_that_is_slower_than_the_fleets_gets_more_time_with_each_attempt(clock):
    site = FleetSite(clock, "a")
    await site.update(1)
    late = site.register("late")
    late.seconds = {"stage": 0.9 * CONFIG.stage_timeout_s}
    assert await site.late.bring_up("late")
    assert late.calls.count("stage") == CONFIG.max_catch_up_attempts


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        ("stage", ReplicaState.JOINING),
        ("pause", ReplicaState.JOINING),
        ("commit", ReplicaState.QUARANTINED),
        ("resume", ReplicaState.QUARANTINED),
    ],
)
def test_catching_up_ends_after_its_attempts(verb, state):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a")
        await site.update(1)
        late = site.register("late")
        late.hangs = {verb}
        with pytest.raises(TimeoutError):
            await site.late.bring_up("late")
        assert sum(call.startswith(verb) for call in late.calls) == CONFIG.max_catch_up_attempts
        assert site.state("late") is state
        assert site.placeable() == ["a"]

    test()


@virtual
async def test_a_replica_that_joins_during_an_update_gets_the_new_version(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"stage": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    late = site.register("late")
    catching_up = asyncio.create_task(site.late.bring_up("late"))
    await clock.sleep(1.0)
    assert late.calls == []
    await updating
    assert await catching_up
    assert late.weight_version == 1


@virtual
async def test_an_update_during_a_catch_up_ends_with_everybody_at_the_newest(clock):
    site = FleetSite(clock, "a")
    await site.update(1)
    late = site.register("late")
    late.seconds = {"stage": 5.0}
    catching_up = asyncio.create_task(site.late.bring_up("late"))
    await clock.sleep(1.0)
    report = await site.update(2)
    assert [one.replica_id for one in report.replicas] == ["a"]
    assert await catching_up
    assert late.calls.count("commit") == 2
    assert late.weight_version == 2
    assert site.placeable() == ["a", "late"]


@virtual
async def test_a_replica_restarted_during_an_update_is_not_taken_for_the_new_process(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["b"].seconds = {"commit": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    fresh = FakeEngine(clock, "fake://b2", version=0)
    site.engines["b2"] = fresh
    registration = fresh.registration()
    site.fleet.register(type(registration)("b", registration.url, registration.info, 0), clock.now())
    await updating
    assert site.state("b") is ReplicaState.JOINING
    assert await site.late.bring_up("b")
    assert fresh.weight_version == 1


@virtual
async def test_an_update_during_an_operator_pause_leaves_the_fleet_paused(clock):
    site = FleetSite(clock, "a")
    await site.sync.pause(PauseMode.KEEP)
    await site.update(1)
    late = site.register("late", version=0)
    await site.late.bring_up("late")
    same = site.register("same", version=1)
    await site.late.bring_up("same")
    for engine in site.engines.values():
        assert engine.is_paused
        assert engine.weight_version == 1
        assert "resume" not in engine.calls
    assert same.calls == ["pause:keep:keep"]
    assert late.calls[-1] == "pause:keep:keep"
    await site.sync.resume()
    assert not any(engine.is_paused for engine in site.engines.values())


@virtual
async def test_a_replica_that_registers_anew_during_its_commit_is_not_believed(clock):
    site = FleetSite(clock, "a", "b")
    await site.update(1)
    bad = site.engines["b"]
    bad.seconds = {"commit": 50.0}
    updating = asyncio.create_task(site.update(2))
    await clock.sleep(1.0)
    site.fleet.deregister("b")
    site.fleet.register(replace(bad.registration(), weight_version=2), clock.now())
    assert (await updating).replicas[1].error is not None
    # its commit was interrupted: the version stays unknown until the next commit
    assert site.fleet.get("b").weight_version is None
    bad.seconds = {}
    assert await site.late.bring_up("b")
    assert bad.weight_version == 2


# Pushed weights, which their trainer process cannot send again


def offering(site, replica_id, token="relay"):
    site.engines[replica_id].offered = push_source(token)
    return site.engines[replica_id]


@virtual
async def test_pushed_weights_come_from_a_replica_that_holds_them(clock):
    site = FleetSite(clock, "a", "b", info=SLEEPER)
    await site.push(1, KVPolicy.RECOMPUTE)
    offering(site, "b")
    late = site.register("late", version=0)
    assert await site.late.bring_up("late")
    # replica a had no weights to offer
    assert site.engines["a"].calls[-1] == site.engines["b"].calls[-1] == "offer"
    (update,) = late.updates
    assert (update.version, update.push.token, update.push.num_receivers) == (1, "relay", SLEEPER.num_workers)
    assert late.calls[2] == "pause:keep:recompute"
    assert site.placeable() == ["a", "b", "late"]


@virtual
async def test_without_a_peer_it_waits_for_the_next_update_and_says_so(clock):
    site = FleetSite(clock, "a", info=SLEEPER)
    await site.push(1)
    late = site.register("late", version=0)
    assert not await site.late.bring_up("late")
    assert late.calls == []
    error = site.fleet.get("late").error
    assert "version 1 was pushed" in error
    assert "a: its engine cannot send its weights" in error
    assert site.state("late") is ReplicaState.JOINING
    await site.push(2)
    assert site.placeable() == ["a", "late"]
    assert site.fleet.get("late").error is None


@pytest.mark.parametrize("change", [{"name": "other"}, {"num_workers": 4}])
def test_a_peer_of_another_kind_is_not_asked(change):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", info=SLEEPER)
        await site.push(1)
        offering(site, "a")
        site.info = replace(SLEEPER, **change)
        site.register("late", version=0)
        assert not await site.late.bring_up("late")
        assert "offer" not in site.engines["a"].calls
        assert "no peer" in site.fleet.get("late").error

    test()


@virtual
async def test_a_peer_that_does_not_answer_is_passed_over(clock):
    site = FleetSite(clock, "a", "b", "c", info=SLEEPER)
    await site.push(1)
    offering(site, "a").hangs = {"offer"}
    offering(site, "b").fail("offer")
    offering(site, "c", token="c")
    late = site.register("late", version=0)
    assert await site.late.bring_up("late")
    assert late.updates[0].push.token == "c"


@virtual
async def test_a_peer_of_its_host_is_asked_first(clock):
    site = FleetSite(clock, "one:1", "two:1", info=SLEEPER)
    await site.push(1)
    for peer in site.placeable():
        offering(site, peer, token=peer)
    late = site.register("two:2", version=0)
    assert await site.late.bring_up("two:2")
    assert late.updates[0].push.token == "two:1"


@virtual
async def test_an_offer_overtaken_by_an_update_is_not_taken(clock):
    site = FleetSite(clock, "a", info=SLEEPER)
    await site.push(1)
    offering(site, "a").seconds = {"offer": 5.0}
    late = site.register("late", version=0)
    catching_up = asyncio.create_task(site.late.bring_up("late"))
    await clock.sleep(1.0)
    await site.push(2)
    assert await catching_up
    assert [update.version for update in late.updates] == [2]
    assert site.placeable() == ["a", "late"]


@virtual
async def test_after_a_restart_pushed_weights_come_from_those_who_hold_them(clock):
    site = FleetSite(clock)
    pushed = UpdateSource.of(WeightUpdate(4, push=push_source("gone")), KVPolicy.KEEP)
    site.sync.restore(FleetWeights(pushed), None)
    holder = site.register("holder", version=4)
    late = site.register("late", version=0)
    assert not await site.late.bring_up("late")
    assert await site.late.bring_up("holder")
    offering(site, "holder")
    assert await site.late.bring_up("late")
    assert late.updates[0].push.token == "relay"
    assert holder.weight_version == late.weight_version == 4


# The weights that engines load at startup


@virtual
async def test_a_failed_first_push_does_not_quarantine_for_ever(clock):
    base = WeightUpdate(0, "/models/base")
    site = FleetSite(clock, "a", initial=(base, KVPolicy.KEEP))
    site.engines["a"].fail("commit", times=1)
    with pytest.raises(WeightUpdateFailed):
        await site.push(1)
    assert site.state("a") is ReplicaState.QUARANTINED
    assert await site.late.bring_up("a")
    assert site.engines["a"].updates[-1] == base
    assert (site.placeable(), site.fleet.weight_version) == (["a"], 0)


@virtual
async def test_the_weights_at_the_start_count_for_their_own_version_only(clock):
    site = FleetSite(clock, "a", version=3, initial=(WeightUpdate(0, "/models/base"), KVPolicy.KEEP))
    site.register("dummy", version=None)
    assert not await site.late.bring_up("dummy")
    await site.push(4)
    assert site.placeable() == ["a", "dummy"]


@pytest.mark.parametrize("version", [0, None])
def test_a_commit_that_ends_after_its_update_has_failed_makes_nothing_the_fleets(version):
    @virtual
    async def test(clock):
        initial = None if version is None else (WeightUpdate(version, "/models/base"), KVPolicy.KEEP)
        site = FleetSite(clock, "a", version=version, initial=initial)
        site.engines["a"].fail("commit", times=1)
        with pytest.raises(WeightUpdateFailed):
            await site.push(1)
        site.fleet.deregister("a")  # silent, although the commit completed
        site.fleet.register(replace(site.engines["a"].registration(), weight_version=1), clock.now())
        assert site.fleet.weight_version == version
        assert site.placeable() == []
        await site.push(1, token="again")
        assert (site.fleet.weight_version, site.placeable()) == (1, ["a"])

    test()


@virtual
async def test_a_commit_that_ends_after_its_coordinator_has_died_is_not_resumed(clock):
    site = FleetSite(clock, "a")
    await site.update(1)
    engine = site.register("b", version=1)
    engine.info = SLEEPER
    site.fleet.register(engine.registration(), clock.now())
    engine.weight_version = 2
    assert await site.late.bring_up("b")
    assert engine.calls[:5] == ["wake:kv_cache+weights", "wake:weights", "stage", "pause:keep:keep", "commit"]
    assert (engine.weight_version, site.placeable()) == (1, ["a", "b"])


# A served directory that was deleted


@virtual
async def test_a_directory_that_is_gone_is_replaced_by_another_replicas_weights(clock):
    site = FleetSite(clock, "holder")
    await site.update(1)
    offering(site, "holder")
    late = site.register("late", version=0)
    late.unreadable = {"dir1"}
    assert await site.late.bring_up("late")
    assert [update.directory or update.push.token for update in late.updates] == ["dir1", "relay"]
    assert (late.weight_version, site.placeable()) == (1, ["holder", "late"])


@virtual
async def test_where_nobody_can_give_them_on_the_record_says_what_was_tried(clock):
    site = FleetSite(clock, "holder")
    await site.update(1)
    site.register("late", version=0).unreadable = {"dir1"}
    with pytest.raises(CheckpointUnreadable):
        await site.late.bring_up("late")
    error = site.fleet.get("late").error
    assert error.startswith("version 1 cannot be read, and no replica can send it (")
    assert "no such directory: dir1; holder: its engine cannot send its weights" in error
