"""Loops that fail in every way in which user code can, and a tool that records its calls."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from agentloop.rollout.context import LoopContext
from agentloop.rollout.tool import ToolSpec
from agentloop.types import JSON, Message, RolloutTask


class Raises:
    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        raise ValueError("a bug: caf\udce9")


class Exits:
    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        sys.exit("enough")


class Groups:
    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        raise BaseExceptionGroup("two at once", [KeyError("x"), SystemExit(1)])


class Swallows:
    """Ignores its cancellation and its deadline for a while."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        until = asyncio.get_running_loop().time() + 20.0
        while (left_s := until - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left_s)
            except BaseException:
                continue


class Unencodable:
    """Its record cannot be encoded: a message is not valid text, and was not sampled."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        ctx.observe(Message("user", "caf\udce9"))


class Forgets:
    """Leaves a background task that continues sampling."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        raise asyncio.CancelledError


class CannotBeMade:
    def __init__(self) -> None:
        raise SystemExit(3)


POISONS = tuple(
    f"{__name__}:{one.__name__}" for one in (Raises, Exits, Groups, Swallows, Unencodable, Forgets, CannotBeMade)
)


@dataclass(slots=True)
class Noted:
    """One call of the tool."""

    trajectory_id: str
    key: str
    begun_at: float
    ended_at: float = inf


class NoteTool:
    """A tool that answers with its key after a while, and records every call (a Tool)."""

    has_state = False

    def __init__(self, pause_s: float) -> None:
        self.calls: list[Noted] = []
        self.without_snapshot: set[str] = set()  # trajectories that restart if their worker dies
        self._pause_s = pause_s

    @property
    def spec(self) -> ToolSpec:
        text: Mapping[str, Any] = {"type": "string"}
        schema = {"type": "object", "properties": {"key": text}, "required": ["key"]}
        return ToolSpec("note", "Record a key.", schema, timeout_s=5.0, has_state=self.has_state)

    def open_session(self, trajectory_id: str, seed: int) -> _Noting:
        return _Noting(self, trajectory_id)

    async def note(self, trajectory_id: str, key: str) -> str:
        now = asyncio.get_running_loop().time
        call = Noted(trajectory_id, key, now())
        self.calls.append(call)
        await asyncio.sleep(self._pause_s)
        call.ended_at = now()
        return f"noted {key}"

    async def close(self) -> None:
        return None


class _Noting:
    def __init__(self, tool: NoteTool, trajectory_id: str) -> None:
        self._tool = tool
        self._trajectory_id = trajectory_id

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        return await self._tool.note(self._trajectory_id, str(arguments["key"]))

    async def close(self) -> None:
        return None


FIRST_STATE = "new"  # initial state of sessions


class ChainTool(NoteTool):
    """A NoteTool whose sessions have random state. An answer has the states before and after its call."""

    has_state = True

    def open_session(self, trajectory_id: str, seed: int) -> _Chain:
        return _Chain(self, trajectory_id)


class _Chain(_Noting):
    state = FIRST_STATE

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        answer, before = await super().call(arguments), self.state
        self.state = f"{random.getrandbits(64):016x}"
        return f"{answer}: {before} {self.state}"

    async def snapshot(self) -> bytes:
        self._fail_sometimes()
        return self.state.encode()

    async def restore(self, state: bytes) -> None:
        self._fail_sometimes()
        self.state = state.decode()

    def _fail_sometimes(self) -> None:
        if random.random() < 0.05:
            self._tool.without_snapshot.add(self._trajectory_id)
            raise OSError("injected: no room for the state")
