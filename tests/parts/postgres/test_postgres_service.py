"""A service whose records are in PostgreSQL: its start, an unavailable server, and the readers of its records."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import yaml
from structlog.testing import capture_logs
from typer.testing import CliRunner

from agentloop.api.coordinator import WorkerPort
from agentloop.client.client import RolloutClient
from agentloop.errors import Conflict, InvalidRequest
from agentloop.rollout.turn_journal import FinishedTurn, read_entries
from agentloop.storage.home import Home
from agentloop.types import Message, RolloutTask, StopReason
from agentloop_isolation.frames import Setup
from agentloop_servers.app import begun_run
from agentloop_servers.cli.commands import app
from agentloop_servers.config.service import SECRET_NAME, ServiceConfig, saved_config
from agentloop_servers.run.store import restore_run, resumed_config
from tests.support.engine.scripted import call
from tests.support.fleet.lost_worker import HangingEngine
from tests.support.service.cut_port import CutPort
from tests.support.service.postgres_server import PASSWORD, PostgresServer
from tests.support.service.whole_service import (
    SECRET,
    SIMULATED,
    ServiceSite,
    simulated_config,
    whole_service,
    whole_site,
)

runner = CliRunner()


def config_of(server: PostgresServer, **changed: Any) -> ServiceConfig:
    return simulated_config(store=server.url, **changed)


@pytest.fixture
def run_dir(tmp_path: Path, postgres_server: PostgresServer) -> Path:
    folder = tmp_path / postgres_server.new_name()
    folder.mkdir()
    (folder / SECRET_NAME).write_text(SECRET.key)
    return folder


async def test_while_the_server_is_away_nothing_is_accepted_and_what_runs_is_finished(
    run_dir: Path, postgres_server: PostgresServer
) -> None:
    config = config_of(postgres_server)
    begun_run(config, run_dir)
    tasks = [RolloutTask(f"t{number}", (Message("user", "What is 2 + 3?"),)) for number in range(8)]
    async with whole_service(config, run_dir) as url, RolloutClient(url) as client, aiohttp.ClientSession() as http:
        running = await client.submit(tasks, num_samples=4)
        with capture_logs() as logs:
            postgres_server.stop()
            try:
                for method, path, body in (
                    (
                        "POST",
                        "/rollouts",
                        {"tasks": [{"task_id": "t", "messages": [{"role": "user", "content": "?"}]}]},
                    ),
                    ("GET", f"/rollouts/{running.rollout_ids[0]}/trajectories", None),
                ):
                    async with http.request(method, url + path, json=body) as answer:
                        refused = await answer.json()
                        assert (answer.status, answer.headers["retry-after"]) == (503, "1"), refused
                        assert PASSWORD not in str(refused)
                async with http.get(f"{url}/health") as answer:
                    assert answer.status == 200
                await asyncio.sleep(1.0)  # the samples run and finish
            finally:
                postgres_server.start()
        records = [record async for record in running]
        assert len({(record.group_id, record.sample_index) for record in records}) == len(records) == 32
        assert [record.is_complete for record in records] == [True] * 32
    assert PASSWORD not in str(logs)


async def test_a_run_is_exported_shown_and_gone_on_with_from_its_database(
    run_dir: Path, postgres_server: PostgresServer
) -> None:
    config = config_of(postgres_server)
    secret = begun_run(config, run_dir).key
    async with whole_service(config, run_dir) as url, RolloutClient(url) as client:
        rollout = await client.submit([RolloutTask("t", (Message("user", "What is 2 + 3?"),))], num_samples=2)
        assert len([record async for record in rollout]) == 2
    read_and_go_on(config, secret, run_dir, rollout.rollout_ids[0])


def read_and_go_on(config: ServiceConfig, secret: str, run_dir: Path, rollout_id: str) -> None:
    assert not list(run_dir.glob("trajectories*"))
    out = run_dir / "out.jsonl"
    exported = runner.invoke(app, ["export", str(run_dir), "--format", "jsonl", "--out", str(out)])
    assert exported.exit_code == 0, exported.output
    assert len(out.read_text().splitlines()) == 2
    shown = runner.invoke(app, ["show", f"{rollout_id}/{rollout_id}-000000/0", "--run", str(run_dir)])
    assert "reward" in shown.output, shown.output
    assert begun_run(resumed_config(run_dir) or simulated_config(), run_dir).key == secret
    for other in (simulated_config(), simulated_config(store="postgresql://127.0.0.1:1/elsewhere")):
        with pytest.raises(InvalidRequest, match=r"are in postgresql://127.0.0.1:\d+/postgres, not in"):
            begun_run(other, run_dir)
    shutil.rmtree(run_dir)
    restore_run(config, run_dir)  # as on another host
    assert begun_run(resumed_config(run_dir) or simulated_config(), run_dir).key == secret
    shutil.rmtree(run_dir)
    with pytest.raises(InvalidRequest, match="belongs to another run"):
        begun_run(config, run_dir)
    assert not run_dir.exists()


async def test_a_run_goes_on_from_its_database_alone(
    run_dir: Path, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    config, there = config_of(postgres_server, replicas=1), tmp_path / "there" / run_dir.name
    begun_run(config, run_dir)
    task = RolloutTask("t", (Message("user", "What is 2 + 3?"),))
    engine = HangingEngine("Four.", hangs_at=0)
    async with whole_site(config, run_dir, lambda _: engine) as site, RolloutClient(site.urls[0]) as client:
        rollout = await client.submit([task], num_samples=2)
        async with asyncio.timeout(60.0):
            await engine.is_hanging.wait()
        with pytest.raises(Conflict, match=r"another service is still running run .*: process"):
            restore_run(config, there)
    assert not there.exists()
    shutil.rmtree(run_dir)
    restore_run(config, there)
    assert begun_run(config, there) == SECRET
    async with whole_service(config, there) as url, RolloutClient(url) as client:
        async with asyncio.timeout(60.0):
            while len((page := await client.read(rollout.rollout_ids[0], wait_s=5.0)).trajectories) < 2:
                pass
    assert {(record.sample_index, record.is_complete) for record in page.trajectories} == {(0, True), (1, True)}


async def num_kept(site: ServiceSite, assignment_id: str) -> int:
    """Return the number of turns that the store has of a sample."""
    found = await site.client.workers.kept_turns(assignment_id)
    return sum(isinstance(entry, FinishedTurn) for _, data in found for _, entry in read_entries(data))


async def test_a_lost_workers_trajectories_go_on_from_the_store_with_no_turn_sampled_again(
    run_dir: Path, postgres_server: PostgresServer
) -> None:
    config = config_of(postgres_server, replicas=1)
    begun_run(config, run_dir)
    lookups = (call("calculator", expression="1+1"), call("calculator", expression="2+2"), "The answer is 4.")
    engine = HangingEngine(*lookups, hangs_at=2)
    work = [RolloutTask("t", (Message("user", "What is 2 + 2?"),), tools=("calculator",))]
    async with (
        whole_site(config, run_dir, lambda _: engine, has_worker=False) as site,
        RolloutClient(site.urls[0]) as client,
    ):
        port = CutPort(site.client.workers)
        lost = site.add_worker("lost", cast(WorkerPort, port))
        rollout = await client.submit(work)
        async with asyncio.timeout(60.0):
            await engine.is_hanging.wait()
            while await num_kept(site, f"{rollout.rollout_ids[0]}/{rollout.rollout_ids[0]}-000000/0") < 2:
                await asyncio.sleep(0.05)
            port.is_cut = True
            lost.close()
            engine.hangs_at = 99
            site.add_worker("next", site.client.workers)
            (record,) = [record async for record in rollout]
        assert (record.stop_reason, record.num_resumed_turns, record.attempt) == (StopReason.COMPLETED, 2, 1)
        assert engine.num_turns == 4, "the turn that was under way, and the last one"
        assert postgres_server.execute("SELECT count(*) FROM turn_journals", run_dir.name) == [(0,)]


KEPT = ("authority", "config.json", "secret")


def begun(config: ServiceConfig, run_dir: Path) -> dict[str, str]:
    """Start or resume a run, and return the contents of its directory."""
    restore_run(config, run_dir)
    begun_run(config, run_dir)
    return {name: (run_dir / name).read_text() for name in KEPT}


@pytest.mark.parametrize("is_stored", [False, True])
def test_another_hosts_directory_is_of_the_run_where_a_database_has_it(
    is_stored: bool, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    name, run_tls = postgres_server.new_name(), {"tls": "run"}
    store = {"store": postgres_server.url} if is_stored else {}
    config = simulated_config(cluster=run_tls, **store)
    here = begun(config, tmp_path / "here" / name)
    other = simulated_config(cluster=run_tls, replicas=7, **store)
    there = begun(other, tmp_path / "there" / name)
    assert begun(other, tmp_path / "here" / name) == here
    assert [here[name] == there[name] for name in KEPT] == [is_stored] * 3
    modes = [(tmp_path / "there" / name / file).stat().st_mode & 0o777 for file in ("authority", "secret")]
    assert modes == [0o600] * 2
    assert resumed_config(tmp_path / "there" / name) == (config if is_stored else other)


def test_another_run_of_the_name_of_one_is_refused_and_changes_nothing_of_it(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    name, config = postgres_server.new_name(), config_of(postgres_server, cluster={"tls": "run"})
    here = begun(config, tmp_path / "here" / name)
    other = tmp_path / "other" / name
    begun_run(simulated_config(cluster={"tls": "run"}), other)  # its records are not in this backend
    with pytest.raises(InvalidRequest, match="belongs to another run"):
        begun(config, other)
    assert begun(config, tmp_path / "there" / name) == here


def test_a_run_of_before_gives_its_database_what_its_directory_has(
    run_dir: Path, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    config = config_of(postgres_server, cluster={"tls": "run"})
    here = begun(config, run_dir)
    postgres_server.execute("DELETE FROM about WHERE name IN ('authority', 'config.json', 'secret')", run_dir.name)
    with pytest.raises(InvalidRequest, match="belongs to another run"):
        begun(config, tmp_path / "there" / run_dir.name)
    assert begun(config, run_dir) == here
    assert begun(config, tmp_path / "there" / run_dir.name) == here


def test_the_password_is_in_one_file_of_the_run_and_in_no_other_process(
    run_dir: Path, postgres_server: PostgresServer
) -> None:
    config = config_of(postgres_server)
    begun_run(config, run_dir)
    assert [path.name for path in run_dir.iterdir() if PASSWORD in path.read_text()] == ["store"]
    assert (run_dir / "store").stat().st_mode & 0o777 == 0o600
    assert saved_config(run_dir) == config.model_copy(update={"store": None})
    setup = Setup.of(config, run_dir, None, takes_images=False, stores_turns=True)
    assert PASSWORD not in f"{setup} {config!r} {config.model_dump()} {config.model_dump_json()}"
    url = f"postgresql://db/x?password={PASSWORD}"
    engine = {"kind": "simulated", "device": "cpu", "load_format": "dummy"}
    with pytest.raises(ValueError, match="weights are not pushed in this mode") as refused:
        ServiceConfig.model_validate({"model": "m", "mode": "debug", "engine": engine, "store": url})
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("command", ["serve", "rollout"])
def test_a_store_that_cannot_be_is_told_in_one_line_before_anything_is_started(
    command: str, tmp_path: Path, postgres_run: Home
) -> None:
    out, file = tmp_path / "runs", tmp_path / "config.yaml"
    document = yaml.safe_load(SIMULATED.read_text())
    document["applications"][0]["args"]["port"] = 0
    for store, message in (
        (f"mysql://me:{PASSWORD}@db/x", "error: unknown store mysql://db/x: expected postgresql://"),
        (f"postgresql://me:{PASSWORD}@127.0.0.1:9/x", "error: store postgresql://127.0.0.1:9/x: cannot connect"),
    ):
        document["applications"][0]["args"]["store"] = store
        file.write_text(yaml.safe_dump(document))
        result = runner.invoke(app, [command, "--config", str(file), "--out", str(out)])
        assert (result.exit_code, result.output.splitlines()[-1][: len(message)]) == (1, message), result.output
        assert PASSWORD not in result.output
        assert not out.exists()


def test_without_the_driver_the_extra_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "psycopg"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "agentloop_postgres.home", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    config = simulated_config(store=f"postgresql://me:{PASSWORD}@127.0.0.1/x")
    with pytest.raises(InvalidRequest, match=r"no module named .psycopg.: .*'\.\[postgres\]'"):
        begun_run(config, run_dir)
