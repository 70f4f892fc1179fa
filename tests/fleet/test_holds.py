"""Replicas held at one version for an evaluation while the fleet is updated, in virtual time with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import structlog

from agentloop.api.coordinator import ReplicaHold, RolloutTerms
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import StageReport, StagingDevice, WeightUpdate
from agentloop.errors import Conflict, NoHealthyReplica, NotFound
from agentloop.fleet.holds import Holds
from agentloop.fleet.registry import ReplicaState
from agentloop.types import PauseMode, RolloutGroup, StalenessLimit, StopReason, Trajectory, VersionDemand
from agentloop.values.capabilities import NO_NEEDS, Needs
from tests.support.engine.engines import FakeEngine
from tests.support.fleet.live_run import PAUSE_S, ListeningEngine, LiveRun, live_run, talk, write_checkpoint
from tests.support.fleet.weights import FleetSite, push_source, virtual

LEASE_S = 60.0
NUM_SAMPLES = 24
PINNED = replace(talk(2), weight_version=VersionDemand(exact_version=0))


class BlockingEngine(ListeningEngine):
    """Has no memory to stage weights, so all updated replicas take each step together."""

    async def stage(self, update: WeightUpdate) -> StageReport:
        return replace(await super().stage(update), staging_device=StagingDevice.NOWHERE)


class SmallEngine(ListeningEngine):
    """Has the KV of one trajectory, by the expectation of a new service."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, num_blocks=512)


def with_three(
    test: Callable[[LiveRun], Awaitable[None]], folder: Path, kind: type[ListeningEngine] = ListeningEngine
) -> None:
    """Run a test with a service of three replicas in virtual time."""

    async def body() -> None:
        async with live_run(clock, write_checkpoint(folder), num_engines=3, make_engine=kind) as run:
            await until(run, lambda: are_all_at(run, 0))
            await test(run)

    clock = VirtualClock()
    clock.run(body())


def on_three(test: Callable[[LiveRun], Awaitable[None]]) -> Callable[..., None]:
    """Decorate a test that runs `with_three`."""

    @wraps(test)
    def run(tmp_path: Path) -> None:
        with_three(test, tmp_path)

    del run.__wrapped__  # type: ignore[attr-defined] # pytest would look for a fixture named run
    return run


async def hold(run: LiveRun, num: int = 1, timeout_s: float = 600.0, hold_id: str = "h") -> ReplicaHold:
    return await run.coordinator.replicas.hold(hold_id, num, timeout_s, LEASE_S)


async def evaluate(run: LiveRun, num_samples: int = NUM_SAMPLES, priority: int = 0) -> list[Trajectory]:
    """Sample a task pinned to version 0, in a separate run."""
    groups = (RolloutGroup("g", PINNED, num_samples, "eval"),)
    await run.coordinator.rollouts.submit("eval", groups, RolloutTerms(priority=priority, run_id="eval"))
    await run.until_done("eval")
    return records(run, "eval")


async def train(run: LiveRun, rollout_id: str, max_staleness: int) -> list[Trajectory]:
    await run.submit(rollout_id, 4, 4, talk(2), StalenessLimit(max_staleness))
    await run.until_done(rollout_id)
    return records(run, rollout_id)


def records(run: LiveRun, rollout_id: str) -> list[Trajectory]:
    return [one for one in run.store.records.values() if one.rollout_id == rollout_id]


def versions_of(found: list[Trajectory]) -> set[int]:
    return {version for one in found for version in one.versions}


def engine_of(run: LiveRun, held: ReplicaHold) -> ListeningEngine:
    return run.engines[f"sim://{held.replicas[0]}"]


async def until(run: LiveRun, is_reached: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_reached():
            await run.clock.sleep(0.1)


def are_all_at(run: LiveRun, version: int) -> bool:
    """Return True if all replicas take traffic with this version."""
    placeable = run.coordinator.replicas.fleet.placeable()
    engines = {engine.weight_version for engine in run.engines.values()}
    return len(placeable) == 3 and {one.weight_version for one in placeable} == engines == {version}


@pytest.mark.parametrize("kind", [ListeningEngine, BlockingEngine])
def test_an_evaluation_has_one_version_while_training_pushes_five(
    tmp_path: Path, kind: type[ListeningEngine]
) -> None:
    async def body(run: LiveRun) -> None:
        held = await hold(run)
        assert (held.version, len(held.replicas), held.lost) == (0, 1, ())
        held_engine = engine_of(run, held)
        evaluating = asyncio.create_task(evaluate(run))
        for version in range(1, 6):
            await run.clock.sleep(0.3)
            await run.update(version)  # waits for no held replica
            assert run.coordinator.replicas.fleet.weight_version == version
            assert {one.weight_version for one in run.engines.values()} == {0, version}
            [report] = run.coordinator.replicas.sync.reports[-1:]
            assert held.replicas[0] not in {one.replica_id for one in report.replicas}
        assert not evaluating.done()
        strict, tolerant = await asyncio.gather(train(run, "strict", 4), train(run, "tolerant", 5))
        # On-policy work runs on the other replicas; within its limit also on the held one.
        assert versions_of(strict) == {5}
        assert versions_of(tolerant) == {0, 5}
        assert all(one.is_complete and len(one.versions) == 1 for one in (*strict, *tolerant))
        found = await evaluating
        assert len(found) == NUM_SAMPLES
        assert {(one.stop_reason, one.versions) for one in found} == {(StopReason.COMPLETED, (0,))}
        served = {request.trajectory_id for request, _ in held_engine.served}
        assert {one for one in served if one.startswith("eval")} == {f"eval/g/{n}@0" for n in range(NUM_SAMPLES)}
        [shown] = (await run.coordinator.status()).holds
        assert (shown.version, shown.replicas) == (0, held.replicas)
        assert 500.0 < shown.left_s < 600.0
        await run.coordinator.replicas.renew_hold("h", 0.0)
        await until(run, lambda: are_all_at(run, 5))
        assert (await run.coordinator.status()).holds == ()

    with_three(body, tmp_path, kind)


def test_full_replicas_of_training_do_not_delay_the_evaluation(tmp_path: Path) -> None:
    async def body(run: LiveRun) -> None:
        await hold(run)
        await run.update(1)
        await run.submit("strict", 100, 1, talk(2), StalenessLimit(0))
        await run.clock.sleep(0.5)
        found = await evaluate(run, 4, priority=-1)
        assert {(one.stop_reason, one.versions) for one in found} == {(StopReason.COMPLETED, (0,))}
        status = run.coordinator.rollouts.queue.status("strict")
        assert status is not None, "the evaluation waited for training"
        assert status.num_queued > 0
        await run.until_done("strict")
        assert versions_of(records(run, "strict")) == {1}

    with_three(body, tmp_path, SmallEngine)


@on_three
async def test_pinned_samples_run_on_held_replicas_only(run: LiveRun) -> None:
    """Also before an update, because the others may leave the version at any time."""
    held = await hold(run)
    await evaluate(run)
    await run.update(1)
    patient = replace(PINNED, weight_version=VersionDemand(exact_version=0, wait_s=1e4))
    await run.submit("patient", 2, 2, patient, None)
    await run.until_done("patient")
    assert {one.versions for one in (*records(run, "eval"), *records(run, "patient"))} == {(0,)}
    others = [engine for url, engine in run.engines.items() if url != f"sim://{held.replicas[0]}"]
    assert not any(engine.served for engine in others)


@on_three
async def test_after_the_timeout_the_replica_catches_up_and_the_rest_are_errors(run: LiveRun) -> None:
    began_at = run.clock.now()
    held = await hold(run, timeout_s=3.0)
    evaluating = asyncio.create_task(evaluate(run, 200))
    await run.update(1)
    await until(run, lambda: are_all_at(run, 1))
    assert 3.0 <= run.clock.now() - began_at < LEASE_S / 2
    found = await evaluating
    whole = [one for one in found if one.is_complete]
    assert 0 < len(whole) < len(found) == 200
    assert versions_of(whole) == {0}
    rest = [one for one in found if not one.is_complete]
    assert all(one.reward is None and (one.error or one.stop_reason is StopReason.STALE) for one in rest)
    with pytest.raises(NotFound, match="its timeout was reached"):
        await run.coordinator.replicas.renew_hold(held.hold_id, LEASE_S)


@on_three
async def test_a_killed_evaluator_holds_nothing_after_its_lease(run: LiveRun) -> None:
    began_at = run.clock.now()
    await hold(run, 2)
    await run.clock.sleep(LEASE_S / 2)
    await run.coordinator.replicas.renew_hold("h", LEASE_S)  # its last one
    await run.update(1)
    await run.clock.sleep(LEASE_S * 0.9)
    assert len(run.coordinator.replicas.fleet.held()) == 2
    await until(run, lambda: are_all_at(run, 1))
    assert LEASE_S * 1.5 <= run.clock.now() - began_at < LEASE_S * 1.7
    with pytest.raises(NotFound, match="its evaluator did not renew it"):
        await run.coordinator.replicas.renew_hold("h", LEASE_S)


@on_three
async def test_the_samples_of_a_lost_replica_move_to_the_other_held_one(run: LiveRun) -> None:
    held = await hold(run, 2)
    await run.update(1)
    evaluating = asyncio.create_task(evaluate(run))
    await run.clock.sleep(0.5)
    lost = held.replicas[0]
    await run.engines[f"sim://{lost}"].close()
    await run.coordinator.replicas.deregister(lost, "it was killed")
    found = await evaluating
    assert {(one.is_complete, one.versions) for one in found} == {(True, (0,))}
    [shown] = (await run.coordinator.status()).holds
    assert (shown.replicas, shown.lost) == (held.replicas[1:], (lost,))


@on_three
async def test_a_hold_without_a_replica_ends_and_its_samples_are_errors(run: LiveRun) -> None:
    held = await hold(run)
    await run.update(1)
    evaluating = asyncio.create_task(evaluate(run))
    await run.clock.sleep(0.2)
    await engine_of(run, held).close()
    await run.coordinator.replicas.deregister(held.replicas[0], "it was killed")
    found = await evaluating
    assert len(found) == NUM_SAMPLES
    assert all(one.reward is None and not one.is_complete for one in found)
    with pytest.raises(NotFound, match="its last replica was lost"):
        await run.coordinator.replicas.renew_hold("h", LEASE_S)


@on_three
async def test_too_many_replicas_are_refused_with_both_numbers(run: LiveRun) -> None:
    with pytest.raises(Conflict, match=r"cannot hold 3 replica.*3 are ready.*at most 2"):
        await hold(run, 3)
    first = await hold(run)
    assert await hold(run) == replace(first, left_s=first.left_s)  # repeated
    with pytest.raises(Conflict, match=r"cannot hold 2 replica.*3 are ready, of which 1 are held.*at most 1"):
        await hold(run, 2, hold_id="other")
    second = await hold(run, hold_id="other")
    assert {*first.replicas}.isdisjoint(second.replicas)
    [free] = {one.replica_id for one in run.coordinator.replicas.fleet.replicas} - {
        *first.replicas,
        *second.replicas,
    }
    await run.coordinator.replicas.deregister(free)
    with pytest.raises(NoHealthyReplica, match="2 keep their version for evaluations"):
        await run.update(1)


@on_three
async def test_a_hold_waits_for_a_running_update(run: LiveRun) -> None:
    updating = asyncio.create_task(run.update(1))
    while run.coordinator.replicas.sync.progress is None:
        await asyncio.sleep(0)
    assert (await hold(run)).version == 1
    await updating
    await run.update(2)
    assert sorted(engine.weight_version for engine in run.engines.values()) == [1, 2, 2]


@on_three
async def test_a_held_replica_follows_a_pause_and_a_sleep(run: LiveRun) -> None:
    held, replicas = await hold(run), run.coordinator.replicas
    engine = engine_of(run, held)
    await run.update(1)
    await replicas.pause(PauseMode.KEEP)
    assert engine.is_paused
    await replicas.resume()
    await replicas.sleep(1)
    await replicas.wake(frozenset(engine.asleep))
    assert not engine.is_paused
    assert (engine.weight_version, len(replicas.fleet.placeable())) == (0, 3)
    await replicas.sleep(1)
    await run.update(2)  # wakes the fleet, and ends the hold
    await until(run, lambda: are_all_at(run, 2))
    with suppress(NotFound):
        await replicas.renew_hold("h", LEASE_S)
    await until(run, lambda: not replicas.holds.shown(0.0))


@on_three
async def test_sessions_and_calls_leave_a_held_replica_that_is_older(run: LiveRun) -> None:
    """They have no staleness limit, so they accept the fleet's version only."""
    rollouts, held = run.coordinator.rollouts, await hold(run, 2)
    leases = [await rollouts.lease(f"s{n}", 10, "ingress") for n in range(3)]
    assert {one.replica_id for one in leases} >= {*held.replicas}
    await run.update(1)
    moved = [await rollouts.lease(f"s{n}", 10, "ingress") for n in range(3)]
    assert not {one.replica_id for one in moved} & {*held.replicas}


@on_three
async def test_training_leaves_a_held_replica_once_its_version_is_too_old(run: LiveRun) -> None:
    held = await hold(run, 2)
    await run.update(1)
    await run.submit("r", 6, 2, talk(3, "TalkSlowly"), StalenessLimit(1))
    await run.clock.sleep(PAUSE_S * 1.5)  # two turns have ended
    served = {request.trajectory_id for request, _ in engine_of(run, held).served}
    assert served
    await run.update(2)
    await run.until_done("r")
    turns = [[span.version for span in one.path.weight_versions] for one in records(run, "r")]
    assert [0, 0, 2] in turns
    assert all(versions in ([0, 0, 2], [1, 1, 2]) for versions in turns), turns


@on_three
async def test_training_on_new_weights_never_continues_on_a_held_replica(run: LiveRun) -> None:
    """Its versions would go back. A replica is lost while the held one has the least load."""
    held = await hold(run)
    await run.update(1)
    lost, _ = (one.replica_id for one in run.coordinator.replicas.fleet.placeable() if not one.held_by)
    await run.submit("s", 6, 1, talk(3, "TalkSlowly"), StalenessLimit(5))
    await run.clock.sleep(0.5)
    await run.submit("r", 3, 2, talk(3, "TalkSlowly"), StalenessLimit(0))
    await run.clock.sleep(PAUSE_S / 2)
    await run.engines[f"sim://{lost}"].close()
    await run.coordinator.replicas.deregister(lost, "it was killed")
    await asyncio.gather(*map(run.until_done, "rs"))
    found = [*records(run, "r"), *records(run, "s")]
    assert len(found) == 12
    assert all(one.is_complete for one in found)
    turns = [[span.version for span in one.path.weight_versions] for one in found]
    assert all(versions == sorted(versions) for versions in turns), turns
    assert {version for versions in turns for version in versions} == {held.version, 1}


@virtual
async def test_a_running_update_counts_for_the_age_of_held_replicas(clock: VirtualClock) -> None:
    site = FleetSite(clock, "a", "b", version=3)
    fleet = site.fleet
    fleet.hold(fleet.get("a"), "h")
    await site.update(4)

    def accepting(needs: Needs) -> list[str]:
        return [one.replica_id for one in fleet.placeable() if fleet.accepts(needs, one)]

    tolerant = Needs(max_staleness=1)
    assert (accepting(NO_NEEDS), accepting(tolerant), accepting(tolerant.of_moved)) == (["b"], ["a", "b"], ["b"])
    fleet.coming_version = 5
    assert accepting(tolerant) == ["b"]
    exact = [Needs(version=VersionDemand(exact_version=version)) for version in (3, 4, 5)]
    assert [accepting(needs) for needs in exact] == [["a"], ["b"], []]
    assert accepting(Needs(version=VersionDemand(min_version=4))) == ["b"]
    fleet.set_weight_version(1)  # rolled back
    assert accepting(Needs(max_staleness=9)) == []


@virtual
async def test_after_pushes_a_peer_with_the_newest_weights_sends_them(clock: VirtualClock) -> None:
    site = FleetSite(clock, "a", "b", "c")
    for replica_id, hold_id in (("a", "first"), ("b", "second")):
        site.fleet.hold(site.fleet.get(replica_id), hold_id)
    report = await site.push(1)
    assert [one.replica_id for one in report.replicas] == ["c"]
    assert site.placeable() == ["a", "b", "c"]
    site.fleet.end_hold("first")
    assert (site.state("a"), site.placeable()) == (ReplicaState.JOINING, ["b", "c"])
    site.engines["c"].offered = push_source("relay")
    site.calls("b")
    assert await site.late.bring_up("a")
    assert site.calls("b") == []  # its weights are as old
    assert [site.engines[name].weight_version for name in "abc"] == [1, 0, 1]
    assert site.placeable() == ["a", "b", "c"]


@virtual
async def test_one_replica_of_each_engine_pool_follows_updates(clock: VirtualClock) -> None:
    site = FleetSite(clock)
    holds = Holds(site.fleet, structlog.get_logger())
    for name, pool in (("a", "x"), ("b", "x"), ("c", "y")):
        engine = FakeEngine(clock, f"fake://{name}", 0, site.info)
        replica = site.fleet.register(replace(engine.registration(), entry=pool), 0.0)
        site.fleet.begin_update(replica)
        site.fleet.admit(replica)
    loads = {"a": 2.0, "b": 1.0, "c": 0.0}
    with pytest.raises(Conflict, match=r"cannot hold 2 replica.*3 are ready.*one per engine pool.*at most 1"):
        holds.begin("h", 2, 10.0, 10.0, 0.0, loads.__getitem__)
    assert holds.begin("h", 1, 10.0, 10.0, 0.0, loads.__getitem__).replicas == ("b",)


@virtual
async def test_a_replica_whose_weights_change_leaves_its_hold(clock: VirtualClock) -> None:
    site = FleetSite(clock, "a", "b", "c", "d")
    for replica in site.fleet.replicas:
        site.fleet.hold(replica, "h")
    site.fleet.forget_version(site.fleet.get("a"))
    site.fleet.quarantine(site.fleet.get("b"), "it refused")
    site.fleet.register(replace(site.engines["c"].registration(), url="fake://other-process"), 0.0)
    site.fleet.drain(frozenset({site.fleet.get("d").host}))
    assert site.fleet.held() == ()
    assert not site.fleet.held_versions
