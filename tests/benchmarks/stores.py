"""The CPU of a record in either home of a store, and the time of a restart over many.

    python -m tests.benchmarks.stores [--records 2000] [--restart 100000]

PostgreSQL is the distribution's server, started for it without fsync; SQLite waits for the disk. The CPU is this
process's own (user and system, all threads): the store's part of the coordinator, with 16 hand-ins at a time, of
one record each or of 64. A restart is what a coordinator does before its first hand-out: open, take over, restore.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from agentloop.api.encoded_record import EncodedRecord
from agentloop.clock import RealClock
from agentloop.plugins import resolve
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.replica.client import EngineClients
from tests.support.records.samples import make_group, make_trajectory
from tests.support.service.postgres_server import PostgresServer

CONCURRENCY = 16
SAMPLES = 100


def records(num: int, num_tokens: int) -> Iterator[EncodedRecord]:
    """Records of as many samples, without the cost of making each."""
    one = EncodedRecord.of(make_trajectory("g", 0, rollout_id="r", spans=((0, 0, num_tokens),)))
    for number in range(num):
        yield replace(one, group_id=f"g{number // SAMPLES}", sample_index=number % SAMPLES)


async def hand_in(where: Path | Home, num: int, num_tokens: int, at_once: int) -> tuple[float, float]:
    """Return the CPU and the wall time of a record, both in milliseconds."""
    store = TrajectoryStore(where)
    await store.take_over()
    left = records(num, num_tokens)

    async def work() -> None:
        while batch := list(itertools.islice(left, at_once)):
            await store.add_records(batch)

    used, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    cpu_s, wall_s = time.process_time() - used, time.perf_counter() - began
    await store.close()
    return cpu_s / num * 1000, wall_s / num * 1000


async def restart(where: Path | Home, num: int) -> float:
    """Return the seconds of a restart over as many records of a rollout that lacks one."""
    store = TrajectoryStore(where)
    await store.accept("r", [make_group(f"g{number}", SAMPLES) for number in range(-(-(num + 1) // SAMPLES))])
    left = records(num, 100)
    while batch := list(itertools.islice(left, 512)):
        await store.add_records(batch)
    await store.close()
    began = time.perf_counter()
    store, clients = TrajectoryStore(where), EngineClients(Trust("bench"))
    await store.take_over()
    coordinator = Coordinator(store, clients.connect, CoordinatorConfig(), RealClock(), probe=clients.probe)
    await coordinator.start()
    seconds = time.perf_counter() - began
    await coordinator.close()
    await clients.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--restart", type=int, default=100_000)
    arguments = parser.parse_args()
    server = PostgresServer()
    with tempfile.TemporaryDirectory() as folder:

        def new_home(kind: str) -> Path | Home:
            name = server.new_name()
            if kind == "sqlite":
                return Path(folder) / f"{name}.sqlite"
            made = resolve("agentloop.storage.postgres:PostgresRun", param="store")
            return made(server.url, name, Path(folder))

        try:
            print(f"{'home':12}{'tokens':>8}{'a call':>8}{'CPU ms':>8}{'wall ms':>9}")
            for num_tokens in (1000, 8000):
                for at_once in (1, 64):
                    for kind in ("sqlite", "postgres"):
                        cpu, wall = asyncio.run(hand_in(new_home(kind), arguments.records, num_tokens, at_once))
                        print(f"{kind:12}{num_tokens:8}{at_once:8}{cpu:8.3f}{wall:9.3f}", flush=True)
            for kind in ("sqlite", "postgres"):
                seconds = asyncio.run(restart(new_home(kind), arguments.restart))
                print(f"{kind:12}restart over {arguments.restart:,} records: {seconds:.2f} s", flush=True)
        finally:
            server.close()


if __name__ == "__main__":
    main()
