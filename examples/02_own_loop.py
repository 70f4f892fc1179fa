"""Your own agent loop: ask once more when the answer has the wrong form.

A task names it by import path, from a module that the workers can import:

    RolloutTask(..., loop="examples.02_own_loop:AskOnceMore")
"""

from agentloop.rollout import LoopContext
from agentloop.types import Message, RolloutTask

REMINDER = Message("user", 'Please finish with "The answer is X."')


class AskOnceMore:
    """The tool loop, and one reminder. One object serves all trajectories: state is in local variables."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        for reminder in (REMINDER, None):
            while (turn := await ctx.sample()).calls:
                await ctx.run_tools(turn.calls)
            if "answer is" in turn.content or reminder is None:
                return  # completed; a limit would have ended it from within sample() or run_tools()
            ctx.set_metrics(num_reminders=1)  # beside the reward, by name
            ctx.observe(reminder)
