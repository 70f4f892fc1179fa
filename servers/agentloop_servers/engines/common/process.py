"""The interface to an engine's process: control calls with deadlines, and statistics."""

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
"""A function that converts an error of an engine's library to an agentloop error."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The latest statistics of an engine's scheduler. Totals count from its start."""

    num_waiting: int = 0
    num_kv_tokens: int = 0  # tokens whose KV running requests hold
    num_steps: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0  # prompt tokens of requests without an output token
    slow_step_s: float = 0.0  # duration of the slowest recent step (`slow_step_s`)


def slow_step_s(before_s: float, step_s: float) -> float:
    """Return the duration of the slowest recent step after a step of `step_s`; older ones decay by 10 % per
    step."""
    return max(step_s, 0.9 * before_s)


class EngineProcess(EngineRequests, Protocol):
    """One engine's process or processes. Every method has its own deadline and raises agentloop errors."""

    async def start(self) -> None:
        """Start the processes. Raises EngineError if the engine does not start; no process is left behind."""

    def stats(self) -> EngineStats:
        """Return the latest statistics. Never blocks."""

    async def check_health(self) -> None:
        """Raise EngineLost if the process is dead; works while paused."""

    async def pause(self, *, is_cache_cleared: bool) -> None:
        """Freeze all requests between two tokens; returns when no step is running."""

    async def clear_cache(self) -> None:
        """Drop all KV of the paused engine; frozen requests are prefilled again."""

    async def resume(self) -> None:
        """End a pause."""

    async def sleep(self, level: int, asleep: frozenset[MemoryTag]) -> None:
        """Release all memory of the paused engine; the memory in `asleep` is already released."""

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate released memory again, and stay paused."""

    async def close(self) -> None:
        """End the processes and free everything. Idempotent."""


@contextlib.asynccontextmanager
async def engine_call(
    engine: str, translate: Translate, action: str, timeout_s: float | None = None
) -> AsyncIterator[None]:
    """Run a call to an engine with a timeout, and convert its errors to agentloop errors."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        within = "in time" if timeout_s is None else f"within {timeout_s:g} s"
        raise EngineError(f"{engine} did not answer a {action} {within}") from error
    except Exception as error:
        raise translate(error) from error


def one_line(error: BaseException) -> str:
    """Return the last line of an error's text, which names the cause if the text is a worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
