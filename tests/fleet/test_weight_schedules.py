"""Weight updates under seeded schedules of faults, in virtual time: trainers that die while they send, replicas
that die while they receive, orders that come late or twice, a fleet that sleeps in between. Whatever happens, the
fleet comes to one version that was really pushed, and every trajectory is there once, whole, each token under the
version it names.

A failure names its seed; `run_schedule(seed, path)` runs it again, exactly.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from agentloop import codec
from agentloop.clock import VirtualClock
from agentloop.engine import ALL_MEMORY
from agentloop.fleet.desired_state import FleetWeights
from agentloop.fleet.registry import ReplicaState
from agentloop.fleet.weight_update import UpdateState
from agentloop.types import KVPolicy
from agentloop_servers.coordinator.coordinator import FLEET_WEIGHTS
from tests.support.fleet.faulty_link import Fault
from tests.support.fleet.schedule_worker import Sampled, ScheduleWorker, make_work
from tests.support.fleet.schedules import MAX_HEALING_S, POLICY, World

pytestmark = pytest.mark.slow

NUM_BATCHES = 10
NUM_SEEDS = 100  # of one batch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def run_schedule(seed: int, checkpoint: Path) -> Counter[str]:
    """Run one schedule and check what it leaves behind. Returns what happened in it."""
    clock = VirtualClock()
    shared = random.getstate()
    random.seed(seed)  # the waits between attempts to catch up come from it
    try:
        return clock.run(_schedule(World(seed, clock, checkpoint)))
    finally:
        random.setstate(shared)


async def _schedule(world: World) -> Counter[str]:
    await world.start()
    workers = [ScheduleWorker(f"w{number}", world) for number in range(2)]
    try:
        async with asyncio.TaskGroup() as group:
            lasting = [
                group.create_task(call, name="lasting") for call in (world.heartbeat(), *(w.run() for w in workers))
            ]
            work = make_work(world.rng)
            num_accepted = (await world.ask(lambda c: c.rollouts.submit("r", work))).num_accepted
            trouble = [group.create_task(call) for call in (world.train(), world.operate(), world.befall())]
            await world.clock.sleep(world.trouble_s)
            await world.heal()
            await asyncio.wait(trouble)
            await world.heal()
            await world.resume()
            await world.wake(ALL_MEMORY)
            if await world.needs_a_push():
                await world.push_until_done()
            await _until_quiet(world, num_accepted)
            for task in lasting:
                task.cancel()
        check_records(world, num_accepted)
        for worker in workers:
            for sampled in worker.sampled:
                check_generation_history(world, sampled)
    finally:
        await world.close()
    assert world.network.errors == []
    assert world.wire.problems == []
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leaked, f"leaked: {leaked}"
    return world.counts()


async def _until_quiet(world: World, num_accepted: int) -> None:
    """Wait until all is well, and see that it stays so. Raises AssertionError saying what is not."""
    deadline = world.clock.now() + MAX_HEALING_S
    num_quiet = 0
    while num_quiet < 4:
        await world.clock.sleep(0.5)
        problems = fleet_problems(world) + version_problems(world)
        if len(world.store.records) < num_accepted:
            problems.append(f"{len(world.store.records)} of {num_accepted} trajectories have ended")
        if world.network.num_late:
            problems.append(f"{world.network.num_late} calls are still on their way")
        num_quiet = 0 if problems else num_quiet + 1
        assert world.clock.now() < deadline, f"not well after {MAX_HEALING_S:g} s: {'; '.join(problems)}"


def fleet_problems(world: World) -> list[str]:
    """What is wrong with the fleet, asking engines rather than the registry."""
    desk = world.coordinator.replicas
    problems = []
    if desk.sync.update_state is not UpdateState.IDLE or desk.sync.desired.is_paused:
        problems.append(f"the controller is {desk.sync.update_state}, paused: {desk.sync.desired.is_paused}")
    known = {replica.replica_id: replica for replica in desk.fleet.replicas}
    placeable = {replica.replica_id for replica in desk.fleet.placeable()}
    for process in world.processes.values():
        replica = known.pop(process.replica_id, None)
        if not process.is_alive:
            if replica is not None and replica.state not in (ReplicaState.QUARANTINED, ReplicaState.JOINING):
                problems.append(f"{process.replica_id} is dead and {replica.state}")
            continue
        if replica is None or replica.url != process.url or process.replica_id not in placeable:
            problems.append(f"{process.url} is {replica}")
            continue
        engine = process.engine
        if engine.weight_version != desk.weight_version or replica.weight_version != desk.weight_version:
            problems.append(f"{process.url} holds {engine.weight_version} where {desk.weight_version} is served")
        if engine.is_paused or not engine.is_usable:
            problems.append(f"{process.url} takes traffic, paused: {engine.is_paused}, usable: {engine.is_usable}")
    if known:
        problems.append(f"unknown replicas: {sorted(known)}")
    return problems


def version_problems(world: World) -> list[str]:
    """What is wrong with the version that the fleet has come to."""
    history, store = world.history, world.store
    version = world.coordinator.replicas.weight_version
    committed = {done for link in world.links.values() for done in link.commits}
    reported = max((report.version for report in history.reports), default=None)
    problems = []
    if version not in {0} | (history.pushed & committed):
        problems.append(f"the fleet serves {version}, which was never pushed and committed")
    if version is not None and reported is not None and version < reported:
        problems.append(f"the fleet serves {version}, but {reported} was reported")
    if history.served != sorted(history.served):
        problems.append(f"the fleet's version went back: {history.served}")
    saved = codec.decode(store.state.get(FLEET_WEIGHTS, codec.encode(FleetWeights())), FleetWeights)
    if version and (saved.served is None or saved.served.version < version or saved.pending is not None):
        problems.append(f"the fleet serves {version}, but a restart would go to {saved}")
    return problems


def check_records(world: World, num_accepted: int) -> None:
    """Every trajectory is there, once, and its spans tile what was sampled."""
    assert len(world.store.records) == num_accepted
    world.coordinator.rollouts.queue.check()
    for name, record in world.store.records.items():
        (path,) = record.paths
        at = [index for span in path.weight_versions for index in range(span.start, span.end)]
        assert at == [index for index, is_sampled in enumerate(path.response_mask) if is_sampled], name
        assert record.is_complete, name


def check_generation_history(world: World, sampled: Sampled) -> None:
    """The spans tile, name versions that were pushed, ever newer ones; greedy ids are those of these versions."""
    request, generation = sampled.request, sampled.generation
    end, last = 0, -1
    for span in generation.weight_versions:
        assert (span.start, span.version > last) == (end, True), (request.request_id, generation.weight_versions)
        assert span.version in world.history.pushed | {0}, (request.request_id, span)
        end, last = span.end, span.version
        if world.kv_policy is KVPolicy.RECOMPUTE:  # then every swap begins anew, with all KV of the new version
            context = (*request.token_ids, *generation.token_ids[: span.start])
            expected = POLICY.continuation(context, span.version, span.end - span.start)
            assert generation.token_ids[span.start : span.end] == expected, (request.request_id, span)
    assert end == len(generation.token_ids) == len(generation.logprobs), request.request_id
    world.history.counts["swapped in flight"] += len(generation.weight_versions) > 1


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_schedules(batch: int, checkpoint: Path) -> None:
    totals: Counter[str] = Counter()
    for seed in range(batch * NUM_SEEDS, (batch + 1) * NUM_SEEDS):
        try:
            totals += run_schedule(seed, checkpoint)
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
    # A harness in which nothing goes wrong proves nothing.
    for what in (
        *Fault,
        "update",
        "replica failed",
        "trainer died",
        "unreadable",
        "Conflict",
        "WeightUpdateFailed",
    ):
        assert totals[what] > 0, f"{what} never happened in {totals}"
    for what in ("_kill", "_crash", "operator paused", "aborted", "generate: engine_lost", "swapped in flight"):
        assert totals[what] > 0, f"{what} never happened in {totals}"
    for what in ("transfers", "one phase", "broken transfers", "relayed", "order refused", "commit refused"):
        assert totals[what] > 0, f"{what} never happened in {totals}"
    for what in ("slept 1", "slept 2", "sleep failed", "woke", "woken by new weights"):
        assert totals[what] > 0, f"{what} never happened in {totals}"


def test_a_schedule_can_be_run_again(checkpoint: Path) -> None:
    for seed in (3, 17, 59):
        assert run_schedule(seed, checkpoint) == run_schedule(seed, checkpoint)
