"""The load of a test: trajectories of some seconds, submitted from a host; a line of JSON for each record.

python -m tests.hosts.load URL NUM_TASKS NUM_SAMPLES
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from agentloop.client.client import RolloutClient
from agentloop.rollout import LoopContext
from agentloop.types import Limits, Message, RolloutTask
from tests.hosts.cluster import KEY

NUM_TURNS = 6
TURN_TOKENS = 160
PAUSE_S = 0.5  # of a tool, say
PROMPT = "Begin with the words of this prompt."


class Arrival(msgspec.Struct):
    """One record as it came: the time, by the system's clock, and what a test asks of it."""

    at: float
    name: str
    is_complete: bool
    stop_reason: str
    error: str | None
    attempt: int
    replica_ids: list[str]
    num_sampled: int


class Paced:
    """Turns with pauses between them."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        for number in range(NUM_TURNS):
            await ctx.sample()
            await asyncio.sleep(PAUSE_S)
            ctx.observe(Message("user", f"go on, {number}"))


async def main(url: str, num_tasks: int, num_samples: int) -> None:
    limits = Limits(max_turns=NUM_TURNS, max_tokens_per_turn=TURN_TOKENS)
    asked = (Message("user", PROMPT),)
    tasks = [
        RolloutTask(f"t{number}", asked, loop="tests.hosts.load:Paced", limits=limits)
        for number in range(num_tasks)
    ]
    async with RolloutClient(url, api_key=KEY, retry_timeout_s=300.0) as client:
        print("begun", flush=True)
        async for record in await client.submit(tasks, num_samples=num_samples):
            turns = [turn for path in record.paths for turn in path.turns]
            arrival = Arrival(
                at=time.time(),
                name=f"{record.task_id}/{record.sample_index}",
                is_complete=record.is_complete,
                stop_reason=str(record.stop_reason),
                error=record.error,
                attempt=record.attempt,
                replica_ids=sorted({turn.replica_id for turn in turns}),
                num_sampled=sum(turn.end - turn.start for turn in turns),
            )
            print(msgspec.json.encode(arrival).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
