"""Trajectories for replays: sampled one at a time by an engine in this process, and stored as a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from agentloop.api.coordinator import WorkerPort, assignment_id_of
from agentloop.engine.interface import Delta, Engine, OnProgress, TokenEngine
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.rollout.context import LoopContext
from agentloop.rollout.tool import Tool
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import RunParts, TrajectoryRun, WorkerConfig
from agentloop.types import (
    Assignment,
    GenerateRequest,
    Generation,
    Lease,
    RolloutTask,
    TokenPath,
    ToolCall,
    Trajectory,
)
from agentloop_servers.chat_format.load import ChatFormat, load_chat_format
from agentloop_servers.config.service import ChatSettings
from agentloop_verify.replay import Replay, ReplayReport, recorded_turns
from tests.support.fleet.calculator import calculator
from tests.support.transfer.adapters import POLICY

ROLLOUT = "r"


class Adds:
    """A loop that samples three turns, with a calculation after each but the last."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        for number in range(3):
            if number:
                await ctx.run_tools([ToolCall(f"call_{number}_0", "calculator", {"expression": f"40 + {number}"})])
            await ctx.sample(max_tokens=12)


class WithoutTools:
    """A loop that samples a turn and does not run the calculation of `Adds`."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=12)


@dataclass(frozen=True, slots=True)
class _Named:
    """An engine whose answers have its name, as a replica's have."""

    engine: Engine

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        generation = await self.engine.generate(request, on_progress)
        return replace(generation, engine=self.engine.info.name, replica_id="replica-0")

    def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        return self.engine.stream(request, on_progress)


class ReplayWorld:
    """Records and replays trajectories with one engine that serves the weights in `folder`."""

    def __init__(
        self,
        engine: Engine,
        folder: Path = POLICY,
        model: Path = POLICY,
        tool: Tool = calculator,
        worker: WorkerConfig | None = None,
    ) -> None:
        self.engine, self.folder, self.model, self.tool = engine, folder, model, tool
        self.worker = worker or WorkerConfig()

    @cached_property
    def chat(self) -> ChatFormat:
        return load_chat_format(self.model, ChatSettings())

    async def record(self, task: RolloutTask, sample: int = 0) -> Trajectory:
        toolbox, renderer = Toolbox([self.tool]), self.chat.renderer
        parts = RunParts(
            coordinator=cast(WorkerPort, None),
            connect=lambda url: cast(TokenEngine, _Named(self.engine)),
            renderer=renderer,
            reader=TurnReader(renderer, self.chat.parser, self.chat.name),
            toolbox=toolbox,
            config=self.worker,
            max_context_tokens=self.engine.info.max_context_tokens,
            vocab_size=renderer.vocab_size,
            placer=ImagePlacer(takes_images=False),
            reporter=LeaseReporter("", None),
        )
        name = assignment_id_of(ROLLOUT, task.task_id, sample)
        lease = Lease("", "replica-0", "")
        run = TrajectoryRun(parts, Assignment(name, task.task_id, sample, task, lease, rollout_id=ROLLOUT))
        record = (await run.to_record()).decoded()
        await toolbox.close()
        return record

    async def replay(
        self,
        record: Trajectory,
        task: RolloutTask,
        folders: Mapping[int, Path] | None = None,
        *,
        to_turn: int | None = None,
        runs_tools: bool = False,
    ) -> ReplayReport:
        version = self.engine.weight_version
        assert version is not None
        turns = dict([*recorded_turns(record).items()][:to_turn])
        return await Replay(
            record,
            task,
            turns,
            self.engine,
            self.chat,
            self.engine.info.max_context_tokens,
            {version: self.folder} if folders is None else folders,
            (version, self.folder),
            self.worker,
            [self.tool],
            runs_tools,
        ).run()


def with_path(record: Trajectory, change: Callable[[TokenPath], TokenPath]) -> Trajectory:
    """Return the record with a changed first path."""
    return replace(record, paths=(change(record.paths[0]), *record.paths[1:]))


def with_seeds(path: TokenPath, shift: int) -> TokenPath:
    """Return the path with other recorded seeds."""
    return replace(path, turns=tuple(replace(turn, seed=(turn.seed or 0) + shift) for turn in path.turns))


def with_tool_text(path: TokenPath, text: str) -> TokenPath:
    """Return the path with another text of its first tool result, whose tokens stay."""
    messages: Sequence = list(path.messages)
    index = next(at for at, message in enumerate(messages) if message.role == "tool")
    changed = (*messages[:index], replace(messages[index], content=text), *messages[index + 1 :])
    return replace(path, messages=changed)
