"""An ingress process: the HTTP application on the public port and on a port of the process."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import structlog
from fastapi import FastAPI, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from agentloop.api.coordinator import FrontPort
from agentloop.concurrency.aio import tune_interpreter
from agentloop.errors import NotFound
from agentloop.observability.metrics import MetricSample, MetricsTally
from agentloop_servers.cluster.nodes import disk_of, node_address, nodes_without
from agentloop_servers.config.service import ServiceConfig, located
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.registry import Sessions
from agentloop_servers.endpoint.shards import HOLDER_WAIT_S, ShardRouter, take_shard_lock
from agentloop_servers.endpoint.users import ServedUsers
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpLimits, error_response, route_of
from agentloop_servers.ingress.admin import ModeRules
from agentloop_servers.ingress.app import MODELS_PATH, create_app
from agentloop_servers.ingress.records import TokenLabels
from agentloop_servers.net.public_port import PublicPort, keeper_finder, warn_of_open_ray
from agentloop_servers.net.tcp import url_of, url_of_socket
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.endpoint import build_endpoint, sessions_name
from agentloop_servers.processes.placement import share_of_node
from agentloop_servers.processes.settings import CALL_MARGIN_S
from agentloop_servers.processes.shared import ModelRun, begin_serve_process, coordinator_client, tool_names
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.run.store import home_or
from agentloop_servers.sinks import begin_sinks
from agentloop_servers.users import keys_of, load_users

_log = structlog.get_logger("app")


class IngressDeployment:
    """An ingress process under Ray Serve; it serves the public port without Serve's proxy."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        keys: Mapping[str, Keys],
        others: Sequence[ModelRun],
        *deployed_with: DeploymentHandle,
    ) -> None:
        """`keys` maps model names ("" is the policy) to keys. A model without keys uses the policy's keys."""
        self._closing = begin_serve_process(config, run_dir)
        client = coordinator_client(trust, config.updates.timeout_s + CALL_MARGIN_S)
        self._closing.push_async_callback(client.close)
        warn_of_open_ray()
        self._url, context = url_of(config.host, config.port, config.scheme), serve.get_replica_context()
        self._port = PublicPort(self._url, keeper_finder(config.host, config.port, context.app_name))
        self._closing.push_async_callback(self._port.close)
        tally = self._closing.tally
        timeout_s = config.updates.timeout_s + CALL_MARGIN_S
        clients = {other: coordinator_client(other.trust, timeout_s, other.name) for other in others}
        for other_client in clients.values():
            self._closing.push_async_callback(other_client.close)
        fronts = {other: other_client.front for other, other_client in clients.items()}
        self._process = IngressProcess(config, run_dir, trust, client.front, keys=keys, tally=tally, others=fronts)
        self._closing.push_async_callback(self._process.close)
        await self._process.start(context.rank.rank, await self._port.take())
        name = f"ingress-{self._process.number}"
        self._closing.report(
            name, client.metrics.report_metrics, gauges=partial(ingress_gauges, name, self._process)
        )
        if (notice := keys[""].notice) is not None:
            _log.warning("open_admin_routes", because=notice)
        tune_interpreter()

    async def __call__(self, request: Request) -> Response:
        """Reject requests through Serve's proxy, which does not limit bodies or connections."""
        return error_response(
            NotFound(f"this port belongs to Ray Serve's proxy: send the request to the service at {self._url}")
        )

    async def check_health(self) -> None:
        self._process.check_health()
        self._port.check_health()

    async def __del__(self) -> None:
        await self._closing.aclose()


class IngressProcess:
    """The HTTP application and the sessions of an ingress process. Close it also if `start` raised."""

    app: FastAPI
    sessions: Sessions
    direct_url: str  # the app's URL on this process's own port

    def __init__(
        self,
        config: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        coordinator: FrontPort,
        holder_wait_s: float = HOLDER_WAIT_S,
        keys: Mapping[str, Keys] | None = None,
        tally: MetricsTally | None = None,
        others: Mapping[ModelRun, FrontPort] = MappingProxyType({}),
    ) -> None:
        """`keys` are digests; None reads them from the environment. `others` are the models next to the policy."""
        self._others = others
        self.tally = MetricsTally() if tally is None else tally
        self._keys = keys
        self._holder_wait_s = holder_wait_s
        self._config = config
        self._run_dir = run_dir
        self._trust = trust
        self._coordinator = coordinator
        self._closing = AsyncExitStack()
        self._health_checks: list[Callable[[], None]] = []

    async def start(self, first_shard: int = 0, public: socket.socket | None = None) -> None:
        """Acquire a shard of the sessions, open it and a port, and announce the port to the other processes.

        The application is also served on the socket `public`. Raises InvalidRequest if other machines could use the
        service without keys.
        """
        config, closing = self._config, self._closing
        numbers, num_processes = await self._numbers(), config.num_ingress if config.cluster is None else None
        shard, lock = await take_shard_lock(self._run_dir, numbers, first=first_shard)
        closing.callback(lock.release)
        self.number = shard
        trust = None if config.cluster is None else self._trust  # on one host, agents may call the process's port
        self.tally.trace = begin_sinks(config, self._run_dir, closing)
        all_keys = self._keys or {"": keys_of(config)}
        policy = ModelRun("", self._run_dir, self._trust)
        opened = await self._open(policy, self._coordinator, num_processes, trust)
        endpoint, sessions = opened.endpoint, opened.endpoint.sessions
        keys = all_keys[""]
        read = None if config.users is None else lambda: load_users(located(config.users or ""))
        endpoint.users = users = ServedUsers(keys, self._coordinator, read, sessions.store.num_of_owners)
        sessions.on_new = users.add_session
        closing.push_async_callback(users.close)
        await users.start()
        models, apps = dict[str, OpenedModel](), dict[str, FastAPI]()
        judges = tuple(other.name for other in self._others)
        for other, coordinator in self._others.items():
            models[other.name] = model = await self._open(other, coordinator, num_processes, trust)
            model.endpoint.users, model.endpoint.path = users, f"{MODELS_PATH}/{other.name}"
            apps[other.name] = model_app = model.to_app(all_keys.get(other.name, keys), judges, is_inside=True)
            await closing.enter_async_context(model_app.router.lifespan_context(model_app))
        endpoint.others = {name: model.endpoint for name, model in models.items()}
        app = opened.to_app(keys, judges, apps)
        server = DirectServer(app, address := node_address(config), tls=config.tls_files, trust=trust)
        closing.push_async_callback(server.close)
        reached_at = config.public_url or (None if public is None else url_of_socket(public, config.scheme))
        url = await server.start(int(lock.text or 0), public)
        lock.set_text(url.rpartition(":")[2])
        host_url = "" if config.cluster is None else url_of(address, config.port, config.scheme)
        for model in (opened, *models.values()):
            # Agents call a single process through the public port, where calls wait while the process restarts.
            model.endpoint.direct_url = host_url or (url if config.num_ingress > 1 else None)
            model.endpoint.public_url = None if reached_at is None else reached_at.rstrip("/")
            closing.push_async_callback(model.router.close)
            await model.router.start(url, host_url)
            self._health_checks += [model.router.check_health, model.endpoint.sessions.check_health]
        self._health_checks += [server.check_health, users.check_health]
        self.app, self.sessions, self.direct_url = app, sessions, url

    async def _open(
        self, model: ModelRun, coordinator: FrontPort, num_processes: int | None, trust: Trust | None
    ) -> OpenedModel:
        """Open a model's endpoint and this process's shard of its sessions."""
        config, closing = self._config.of_model(model.name), self._closing
        clients = EngineClients(model.trust)
        closing.push_async_callback(clients.close)
        router = ShardRouter(coordinator, self.number, num_processes, self._holder_wait_s, trust)
        where = home_or(sessions_name(self.number), config, model.run_dir, model.trust.key)
        sessions, endpoint = build_endpoint(
            config, where, model.run_dir, model.trust.key, coordinator, clients, router, self.tally
        )
        closing.push_async_callback(sessions.close)
        await sessions.start()
        return OpenedModel(config, model.run_dir, coordinator, clients, endpoint, router)

    async def _numbers(self) -> tuple[int, ...]:
        """Return the shard numbers that a process on this host may acquire."""
        num = self._config.num_ingress
        if self._config.cluster is None:
            return tuple(range(num))
        return await self._coordinator.endpoint_numbers(disk_of(self._run_dir), share_of_node(num))

    def check_health(self) -> None:
        """Raise the error that ended a background task, if one has ended."""
        for check in self._health_checks:
            check()

    async def close(self) -> None:
        """Close all parts in reverse order of their start. Idempotent."""
        self._health_checks = []
        await self._closing.aclose()


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that an ingress process serves."""

    config: ServiceConfig
    run_dir: Path
    coordinator: FrontPort
    clients: EngineClients
    endpoint: Endpoint
    router: ShardRouter

    def to_app(
        self,
        keys: Keys,
        judges: Collection[str],
        others: Mapping[str, FastAPI] = MappingProxyType({}),
        *,
        is_inside: bool = False,
    ) -> FastAPI:
        """Return the model's HTTP application. Raises InvalidRequest if `host` is public and there are no keys."""
        config = self.config
        keys.check_bind(config.host)
        return create_app(
            self.coordinator,
            self.clients.connect,
            keys=keys,
            limits=HttpLimits(update_timeout_s=config.updates.timeout_s),
            weight_roots=config.allowed_weight_roots(),
            tool_names=frozenset(tool_names(config)),
            allowed_imports=config.workers.imports(has_user_keys=not keys.is_open),
            rules=mode_rules(config),
            endpoint=self.endpoint,
            image_roots=[located(root) for root in config.image_roots],
            nodes_without=None if config.cluster is None else nodes_without,
            model=config.model_path(),
            labels=TokenLabels(located(config.model), self.run_dir),
            others=others,
            judges=judges,
            is_inside=is_inside,
            route_settings=config.routes,
        )


def ingress_gauges(name: str, process: IngressProcess) -> tuple[MetricSample, ...]:
    """Return metrics of an ingress process: its requests in flight and its sessions."""
    sessions, in_flight = process.sessions, Counter(map(route_of, process.app.state.in_flight.values()))
    return (
        *(MetricSample("http_in_flight", (name, route), num) for route, num in in_flight.items()),
        MetricSample("sessions_open", (name,), sessions.num_open),
        MetricSample("session_bytes", (name,), sessions.cache.num_bytes),
    )


def mode_rules(config: ServiceConfig) -> ModeRules:
    """Return the operations that the ingress allows operators and trainers."""
    return ModeRules(
        mode=config.mode.value,
        allows_weights=config.allows_weights,
        allows_push=config.allows_push,
        allows_adapters=config.allows_adapters,
        names_adapters=config.max_loras is not None,
        can_sleep=config.can_sleep,
    )
