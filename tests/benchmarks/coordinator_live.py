"""The coordinator's CPU while trajectories are live: heartbeats of replicas, and calls and reports of workers.

    python -m tests.benchmarks.coordinator_live [--replicas 512] [--trajectories 20000] [--workers 64] [--turn-s 30]

The coordinator of `coordinator_calls`, in a process of its own. This one is all replicas, each with a heartbeat a
second, and all workers, each with a call for work that names what it runs and with a real `LeaseReporter`, whose
trajectories begin a turn every `--turn-s` and are in it for half of that. The figure is the serving process's CPU
(user and system, all threads) over the time, in cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from agentloop.api.coordinator import LeaseOrders, LeaseReport, WorkerReport
from agentloop.clock import RealClock
from agentloop.codec import encode
from agentloop.generation.leases import LeaseHolder, LeaseReporter
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.sampling import SamplingParams
from agentloop.types import Assignment, FinishReason, GenerateRequest, Generation, RolloutGroup
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.private_http.trust import prove
from tests.benchmarks import report
from tests.benchmarks.coordinator_calls import GROUP_SIZE, INFO, SECRET, cpu_s, served
from tests.support.engine.engines import FakeEngine
from tests.support.records.samples import make_task

HEARTBEAT_S = 1.0
DONE: Counter[str] = Counter()
"""The calls that were answered, and the turns that ended."""

WORKER = WorkerConfig()
NUM_ROUNDS, ROUND_S = 5, 10.0
TURN_TOKENS = 500
TOKENS, LOGPROBS = (1,) * TURN_TOKENS, (-1.0,) * TURN_TOKENS
REQUEST = GenerateRequest("r", tuple(range(4000)), SamplingParams(max_tokens=TURN_TOKENS))


class Worker:
    """One worker process of the coordinator, with all its trajectories."""

    def __init__(self, client: CoordinatorClient, name: str, turn_s: float) -> None:
        self._client = client
        self._name = name
        self._turn_s = turn_s
        self._reporter = LeaseReporter(name, self._report_leases)
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self, capacity: int) -> None:
        """Call for work for ever."""
        while True:
            report = self._report(capacity - len(self._running))
            orders = await self._client.workers.take(report, WORKER.poll_s)
            DONE["calls for work"] += 1
            for one in orders.start:
                self._running[one.assignment_id] = asyncio.create_task(self._trajectory(one))
            await asyncio.sleep(WORKER.poll_gap_s)

    async def stop(self) -> None:
        """End the trajectories, and report no more."""
        for task in self._running.values():
            task.cancel()
        await self._reporter.stop()

    async def _report_leases(self, report: LeaseReport) -> LeaseOrders:
        orders = await self._client.workers.report_leases(report)
        DONE["reports of leases"] += 1
        return orders

    def _report(self, num_free: int) -> WorkerReport:
        running = tuple(self._running)
        return WorkerReport(self._name, num_free, running, (TURN_TOKENS,) * len(running))

    async def _trajectory(self, one: Assignment) -> None:
        holder = LeaseHolder(self._reporter, self._client.workers, one.assignment_id, one.lease)
        await asyncio.sleep(random.random() * self._turn_s)
        while True:
            holder.enter()
            holder.begin()
            lease = holder.held()
            await asyncio.sleep(self._turn_s / 2)
            done = Generation("r", TOKENS, LOGPROBS, (), FinishReason.STOP)
            holder.leave(lease, REQUEST, done)
            DONE["turns"] += 1
            await asyncio.sleep(self._turn_s / 2)


class Heartbeats(asyncio.Protocol):
    """The heartbeats of one replica, over a connection of its own. Its request is made once."""

    def __init__(self, url: str, engine: FakeEngine) -> None:
        self._url = urlsplit(url)
        body = encode((engine.replica_id, engine.report()))
        head = f"POST {self._url.path}/heartbeat HTTP/1.1\r\nhost: {self._url.netloc}\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def data_received(self, data: bytes) -> None:
        assert data.startswith(b"HTTP/1.1 200 "), data
        DONE["heartbeats"] += 1

    async def run(self) -> None:
        """Send one every HEARTBEAT_S for ever."""
        await asyncio.sleep(random.random() * HEARTBEAT_S)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, self._url.hostname, self._url.port)
        await prove(transport, SECRET, self._url.netloc)
        transport.set_protocol(self)
        next_at = loop.time()
        while True:
            transport.write(self._request)
            next_at += HEARTBEAT_S
            await asyncio.sleep(next_at - loop.time())


async def measure(num_replicas: int, num_trajectories: int, num_workers: int, turn_s: float) -> list[float]:
    """Return the cores that the coordinator used, by round: first of heartbeats alone, then of all."""
    async with served(num_replicas) as (client, process, url):
        engines = [FakeEngine(RealClock(), f"fake://r{number}", 0, INFO) for number in range(num_replicas)]

        def beating() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(Heartbeats(url, engine).run()) for engine in engines]

        alone = beating()
        await asyncio.sleep(ROUND_S)
        DONE.clear()
        found = [await cores(process)]
        print(round(DONE["heartbeats"] / ROUND_S), "heartbeats a second", flush=True)
        for task in alone:  # what is handed out keeps the coordinator busy enough
            task.cancel()
        groups = [
            RolloutGroup(f"g{number}", make_task(), GROUP_SIZE) for number in range(num_trajectories // GROUP_SIZE)
        ]
        await client.front.submit("r", tuple(groups))
        workers = [Worker(client, f"w{number}", turn_s) for number in range(num_workers)]
        running = [asyncio.create_task(worker.run(num_trajectories // num_workers)) for worker in workers]
        began_at, num_live = time.monotonic(), num_workers * (num_trajectories // num_workers)
        while sum(worker.num_running for worker in workers) < num_live:
            await asyncio.sleep(0.5)
        print(f"{num_live} handed out in {time.monotonic() - began_at:.0f} s", flush=True)
        running += beating()
        await asyncio.sleep(turn_s)
        DONE.clear()
        found += [await cores(process) for _ in range(NUM_ROUNDS)]
        print({name: round(num / NUM_ROUNDS / ROUND_S, 1) for name, num in DONE.items()}, "a second", flush=True)
        assert not any(task.done() for task in running)
        status = await client.front.status()
        assert sum(one.num_running for one in status.rollouts) == num_live
        for task in running:
            task.cancel()
        for worker in workers:
            await worker.stop()
        return found


async def cores(process: psutil.Process) -> float:
    """Return the cores that a process uses, over a round."""
    before, began_at = cpu_s(process), time.monotonic()
    await asyncio.sleep(ROUND_S)
    return (cpu_s(process) - before) / (time.monotonic() - began_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=512)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--turn-s", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    heartbeats, *live = asyncio.run(measure(args.replicas, args.trajectories, args.workers, args.turn_s))
    rows = [
        ("heartbeats alone", heartbeats),
        ("and live trajectories, median of the rounds", statistics.median(live)),
        ("the same, the worst round", max(live)),
    ]
    report.finish(
        "The coordinator while trajectories are live", {"": report.table(("", "cores"), rows)}, rows, args.out
    )


if __name__ == "__main__":
    main()
