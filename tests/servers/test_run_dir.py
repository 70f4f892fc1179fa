"""The run's directory: its secret outlives a deployment, and no other user can read it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentloop.errors import Conflict, InvalidRequest
from agentloop.storage.sqlite import Schema, open_database
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop_servers.config.service import (
    ServiceConfig,
    keep_config,
    made_run_dir,
    new_run_dir,
    run_secret,
    saved_config,
)
from agentloop_servers.http.auth import SessionKeys
from agentloop_servers.run.locks import RUN_LOCK, take_run_lock
from agentloop_servers.run.store import check_store


def test_the_keys_of_sessions_are_good_after_another_deployment(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    key = SessionKeys(run_secret(folder)).agent_key("s")
    opened = SessionKeys(run_secret(folder)).opened_by(key)
    assert opened is not None
    assert opened.session_id == "s"
    assert SessionKeys(run_secret(tmp_path / "other")).opened_by(key) is None


def test_the_secret_is_one_and_its_owners(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: run_secret(tmp_path), range(64)))
    assert len(found) == 1
    assert len(found.pop()) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_two_runs_have_two_directories(tmp_path: Path) -> None:
    assert new_run_dir(tmp_path) != new_run_dir(tmp_path)


HOLDER = """
import asyncio, pathlib, sys, time
from agentloop_servers.run.locks import take_run_lock
lock = asyncio.run(take_run_lock(pathlib.Path(sys.argv[1]), 0.0))
print("held", flush=True)
time.sleep(60)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Start another process that holds a directory's lock."""
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)


async def test_a_directory_has_one_service_and_names_its_process(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)  # it could continue at any moment
        with pytest.raises(Conflict, match=f"still running in .*: process {holder.pid}; stop it first$"):
            await take_run_lock(tmp_path, 0.0)
    finally:
        holder.kill()
        holder.communicate()
    lock = await take_run_lock(tmp_path, 10.0)  # a dead process holds no lock
    assert (tmp_path / RUN_LOCK).read_text() == str(os.getpid())
    with pytest.raises(Conflict):
        await take_run_lock(tmp_path, 0.0)
    lock.release()
    lock.release()
    (await take_run_lock(tmp_path, 0.0)).release()


def test_a_run_goes_on_with_the_config_that_it_was_begun_with(tmp_path: Path) -> None:
    assert saved_config(tmp_path) is None
    config = ServiceConfig.model_validate({"model": "m", "ingress_replicas": 2})
    keep_config(config, tmp_path)
    assert saved_config(tmp_path) == config
    keep_config(config.model_copy(update={"replicas": 3}), tmp_path)
    assert saved_config(tmp_path) == config
    with pytest.raises(InvalidRequest, match="partitioned over 2 ingress processes, not 1"):
        keep_config(config.model_copy(update={"ingress_replicas": 1}), tmp_path)


def test_a_run_whose_config_has_a_removed_key_is_refused(tmp_path: Path) -> None:
    config = ServiceConfig.model_validate({"model": "m", "engines": [{"kind": "simulated"}]})
    document = config.model_dump(mode="json")
    document["updates"]["consistency"] = "replica"
    for content in (json.dumps(document), "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidRequest, match="is not valid in this release"):
            saved_config(tmp_path)


@pytest.mark.parametrize("name", ["trajectories.sqlite", "sessions-1.sqlite"])
async def test_a_run_with_a_damaged_store_or_one_of_another_version_is_refused(tmp_path: Path, name: str) -> None:
    config = ServiceConfig(model="x")
    check_store(config, tmp_path / "new")
    await TrajectoryStore(tmp_path / "trajectories.sqlite").close()
    open_database(tmp_path / "sessions-1.sqlite", Schema("x", 1, "CREATE TABLE t (n INTEGER);", "NORMAL")).close()
    check_store(config, tmp_path)
    os.truncate(tmp_path / name, 5000)
    with pytest.raises(InvalidRequest, match=f"/{name} is damaged"):
        check_store(config, tmp_path)
    (tmp_path / "trajectories.sqlite").unlink()
    (tmp_path / "sessions-1.sqlite").unlink()
    open_database(tmp_path / "trajectories.sqlite", Schema("x", 2, "", "NORMAL")).close()
    with pytest.raises(InvalidRequest, match=r"trajectories\.sqlite has schema version 2, but"):
        check_store(config, tmp_path)


def test_a_run_is_its_owners_alone_and_so_is_one_of_before(tmp_path):
    made = new_run_dir(tmp_path)
    before, schema = tmp_path / "before", Schema("store", 1, "CREATE TABLE t (a);", "NORMAL")
    before.mkdir(mode=0o755)
    for folder in (made, before):
        run_secret(made_run_dir(folder))
        database = open_database(folder / "trajectories.sqlite", schema)
        database.execute("INSERT INTO t VALUES (1)")
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        database.close()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {"trajectories.sqlite", "trajectories.sqlite-wal", "secret"} <= set(modes)
        assert set(modes.values()) == {0o600}
