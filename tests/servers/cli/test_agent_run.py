"""`agentloop rollout --agent` without Ray: over the session routes on a real socket."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentloop.agents.program import AgentProgram
from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.types import StalenessLimit
from agentloop_servers.cli.commands import app
from agentloop_servers.cli.progress import PlainProgress
from agentloop_servers.cli.run import AgentCollect, Collected, RunOptions, WeightPush, load_program
from agentloop_servers.config.service import KeysConfig, ServiceConfig
from tests.support.endpoint.fake_sessions import FakeSessions, session_service
from tests.support.records.samples import make_task

AGENTS = "tests.support.service.sample_agents"
CONFIG = ServiceConfig.load(Path(__file__).parents[3] / "servers" / "simulated.yaml")


async def collect(
    service: FakeSessions, agent: str, tmp_path: Path, push: WeightPush | None = None, *, num_tasks: int
) -> tuple[Collected, str]:
    output = io.StringIO()
    tasks = [replace(make_task(f"t{index}"), reward=None) for index in range(num_tasks)]
    async with session_service(service) as url, RolloutClient(url) as client:
        progress = PlainProgress(Console(file=output, width=200))
        with AgentProgram.load(agent) as program:
            run = AgentCollect(program, concurrency=4)
            collected = await run(client, tasks, RunOptions(tmp_path, 2, tmp_path, push), progress)
    return collected, output.getvalue()


@pytest.mark.parametrize("after_share", [0.0, 0.5, 1.0])
async def test_an_agent_s_run_collects_everything_and_pushes_once(tmp_path: Path, after_share: float) -> None:
    service = FakeSessions()
    collected, output = await collect(
        service, f"{AGENTS}:ask_plainly", tmp_path, WeightPush(tmp_path, 1, after_share), num_tasks=6
    )
    assert (collected.num_accepted, collected.num_received, collected.push_error) == (12, 12, None)
    assert [update["version"] for update in service.updates] == [1]
    assert [report.version for report in collected.updates] == [1]
    assert "rollout  12/12" in output
    assert "version 1 live" in output
    groups = {record.group_id for record in service.records}
    assert (len(groups), len(service.records)) == (6, 12)
    assert len({record.rollout_id for record in service.records}) == 1


async def test_what_goes_wrong_is_shown_a_few_times(tmp_path: Path) -> None:
    service = FakeSessions(refused={"t9"})
    collected, output = await collect(service, f"{AGENTS}:by_number", tmp_path, num_tasks=12)
    assert (collected.num_accepted, collected.num_received) == (24, 24)
    assert len(service.records) == 22  # the two samples of t9 could not be opened: the summary counts them as lost
    assert output.count("agent    t") == 5
    assert "agent    t0: ValueError: number 0" in output


async def test_a_staleness_limit_is_refused(tmp_path: Path) -> None:
    options = RunOptions(tmp_path, 1, tmp_path, None, StalenessLimit(0))
    with AgentProgram.load(f"{AGENTS}:ask") as program, pytest.raises(InvalidRequest, match="staleness"):
        await AgentCollect(program, 1)(RolloutClient("http://127.0.0.1:9"), [], options, PlainProgress(Console()))


def test_a_command_does_not_see_the_service_s_keys(monkeypatch) -> None:
    config = CONFIG.model_copy(update={"keys": KeysConfig(user_key_env="MY_KEY", admin_key_env="MY_ADMIN_KEY")})
    program = load_program(None, f"{sys.executable} agent.py", config)
    assert program is not None
    assert load_program(None, None, config) is None
    with pytest.raises(InvalidRequest, match="exclude each other"):
        load_program("a:b", "c", config)


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "an_agent_of_mine.py").write_text("def run(task, base_url, api_key):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = load_program("an_agent_of_mine:run", None, CONFIG)
    assert program is not None
    assert program.name == "an_agent_of_mine:run"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--agent", "no_such_module:run"], 1, "error: cannot import 'no_such_module:run'"),
        (["--agent", f"{AGENTS}:takes_too_little"], 1, "run(task, base_url, api_key)"),
        (["--agent-command", "no-such-program"], 1, "error: no such command"),
        (["--agent", "a:b", "--agent-command", "c"], 1, "exclude each other"),
        (["--agent", "a:b", "--max-staleness", "0"], 2, "not supported with agents"),
        (["--agent", "a:b", "--concurrency", "0"], 2, "concurrency"),
    ],
)
def test_wrong_use_is_told_before_a_service_is_started(
    tmp_path: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    out = ["--out", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, ["rollout", *arguments, *out], env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert result.exit_code == exit_code
    assert message in result.output
    assert not (tmp_path / "runs").exists()
