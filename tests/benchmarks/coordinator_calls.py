"""The coordinator's CPU for the records that its workers hand in over its HTTP port, with its store on disk.

    python -m tests.benchmarks.coordinator_calls [--records 2000] [--rounds 5] [--tokens 1000 8000 32000]

A process of its own holds a real coordinator, with 64 replicas that are not there. This one is its worker: it takes
all samples, and then hands in a record of each as a worker does (`HandIns`), while a call waits for more work. The
figures are the serving process's CPU (user and system, all threads, the store's too) for one record: its hand-out
with a place, and its hand-in with the commit and the place given back. Medians of the rounds. What else the host
does is in the wall times alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from agentloop.api.coordinator import WorkerReport
from agentloop.api.encoded_record import EncodedRecord
from agentloop.clock import RealClock
from agentloop.engine import EngineInfo
from agentloop.fleet.registry import FleetConfig
from agentloop.logs import LOG_NAME, configure_logging
from agentloop.rollout.hand_ins import HandIns
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import FinishReason, Message, RolloutGroup, TokenPath, Trajectory, Turn
from agentloop.types import WeightVersionSpan as Span
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import CoordinatorServer
from agentloop_servers.private_http.trust import Trust
from tests.benchmarks import report
from tests.support.engine.engines import FakeEngine
from tests.support.records.samples import make_task, make_trajectory

SECRET = Trust("bench")
GROUP_SIZE = 8
NUM_REPLICAS = 64
TURN_TOKENS = 500
INFO = EngineInfo("fake", 131_072, 32_000, 16, 1_000_000, 256)


async def serve(folder: Path, num_replicas: int) -> None:
    """Serve a coordinator, and print its URL."""
    configure_logging(folder / LOG_NAME)
    clock = RealClock()
    engines = {
        f"fake://r{number}": FakeEngine(clock, f"fake://r{number}", 0, INFO) for number in range(num_replicas)
    }

    async def probe(url: str) -> None:
        raise AssertionError(f"{url} is no suspect")

    config = CoordinatorConfig(fleet=FleetConfig(suspect_after_s=1e6, dead_after_s=1e6), worker_timeout_s=1e4)
    store = TrajectoryStore(folder / "trajectories.sqlite")
    coordinator = Coordinator(store, engines.__getitem__, config, clock, probe=probe)
    await coordinator.start()
    for engine in engines.values():
        await coordinator.replicas.register(engine.registration())
    server = CoordinatorServer(coordinator, SECRET)
    await server.start()
    print(server.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await coordinator.close()


@asynccontextmanager
async def served(num_replicas: int = NUM_REPLICAS) -> AsyncIterator[tuple[CoordinatorClient, psutil.Process]]:
    """Start a coordinator in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.coordinator_calls", "--serve", folder]
        command += ["--replicas", str(num_replicas)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()

        async def find() -> str:
            return url

        client = CoordinatorClient(find, SECRET)
        try:
            yield client, psutil.Process(process.pid)
        finally:
            await client.close()
            process.kill()
            await process.wait()


def made(num_tokens: int) -> Trajectory:
    """Return a record of so many tokens: a quarter is the prompt, and of each turn a third is observed."""
    rng = np.random.default_rng(num_tokens)
    num_prompt = num_tokens // 4
    num = num_tokens - num_prompt
    mask = np.arange(num) % TURN_TOKENS < TURN_TOKENS * 2 // 3
    starts = range(0, num, TURN_TOKENS)
    ends = [min(start + TURN_TOKENS * 2 // 3, num) for start in starts]
    path = TokenPath(
        prompt_ids=rng.integers(0, 32_000, num_prompt, np.int32),
        response_ids=rng.integers(0, 32_000, num, np.int32),
        response_mask=mask,
        logprobs=np.where(mask, -rng.random(num), 0.0).astype(np.float32),
        weight_versions=tuple(Span(0, start, end) for start, end in zip(starts, ends, strict=True)),
        turns=tuple(
            Turn(num_prompt + start, start, end, FinishReason.STOP, "r1", 0, str(number))
            for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        ),
        messages=(
            Message("user", "word word " * num_prompt),
            *(Message("assistant", "word word " * (end - start)) for start, end in zip(starts, ends, strict=True)),
        ),
    )
    return make_trajectory(paths=(path,))


async def measure(num_tokens: int, num_records: int) -> tuple[float, float, float]:
    """Return the CPU ms of a record's hand-out and of its hand-in, and the wall ms of the latter."""
    async with served() as (client, process):
        task, record = make_task(), made(num_tokens)
        groups = tuple(RolloutGroup(f"g{number}", task, GROUP_SIZE) for number in range(num_records // GROUP_SIZE))
        await client.front.submit("r", groups)
        began_s = cpu_s(process)
        running: list[str] = []
        records: list[EncodedRecord] = []
        while len(running) < num_records:
            orders = await client.workers.take(WorkerReport("w", num_records - len(running), tuple(running)), 5.0)
            running += [one.assignment_id for one in orders.start]
            names = [{"group_id": one.group_id, "sample_index": one.sample_index} for one in orders.start]
            records += [EncodedRecord.of(replace(record, rollout_id="r", **name)) for name in names]
        handed_out_s, began = cpu_s(process), time.perf_counter()
        waiting = asyncio.create_task(client.workers.take(WorkerReport("w", num_records, ()), 600.0))
        hand_ins = HandIns("w", client.workers)
        assert all(await asyncio.gather(*map(hand_ins.give, records)))
        done_s, wall_s = cpu_s(process), time.perf_counter() - began
        waiting.cancel()
        assert (await client.front.read("r", 0, 1, 0.0)).status.is_done
        spent = (handed_out_s - began_s, done_s - handed_out_s, wall_s)
        return tuple(1000 * seconds / num_records for seconds in spent)  # type: ignore[return-value]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 8000, 32000])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--replicas", type=int, default=NUM_REPLICAS)
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve, args.replicas))
        return
    rows = []
    for num_tokens in args.tokens:
        num_records = max(GROUP_SIZE, int(args.records * min(1.0, 8000 / num_tokens)) // GROUP_SIZE * GROUP_SIZE)
        found = [asyncio.run(measure(num_tokens, num_records)) for _ in range(args.rounds)]
        rows.append((num_tokens, num_records, *map(statistics.median, zip(*found, strict=True))))
    columns = ("tokens", "records", "hand-out, CPU ms a record", "hand-in, CPU ms a record", "wall ms a record")
    report.finish("Records handed in to the coordinator (CPU)", {"": report.table(columns, rows)}, rows, args.out)


if __name__ == "__main__":
    main()
