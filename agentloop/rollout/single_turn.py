"""One prompt, one answer; tools may be declared but are not run."""

from __future__ import annotations

from agentloop.rollout.context import LoopContext
from agentloop.types import RolloutTask


class SingleTurn:
    """Sample one turn and stop."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
