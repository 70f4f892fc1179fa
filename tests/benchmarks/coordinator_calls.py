"""The coordinator's CPU for one call, over a Serve handle and over its own HTTP port.

    python -m tests.benchmarks.coordinator_calls [--calls 3000]

A Serve deployment holds a real coordinator; this process calls it, eight calls at a time. The figure is the serving
process's own CPU time (user and system, all threads) divided by the calls: of a heartbeat, a few hundred bytes, and
of a session's record of 8,000 tokens that is handed in again. Runs on any host; its load is in the wall times.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from agentloop.api.coordinator import ReplicaReport
from agentloop.clock import RealClock
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import Load, Trajectory
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import CoordinatorServer
from agentloop_servers.replica.client import EngineClients
from tests.support.records.samples import make_trajectory

SECRET = "bench"
CONCURRENCY = 8
NUM_TOKENS = 8000

Call = Callable[..., Awaitable[Any]]


class Served:
    """A coordinator that can be called both ways, and says what CPU its process has used."""

    async def __init__(self, folder: str) -> None:  # type: ignore[misc]
        store = TrajectoryStore(Path(folder) / "trajectories.sqlite")
        clients = EngineClients(SECRET)
        self._coordinator = Coordinator(
            store, clients.connect, CoordinatorConfig(), RealClock(), probe=clients.probe
        )
        await self._coordinator.start()
        self._server = CoordinatorServer(self._coordinator, SECRET)
        await self._server.start()

    async def address(self) -> str:
        return self._server.url

    async def cpu_s(self) -> float:
        return time.process_time()

    async def heartbeat(self, replica_id: str, report: ReplicaReport) -> bool:
        return await self._coordinator.replicas.heartbeat(replica_id, report)

    async def record(self, trajectory: Trajectory) -> None:
        await self._coordinator.rollouts.record(trajectory)


async def cost_ms(call: Call, arguments: tuple[object, ...], num_calls: int, cpu_s: Call) -> tuple[float, float]:
    """Return the server's CPU and the wall time for one call, both in milliseconds."""
    left = iter(range(num_calls))

    async def work() -> None:
        for _ in left:
            await call(*arguments)

    for _ in range(10):
        await call(*arguments)
    used, began = await cpu_s(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    wall_s = time.perf_counter() - began
    return (await cpu_s() - used) / num_calls * 1000, wall_s / num_calls * 1000


async def measure(handle: serve.handle.DeploymentHandle, num_calls: int) -> None:
    """Print a line for each call and way."""
    client = CoordinatorClient(handle.address.remote, SECRET)
    trajectory = make_trajectory("g", 0, rollout_id="sessions", spans=((0, 0, NUM_TOKENS),))
    calls: dict[str, tuple[Call, Call, tuple[object, ...]]] = {
        "heartbeat": (
            handle.heartbeat.remote,
            client.replicas.heartbeat,
            ("replica-1", ReplicaReport(Load(), True)),
        ),
        f"record of {NUM_TOKENS} tokens": (handle.record.remote, client.front.record, (trajectory,)),
    }
    print(f"{'call':24}{'way':16}{'CPU ms':>8}{'wall ms':>9}")
    for name, (by_handle, by_port, arguments) in calls.items():
        for way, call in (("Serve handle", by_handle), ("HTTP port", by_port)):
            cpu, wall = await cost_ms(call, arguments, num_calls, handle.cpu_s.remote)
            print(f"{name:24}{way:16}{cpu:8.2f}{wall:9.2f}")
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    num_calls = parser.parse_args().calls
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        deployment = serve.deployment(Served, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
        with tempfile.TemporaryDirectory() as folder:
            handle = serve.run(deployment.bind(folder), name="bench", route_prefix=None, logging_config=quiet)
            asyncio.run(measure(handle, num_calls))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
