"""The whole service except HTTP, in virtual time: a coordinator, simulated engines, real workers, and a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from logging import CRITICAL
from pathlib import Path
from random import Random
from typing import Any

import structlog

from agentloop.api.coordinator import ReplicaRegistration, ReplicaReport
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import OnProgress, TokenEngine, WeightUpdate
from agentloop.parsers.by_name import get_parser
from agentloop.rollout.context import LoopContext
from agentloop.rollout.loops import ToolLoop
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.worker import Worker
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    Limits,
    Message,
    RolloutGroup,
    RolloutTask,
    SamplingParams,
    StalenessLimit,
)
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import RENDERER, turns
from tests.support.fleet.memory_store import MemoryStore

STEP_S = 0.02
PAUSE_S = 5.0
SPEC = SimulatedSpec(
    vocab_size=RENDERER.vocab_size,
    max_context_tokens=2048,
    num_blocks=8192,
    latency=LatencyModel(prefill_s=STEP_S, decode_s=STEP_S),
)
REPLIES = ("Let me think about that for a while.", "Perhaps it is five, but I am not sure.", "The answer is 5.")
_SILENT = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))


COMPACTING = ToolLoop(compacts_at=0.25)


class Talk:
    """A loop with as many turns as the task allows, and a pause between two turns."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        rng = Random(ctx.trajectory_id)
        for turn in range(task.limits.max_turns):
            if turn:
                await asyncio.sleep(rng.uniform(0.0, 0.2))
                ctx.observe(Message("user", "Are you sure?"))
            await ctx.sample()


class TalkSlowly:
    """Like `Talk`, with `PAUSE_S` between two turns."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        for _ in range(task.limits.max_turns - 1):
            await asyncio.sleep(PAUSE_S)
            ctx.observe(Message("user", "Are you sure?"))
            await ctx.sample()


class ListeningEngine(SimulatedEngine):
    """Records every request and its answer."""

    def __init__(self, clock: VirtualClock, num_blocks: int = SPEC.num_blocks) -> None:
        spec = replace(SPEC, num_blocks=num_blocks)
        super().__init__(spec, clock=clock, policy=ScriptedPolicy(turns(*REPLIES)))
        self.served: list[tuple[GenerateRequest, Generation]] = []

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        generation = await super().generate(request, on_progress)
        self.served.append((request, generation))
        return generation


@dataclass
class LiveRun:
    """A live run, see `live_run`. `engines` is by URL. Tests may use all public fields."""

    clock: VirtualClock
    coordinator: Coordinator
    store: MemoryStore
    engines: dict[str, Any]  # engines that send heartbeats; made by `make_engine`
    workers: list[Worker]
    checkpoint: str
    updates: list[tuple[int, float]] = field(default_factory=list)  # (version, time of its commit)

    async def submit(
        self, rollout_id: str, num_groups: int, num_samples: int, task: RolloutTask, limit: StalenessLimit | None
    ) -> int:
        groups = [RolloutGroup(f"g{n}", task, num_samples, rollout_id, limit) for n in range(num_groups)]
        return (await self.coordinator.rollouts.submit(rollout_id, tuple(groups))).num_accepted

    async def update(self, version: int, kv_policy: KVPolicy = KVPolicy.RECOMPUTE) -> None:
        await self.coordinator.replicas.update_weights(WeightUpdate(version, self.checkpoint), kv_policy)
        self.updates.append((version, self.clock.now()))

    async def until_done(self, rollout_id: str, timeout_s: float = 300.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not (await self.coordinator.rollouts.read(rollout_id, 1 << 40, 1, 1.0)).status.is_done:
                pass


def write_checkpoint(folder: Path) -> Path:
    """Write a directory of weights that a simulated engine accepts."""
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def talk(max_turns: int = 3, loop: str = "Talk", max_tokens_per_turn: int = 1024) -> RolloutTask:
    """Return a task that any worker of a live run can execute."""
    limits = Limits(max_turns=max_turns, max_tokens_per_turn=max_tokens_per_turn)
    messages = (Message("user", "What is 2 + 3? Please explain at some length how you came to your answer."),)
    return RolloutTask("t", messages, loop=f"tests.support.fleet.live_run:{loop}", limits=limits)


async def sample_one(engine: TokenEngine) -> None:
    """Check that an engine samples."""
    await engine.generate(GenerateRequest("probe", (1,), SamplingParams(max_tokens=1), 5.0))


@asynccontextmanager
async def live_run(
    clock: VirtualClock,
    checkpoint: Path,
    *,
    num_engines: int = 2,
    num_workers: int = 2,
    capacity: int = 6,
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE,
    store: MemoryStore | None = None,
    make_engine: Callable[[VirtualClock], SimulatedEngine] | None = None,
) -> AsyncIterator[LiveRun]:
    """Start a service; stop and check it at the end."""
    make = ListeningEngine if make_engine is None else make_engine
    engines: dict[str, Any] = {f"sim://{name}": make(clock) for name in "abcdef"[:num_engines]}
    store = MemoryStore() if store is None else store
    config = CoordinatorConfig(heartbeat_interval_s=0.25, kv_policy=kv_policy)
    coordinator = Coordinator(
        store, engines.__getitem__, config, clock, log=_SILENT, probe=lambda url: sample_one(engines[url])
    )
    await coordinator.start()
    for url, engine in engines.items():
        await engine.start()
        registration = ReplicaRegistration(url.removeprefix("sim://"), url, engine.info, engine.weight_version)
        await coordinator.replicas.register(registration)
    toolbox = Toolbox([])
    worker_config = WorkerConfig(capacity, poll_s=1.0, kv_policy=kv_policy)
    workers = [
        Worker(
            f"w{number}",
            coordinator.rollouts,
            engines.__getitem__,
            RENDERER,
            get_parser("hermes"),
            toolbox,
            worker_config,
            max_context_tokens=SPEC.max_context_tokens,
            vocab_size=SPEC.vocab_size,
        )
        for number in range(num_workers)
    ]
    run = LiveRun(clock, coordinator, store, engines, workers, str(checkpoint))
    async with asyncio.TaskGroup() as group:
        heart = group.create_task(_heartbeat(run))
        for worker in workers:
            group.create_task(worker.run())
        try:
            yield run
        finally:
            heart.cancel()
            for worker in workers:
                worker.close()
    await coordinator.check_health()
    coordinator.rollouts.queue.check()
    await toolbox.close()
    await coordinator.close()
    for engine in engines.values():
        await engine.close()


async def _heartbeat(run: LiveRun) -> None:
    while True:
        for url, engine in run.engines.items():
            report = ReplicaReport(engine.load(), engine.is_usable, engine.is_paused, engine.asleep)
            await run.coordinator.replicas.heartbeat(url.removeprefix("sim://"), report)
        await run.clock.sleep(0.25)
