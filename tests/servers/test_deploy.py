"""A shipped config on a running Ray, deployed with `serve deploy`.

It is deployed again under load, and once more after all its processes were killed: rollouts and sessions continue
from their last state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from agentloop.client.client import RolloutClient
from agentloop.client.rollout import Rollout
from agentloop.client.session import AgentSession
from agentloop.types import Limits, Message, RolloutTask
from agentloop_servers.local import free_port
from tests.servers.processes import pids_with, processes_with

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "servers" / "simulated.yaml"
BIN = Path(sys.executable).parent
NUM_SAMPLES = 2


class Cluster:
    """A Ray cluster of one node, with the dashboard that `serve deploy` uses."""

    def __init__(self, folder: Path, ray_folder: str) -> None:
        self.marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
        self._folder = folder
        self._ray_folder = ray_folder
        self._dashboard = free_port("127.0.0.1")
        source = os.pathsep.join(str(ROOT / part) for part in (".", "servers", "tools"))
        self._environment = {
            **os.environ,
            self.marker: "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": source,
        }

    def start(self) -> None:
        """Start the node in a separate process group, without waiting for it."""
        arguments = ["start", "--head", "--block", "--port", "0", "--num-cpus", "2", "--disable-usage-stats"]
        arguments += ["--temp-dir", self._ray_folder, "--include-dashboard", "true"]
        arguments += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(self._dashboard)]
        with (self._folder / "ray.txt").open("w") as output:
            self._process = subprocess.Popen(
                [BIN / "ray", *arguments],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def deploy(self, document: dict[str, Any]) -> None:
        """Deploy a config as the README describes, once the dashboard responds."""
        path = self._folder / "deployed.yaml"
        path.write_text(yaml.safe_dump(document))
        arguments = ["deploy", str(path), "--address", f"http://127.0.0.1:{self._dashboard}"]
        async with asyncio.timeout(180):
            while True:
                process = await asyncio.create_subprocess_exec(
                    BIN / "serve",
                    *arguments,
                    env=self._environment,
                    cwd=ROOT,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                output, _ = await process.communicate()
                said = output.decode()
                if process.returncode == 0:
                    return
                assert self._process.poll() is None, (self._folder / "ray.txt").read_text()
                assert "Failed to connect" in said, said  # the dashboard is not running yet
                await asyncio.sleep(1.0)

    def kill(self) -> None:
        """Kill all its processes at once, like a host that loses its power."""
        while pids := pids_with(self.marker):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(60)

    def stop(self) -> list[str]:
        """Stop the node as its operator does. Returns the remaining processes."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            left = processes_with(self.marker, grace_s=60.0)
            self.kill()
        return left


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    # Keeps socket names short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_folder:
        made = Cluster(tmp_path, ray_folder)
        made.start()
        try:
            yield made
        finally:
            left = await asyncio.to_thread(made.stop)
    assert left == []


class Reading:
    """A rollout that is read while the service restarts."""

    def __init__(self, rollout: Rollout) -> None:
        self.found = Counter[tuple[str, int]]()
        self._ending = asyncio.create_task(self._read(rollout))

    async def _read(self, rollout: Rollout) -> None:
        async for record in rollout:
            assert record.is_complete, record.error
            self.found[record.task_id, record.sample_index] += 1

    async def until_under_way(self) -> None:
        """Wait for the first records. The other samples are then running or queued."""
        async with asyncio.timeout(120):
            while not self.found:
                await asyncio.sleep(0.1)
        assert not self._ending.done()

    async def assert_once_each(self, count: int, prefix: str) -> None:
        async with asyncio.timeout(400):
            await self._ending
        assert self.found == Counter(
            (f"{prefix}{n}", sample) for n in range(count) for sample in range(NUM_SAMPLES)
        )


async def submitted(client: RolloutClient, count: int, prefix: str) -> Reading:
    limits = Limits(max_tokens_per_turn=1500, timeout_s=600)
    question = (Message("user", "What is 2 + 3?"),)
    tasks = [RolloutTask(f"{prefix}{n}", question, limits=limits) for n in range(count)]
    return Reading(await client.submit(tasks, num_samples=NUM_SAMPLES))


async def count_answers(url: str, counted: list[int]) -> None:
    """Call continuously with new connections. Raises if a connection is refused or a call is not answered."""
    while True:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models") as answer:
            counted.append(answer.status)
        await asyncio.sleep(0.05)


class Conversation:
    """The conversation of an unmodified agent, one call after another."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._messages: list[Any] = []

    async def go_on(self) -> None:
        self._messages.append({"role": "user", "content": "And then?"})
        reply = await self._session.openai.chat.completions.create(
            model="default", messages=self._messages, max_tokens=8
        )
        self._messages.append(reply.choices[0].message.model_dump(exclude_none=True))


async def replica_ids(client: RolloutClient) -> set[str]:
    return {replica.replica_id for replica in (await client.status()).replicas}


async def until_replaced(client: RolloutClient, before: set[str]) -> None:
    async with asyncio.timeout(180):
        while (now := await replica_ids(client)) & before or not now:
            await asyncio.sleep(0.5)
        await client.wait_until_ready()


async def test_a_service_that_is_deployed_again_goes_on_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    document = yaml.safe_load(CONFIG.read_text())
    settings = document["applications"][0]["args"]
    settings |= {"port": free_port("127.0.0.1"), "run_dir": str(tmp_path / "run")}
    settings["workers"]["capacity"] = 16
    await cluster.deploy(document)
    url = f"http://127.0.0.1:{settings['port']}"
    async with RolloutClient(url, retry_timeout_s=240.0) as client:
        async with asyncio.timeout(240):
            await client.wait_until_ready()
        async with client.session() as session:
            conversation = Conversation(session)
            await conversation.go_on()
            first = await submitted(client, 60, "first")
            await first.until_under_way()
            before, statuses = await replica_ids(client), list[int]()
            counting = asyncio.create_task(count_answers(url, statuses))
            # one of the arguments of all deployments, so each process is replaced
            settings["max_queued_trajectories"] = 99_999
            await cluster.deploy(document)
            await until_replaced(client, before)
            assert not counting.done(), counting.exception()
            counting.cancel()
            assert len(statuses) > 20
            assert set(statuses) == {200}
            await conversation.go_on()
            await first.assert_once_each(60, "first")

            second = await submitted(client, 40, "second")
            await second.until_under_way()
            before = await replica_ids(client)
            await asyncio.to_thread(cluster.kill)
            cluster.start()
            await cluster.deploy(document)
            await until_replaced(client, before)
            await conversation.go_on()
            await second.assert_once_each(40, "second")
        record = await session.trajectory()
        assert (record.is_complete, len(record.path.turns)) == (True, 3)
