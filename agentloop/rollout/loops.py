"""Agent loops: the code that drives a trajectory. A loop is any object with `async def run(self, task, ctx)`.

Tasks select a built-in loop by name and any other loop by import path (`my_package.my_loop:MyLoop`): an object, or
a class whose constructor needs no arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

from agentloop.errors import InvalidRequest
from agentloop.plugins import made, resolve
from agentloop.rollout.context import LoopContext
from agentloop.types import Message, RolloutTask


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


SUMMARY_REQUEST = (
    "The context is nearly full. Write a summary with everything that you need to finish the task: completed "
    "steps, results, and remaining steps. The summary replaces this conversation."
)


class ToolLoop:
    """Samples a turn, runs its tool calls, and repeats until a turn has no call.

    After a turn without a call the environment's user, if there is one, may reply, which continues the
    conversation.

    With `compacts_at`, a share of the context limit, the policy writes a summary once its context has this size.
    The conversation then continues from the task's messages and the summary. The summary is a turn of the
    trajectory, and is trained like the others. Leave room for one tool response and the summary.
    """

    def __init__(self, *, compacts_at: float | None = None) -> None:
        """Raises InvalidRequest unless `compacts_at` is None or between 0 and 1."""
        if compacts_at is not None and not 0 < compacts_at < 1:
            raise InvalidRequest(f"compacts_at is {compacts_at}: expected a share between 0 and 1", param="loop")
        self._compacts_at = compacts_at

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Sample turns and run tools until the policy answers without a call."""
        await ctx.sample()
        await self.resume(task, ctx)

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        """Run the calls of the last turn and continue sampling."""
        while True:
            if self._wrote_summary(ctx):
                # A call in the summary turn is not run: the conversation that made it has ended.
                summary = Message("user", f"Summary of the work so far:\n{ctx.last_turn.content}")
                ctx.replace_history(*task.messages, summary)
            elif ctx.last_turn.calls:
                await ctx.run_tools(ctx.last_turn.calls)
                self._request_summary(ctx)
            elif await ctx.react():
                self._request_summary(ctx)
            else:
                return
            await ctx.sample()

    def _request_summary(self, ctx: LoopContext) -> None:
        limit = ctx.budget.max_context_tokens
        if self._compacts_at is not None and ctx.path.num_context_tokens >= self._compacts_at * limit:
            ctx.observe(Message("user", SUMMARY_REQUEST))

    def _wrote_summary(self, ctx: LoopContext) -> bool:
        # Read from the messages, because a worker that resumes the trajectory has no other state of the loop.
        return self._compacts_at is not None and ctx.messages[-2:-1] == (Message("user", SUMMARY_REQUEST),)


SHIPPED_LOOPS: dict[str, Callable[[], AgentLoop]] = {
    "single_turn": SingleTurn,
    "tool_loop": ToolLoop,
    "compacting_tool_loop": partial(ToolLoop, compacts_at=0.7),
}


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
        raise InvalidRequest(
            f"the loop {name} has no method run(task, ctx): add it, as in agentloop.rollout.loops", param="loop"
        )
    return cast(AgentLoop, loop)
