"""Optional parts: our table, packages of other authors, and the errors for a missing part."""

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from agentloop import parts
from agentloop.client import RolloutClient
from agentloop.errors import Forbidden, InvalidRequest, ToolLost
from agentloop.parts import COMMANDS, PARTS, Part
from agentloop.rollout.environment import tasks_of
from agentloop.rollout.tool import load_tools
from agentloop.types import Message, RolloutTask, Trajectory
from agentloop_servers.app import begun_run
from agentloop_servers.config.models import with_model_folders
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from agentloop_servers.processes.engine_parts import build_engine
from agentloop_servers.processes.shared import followed_store
from agentloop_tools.shell import ShellTool
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.service.whole_service import simulated_config, whole_service

ACME = Path(__file__).parent / "support" / "acme"
CLI = "from agentloop_servers.cli import main; main()"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which the package of another author is installed."""
    project = tomllib.loads((ACME / "pyproject.toml").read_text())["project"]
    shutil.copytree(ACME / "acme", tmp_path / "site" / "acme")
    metadata = tmp_path / "site" / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {path}" for name, path in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return metadata.parent


@pytest.fixture
def acme(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of another author, installed for this process."""
    monkeypatch.syspath_prepend(site)
    parts.registered.cache_clear()
    yield
    parts.registered.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replace the table of our parts."""

    def replace(*own: Part) -> None:
        monkeypatch.setattr(parts, "PARTS", own)
        parts.registered.cache_clear()

    yield replace
    parts.registered.cache_clear()


def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def agentloop(site: Path, *arguments: str) -> str:
    done = run(f"import sys; sys.path.append({str(site)!r}); {CLI}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def acme_config(*, engine: dict[str, Any] | None = None, **changed: object) -> ServiceConfig:
    return simulated_config(engine={"kind": "acme", **(engine or {})}, replicas=1, **changed)


async def rolled_out(config: ServiceConfig, run_dir: Path, *tasks: RolloutTask) -> list[Trajectory]:
    async with whole_service(config, run_dir) as url, RolloutClient(url) as client:
        return [record async for record in await client.submit(tasks)]


def test_a_command_and_an_environment_of_another_package_run_by_their_names(site):
    assert agentloop(site, "repeat", "run-7") == "repeats run-7\n"
    assert "repeat" in agentloop(site, "--help")
    assert agentloop(site, "try", "shop").endswith("reward 8\n")


async def test_a_rollout_with_an_engine_an_environment_and_a_sink_of_another_package(acme, tmp_path):
    config = acme_config(sinks={"kept": {"prefix": "p"}}, workers={"tools": {"search": "search"}})
    greeting = RolloutTask("greeting", (Message("user", "Hello."),), reward="polite", tools=("search",))
    records = await rolled_out(config, tmp_path, *tasks_of("shop"), greeting)
    assert sorted((one.task_id, one.reward) for one in records) == [("greeting", 0.25), ("order", 7.0)]
    assert {turn.engine for one in records for turn in one.path.turns} == {"acme"}
    from acme.kept import received  # noqa: PLC0415 - installed by the fixture

    assert {name for name, _ in received} == {f"p/{tmp_path.name}"}
    assert {one.task_id for _, one in received if isinstance(one, Trajectory)} == {"greeting", "order"}
    assert received[-1][1] == "closed"


async def test_names_that_nothing_registers_are_refused_with_those_that_are(acme, tmp_path):
    async with whole_service(acme_config(), tmp_path) as url, RolloutClient(url) as client:
        for given, known in (
            (
                {"environment": "bakery"},
                "as 'bakery'; there are: bfcl, reasoning_gym, shop, textarena, or an import path",
            ),
            ({"reward": "rude"}, "as 'rude'; there are: contains_reference, exact_match, polite, or an import"),
        ):
            with pytest.raises(InvalidRequest, match=known) as caught:
                await client.submit([RolloutTask("t", (Message("user", "Hello."),), **given)])
            assert caught.value.param == f"tasks.0.{next(iter(given))}"
    with pytest.raises(ValueError, match="no engines are registered as 'other'; there are: acme"):
        simulated_config(engine={"kind": "other"})
    with pytest.raises(InvalidRequest, match="no tools are registered as 'saw'; there are: search"):
        load_tools(["saw"], {})
    with pytest.raises(InvalidRequest, match=r"registered as 'nothing'; there are: .*repeat"):
        parts.load(COMMANDS, "nothing", param="command")


def test_a_model_of_another_packages_source(acme):
    lines = []
    config = with_model_folders(ServiceConfig(model="shelf:tiny_policy"), lines.append)
    assert (config.model_path().name, config.served_name) == ("v0", "tiny_policy")
    assert lines == ["taking tiny_policy from the shelf"]
    with pytest.raises(InvalidRequest, match=r"no model at cup:board: expected a folder .*; or shelf:NAME"):
        with_model_folders(ServiceConfig(model="cup:board"), lines.append)


def test_without_a_source_only_folders_are_models(only, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    only(Part("agentloop_absent", "models", "", {parts.MODELS: {"published": "agentloop_absent.source:published"}}))
    folder = ServiceConfig(model="examples/tiny_policy/v0")
    assert with_model_folders(folder, print) == folder
    missing = r"no model at smol: expected a folder with .*agentloop_absent is not installed: .*\[models\]"
    with pytest.raises(InvalidRequest, match=missing):
        with_model_folders(ServiceConfig(model="smol"), print)


async def test_a_registered_name_with_a_variant_is_no_import_path(acme, tmp_path):
    async with (
        whole_service(acme_config(workers={"allowed_imports": []}), tmp_path) as url,
        RolloutClient(url) as client,
    ):
        task = RolloutTask("t", (Message("user", "Hello."),), environment="shop:large-1.5")
        [record] = [one async for one in await client.submit([task])]
        assert "environment 'shop' has no variants: remove ':large-1.5'" in (record.error or "")
        with pytest.raises(Forbidden, match=r"'acme\.shop:Shop' may not be imported here"):
            await client.submit([replace(task, environment="acme.shop:Shop")])


async def test_a_shell_runs_in_sandboxes_of_another_package(acme):
    with pytest.raises(ToolLost, match="no box is free"):
        await ShellTool(sandboxes="boxes").new_sandbox(None)


async def test_sections_of_the_configuration_reach_what_they_are_for(acme, tmp_path):
    engine = build_engine(acme_config(engine={"settings": {"max_running": 7}}))
    assert engine.info.max_running == 7
    follows = {"store": "/none", "run": "r", "source": "shelf", "settings": {"version": 3}}
    store = followed_store(simulated_config(mode="standalone", weights=follows), tmp_path)
    assert await store.read_latest() == 3
    for routes, said in (({}, "hello"), ({"hello": {"text": "good day"}}, "good day")):
        app = create_app(FakeCoordinator(), ReversingEngine().connect, Keys(), route_settings=routes)
        async with serving(app) as url, ClientSession(url) as http, http.get("/hello") as answer:
            assert await answer.json() == said


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"engine": {"kind": "acme", "tensor_parallel_size": 2}}, "acme runs on one device"),
        (
            {"engine": {"kind": "acme", "settings": {"running": 7}}},
            "settings of acme: running: Extra inputs are not",
        ),
        ({"sinks": {"kept": {"suffix": "p"}}}, "settings of kept: prefix: Field required; suffix: Extra"),
        ({"sinks": {"lost": {}}}, "no sinks are registered as 'lost'; there are: kept, tracing"),
        ({"routes": {"hello": {"text": 7}}}, "settings of hello: text: Input should be a valid string"),
        ({"routes": {"ui": {"text": "7"}}}, "ui takes no settings: text"),
        ({"routes": {"bye": {}}}, "no routes are registered as 'bye'; there are: contracts, hello, ui"),
        ({"weights": {"source": "shelf"}}, "settings of shelf: version: Field required"),
        ({"weights": {"source": "attic"}}, "no weight_sources are registered as 'attic'; there are: shelf, store"),
    ],
)
def test_sections_that_nothing_registers_or_takes_are_refused_at_the_start(acme, tmp_path, changed, problem):
    store = {"store": "/none", "run": "r", **changed["weights"]} if "weights" in changed else None
    with pytest.raises((InvalidRequest, ValueError), match=problem):
        begun_run(simulated_config(mode="standalone", **{**changed, "weights": store}), tmp_path)


def test_our_own_part_that_is_missing_or_lacks_a_package_names_its_extra(only):
    only(
        Part("agentloop_absent", "absent", "not there", {COMMANDS: {"absent": "agentloop_absent:app"}}),
        Part("agentloop", "broken", "lacks a package", {COMMANDS: {"broken": "no_such_package:app"}}),
    )
    with pytest.raises(InvalidRequest, match=r"agentloop_absent is not installed: .*\[absent\]"):
        parts.load(COMMANDS, "absent", param="command")
    with pytest.raises(InvalidRequest, match=r"no module named 'no_such_package': .*\[broken\]"):
        parts.load(COMMANDS, "broken", param="command")


def test_every_entry_of_ours_loads():
    for part in PARTS:
        for group, entries in part.entries.items():
            for name in entries:
                assert parts.load(group, name, param="name") is not None


def test_without_metadata_the_table_is_read(monkeypatch):
    """With only PYTHONPATH, in a copied tree, or in a Ray runtime_env."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    parts.registered.cache_clear()
    try:
        for part in PARTS:
            for group, entries in part.entries.items():
                assert parts.registered(group).items() >= entries.items()
    finally:
        parts.registered.cache_clear()


def test_an_entry_of_ours_in_installed_metadata_is_absent_with_its_files(acme, only):
    assert "repeat" in parts.registered(COMMANDS)
    only(Part("agentloop_absent", "absent", "", {COMMANDS: {"repeat": "acme.repeat:app"}}))
    assert "repeat" not in parts.registered(COMMANDS)
