"""The command line, and the part of a rollout run that does not use Ray, over the real HTTP app."""

from __future__ import annotations

import asyncio
import io
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from agentloop import __version__
from agentloop.api.coordinator import ReplicaHold, ReplicaUpdate, RolloutStatus, RolloutTerms, UpdateReport
from agentloop.client.client import RolloutClient
from agentloop.engine.interface import ALL_MEMORY, MemoryTag
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    InvalidRequest,
    Unauthorized,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.storage.summary import StaleSummary
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop.types import KVPolicy, OnStale, RolloutGroup, StalenessLimit, StopReason
from agentloop_servers.cli import load
from agentloop_servers.cli import run as cli_run
from agentloop_servers.cli.commands import COMMANDS, app
from agentloop_servers.cli.doctor import Check, examine
from agentloop_servers.cli.progress import PlainProgress, summary_table
from agentloop_servers.cli.run import (
    Collected,
    RunOptions,
    WeightPush,
    check_can_end,
    collect,
    link_latest,
    write_results,
)
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.records.samples import fill_store, make_group, make_task, make_trajectory

runner = CliRunner()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "20260101-000000-abcd"
    path.mkdir()
    fill_store(
        path / STORE_NAME,
        {"r": [make_group("a", 2), make_group("b", 1)]},
        [make_trajectory("a", 0), make_trajectory("a", 1, spans=((1, 0, 3),)), make_trajectory("b", 0)],
    )
    return path


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[str, FakeCoordinator]]:
    """Run the HTTP app in a separate thread, because the commands run their own event loops."""
    coordinator = FakeCoordinator()
    ready, stop = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        front_door = create_app(
            coordinator, ReversingEngine().connect, Keys.of([], "admin"), weight_roots=[tmp_path]
        )
        async with serving(front_door) as url:
            found.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    yield found[0], coordinator
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


@pytest.mark.parametrize("name", ["parquet", "jsonl"])
def test_export_writes_beside_the_store(run_dir: Path, name: str) -> None:
    result = runner.invoke(app, ["export", str(run_dir), "--format", name])
    assert result.exit_code == 0, result.output
    assert "3 rows" in result.output
    out = run_dir / f"trajectories.{name}"
    rows = pq.read_table(out).num_rows if name == "parquet" else len(out.read_bytes().splitlines())
    assert rows == 3


def test_export_takes_a_target_and_a_rollout(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    arguments = ["export", str(run_dir / STORE_NAME), "--format", "jsonl", "--out", str(out)]
    assert runner.invoke(app, [*arguments, "--rollout-id", "r"]).exit_code == 0
    assert len(out.read_bytes().splitlines()) == 3
    result = runner.invoke(app, [*arguments, "--rollout-id", "nobody"])
    assert result.exit_code == 1
    assert "error: unknown rollout 'nobody'" in result.output


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["export", "no-such-run"], 1, "error: no run 'no-such-run'"),
        (["export", "x", "--format", "csv"], 2, "csv"),
        (["rollout", "--samples", "0"], 2, "samples"),
        (["sleep", "--level", "3"], 2, "level"),
        (["wake", "--tag", "lora"], 2, "tag"),
        (["rollout", "--push-after", "2"], 2, "push-after"),
        (["rollout", "--config", "absent.yaml"], 1, "error: cannot read the config"),
        (["rollout", "--tasks", "absent.jsonl"], 1, "error: cannot read tasks"),
        (["rollout", "--max-staleness", "-1"], 2, "max-staleness"),
        (["rollout", "--max-staleness", "0", "--on-stale", "keep"], 2, "on-stale"),
        (["rollout", "--max-staleness", "0", "--trajectories-per-version", "0"], 2, "trajectories-per-version"),
        (["rollout", "--on-stale", "drop"], 2, "need --max-staleness"),
        (["rollout", "--trajectories-per-version", "8"], 2, "need --max-staleness"),
        (
            ["rollout", "--max-staleness", "0", "--trajectories-per-version", "8", "--no-push"],
            1,
            "error: the staleness limit allows only 8 of 512 trajectories: the run would never end",
        ),
        (["serve", "--config", "absent.yaml"], 1, "error: cannot read the config: --config absent.yaml: nothing"),
        (["rollout", "--tasks", "absent.jsonl"], 1, "--tasks absent.jsonl: nothing of that name is here, nor in"),
        (["rollout", "--push", "absent"], 1, "error: cannot read weights: --push absent: nothing of that name"),
        (["rollout", "--url", "http://127.0.0.1:9"], 1, "error: no response from http://127.0.0.1:9"),
        (
            ["rollout", "--url", "http://127.0.0.1:9", "--config", "x"],
            2,
            "--url excludes --config and --model",
        ),
        (["rollout", "--url", "http://127.0.0.1:9", "--model", "x"], 2, "--url excludes --config and --model"),
        (["rollout", "--model", "no-such-model"], 1, "error: no model at no-such-model: expected a folder with"),
        (["serve", "--model", "no-such-model"], 1, "error: no model at no-such-model: expected a folder with"),
        (["serve", "--model", "x", "--resume", "y"], 2, "--model and --resume exclude each other"),
        (["pause", "--mode", "never"], 2, "mode"),
        (["show", "t", "--run", "no-such-run"], 1, "error: no run 'no-such-run'"),
        (["status", "--url", "http://127.0.0.1:9"], 1, "error: no response from http://127.0.0.1:9"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: list[str], exit_code: int, message: str) -> None:
    result = runner.invoke(app, arguments, env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert result.exit_code == exit_code
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["servee"], ["expor", "x"]])
def test_help_version_and_a_typo_answer_without_importing_a_command(arguments: list[str]) -> None:
    """Measured in CPU time: an import of the service takes several seconds of it."""
    program = f"""
import sys, time
sys.argv = ["agentloop", *{arguments!r}]
from agentloop_servers.cli import main
try:
    main()
except SystemExit as end:
    heavy = {{"ray", "fastapi", "tokenizers", "numpy", "aiohttp"}} & set(sys.modules)
    print(end.code, heavy or "light", time.process_time())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    *said, last = done.stdout.splitlines()
    code, imported, cpu_s = last.split()
    assert (int(code), imported) == (0 if arguments[0].startswith("--") else 2, "light"), done.stdout + done.stderr
    assert float(cpu_s) < 0.5 * 3  # about 0.25 s on an idle core
    if arguments == ["--version"]:
        assert said == [f"agentloop {__version__}"]
    if arguments == ["expor", "x"]:
        assert "Did you mean 'export'" in done.stderr


def test_the_help_has_each_command_with_the_first_words_of_its_own() -> None:
    for name, (module, line) in COMMANDS.items():
        own = typer.main.get_group(load(module).app).commands[name]
        assert (own.help or "").strip().startswith(line.removesuffix(".")), name


@pytest.mark.parametrize("command", ["serve", "rollout"])
def test_a_service_that_cannot_be_leaves_no_run_and_does_not_move_the_latest(command: str, tmp_path: Path) -> None:
    config, out = tmp_path / "config.yaml", tmp_path / "runs"
    config.write_text("applications: [{args: {model: no/such/model, engine: {kind: simulated}, port: 0}}]")
    (out / "one").mkdir(parents=True)
    link_latest(out / "one")
    result = runner.invoke(app, [command, "--config", str(config), "--out", str(out)])
    assert (result.exit_code, "no model at no/such/model" in result.output) == (1, True)
    assert sorted(path.name for path in out.iterdir()) == ["latest", "one"]
    assert (out / "latest").resolve() == out / "one"


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "runs"
    simulated = Path(__file__).parents[3] / "servers" / "simulated.yaml"
    result = runner.invoke(app, ["serve", "--config", str(simulated), "--out", str(out)])
    assert result.exit_code == 1
    assert f"cannot create the run directory {out}" in result.output
    assert "Not a directory; choose another one with --out, or run_dir in the config" in result.output


def test_a_trajectory_is_shown_as_a_conversation(run_dir: Path) -> None:
    arguments = ["show", "a/1", "--run", str(run_dir)]
    result = runner.invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "r/a/1, task" in result.output
    assert "weight versions v1" in result.output
    [message, *_] = make_trajectory("a", 1).messages
    assert message.content in result.output
    several = runner.invoke(app, ["show", "a", "--run", str(run_dir)], env={"COLUMNS": "200"})
    assert (several.exit_code, "'a' means r/a/0, r/a/1" in several.output) == (1, True)
    none = runner.invoke(app, ["show", "c", "--run", str(run_dir)], env={"COLUMNS": "200"})
    assert "'c' means none; there are r/a/0" in none.output


def test_a_run_is_listed(run_dir: Path) -> None:
    def run(*arguments: str) -> str:
        result = runner.invoke(app, list(arguments), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    listed = run("list", str(run_dir), "--limit", "2")
    assert "r/b/0" in listed.splitlines()[1]
    assert "r/a/1" in listed.splitlines()[2]
    assert "3 records so far" in listed
    assert "r/a/0" in run("list", str(run_dir), *shlex.split(listed.split("more: ")[1]))
    assert "r/" not in run("list", str(run_dir), "--failed")
    assert "r/b/0" in run("list", str(run_dir), "--task", "task-b", "--order", "best")
    narrow = runner.invoke(app, ["list", str(run_dir), "--limit", "2"], env={"COLUMNS": "40"})
    assert "r/b/0" in narrow.output
    assert "…" not in narrow.output


def test_a_rollout_on_a_running_service_makes_a_run_of_its_own(
    service: tuple[str, FakeCoordinator], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t1", "messages": [{"role": "user", "content": "hello"}]}\n')
    arguments = ["rollout", "--url", service[0], "--tasks", str(tasks), "--samples", "3", "--out", str(tmp_path)]
    result = runner.invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "3 of 3 accepted, 0 lost" in result.output
    latest = (tmp_path / "latest").resolve()
    assert pq.read_table(latest / "trajectories.parquet").num_rows == 3
    rollout_id = pq.read_table(latest / "trajectories.parquet")["rollout_id"][0].as_py()
    shown = runner.invoke(app, ["show", f"{rollout_id}-000000/2", "--run", str(latest)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output


def test_cancel_pause_and_resume(service: tuple[str, FakeCoordinator]) -> None:
    url, coordinator = service
    keys = {"AGENTLOOP_ADMIN_KEY": "admin", "COLUMNS": "200"}
    coordinator.is_holding = True
    rollout_id = asyncio.run(_submit(url))
    result = runner.invoke(app, ["cancel", rollout_id, "--url", url], env=keys)
    assert (result.exit_code, coordinator.is_cancelled) == (0, True), result.output
    assert f"{rollout_id}: " in result.output
    assert runner.invoke(app, ["pause", "--reason", "eval", "--url", url], env=keys).output == "paused\n"
    assert coordinator.paused is not None
    assert runner.invoke(app, ["resume", "--url", url], env=keys).output == "resumed\n"
    assert coordinator.paused is None
    refused = runner.invoke(app, ["pause", "--url", url], env={"AGENTLOOP_ADMIN_KEY": ""})
    assert (refused.exit_code, "error: " in refused.output) == (1, True)


def test_status_shows_the_fleet(service: tuple[str, FakeCoordinator]) -> None:
    result = runner.invoke(app, ["status", "--url", service[0]])
    assert result.exit_code == 0, result.output
    assert "ready, weight version 0, 1 worker(s)" in result.output
    assert "replica-1" in result.output


async def _submit(url: str) -> str:
    async with RolloutClient(url) as client:
        return (await client.submit([make_task("t")], num_samples=3)).rollout_ids[0]


def test_status_says_what_a_staleness_limit_holds_back(service: tuple[str, FakeCoordinator]) -> None:
    url, coordinator = service
    coordinator.is_holding = True
    rollout_id = asyncio.run(_submit(url))
    arguments, wide = ["status", "--url", url], {"COLUMNS": "200"}
    assert "held" not in runner.invoke(app, arguments, env=wide).output
    coordinator.num_held = 2
    [line] = [line for line in runner.invoke(app, arguments, env=wide).output.splitlines() if rollout_id in line]
    assert " ".join(line.split()[1:]) == "- 0 3 0 0 3 2 of them held for the next version"


def test_status_shows_held_replicas_and_only_an_admin_holds_them(service: tuple[str, FakeCoordinator]) -> None:
    url, coordinator = service

    async def hold(**keys: str) -> None:
        async with RolloutClient(url, **keys) as client, client.hold(1, timeout_s=600.0) as held:
            assert (held.version, held.hold.replicas) == (0, ("replica-1",))
            assert coordinator.holds == (held.hold,)

    with pytest.raises(Unauthorized):
        asyncio.run(hold())
    asyncio.run(hold(admin_key="admin"))
    assert coordinator.holds == ()
    coordinator.holds = (ReplicaHold("h", 3, ("replica-1",), ("replica-2",), 600.0),)
    output = runner.invoke(app, ["status", "--url", url], env={"COLUMNS": "200"}).output
    assert "held at version 3 for at most 600 s more: replica-1, 1 lost\n" in output


def test_weights_push_needs_the_admin_key(service: tuple[str, FakeCoordinator], tmp_path: Path) -> None:
    url, coordinator = service
    arguments = ["weights", "push", str(tmp_path), "--version", "3", "--url", url]
    refused = runner.invoke(app, arguments, env={"AGENTLOOP_ADMIN_KEY": ""})
    assert (refused.exit_code, coordinator.updates) == (1, [])
    result = runner.invoke(app, [*arguments, "--kv-policy", "keep"], env={"AGENTLOOP_ADMIN_KEY": "admin"})
    assert result.exit_code == 0, result.output
    assert "version 3 live" in result.output
    assert coordinator.updates[0][1] is KVPolicy.KEEP


def test_status_shows_what_is_asleep_and_why_a_replica_is_quarantined(
    service: tuple[str, FakeCoordinator],
) -> None:
    url, coordinator = service
    coordinator.asleep = frozenset({MemoryTag.KV_CACHE})
    coordinator.replica_error = "commit: checksums of [model.embed] differ"
    result = runner.invoke(app, ["status", "--url", url])
    assert "asleep (kv_cache), weight version 0" in result.output
    assert "replica-1: commit: checksums of [model.embed] differ" in result.output


def test_an_adapter_is_pushed_as_one(service: tuple[str, FakeCoordinator], tmp_path: Path) -> None:
    url, coordinator = service
    arguments = ["weights", "push", str(tmp_path), "--version", "3", "--adapter", "--url", url]
    result = runner.invoke(app, arguments, env={"AGENTLOOP_ADMIN_KEY": "admin"})
    assert result.exit_code == 0, result.output
    assert coordinator.updates[0][0].adapter == str(tmp_path.resolve())


def test_sleep_and_wake(service: tuple[str, FakeCoordinator]) -> None:
    url, coordinator = service
    keys = {"AGENTLOOP_ADMIN_KEY": "admin"}
    result = runner.invoke(app, ["sleep", "--level", "2", "--url", url], env=keys)
    assert (result.exit_code, result.output) == (0, "asleep at level 2\n")
    assert (coordinator.sleep_levels, coordinator.asleep) == ([2], ALL_MEMORY)
    result = runner.invoke(app, ["wake", "--tag", "weights", "--url", url], env=keys)
    assert (result.exit_code, result.output) == (0, "awake: weights\n")
    assert coordinator.asleep == {MemoryTag.KV_CACHE}
    assert runner.invoke(app, ["wake", "--url", url], env=keys).output == "awake: all\n"
    assert coordinator.asleep == frozenset()
    refused = runner.invoke(app, ["sleep", "--url", url], env={"AGENTLOOP_ADMIN_KEY": ""})
    assert refused.exit_code == 1
    assert "error: " in refused.output


def test_doctor_says_what_is_there() -> None:
    checks = {check.name: check for check in examine()}
    assert checks["python"].is_ok
    assert checks["ray"].is_ok
    assert checks["sandbox"] == Check("sandbox", True, checks["sandbox"].detail)
    result = runner.invoke(app, ["doctor"], env={"COLUMNS": "200"})
    is_broken = any(check.is_needed and not check.is_ok for check in checks.values())
    assert result.exit_code == int(is_broken)
    assert ("BROKEN" in result.output) == is_broken
    assert "6 * 7 = 42" in result.output


def test_latest_follows_the_newest_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        link_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == (tmp_path / name).resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]


def test_ctrl_c_during_the_long_imports_is_quiet() -> None:
    program = """
import os, signal, sys
import agentloop_servers.cli as cli
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "agentloop_servers.config.service":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["agentloop", "serve", "--config", "absent"]
cli.main()
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout + process.stderr) == (130, "")


# A run without Ray


async def run(
    coordinator: FakeCoordinator, tmp_path: Path, push: WeightPush | None, limit: StalenessLimit | None = None
) -> tuple[Collected, str]:
    output = io.StringIO()
    console = Console(file=output, width=200)
    front_door = create_app(coordinator, ReversingEngine().connect, Keys(), weight_roots=[tmp_path])
    async with serving(front_door) as url, RolloutClient(url) as client:
        tasks = [make_task(f"t{index}") for index in range(50)]
        options = RunOptions(tmp_path, 2, tmp_path, push, limit)
        collected = await collect(client, tasks, options, PlainProgress(console))
    return collected, output.getvalue()


async def test_a_run_collects_everything_and_pushes_once_in_the_middle(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    collected, output = await run(coordinator, tmp_path, WeightPush(tmp_path, 1, 0.25))
    assert (collected.num_accepted, collected.num_received, collected.push_error) == (100, 100, None)
    [(update, policy)] = coordinator.updates
    assert (update.version, policy) == (1, KVPolicy.RECOMPUTE)
    assert [report.version for report in collected.updates] == [1]
    assert "rollout  100/100" in output
    assert "tok/s" in output
    assert "version 1 live, decoding paused for 20 ms" in output


@pytest.mark.parametrize("after_share", [0.0, 1.0])
async def test_a_push_at_either_end_happens(tmp_path: Path, after_share: float) -> None:
    coordinator = FakeCoordinator()
    await run(coordinator, tmp_path, WeightPush(tmp_path, 1, after_share))
    assert len(coordinator.updates) == 1


class FailingPushes(FakeCoordinator):
    """A pusher that raises these errors, one per push."""

    def __init__(self, *errors: AgentLoopError) -> None:
        super().__init__()
        self.errors = list(errors)

    async def update_weights(self, *arguments: Any, **options: Any) -> UpdateReport:
        self.update_error = self.errors.pop(0) if self.errors else None
        return await super().update_weights(*arguments, **options)


@pytest.mark.parametrize(
    ("errors", "is_pushed"),
    [
        ([WeightUpdateFailed("slow")], True),
        ([WeightUpdateFailed("slow")] * 2, True),
        ([WeightUpdateFailed("slow")] * 3, False),
        ([WeightsRefused("slow")], False),
        ([Conflict("slow")], False),
    ],
)
async def test_a_push_that_fails_on_the_replicas_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[AgentLoopError], is_pushed: bool
) -> None:
    monkeypatch.setattr(cli_run, "PUSH_WAIT_S", 0.0)
    coordinator = FailingPushes(*errors)
    collected, output = await run(coordinator, tmp_path, WeightPush(tmp_path, 1, 0.5))
    assert collected.num_received == 100  # a failed push costs no trajectory
    assert (len(collected.updates), collected.push_error is None) == (int(is_pushed), is_pushed)
    assert output.count("version 1 not pushed, trying again: slow") == len(errors) - (not is_pushed)
    assert ("version 1 not pushed: slow" in output) is not is_pushed
    assert coordinator.errors == []


@pytest.mark.parametrize("limit", [None, StalenessLimit(0, OnStale.DROP), StalenessLimit(2, OnStale.MASK, 64)])
async def test_a_run_submits_under_its_limit(tmp_path: Path, limit: StalenessLimit | None) -> None:
    coordinator = FakeCoordinator()
    collected, _ = await run(coordinator, tmp_path, None, limit)
    assert collected.num_received == 100
    submitted = {group.staleness for groups in coordinator.groups.values() for group in groups.values()}
    if limit is None:
        assert submitted == {None}
    else:
        [found] = submitted
        assert found is not None
        assert replace(found, run_id="") == limit


class HoldingCoordinator(FakeCoordinator):
    """A coordinator that finishes the first half of the samples; the others end only by cancellation."""

    async def submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        user_names: tuple[str, ...] | None = None,
    ) -> RolloutStatus:
        self.is_holding = True
        await super().submit(rollout_id, groups, terms, user_names)
        for group in groups[: len(groups) // 2]:
            self.finished[rollout_id] += self._records(group)
        return self._status(rollout_id)

    async def cancel(self, rollout_id: str, user_names: tuple[str, ...] | None = None) -> RolloutStatus:
        for group in list(self.groups[rollout_id].values())[len(self.groups[rollout_id]) // 2 :]:
            ended = [replace(one, stop_reason=StopReason.CANCELLED) for one in self._records(group)]
            self.finished[rollout_id] += ended
        self._wake()
        return await super().cancel(rollout_id, user_names)


async def test_a_failed_push_ends_what_waits_for_its_version(tmp_path: Path) -> None:
    coordinator = HoldingCoordinator()
    coordinator.update_error = WeightUpdateFailed("replica-1: no such tensor")
    async with asyncio.timeout(30):
        collected, _ = await run(
            coordinator, tmp_path, WeightPush(tmp_path, 1, 0.25), StalenessLimit(0, trajectories_per_version=50)
        )
    assert coordinator.is_cancelled
    assert (collected.num_accepted, collected.num_received) == (100, 100)
    assert isinstance(collected.push_error, WeightUpdateFailed)


@pytest.mark.parametrize(
    ("limit", "push", "message"),
    [
        (None, None, None),
        (StalenessLimit(0), None, None),
        (StalenessLimit(1, trajectories_per_version=50), None, None),
        (StalenessLimit(1, trajectories_per_version=49), None, "allows only 98 of 100 trajectories: .* never end"),
        (StalenessLimit(0, trajectories_per_version=50), (1, 0.5), None),
        (
            StalenessLimit(0, trajectories_per_version=50),
            (1, 0.51),
            "allows only 50 of 100 .* never reach its push",
        ),
        (StalenessLimit(0, trajectories_per_version=49), (1, 0.25), "allows only 98 of 100 .* never end"),
        (StalenessLimit(0, trajectories_per_version=34), (2, 0.25), None),
        (StalenessLimit(0, trajectories_per_version=50), (1, 0.0), "allows only 50 of 100 .* never end"),
    ],
)
def test_a_limit_under_which_a_run_cannot_end_is_refused(
    tmp_path: Path, limit: StalenessLimit | None, push: tuple[int, float] | None, message: str | None
) -> None:
    weights = WeightPush(tmp_path, *push) if push is not None else None
    options = RunOptions(tmp_path, 2, tmp_path, weights, limit)
    if message is None:
        check_can_end(options, 100, model_version=0)
    else:
        with pytest.raises(InvalidRequest, match=message):
            check_can_end(options, 100, model_version=0)


def test_the_results_are_those_of_the_store(run_dir: Path) -> None:
    report = UpdateReport(1, 0, KVPolicy.RECOMPUTE, (ReplicaUpdate("replica-1", 5.0, 7.0),), 20.0)
    summary = write_results(run_dir, Collected(4, 3, 2.0, (report,), None))
    assert (summary.lost, summary.records) == (1, 3)  # accepted 4, one of them without a record
    written = orjson.loads((run_dir / "summary.json").read_bytes())
    assert written["updates"][0]["pause_to_resume_ms"] == 7.0
    assert pq.read_table(run_dir / "trajectories.parquet").num_rows == 3
    output = io.StringIO()
    Console(file=output, width=200).print(summary_table(summary))
    assert "3 of 4 accepted, 1 lost" in output.getvalue()
    assert "success at v1" in output.getvalue()
    assert "stale" not in output.getvalue()
    Console(file=output, width=200).print(summary_table(summary, WeightUpdateFailed("replica-1: no answer")))
    assert "failed; all tokens have the old version: replica-1: no answer" in output.getvalue()


@pytest.mark.parametrize(
    ("stale", "row"),
    [
        (StaleSummary(0, 0, 0, 0, 0, 0), "none"),
        (
            StaleSummary(4, 1, 2, 3, 5, 6000),
            "4 attempts dropped, 1 given up, 2 masked, 3 ended early, 5 late, 6,000 tokens masked",
        ),
        (StaleSummary(0, 0, 0, 3, 0, 0), "3 ended early"),
    ],
)
def test_the_table_tells_what_became_of_stale_ones(run_dir: Path, stale: StaleSummary, row: str) -> None:
    summary = write_results(run_dir, Collected(3, 3, 2.0, (), None))
    output = io.StringIO()
    Console(file=output, width=200).print(summary_table(replace(summary, stale=stale)))
    [line] = [line for line in output.getvalue().splitlines() if line.startswith("stale")]
    assert line.removeprefix("stale").strip() == row
