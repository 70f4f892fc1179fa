"""The data of the viewer: from a run's files, however the run ended, and through a service's coordinator."""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from agentloop.api.annotations import AnnotatedRecord
from agentloop.api.coordinator import ReplicaUpdate, UpdateReport
from agentloop.errors import InvalidRequest
from agentloop.storage.trajectory_store import UPDATES, TrajectoryStore
from agentloop.types import KVPolicy
from agentloop.values.codec import encode, to_builtins
from agentloop_servers.config.service import keep_tokenizer
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.records import TokenLabels
from agentloop_view.app import viewer_app
from agentloop_view.pages import PAGES_FOLDER
from agentloop_view.stored_run import StoredRun
from tests.servers.ingress.test_ingress import opened
from tests.support.endpoint.front_door import serving
from tests.support.records.samples import encoded, make_trajectory
from tests.support.service.whole_service import simulated_config

MODEL = Path("examples/tiny_policy/v0").resolve()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TrajectoryStore]:
    store = TrajectoryStore(tmp_path / "trajectories.sqlite")
    await store.add_records(
        encoded([make_trajectory("g", n, reward=n / 4) for n in range(4)] + [make_trajectory()])
    )
    yield store
    await store.close()


async def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with aiohttp.ClientSession(auto_decompress=False) as http, http.get(url, headers=headers) as answer:
        return answer.status, await answer.read(), {name.lower(): value for name, value in answer.headers.items()}


async def test_a_run_is_read_while_it_is_written(store: TrajectoryStore, tmp_path: Path) -> None:
    stored = StoredRun(tmp_path / "trajectories.sqlite")
    async with serving(viewer_app(stored, TokenLabels(MODEL))) as url:
        listed = orjson.loads((await get(f"{url}/trajectories?group=r/g&order=best"))[1])
        assert [one["sample_index"] for one in listed["records"]] == [3, 2, 1, 0]
        assert (
            listed["totals"] != [] == orjson.loads((await get(f"{url}/trajectories?has_totals=false"))[1])["totals"]
        )
        shown = orjson.loads((await get(f"{url}/trajectories/{listed['records'][0]['seq']}"))[1])
        made = make_trajectory("g", 3, reward=0.75)
        assert shown["record"] == orjson.loads(orjson.dumps(to_builtins(made)))
        ids = {int(one) for path in made.paths for part in (path.prompt_ids, path.response_ids) for one in part}
        assert {int(one) for one in shown["texts"]} == ids
        assert all(isinstance(text, str) for text in shown["texts"].values())
        assert shown["missing"] == ""
        update = UpdateReport(1, 0, KVPolicy.RECOMPUTE, (ReplicaUpdate("a", 40.0, 5.0),), 50.0, 1.7e9)
        await store.save_state(UPDATES, (update,))
        [told] = orjson.loads((await get(f"{url}/updates"))[1])
        assert (told["version"], told["replicas"][0]["stall_ms"]) == (1, 5.0)
        await store.add_records(encoded([make_trajectory("late")]))
        assert len(orjson.loads((await get(f"{url}/trajectories"))[1])["records"]) == 6
        for path in ("/trajectories/99", "/status", "/ui/licences/htm.txt", "/ui/../config.json"):
            assert (await get(url + path))[0] == 404
    stored.close()


async def test_what_is_gone_is_said(store: TrajectoryStore, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "trajectories.sqlite") as db:
        db.execute("UPDATE trajectories SET value = x'' WHERE seq = 2")
    stored = StoredRun(tmp_path / "trajectories.sqlite")
    async with serving(viewer_app(stored, TokenLabels(tmp_path))) as url:
        status, body, _ = await get(f"{url}/trajectories/2")
        assert (status, orjson.loads(body)["error"]["param"]) == (404, "seq")
        shown = orjson.loads((await get(f"{url}/trajectories/1"))[1])
        assert shown["texts"] == {}
        assert shown["missing"] == f"token texts are not available: {tmp_path / 'tokenizer.json'} is missing"
    stored.close()
    with pytest.raises(InvalidRequest):
        StoredRun(tmp_path / "nothing.sqlite")


@pytest.mark.parametrize("keeps", [False, True])
def test_texts_are_of_the_tokenizer_that_the_run_was_begun_with(tmp_path: Path, keeps: bool) -> None:
    model, run_dir, data = tmp_path / "model", tmp_path / "run", AnnotatedRecord(encode(make_trajectory()))
    shutil.copytree(MODEL, model)
    keep_tokenizer(simulated_config(model=str(model), keep_tokenizer=keeps), run_dir)
    begun = TokenLabels(model, run_dir).page(data)
    assert (len(begun.texts), begun.missing) == (18, "")
    file = model / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")
    keep_tokenizer(simulated_config(model=str(model)), run_dir)  # the run resumes: its first tokenizer is used
    said = [f"{file} is not the run's tokenizer", f"{file} is missing"]
    for missing, end in zip(said, (file.unlink, tmp_path.exists), strict=True):
        shown = TokenLabels(model, run_dir).page(data)
        assert shown.texts == (begun.texts if keeps else {})
        assert shown.missing == ("" if keeps else f"token texts are not available: {missing}")
        end()


@pytest.mark.parametrize(("users", "statuses"), [(["user-1"], [401, 200, 200]), ([], [401, 401, 200])])
async def test_records_need_a_key_and_without_users_the_admins(
    tmp_path: Path, users: list[str], statuses: list[int]
) -> None:
    async with opened(tmp_path, Keys.of(users, "admin-1")) as door:
        for path in ("/trajectories", "/trajectories/7", "/trajectories/notable", "/updates"):
            headers = [{}, {"authorization": "Bearer user-1"}, {"authorization": "Bearer admin-1"}]
            assert [(await get(door.url + path, **one))[0] for one in headers] == statuses


async def test_a_service_shows_its_pages_to_all(tmp_path: Path) -> None:
    async with opened(tmp_path, Keys.of(["user-1"], "admin-1")) as door:
        status, content, headers = await get(f"{door.url}/ui/", **{"accept-encoding": "gzip"})
        assert (status, headers["content-encoding"], headers["content-type"]) == (
            200,
            "gzip",
            "text/html; charset=utf-8",
        )
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert gzip.decompress(content) == (await get(f"{door.url}/ui/", **{"accept-encoding": "identity"}))[1]
        assert (await get(f"{door.url}/ui/", **{"if-none-match": headers["etag"]}))[:2] == (304, b"")
        for file in PAGES_FOLDER.glob("*.js"):
            assert (await get(f"{door.url}/ui/{file.name}"))[0] == 200


async def test_the_command_serves_a_run_until_it_is_ended(store: TrajectoryStore, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentloop_servers.cli", "view", str(tmp_path), "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        line = (await process.stdout.readline()).decode()
        url = line.split("/ui/")[0]
        page = orjson.loads((await get(f"{url}/trajectories"))[1])
    process.terminate()
    await process.wait()
    assert len(page["records"]) == 5
