"""Three models in one service: the policy, a user who answers it, and a judge who gives the reward.

agentloop serve --config servers/judge.yaml     on one GPU, where they take turns; servers/three.yaml on a CPU
python examples/05_judge.py http://127.0.0.1:8000
"""

import asyncio
import sys
from dataclasses import replace

from agentloop.client import RolloutClient, load_tasks
from agentloop.rollout import LoopContext
from agentloop.types import Judge, Message, RolloutTask

RUBRIC = "Was the user's question answered, and the answer right?"


class Talk:
    """The policy answers, the user asks back, the policy answers again. Only the policy's tokens are trained on."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        for is_last in (False, True):
            while (turn := await ctx.sample()).calls:
                await ctx.run_tools(turn.calls)
            if is_last:
                return
            said = [Message("user", turn.content)]  # from where the user stands
            ctx.observe(Message("user", await ctx.model("user").chat(said, max_tokens=32, temperature=1.0)))


def tasks(number: int) -> list[RolloutTask]:
    """Return tasks of the shipped ones, talked about with the user and scored by the judge."""
    shipped = load_tasks("examples/data/tasks.jsonl")[:number]
    return [replace(one, loop="examples.05_judge:Talk", reward=Judge("judge", RUBRIC)) for one in shipped]


async def main(url: str) -> None:
    async with RolloutClient(url) as client:
        rollout = await client.submit(tasks(4), num_samples=2)
        async for trajectory in rollout:
            print(trajectory.task_id, trajectory.stop_reason, trajectory.reward, trajectory.reward_error or "")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
