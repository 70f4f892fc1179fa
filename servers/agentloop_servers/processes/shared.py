"""Functions that several kinds of processes share: the coordinator's client, the followed store, settings.

Ray Serve supports an `async __init__` of a deployment, which mypy does not know. It calls `__del__` at shutdown,
even if `__init__` raised, so each deployment closes its resources there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve

from agentloop import parts
from agentloop.api.owners import UserTable
from agentloop.engine.interface import PublishedSource
from agentloop.fleet.store_follower import FollowedStore
from agentloop.observability.trace_context import EngineTraces
from agentloop_servers.cluster.nodes import find_coordinator
from agentloop_servers.config.service import ServiceConfig, located
from agentloop_servers.coordinator.client import COMMAND_TIMEOUT_S, CoordinatorClient
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.serve_process import Closing, begin_process
from agentloop_servers.users import load_users, table_of


@dataclass(frozen=True)
class ModelRun:
    """A model of the service and its run. The policy's name is ""."""

    name: str
    run_dir: Path
    trust: Trust


def begin_serve_process(config: ServiceConfig, run_dir: Path) -> Closing:
    """Initialize a Serve process: remove the API keys from its environment, and set up its log and shutdown."""
    config.hide_keys()
    return begin_process(run_dir)


def coordinator_client(
    trust: Trust, command_timeout_s: float = COMMAND_TIMEOUT_S, model: str = ""
) -> CoordinatorClient:
    """Return a client of a model's coordinator that finds the coordinator again after it has moved."""
    find = partial(find_coordinator, serve.get_replica_context().app_name, model)
    return CoordinatorClient(find, trust, command_timeout_s=command_timeout_s)


def engine_traces(config: ServiceConfig, run_dir: Path) -> EngineTraces | None:
    """Return the settings of the engines' own spans; None if engines send no spans."""
    tracing = config.tracing
    return EngineTraces(run_dir.name, tracing.sample) if tracing is not None and tracing.engine else None


def followed_store(config: ServiceConfig, run_dir: Path) -> FollowedStore | None:
    """Return the store of published versions; None if not configured. Raises InvalidRequest."""
    if (weights := config.weights) is None:
        return None
    source = PublishedSource(weights.store, weights.run)
    return FollowedStore(source, served_versions(config, run_dir).latest, weights.poll_s, weights.follows)


def served_versions(config: ServiceConfig, run_dir: Path) -> Any:
    """Return the `ServedVersions` of the followed store; None if not configured. Raises InvalidRequest."""
    if (weights := config.weights) is None:
        return None
    source, folder = PublishedSource(weights.store, weights.run), Path(weights.cache or run_dir / "weights")
    make, own = parts.configured(parts.WEIGHT_SOURCES, weights.source, weights.settings, param="weights.source")
    return make(source, folder, **own)


def tool_names(config: ServiceConfig) -> tuple[str, ...]:
    """Return the names of the tools that tasks may use."""
    return tuple(sorted(config.tools))


def user_table(config: ServiceConfig) -> UserTable:
    """Return the users of the config's user file; empty without a file."""
    return UserTable() if config.users is None else table_of(load_users(located(config.users)))
