"""Optional parts: our table, packages of other authors, and the errors for a missing part."""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agentloop import parts
from agentloop.errors import InvalidRequest
from agentloop.parts import COMMANDS, GROUP_PREFIX, PARTS, Part
from agentloop_servers.sinks import begin_sinks, configured
from tests.support.service.whole_service import simulated_config

COMMAND = """
import typer

app = typer.Typer()


@app.callback()
def group() -> None:
    ...


@app.command()
def replay(name: str) -> None:
    print(f"replays {name}")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a small installed distribution of another author, which adds a command."""
    (tmp_path / "acme.py").write_text(COMMAND)
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP_PREFIX}{COMMANDS}]\nreplay = acme:app\n")
    return tmp_path


def agentloop(site: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = f"import sys; sys.path.append({str(site)!r}); from agentloop_servers.cli import main; main()"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_of_another_package_runs_by_its_name(site):
    assert agentloop(site, "replay", "run-7").stdout == "replays run-7\n"
    assert "replay" in agentloop(site, "--help").stdout


def test_a_name_that_nothing_registers_is_refused_with_those_that_are():
    with pytest.raises(InvalidRequest, match="'nothing'; there are: check-logprobs"):
        parts.load(COMMANDS, "nothing", param="command")


def test_our_own_part_that_is_missing_or_lacks_a_package_names_its_extra(monkeypatch):
    absent = Part("agentloop_absent", "absent", "not there", {COMMANDS: {"absent": "agentloop_absent:app"}})
    broken = Part("agentloop", "broken", "lacks a package", {COMMANDS: {"broken": "no_such_package:app"}})
    monkeypatch.setattr(parts, "PARTS", (absent, broken))
    parts.registered.cache_clear()
    try:
        with pytest.raises(InvalidRequest, match=r"agentloop_absent is not installed: .*\[absent\]"):
            parts.load(COMMANDS, "absent", param="command")
        with pytest.raises(InvalidRequest, match=r"no module named 'no_such_package': .*\[broken\]"):
            parts.load(COMMANDS, "broken", param="command")
    finally:
        parts.registered.cache_clear()


def test_every_entry_of_ours_loads():
    for part in PARTS:
        for group, entries in part.entries.items():
            for name in entries:
                assert parts.load(group, name, param="name") is not None


def test_a_sink_of_another_package_gets_its_settings_and_what_ends(monkeypatch):
    given = []

    class Kept:
        class Settings(BaseModel, extra="forbid"):
            prefix: str

        def __init__(self, settings: Settings, run: str, model: str) -> None:
            self._name = f"{settings.prefix}/{run}"

        def give(self, ended: Any) -> None:
            given.append((self._name, ended))

        def close(self) -> None:
            given.append((self._name, "closed"))

    monkeypatch.setattr(parts, "load", lambda group, name, param: {"kept": Kept}[name])

    async def run() -> None:
        async with AsyncExitStack() as closing:
            begin_sinks(simulated_config(sinks={"kept": {"prefix": "p"}}), Path("runs/r"), closing)("a record")

    asyncio.run(run())
    assert given == [("p/r", "a record"), ("p/r", "closed")]
    with pytest.raises(InvalidRequest, match="settings of a sink"):
        configured(simulated_config(sinks={"kept": {"suffix": "p"}}))


def test_an_entry_of_ours_in_installed_metadata_is_absent_with_its_files(monkeypatch, site):
    path = "agentloop_absent:app"
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP_PREFIX}{COMMANDS}]\nreplay = {path}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(parts, "PARTS", (Part("agentloop_absent", "absent", "", {COMMANDS: {"replay": path}}),))
    parts.registered.cache_clear()
    try:
        assert "replay" not in parts.registered(COMMANDS)
    finally:
        parts.registered.cache_clear()
