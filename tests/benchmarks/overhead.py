"""The service's cost in addition to a zero-latency engine: one worker, 1,000 concurrent trajectories of 5 turns.

    make bench                                   # the table
    make bench ARGS="--trajectories 5000 --repeat 5 --rows 'in process' traced"

Rows: `in process` is the worker alone (loop, renderer, parser, tool, builder, journal); `no journal` omits the
journal; `traced` sends a trace of each trajectory to a receiver in another process; `untaken` sends traces to an
address without a receiver; `over HTTP` adds the data plane, with the simulated engine in another process, as in a
service. Each repeat runs all rows. Compare ratios within one run: two busy cores make absolute times pessimistic.
CPU is that of the worker's process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import structlog
from fastapi import FastAPI, Request, Response
from rich.console import Console
from rich.table import Table

from agentloop.concurrency.aio import tune_interpreter
from agentloop.engine.interface import Engine
from agentloop.observability.metrics import MetricsTally
from agentloop.rollout.journal_homes import JournalFolder
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.types import Trajectory
from agentloop_servers.config.service import TracingSettings
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.server import DataPlaneServer
from agentloop_traces.sink import Tracing
from tests.support.endpoint.front_door import serving
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.worker import running_worker, task

NUM_TURNS = 5
REPLIES = (*[call("calculator", expression="12 * 34 + 5")] * (NUM_TURNS - 1), "The answer is 413.")
SECRET = Trust("bench")
LAG_PROBE_S = 0.005


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's measurements."""

    turns_per_s: float
    turns_per_core_s: float  # turns per second of CPU time
    cpu_ms_per_turn: float
    lag_p99_ms: float
    peak_mib: float
    tracing_pct: float = 0.0  # share of its CPU: passing records to the exporter, and the exporter's thread


class TimedTracing:
    """The trace exporter of a run, and its CPU time, which has the same noise as the process's CPU time."""

    def __init__(self, receiver: str) -> None:
        self._tracing = Tracing(TracingSettings(endpoint=receiver, sample=1.0), "bench", "policy")
        (thread,) = [one for one in threading.enumerate() if one.name == "tracing"]
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._give_s = 0.0

    def give(self, ended: object) -> None:
        begun = time.thread_time()
        self._tracing.give(cast(Trajectory, ended))
        self._give_s += time.thread_time() - begun

    async def close(self) -> float:
        """Close the exporter; returns its CPU seconds, without those of the last second's traces."""
        used_s = self._give_s + time.clock_gettime(self._clock)
        await asyncio.to_thread(self._tracing.close)
        return used_s


async def lag_probe(lags_ms: list[float]) -> None:
    """Sleep briefly in an endless loop; the delay of each wake-up is the event loop's lag."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PROBE_S)
        lags_ms.append(max(0.0, (time.perf_counter() - before - LAG_PROBE_S) * 1000))


async def measure(
    engines: Mapping[str, Engine],
    num_trajectories: int,
    *,
    owns_engines: bool,
    is_journalled: bool = True,
    receiver: str | None = None,
) -> Figures:
    """Roll out, after everything was started before the measurement."""
    tasks = [task(f"t{n}", reference="413") for n in range(num_trajectories)]
    coordinator = FakeCoordinator(tasks, urls=list(engines))
    tune_interpreter()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `untaken`: each refused attempt is a log line
    lags_ms: list[float] = []
    tally, tracing_s = MetricsTally(), 0.0
    tracing = None if receiver is None else TimedTracing(receiver)
    if tracing is not None:
        tally.trace = tracing.give
    probe = asyncio.create_task(lag_probe(lags_ms))
    cpu, wall = time.process_time(), time.perf_counter()
    started = engines if owns_engines else {url: _Started(engine) for url, engine in engines.items()}
    with TemporaryDirectory() as folder:
        journal = TurnJournal(JournalFolder(Path(folder))) if is_journalled else None
        working = running_worker(coordinator, started, capacity=1000, journal=journal, tally=tally)
        async with working, asyncio.timeout(600):
            await coordinator.is_done.wait()
            if tracing is not None:
                tracing_s = await tracing.close()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if journal is not None:
            await journal.close()
    probe.cancel()
    num_turns = sum(len(record.path.turns) for record in coordinator.records.values())
    assert num_turns == num_trajectories * NUM_TURNS, "every trajectory takes all its turns"
    assert all(record.reward == 1.0 for record in coordinator.records.values())
    lags_ms.sort()
    return Figures(
        turns_per_s=num_turns / wall,
        turns_per_core_s=num_turns / cpu,
        cpu_ms_per_turn=cpu * 1000 / num_turns,
        lag_p99_ms=lags_ms[int(len(lags_ms) * 0.99)],
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        tracing_pct=100 * tracing_s / cpu,
    )


class _Started:
    """An engine that its owner starts and closes."""

    def __init__(self, engine: Engine) -> None:
        self.generate = engine.generate

    async def start(self) -> None:
        """Do nothing: the engine is already running."""

    async def close(self) -> None:
        """Do nothing: the owner closes the engine."""


def in_process(num_trajectories: int) -> Figures:
    """Run the engine in the worker's event loop: its simulated steps count as the worker's CPU."""
    return asyncio.run(measure({"sim://a": scripted_engine(*REPLIES)}, num_trajectories, owns_engines=True))


def unjournalled(num_trajectories: int) -> Figures:
    """Run as `in_process`, without the turn journal, from which trajectories resume when their worker dies."""
    engines = {"sim://a": scripted_engine(*REPLIES)}
    return asyncio.run(measure(engines, num_trajectories, owns_engines=True, is_journalled=False))


def traced(num_trajectories: int) -> Figures:
    """Run as `in_process`, with a trace of each trajectory."""
    ours, theirs = multiprocessing.Pipe()
    taker = multiprocessing.get_context("spawn").Process(target=_take, args=(theirs,), daemon=True)
    taker.start()
    try:
        return untaken(num_trajectories, ours.recv())
    finally:
        ours.send("stop")
        taker.join(timeout=10)


def untaken(num_trajectories: int, receiver: str = "http://127.0.0.1:9") -> Figures:
    """Run as `in_process`, with traces that no receiver accepts."""
    engines = {"sim://a": scripted_engine(*REPLIES)}
    return asyncio.run(measure(engines, num_trajectories, owns_engines=True, receiver=receiver))


def _take(pipe: Connection) -> None:
    async def main() -> None:
        app = FastAPI()

        @app.post("/v1/traces")
        async def take(request: Request) -> Response:
            await request.body()
            return Response()

        async with serving(app) as url:
            pipe.send(url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


def over_http(num_trajectories: int) -> Figures:
    """Run the engine behind its data-plane port in another process."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        return asyncio.run(_against(ours.recv(), num_trajectories))
    finally:
        ours.send("stop")
        server.join(timeout=10)


async def _against(url: str, num_trajectories: int) -> Figures:
    clients = EngineClients(SECRET)
    try:
        return await measure({url: clients.connect(url)}, num_trajectories, owns_engines=False)
    finally:
        await clients.close()


def _serve(pipe: Connection) -> None:
    async def main() -> None:
        engine = scripted_engine(*REPLIES)
        await engine.start()
        server = DataPlaneServer(engine, "bench", SECRET)
        await server.start()
        pipe.send(server.url)
        await asyncio.to_thread(pipe.recv)
        await server.close()
        await engine.close()

    asyncio.run(main())


def spawned(run: Callable[[int], Figures], num_trajectories: int) -> Figures:
    """Run once in a separate process, so that peak memory belongs to this run."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, num_trajectories).result()


def main() -> None:
    """Print the table: medians and the spread over the repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    table = Table(title=f"{options.trajectories} trajectories of {NUM_TURNS} turns in one worker")
    for column in (
        "",
        "turns/s",
        "turns/s per core",
        "CPU ms/turn",
        "traces, % of CPU",
        "loop lag p99 ms",
        "peak MiB",
    ):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    runs: dict[str, list[Figures]] = {name: [] for name in options.rows}
    for _ in range(options.repeat):
        for name, figures in runs.items():
            figures.append(spawned(ROWS[name], options.trajectories))
    for name, figures in runs.items():
        table.add_row(name, *(_spread([getattr(one, field) for one in figures]) for field in _FIELDS))
    console = Console()
    console.width = max(console.width, 150)  # prints complete figures, also into a file
    console.print(table)


ROWS = {
    "in process": in_process,
    "no journal": unjournalled,
    "traced": traced,
    "untaken": untaken,
    "over HTTP": over_http,
}
_FIELDS = ("turns_per_s", "turns_per_core_s", "cpu_ms_per_turn", "tracing_pct", "lag_p99_ms", "peak_mib")


def _spread(values: list[float]) -> str:
    digits = 0 if min(values) >= 100 else 2
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"


if __name__ == "__main__":
    main()
