"""`agentloop try`, `validate` and `new`, run as commands without a service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentloop_servers.cli.commands import app

SHOP = "examples.14_shop:Shop"
runner = CliRunner(env={"COLUMNS": "200"})


def ran(*words: str, status: int = 0) -> str:
    result = runner.invoke(app, words)
    assert result.exit_code == status, result.output
    return result.output


def test_an_episode_is_printed_recorded_and_played_again(tmp_path: Path):
    printed = ran("try", SHOP, "--out", str(tmp_path))
    assert all(part in printed for part in ("Yes, I am sure.", 'cancel({"order_id":"W1"})', "reward 1"))
    [run] = tmp_path.iterdir()
    assert "tool cancel" in ran("show", "shop-0", "--run", str(run))
    again = ran("try", SHOP, "--policy", f"run:{run}")
    assert ("reward 1" in again, "0 tokens sampled" in again) == (True, True)
    ran("try", SHOP, "--task", "shop-1", "--policy", f"run:{run}", status=1)
    everything = ran("try", SHOP, "--task", "all", "--out", str(tmp_path))
    assert "mean reward 1 of 3" in everything


@pytest.mark.parametrize("words", [("--task", "nine"), ("--policy", "magic"), ("--policy", "run:nowhere")])
def test_what_cannot_be_played_is_one_line(words: tuple[str, str]):
    assert "Traceback" not in ran("try", SHOP, *words, status=1)


def test_faults_are_listed():
    assert "no faults; 3 tasks with a gold solution" in ran("validate", SHOP)
    faulty = "tests.testing.test_validation:CannotClose"
    assert "close, task safe-12: OSError: the door is stuck" in ran("validate", faulty, status=1)


def test_a_new_environment_has_no_fault_and_passes_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert "agentloop try my_env:MyEnv" in ran("new", "env", "my_env")
    ran("new", "env", "my_env", status=1)  # it exists already
    ran("new", "env", "../my_env", status=1)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path / "my_env",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout
