"""Agent loops: how a trajectory unfolds. A loop is any object with `async def run(self, task, ctx)`.

Shipped ones have names; a task may name any other by import path (`my_package.my_loop:MyLoop`), a class that is
called without arguments or an object.
"""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

from agentloop.errors import InvalidRequest
from agentloop.plugins import made, resolve
from agentloop.rollout.context import LoopContext
from agentloop.types import RolloutTask


class AgentLoop(Protocol):
    """The way in which trajectories unfold. One object serves all of a worker's: keep state in local variables."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Drive one trajectory: sample, run tools, observe. Returning completes it; limits end it by
        themselves, as LimitReached out of `ctx.sample` or `ctx.run_tools`; another exception makes it a failed
        record."""


@runtime_checkable
class ResumableLoop(AgentLoop, Protocol):
    """A loop whose trajectory continues at its last finished turn if its worker dies; others begin again."""

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Go on as `run` does after the `ctx.sample` that returned `ctx.last_turn`; here or in another process.

        Messages, tokens, budget, deadline and score are as they were at that moment. What the loop itself did after
        it (messages observed, rewards set) it does again. `run_tools` gives the answers that there were without
        running those calls again; a call whose answer was not kept runs, perhaps for the second time.
        """


class SingleTurn:
    """One prompt, one answer; tools may be declared but are not run."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Sample one turn and stop."""
        await ctx.sample()

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Do nothing: the one turn was sampled."""


class ToolLoop:
    """The usual agent: sample, run the tools it called, repeat until it answers without a call.

    An environment's user then may go on with the conversation.
    """

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Sample and run tools until the policy answers."""
        await ctx.sample()
        await self.resume(task, ctx)

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Go on after a turn: run what it called, and sample the next one."""
        while ctx.last_turn.calls or await ctx.react():
            if ctx.last_turn.calls:
                await ctx.run_tools(ctx.last_turn.calls)
            await ctx.sample()


SHIPPED_LOOPS: dict[str, type[AgentLoop]] = {"single_turn": SingleTurn, "tool_loop": ToolLoop}


def load_loop(name: str) -> AgentLoop:
    """Return the loop of a name or an import path. Raises InvalidRequest (`param="loop"`) for anything else."""
    if name in SHIPPED_LOOPS:
        return SHIPPED_LOOPS[name]()
    if ":" not in name:
        raise InvalidRequest(
            f"unknown loop {name!r}: shipped are {', '.join(sorted(SHIPPED_LOOPS))}; "
            "your own is named by import path, my_package.my_loop:MyLoop",
            param="loop",
        )
    found = resolve(name, param="loop")
    loop = made(found, f"{name} cannot be constructed", param="loop") if isinstance(found, type) else found
    if not callable(getattr(loop, "run", None)):
        raise InvalidRequest(f"{name} has no method run(task, ctx)", param="loop")
    return cast(AgentLoop, loop)
