"""Named adapters in a running service, in virtual time: pushes, slots, versions and restarts."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from agentloop.api.coordinator import AdapterPush, ReplicaRegistration, RolloutTerms
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import Adapter, OnProgress, StageReport
from agentloop.errors import (
    AdapterInUse,
    AdaptersFull,
    CheckpointUnreadable,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    NoHealthyReplica,
)
from agentloop.fleet.desired_state import FleetAdapters
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import (
    GenerateRequest,
    Generation,
    OnStale,
    RolloutGroup,
    SamplingParams,
    StalenessLimit,
    StopReason,
    Trajectory,
    VersionDemand,
)
from agentloop_servers.coordinator.coordinator import FLEET_ADAPTERS
from tests.support.fleet.live_run import SPEC, LiveRun, live_run, talk, write_checkpoint
from tests.support.fleet.memory_store import MemoryStore
from tests.support.fleet.proving_policy import ProvingPolicy, logprobs_of
from tests.support.fleet.weight_folders import WeightFolders

E = TypeVar("E", bound=SimulatedEngine)
TENANTS = tuple(f"t{number}" for number in range(8))


@asynccontextmanager
async def running(
    clock: VirtualClock, folder: Path, num_places: int = 8, kind: type[SimulatedEngine] = SimulatedEngine, **options
) -> AsyncIterator[LiveRun]:
    def engine(clock: VirtualClock) -> SimulatedEngine:
        return engine_of(kind, clock, num_places)

    async with live_run(clock, write_checkpoint(folder), make_engine=engine, **options) as run:
        yield run


def engine_of(kind: type[E], clock: VirtualClock, num_places: int = 8) -> E:
    return kind(replace(SPEC, lora_rank=8, max_loras=num_places), clock=clock, policy=ProvingPolicy())


async def start_late(run: LiveRun, engine: E) -> E:
    """Start an engine that is not registered as a replica yet (see `register_late`)."""
    run.engines["sim://late"] = engine
    await engine.start()
    return engine


async def register_late(run: LiveRun, engine: SimulatedEngine) -> None:
    registration = ReplicaRegistration("late", "sim://late", engine.info, engine.weight_version)
    await run.coordinator.replicas.register(registration)


async def push(run: LiveRun, name: str, version: int | None = None, directory: str = "", **options):
    order = AdapterPush(name, directory or run.checkpoint, version, **options)
    return await run.coordinator.replicas.push_adapter(order)


async def submit(run: LiveRun, rollout_id: str, task, num: int = 1, *, adapter: str, limit=None, owner: str = ""):
    groups = (RolloutGroup("g", task, num, rollout_id, limit),)
    names = (owner,) if owner else None
    return await run.coordinator.rollouts.submit(rollout_id, groups, RolloutTerms(owner, adapter=adapter), names)


def records(run: LiveRun, rollout_id: str) -> list[Trajectory]:
    return [one for one in run.store.records.values() if one.rollout_id == rollout_id]


def num_foreign_tokens(record: Trajectory) -> int:
    """Count the tokens that the recorded adapter version would not have sampled at their position."""
    num = 0
    for path in record.paths:
        ids, first = [*path.prompt_ids.tolist(), *path.response_ids.tolist()], len(path.prompt_ids)
        for span in path.weight_versions:
            own = logprobs_of(ids, first + span.start, first + span.end, span.version, record.adapter)
            said = path.logprobs[span.start : span.end].tolist()
            num += sum(one != two for one, two in zip(said, own, strict=True))
    return num


def test_eight_tenants_push_beside_each_other_and_no_token_is_anothers(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with running(clock, tmp_path, num_engines=2, num_workers=2, capacity=100) as run:
            for tenant in TENANTS:
                await push(run, f"{tenant}~math")
            for tenant in TENANTS:
                await submit(run, "r", talk(2), 100, adapter="math", owner=tenant)
            for number in range(32):
                report = await push(run, f"{TENANTS[number % 8]}~math")
                assert (report.version, report.stall_ms) == (report.previous_version + 1, 0.0)
                await clock.sleep(0.2)
            for tenant in TENANTS:
                await run.until_done(f"{tenant}~r", 10_000.0)
            found = [record for tenant in TENANTS for record in records(run, f"{tenant}~r")]
            assert Counter(one.adapter for one in found) == {f"{tenant}~math": 100 for tenant in TENANTS}
            assert all(one.stop_reason is not StopReason.ENGINE_FAILED for one in found)
            assert sum(map(num_foreign_tokens, found)) == 0
            assert len({span.version for one in found for path in one.paths for span in path.weight_versions}) == 5
            # No call spans two versions.
            turns = sum(len(path.turns) for one in found for path in one.paths)
            assert sum(len(path.weight_versions) for one in found for path in one.paths) <= turns

    clock.run(main())


def virtually(test):
    def run(tmp_path: Path) -> None:
        clock = VirtualClock()

        async def main() -> None:
            async with asyncio.timeout(1e5):
                await test(clock, tmp_path)

        clock.run(main())

    run.__name__ = test.__name__
    return run


@virtually
async def test_a_push_is_refused_whole_and_says_why(clock: VirtualClock, folder: Path) -> None:
    async with running(clock, folder) as run:
        with pytest.raises(CheckpointUnreadable):
            await push(run, "a", directory=str(folder / "missing"))
        assert await run.coordinator.adapters() == ()
        await push(run, "a", 3)
        with pytest.raises(InvalidRequest, match="version 2 is lower than the served version 3"):
            await push(run, "a", 2)
        with pytest.raises(Conflict):
            await push(run, "a", 3, str(write_checkpoint(_made(folder / "other"))))
        [first] = await run.coordinator.adapters()
        assert (await push(run, "a", 3)).version == 3  # a repeat
        assert await run.coordinator.adapters() == (first,)
        assert (await push(run, "a", 1, is_forced=True)).previous_version == 3
        assert (await push(run, "a")).version == 2
        assert [one.adapter for one in (await run.coordinator.status()).updates] == ["a"] * 4
        with pytest.raises(ModelNotFound, match="served adapters: 'a'"):
            await submit(run, "r", talk(1), adapter="b")


@virtually
async def test_the_oldest_push_that_is_in_no_use_gives_its_place(clock: VirtualClock, folder: Path) -> None:
    async with running(clock, folder, num_places=2) as run:
        for name in ("a", "b", "a", "c"):
            await push(run, name)
        assert [one.name for one in await run.coordinator.adapters()] == ["a", "c"]
        await submit(run, "r", talk(2, "TalkSlowly"), adapter="a")
        await push(run, "d")
        assert [one.name for one in await run.coordinator.adapters()] == ["a", "d"]
        with pytest.raises(AdapterInUse):
            await run.coordinator.replicas.unload_adapter("a")
        await submit(run, "s", talk(2, "TalkSlowly"), adapter="d")
        with pytest.raises(AdaptersFull, match="a, d"):
            await push(run, "e")
        for rollout_id in ("r", "s"):
            await run.until_done(rollout_id)
        with pytest.raises(CheckpointUnreadable):  # the version that the failed push replaced is served again
            await push(run, "e", directory=str(folder / "missing"))
        await submit(run, "t", talk(1), adapter="a")
        await run.until_done("t")
        await run.coordinator.replicas.unload_adapter("a")
        assert [one.name for one in await run.coordinator.adapters()] == ["d"]
        found = [one for name in "rst" for one in records(run, name)]
        assert [(one.is_complete, num_foreign_tokens(one)) for one in found] == [(True, 0)] * 3


@virtually
async def test_a_rollout_lives_by_its_adapters_versions(clock: VirtualClock, folder: Path) -> None:
    """Its staleness limit and version demands use the adapter's versions; the base weights stay at version 0."""
    async with running(clock, folder, num_workers=1) as run:
        await push(run, "a", 5)
        limit = StalenessLimit(0, OnStale.FINISH)
        await submit(run, "r", talk(3, "TalkSlowly"), adapter="a", limit=limit)
        wanted = replace(talk(1), weight_version=VersionDemand(min_version=6, wait_s=100.0))
        await submit(run, "s", wanted, adapter="a")
        await submit(run, "u", replace(talk(1), weight_version=VersionDemand(exact_version=4)), adapter="a")
        await run.until_done("u")
        await clock.sleep(3.0)
        assert (await run.coordinator.rollouts.read("s", 0, 1, 0.0)).status.num_queued == 1
        await push(run, "a", 6)
        await run.until_done("s")
        await run.until_done("r")
        ends = {name: records(run, name)[0] for name in "rsu"}
        assert (ends["s"].versions, ends["s"].staleness) == ((6,), 0)
        assert (ends["r"].stop_reason, ends["r"].trained_versions, ends["r"].staleness) == (
            StopReason.STALE,
            {5},
            1,
        )
        assert "the request requires weight version 4, but version 5 is served" in (ends["u"].error or "")


@virtually
async def test_replicas_that_join_and_a_restart_have_all_adapters(clock: VirtualClock, folder: Path) -> None:
    store = MemoryStore()
    async with running(clock, folder, num_engines=1, store=store) as run:
        for name, version in (("a", 1), ("b", 7), ("a", 2)):
            await push(run, name, version)
    async with running(clock, folder, num_engines=2, store=store) as run:  # new processes without adapters
        assert [(one.name, one.version) for one in await run.coordinator.adapters()] == [("b", 7), ("a", 2)]
        await submit(run, "r", talk(1), 20, adapter="a")
        await submit(run, "s", talk(1), 20, adapter="b")
        await asyncio.gather(*map(run.until_done, ("r", "s")))
        found = [*records(run, "r"), *records(run, "s")]
        assert {(one.adapter, one.versions) for one in found} == {("a", (2,)), ("b", (7,))}
        assert not sum(map(num_foreign_tokens, found))


@virtually
async def test_an_adapter_whose_files_are_gone_keeps_no_replica_from_the_others(
    clock: VirtualClock, folder: Path
) -> None:
    async with running(clock, folder, num_engines=1) as run:
        gone = write_checkpoint(_made(folder / "gone"))
        await push(run, "a")
        await push(run, "b", directory=str(gone))
        shutil.rmtree(gone)
        late = await start_late(run, engine_of(ToldEngine, clock))
        await register_late(run, late)
        while len(run.coordinator.replicas.fleet.placeable()) < 2:
            await clock.sleep(0.1)

        async def are_sampled(rollout_id: str, adapter: str) -> None:
            await submit(run, rollout_id, talk(1), 20, adapter=adapter)
            await run.until_done(rollout_id)
            assert [one.failure for one in records(run, rollout_id)] == [None] * 20

        await are_sampled("r", "a")
        await are_sampled("s", "b")
        assert late.adapters == {"a"}
        await push(run, "b")
        await are_sampled("t", "b")
        assert late.adapters == {"a", "b"}


@virtually
async def test_an_adapter_that_is_unloaded_while_a_replica_joins_is_held_nowhere(
    clock: VirtualClock, folder: Path
) -> None:
    """Otherwise the replica would keep its weights for the next push of the same name and version."""
    async with running(clock, folder, num_engines=1, kind=SlowEngine) as run:
        for name in "ab":
            await push(run, name)
        run.engines["sim://a"].unload_s = 4.0
        late = await start_late(run, engine_of(SlowEngine, clock))
        late.load_s = 1.0
        await register_late(run, late)
        await clock.sleep(0.5)
        await run.coordinator.replicas.unload_adapter("a")
        await clock.sleep(0.5)
        assert len(run.coordinator.replicas.fleet.placeable()) == 2
        with pytest.raises(ModelNotFound):
            await late.generate(GenerateRequest("c", (5, 6), SamplingParams(max_tokens=1), 5.0, adapter="a"))


@virtually
async def test_an_adapter_that_is_pushed_while_a_replica_joins_is_held_there_too(
    clock: VirtualClock, folder: Path
) -> None:
    async with running(clock, folder, num_engines=1, kind=SlowEngine) as run:
        await push(run, "a")
        late = await start_late(run, engine_of(SlowEngine, clock))
        late.load_s = 2.0
        await register_late(run, late)
        await clock.sleep(1.0)
        await push(run, "b")
        while len(run.coordinator.replicas.fleet.placeable()) < 2:
            await clock.sleep(0.1)
        for name in "ab":
            await late.generate(GenerateRequest(name, (5, 6), SamplingParams(max_tokens=1), 5.0, adapter=name))


@virtually
async def test_a_rollout_that_is_not_durable_yet_keeps_its_adapter(clock: VirtualClock, folder: Path) -> None:
    store = SlowStore()
    async with running(clock, folder, num_places=1, store=store) as run, asyncio.TaskGroup() as group:
        await push(run, "a")
        group.create_task(submit(run, "r", talk(1), adapter="a"))
        await clock.sleep(1.0)
        with pytest.raises(AdaptersFull):
            await push(run, "b")
        await clock.sleep(2.0)
        await run.until_done("r")


@virtually
async def test_the_store_has_an_adapters_name_before_a_replica_holds_it(clock: VirtualClock, folder: Path) -> None:
    """Otherwise a coordinator that starts after a crash would not unload the adapter of an unfinished push."""
    async with running(clock, folder, kind=SlowEngine) as run, asyncio.TaskGroup() as group:
        for engine in run.engines.values():
            engine.load_s = 2.0
        group.create_task(push(run, "a"))
        await clock.sleep(1.0)
        assert await run.store.saved_state(FLEET_ADAPTERS, FleetAdapters) == FleetAdapters((), frozenset({"a"}))


@virtually
async def test_no_replica_unloads_an_adapter_that_a_rollout_uses(clock: VirtualClock, folder: Path) -> None:
    async with running(clock, folder, num_places=2, kind=SlowEngine, num_workers=0) as run:
        for name in "ab":
            await push(run, name)
        await submit(run, "r", talk(1), adapter="a")
        await push(run, "c")
        assert {one.unloaded for one in run.engines.values()} == {("b",)}


@virtually
async def test_a_replica_keeps_no_other_content_under_a_served_version(clock: VirtualClock, folder: Path) -> None:
    """The coordinator that knew about the other content has died."""
    store, folders = MemoryStore(), WeightFolders(folder / "weights", Random(0))
    async with running(clock, folder, num_engines=1, store=store) as run:
        await push(run, "a", 1, folders.folder_of("a"))
    shutil.rmtree(folders.folder_of("a"))
    async with running(clock, folder, num_engines=0, store=store) as run:
        late = await start_late(run, engine_of(SimulatedEngine, clock))
        await late.load_adapter(Adapter("a", 1, folders.folder_of("b")))
        await register_late(run, late)
        while not run.coordinator.replicas.fleet.placeable():
            await clock.sleep(0.1)
        with pytest.raises(ModelNotFound):
            await late.generate(GenerateRequest("c", (5, 6), SamplingParams(max_tokens=1), 5.0, adapter="a"))


@virtually
async def test_a_push_while_no_replica_serves_does_not_exceed_the_places(clock: VirtualClock, folder: Path) -> None:
    """Otherwise no replica could hold all served adapters, and none could rejoin."""
    store = SlowStore()
    async with running(clock, folder, num_places=2, num_engines=1, store=store) as run:
        gone = write_checkpoint(_made(folder / "gone"))
        await push(run, "a")
        await push(run, "b", directory=str(gone))
        shutil.rmtree(gone)
        await run.coordinator.replicas.deregister("a")
        late = await start_late(run, engine_of(SlowEngine, clock, 2))
        late.load_s = 1.0
        await register_late(run, late)
        await clock.sleep(0.5)
        store.save_s = 2.0
        with pytest.raises(NoHealthyReplica):
            await push(run, "c")
        assert len(await run.coordinator.adapters()) == 2


@virtually
async def test_a_refused_push_leaves_what_is_held_to_its_calls(clock: VirtualClock, folder: Path) -> None:
    """A rejoining replica has no adapter to unload, so it does not wait for a call to end."""
    async with running(clock, folder) as run, asyncio.TaskGroup() as group:
        await push(run, "a")
        for name in ("a", "typo"):
            with pytest.raises(CheckpointUnreadable):
                await push(run, name, directory=str(folder / "missing"))
        sampling = SamplingParams(max_tokens=1500)
        request = GenerateRequest("c", (5, 6), sampling, 500.0, adapter="a")
        call = group.create_task(run.engines["sim://a"].generate(request))
        await clock.sleep(0.1)
        fleet = run.coordinator.replicas.fleet
        replica = fleet.get("a")
        assert replica is not None
        fleet.rejoin(replica, "it did not follow an order")
        while len(fleet.placeable()) < 2:
            await clock.sleep(0.1)
        assert not call.done()
        await push(run, "b")
        saved = await run.store.saved_state(FLEET_ADAPTERS, FleetAdapters)
        assert saved is not None
        assert saved.strays == frozenset()


@virtually
async def test_no_report_names_the_adapters_of_others(clock: VirtualClock, folder: Path) -> None:
    async with running(clock, folder, num_places=2) as run, asyncio.TaskGroup() as group:
        await push(run, "alice~math")
        await push(run, "bob~secret")
        for number in range(2):  # calls on one replica pin two older versions
            sampling = SamplingParams(max_tokens=1500)
            call = GenerateRequest(f"c{number}", (5, 6), sampling, 500.0, adapter="bob~secret")
            group.create_task(run.engines["sim://a"].generate(call))
            await clock.sleep(0.1)
            await push(run, "bob~secret")
        report = await push(run, "alice~math")
        assert [one.error is None for one in report.replicas] == [False, True]
        assert "bob" not in repr((report, (await run.coordinator.status()).replicas))


@virtually
async def test_a_push_that_changes_nothing_takes_no_kv(clock: VirtualClock, folder: Path) -> None:
    async with running(clock, folder, num_engines=1) as run:
        await push(run, "a", 3)
        await submit(run, "r", talk(8, "TalkSlowly"), 20, adapter="a")
        share = run.coordinator.replicas.balancer.share
        before = share.value
        for _ in range(8):
            await clock.sleep(4.0)
            await push(run, "a", 3)
            with pytest.raises(InvalidRequest):
                await push(run, "a", 2)
        await run.until_done("r")
        assert share.value == before


@virtually
async def test_a_rollout_is_not_repeated_under_another_adapter(clock: VirtualClock, folder: Path) -> None:
    async with running(clock, folder) as run:
        for name in ("t~a", "t~b"):
            await push(run, name)
        for _ in range(2):
            await submit(run, "r", talk(1), adapter="a", owner="t")
        with pytest.raises(Conflict, match="already exists with other groups"):
            await submit(run, "r", talk(1), adapter="b", owner="t")
        await run.until_done("t~r")


class SlowStore(MemoryStore):
    save_s = 0.0

    async def save_state(self, *args) -> None:
        await asyncio.sleep(self.save_s)
        await super().save_state(*args)

    async def accept(self, *args, **options) -> None:
        await asyncio.sleep(2.0)
        await super().accept(*args, **options)


class SlowEngine(SimulatedEngine):
    """An engine whose adapter loads take time."""

    load_s = unload_s = 0.0
    unloaded: tuple[str, ...] = ()

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        await asyncio.sleep(self.load_s)
        return await super().load_adapter(adapter)

    async def unload_adapter(self, name: str) -> None:
        await asyncio.sleep(self.unload_s)
        await super().unload_adapter(name)
        self.unloaded += (name,)


class ToldEngine(SimulatedEngine):
    """Records the adapter names of its calls."""

    adapters: frozenset[str] = frozenset()

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        self.adapters |= {request.adapter}
        return await super().generate(request, on_progress)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
