"""Pause, sleep and wake-up of the whole fleet: replicas that follow or fail, and the duration of each order."""

import asyncio

import pytest

from agentloop.engine.interface import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineLost,
    InvalidRequest,
    ServiceUnavailable,
    WeightUpdateFailed,
)
from agentloop.fleet.desired_state import TURN_REASON
from agentloop.fleet.registry import ReplicaState
from agentloop.types import PauseMode
from tests.support.engine.engines import INFO, SLEEPER, FakeEngine
from tests.support.fleet.weights import KEEP, FleetSite, virtual

WEIGHTS = frozenset({MemoryTag.WEIGHTS})
KV_CACHE = frozenset({MemoryTag.KV_CACHE})
INITIAL = (WeightUpdate(0, "/models/base"), KEEP)


def sleepers(clock, *replica_ids, **fields):
    return FleetSite(clock, *replica_ids, info=SLEEPER, **fields)


def states(site):
    return {replica.replica_id: replica.state.value for replica in site.fleet.replicas}


# Pause and resume


@virtual
async def test_operator_pause_and_resume_are_idempotent(clock):
    site = FleetSite(clock, "a", "b")
    for _ in range(2):
        await site.sync.pause(PauseMode.WAIT)
        assert site.sync.desired.orders.is_paused
        assert all(engine.is_paused for engine in site.engines.values())
    for _ in range(2):
        await site.sync.resume()
        assert not site.sync.desired.orders.is_paused
        assert not any(engine.is_paused for engine in site.engines.values())


@virtual
async def test_an_operator_pause_during_an_update_comes_after_it(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"commit": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    await site.sync.pause(PauseMode.KEEP)
    await updating
    assert site.engines["a"].is_paused


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_who_does_not_follow_an_order_is_named_and_gets_it_again_as_it_joins_anew(verb):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", "b")
        if verb == "resume":
            await site.sync.pause(PauseMode.KEEP)
        site.engines["b"].fail(verb)
        with pytest.raises(EngineLost, match=f"b: {verb}"):
            await (site.sync.pause(PauseMode.KEEP) if verb == "pause" else site.sync.resume())
        is_paused = verb == "pause"
        assert site.engines["a"].is_paused == is_paused
        assert site.sync.desired.orders.is_paused == is_paused
        assert states(site) == {"a": "ready", "b": "joining"}
        assert "injected" in site.fleet.get("b").error
        site.engines["b"].failures.clear()
        assert await site.late.bring_up("b")
        assert site.engines["b"].is_paused == is_paused
        assert site.fleet.get("b").error is None
        assert "stage" not in site.engines["b"].calls  # its weights were always known

    test()


@virtual
async def test_who_does_not_follow_an_order_while_it_is_brought_up_is_left_to_that(clock):
    site = FleetSite(clock, "a", "b")
    await site.update(1)
    engine = site.engines["b"]
    engine.seconds = {"pause": 0.5, "commit": 4.0}
    engine.fail("pause", times=1)
    pausing = asyncio.create_task(site.sync.pause(PauseMode.KEEP))
    await clock.sleep(0.1)
    site.fleet.quarantine(site.fleet.get("b"), "an update left it behind")
    bringing = asyncio.create_task(site.late.bring_up("b"))
    with pytest.raises(EngineLost, match="b: pause"):
        await pausing
    await clock.sleep(1.0)
    assert site.fleet.get("b").weight_version is None  # during its commit
    assert site.state("b") is ReplicaState.UPDATING
    assert await bringing
    assert engine.is_paused


# Sleep level 1


@virtual
async def test_an_update_waits_for_the_turn_of_its_model(clock):
    site = sleepers(clock, "a")
    await site.sync.sleep(1, TURN_REASON)
    updates = [asyncio.create_task(site.update(1)) for _ in range(2)]
    await clock.sleep(5.0)
    assert (states(site), site.sync.num_awaiting_turn) == ({"a": "asleep"}, 2)
    assert site.calls("a") == ["sleep:1"]
    await site.sync.wake(ALL_MEMORY)
    first, second = [await update for update in updates]
    assert first is second
    assert (first.version, site.sync.num_awaiting_turn) == (1, 0)
    await site.sync.sleep(1, TURN_REASON)
    with pytest.raises(ServiceUnavailable, match="another model used the accelerators for 120 s"):
        await site.update(2)
    assert (states(site), site.fleet.weight_version) == ({"a": "asleep"}, 1)


@virtual
async def test_sleep_and_wake(clock):
    site = sleepers(clock, "a", "b")
    for _ in range(2):
        await site.sync.sleep(1)
        assert states(site) == {"a": "asleep", "b": "asleep"}
        assert site.sync.desired.orders.asleep == ALL_MEMORY
        assert site.placeable() == []
    assert site.calls("a") == ["sleep:1", "sleep:1"]
    for _ in range(2):
        await site.sync.wake(ALL_MEMORY)
        assert site.placeable() == ["a", "b"]
        assert site.sync.desired.orders.asleep == frozenset()
    assert site.calls("a") == ["wake:kv_cache+weights", "resume"]


@virtual
async def test_a_wake_in_two_goes_goes_on_after_the_second(clock):
    site = sleepers(clock, "a")
    await site.sync.sleep(1)
    await site.sync.wake(WEIGHTS)
    assert states(site) == {"a": "asleep"}
    assert site.sync.desired.orders.asleep == KV_CACHE
    assert site.engines["a"].is_paused
    await site.sync.wake(KV_CACHE)
    assert site.placeable() == ["a"]
    assert site.calls("a") == ["sleep:1", "wake:weights", "wake:kv_cache", "resume"]


@virtual
async def test_a_fleet_that_the_operator_has_paused_wakes_paused(clock):
    site = sleepers(clock, "a")
    await site.sync.sleep(1)
    await site.sync.pause(PauseMode.ABORT)
    await site.sync.wake(ALL_MEMORY)
    assert site.calls("a") == ["sleep:1", "wake:kv_cache+weights", "pause:abort:keep"]
    assert site.placeable() == ["a"]
    await site.sync.resume()
    assert not site.engines["a"].is_paused


@virtual
async def test_if_one_cannot_sleep_nobody_is_touched(clock):
    site = sleepers(clock, "a")
    site.info = INFO
    site.register("insomniac")
    with pytest.raises(InvalidRequest, match="insomniac"):
        await site.sync.sleep(1)
    with pytest.raises(InvalidRequest, match="sleep level 3"):
        await site.sync.sleep(3)
    assert site.calls("a") == []
    assert site.placeable() == ["a"]
    assert site.sync.desired.orders.asleep == frozenset()


@pytest.mark.parametrize("is_hung", [False, True])
def test_who_does_not_fall_asleep_is_named_and_told_again(is_hung):
    @virtual
    async def test(clock):
        site = sleepers(clock, "a", "b")
        bad = site.engines["b"]
        if is_hung:
            bad.hangs = {"sleep"}
        else:
            bad.fail("sleep")
        with pytest.raises(EngineLost, match="b: sleep"):
            await site.sync.sleep(1)
        assert states(site) == {"a": "asleep", "b": "joining"}
        bad.failures, bad.hangs = {}, set()
        assert not await site.late.bring_up("b")
        assert states(site) == {"a": "asleep", "b": "asleep"}
        await site.sync.wake(ALL_MEMORY)
        assert site.placeable() == ["a", "b"]

    test()


@pytest.mark.parametrize("verb", ["wake", "resume"])
def test_who_does_not_wake_is_named_and_told_again(verb):
    @virtual
    async def test(clock):
        site = sleepers(clock, "a", "b")
        await site.sync.sleep(1)
        site.engines["b"].fail(verb)
        with pytest.raises(EngineLost, match=f"b: {verb}"):
            await site.sync.wake(ALL_MEMORY)
        assert states(site) == {"a": "ready", "b": "joining"}
        site.engines["b"].failures.clear()
        assert await site.late.bring_up("b")
        assert site.placeable() == ["a", "b"]
        assert "stage" not in site.engines["b"].calls

    test()


@virtual
async def test_a_replica_that_joins_a_sleeping_fleet_sleeps_and_is_brought_up_when_it_wakes(clock):
    site = sleepers(clock, "a")
    await site.update(1)
    await site.sync.sleep(1)
    late = site.register("late", version=0)
    assert not await site.late.bring_up("late")
    assert site.calls("late") == ["sleep:1"]  # sleeping memory is not used for staging
    assert states(site) == {"a": "asleep", "late": "asleep"}
    await site.sync.wake(ALL_MEMORY)
    assert states(site) == {"a": "ready", "late": "joining"}
    assert late.is_paused  # a replica with old weights is not resumed
    assert await site.late.bring_up("late")
    assert (late.weight_version, late.is_paused) == (1, False)
    assert site.placeable() == ["a", "late"]


@virtual
async def test_a_sleep_waits_for_a_replica_that_is_being_brought_up(clock):
    site = sleepers(clock, "a")
    await site.update(1)
    late = site.register("late", version=0)
    late.seconds = {"stage": 5.0}
    bringing = asyncio.create_task(site.late.bring_up("late"))
    await clock.sleep(1.0)
    await site.sync.sleep(1)
    assert states(site) == {"a": "asleep", "late": "asleep"}
    assert (late.asleep, late.weight_version) == (ALL_MEMORY, 1)
    assert not await bringing


@virtual
async def test_a_sleep_reaches_a_replica_that_could_not_be_brought_up(clock):
    site = sleepers(clock, "a")
    await site.push(1)
    late = site.register("late", version=0)
    site.engines["a"].hangs = {"offer"}
    bringing = asyncio.create_task(site.late.bring_up("late"))
    await clock.sleep(1.0)
    await site.sync.sleep(1)
    assert states(site) == {"a": "asleep", "late": "asleep"}
    assert late.asleep == ALL_MEMORY
    assert not await bringing


@virtual
async def test_a_sleep_names_a_replica_that_is_still_being_brought_up_and_it_sleeps_afterwards(clock):
    site = sleepers(clock, "a", "b")
    await site.push(1)
    late = site.register("late", version=0)
    for peer in "ab":
        site.engines[peer].hangs = {"offer"}
    site.late.start()
    await clock.sleep(1.0)
    with pytest.raises(EngineLost, match="late"):
        await site.sync.sleep(1)
    assert states(site) == {"a": "asleep", "b": "asleep", "late": "joining"}
    await clock.sleep(10.0)
    assert late.asleep == frozenset()
    site.late.start()
    await clock.sleep(1.0)
    assert late.asleep == ALL_MEMORY


@virtual
async def test_a_replica_that_joins_a_half_woken_fleet_gives_back_as_much(clock):
    site = sleepers(clock, "a")
    await site.sync.sleep(1)
    await site.sync.wake(WEIGHTS)
    late = site.register("late")
    await site.late.bring_up("late")
    assert late.asleep == KV_CACHE
    await site.sync.wake(KV_CACHE)
    assert site.placeable() == ["a", "late"]


@virtual
async def test_dummy_weights_sleep_too_and_the_first_push_wakes_them(clock):
    site = sleepers(clock, "a", version=None)
    await site.sync.sleep(1)
    assert states(site) == {"a": "asleep"}
    await site.push(0)
    assert site.placeable() == ["a"]
    assert site.engines["a"].asleep == frozenset()


@virtual
async def test_dummy_weights_that_are_woken_wait_for_the_first_push_without_a_cache(clock):
    site = sleepers(clock, "a", version=None)
    await site.sync.sleep(1)
    await site.sync.wake(ALL_MEMORY)
    assert states(site) == {"a": "joining"}
    assert site.calls("a") == ["sleep:1", "wake:weights"]
    await site.push(0)
    assert site.placeable() == ["a"]
    assert site.engines["a"].asleep == frozenset()


@virtual
async def test_quarantined_replicas_give_their_memory_back_and_stay_in_quarantine(clock):
    site = sleepers(clock, "a", "b")
    site.engines["b"].fail("commit", times=1)
    await site.update(1)
    site.calls("b")
    await site.sync.sleep(1)
    assert site.engines["b"].asleep == ALL_MEMORY
    assert states(site) == {"a": "asleep", "b": "quarantined"}
    assert not await site.late.bring_up("b")
    assert site.calls("b") == ["sleep:1", "sleep:1"]
    await site.sync.wake(ALL_MEMORY)
    assert await site.late.bring_up("b")
    assert site.calls("b") == [
        *("wake:weights", "stage", "pause:keep:keep", "commit", "wake:kv_cache+weights", "resume")
    ]


@virtual
async def test_sleep_and_update_exclude_each_other(clock):
    site = sleepers(clock, "a")
    site.engines["a"].seconds = {"stage": 5.0, "sleep": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    sleeping = asyncio.create_task(site.sync.sleep(1))  # waits for the update
    await clock.sleep(5.0)
    assert (await updating).version == 1
    with pytest.raises(Conflict, match="a sleep"):
        await site.update(2)
    await sleeping
    assert site.calls("a") == ["stage", "pause:keep:keep", "commit:resumes", "resume", "sleep:1"]


@virtual
async def test_a_sleep_cut_short_leaves_no_replica_in_between(clock):
    site = sleepers(clock, "a")
    site.engines["a"].seconds = {"sleep": 5.0}
    sleeping = asyncio.create_task(site.sync.sleep(1))
    await clock.sleep(1.0)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert site.state("a") is ReplicaState.QUARANTINED
    site.engines["a"].seconds = {}
    await site.update(1)
    assert site.placeable() == ["a"]


# Sleep level 2


@virtual
async def test_discarded_weights_come_back_from_where_they_came(clock):
    site = sleepers(clock, "a", "b")
    await site.update(1)
    site.calls("a")
    await site.sync.sleep(2)
    assert site.engines["a"].weight_version is None
    await site.sync.wake(WEIGHTS)
    assert site.sync.desired.orders.asleep == KV_CACHE
    assert (site.engines["a"].weight_version, states(site)["a"]) == (1, "asleep")
    await site.sync.wake(KV_CACHE)
    assert site.calls("a") == [
        *("sleep:2", "wake:weights", "stage", "pause:keep:keep", "commit", "wake:weights"),
        *("wake:kv_cache", "resume"),
    ]
    assert site.placeable() == ["a", "b"]
    assert site.fleet.weight_version == 1
    assert [report.version for report in site.sync.reports] == [1]  # a sleep is not reported as an update


@virtual
async def test_the_cache_does_not_wake_before_discarded_weights(clock):
    site = sleepers(clock, "a", initial=INITIAL)
    await site.sync.sleep(2)
    with pytest.raises(Conflict, match="before or together with 'kv_cache'"):
        await site.sync.wake(KV_CACHE)
    assert site.sync.desired.orders.asleep == ALL_MEMORY
    await site.sync.wake(ALL_MEMORY)
    assert site.placeable() == ["a"]


@virtual
async def test_a_judges_weights_come_back_from_its_checkpoint(clock):
    site = sleepers(clock, "a", initial=INITIAL)
    await site.sync.sleep(2)
    await site.sync.wake(ALL_MEMORY)
    engine = site.engines["a"]
    assert engine.updates == [INITIAL[0]]
    assert site.calls("a") == [
        *("sleep:2", "wake:weights", "stage", "pause:keep:keep", "commit", "wake:kv_cache+weights", "resume")
    ]
    assert site.placeable() == ["a"]


@virtual
async def test_discarded_weights_that_were_pushed_need_a_push(clock):
    site = sleepers(clock, "a")
    await site.push(1)
    await site.sync.sleep(2)
    for tags in (WEIGHTS, ALL_MEMORY):
        with pytest.raises(Conflict, match="push new weights to wake the fleet"):
            await site.sync.wake(tags)
    assert site.sync.desired.orders.asleep == ALL_MEMORY
    site.calls("a")
    await site.push(2)
    assert site.calls("a") == [
        *("wake:weights", "stage", "pause:keep:keep", "commit", "wake:kv_cache+weights", "resume")
    ]
    assert site.placeable() == ["a"]
    assert site.sync.desired.orders.asleep == frozenset()


@virtual
async def test_a_deeper_sleep_discards_and_a_lighter_one_does_not_undo_it(clock):
    site = sleepers(clock, "a")
    await site.push(1)
    await site.sync.sleep(1)
    await site.sync.sleep(2)
    await site.sync.sleep(1)
    assert site.calls("a")[-3:] == ["sleep:1", "sleep:2", "sleep:2"]
    with pytest.raises(Conflict):
        await site.sync.wake(ALL_MEMORY)


@virtual
async def test_a_wake_whose_weights_cannot_be_read_can_be_tried_again(clock):
    site = sleepers(clock, "a", initial=INITIAL)
    await site.sync.sleep(2)
    site.engines["a"].fail("stage")
    with pytest.raises(CheckpointUnreadable):
        await site.sync.wake(ALL_MEMORY)
    assert (states(site), site.sync.desired.orders.asleep) == ({"a": "asleep"}, KV_CACHE)
    site.engines["a"].failures.clear()
    await site.sync.wake(ALL_MEMORY)
    assert site.placeable() == ["a"]


# Updates of a sleeping fleet


@virtual
async def test_an_update_wakes_the_weights_to_stage_and_the_cache_after_the_commit(clock):
    site = sleepers(clock, "a", "b")
    await site.sync.sleep(1)
    site.calls("a")
    report = await site.push(1)
    assert site.calls("a") == [
        *("wake:weights", "stage", "pause:keep:keep", "commit", "wake:kv_cache+weights", "resume")
    ]
    assert all(one.error is None for one in report.replicas)
    assert site.placeable() == ["a", "b"]


@virtual
async def test_an_update_that_nobody_can_stage_leaves_the_fleet_asleep(clock):
    site = sleepers(clock, "a")
    await site.sync.sleep(1)
    site.engines["a"].fail("stage")
    with pytest.raises(CheckpointUnreadable):
        await site.push(1)
    assert (states(site), site.sync.desired.orders.asleep) == ({"a": "asleep"}, KV_CACHE)
    await site.sync.wake(ALL_MEMORY)
    assert (site.placeable(), site.fleet.weight_version) == (["a"], 0)


@virtual
async def test_after_an_update_who_cannot_take_its_cache_back_only_has_to_be_woken(clock):
    site = sleepers(clock, "a", "b")
    await site.sync.sleep(1)
    bad = site.engines["b"]
    bad.fail("wake", after=1)  # the weights wake up, the cache does not
    report = await site.push(1)
    assert [one.error is None for one in report.replicas] == [True, False]
    assert states(site) == {"a": "ready", "b": "joining"}
    site.calls("b")
    bad.failures.clear()
    assert await site.late.bring_up("b")
    assert site.calls("b") == ["wake:kv_cache+weights", "resume"]
    assert site.placeable() == ["a", "b"]


@virtual
async def test_if_all_commits_fail_the_fleet_stays_asleep_and_the_next_push_brings_it_back(clock):
    site = sleepers(clock, "a")
    await site.sync.sleep(2)
    site.engines["a"].fail("commit", times=1)
    with pytest.raises(WeightUpdateFailed):
        await site.push(1)
    assert states(site) == {"a": "quarantined"}
    assert site.sync.desired.orders.asleep == KV_CACHE
    await site.push(1)
    assert site.placeable() == ["a"]
    assert site.sync.desired.orders.asleep == frozenset()


@virtual
async def test_a_replica_that_slept_through_the_wake_is_woken_before_it_stages(clock):
    site = sleepers(clock, "a")
    await site.update(1)
    engine = FakeEngine(clock, "fake://late", 0, SLEEPER)
    engine.asleep = ALL_MEMORY  # an earlier coordinator died after it put the replica to sleep
    site.engines["late"] = engine
    site.fleet.register(engine.registration(), clock.now())
    assert await site.late.bring_up("late")
    assert engine.calls[0] == "wake:weights"
    assert site.placeable() == ["a", "late"]
