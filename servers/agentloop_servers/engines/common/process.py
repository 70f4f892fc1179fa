"""An engine's process as its engine drives it: calls with a deadline, statistics, and what is asked of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from agentloop.engine import MemoryTag
from agentloop.errors import AgentLoopError, EngineError
from agentloop_servers.engines.common.calls import EngineRequests

Translate = Callable[[Exception], AgentLoopError]
"""Gives our error for one that an engine's own code raised."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The latest figures of an engine's scheduler; the totals are since its start."""

    num_waiting: int = 0
    num_kv_tokens: int = 0  # that requests hold
    num_steps: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0  # of prompts that it knows and has given out no token of


class EngineProcess(EngineRequests, Protocol):
    """One engine's process or processes. Every method has its own deadline, and raises our errors."""

    async def start(self) -> None:
        """Raises EngineError if the engine does not come up; nothing is left behind then."""

    def stats(self) -> EngineStats:
        """Return the latest figures. Never blocks."""

    async def check_health(self) -> None:
        """Raises EngineLost if it is dead; works while paused."""

    async def pause(self, *, is_cache_cleared: bool) -> None:
        """Freeze between two tokens; returns once no step is under way."""

    async def clear_cache(self) -> None:
        """Drop all KV, that of frozen requests too: they are prefilled again. It is paused."""

    async def resume(self) -> None:
        """Go on."""

    async def sleep(self, level: int, asleep: frozenset[MemoryTag]) -> None:
        """Give all memory back; `asleep` is what was given back before. It is paused."""

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory back, and stay paused."""

    async def close(self) -> None:
        """End the processes and free everything. Idempotent."""


@contextlib.asynccontextmanager
async def engine_call(
    engine: str, translate: Translate, action: str, timeout_s: float | None = None
) -> AsyncIterator[None]:
    """Make a call to an engine, under a deadline; what it raises becomes ours."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineError(f"{engine} did not answer a {action} in time") from error
    except Exception as error:
        raise translate(error) from error


def one_line(error: BaseException) -> str:
    """Return the error's last line, which is where a worker's traceback names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
