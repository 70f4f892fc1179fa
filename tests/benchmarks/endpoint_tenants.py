"""One user's calls next to another user's crowd: B's turn latency, alone and while A has many open calls.

    python -m tests.benchmarks.endpoint_tenants [--crowd 300] [--turns 200] [--engine over-http]

A's agents and B's one agent send each turn as soon as they have the answer. Each user has its own process and key;
both use one endpoint process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from tests.benchmarks.endpoint_load import Agent, Load
from tests.benchmarks.endpoint_processes import ask, process, run_endpoint, run_engine

TIMEOUT_S = 300.0
TURNS_EACH = 10  # per session: prompts stay short
KEYS = {"AGENTLOOP_KEY": "key-of-a,key-of-b", "AGENTLOOP_ADMIN_KEY": "key-of-admin"}


async def talk(url: str, key: str, name: str, num_turns: int, load: Load) -> None:
    """Run one agent after another, each in a new session, until `num_turns` turns are done."""
    for index in range(num_turns // TURNS_EACH):
        agent = Agent(url, f"{name}-{index}", key)
        await agent.open()
        await agent.talk(TURNS_EACH, load)


async def run_crowd(pipe: Connection, url: str, size: int) -> None:
    """Run A's agents until `stop`; `read` returns the number of their turns."""
    load = Load()
    agents = [asyncio.create_task(talk(url, "key-of-a", f"crowd-{one}", 10_000_000, load)) for one in range(size)]
    while len(load.turn_s) < 3 * size:
        await asyncio.sleep(0.05)
    pipe.send(url)
    while await asyncio.to_thread(pipe.recv) != "stop":
        pipe.send(list(load.turn_s.values()))
    for agent in agents:
        agent.cancel()
    await asyncio.gather(*agents, return_exceptions=True)


def turns_of_b(url: str, name: str, num_turns: int) -> list[float]:
    """Return the milliseconds of each turn of B's agent."""
    load = Load()
    asyncio.run(asyncio.wait_for(talk(url, "key-of-b", name, num_turns, load), TIMEOUT_S))
    return sorted(seconds * 1000 for seconds in load.turn_s.values())


def main() -> None:
    """Print B's turn latencies, alone and next to the crowd."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowd", type=int, default=300)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--engine", choices=("in-process", "over-http"), default="over-http")
    options = parser.parse_args()
    os.environ |= KEYS
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        engine_url = closing.enter_context(process(run_engine))[1] if options.engine == "over-http" else None
        _, url = closing.enter_context(process(run_endpoint, Path(folder), engine_url))
        turns_of_b(url, "warm-up", 20)
        alone = turns_of_b(url, "alone", options.turns)
        pipe, _ = closing.enter_context(process(run_crowd, url, options.crowd))
        before = ask(pipe, "read")
        beside = turns_of_b(url, "beside", options.turns)
        crowd = sorted(seconds * 1000 for seconds in ask(pipe, "read")[len(before) :])
    first, then = statistics.median(alone), statistics.median(beside)
    print(f"B alone: median {first:.1f} ms, 99 % within {alone[len(alone) * 99 // 100]:.1f} ms")
    print(f"B beside {options.crowd} calls of A: {then:.1f} ms, {beside[len(beside) * 99 // 100]:.1f} ms")
    rate = len(crowd) / sum(beside) * 1000
    print(f"{then / first:.1f} times; A's own median {statistics.median(crowd):.0f} ms, {rate:.0f} turns/s")


if __name__ == "__main__":
    main()
