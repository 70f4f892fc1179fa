"""The order of an update's steps and the state after every failure. Hangs and deadlines run in virtual time."""

import asyncio
from dataclasses import replace

import pytest

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.engine.interface import StagingDevice, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineLost,
    InvalidRequest,
    NoHealthyReplica,
    WeightUpdateFailed,
)
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, ReplicaState
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.fleet.weight_update import UpdateState
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import HashPolicy, LatencyModel
from agentloop.types import FinishReason, GenerateRequest, KVPolicy, SamplingParams, VersionDemand
from tests.support.engine.engines import INFO, SLEEPER
from tests.support.engine.policies import continuation
from tests.support.fleet.pushes import Sender, Wire
from tests.support.fleet.weights import CONFIG, KEEP, FleetSite, virtual

SLOW = {"stage": 5.0, "pause": 2.0, "commit": 3.0, "resume": 1.0}


def update_state(site):
    progress = site.sync.progress
    return UpdateState.IDLE if progress is None else progress.state


@virtual
async def test_all_stage_then_each_switches_by_itself(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["a"].seconds = SLOW
    report = await site.update(1, KVPolicy.RECOMPUTE)
    for engine in site.engines.values():
        assert engine.calls == ["stage", "pause:keep:recompute", "commit:resumes", "resume"]
        assert engine.weight_version == 1
        assert not engine.is_paused
    assert dict(site.engines["b"].called_at) == {"stage": 0.0, "pause": 5.0, "commit": 5.0, "resume": 5.0}
    assert dict(site.engines["a"].called_at) == {"stage": 0.0, "pause": 5.0, "commit": 7.0, "resume": 10.0}
    stalls = {one.replica_id: one.stall_ms for one in report.replicas}
    assert stalls == pytest.approx({"a": 6000.0, "b": 0.0})
    assert report.total_ms == pytest.approx(11_000.0)
    assert [one.stage_ms for one in report.replicas] == pytest.approx([5000.0, 0.0])
    assert (report.version, report.previous_version, report.kv_policy) == (1, 0, KVPolicy.RECOMPUTE)
    assert site.placeable() == ["a", "b"]
    assert site.fleet.weight_version == 1


@virtual
async def test_where_commits_transfer_all_pause_then_all_commit_then_all_go_on(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["a"].seconds = SLOW
    for engine in site.engines.values():
        engine.staging_device = StagingDevice.NOWHERE
    report = await site.update(1)
    at = dict(site.engines["b"].called_at)
    assert at == {"stage": 0.0, "pause": 5.0, "commit": 7.0, "resume": 10.0}  # each step waited for the slow one
    assert {one.replica_id: one.stall_ms for one in report.replicas} == pytest.approx({"a": 6000.0, "b": 5000.0})
    assert site.placeable() == ["a", "b"]


@virtual
async def test_replicas_take_traffic_while_they_stage_and_none_while_they_switch(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"stage": 5.0, "commit": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    assert (update_state(site), site.placeable()) == (UpdateState.STAGING, ["a"])
    await clock.sleep(6.0)
    assert (update_state(site), site.placeable()) == (UpdateState.SWITCHING, [])
    await updating
    assert (update_state(site), site.placeable()) == (UpdateState.IDLE, ["a"])


@virtual
async def test_while_replicas_switch_only_those_at_the_new_version_take_traffic(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["b"].seconds = {"commit": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    assert (site.fleet.weight_version, site.placeable()) == (1, ["a"])
    assert [one.weight_version for one in site.fleet.replicas] == [1, None]
    await updating
    assert site.placeable() == ["a", "b"]


@pytest.mark.parametrize("verb", ["stage", "pause", "commit", "resume"])
@pytest.mark.parametrize("staging_device", [StagingDevice.DEVICE, StagingDevice.NOWHERE])
def test_one_that_hangs_costs_the_others_seconds_at_most(verb, staging_device):
    @virtual
    async def test(clock):
        names = [f"r{number}" for number in range(8)]
        site = FleetSite(clock, *names)
        for engine in site.engines.values():
            engine.seconds, engine.staging_device = {"stage": 1.0, "commit": 0.1}, staging_device
        site.engines["r3"].hangs = {verb}
        site.sync.steps.config = replace(
            CONFIG, pause_timeout_s=60.0, commit_timeout_s=300.0, straggler_grace_s=4.0
        )
        report = await site.update(1)
        stalls = [one.stall_ms for one in report.replicas if one.replica_id != "r3"]
        waits = staging_device is StagingDevice.NOWHERE and verb in ("pause", "commit")
        assert max(stalls) == pytest.approx(4300.0 if verb == "commit" and waits else 4100.0 if waits else 100.0)
        assert report.total_ms < 8000.0
        assert sorted(site.placeable()) == sorted(set(names) - {"r3"})
        (hung,) = [one.error for one in report.replicas if one.replica_id == "r3"]
        is_one_call = verb == "resume" and staging_device is StagingDevice.DEVICE
        assert hung == f"{'commit' if is_one_call else verb}: no answer within 4 s of the other replicas"
        site.engines["r3"].hangs = set()
        assert await site.late.bring_up("r3")
        assert sorted(site.placeable()) == names

    test()


@virtual
async def test_dummy_weights_become_ready_with_the_first_update(clock):
    site = FleetSite(clock, "a", version=None)
    assert site.placeable() == []
    report = await site.update(0)
    assert report.previous_version is None
    assert site.placeable() == ["a"]


@virtual
async def test_versions_grow(clock):
    site = FleetSite(clock, "a", version=3)
    with pytest.raises(Conflict):
        await site.update(3)
    with pytest.raises(InvalidRequest):
        await site.update(2)
    with pytest.raises(InvalidRequest):
        await FleetSite(clock, "b", version=None).update(-1)
    assert site.engines["a"].calls == []
    assert (await site.update(7)).previous_version == 3


@virtual
async def test_a_second_update_during_the_first_conflicts(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"stage": 5.0}
    first = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    with pytest.raises(Conflict):
        await site.update(2)
    assert (await first).version == 1
    assert (await site.update(2)).version == 2


@virtual
async def test_nobody_to_update(clock):
    with pytest.raises(NoHealthyReplica):
        await FleetSite(clock).update(1)


@virtual
async def test_a_checkpoint_that_nobody_can_read_changes_nothing(clock):
    site = FleetSite(clock, "a", "b")
    for engine in site.engines.values():
        engine.fail("stage")
    with pytest.raises(CheckpointUnreadable, match=r"a: .*; b: "):
        await site.update(1)
    assert site.placeable() == ["a", "b"]
    assert site.fleet.weight_version == 0
    assert all(engine.calls == ["stage"] for engine in site.engines.values())
    for engine in site.engines.values():
        engine.failures.clear()
    assert (await site.update(1)).version == 1


@virtual
async def test_stages_that_fail_for_other_reasons_change_nothing_either(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["a"].hangs = {"stage"}
    site.engines["b"].fail("stage")
    with pytest.raises(WeightUpdateFailed, match="no answer within 100 s"):
        await site.update(1)
    assert site.state("a") is ReplicaState.QUARANTINED  # its silence delayed the other replica
    assert site.placeable() == ["b"]
    assert clock.now() == pytest.approx(100.0)


@pytest.mark.parametrize("verb", ["stage", "pause", "commit", "resume"])
@pytest.mark.parametrize("is_hung", [False, True])
def test_one_replica_fails_and_the_others_go_on(verb, is_hung):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "good", "bad")
        for engine in site.engines.values():
            engine.staging_device = StagingDevice.NOWHERE  # commit and resume are two calls
        bad = site.engines["bad"]
        if is_hung:
            bad.hangs = {verb}
        else:
            bad.fail(verb)
        report = await site.update(1)
        errors = {one.replica_id: one.error for one in report.replicas}
        assert errors["good"] is None
        assert errors["bad"].startswith(f"{verb}: ")
        assert ("no answer" in errors["bad"]) == is_hung
        # Weights are unknown only after a failed commit. A failed stage may also be caused by another replica.
        is_quarantined = verb in ("stage", "commit")
        assert site.state("bad") is (ReplicaState.QUARANTINED if is_quarantined else ReplicaState.JOINING)
        assert site.placeable() == ["good"]
        assert ("resume" in bad.calls) == (verb == "resume")
        versions = {"stage": 0, "pause": 0, "commit": None, "resume": 1}
        assert site.fleet.get("bad").weight_version == versions[verb]
        if verb in ("pause", "commit"):
            assert "resume" not in bad.calls  # never resumed on unknown weights
        # It rejoins through a commit of the fleet's version.
        bad.failures, bad.hangs, bad.calls = {}, set(), []
        assert await site.late.bring_up("bad")
        assert bad.calls == [*([] if verb == "resume" else ["stage", "pause:keep:keep", "commit"]), "resume"]
        assert site.placeable() == ["good", "bad"]

    test()


@pytest.mark.parametrize("verb", ["pause", "commit"])
def test_all_replicas_fail(verb):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", "b")
        for engine in site.engines.values():
            engine.fail(verb)
        with pytest.raises(WeightUpdateFailed, match=rf"a: {verb}: .*; b: {verb}: "):
            await site.update(1)
        assert site.placeable() == []
        assert update_state(site) == UpdateState.IDLE
        assert site.fleet.weight_version == 0
        for engine in site.engines.values():
            engine.failures.clear()
        await site.update(2)  # they take part in the next update
        assert site.placeable() == ["a", "b"]

    test()


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_replica_whose_commit_has_lost_its_answer_is_asked_once_more(num_lost):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a")
        engine = site.engines["a"]
        engine.fail("resume", times=num_lost)  # in the commit call
        if num_lost > 1:  # the contents of the lost replica are unknown
            with pytest.raises(WeightUpdateFailed, match="a: commit: "):
                await site.update(1)
            assert site.state("a") is ReplicaState.QUARANTINED
            assert site.fleet.get("a").weight_version is None
            return
        report = await site.update(1)
        assert [one.error for one in report.replicas] == [None]
        pause, resume = "pause:keep:keep", "resume"
        assert engine.calls == ["stage", pause, "commit:resumes", resume, pause, resume]
        assert (site.fleet.weight_version, site.placeable()) == (1, ["a"])

    test()


@virtual
async def test_a_replica_that_may_not_have_committed_is_not_resumed(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["a"].fail("commit")
    site.engines["a"].failures["commit"] = EngineLost("connection refused")
    report = await site.update(1)
    assert [one.error for one in report.replicas] == ["commit: connection refused", None]
    assert site.state("a") is ReplicaState.QUARANTINED
    assert (site.engines["a"].is_paused, site.placeable()) == (True, ["b"])


@virtual
async def test_the_first_commit_decides_even_if_nobody_goes_on_at_once(clock):
    site = FleetSite(clock, "a", "b")
    for engine in site.engines.values():
        engine.staging_device = StagingDevice.NOWHERE
        engine.fail("resume", times=1)
    report = await site.update(1)
    assert [one.error.startswith("resume: ") for one in report.replicas] == [True, True]
    assert (site.fleet.weight_version, site.placeable()) == (1, [])
    assert await site.late.bring_up("a")
    assert await site.late.bring_up("b")
    assert site.placeable() == ["a", "b"]


@virtual
async def test_who_failed_in_the_pause_of_a_failed_update_only_has_to_be_resumed(clock):
    site = FleetSite(clock, "a", "b")
    await site.push(1)  # no process could send these weights again
    for engine in site.engines.values():
        engine.hangs, engine.calls = {"pause"}, []
    with pytest.raises(WeightUpdateFailed, match="a: pause: no answer within 10 s; b: pause: "):
        await site.push(2, token="next")
    assert site.fleet.weight_version == 1
    for name, engine in site.engines.items():
        assert await site.late.bring_up(name)
        assert engine.calls == ["stage", "pause:keep:keep", "resume"]
    assert site.placeable() == ["a", "b"]


@pytest.mark.parametrize("culprit", ["lost", "silent"])
def test_where_all_fail_for_the_sake_of_one_that_one_is_quarantined(culprit):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", "b", "c")
        for name in "abc":
            site.engines[name].fail("stage")
        if culprit == "lost":
            site.engines["c"].failures["stage"] = EngineLost("the process died")
        else:
            site.engines["c"].hangs = {"stage"}
        with pytest.raises(WeightUpdateFailed, match="served weights are unchanged"):
            await site.push(1)
        assert site.placeable() == ["a", "b"]
        assert site.state("c") is ReplicaState.QUARANTINED
        for name in "ab":
            site.engines[name].failures.clear()
        await site.push(1, token="again")
        told = [site.engines[name].updates[-1].push for name in "abc"]
        assert {(push.num_receivers, push.num_optional) for push in told} == {(2, 1)}
        # the update does not wait for the optional replica
        assert [push.is_optional for push in told] == [False, False, True]

    test()


@virtual
async def test_a_replica_that_leaves_during_an_update_does_not_hold_it_up(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["b"].seconds = {"stage": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    site.fleet.deregister("b")
    report = await updating
    assert [one.error is None for one in report.replicas] == [True, False]
    assert site.placeable() == ["a"]


@virtual
async def test_an_update_cut_short_leaves_no_replica_in_between(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"commit": 15.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert site.state("a") is ReplicaState.QUARANTINED
    assert update_state(site) == UpdateState.IDLE
    site.engines["a"].seconds = {}
    await site.update(1)
    assert site.placeable() == ["a"]


@pytest.mark.parametrize("staging_device", [StagingDevice.DEVICE, StagingDevice.NOWHERE])
def test_the_report_says_how_the_weights_travelled(staging_device):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", "b")
        for engine in site.engines.values():
            engine.staging_device = staging_device
        site.engines["b"].fail("commit")
        report = await site.push(1)
        good, bad = report.replicas
        assert (good.staging_device, good.transport, good.num_bytes) == (staging_device, "nccl", 1000)
        assert good.transfer_ms == report.transfer_ms == (40.0 if staging_device is StagingDevice.NOWHERE else 30.0)
        assert (good.swap_ms, good.verify_ms, good.num_verified) == (5.0, 2.0, 7)
        assert (bad.staging_device, bad.num_verified) == (staging_device, 0)

    test()


@virtual
async def test_a_push_is_told_how_many_will_connect(clock):
    site = FleetSite(clock, "a", "b", info=SLEEPER)
    site.info = INFO
    site.register("c", version=0)
    await site.push(1)
    receivers = [update.push.num_receivers for engine in site.engines.values() for update in engine.updates]
    assert receivers == [2 + 2 + 1] * 3
    await site.update(2)
    assert site.engines["a"].updates[-1].push is None


@virtual
async def test_in_one_phase_all_receive_together_and_a_dead_trainer_fails_them_all(clock):
    site = FleetSite(clock, "a", "b")
    for engine in site.engines.values():
        engine.staging_device = StagingDevice.NOWHERE
        engine.seconds = {"commit": 3.0}
        engine.fail("commit", times=1)
    with pytest.raises(WeightUpdateFailed, match=r"a: commit: .*; b: commit: "):
        await site.push(1)
    assert {dict(engine.called_at)["commit"] for engine in site.engines.values()} == {0.0}
    assert site.placeable() == []
    await site.push(1)  # the fleet never served it
    assert site.placeable() == ["a", "b"]


@virtual
async def test_a_source_that_no_engine_knows_is_the_callers_mistake(clock):
    site = FleetSite(clock, "a", "b")
    for engine in site.engines.values():
        engine.fail("stage")
        engine.failures["stage"] = InvalidRequest("not from there")
    with pytest.raises(InvalidRequest, match=r"a: .*not from there; b: ") as raised:
        await site.push(1)
    assert raised.value.param == "push"
    assert type(raised.value) is InvalidRequest
    assert site.placeable() == ["a", "b"]


@virtual
async def test_a_version_that_nobody_holds_any_more_can_be_pushed_again(clock):
    site = FleetSite(clock, "a")
    await site.push(1)
    with pytest.raises(Conflict, match="version 1"):
        await site.push(1, token="another")
    site.fleet.deregister("a")
    site.register("a", version=0)
    await site.push(1, token="another")
    assert site.placeable() == ["a"]


@virtual
async def test_a_repeat_gets_the_report_and_another_source_of_the_version_a_conflict(clock):
    site = FleetSite(clock, "a")
    first = await site.push(1)
    assert await site.push(1) is first
    assert site.engines["a"].calls.count("stage") == 1
    with pytest.raises(Conflict, match="version 1"):
        await site.update(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_repeat_joins_the_update_under_way(fails):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a")
        site.engines["a"].seconds = {"stage": 5.0}
        if fails:
            site.engines["a"].fail("stage")
        first = asyncio.create_task(site.push(1))
        await clock.sleep(1.0)
        with pytest.raises(Conflict, match="is in progress"):
            await site.push(1, token="another")
        second = await asyncio.gather(site.push(1), return_exceptions=True)
        outcome = await asyncio.gather(first, return_exceptions=True)
        assert outcome == second
        assert isinstance(outcome[0], CheckpointUnreadable) == fails
        assert site.engines["a"].calls.count("stage") == 1

    test()


@virtual
async def test_forced_the_fleet_goes_back_and_no_kv_is_kept(clock):
    site = FleetSite(clock, "a", "b", version=0)
    await site.update(950)
    for name in "ab":
        site.calls(name)
    with pytest.raises(InvalidRequest, match="push a higher one or use `force`"):
        await site.update(900)
    report = await site.update(900, KVPolicy.KEEP, force=True)
    assert (report.version, report.previous_version, report.kv_policy) == (900, 950, KVPolicy.RECOMPUTE)
    assert site.calls("a") == ["stage", "pause:keep:recompute", "commit:resumes", "resume"]
    assert (site.fleet.weight_version, site.placeable()) == (900, ["a", "b"])
    late = site.register("late", version=950)  # it missed the rollback
    assert await site.late.bring_up("late")
    assert late.calls == ["stage", "pause:keep:recompute", "commit", "resume"]
    assert (await site.update(901)).kv_policy is KEEP


@virtual
async def test_the_latest_reports_are_kept(clock):
    site = FleetSite(clock, "a")
    for version in range(1, 6):
        await site.update(version)
    assert [report.version for report in site.sync.reports] == [3, 4, 5]


def test_with_simulated_engines(tmp_path):
    """A generation in flight continues through the swap, and a replica with a failed commit catches up."""

    @virtual
    async def test(clock):
        (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        latency = LatencyModel(prefill_s=0.01, decode_s=0.01)
        engines = {name: SimulatedEngine(SimulatedSpec(latency=latency), clock=clock) for name in "ab"}
        fleet = Fleet()
        sync = ReplicaSync(fleet, lambda url: engines[url[-1]], clock, CONFIG)
        late = LateReplicas(sync, fleet, clock)
        for name, engine in engines.items():
            await engine.start()
            fleet.register(ReplicaRegistration(name, f"sim://{name}", engine.info, 0), 0.0)
            assert await late.bring_up(name)
        request = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=200, min_tokens=200))
        generating = asyncio.create_task(engines["a"].generate(request))
        await clock.sleep(0.5)
        engines["b"].faults.num_failed_commits = 1
        report = await sync.update_weights(WeightUpdate(1, str(tmp_path)), KEEP)
        assert [one.error is None for one in report.replicas] == [True, False]
        assert not engines["b"].is_usable
        assert await late.bring_up("b")
        assert [engine.weight_version for engine in engines.values()] == [1, 1]
        assert [replica.replica_id for replica in fleet.placeable()] == ["a", "b"]
        assert [span.version for span in (await generating).weight_versions] == [0, 1]
        for engine in engines.values():
            await engine.close()

    test()


def test_a_replica_with_calls_for_the_version_before_switches_last_and_pauses_no_longer(tmp_path):
    @virtual
    async def test(clock):
        (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        latency = LatencyModel(prefill_s=0.01, decode_s=0.01)
        engines = {name: SimulatedEngine(SimulatedSpec(latency=latency), clock=clock) for name in "abc"}
        fleet = Fleet()
        sync = ReplicaSync(fleet, lambda url: engines[url[-1]], clock, replace(CONFIG, exact_grace_s=3.0))
        late = LateReplicas(sync, fleet, clock)
        for name, engine in engines.items():
            await engine.start()
            fleet.register(ReplicaRegistration(name, f"sim://{name}", engine.info, 0), 0.0)
            assert await late.bring_up(name)

        def sampling(num_tokens, **demand):
            demanded = VersionDemand(**demand) if demand else None
            return SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, weight_version=demanded)

        asked = {
            "a": sampling(100, exact_version=0),  # ends within the grace
            "b": sampling(1000, exact_version=0),  # does not
            "c": sampling(1000, min_version=0),  # continues through the update
        }
        generating = {
            name: asyncio.create_task(engines[name].generate(GenerateRequest(name, (1, 2, 3), one)))
            for name, one in asked.items()
        }
        on_b = asyncio.create_task(engines["b"].generate(GenerateRequest("b2", (1, 2, 3), sampling(1000))))
        await clock.sleep(0.5)
        report = await sync.update_weights(WeightUpdate(1, str(tmp_path)), KEEP)
        paused_at_s = {one.replica_id: one.paused_at_ms / 1000 for one in report.replicas}
        assert paused_at_s["c"] < paused_at_s["a"] < paused_at_s["b"]
        assert paused_at_s == pytest.approx({"a": 0.52, "b": 3.0, "c": 0.2}, abs=0.25)
        stalls = {one.stall_ms for one in report.replicas}
        assert max(stalls) - min(stalls) < 50
        ended = {name: await task for name, task in generating.items()}
        assert [span.version for span in ended["a"].weight_versions] == [0]
        assert (ended["b"].finish_reason, [span.version for span in ended["b"].weight_versions]) == (
            FinishReason.REPLACED,
            [0],
        )
        assert [span.version for span in ended["c"].weight_versions] == [0, 1]
        assert [span.version for span in (await on_b).weight_versions] == [0, 1]
        for engine in engines.values():
            await engine.close()

    test()


@pytest.mark.parametrize("is_one_phase", [False, True])
def test_a_push_to_simulated_engines_whose_trainer_dies(is_one_phase):
    """Partially received weights are never served; a late replica receives them from a replica that has them."""

    @virtual
    async def test(clock):
        wire = Wire(clock, relay_s=1.0)
        engines = {}

        def register(name, version):
            receiver = wire.receiver()
            engine = SimulatedEngine(SimulatedSpec(initial_version=version), clock=clock, weight_source=receiver)
            engines[name] = receiver.engine = engine
            fleet.register(ReplicaRegistration(name, f"sim://{name}", engine.info, version), clock.now())
            return engine.start()

        fleet = Fleet()
        sync = ReplicaSync(fleet, lambda url: engines[url[-1]], clock, CONFIG)
        late = LateReplicas(sync, fleet, clock)
        for name in "ab":
            await register(name, 0)
            assert await late.bring_up(name)
        dying = wire.listen(Sender(1, transfer_s=5.0, is_one_phase=is_one_phase, dies_at=2.0))
        with pytest.raises(WeightUpdateFailed if is_one_phase else CheckpointUnreadable):
            await sync.update_weights(WeightUpdate(1, push=dying), KEEP)
        assert len(fleet.placeable()) == (0 if is_one_phase else 2)
        alive = wire.listen(Sender(1, transfer_s=5.0, is_one_phase=is_one_phase))
        report = await sync.update_weights(WeightUpdate(1, push=alive), KEEP)
        assert report.transfer_ms == pytest.approx(5000.0)
        assert report.stall_ms == pytest.approx(5000.0 if is_one_phase else 0.0)
        assert [replica.replica_id for replica in fleet.placeable()] == ["a", "b"]
        await register("c", None)
        assert await late.bring_up("c")
        assert engines["c"].weight_version == 1
        assert (wire.problems, wire.num_relayed) == ([], 1)
        for engine in engines.values():
            await engine.close()

    test()


def test_what_is_sampled_after_the_way_back_is_of_the_older_weights_alone(tmp_path):
    """Applies to running and later requests, for any KV policy: tokens match their span's version and fresh KV."""

    @virtual
    async def test(clock):
        for name in ("900", "950", "again"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        policy = HashPolicy(1000)
        spec = SimulatedSpec(vocab_size=1000, latency=LatencyModel(prefill_s=0.01, decode_s=0.01))
        engine = SimulatedEngine(spec, clock=clock, policy=policy)
        await engine.start()
        fleet = Fleet()
        sync = ReplicaSync(fleet, lambda url: engine, clock, CONFIG)
        fleet.register(ReplicaRegistration("a", "sim://a", engine.info, 0), 0.0)
        assert await LateReplicas(sync, fleet, clock).bring_up("a")
        prompt = tuple(range(1, 40))

        async def ask(name, num_tokens, kv_version=None):
            sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)
            return await engine.generate(GenerateRequest(name, prompt, sampling, kv_version=kv_version))

        await sync.update_weights(WeightUpdate(900, str(tmp_path / "900")), KEEP)
        await ask("warm 900", 8)
        await sync.update_weights(WeightUpdate(950, str(tmp_path / "950")), KEEP)
        await ask("warm 950", 8)
        in_flight = asyncio.create_task(ask("in flight", 100, kv_version=950))
        await clock.sleep(0.5)
        await sync.update_weights(WeightUpdate(900, str(tmp_path / "again")), KEEP, force=True)
        straddling = await in_flight
        assert [span.version for span in straddling.weight_versions] == [950, 900]
        for kv_version in (None, 900, 950):
            later = await ask(f"later {kv_version}", 8, kv_version)
            assert [span.version for span in later.weight_versions] == [900]
            assert later.token_ids == continuation(policy, prompt, 900, 8)
        span = straddling.weight_versions[1]
        context = (*prompt, *straddling.token_ids[: span.start])
        assert straddling.token_ids[span.start :] == continuation(policy, context, 900, span.end - span.start)
        await engine.close()

    test()
