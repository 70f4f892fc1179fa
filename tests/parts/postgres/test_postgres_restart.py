"""The real service with its records in PostgreSQL: when its coordinator is killed, the next takes over the run."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import AgentLoopError
from agentloop.types import Message, RolloutTask
from agentloop_servers.local import running_service
from agentloop_servers.run.locks import RUN_LOCK
from tests.support.service.postgres_server import PASSWORD, PostgresServer
from tests.support.service.whole_service import simulated_config

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def run_dir(tmp_path: Path, postgres_server: PostgresServer) -> Path:
    return tmp_path / postgres_server.new_name()


def told(run_dir: Path) -> list[str]:
    """Return the files, except the run's own store file, in which the password can be read."""
    files = [path for path in run_dir.glob("*") if path.is_file() and path.name != "store"]
    children = psutil.Process().children(recursive=True)
    files += [Path(f"/proc/{child.pid}/{file}") for child in children for file in ("cmdline", "environ")]
    found = []
    for path in files:
        with suppress(OSError):  # the process has ended
            found += [str(path)] if PASSWORD.encode() in path.read_bytes() else []
    assert len(children) > 4
    return found


async def test_the_next_coordinator_has_the_run_once_the_lease_of_a_killed_one_is_over(
    run_dir: Path, postgres_server: PostgresServer
) -> None:
    config = simulated_config(store=postgres_server.url, port=0)
    tasks = [RolloutTask(f"t{number}", (Message("user", "What is 2 + 3?"),)) for number in range(100)]
    async with running_service(config, run_dir) as url, RolloutClient(url) as client:
        await client.wait_until_ready()
        rollout = await client.submit(tasks, num_samples=4)
        number = "SELECT number FROM leases WHERE name = 'coordinator'"
        [(first,)] = postgres_server.execute(number, run_dir.name)
        pid = int(await asyncio.to_thread((run_dir / RUN_LOCK).read_text))
        os.kill(pid, signal.SIGKILL)
        records = [record async for record in rollout]
        assert len({(record.group_id, record.sample_index) for record in records}) == len(records) == 400
        [(second,)] = postgres_server.execute(number, run_dir.name)
        assert second == first + 1
        assert told(run_dir) == []
        # A coordinator that lost the run ends, and the one that Serve starts as its replacement takes the run over.
        taken = "UPDATE leases SET number = number + 10, until = clock_timestamp() WHERE name = 'coordinator'"
        postgres_server.execute(taken, run_dir.name)
        async with asyncio.timeout(120.0):
            while postgres_server.execute(number, run_dir.name) != [(second + 11,)]:
                await asyncio.sleep(0.2)
            while True:
                try:
                    again = await client.submit(tasks[:1])
                    break
                except AgentLoopError:
                    await asyncio.sleep(0.5)
        assert len([record async for record in again]) == 1
