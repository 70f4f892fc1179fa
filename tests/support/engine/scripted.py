"""Simulated engines that follow a script, with the shipped policy's tokenizer and template."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentloop.rendering.renderer import TemplateRenderer
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.types import Message
from tests.support.engine.policies import ScriptedPolicy

POLICY = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v1"
TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
RENDERER = TemplateRenderer.from_directory(POLICY)
SPEC = SimulatedSpec(vocab_size=RENDERER.vocab_size, max_context_tokens=2048, num_blocks=64_000, max_running=2048)


def ids(text: str) -> list[int]:
    """Return the ids that a policy of this tokenizer samples for `text`, without the stop token."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def call(tool: str, **arguments: object) -> str:
    """Return a tool call as the policy writes it."""
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


def turns(*replies: str) -> Callable[[Sequence[int]], Sequence[int]]:
    """Return a script: the n-th turn of any trajectory gets the n-th reply."""
    encoded = [ids(reply) for reply in replies]
    assistant = RENDERER.render([Message("user", "?")], [])[-3:]  # the generation prompt

    def script(prompt: Sequence[int]) -> Sequence[int]:
        said = sum(list(prompt[at : at + 3]) == assistant for at in range(len(prompt) - 2))
        return encoded[min(said, len(encoded)) - 1]

    return script


def scripted_engine(
    *replies: str, decode_s: float = 0.0, spec: SimulatedSpec = SPEC, **options: Any
) -> SimulatedEngine:
    """Return an engine whose n-th turn of a conversation gets the n-th reply; without replies, hashed ids."""
    spec = replace(spec, latency=LatencyModel(decode_s=decode_s)) if decode_s else spec
    policy = ScriptedPolicy(turns(*replies)) if replies else None
    return SimulatedEngine(spec, policy=policy, **options)


@asynccontextmanager
async def started(engine: SimulatedEngine) -> AsyncIterator[SimulatedEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
