"""The load of a test: trajectories of some seconds, submitted from a host; prints one JSON line per record.

    python -m tests.hosts.load URL NUM_TASKS NUM_SAMPLES [LOOP]

LOOP is Paced, or Searching, whose trajectories can resume.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from agentloop.client.client import RolloutClient
from agentloop.rollout import LoopContext, tool
from agentloop.types import Limits, Message, RolloutTask, ToolCall, Trajectory
from tests.hosts.cluster import KEY

NUM_TURNS = 6
TURN_TOKENS = 160
PAUSE_S = 0.5  # duration of a tool call, for example
SEARCHING_TURNS, SEARCHING_TOKENS = 12, 32
PROMPT = "Begin with the words of this prompt."


class Arrival(msgspec.Struct):
    """One record on arrival: the time by the system's clock, and the values that a test checks."""

    at: float
    name: str
    is_complete: bool
    stop_reason: str
    error: str | None
    attempt: int
    replica_ids: list[str]
    num_sampled: int
    num_lost: int  # tokens that were sampled again, except those of the turn during which its worker was lost
    num_resumed_turns: int
    num_turns: int
    num_tool_calls: int
    unavailable_s: float  # longest unavailability in a turn: its replica was lost, and it had no other replica yet
    first_turn_at: float  # in the attempt that made the record: its first turn that was not resumed


class Paced:
    """Turns with pauses between them."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        for number in range(NUM_TURNS):
            await ctx.sample()
            await asyncio.sleep(PAUSE_S)
            ctx.observe(Message("user", f"go on, {number}"))


@tool
async def search(number: int) -> str:
    """Look for a number."""
    await asyncio.sleep(PAUSE_S)
    return f"found {number}"


class Searching:
    """Turns with tool calls between them; the progress on a lost worker is resumed."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=SEARCHING_TOKENS)
        await self.resume(task, ctx)

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        while True:
            await ctx.run_tools([ToolCall(ctx.turn_id, "search", {"number": len(ctx.messages)})])
            await ctx.sample(max_tokens=SEARCHING_TOKENS)


def arrival_of(record: Trajectory) -> Arrival:
    """Return the checked values of a record that has just arrived."""
    turns = [turn for path in record.paths for turn in path.turns]
    assert record.times is not None
    new = [turn.times.begun_us for turn in turns[record.num_resumed_turns :] if turn.times is not None]
    return Arrival(
        at=time.time(),
        name=f"{record.task_id}/{record.sample_index}",
        is_complete=record.is_complete,
        stop_reason=str(record.stop_reason),
        error=record.error,
        attempt=record.attempt,
        replica_ids=sorted({turn.replica_id for turn in turns}),
        num_sampled=sum(turn.end - turn.start for turn in turns),
        num_lost=sum(record.times.lost_tokens.values()),
        num_resumed_turns=record.num_resumed_turns,
        num_turns=len(turns),
        num_tool_calls=record.num_tool_calls,
        unavailable_s=max(
            (turn.times.unavailable_us / 1e6 for turn in turns if turn.times is not None), default=0.0
        ),
        first_turn_at=record.times.began_at + (new[0] if new else record.times.ended_us) / 1e6,
    )


async def main(url: str, num_tasks: int, num_samples: int, loop: str = "Paced") -> None:
    is_paced = loop == "Paced"
    tools = () if is_paced else ("search",)
    paced = Limits(max_turns=NUM_TURNS, max_tokens_per_turn=TURN_TOKENS)
    limits = paced if is_paced else Limits(max_turns=SEARCHING_TURNS)
    asked = (Message("user", PROMPT),)
    tasks = [
        RolloutTask(
            f"t{number}",
            asked,
            loop=f"tests.hosts.load:{loop}",
            limits=limits,
            tools=tools,
        )
        for number in range(num_tasks)
    ]
    async with RolloutClient(url, api_key=KEY, retry_timeout_s=300.0) as client:
        print("begun", flush=True)
        async for record in await client.submit(tasks, num_samples=num_samples):
            print(msgspec.json.encode(arrival_of(record)).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
