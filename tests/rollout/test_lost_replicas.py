"""What trajectories lose when replicas go: nothing but the tokens that were not reported. In virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.clock import VirtualClock
from agentloop.engine import MemoryTag, OnProgress
from agentloop.errors import EngineUnreachable
from agentloop.simulation.engine import SimulatedEngine
from agentloop.simulation.policy import HashPolicy, TokenStream
from agentloop.types import GenerateRequest, Generation, Limits, PauseMode, RolloutTask, StopReason
from tests.support.fleet.live_run import SPEC, STEP_S, LiveRun, live_run, talk, write_checkpoint

TURN_TOKENS = 900
TURN_S = TURN_TOKENS * STEP_S
ROOM = replace(SPEC, max_context_tokens=8192)


class CountingPolicy(HashPolicy):
    """Random ids, and how many were sampled in all."""

    def __init__(self) -> None:
        super().__init__(ROOM.vocab_size)
        self.num_sampled = 0

    def open(self, request: GenerateRequest) -> TokenStream:
        stream, policy = super().open(request), self

        class Counted:
            def __getattr__(self, name: str) -> object:
                return getattr(stream, name)

            def sample(self, state: int, weight_version: int) -> tuple[int, float]:
                policy.num_sampled += 1
                return stream.sample(state, weight_version)

        return Counted()  # type: ignore[return-value]


class Gone:
    """The port of a process that was killed."""

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        raise EngineUnreachable("connection refused")

    async def close(self) -> None:
        """There is nothing to close."""


@dataclass
class Killer:
    """Kills replicas of a run, and starts others in their place."""

    run: LiveRun
    policy: CountingPolicy

    def __post_init__(self) -> None:
        self.ports = self.run.engines  # what is connected to
        self.run.engines = dict(self.ports)  # what sends heartbeats

    def kill(self, url: str) -> None:
        self.run.engines.pop(url).kill("SIGKILL")
        self.ports[url] = Gone()

    async def start(self, name: str) -> None:
        engine = SimulatedEngine(ROOM, clock=self.run.clock, policy=self.policy)
        await engine.start()
        self.ports[f"sim://{name}"] = self.run.engines[f"sim://{name}"] = engine
        registration = ReplicaRegistration(name, f"sim://{name}", engine.info, engine.weight_version)
        await self.run.coordinator.replicas.register(registration)


def long_turns(num_turns: int = 1, timeout_s: float = 600.0) -> RolloutTask:
    limits = Limits(
        max_turns=num_turns,
        max_tokens_per_turn=TURN_TOKENS,
        max_sampled_tokens=num_turns * TURN_TOKENS,
        timeout_s=timeout_s,
    )
    return replace(talk(num_turns), limits=limits, seed=1)


def num_recorded(run: LiveRun) -> int:
    return sum(int(path.response_mask.sum()) for one in run.store.records.values() for path in one.paths)


def test_trajectories_outlive_a_fleet_that_is_away(tmp_path: Path) -> None:
    """One engine, killed in the middle of everything; another one is up 45 s later."""
    clock, policy = VirtualClock(), CountingPolicy()

    async def main() -> None:
        checkpoint = write_checkpoint(tmp_path)
        make = lambda clock: SimulatedEngine(ROOM, clock=clock, policy=policy)  # noqa: E731
        async with live_run(clock, checkpoint, num_engines=1, capacity=32, make_engine=make) as run:
            killer = Killer(run, policy)
            await run.submit("r", 1, 64, long_turns(timeout_s=TURN_S + 5.0), None)
            await clock.sleep(TURN_S / 2)
            killer.kill("sim://a")
            await clock.sleep(45.0)
            await killer.start("b")
            await run.until_done("r")
            records = run.store.records.values()
            # A turn of random ids ends at its limit of tokens, if no stop token came first.
            assert {one.stop_reason for one in records} <= {StopReason.MAX_TOKENS_PER_TURN, StopReason.COMPLETED}
            assert all(one.is_complete and one.attempt == 0 for one in records)
            waited = [one for one in records if one.timings.standstill_s]
            assert waited
            assert all(45.0 <= one.timings.standstill_s < 55.0 for one in waited)
            num_wasted = policy.num_sampled - num_recorded(run)
            # At most what two seconds sample is lost of each.
            assert 0 <= num_wasted <= len(waited) * (2.0 / STEP_S + 2)

    clock.run(main())


def test_a_kill_costs_the_seconds_that_were_not_reported(tmp_path: Path) -> None:
    """Two replicas, one of them killed every 10 s; turns take 18 s. Every record is whole and exact."""
    clock, policy, num_kills = VirtualClock(), CountingPolicy(), 0

    async def main() -> None:
        nonlocal num_kills
        checkpoint, random = write_checkpoint(tmp_path), Random(0)
        make = lambda clock: SimulatedEngine(ROOM, clock=clock, policy=policy)  # noqa: E731
        async with live_run(clock, checkpoint, num_workers=1, capacity=32, make_engine=make) as run:
            killer = Killer(run, policy)
            await run.submit("r", 1, 64, long_turns(2), None)
            done = asyncio.create_task(run.until_done("r", 2000.0))
            while not done.done():
                await clock.sleep(10.0)
                killer.kill(random.choice([url for url, one in run.engines.items()]))
                num_kills += 1
                await clock.sleep(5.0)
                await killer.start(f"n{num_kills}")
            records = run.store.records.values()
            assert len(records) == 64
            assert all(one.is_complete for one in records)
            num_wasted = policy.num_sampled - num_recorded(run)
            assert num_wasted <= num_kills * 32 * (2.0 / STEP_S + 2)

    clock.run(main())


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
            assert sum(one.timings.standstill_s > 1199.0 for one in records) >= 8
            assert policy.num_sampled == num_recorded(run)

    clock.run(main())
