"""Agent loops: the code that drives a trajectory. A loop is any object with `async def run(self, task, ctx)`.

Tasks select a built-in loop by name and any other loop by import path (`my_package.my_loop:MyLoop`): an object, or
a class whose constructor needs no arguments.
"""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

from agentloop.errors import InvalidRequest
from agentloop.plugins import made, resolve
from agentloop.rollout.context import LoopContext
from agentloop.types import RolloutTask


class AgentLoop(Protocol):
    """Drives trajectories. All trajectories of a worker share one object: keep state in local variables."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Drive one trajectory: sample turns, run tools, append messages.

        The trajectory is complete when `run` returns. At a limit, `ctx.sample` or `ctx.run_tools` raises
        LimitReached: do not catch it. Any other exception is recorded as a failure.
        """


@runtime_checkable
class ResumableLoop(AgentLoop, Protocol):
    """A loop that can resume a trajectory at its last finished turn after its worker is lost.

    With any other loop the trajectory restarts from its first turn.
    """

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Continue like `run` after the `ctx.sample` that returned `ctx.last_turn`, possibly in another process.

        Messages, tokens, budget, deadline and score are restored to that moment. The loop must repeat its own later
        steps (messages it added, rewards it set). `ctx.run_tools` returns journaled results without running those
        calls again; a call without a journaled result runs, possibly for the second time.
        """


class SingleTurn:
    """Samples one turn. The task's tools are in the prompt, but their calls are not run."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Sample one turn."""
        await ctx.sample()

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Do nothing: the only turn is already sampled."""


class ToolLoop:
    """Samples a turn, runs its tool calls, and repeats until a turn has no call.

    After a turn without a call the environment's user, if there is one, may reply, which continues the
    conversation.
    """

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Sample turns and run tools until the policy answers without a call."""
        await ctx.sample()
        await self.resume(task, ctx)

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Run the calls of the last turn and continue sampling."""
        while ctx.last_turn.calls or await ctx.react():
            if ctx.last_turn.calls:
                await ctx.run_tools(ctx.last_turn.calls)
            await ctx.sample()


SHIPPED_LOOPS: dict[str, type[AgentLoop]] = {"single_turn": SingleTurn, "tool_loop": ToolLoop}


def load_loop(name: str) -> AgentLoop:
    """Return the loop with this name or import path. Raises InvalidRequest with param "loop"."""
    if name in SHIPPED_LOOPS:
        return SHIPPED_LOOPS[name]()
    if ":" not in name:
        raise InvalidRequest(
            f"unknown loop {name!r}: expected {', '.join(map(repr, sorted(SHIPPED_LOOPS)))} or an import path such "
            "as 'my_package.my_loop:MyLoop'",
            param="loop",
        )
    target = resolve(name, param="loop")
    loop = made(target, f"cannot construct the loop {name}", param="loop") if isinstance(target, type) else target
    if not callable(getattr(loop, "run", None)):
        raise InvalidRequest(f"the loop {name} has no method run(task, ctx)", param="loop")
    return cast(AgentLoop, loop)
