"""The base install: alone in an empty environment, and with common trainers. Needs a package index."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parents[3]
UV = [sys.executable, "-m", "uv"]
PROGRAM = """
import sys
import agentloop_trainers.trl  # TRL itself is imported where a run starts
from agentloop.client import RolloutClient, load_tasks
from agentloop_trainers import group_rows

RolloutClient("http://127.0.0.1:8000").session()
print(sorted({"ray", "tokenizers", "fastapi", "torch", "pyarrow", "typer", "trl", "openai"} & set(sys.modules)))
"""
TRAINERS = {  # as of November 2026, with the Python version that each requires
    "trl==1.16.0": "3.11",
    "verl==0.9.1": "3.11",
    "openrlhf==0.11.2": "3.11",
    "skyrl==0.4.0": "3.12",
    "areal==1.0.4": "3.11",
    "nemo-gym==0.4.0": "3.12",
    "nemo-gym==0.7.0": "3.13.14",
    "verifiers==0.4.0": "3.11",
}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
def test_the_client_works_alone_in_an_empty_environment(tmp_path: Path, resolution: str) -> None:
    environment = tmp_path / "environment"
    run(*UV, "venv", "--quiet", "--python", sys.executable, str(environment))
    python = str(environment / "bin" / "python")
    run(*UV, "pip", "install", "--quiet", "--python", python, "--resolution", resolution, str(ROOT))
    assert run(python, "-I", "-c", PROGRAM).strip() == "[]"


# conflicts with the service, not with the client
SERVICE_CONFLICTS = {"openrlhf==0.11.2": "ray", "areal==1.0.4": "rich"}


def resolve(trainer: str, tmp_path: Path, *extras: str) -> subprocess.CompletedProcess[str]:
    wanted = tmp_path / "wanted.in"
    wanted.write_text(trainer)
    version = ("--python-version", TRAINERS[trainer], "--python-platform", "x86_64-manylinux_2_35")
    command = [*UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *version, *extras]
    return subprocess.run(
        [*command, "pyproject.toml", str(wanted)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_client_resolves_beside(trainer: str, tmp_path: Path) -> None:
    done = resolve(trainer, tmp_path)
    assert done.returncode == 0, done.stderr
    assert trainer in done.stdout.splitlines()


@pytest.mark.parametrize("trainer", SERVICE_CONFLICTS)
def test_the_service_does_not_beside(trainer: str, tmp_path: Path) -> None:
    done = resolve(trainer, tmp_path, "--extra", "serve")
    assert done.returncode != 0
    assert SERVICE_CONFLICTS[trainer] in done.stderr
