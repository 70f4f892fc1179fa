"""Broken weights are refused by the canary replica, and the fleet keeps its weights."""

import asyncio

import pytest

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.engine.interface import ALL_MEMORY, WeightUpdate
from agentloop.errors import EngineUnusable, WeightsRefused, WeightUpdateFailed
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, ReplicaState
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.types import GenerateRequest, KVPolicy, PauseMode, SamplingParams
from agentloop.values.sampled_tokens import SampledTokens
from tests.support.engine.engines import SLEEPER
from tests.support.fleet.pushes import Sender, Wire
from tests.support.fleet.weights import CONFIG, FleetSite, virtual

LOOK_S = 0.5
NOISE = 2


class NoisySite:
    """A fleet of simulated engines that treat one version as broken weights, each with a request in flight."""

    def __init__(self, clock, folder, *names):
        self.clock, self.folder = clock, folder
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        spec = SimulatedSpec(latency=LatencyModel(prefill_s=0.01, decode_s=0.01))
        self.wire = Wire(clock)
        self.engines = {
            name: SimulatedEngine(spec, clock=clock, weight_source=self.wire.receiver()) for name in names
        }
        for engine in self.engines.values():
            engine.faults.noise_versions, engine.faults.canary_delay_s = frozenset({NOISE}), LOOK_S
        self.fleet = Fleet()
        self.sync = ReplicaSync(self.fleet, lambda url: self.engines[url[-1]], clock, CONFIG)
        self.late = LateReplicas(self.sync, self.fleet, clock)
        self.records = {}  # the outputs of each replica's request

    async def start(self):
        for name, engine in self.engines.items():
            await engine.start()
            self.fleet.register(ReplicaRegistration(name, f"sim://{name}", engine.info, 0), 0.0)
            assert await self.late.bring_up(name)
        await self.update(1)
        return {name: asyncio.create_task(self.sample(name)) for name in self.engines}

    async def sample(self, name):
        record = self.records[name] = SampledTokens()
        sampling = SamplingParams(max_tokens=400, min_tokens=400)
        async for piece in self.engines[name].stream(GenerateRequest(f"of {name}", (1, 2, 3), sampling)):
            if not hasattr(piece, "finish_reason"):
                record.add(piece)

    async def update(self, version, **options):
        return await self.sync.update_weights(WeightUpdate(version, str(self.folder)), KVPolicy.KEEP, **options)

    async def push_in_one_phase(self, version):
        source = self.wire.listen(Sender(version, is_one_phase=True))
        return await self.sync.update_weights(WeightUpdate(version, push=source), KVPolicy.KEEP)

    def versions(self):
        return {name: {span.version for span in record.weight_versions} for name, record in self.records.items()}

    def placeable(self):
        return [replica.replica_id for replica in self.fleet.placeable()]

    async def close(self):
        for engine in self.engines.values():
            await engine.close()


def test_the_first_refuses_noise_and_the_fleet_stays_where_it_was(tmp_path):
    @virtual
    async def test(clock):
        site = NoisySite(clock, tmp_path, "a", "b", "c")
        sampling = await site.start()
        await clock.sleep(0.2)
        updating = asyncio.create_task(site.update(NOISE))
        await clock.sleep(LOOK_S / 2)
        assert (site.fleet.weight_version, site.placeable()) == (1, ["b", "c"])  # during the canary check
        assert [engine.weight_version for engine in site.engines.values()] == [NOISE, 1, 1]
        with pytest.raises(
            WeightsRefused,
            match=r"a: commit: injected fault: .* version 2 are broken; b: wait: the canary replica refused",
        ):
            await updating
        with pytest.raises(EngineUnusable):
            await sampling["a"]
        assert (site.fleet.weight_version, site.placeable()) == (1, ["b", "c"])
        assert site.fleet.get("a").state is ReplicaState.QUARANTINED
        assert "the weights of version 2 are broken" in site.fleet.get("a").error
        assert await site.late.bring_up("a")  # the previous weights are loaded
        assert site.placeable() == ["a", "b", "c"]
        await asyncio.gather(sampling["b"], sampling["c"])
        assert site.versions() == {"a": {1}, "b": {1}, "c": {1}}
        assert (await site.update(3)).version == 3
        assert site.placeable() == ["a", "b", "c"]
        await site.close()

    test()


def test_tokens_wait_for_the_look_and_the_others_for_the_first(tmp_path):
    @virtual
    async def test(clock):
        site = NoisySite(clock, tmp_path, "a", "b")
        sampling = await site.start()
        await clock.sleep(0.2)
        updating = asyncio.create_task(site.update(3))
        await clock.sleep(LOOK_S * 0.9)
        assert site.versions() == {"a": {1}, "b": {1}}
        assert [engine.weight_version for engine in site.engines.values()] == [3, 1]
        await clock.sleep(LOOK_S * 0.2)
        assert (site.fleet.weight_version, site.placeable()) == (3, ["a"])
        report = await updating
        assert [one.error for one in report.replicas] == [None, None]
        assert report.stall_ms == pytest.approx(0.0, abs=1.0)  # sampling continued
        assert [one.canary_ms for one in report.replicas] == pytest.approx([LOOK_S * 1e3] * 2)
        assert report.total_ms == pytest.approx(2 * LOOK_S * 1e3, abs=1.0)
        await asyncio.gather(*sampling.values())
        assert site.versions() == {"a": {1, 3}, "b": {1, 3}}
        await site.close()

    test()


def test_forced_noise_is_served_by_all_and_by_those_that_come_late(tmp_path):
    @virtual
    async def test(clock):
        site = NoisySite(clock, tmp_path, "a", "b")
        sampling = await site.start()
        await clock.sleep(0.2)
        with pytest.raises(WeightsRefused):
            await site.update(NOISE)
        await site.update(NOISE, force=True)
        assert (site.fleet.weight_version, site.placeable()) == (NOISE, ["a", "b"])
        late = site.engines["c"] = SimulatedEngine(SimulatedSpec(), clock=clock)
        late.faults.noise_versions = frozenset({NOISE})
        await late.start()
        site.fleet.register(ReplicaRegistration("c", "sim://c", late.info, 0), clock.now())
        assert await site.late.bring_up("c")
        await sampling["b"]
        assert site.versions()["b"] == {1, NOISE}
        await asyncio.gather(*sampling.values(), return_exceptions=True)
        await site.close()

    test()


def test_switched_together_each_replica_refuses_for_itself(tmp_path):
    @virtual
    async def test(clock):
        site = NoisySite(clock, tmp_path, "a", "b")
        sampling = await site.start()
        await clock.sleep(0.2)
        with pytest.raises(WeightsRefused, match=r"a: resume: .*; b: resume: "):
            await site.push_in_one_phase(NOISE)
        assert (site.fleet.weight_version, site.placeable()) == (1, [])
        await asyncio.gather(*sampling.values(), return_exceptions=True)
        assert site.versions() == {"a": {1}, "b": {1}}
        for name in "ab":
            assert await site.late.bring_up(name)
        assert site.placeable() == ["a", "b"]
        await site.close()

    test()


def test_a_paused_fleet_looks_when_it_is_resumed(tmp_path):
    @virtual
    async def test(clock):
        site = NoisySite(clock, tmp_path, "a", "b")
        sampling = await site.start()
        await clock.sleep(0.2)
        await site.sync.pause(PauseMode.KEEP)
        await site.update(NOISE)
        with pytest.raises(WeightsRefused, match=r"a: resume: .*version 2 are broken; b: resume: "):
            await site.sync.resume()
        assert {site.fleet.get(name).state for name in "ab"} == {ReplicaState.QUARANTINED}
        await asyncio.gather(*sampling.values(), return_exceptions=True)
        assert site.versions() == {"a": {1}, "b": {1}}
        await site.update(3)
        assert (site.fleet.weight_version, site.placeable()) == (3, ["a", "b"])
        await site.close()

    test()


@virtual
async def test_a_refusal_whose_answer_was_lost_is_found_by_the_next_pause_or_sleep(clock):
    site = FleetSite(clock, "a", "b", info=SLEEPER)
    await site.update(1)
    engine = site.engines["a"]
    engine.is_usable, engine.weight_version = False, None
    await site.sync.pause(PauseMode.KEEP)
    assert site.placeable() == ["b"]
    site.fleet.rejoin(site.fleet.get("a"), "resume: no answer")
    assert await site.late.bring_up("a")
    assert (engine.weight_version, engine.is_paused, site.placeable()) == (1, True, ["a", "b"])
    await site.sync.resume()
    engine.is_usable, engine.weight_version = False, None
    await site.sync.sleep(1)
    await site.sync.wake(ALL_MEMORY)
    assert site.placeable() == ["b"]
    assert await site.late.bring_up("a")
    assert (engine.weight_version, engine.asleep, site.placeable()) == (1, frozenset(), ["a", "b"])


@virtual
async def test_where_the_first_fails_otherwise_the_next_is_asked(clock):
    site = FleetSite(clock, "a", "b", "c")
    site.engines["a"].hangs = {"commit"}
    report = await site.update(1)
    at = {name: dict(engine.called_at).get("commit") for name, engine in site.engines.items()}
    assert at == pytest.approx({"a": 0.0, "b": CONFIG.straggler_grace_s, "c": CONFIG.straggler_grace_s})
    assert [one.error for one in report.replicas] == ["commit: no answer within 10 s", None, None]
    assert site.placeable() == ["b", "c"]


@virtual
async def test_a_look_without_an_answer_is_no_refusal(clock):
    site = FleetSite(clock, "a", "b")
    site.engines["a"].fail("resume")
    site.engines["a"].failures["resume"] = WeightUpdateFailed("no answer")
    report = await site.update(1)
    assert [one.error for one in report.replicas] == ["commit: no answer", None]
    assert site.state("a") is ReplicaState.QUARANTINED
    assert site.fleet.get("a").weight_version is None
    assert site.placeable() == ["b"]


@virtual
async def test_where_no_look_is_answered_the_fleet_stays_where_it_was(clock):
    site = FleetSite(clock, "a", "b")
    for engine in site.engines.values():
        engine.fail("resume", times=1)
        engine.failures["resume"] = WeightUpdateFailed("no answer")
    with pytest.raises(WeightUpdateFailed, match="a: commit: no answer; b: commit: no answer"):
        await site.update(1)
    assert site.fleet.weight_version == 0
    assert {site.state(name) for name in "ab"} == {ReplicaState.QUARANTINED}


def test_a_replica_takes_no_traffic_before_it_has_looked_at_what_a_pause_brought(tmp_path):
    @virtual
    async def test(clock):
        site = NoisySite(clock, tmp_path, "a", "b")
        sampling = await site.start()
        await site.sync.pause(PauseMode.KEEP)
        await site.update(3)
        site.engines["b"].faults.canary_delay_s = 3 * LOOK_S
        resuming = asyncio.create_task(site.sync.resume())
        await clock.sleep(LOOK_S / 2)
        assert site.placeable() == []
        await clock.sleep(LOOK_S)
        assert site.placeable() == ["a"]
        await resuming
        assert site.placeable() == ["a", "b"]
        await asyncio.gather(*sampling.values())
        await site.close()

    test()
