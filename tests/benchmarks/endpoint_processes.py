"""The processes that the endpoint's benchmark measures: the endpoint, wired as in `app.py`, and an engine.

Both receive commands over a pipe: `read` returns figures, `stop` ends the process. The endpoint's figures count
from `mark` (memory) and `start` (everything else). The endpoint's event loop is uvloop and its port the direct one,
as in a Serve replica. Its engine is simulated without latency, in its own event loop or behind a data-plane port.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from agentloop.concurrency.aio import tune_interpreter
from agentloop.engine.interface import OnProgress
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.types import GenerateRequest, Generation, Lease
from agentloop.values.capabilities import NO_NEEDS
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.registry import Sessions
from agentloop_servers.endpoint.shards import ShardRouter
from agentloop_servers.http.auth import Keys
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.endpoint import build_endpoint, sessions_name
from agentloop_servers.processes.ingress import OpenedModel
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.server import DataPlaneServer
from tests.benchmarks.endpoint_load import REPLY
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import POLICY, RENDERER, ids
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.service.whole_service import simulated_config

SECRET = Trust("bench")
LAG_PROBE_S = 0.005
MAX_CONTEXT_TOKENS = 1 << 20  # a message of a megabyte must be answered, not refused
_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class EndpointFigures:
    """One measurement of the endpoint's process."""

    cpu_s: float
    lags_ms: list[float]
    rss_bytes: int  # resident memory at the end, less the size at the mark
    counted_bytes: int  # as counted by the registry
    num_sessions: int
    engine_s: dict[str, float]  # by call, if the engine is in this process


@contextmanager
def process(
    main: Callable[..., Coroutine[None, None, None]], *arguments: object
) -> Iterator[tuple[Connection, str]]:
    """Run `main(pipe, *arguments)` in another process; yields the pipe and the URL that it announces."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    running = spawn.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
    running.start()
    theirs.close()
    try:
        yield ours, ours.recv()
    finally:
        if running.is_alive():
            ours.send("stop")
        running.join(timeout=30)


def ask(pipe: Connection, order: str) -> Any:
    """Send a command and wait for its answer."""
    pipe.send(order)
    return pipe.recv()


async def run_engine(pipe: Connection) -> None:
    """Run an engine behind its data-plane port; `read` returns the seconds of each call in it."""
    engine = TimedEngine()
    await engine.start()
    server = DataPlaneServer(engine, "bench", SECRET)
    await server.start()
    tune_interpreter()
    pipe.send(server.url)
    while await asyncio.to_thread(pipe.recv) != "stop":
        pipe.send(engine.seconds)
    await server.close()
    await engine.close()


async def run_endpoint(
    pipe: Connection, run_dir: Path, engine_url: str | None, settings: Mapping[str, int] | None = None
) -> None:
    """Run the endpoint over the engine at `engine_url`, or over its own engine; `settings` are the endpoint's."""
    configure_logging(run_dir / LOG_NAME)
    async with AsyncExitStack() as closing:
        clients = EngineClients(SECRET)
        engine = None
        if engine_url is None:
            engine = TimedEngine()
            await engine.start()
            closing.push_async_callback(engine.close)
            clients = _OneEngine(engine)
        closing.push_async_callback(clients.close)
        engine_settings = {"max_context_tokens": MAX_CONTEXT_TOKENS}
        config = simulated_config(model=str(POLICY), engine=engine_settings, endpoint=dict(settings or {}))
        coordinator = _OneReplica(engine_url or "sim://")
        store_path = run_dir / sessions_name(0)
        router = ShardRouter(coordinator)
        sessions, endpoint = build_endpoint(config, store_path, run_dir, SECRET.key, coordinator, clients, router)
        await sessions.start()
        closing.push_async_callback(sessions.close)
        opened = OpenedModel(config, run_dir, coordinator, clients, endpoint, router)
        server = DirectServer(
            opened.to_app(Keys.from_environment("AGENTLOOP_KEY", "AGENTLOOP_ADMIN_KEY")), "127.0.0.1"
        )
        closing.push_async_callback(server.close)
        url = await server.start()
        tune_interpreter()
        pipe.send(url)
        await _measure(pipe, sessions, engine)


async def _measure(pipe: Connection, sessions: Sessions, engine: TimedEngine | None) -> None:
    lags_ms: list[float] = []
    probe = asyncio.create_task(lag_probe(lags_ms))
    cpu_s, rss = 0.0, 0
    while (order := await asyncio.to_thread(pipe.recv)) != "stop":
        if order == "mark":
            rss = resident_bytes()
            pipe.send(None)
        elif order == "start":
            lags_ms.clear()
            cpu_s = time.process_time()
            pipe.send(None)
        else:
            used_s = time.process_time() - cpu_s
            seconds = {} if engine is None else engine.seconds
            counted, held = sessions.cache.num_bytes, len(sessions.cache)
            pipe.send(EndpointFigures(used_s, lags_ms, resident_bytes() - rss, counted, held, seconds))
    probe.cancel()


async def lag_probe(lags_ms: list[float]) -> None:
    """Sleep briefly in an endless loop; the delay of each wake-up is the event loop's lag."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PROBE_S)
        lags_ms.append(max(0.0, (time.perf_counter() - before - LAG_PROBE_S) * 1000))


def resident_bytes() -> int:
    """Return the resident memory of the process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


class TimedEngine(SimulatedEngine):
    """Answers at once with a constant reply, and records how long each call took."""

    def __init__(self) -> None:
        reply = tuple(ids(REPLY))
        spec = SimulatedSpec(
            vocab_size=RENDERER.vocab_size,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            block_size=_BLOCK_SIZE,
            num_blocks=8 * MAX_CONTEXT_TOKENS // _BLOCK_SIZE,
            max_running=4096,
        )
        super().__init__(spec, policy=ScriptedPolicy(lambda prompt: reply))
        self.seconds: dict[str, float] = {}

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        before = time.perf_counter()
        try:
            return await super().generate(request, on_progress)
        finally:
            self.seconds[request.request_id.partition(":")[0]] = time.perf_counter() - before


class _OneEngine(EngineClients):
    """Resolves every URL to this engine."""

    def __init__(self, engine: TimedEngine) -> None:
        super().__init__(SECRET)
        self._engine = engine

    def connect(self, url: str) -> TimedEngine:  # type: ignore[override]
        return self._engine


class _OneReplica(FakeCoordinator):
    """Gives every session a lease on the one replica."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def lease(self, session_id, num_tokens, process_id, needs=NO_NEEDS, prefixes=()) -> Lease:
        lease = Lease(f"lease-{session_id}", "bench", self._url)
        self.leases[lease.lease_id] = lease
        return lease


def _run(main: Callable[..., Coroutine[None, None, None]], pipe: Connection, *arguments: object) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(pipe, *arguments))
