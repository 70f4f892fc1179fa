"""Failed or old runs: `agentloop view` opens each and names the missing data, or refuses."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader
from agentloop.types import Limits
from agentloop_servers.ingress.records import TokenLabels
from agentloop_view.app import viewer_app
from agentloop_view.stored_run import StoredRun
from tests.servers.processes import deployed, processes_with
from tests.servers.test_service import collect, command_serve, tasks, url_in
from tests.support.endpoint.front_door import serving
from tests.support.records.samples import fill_store, make_group, make_trajectory
from tests.support.service.whole_service import SIMULATED

NUM_WRITTEN, NUM_TOGETHER = 1_920, 16  # more than the write-ahead log holds before it is checkpointed
WRITER = f"""
import asyncio, sys
from pathlib import Path
from agentloop.storage.trajectory_store import TrajectoryStore
from tests.support.records.samples import encoded, make_group, make_trajectory

async def main():
    store = TrajectoryStore(Path(sys.argv[1]))
    await store.accept("r", [make_group("g", {NUM_WRITTEN})])
    for first in range(0, {NUM_WRITTEN}, {NUM_TOGETHER}):
        await store.add_records(encoded([make_trajectory("g", first + n) for n in range({NUM_TOGETHER})]))
    print("written", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        body = await answer.read()
        return answer.status, orjson.loads(body) if answer.content_type == "application/json" else body


@asynccontextmanager
async def viewing(run: Path) -> AsyncIterator[tuple[str, list[str], int]]:
    """Run `agentloop view` of a run: yields its URL, its earlier output and its process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentloop_servers.cli", "view", str(run), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    said = [""]
    try:
        async with asyncio.timeout(120):
            while not said[-1].endswith("/ui/\n"):
                said.append((await process.stdout.readline()).decode())
        yield said[-1].removesuffix("/ui/\n"), said[1:-1], process.pid
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture(scope="module")
def killed_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store's folder whose writer was killed: part of its rows are in the file, the others in its log."""
    folder = tmp_path_factory.mktemp("killed")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder / STORE_NAME)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    writer.kill()
    writer.communicate()
    return folder


CUTS = [0, 1, 20, 100, 16_384, 65_536, 0.3, 0.6, 0.9, 0.999]  # bytes, or a share of the file
WAL = f"{STORE_NAME}-wal"


def refusal_of(run_dir: Path) -> str:
    try:
        with closing(TrajectoryReader(run_dir / STORE_NAME)) as reader:
            reader.progress()
    except InvalidRequest as refusal:
        return refusal.message
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut"), [(name, cut) for name in (STORE_NAME, WAL) for cut in CUTS])
async def test_a_torn_store_is_shown_as_far_as_it_goes_or_refused(
    killed_writer: Path, tmp_path: Path, name: str, cut: float
) -> None:
    run_dir = shutil.copytree(killed_writer, tmp_path / "run")
    num_bytes = (run_dir / name).stat().st_size
    os.truncate(run_dir / name, cut if isinstance(cut, int) else int(cut * num_bytes))
    (run_dir / f"{STORE_NAME}-shm").unlink()  # the shared-memory file of the log
    if refusal := refusal_of(run_dir):
        assert (name, str(run_dir) in refusal, "\n" in refusal) == (STORE_NAME, True, False)
        return
    stored = StoredRun(run_dir / STORE_NAME)
    async with serving(viewer_app(stored, TokenLabels(None))) as url:
        for path in (
            "/trajectories/notable",
            "/updates",
            *(f"/trajectories/{n}" for n in range(1, NUM_WRITTEN, 64)),
        ):
            status, body = await get(url + path)
            assert status == 200 or re.match(
                f"unknown record|the .* of {run_dir} cannot be read", body["error"]["message"]
            )
        if name == WAL:  # the last committed transactions are lost, each of them completely
            _, page = await get(f"{url}/trajectories?limit=200")
            latest = page["records"][0]["seq"]
            assert [one["seq"] for one in page["records"]] == list(range(latest, latest - 200, -1))
            assert latest % NUM_TOGETHER == 0
            assert latest < NUM_WRITTEN or not isinstance(cut, int)
    stored.close()


@pytest.mark.ray
@pytest.mark.slow
async def test_a_run_whose_coordinator_was_killed_at_work_shows_what_was_committed(tmp_path: Path) -> None:
    config, marker = tmp_path / "any_port.yaml", f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    config.write_text(SIMULATED.read_text().replace("port: 8000", "port: 0"))
    service, lines = command_serve(marker, "--config", str(config), "--out", str(tmp_path / "runs"))
    run_dir = (tmp_path / "runs" / "latest").resolve()
    async with RolloutClient(url_in(lines)) as client:
        done = await collect(await client.submit(tasks(5), num_samples=2))
        await client.submit(tasks(3, limits=Limits(max_tokens_per_turn=1500, timeout_s=300)), num_samples=2)
        [coordinator] = deployed("Coordinator", service.pid)
        os.kill(coordinator, signal.SIGKILL)
        os.killpg(service.pid, signal.SIGKILL)
    service.communicate()
    async with viewing(run_dir) as (url, said, _):
        assert said == ["10 of 16 accepted trajectories have a record\n"]
        _, page = await get(f"{url}/trajectories")
        assert {(one["task_id"], one["sample_index"]) for one in page["records"]} == set(done)
        for one in page["records"]:
            status, shown = await get(f"{url}/trajectories/{one['seq']}")
            assert (status, shown["record"]["task_id"], shown["missing"]) == (200, one["task_id"], "")
    assert processes_with(marker, grace_s=90.0) == []


@pytest.mark.long
async def test_a_thousand_page_views_take_no_memory(tmp_path: Path) -> None:
    records = [make_trajectory("g", n) for n in range(500)]
    await asyncio.to_thread(fill_store, tmp_path / STORE_NAME, {"r": [make_group("g", 500)]}, records)
    async with viewing(tmp_path) as (url, _, pid):
        held = []
        for number in range(1_000):
            for path in (
                "/ui/",
                "/ui/app.js",
                "/trajectories?limit=200",
                "/trajectories/notable",
                f"/trajectories/{number % 500 + 1}",
            ):
                assert (await get(url + path))[0] == 200
            held.append(psutil.Process(pid).memory_info().rss)
    assert held[-1] < held[99] + (8 << 20)
