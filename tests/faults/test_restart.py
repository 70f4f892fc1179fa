"""A coordinator that dies in the middle of a run: real workers, simulated engines, virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.concurrency.clock import VirtualClock
from agentloop.types import Lease, Limits, Message, RolloutGroup, RolloutTask
from tests.faults import checker
from tests.support.fleet.live_run import write_checkpoint
from tests.support.fleet.whole_world import WholeWorld

NUM_GROUPS, NUM_SAMPLES = 12, 4
NAMES = [f"r/g{group}/{sample}" for group in range(NUM_GROUPS) for sample in range(NUM_SAMPLES)]


def groups() -> tuple[RolloutGroup, ...]:
    limits = Limits(max_turns=5, max_tokens_per_turn=200, timeout_s=600.0)
    task = RolloutTask("task", (Message("user", "Take notes, please."),), ("note",), limits=limits)
    return tuple(RolloutGroup(f"g{number}", task, NUM_SAMPLES, "r") for number in range(NUM_GROUPS))


def held(world: WholeWorld) -> dict[str, Lease]:
    """Return the leases of the rollout's samples, as the coordinator holds them."""
    leases = {name: world.coordinator.replicas.balancer.lease_of(name) for name in NAMES}
    return {name: lease for name, lease in leases.items() if lease is not None}


@pytest.mark.parametrize("seed", range(3))
def test_workers_go_on_and_the_table_is_made_of_what_they_hold(tmp_path: Path, seed: int) -> None:
    clock = VirtualClock()
    folder, checkpoint = tmp_path / "world", tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.mkdir()

    async def main() -> None:
        world = WholeWorld(seed, clock, write_checkpoint(checkpoint), folder)
        # all workers report within this time, the slowest too
        world.config = replace(world.config, restart_grace_s=3.0)
        await world.start()
        await world.heal()
        beating = asyncio.create_task(world.heartbeat())
        await clock.sleep(1.0)
        if await world.needs_a_push():
            await world.push_until_done()
        rollout = asyncio.create_task(world.roll_out("r", groups()))
        while len(before := held(world)) < 2 or not world.ledger.delivered["r"]:
            await clock.sleep(0.05)
            assert not rollout.done()
        old = world.coordinator
        await world.crash_coordinator()
        assert world.coordinator is not old
        assert sum(one.engine.load().num_running for one in world.processes.values()) >= 1, "they sample meanwhile"
        assert held(world) == {}
        died_at = clock.now()
        while not (after := held(world)) or len(after) != sum(one.worker.num_running for one in world.workers):
            assert clock.now() - died_at < 5.0
            await clock.sleep(0.05)
        kept = after.items() & before.items()
        num_over = len(before) - sum(name in after for name in before)
        assert len(kept) == len(before) - num_over
        print(f"{len(before)} leases before, {len(kept)} kept, {num_over} of the holders ended meanwhile")
        assert len(kept) >= 1
        balancer = world.coordinator.replicas.balancer
        assert sum(balancer.kv_use(one.replica_id).predicted_tokens for one in world.processes.values()) > 0
        async with asyncio.timeout(600.0):
            await rollout
        await clock.sleep(3.0)
        records = world.ledger.delivered["r"]
        assert {(one.group_id, one.sample_index) for one in records} == {
            (f"g{group}", sample) for group in range(NUM_GROUPS) for sample in range(NUM_SAMPLES)
        }
        assert all(one.is_complete and not one.attempt and not one.num_resampled_turns for one in records)
        assert list(checker.lease_problems(world)) == []
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await world.close()

    clock.run(main())
