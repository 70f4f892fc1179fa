"""The usual agent: sample, run the tools it called, repeat until it answers without a call."""

from __future__ import annotations

from agentloop.rollout.context import LoopContext
from agentloop.types import RolloutTask


class ToolLoop:
    """Sample and run tools until the policy answers."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        while (turn := await ctx.sample()).calls:
            await ctx.run_tools(turn.calls)
