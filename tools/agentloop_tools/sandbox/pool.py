"""Sandboxes that are started before they are wanted, and deadlines for starts and the end, of any adapter."""

from __future__ import annotations

import asyncio
from collections import deque

from agentloop.errors import ToolLost
from agentloop_tools.sandbox.port import (
    DEFAULT_LIMITS,
    DEFAULT_SOURCE,
    Sandbox,
    Sandboxes,
    SandboxLimits,
    SandboxSource,
)

_PAUSE_S = 1.0  # after a start that failed
_CLOSE_ALL_S = 30.0


class WarmSandboxes:
    """Sandboxes of another maker, of which some wait: those of the source and limits that were asked for first."""

    def __init__(self, sandboxes: Sandboxes, *, num_warm: int, create_s: float = 60.0) -> None:
        """`create_s` bounds each start."""
        self._sandboxes = sandboxes
        self._num_warm = num_warm
        self._create_s = create_s
        self._wanted: tuple[SandboxSource, SandboxLimits] | None = None
        self._waiting: deque[Sandbox] = deque()
        self._filling: asyncio.Task[None] | None = None

    async def create(
        self, source: SandboxSource = DEFAULT_SOURCE, limits: SandboxLimits = DEFAULT_LIMITS
    ) -> Sandbox:
        self._wanted = self._wanted or (source, limits)
        if (source, limits) != self._wanted:
            return await self._create(source, limits)
        waiting = self._waiting.popleft() if self._waiting else None
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._fill(source, limits), name="warm sandboxes")
        return await self._create(source, limits) if waiting is None else waiting

    async def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        self._waiting.clear()  # their maker closes them
        async with asyncio.timeout(_CLOSE_ALL_S):
            await self._sandboxes.close()

    async def _fill(self, source: SandboxSource, limits: SandboxLimits) -> None:
        while len(self._waiting) < self._num_warm:
            try:
                self._waiting.append(await self._create(source, limits))
            except ToolLost:  # its reason is told where one is wanted
                await asyncio.sleep(_PAUSE_S)

    async def _create(self, source: SandboxSource, limits: SandboxLimits) -> Sandbox:
        try:
            async with asyncio.timeout(self._create_s):
                return await self._sandboxes.create(source, limits)
        except TimeoutError as error:
            raise ToolLost(f"no sandbox was started in {self._create_s:g} s") from error
