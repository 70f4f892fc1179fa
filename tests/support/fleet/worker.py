"""A running worker, with its trajectories in its own process or in others, and tasks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager

from agentloop.engine.interface import Engine
from agentloop.observability.metrics import MetricsTally
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rollout.tool import Tool
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop.types import Message, RolloutTask
from tests.support.engine.scripted import RENDERER, SPEC
from tests.support.fleet.calculator import calculator
from tests.support.fleet.fake_coordinator import FakeCoordinator


def task(task_id: str = "t", **fields: object) -> RolloutTask:
    """A task for the calculator; `fields` override."""
    given = {"messages": (Message("user", "What is 2 + 3?"),), "tools": ("calculator",), "reward": "exact_match"}
    return RolloutTask(task_id=task_id, **{**given, "reference": "5", **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def running_worker(
    coordinator: FakeCoordinator,
    engines: Mapping[str, Engine],
    renderer: TemplateRenderer = RENDERER,
    tools: Sequence[Tool] = (),
    *,
    takes_images: bool = False,
    journal: TurnJournal | None = None,
    tally: MetricsTally | None = None,
    **config: object,
):
    """Run a worker on the coordinator's tasks, over started engines by URL, with optional additional tools."""
    for engine in engines.values():
        await engine.start()
    toolbox = Toolbox([calculator, *tools])
    worker = Worker(
        "w",
        coordinator,
        engines.__getitem__,
        renderer,
        get_parser("hermes"),
        toolbox,
        WorkerConfig(**{"poll_s": 0.05, "poll_gap_s": 0.001, **config}),  # type: ignore[arg-type]
        max_context_tokens=SPEC.max_context_tokens,
        vocab_size=renderer.vocab_size,
        takes_images=takes_images,
        journal=journal,
        tally=tally,
    )
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.close()
        await running
        await toolbox.close()
        for engine in engines.values():
            await engine.close()
