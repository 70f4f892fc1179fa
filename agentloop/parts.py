"""Optional parts: packages that extend the service with commands, renderers, engines and more.

A part registers objects, each under a group and a name. Other distributions do it with entry points in their
metadata (https://packaging.python.org/en/latest/specifications/entry-points/), for example

    [project.entry-points."agentloop_rollouts.commands"]
    repeat = "my_package.repeat:app"

An object of the groups `engines`, `routes`, `sinks` and `weight_sources` may have a pydantic model `Settings`. The
object's section of the configuration is then validated by that model and passed to it as the argument `settings`.

Our own parts are also listed here, because a copied tree, PYTHONPATH or a Ray `runtime_env` has no metadata. A test
compares this table with pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from agentloop.errors import InvalidRequest
from agentloop.plugins import install_hint, resolve

GROUP_PREFIX = "agentloop_rollouts."
"""Begins the names of our groups of entry points."""

COMMANDS = "commands"
"""The group of command line commands. An object is a typer application with a command of the registered name."""

DEFAULT_TOOLS = "default_tools"
"""The group of tools that each worker has without configuration: they run on any host and are safe for any task."""

ENVIRONMENTS = "environments"
"""The group of environments: `agentloop.rollout.Environment` classes, by the names that tasks give.

A class with variants is named with one of them, as in `bfcl:multi_turn_base`.
"""

ENGINES = "engines"
"""The group of kinds of engines, with `check(entry)`, which raises ValueError, and `build(entry, fields)`."""

EXPORTERS = "exporters"
"""The group of formats of `agentloop export`: an `agentloop.storage.exports.Exporter` by each format's name."""

MODELS = "models"
"""The group of sources of models that are not folders: an `agentloop_servers.config.models.ModelSource`."""

PARSERS = "parsers"
"""The group of parsers by kind: called with a model folder and FAMILY for `chat.parser: KIND:FAMILY`."""

RENDERERS = "renderers"
"""The group of renderers by kind: called with a model folder, FAMILY and RenderSettings for `chat.renderer`."""

REWARDS = "rewards"
"""The group of reward functions, by the names that tasks give."""

SANDBOXES = "sandboxes"
"""The group of makers of sandboxes: called without arguments for an `agentloop_tools.sandbox.Sandboxes`."""

SINKS = "sinks"
"""The group of receivers of ended trajectories and updates: `agentloop_servers.sinks.Sink` classes."""

STORAGE = "storage"
"""The group of databases by their URL's scheme: made as `PostgresRun`, with `Home`'s interface."""

TOOLS = "tools"
"""The group of tools that `workers.tools` may name: a Tool, a ToolSet, or a maker of one without arguments."""

TRAJECTORY_RUNNERS = "trajectory_runners"
"""The group of ways to run a worker's trajectories, for `workers.isolation`: made as `IsolatedRuns.of_worker`."""

WEIGHT_SOURCES = "weight_sources"
"""The group of sources of weights: `store` (the versions to serve), `store-pull` and `store-publisher`."""

ROUTES = "routes"
"""The group of HTTP routes: a function returns a router for an `agentloop_servers.ingress.routes.RouteContext`."""

NAMED_BY_USERS = frozenset({ENVIRONMENTS, REWARDS, SANDBOXES, TOOLS})
"""The groups in which tasks, configurations and commands may give an import path in place of a name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of our optional packages; `entries` are import paths by group and name.

    `extra` is the extra of our distribution with its dependencies.
    """

    package: str
    extra: str
    summary: str
    entries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Return True if the package's files are installed; its dependencies may still be missing."""
        return importlib.util.find_spec(self.package) is not None


PARTS = (
    Part(
        "agentloop_contracts",
        "serve",
        "the HTTP dialects and control verbs of vLLM's and SGLang's servers",
        {ROUTES: {"contracts": "agentloop_contracts.routes:contracts"}},
    ),
    Part(
        "agentloop_environments",
        "environments",
        "published task sets: BFCL, reasoning-gym and TextArena",
        {
            ENVIRONMENTS: {
                "bfcl": "agentloop_environments.bfcl:Bfcl",
                "reasoning_gym": "agentloop_environments.reasoning:ReasoningGym",
                "textarena": "agentloop_environments.games:TextArena",
            }
        },
    ),
    Part(
        "agentloop_isolation",
        "serve",
        "a process for each trajectory",
        {TRAJECTORY_RUNNERS: {"process": "agentloop_isolation.processes:IsolatedRuns.of_worker"}},
    ),
    Part(
        "agentloop_models",
        "models",
        "models by name: published GGUF files, hub ids and `.gguf` files",
        {
            COMMANDS: {"models": "agentloop_models.command:app"},
            MODELS: {"published": "agentloop_models.source:published_models"},
        },
    ),
    Part(
        "agentloop_postgres",
        "postgres",
        "a run's records, sessions and turn journals in PostgreSQL",
        {
            STORAGE: {
                "postgres": "agentloop_postgres.home:PostgresRun",
                "postgresql": "agentloop_postgres.home:PostgresRun",
            }
        },
    ),
    Part(
        "agentloop_renderers",
        "renderers",
        "renderers and parsers of the package `renderers`",
        {
            PARSERS: {"renderers": "agentloop_renderers.parser:LibraryParser"},
            RENDERERS: {"renderers": "agentloop_renderers.renderer:LibraryRenderer"},
        },
    ),
    Part(
        "agentloop_sglang",
        "sglang",
        "SGLang engines",
        {ENGINES: {"sglang": "agentloop_sglang.kind:Sglang"}},
    ),
    Part(
        "agentloop_store",
        "store",
        "weight versions published to a directory or object store",
        {
            WEIGHT_SOURCES: {
                "store": "agentloop_store.serving:ServedVersions",
                "store-publisher": "agentloop_store.publisher:VersionPublisher",
                "store-pull": "agentloop_store.serving:pull_version",
            }
        },
    ),
    Part(
        "agentloop_tools",
        "cpu",
        "tools that run code, in sandboxes, and MCP servers as tools",
        {
            DEFAULT_TOOLS: {
                "calculator": "agentloop_tools.calculator:calculator",
                "python": "agentloop_tools.python:PythonTool",
            },
            SANDBOXES: {"bubblewrap": "agentloop_tools.sandbox.bubblewrap:Bubblewrap"},
            TOOLS: {"shell": "agentloop_tools.shell:ShellTool"},
        },
    ),
    Part(
        "agentloop_eval",
        "serve",
        "evaluations of a served policy, and their comparison",
        {COMMANDS: {"eval": "agentloop_eval.command:app"}},
    ),
    Part("agentloop_trainers", "trl", "adapters for TRL and verl, and training rows for other trainers"),
    Part(
        "agentloop_traces",
        "otel",
        "OpenTelemetry traces of trajectories and weight updates",
        {
            EXPORTERS: {"otlp": "agentloop_traces.sink:otlp"},
            SINKS: {"tracing": "agentloop_traces.sink:Tracing"},
        },
    ),
    Part(
        "agentloop_view",
        "serve,export",
        "the viewer, reports and exports of a run",
        {
            COMMANDS: {
                "export": "agentloop_view.export:app",
                "import": "agentloop_view.imported:app",
                "view": "agentloop_view.view:app",
            },
            EXPORTERS: {
                "atif": "agentloop_view.exporters:atif",
                "hf": "agentloop_view.exporters:hf",
                "html": "agentloop_view.exporters:html",
                "jsonl": "agentloop_view.exporters:jsonl",
                "ledger": "agentloop_view.exporters:ledger",
                "parquet": "agentloop_view.exporters:parquet",
                "perfetto": "agentloop_view.exporters:perfetto",
            },
            ROUTES: {"ui": "agentloop_view.pages:pages"},
        },
    ),
    Part(
        "agentloop_verify",
        "cpu",
        "comparison of recorded logprobs with those of the checkpoints, and replays of trajectories",
        {
            COMMANDS: {
                "check-logprobs": "agentloop_verify.check_logprobs:app",
                "replay": "agentloop_verify.replay_command:app",
            }
        },
    ),
)


@cache
def registered(group: str) -> dict[str, str]:
    """Return the import paths of a group by name: those of our parts that are there, and of other packages."""
    ours = {path for part in PARTS for path in part.entries.get(group, {}).values()}
    there = {name: path for part in PARTS if part.is_there for name, path in part.entries.get(group, {}).items()}
    # The metadata of an installed checkout lists our parts too, also those whose files were deleted.
    points = importlib.metadata.entry_points(group=GROUP_PREFIX + group)
    return {point.name: point.value for point in points if point.value not in ours} | there


def is_known(group: str, name: str) -> bool:
    """Return True for a name that is registered, or that one of our parts would register if it were installed."""
    return name in registered(group) or _part_of(group, name) is not None


def load(group: str, name: str, *, param: str, shipped: Iterable[str] = ()) -> Any:
    """Return a registered object. Raises as `path_of`, and InvalidRequest if it cannot be imported."""
    part, path = _part_of(group, name), path_of(group, name, param=param, shipped=shipped)
    try:
        return resolve(path, param=param)
    except InvalidRequest as error:
        if part is None:
            raise
        raise InvalidRequest(f"{error.message}: {install_hint(part.extra)}", param=param) from error


def configured(group: str, name: str, given: Mapping[str, Any], *, param: str) -> tuple[Any, dict[str, BaseModel]]:
    """Return a registered object and the argument `settings` for it, if it has a model `Settings`.

    Raises as `load`, and InvalidRequest for settings that the model refuses.
    """
    found = load(group, name, param=param)
    model: type[BaseModel] | None = getattr(found, "Settings", None)
    if model is None:
        if given:
            raise InvalidRequest(f"{name} takes no settings: {', '.join(given)}", param=param)
        return found, {}
    try:
        return found, {"settings": model.model_validate(given)}
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False))
        raise InvalidRequest(f"settings of {name}: {'; '.join(problems)}", param=param) from error


def split_variant(group: str, name: str) -> tuple[str, str]:
    """Split `NAME:VARIANT`, where NAME is registered. An import path has an empty name."""
    registered_name, _, variant = name.partition(":")
    return (registered_name, variant) if not variant or is_known(group, registered_name) else ("", name)


def find(group: str, name: str, *, param: str, shipped: Iterable[str] = ()) -> Any:
    """Return the object of a registered name, or of an import path `package.module:attribute`. Raises as `load`."""
    return resolve(name, param=param) if ":" in name else load(group, name, param=param, shipped=shipped)


def path_of(group: str, name: str, *, param: str, shipped: Iterable[str] = ()) -> str:
    """Return the import path of a registered name.

    Raises InvalidRequest, with `param` as the field at fault. For a name that nothing registers it lists the
    registered names and `shipped`, which the caller resolves itself. For a part that is not installed it has the
    command that installs it.
    """
    path = registered(group).get(name)
    if path is not None:
        return path
    if (part := _part_of(group, name)) is not None:
        raise InvalidRequest(f"{part.package} is not installed: {install_hint(part.extra)}", param=param)
    names = ", ".join(sorted({*registered(group), *shipped})) or "none"
    hint = ", or an import path: package.module:attribute" if group in NAMED_BY_USERS else ""
    raise InvalidRequest(f"no {group} are registered as {name!r}; there are: {names}{hint}", param=param)


def _part_of(group: str, name: str) -> Part | None:
    return next((part for part in PARTS if name in part.entries.get(group, {})), None)
