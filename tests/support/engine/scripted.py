"""A worker over simulated engines that speak from a script, with the shipped policy's tokenizer and template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer

from agentloop.engine import Engine
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import Renderer
from agentloop.rollout.toolbox import Toolbox, load_tools
from agentloop.rollout.worker import Worker, WorkerConfig
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import ScriptedPolicy
from agentloop.types import Message, RolloutTask
from agentloop_tools import SHIPPED_TOOLS
from tests.support.fleet.feeder import Feeder

POLICY = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v1"
TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
RENDERER = Renderer.from_directory(POLICY)
SPEC = SimulatedSpec(vocab_size=RENDERER.vocab_size, max_context_tokens=2048, num_blocks=64_000, max_running=2048)


def ids(text: str) -> list[int]:
    """What a policy of this tokenizer samples for `text`, without the stop token."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def call(tool: str, **arguments: object) -> str:
    """A tool call as the policy writes it."""
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


def turns(*replies: str) -> Callable[[Sequence[int]], Sequence[int]]:
    """A script: the n-th turn of any trajectory says the n-th reply."""
    encoded = [ids(reply) for reply in replies]
    assistant = RENDERER.render([Message("user", "?")], [])[-3:]  # the generation prompt

    def script(prompt: Sequence[int]) -> Sequence[int]:
        said = sum(list(prompt[at : at + 3]) == assistant for at in range(len(prompt) - 2))
        return encoded[min(said, len(encoded)) - 1]

    return script


def scripted_engine(*replies: str, spec: SimulatedSpec = SPEC) -> SimulatedEngine:
    return SimulatedEngine(spec, policy=ScriptedPolicy(turns(*replies)))


def task(task_id: str = "t", **fields: object) -> RolloutTask:
    """A task for the calculator; `fields` override."""
    given = {"messages": (Message("user", "What is 2 + 3?"),), "tools": ("calculator",), "reward": "exact_match"}
    return RolloutTask(task_id=task_id, **{**given, "reference": "5", **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def running_worker(
    feeder: Feeder, engines: Mapping[str, Engine], renderer: Renderer = RENDERER, **config: object
):
    """A worker at work on what the feeder has, over started engines by URL."""
    for engine in engines.values():
        await engine.start()
    toolbox = Toolbox(load_tools(tuple(SHIPPED_TOOLS), SHIPPED_TOOLS))
    worker = Worker(
        "w",
        feeder,
        engines.__getitem__,
        renderer,
        get_parser("hermes"),
        toolbox,
        WorkerConfig(**{"poll_s": 0.05, "poll_gap_s": 0.001, **config}),  # type: ignore[arg-type]
        max_context_tokens=SPEC.max_context_tokens,
        vocab_size=RENDERER.vocab_size,
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
