"""Replicas of a live run that are killed in the middle of long turns; every sampled token is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import OnProgress
from agentloop.engine.request_watch import ReportPace
from agentloop.errors import EngineUnreachable
from agentloop.simulation.engine import SimulatedEngine
from agentloop.simulation.policy import HashPolicy, TokenStream
from agentloop.types import GenerateRequest, Generation, Limits, RolloutTask, Trajectory
from tests.support.fleet.live_run import SPEC, STEP_S, LiveRun, live_run, talk, write_checkpoint

TURN_TOKENS = 900
TURN_S = TURN_TOKENS * STEP_S
ROOM = replace(SPEC, max_context_tokens=8192)


class CountingPolicy(HashPolicy):
    """Samples random ids, and counts them."""

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
        """Do nothing: the process has ended."""


@dataclass
class Killer:
    """Kills replicas of a run, and starts replacements."""

    run: LiveRun
    make: Callable[[VirtualClock], SimulatedEngine]
    num_kills: int = 0

    def __post_init__(self) -> None:
        self.ports = self.run.engines  # ports that callers connect to
        self.run.engines = dict(self.ports)  # engines that send heartbeats

    def kill(self, url: str) -> None:
        self.run.engines.pop(url).kill("SIGKILL")
        self.ports[url] = Gone()
        self.num_kills += 1

    async def start(self, name: str) -> None:
        engine = self.make(self.run.clock)
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
    """Return the number of sampled tokens in all records."""
    return sum(int(path.response_mask.sum()) for one in run.store.records.values() for path in one.paths)


@dataclass(frozen=True)
class Loss:
    """The losses of a run with kills. `num_wasted`: tokens that engines sampled and that no record has."""

    records: tuple[Trajectory, ...]
    num_wasted: int
    num_kills: int


def run_with_kills(folder: Path, pace: ReportPace) -> Loss:
    """Run 64 trajectories of two turns of 18 s on two replicas in virtual time.

    Every 15 s one of them is killed, and rejoins 5 s later.
    """
    clock, policy, random = VirtualClock(), CountingPolicy(), Random(0)
    spec = replace(ROOM, pace=pace)

    def make(clock: VirtualClock) -> SimulatedEngine:
        return SimulatedEngine(spec, clock=clock, policy=policy)

    async def main() -> Loss:
        async with live_run(clock, write_checkpoint(folder), num_workers=1, capacity=32, make_engine=make) as run:
            killer = Killer(run, make)
            await run.submit("r", 1, 64, long_turns(2), None)
            done = asyncio.create_task(run.until_done("r", 2000.0))
            while not done.done():
                await clock.sleep(10.0)
                killer.kill(random.choice(list(run.engines)))
                await clock.sleep(5.0)
                await killer.start(f"n{killer.num_kills}")
            num_wasted = policy.num_sampled - num_recorded(run)
            records = tuple(run.store.records.values())
            return Loss(records, num_wasted, killer.num_kills)

    return clock.run(main())
