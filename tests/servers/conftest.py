"""The fixtures of tests that start the service."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from agentloop.client.client import RolloutClient
from tests.servers.processes import processes_with
from tests.servers.shared_service import NUM_INGRESS, NUM_REPLICAS, Service

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the shared service last: it lives until the end, and the others need the cores."""
    items.sort(key=lambda item: "shared_service" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
async def shared_service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """One service for all tests: starting Ray and its processes takes half a minute on two cores."""
    folder = tmp_path_factory.mktemp("service")
    config = folder / "simulated.yaml"
    text = (ROOT / "servers" / "simulated.yaml").read_text()
    replicas = f"replicas: {NUM_REPLICAS}"
    assert replicas in text
    text = text.replace(replicas, f"{replicas}\n      ingress_replicas: {NUM_INGRESS}", 1)
    config.write_text(text.replace("port: 8000", "port: 0"))
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentloop_servers.cli", "serve", "--config", str(config), "--out", str(folder)),
        cwd=ROOT,
        env={**os.environ, marker: "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        output = b""
        async with asyncio.timeout(400):
            while b"/v1\n" not in output:
                line = await process.stdout.readline()
                assert line, output.decode()
                output += line
        [url] = re.findall(r"ready at (\S+)", output.decode())
        assert re.findall(r"chat +(\S+)\n", output.decode()) == [f"{url}/v1"]
        run_dir = (folder / "latest").resolve()
        async with aiohttp.ClientSession() as http, RolloutClient(url) as client:
            yield Service(url, process.pid, run_dir, http, client)
    finally:
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            await process.communicate()
    assert process.returncode == 130
    assert processes_with(marker) == []
