"""The port to an engine's process: its calls, each with a deadline, and its statistics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from agentloop.engine.interface import MemoryTag
from agentloop.errors import AgentLoopError, EngineError
from agentloop_servers.engines.common.calls import EngineRequests

Translate = Callable[[Exception], AgentLoopError]
"""A function from an error of an engine's own code to ours."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The latest figures of an engine's scheduler; the totals are since its start."""

    num_waiting: int = 0
    num_kv_tokens: int = 0  # that requests hold
    num_steps: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0  # of prompts without a token given out
    slow_step_s: float = 0.0  # the slowest recent step (`slow_step_s`)


def slow_step_s(before_s: float, step_s: float) -> float:
    """Return the time of the slowest recent step, in seconds, after one of `step_s`; it decays by 10 % a step."""
    return max(step_s, 0.9 * before_s)


class EngineProcess(EngineRequests, Protocol):
    """One engine's process or processes. Every method has its own deadline, and raises our errors."""

    async def start(self) -> None:
        """Start the processes. Raises EngineError, with nothing left behind, if the engine does not come up."""

    def stats(self) -> EngineStats:
        """Return the latest figures. Never blocks."""

    async def check_health(self) -> None:
        """Raise EngineLost if the process is dead; works while paused."""

    async def pause(self, *, is_cache_cleared: bool) -> None:
        """Freeze between two tokens; returns once no step is under way."""

    async def clear_cache(self) -> None:
        """Drop all KV of the paused engine; frozen requests are prefilled again."""

    async def resume(self) -> None:
        """End a pause."""

    async def sleep(self, level: int, asleep: frozenset[MemoryTag]) -> None:
        """Give all memory of the paused engine back; `asleep` was given back before."""

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory back, and stay paused."""

    async def close(self) -> None:
        """End the processes and free everything. Idempotent."""


@contextlib.asynccontextmanager
async def engine_call(
    engine: str, translate: Translate, action: str, timeout_s: float | None = None
) -> AsyncIterator[None]:
    """Run a call to an engine under a deadline, and translate its errors to ours."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineError(f"{engine} did not answer a {action} in time") from error
    except Exception as error:
        raise translate(error) from error


def one_line(error: BaseException) -> str:
    """Return the error's last line: a worker's traceback has the cause there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
