"""The coordinator's CPU for the records that its workers hand in over its HTTP port, with its store on disk.

    python -m tests.benchmarks.coordinator_calls [--records 2000] [--rounds 5] [--tokens 1000 8000 32000] [--turns]

A process of its own holds a real coordinator, with 64 replicas that are not there. This one is its worker: it takes
all samples, and then hands in a record of each as a worker does (`HandIns`), while a call waits for more work. The
figures are the serving process's CPU (user and system, all threads, the store's too) for one record: its hand-out
with a place, and its hand-in with the commit and the place given back. Medians of the rounds. What else the host
does is in the wall times alone.

With `--turns` the store is a PostgreSQL server of its own, and the figures are of turns that workers journal there,
of so many sampled tokens: of `BATCH` trajectories at a time, as a busy worker sends them every 0.2 s.
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
from agentloop.plugins import resolve
from agentloop.rollout.hand_ins import HandIns
from agentloop.rollout.journal_homes import StoredJournals
from agentloop.rollout.turn_journal import FinishedTurn, RunProgress, TurnJournal
from agentloop.score import Score
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryStore
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import (
    Assignment,
    FinishReason,
    Generation,
    Lease,
    Message,
    RolloutGroup,
    TokenPath,
    Trajectory,
    Turn,
)
from agentloop.types import WeightVersionSpan as Span
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import CoordinatorServer
from agentloop_servers.private_http.trust import Trust
from tests.benchmarks import report
from tests.support.engine.engines import FakeEngine
from tests.support.records.samples import make_task, make_trajectory
from tests.support.records.turns import make_reply
from tests.support.service.postgres_server import PostgresServer

SECRET = Trust("bench")
GROUP_SIZE = 8
NUM_REPLICAS = 64
TURN_TOKENS = 500
BATCH = 32
POSTGRES = "agentloop.storage.postgres:PostgresRun"
INFO = EngineInfo("fake", 131_072, 32_000, 16, 1_000_000, 256)


async def serve(folder: Path, url: str | None, num_replicas: int) -> None:
    """Serve a coordinator, whose store is in the database at `url` or else in `folder`, and print its URL."""
    configure_logging(folder / LOG_NAME)
    clock = RealClock()
    engines = {
        f"fake://r{number}": FakeEngine(clock, f"fake://r{number}", 0, INFO) for number in range(num_replicas)
    }

    async def probe(url: str) -> None:
        raise AssertionError(f"{url} is no suspect")

    config = CoordinatorConfig(fleet=FleetConfig(suspect_after_s=1e6, dead_after_s=1e6), worker_timeout_s=1e4)
    where = folder / STORE_NAME if url is None else resolve(POSTGRES, param="store")(url, folder.name, folder)
    store = TrajectoryStore(where)
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
async def served(
    num_replicas: int = NUM_REPLICAS, store_url: str | None = None
) -> AsyncIterator[tuple[CoordinatorClient, psutil.Process, str]]:
    """Start a coordinator in a process of its own; yields its URL too."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.coordinator_calls", "--serve", folder]
        command += ["--replicas", str(num_replicas)]
        command += [] if store_url is None else ["--store", store_url]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()

        async def find() -> str:
            return url

        client = CoordinatorClient(find, SECRET)
        try:
            yield client, psutil.Process(process.pid), url
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
    async with served() as (client, process, _):
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


async def measure_turns(num_tokens: int, num_turns: int) -> tuple[float, float]:
    """Return the CPU ms and the wall ms of a turn that is journalled."""
    generation = Generation(
        "q", (12345,) * num_tokens, (-0.5,) * num_tokens, (Span(0, 0, num_tokens),), FinishReason.STOP
    )
    path = GrowingPath(make_task().messages)
    path.start(list(range(num_tokens // 2)))
    path.add_turn(make_reply(generation, message=Message("assistant", "word word " * num_tokens)))
    progress = RunProgress(None, 1.0, 2, 1, 0, 0.5, 0.25, Score(None), 0)
    assert path.last_turn is not None
    turn = FinishedTurn(path.last_turn, progress)
    server = PostgresServer()
    async with served(store_url=server.url) as (client, process, _):
        journal = TurnJournal(StoredJournals(client.workers), flush_s=600.0, young_s=0.0)
        names = [f"r/g/{number}" for number in range(BATCH)]
        lease = Lease("l", "r1", "fake://r1")
        runs = [
            await journal.begin(Assignment(name, "g", 0, make_task(), lease), lambda: b"task") for name in names
        ]
        for run in runs:  # its header
            run.append(turn)
        await journal.flush()
        began_s, began = cpu_s(process), time.perf_counter()
        for _ in range(num_turns // BATCH):
            for run in runs:
                run.append(turn)
            await journal.flush()
        spent = (cpu_s(process) - began_s, time.perf_counter() - began)
        assert not any(run.is_over for run in runs)
        await journal.close()
    server.close()
    return tuple(1000 * seconds / num_turns for seconds in spent)  # type: ignore[return-value]


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
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--store", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve, args.store, args.replicas))
        return
    if args.turns:
        turns = [
            (num_tokens, *map(statistics.median, zip(*found, strict=True)))
            for num_tokens in args.tokens
            for found in [[asyncio.run(measure_turns(num_tokens, args.records)) for _ in range(args.rounds)]]
        ]
        table = report.table(("tokens", "CPU ms a turn", "wall ms a turn"), turns)
        report.finish("Turns journalled in PostgreSQL (CPU)", {"": table}, turns, args.out)
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
