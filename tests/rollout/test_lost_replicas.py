"""Trajectories lose only the unreported tokens when replicas are lost. In virtual time."""

from __future__ import annotations

from pathlib import Path

from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import MemoryTag
from agentloop.engine.request_watch import ReportPace
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import PauseMode, StopReason
from tests.support.fleet.killed_replicas import (
    ROOM,
    TURN_S,
    CountingPolicy,
    Killer,
    long_turns,
    num_recorded,
    run_with_kills,
)
from tests.support.fleet.live_run import STEP_S, live_run, write_checkpoint


def test_trajectories_outlive_a_fleet_that_is_away(tmp_path: Path) -> None:
    """One engine is killed during all activities; another one starts 45 s later."""
    clock, policy = VirtualClock(), CountingPolicy()

    async def main() -> None:
        checkpoint = write_checkpoint(tmp_path)
        make = lambda clock: SimulatedEngine(ROOM, clock=clock, policy=policy)  # noqa: E731
        async with live_run(clock, checkpoint, num_engines=1, capacity=32, make_engine=make) as run:
            killer = Killer(run, make)
            await run.submit("r", 1, 64, long_turns(timeout_s=TURN_S + 5.0), None)
            await clock.sleep(TURN_S / 2)
            killer.kill("sim://a")
            await clock.sleep(45.0)
            await killer.start("b")
            await run.until_done("r")
            records = run.store.records.values()
            # A turn of random ids ends at its token limit unless a stop token comes first.
            assert {one.stop_reason for one in records} <= {StopReason.MAX_TOKENS_PER_TURN, StopReason.COMPLETED}
            assert all(one.is_complete and one.attempt == 0 for one in records)
            waited = [one for one in records if one.timings.unavailable_s]
            assert waited
            assert all(45.0 <= one.timings.unavailable_s < 55.0 for one in waited)
            num_wasted = policy.num_sampled - num_recorded(run)
            # Each trajectory loses at most the tokens of two seconds.
            assert 0 <= num_wasted <= len(waited) * (2.0 / STEP_S + 2)

    clock.run(main())


def test_a_kill_costs_the_seconds_that_were_not_reported(tmp_path: Path) -> None:
    """Every record is complete and exact; without reports, a kill would discard every turn on the replica."""
    loss, unreported = (run_with_kills(tmp_path, pace) for pace in (ReportPace(), ReportPace(1e9, 10**9)))
    assert len(loss.records) == 64
    assert all(one.is_complete for one in loss.records)
    assert loss.num_wasted <= loss.num_kills * 32 * (2.0 / STEP_S + 2)
    assert loss.num_wasted / loss.num_kills < unreported.num_wasted / unreported.num_kills / 8


def test_a_fleet_that_sleeps_costs_no_deadline(tmp_path: Path) -> None:
    clock, policy = VirtualClock(), CountingPolicy()

    async def main() -> None:
        checkpoint = write_checkpoint(tmp_path)
        make = lambda clock: SimulatedEngine(ROOM, clock=clock, policy=policy)  # noqa: E731
        async with live_run(clock, checkpoint, num_engines=2, capacity=16, make_engine=make) as run:
            await run.submit("r", 1, 32, long_turns(2, timeout_s=2 * TURN_S + 10.0), None)
            await clock.sleep(TURN_S / 3)
            await run.coordinator.replicas.sleep(1)
            await clock.sleep(600.0)
            await run.coordinator.replicas.wake(frozenset(MemoryTag))
            await clock.sleep(TURN_S / 3)
            await run.coordinator.replicas.pause(PauseMode.KEEP)
            await clock.sleep(600.0)
            await run.coordinator.replicas.resume()
            await run.until_done("r", 1000.0)
            records = run.store.records.values()
            assert {one.stop_reason for one in records} <= {StopReason.MAX_TURNS, StopReason.COMPLETED} | {
                StopReason.MAX_TOKENS_PER_TURN,
                StopReason.MAX_SAMPLED_TOKENS,
            }
            assert all(one.is_complete for one in records)
            assert sum(one.timings.unavailable_s > 1199.0 for one in records) >= 8
            assert policy.num_sampled == num_recorded(run)

    clock.run(main())
