"""The order of an update, and what every way to fail leaves behind. Hangs and deadlines run in virtual time."""

import asyncio

import pytest

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.engine import HeldIn, WeightUpdate
from agentloop.errors import CheckpointUnreadable, Conflict, InvalidRequest, NoHealthyReplica, WeightUpdateFailed
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, ReplicaState
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.fleet.weight_update import MOVES, UpdateState
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.types import GenerateRequest, KVPolicy, SamplingParams
from tests.support.engine.engines import INFO, SLEEPER
from tests.support.fleet.pushes import Sender, Wire
from tests.support.fleet.weights import CONFIG, KEEP, FleetSite, virtual


@virtual
async def test_stage_all_then_pause_all_then_commit_all_then_resume(clock):
    site = FleetSite(clock, "a", "b")
    slow = site.engines["a"]
    slow.seconds = {"stage": 5.0, "pause": 2.0, "commit": 3.0, "resume": 1.0}
    report = await site.update(1, KVPolicy.RECOMPUTE)
    for engine in site.engines.values():
        assert engine.calls == ["stage", "pause:keep:recompute", "commit", "resume"]
        assert engine.weight_version == 1
        assert not engine.is_paused
    at = dict(site.engines["b"].called_at)
    assert at == {"stage": 0.0, "pause": 5.0, "commit": 7.0, "resume": 10.0}  # each step waited for the slow one
    stalls = {one.replica_id: one.stall_ms for one in report.replicas}
    assert stalls == pytest.approx({"a": 6000.0, "b": 5000.0})
    assert report.stall_ms == pytest.approx(6000.0)
    assert report.total_ms == pytest.approx(11_000.0)
    assert [one.stage_ms for one in report.replicas] == pytest.approx([5000.0, 0.0])
    assert (report.version, report.previous_version, report.kv_policy) == (1, 0, KVPolicy.RECOMPUTE)
    assert site.placeable() == ["a", "b"]
    assert site.fleet.weight_version == 1


@virtual
async def test_replicas_take_traffic_while_they_stage_and_none_while_they_commit(clock):
    site = FleetSite(clock, "a")
    site.engines["a"].seconds = {"stage": 5.0, "commit": 5.0}
    updating = asyncio.create_task(site.update(1))
    await clock.sleep(1.0)
    assert (site.sync.update_state, site.placeable()) == (UpdateState.STAGING, ["a"])
    await clock.sleep(6.0)
    assert (site.sync.update_state, site.placeable()) == (UpdateState.COMMITTING, [])
    assert site.fleet.may_recover_soon()
    await updating
    assert (site.sync.update_state, site.placeable()) == (UpdateState.IDLE, ["a"])


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
    assert site.placeable() == ["a", "b"]
    assert clock.now() == pytest.approx(100.0)


@pytest.mark.parametrize("verb", ["stage", "pause", "commit", "resume"])
@pytest.mark.parametrize("is_hung", [False, True])
def test_one_replica_fails_and_is_quarantined(verb, is_hung):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "good", "bad")
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
        assert site.state("bad") is ReplicaState.QUARANTINED
        assert site.placeable() == ["good"]
        assert ("resume" in bad.calls) == (verb == "resume")
        versions = {"stage": 0, "pause": 0, "commit": None, "resume": 1}
        assert site.fleet.get("bad").weight_version == versions[verb]
        if verb in ("pause", "commit"):
            assert "resume" not in bad.calls  # never resumed on unknown weights
        # It comes back through a commit of the fleet's version only.
        bad.failures, bad.hangs, bad.calls = {}, set(), []
        assert await site.late.bring_up("bad")
        assert bad.calls == ["stage", "pause:keep:keep", "commit", "resume"]
        assert site.placeable() == ["good", "bad"]

    test()


@pytest.mark.parametrize("verb", ["pause", "commit", "resume"])
def test_all_replicas_fail(verb):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", "b")
        for engine in site.engines.values():
            engine.fail(verb)
        with pytest.raises(WeightUpdateFailed, match=rf"a: {verb}: .*; b: {verb}: "):
            await site.update(1)
        assert site.placeable() == []
        assert site.sync.update_state is UpdateState.IDLE
        assert site.fleet.weight_version == (1 if verb == "resume" else 0)
        for engine in site.engines.values():
            engine.failures.clear()
        await site.update(2)  # quarantined replicas take part in the next update
        assert site.placeable() == ["a", "b"]

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
    assert site.sync.update_state is UpdateState.IDLE
    site.engines["a"].seconds = {}
    await site.update(1)
    assert site.placeable() == ["a"]


@pytest.mark.parametrize("held_in", [HeldIn.DEVICE, HeldIn.NOWHERE])
def test_the_report_says_how_the_weights_travelled(held_in):
    @virtual
    async def test(clock):
        site = FleetSite(clock, "a", "b")
        for engine in site.engines.values():
            engine.held_in = held_in
        site.engines["b"].fail("commit")
        report = await site.push(1)
        good, bad = report.replicas
        assert (good.held_in, good.transport, good.num_bytes) == (held_in, "nccl", 1000)
        assert good.transfer_ms == report.transfer_ms == (40.0 if held_in is HeldIn.NOWHERE else 30.0)
        assert (good.swap_ms, good.verify_ms, good.num_verified) == (5.0, 2.0, 7)
        assert (bad.held_in, bad.num_verified) == (held_in, 0)

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
        engine.held_in = HeldIn.NOWHERE
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
        await site.push(1)
    site.fleet.deregister("a")
    site.register("a", version=0)
    await site.push(1)
    assert site.placeable() == ["a"]


@virtual
async def test_the_latest_reports_are_kept(clock):
    site = FleetSite(clock, "a")
    for version in range(1, 6):
        await site.update(version)
    assert [report.version for report in site.sync.reports] == [3, 4, 5]


def test_every_state_can_end():
    assert all(UpdateState.IDLE in MOVES[state] for state in UpdateState if state is not UpdateState.IDLE)


def test_with_simulated_engines(tmp_path):
    """A generation in flight goes on over the swap, and a failed commit is repaired by catching up."""

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


@pytest.mark.parametrize("is_one_phase", [False, True])
def test_a_push_to_simulated_engines_whose_trainer_dies(is_one_phase):
    """Nothing half-received is served; the one that joins late gets the weights from one that has them."""

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
