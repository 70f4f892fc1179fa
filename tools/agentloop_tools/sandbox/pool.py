"""A warm pool for the sandboxes of any adapter, with deadlines for starting and closing them."""

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

_PAUSE_S = 1.0  # after a failed start
_CLOSE_ALL_S = 30.0


class WarmSandboxes:
    """Sandboxes of another adapter, of which `num_warm` are started in advance.

    They have the source and the limits of the first request; other requests start a new sandbox.
    """

    def __init__(self, sandboxes: Sandboxes, *, num_warm: int, create_s: float = 60.0) -> None:
        """`create_s` is the timeout of each start."""
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
        self._waiting.clear()  # the adapter closes them
        async with asyncio.timeout(_CLOSE_ALL_S):
            await self._sandboxes.close()

    async def _fill(self, source: SandboxSource, limits: SandboxLimits) -> None:
        while len(self._waiting) < self._num_warm:
            try:
                self._waiting.append(await self._create(source, limits))
            except ToolLost:  # `create` raises the same error to its caller
                await asyncio.sleep(_PAUSE_S)

    async def _create(self, source: SandboxSource, limits: SandboxLimits) -> Sandbox:
        try:
            async with asyncio.timeout(self._create_s):
                return await self._sandboxes.create(source, limits)
        except TimeoutError as error:
            raise ToolLost(f"the sandbox did not start within {self._create_s:g} s") from error
