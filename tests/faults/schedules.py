"""One seeded schedule of faults over the whole service, from its start to the checks of the resulting state."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path

from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import ALL_MEMORY
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.types import Trajectory
from tests.faults import checker
from tests.support.fleet.adapter_world import AdapterWorld
from tests.support.fleet.batch_world import BatchWorld
from tests.support.fleet.live_run import write_checkpoint
from tests.support.fleet.turns_world import TurnsWorld
from tests.support.fleet.whole_world import WholeWorld, make_groups

MAX_HEALING_S = 120.0
FOUND_SEEDS: tuple[int, ...] = (24, 29, 104, 119, 131, 199, 385, 675, 732, 3125, 7459, 8919)
"""Schedules that found a fault before clients had words: they run without words."""
FIRST_OF_ADAPTERS = 1_000_000
"""Schedules from this seed on have adapters by name instead of updates."""
FIRST_OF_BATCHES = 2_000_000
"""In schedules from this seed on, clients are trainers that consume batches, and carry or end unfinished groups."""
FIRST_OF_TURNS = 3_000_000
"""In schedules from this seed on, the service has a second model, and both share their accelerators in turns."""
NUM_SESSIONS = 3
MAX_SWALLOWED_S = 30.0
MAX_THREAD_END_S = 10.0
POISON_SHARES = (0.0, 0.0, 0.3)


def run_schedule(seed: int) -> Counter[str]:
    """Run one schedule and check the resulting state. Returns its events. Raises AssertionError."""
    clock, shared = VirtualClock(), random.getstate()
    threads = set(threading.enumerate())
    folder = Path(tempfile.mkdtemp(prefix="schedule-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    random.seed(seed)  # the waits between attempts depend on it
    try:
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        given = clock, write_checkpoint(checkpoint), folder
        if seed >= FIRST_OF_TURNS:
            world: WholeWorld = TurnsWorld(seed, *given)
        elif seed >= FIRST_OF_BATCHES:
            world = BatchWorld(seed, *given, has_words=True)
        elif seed >= FIRST_OF_ADAPTERS:
            world = AdapterWorld(seed, *given)
        else:
            world = WholeWorld(seed, *given, has_words=seed not in FOUND_SEEDS)
        counts = clock.run(_schedule(world))
        left = set(threading.enumerate()) - threads
        for thread in left:
            thread.join(MAX_THREAD_END_S)  # a stopped thread may need a moment on a busy host
        assert not any(thread.is_alive() for thread in left), f"threads are left: {left}"
        return counts
    finally:
        random.setstate(shared)
        shutil.rmtree(folder)


async def _schedule(world: WholeWorld) -> Counter[str]:
    await world.start()
    rng = world.rng
    try:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(world.heartbeat(), name="lasting")
            poison_share = rng.choice(POISON_SHARES)
            clients = [
                group.create_task(
                    world.roll_out(name, make_groups(rng, name, poison_share, has_compactions=world.has_words))
                )
                for name in ("r1", "r2")
            ]
            clients += [
                group.create_task(world.talk(f"s{number}")) for number in range(rng.randint(0, NUM_SESSIONS))
            ]
            if world.has_words:
                clients.append(group.create_task(world.talk_alike("alike")))
                clients.append(group.create_task(world.talk_in_parts("parts")))
            trouble = [group.create_task(call) for call in (world.train(), world.operate(), world.befall())]
            await world.clock.sleep(world.trouble_s)
            await world.heal()
            await asyncio.wait(trouble)
            await world.heal()
            await world.resume()
            await world.wake(ALL_MEMORY)
            if await world.needs_a_push():
                await world.push_until_done()
            await _until_quiet(world, clients)
            beating.cancel()
        stored = await _stored(world)
        problems = [
            *checker.record_problems(world, stored),
            *checker.keep_problems(world, stored),
            *checker.token_problems(world, stored),
            *checker.staleness_problems(world, stored),
            *checker.tool_problems(world),
            *checker.state_problems(stored),
        ]
        assert not problems, "; ".join(problems)
        world.coordinator.rollouts.queue.check()
    finally:
        await world.close()
    assert world.network.errors == []
    assert world.wire.problems == []
    await world.clock.sleep(MAX_SWALLOWED_S)  # user code that ignores its cancellation is only waited for
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leaked, f"tasks are left: {leaked}"
    return world.counts() + _told(stored)


async def _until_quiet(world: WholeWorld, clients: list[asyncio.Task[None]]) -> None:
    """Wait until the service is healthy, and check that it stays healthy.

    Raises AssertionError with the problem.
    """
    deadline = world.clock.now() + MAX_HEALING_S
    num_quiet = 0
    while num_quiet < 4:
        await world.clock.sleep(0.5)
        if await world.needs_a_push():  # a late update brought weights that no replica can pass on
            await world.push_until_done()
        problems = [
            *checker.fleet_problems(world),
            *(problem for model in world.models for problem in checker.version_problems(model)),
            *checker.lease_problems(world),
            *await checker.restart_problems(world),
            *(checker.file_problems(world) if all(client.done() for client in clients) else ()),
        ]
        num_waiting = sum(not client.done() for client in clients)
        if num_waiting:
            problems.append(f"{num_waiting} clients still wait")
        num_quiet = 0 if problems else num_quiet + 1
        assert world.clock.now() < deadline, f"not well after {MAX_HEALING_S:g} s: {'; '.join(problems)}"


async def _stored(world: WholeWorld) -> dict[str, list[Trajectory]]:
    """Return every record in the run's store, by rollout, as another process reads it."""
    reader = TrajectoryReader(world.store_path)
    try:
        return {name: [record for _, record in reader.read(name, 0, 1 << 20)] for name in reader.rollouts()}
    finally:
        reader.close()


def _told(stored: dict[str, list[Trajectory]]) -> Counter[str]:
    records = [record for records in stored.values() for record in records]
    told = Counter(f"ended: {record.stop_reason}" for record in records)
    told["begun again"] = sum(record.attempt > 0 for record in records)
    told["resumed turns"] = sum(record.num_resumed_turns for record in records)
    told["resampled turns"] = sum(record.num_resampled_turns for record in records)
    mixed = [path for record in records for path in record.paths if len(path.weight_versions) > len(path.turns)]
    told["swapped in flight"] = len(mixed)
    links = [path.lineage for record in records for path in record.paths if path.lineage is not None]
    told += Counter(f"path {link.kind}" for link in links)
    return told
