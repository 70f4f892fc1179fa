"""The wiring: the only file that constructs. Reading it is reading the architecture.

One Ray Serve application: the coordinator and the engines of each model, workers, ingress processes. All that
carries tokens goes over the replicas' own ports.
`build` is what a Serve config imports; `local.py` starts the same application on a local Ray of its own. (Serve
awaits an `async __init__`, which mypy does not know, and calls `__del__` also on what failed half-way through it.)
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import psutil
import ray
import structlog
from fastapi import FastAPI, Request
from pydantic import SecretStr
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from agentloop import __version__, parts
from agentloop.api.coordinator import FrontPort
from agentloop.api.owners import UserTable
from agentloop.concurrency.aio import tune_interpreter
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import PublishedSource
from agentloop.errors import Conflict, EngineLost, InvalidRequest, NotFound, error_line
from agentloop.fleet.registry import FleetConfig
from agentloop.fleet.store_follower import FollowedStore
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leased_engine import CallLeases
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.images import IMAGES_FOLDER, Image, ImageFiles
from agentloop.observability.metrics import MetricSample, MetricsTally
from agentloop.observability.trace_context import EngineTraces
from agentloop.rollout.journal_homes import TURNS_FOLDER, JournalFolder, StoredJournals
from agentloop.rollout.tool_loading import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop.scheduling.waiting import WaitingConfig
from agentloop.sessions.prompts import SessionParts
from agentloop.storage.home import Home
from agentloop.storage.retention import RetentionPolicy
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryStore
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.cluster.host import prepare_engine_process
from agentloop_servers.cluster.nodes import (
    announce_coordinator,
    announce_wanted,
    check_certificates,
    check_trust,
    coordinator_place,
    dead_nodes,
    disk_of,
    find_coordinator,
    for_nodes,
    node_address,
    node_labels,
    node_resources,
    nodes_without,
    num_nodes,
    prepare_engine_network,
    run_trust,
    where_the_run_is,
)
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import (
    ServiceConfig,
    TurnSettings,
    keep_config,
    keep_tokenizer,
    located,
    model_sizes,
    run_dir_in,
    weight_bytes,
)
from agentloop_servers.coordinator.client import COMMAND_TIMEOUT_S, CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.model_turns import ModelTurns, TurnsModel, check_turns
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import CoordinatorServer
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.registry import SessionLimits, Sessions
from agentloop_servers.endpoint.shards import HOLDER_WAIT_S, ShardRouter, take_shard_lock
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.endpoint.users import ServedUsers
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpLimits, error_response, route_of
from agentloop_servers.ingress.admin import ModeRules
from agentloop_servers.ingress.app import MODELS_PATH, create_app
from agentloop_servers.ingress.records import TokenLabels
from agentloop_servers.metrics import engine_text
from agentloop_servers.net.public_port import PublicPort, keeper_finder, warn_of_open_ray
from agentloop_servers.net.tcp import url_of, url_of_socket
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.engine_hosts import EngineHosts
from agentloop_servers.processes.engine_parts import (
    build_engine,
    can_constrain,
    engine_actor_options,
    engine_bundle,
    engine_placement,
    initial_weights,
    takes_images,
)
from agentloop_servers.processes.model_calls import ModelCalls
from agentloop_servers.processes.placement import on_each_node, processes, replicas_wanted, share_of_node
from agentloop_servers.processes.serve_process import Closing, begin_process, ends_unless_done, on_sighup
from agentloop_servers.processes.settings import (
    CALL_MARGIN_S,
    balancer_config,
    replica_config,
    sized,
    weight_config,
)
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.server import Replica
from agentloop_servers.run.locks import take_run_lock
from agentloop_servers.run.store import check_store, home_or, keep_run, open_store, restore_run, url_elsewhere
from agentloop_servers.sinks import begin_sinks, configured
from agentloop_servers.users import keys_of, load_users, table_of

APP_NAME = "agentloop"
COORDINATOR_NAME = "Coordinator"
ENGINE_NAME = "EngineReplica"
RUN_LOCK_TIMEOUT_S = 30.0  # for the coordinator before this one to end
LEASE_RETRY_S = 0.5
VERSIONS = "store"  # as a weight source of `agentloop.parts`
ENDS_TURNS_WITHIN_S = 70.0  # of a replica that there are fewer of: its server waits a minute for turns in flight
LOOK_AT_WORK_S = 2.0  # for how many replicas there should be
COORDINATOR_STAYS_S = 1.0  # after the order to end, which all get at once: the others leave by it

_log = structlog.get_logger("app")


def _begin(config: ServiceConfig, run_dir: Path) -> Closing:
    """Begin one of Serve's processes: without the keys, which Ray's own may have in their environment."""
    config.hide_keys()
    return begin_process(run_dir, config.log.rotation)


class CoordinatorDeployment:
    """One per model: `Replicas` and `Rollouts` in one event loop, behind a private port."""

    async def __init__(  # type: ignore[misc]
        self,
        service: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        head: str,
        model: str,
        others: Sequence[ModelRun],
    ) -> None:
        """`others` are the models that `model` takes turns with, if there are any."""
        self._closing = _begin(service, run_dir)
        config = service.of_model(model)
        self._closing.callback((await take_run_lock(run_dir, RUN_LOCK_TIMEOUT_S)).release)
        store = open_store(config, run_dir, trust.key)
        self._closing.push_async_callback(store.close)
        clients = EngineClients(trust, await taken_over(store), store.take_over)
        if config.store is not None:
            self._closing.callback(asyncio.create_task(end_with_lease(store), name="store-lease").cancel)
        self._closing.push_async_callback(clients.close)
        trace = begin_sinks(config, run_dir, self._closing)
        self._coordinator = Coordinator(
            store=store,
            connect=clients.connect,
            config=CoordinatorConfig(
                kv_policy=config.kv_policy,
                max_queued_trajectories=config.max_queued_trajectories,
                max_queued_bytes=config.max_queued_mib << 20,
                retention=RetentionPolicy(*config.retention.bounds),
                initial_weights=initial_weights(config),
                fleet=FleetConfig(entries=frozenset(entry.name for entry in config.entries)),
                weights=weight_config(config),
                head=head,
                disk=disk_of(run_dir),
                num_endpoint_processes=0 if config.cluster is None else config.num_ingress,
                is_encrypted=trust.certificates is not None,
                worker_timeout_s=config.workers.silent_after_s,
                worker_cut_s=config.workers.cut_after_s,
                balancer=balancer_config(config),
                waiting=WaitingConfig(config.balancer.limits_kv, config.balancer.call_overcommit),
                read_users=lambda: user_table(config),
                follows=followed_store(config, run_dir),
                begins_asleep=service.turns is not None,
            ),
            clock=RealClock(),
            probe=clients.probe,
            find_dead_nodes=None if config.cluster is None else dead_nodes,
        )
        self._closing.push_async_callback(self._coordinator.close)
        await self._coordinator.start()
        on_sighup(self._coordinator.read_users_again)
        tally, gauges = self._coordinator.replicas.tally, partial(run_gauges, config, run_dir)
        tally.trace = trace
        self._closing.report("coordinator", self._coordinator.report_metrics, tally, gauges)
        await self._serve(service, model, trust, others)

    async def _serve(self, service: ServiceConfig, model: str, trust: Trust, others: Sequence[ModelRun]) -> None:
        """Open the private port, tell where it is, and begin what follows the fleet."""
        config = service.of_model(model)
        self._server = CoordinatorServer(self._coordinator, trust, node_address(config))
        self._closing.push_async_callback(self._server.close)
        await self._server.start()
        app_name = serve.get_replica_context().app_name
        await asyncio.to_thread(announce_coordinator, app_name, self._server.url, model)
        if any(entry.max_replicas is not None for entry in config.entries):
            self._closing.callback(asyncio.create_task(self._keep_wanted(config, model), name="wanted").cancel)
        if others:
            self._closing.callback(asyncio.create_task(self._take_turns(service, others), name="turns").cancel)
        tune_interpreter()

    async def _take_turns(self, service: ServiceConfig, others: Sequence[ModelRun]) -> None:
        """Have this model and the others take turns on their accelerators."""
        clients = {other.name: coordinator_client(other.trust, model=other.name) for other in others}
        configs, replicas = service.of_models, self._coordinator.replicas
        settings = cast(TurnSettings, service.turns)
        ports = {"": (self._coordinator.status, replicas.sleep, replicas.wake)}
        ports |= {name: (one.front.status, one.front.sleep, one.front.wake) for name, one in clients.items()}
        turns = ModelTurns(
            {name: TurnsModel(*port, configs[name].num_replicas) for name, port in ports.items()},
            RealClock(),
            min_stay_s=settings.min_stay_s,
            max_wait_s=settings.max_wait_s,
            start_timeout_s=max(entry.start_timeout_s for one in configs.values() for entry in one.entries),
        )
        try:
            await turns.run()
        finally:
            await asyncio.gather(*(client.close() for client in clients.values()))

    async def _keep_wanted(self, config: ServiceConfig, model: str) -> None:
        """Tell Serve how many replicas are of use, of those whose number may change."""
        app_name, told = serve.get_replica_context().app_name, dict[str, int]()
        entries = {
            entry.name: engine_deployment(config, entry, model) for entry in config.entries if entry.max_replicas
        }
        while True:
            await asyncio.sleep(LOOK_AT_WORK_S)
            wanted = replicas_wanted(config.entries, await self._coordinator.status())
            for name, deployment in entries.items():
                if wanted[name] != told.get(name):
                    try:
                        await asyncio.to_thread(announce_wanted, app_name, deployment, wanted[name])
                    except Exception as error:  # Ray's are plain ones; it may come back
                        _log.warning("replicas_not_announced", entry=name, reason=error_line(error))
                        continue
                    _log.info("replicas_wanted", entry=name, num=wanted[name])
                    told[name] = wanted[name]

    async def check_health(self) -> None:
        await self._coordinator.check_health()

    async def __del__(self) -> None:
        await self._closing.aclose()


async def taken_over(store: TrajectoryStore) -> int:
    """Become the owner of a store once an earlier one's lease is over. Raises Conflict if that takes too long."""
    deadline_at = time.monotonic() + RUN_LOCK_TIMEOUT_S
    while True:
        try:
            return await store.take_over()
        except Conflict:
            if time.monotonic() >= deadline_at:
                raise
        await asyncio.sleep(LEASE_RETRY_S)


async def end_with_lease(store: TrajectoryStore) -> None:
    """Keep the store's lease, and end this process with it."""
    await store.keep_lease()
    os.kill(os.getpid(), signal.SIGTERM)


def coordinator_client(
    trust: Trust, command_timeout_s: float = COMMAND_TIMEOUT_S, model: str = ""
) -> CoordinatorClient:
    """Return the coordinator of a model of this process's application, wherever it is now."""
    find = partial(find_coordinator, serve.get_replica_context().app_name, model)
    return CoordinatorClient(find, trust, command_timeout_s=command_timeout_s)


class EngineReplicaDeployment:
    """One engine and its private port; the Serve handle is never called with tokens."""

    async def __init__(  # type: ignore[misc]
        self, service: ServiceConfig, run_dir: Path, trust: Trust, entry_index: int, model: str
    ) -> None:
        self._closing, config = _begin(service, run_dir), service.of_model(model)
        entry, context = config.entries[entry_index], serve.get_replica_context()
        if entry.on_gpu:
            prepare_engine_process(entry.num_threads)
        prepare_engine_network(config)
        client = coordinator_client(trust, model=model)
        self._closing.push_async_callback(client.close)
        versions = served_versions(config, run_dir)
        self._replica = Replica(
            f"{entry.name}-{context.replica_id.unique_id}",
            build_engine(config, entry, EngineHosts(config, run_dir, entry) if entry.hosts > 1 else None),
            client.replicas,
            trust,
            node_address(config),
            config=replace(replica_config(config, entry), node_id=ray.get_runtime_context().get_node_id()),
            starting=lambda: ends_unless_done(entry.start_timeout_s, "the engine's start"),
            located=None if versions is None else versions.located,
        )
        self._closing.push_async_callback(self._replica.close)
        name, report = self._replica.replica_id, client.metrics.report_metrics
        engine = engine_text if config.metrics.engine else str
        self._closing.report(name, report, gauges=self._replica.gauges, engine=engine)
        await self._replica.start()

    async def check_health(self) -> None:
        await self._replica.check_health()

    async def __del__(self) -> None:
        await self._closing.aclose()


class AgentLoopWorkerDeployment:
    """Runs agent loops; takes its work from the coordinator. It has the workers' key, and not the run's secret."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        stores_turns: bool,
        others: Sequence[ModelRun],
    ) -> None:
        self._closing = _begin(config, run_dir)
        facts, settings = model_sizes(config), config.workers
        chat = load_chat_format(config.model_path(), config.chat)
        clients, client = EngineClients(trust), coordinator_client(trust)
        self._closing.push_async_callback(clients.close)
        self._closing.push_async_callback(client.close)
        toolbox = Toolbox(load_tools(tool_names(config), config.tools))
        self._closing.push_async_callback(toolbox.close)
        self._closing.tally.trace = begin_sinks(config, run_dir, self._closing)
        home = StoredJournals(client.workers) if stores_turns else JournalFolder(run_dir / TURNS_FOLDER)
        journal = TurnJournal(home)
        self._closing.push_async_callback(journal.close)
        limits = worker_config(config, engine_traces(config, run_dir))
        worker_id, isolated = serve.get_replica_context().replica_id.unique_id, None
        models = ModelCalls({other.name: await self._calls_of(config, other, worker_id) for other in others})
        shared: dict[str, Any] = {"tally": self._closing.tally, "parser_name": chat.name, "models": models}
        shared |= {"journal": journal, "takes_images": takes_images(config)}
        reporter = LeaseReporter(worker_id, client.workers.report_leases)
        if settings.isolation != "none":
            of_worker = parts.load(parts.TRAJECTORY_RUNNERS, settings.isolation, param="workers.isolation")
            isolated = of_worker(
                config,
                run_dir,
                limits,
                client.workers,
                clients.connect,
                reporter,
                stores_turns=stores_turns,
                own_s=toolbox.own_s,
                **shared,
            )
            self._closing.push_async_callback(isolated.close)
        worker = Worker(
            worker_id,
            client.workers,
            clients.connect,
            chat.renderer,
            chat.parser,
            toolbox,
            limits,
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
            begin=None if isolated is None else isolated.begin,
            reporter=reporter,
            host=node_address(config),
            **shared,
        )
        self._closing.report(f"worker-{worker_id}", client.metrics.report_metrics)
        self._running = asyncio.create_task(worker.run(), name="worker")
        self._closing.push_async_callback(asyncio.wait, [self._running])
        self._closing.callback(worker.close)
        tune_interpreter()

    async def _calls_of(self, service: ServiceConfig, other: ModelRun, worker_id: str) -> TokenCalls:
        """Return the calls to another model."""
        config, closing = service.of_model(other.name), self._closing
        clients, client = EngineClients(other.trust), coordinator_client(other.trust, model=other.name)
        closing.push_async_callback(clients.close)
        closing.push_async_callback(client.close)
        reporter = LeaseReporter(f"{worker_id}-{other.name}", client.workers.report_leases)
        closing.push_async_callback(reporter.close)
        leases = CallLeases(client.front, clients.connect, reporter)
        closing.push_async_callback(leases.close)
        parts = await asyncio.to_thread(session_parts, config, closing.tally)
        return TokenCalls(parts, leases)

    async def check_health(self) -> None:
        if self._running.done():
            raise EngineLost("the worker's loop has ended") from self._running.exception()

    async def __del__(self) -> None:
        await self._closing.aclose()


class IngressDeployment:
    """The HTTP edge on the service's port: rollouts, admin, the chat endpoint with its share of the sessions."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        keys: Mapping[str, Keys],
        others: Sequence[ModelRun],
        *deployed_with: DeploymentHandle,
    ) -> None:
        """`keys` are those of each model that has its own, by name; "" is the policy, and all others."""
        self._closing = _begin(config, run_dir)
        client = coordinator_client(trust, config.updates.timeout_s + CALL_MARGIN_S)
        self._closing.push_async_callback(client.close)
        warn_of_open_ray()
        self._url, context = url_of(config.host, config.port, config.scheme), serve.get_replica_context()
        self._port = PublicPort(self._url, keeper_finder(config.host, config.port, context.app_name))
        self._closing.push_async_callback(self._port.close)
        tally = self._closing.tally
        timeout_s = config.updates.timeout_s + CALL_MARGIN_S
        beside = {other: coordinator_client(other.trust, timeout_s, other.name) for other in others}
        for its_client in beside.values():
            self._closing.push_async_callback(its_client.close)
        fronts = {other: its_client.front for other, its_client in beside.items()}
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
        """Refuse what comes through a proxy of Serve's, which bounds nothing that strangers send."""
        return error_response(NotFound(f"this port is Ray Serve's own; the service listens at {self._url}"))

    async def check_health(self) -> None:
        self._process.check_health()
        self._port.check_health()

    async def __del__(self) -> None:
        await self._closing.aclose()


class IngressProcess:
    """One ingress process, whoever serves its `app`. Close it also after a `start` that raised."""

    app: FastAPI
    sessions: Sessions
    direct_url: str  # of the app on this process's own port

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
        """`keys` are digests; None: those of this process's environment. Requests are counted in `tally`. `others`
        are the models beside the policy, with their coordinators."""
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
        """Take a shard, open its sessions and a port, and tell the other processes. `public` is served too.

        Raises InvalidRequest if the service would be open to other machines without keys.
        """
        config, closing = self._config, self._closing
        numbers, num_processes = await self._numbers(), config.num_ingress if config.cluster is None else None
        shard, lock = await take_shard_lock(self._run_dir, numbers, first=first_shard)
        closing.callback(lock.release)
        self.number = shard
        trust = None if config.cluster is None else self._trust  # on one host agents, too, may call the own port
        self.tally.trace = begin_sinks(config, self._run_dir, closing)
        all_keys = self._keys or {"": keys_of(config)}
        policy = ModelRun("", self._run_dir, self._trust)
        opened = await self._open(policy, self._coordinator, num_processes, trust)
        endpoint, sessions = opened.endpoint, opened.endpoint.sessions
        keys = all_keys[""]
        read = None if config.users is None else lambda: load_users(located(config.users or ""))
        endpoint.users = users = ServedUsers(keys, self._coordinator, read, sessions.num_of_owners)
        sessions.on_new = users.add_session
        closing.push_async_callback(users.close)
        await users.start()
        beside, apps = dict[str, OpenedModel](), dict[str, FastAPI]()
        for other, coordinator in self._others.items():
            beside[other.name] = its = await self._open(other, coordinator, num_processes, trust)
            its.endpoint.users, its.endpoint.path = users, f"{MODELS_PATH}/{other.name}"
            apps[other.name] = its_app = its.to_app(all_keys.get(other.name, keys), is_inside=True)
            await closing.enter_async_context(its_app.router.lifespan_context(its_app))
        endpoint.others = {name: its.endpoint for name, its in beside.items()}
        app = opened.to_app(keys, apps)
        server = DirectServer(app, address := node_address(config), tls=config.tls_files, trust=trust)
        closing.push_async_callback(server.close)
        reached_at = config.public_url or (None if public is None else url_of_socket(public, config.scheme))
        url = await server.start(int(lock.text or 0), public)
        lock.set_text(url.rpartition(":")[2])
        host_url = "" if config.cluster is None else url_of(address, config.port, config.scheme)
        for one in (opened, *beside.values()):
            # The one process is on the public port too, where a call waits while it is started again.
            one.endpoint.direct_url = host_url or (url if config.num_ingress > 1 else None)
            one.endpoint.public_url = None if reached_at is None else reached_at.rstrip("/")
            closing.push_async_callback(one.router.close)
            await one.router.start(url, host_url)
            self._health_checks += [one.router.check_health, one.endpoint.sessions.check_health]
        self._health_checks += [server.check_health, users.check_health]
        self.app, self.sessions, self.direct_url = app, sessions, url

    async def _open(
        self, model: ModelRun, coordinator: FrontPort, num_processes: int | None, trust: Trust | None
    ) -> OpenedModel:
        """Open a model's endpoint, with the sessions that this process has of it."""
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
        """The processes that may be this one: those of this host."""
        num = self._config.num_ingress
        if self._config.cluster is None:
            return tuple(range(num))
        return await self._coordinator.endpoint_numbers(disk_of(self._run_dir), share_of_node(num))

    def check_health(self) -> None:
        """Raises what ended a part of it that should not end."""
        for check in self._health_checks:
            check()

    async def close(self) -> None:
        """Stop, newest part first. Idempotent."""
        self._health_checks = []
        await self._closing.aclose()


def engine_traces(config: ServiceConfig, run_dir: Path) -> EngineTraces | None:
    """Return the traces that engines take part in; None if they make no spans."""
    asked = config.tracing
    return EngineTraces(run_dir.name, asked.sample) if asked is not None and asked.engine else None


def worker_config(config: ServiceConfig, traces: EngineTraces | None) -> WorkerConfig:
    """Return the bounds of a worker."""
    settings = config.workers
    return WorkerConfig(
        capacity=settings.num_at_once,
        turn_timeout_s=settings.turn_timeout_s,
        max_standstill_s=settings.max_standstill_s,
        kv_policy=config.kv_policy,
        traces=traces,
    )


def followed_store(config: ServiceConfig, run_dir: Path) -> FollowedStore | None:
    """Return the store of versions that the service follows, if it does. Raises InvalidRequest."""
    if (given := config.weights) is None:
        return None
    source = PublishedSource(given.store, given.run)
    return FollowedStore(source, served_versions(config, run_dir).latest, given.poll_s)


def served_versions(config: ServiceConfig, run_dir: Path) -> Any:
    """Return the `ServedVersions` of that store, None without one. Raises InvalidRequest."""
    if (given := config.weights) is None:
        return None
    source, folder = PublishedSource(given.store, given.run), Path(given.cache or run_dir / "weights")
    return parts.load(parts.WEIGHT_SOURCES, VERSIONS, param="store")(source, folder)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model as an ingress process serves it."""

    config: ServiceConfig
    run_dir: Path
    coordinator: FrontPort
    clients: EngineClients
    endpoint: Endpoint
    router: ShardRouter

    def to_app(
        self, keys: Keys, others: Mapping[str, FastAPI] = MappingProxyType({}), *, is_inside: bool = False
    ) -> FastAPI:
        """Return its HTTP app. Raises InvalidRequest without the keys that its host asks for."""
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
            is_inside=is_inside,
        )


def ingress_gauges(name: str, process: IngressProcess) -> tuple[MetricSample, ...]:
    """Return the metrics of the requests and sessions that an ingress process has."""
    sessions, in_flight = process.sessions, Counter(map(route_of, process.app.state.in_flight.values()))
    return (
        *(MetricSample("http_in_flight", (name, route), num) for route, num in in_flight.items()),
        MetricSample("sessions_open", (name,), sessions.num_open),
        MetricSample("session_bytes", (name,), sessions.num_bytes),
    )


def run_gauges(config: ServiceConfig, run_dir: Path) -> tuple[MetricSample, ...]:
    """Return the metrics of a run as such."""
    store = run_dir / STORE_NAME
    engines = "+".join(sorted({entry.kind for entry in config.entries}))
    build = __version__, engines, ray.__version__, config.mode.value
    return (
        MetricSample("build_info", build, 1.0),
        MetricSample("disk_free_bytes", (), shutil.disk_usage(run_dir).free),
        *([MetricSample("store_bytes", (), store.stat().st_size)] if store.exists() else []),
    )


def session_parts(
    config: ServiceConfig,
    tally: MetricsTally,
    traces: EngineTraces | None = None,
    keep_image_files: Callable[[tuple[Image, ...]], Awaitable[None]] | None = None,
) -> SessionParts:
    """Return what the chat calls of a process share. It loads the model's chat format."""
    facts, chat = model_sizes(config), load_chat_format(config.model_path(), config.chat)
    return SessionParts(
        renderer=chat.renderer,
        reader=TurnReader(chat.renderer, chat.parser, chat.name),
        parser=chat.parser,
        kv_policy=config.kv_policy,
        max_context_tokens=facts.max_context_tokens,
        vocab_size=facts.vocab_size,
        can_constrain=can_constrain(config),
        tally=tally,
        placer=ImagePlacer(takes_images=takes_images(config)),
        keep_image_files=keep_image_files,
        traces=traces,
    )


def build_endpoint(
    config: ServiceConfig,
    where: Path | Home,
    run_dir: Path,
    secret: str,
    coordinator: FrontPort,
    clients: EngineClients,
    router: ShardRouter,
    tally: MetricsTally | None = None,
) -> tuple[Sessions, Endpoint]:
    """The chat endpoint of one ingress process, and its sessions, not started."""
    facts, settings = model_sizes(config), config.endpoint
    keeps_images = config.cluster is None and config.store is None
    keep = ImageFiles(run_dir / IMAGES_FOLDER).keep if keeps_images else coordinator.keep_images
    parts = session_parts(config, MetricsTally() if tally is None else tally, engine_traces(config, run_dir), keep)
    limits = SessionLimits(
        max_sessions=settings.max_sessions,
        max_resident_bytes=settings.max_resident_mib << 20,
        ttl_s=settings.session_ttl_s,
    )
    sessions = Sessions(
        where,
        parts=parts,
        coordinator=coordinator,
        connect=clients.connect,
        secret=secret,
        limits=limits,
        shards=router,
        min_free_bytes=config.min_free_mib << 20,
    )
    endpoint = Endpoint(
        sessions=sessions,
        renderer=parts.renderer,
        parser=parts.parser,
        model_name=config.served_name,
        max_model_len=facts.max_context_tokens,
        limits=EndpointLimits(settings.max_open_calls, settings.score_share),
        created_at=int(time.time()),
        shards=router,
        live_version=lambda: _live_version(coordinator),
        logprobs_mode=LogprobsMode(config.entries[0].logprobs_mode),  # that of all of them
        takes_images=takes_images(config),
        by_name=None if config.max_loras is None else coordinator.adapters,
    )
    return sessions, endpoint


def user_table(config: ServiceConfig) -> UserTable:
    """Return the users that a service's config names."""
    return UserTable() if config.users is None else table_of(load_users(located(config.users)))


async def _live_version(coordinator: FrontPort) -> int | None:
    return (await coordinator.status()).weight_version


def sessions_name(rank: int) -> str:
    """The file of an ingress process's sessions within the run directory."""
    return f"sessions-{rank}.sqlite"


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a Serve config's `args`; see ServiceConfig."""
    config = ServiceConfig.model_validate(args)
    if config.port == 0:
        raise InvalidRequest("a service that is deployed needs a port, which its processes share", param="port")
    run_dir = Path(config.run_dir) if config.run_dir else run_dir_in(Path("runs"))
    return application(config, run_dir)


def application(config: ServiceConfig, run_dir: Path) -> serve.Application:
    """The deployments, bound: each model's coordinator and kinds of replicas, the workers, the ingress.

    Raises InvalidRequest if keys are missing, or if the model is not there, or not what it must be, and what
    `load_chat_format` raises: a model that would be rendered or read wrongly is refused before anything is started,
    or written.
    """
    config, run_dir = for_nodes(config), run_dir.resolve()  # replicas have working directories of their own
    where_the_run_is(config, restore_run, config, run_dir)
    config = where_the_run_is(config, sized, config, run_dir, num_nodes=num_nodes())
    if config.users is not None:  # for processes with working directories of their own
        config = config.model_copy(update={"users": str(located(config.users))})
    keys = keys_of(config)  # of which the ingress processes get the digests, and no other process anything
    if keys.notice is not None:
        _log.warning("open_admin_routes", because=keys.notice)
    check_trust(config, keys)
    if config.tls is not None:
        config.tls.check()
    check_certificates(config)
    configs = config.of_models
    for one in configs.values():
        check_model(one)
    if config.served_name in configs:
        raise InvalidRequest(f"two models are called {config.served_name!r}", param="models")
    if config.turns is not None:
        sizes = {one.served_name: one.num_gpu_engines * weight_bytes(one) for one in configs.values()}
        check_turns(sizes, psutil.virtual_memory().available)
    check_hosts(config, node_resources(), node_labels())
    trust = where_the_run_is(config, begun_run, config, run_dir)
    dirs = {name: run_dir / "models" / f"{run_dir.name}.{name}" for name in configs if name}
    others = [ModelRun(name, path, begun_run(configs[name], path)) for name, path in dirs.items()]
    stored, head = store_elsewhere(config, run_dir), where_the_run_is(config, node_address, config)
    deployed = [
        one
        for model in (ModelRun("", run_dir, trust), *others)
        for one in model_processes(stored, configs[model.name], model, head, () if model.name else others)
    ]
    where = (config.model_copy(update={"store": None}), run_dir)  # no password where users' code may run
    workers = processes(
        AgentLoopWorkerDeployment,
        "AgentLoopWorker",
        health_check_timeout_s=config.workers.silent_after_s / 2,  # by the second check its work is another's
        placement=on_each_node(config, config.workers.replicas or 1),
    )
    ingress = processes(
        IngressDeployment,
        "Ingress",
        placement=on_each_node(config, config.num_ingress),
        max_ongoing_requests=10_000,
    )
    of_workers = [replace(other, trust=other.trust.of_workers) for other in others]
    own_keys = {one.name: keys_of(configs[one.name]) for one in config.models if one.keys is not None}
    # Serve deploys what the ingress is bound to: the others are named here for that reason alone.
    deployed.append(workers.bind(*where, trust.of_workers, config.store is not None, of_workers))
    return ingress.bind(stored, run_dir, trust, {"": keys, **own_keys}, others, *deployed)


@dataclass(frozen=True)
class ModelRun:
    """A model of the service and its run, as processes know it: "" is the policy."""

    name: str
    run_dir: Path
    trust: Trust


def model_processes(
    service: ServiceConfig, config: ServiceConfig, model: ModelRun, head: str, others: Sequence[ModelRun]
) -> list[serve.Application]:
    """Return the coordinator of a model, and its engine replicas. `service` has the store; `others` take turns."""
    stateless = service.model_copy(update={"store": None})
    coordinator = processes(
        CoordinatorDeployment,
        of_model(COORDINATOR_NAME, model.name),
        actor=coordinator_place(config),
        health_check_period_s=1.0,  # all wait for it
        stays_s=COORDINATOR_STAYS_S,
    ).bind(service, model.run_dir, model.trust, head, model.name, others if service.turns is not None else ())
    engines = [
        processes(
            EngineReplicaDeployment,
            engine_deployment(config, entry, model.name),
            actor=engine_actor_options(config, entry),
            placement=engine_placement(config, entry),
            ends_within_s=10.0 if entry.max_replicas is None else ENDS_TURNS_WITHIN_S,
        ).bind(stateless, model.run_dir, model.trust, index, model.name)
        for index, entry in enumerate(config.entries)
    ]
    return [coordinator, *engines]


def check_model(config: ServiceConfig) -> None:
    """Raise InvalidRequest, and what `load_chat_format` raises, for a model that cannot be served as it should."""
    weight_config(config)
    load_chat_format(config.model_path(), config.chat)
    for entry in config.entries:
        check_entry(config, entry)


def store_elsewhere(config: ServiceConfig, run_dir: Path) -> ServiceConfig:
    """Return a config whose store other nodes reach too. Raises InvalidRequest."""
    if config.cluster is None or config.store is None:
        return config
    url = where_the_run_is(config, url_elsewhere, config, run_dir)
    return config.model_copy(update={"store": SecretStr(url)})


def begun_run(config: ServiceConfig, run_dir: Path) -> Trust:
    """Begin a run in its directory, or go on with it; returns what its processes trust. Raises InvalidRequest."""
    check_store(config, run_dir)
    # A missing or misconfigured part is refused before anything starts.
    configured(config)
    if config.workers.isolation != "none":
        parts.load(parts.TRAJECTORY_RUNNERS, config.workers.isolation, param="workers.isolation")
    followed_store(config, run_dir)
    trust = run_trust(config, run_dir)
    keep_config(config, run_dir)
    keep_tokenizer(config, run_dir)
    keep_run(config, run_dir)
    return trust


def engine_deployment(config: ServiceConfig, entry: EngineEntry, model: str = "") -> str:
    """Return the name of the deployment of an entry's replicas."""
    return of_model(ENGINE_NAME if config.engines is None else f"{ENGINE_NAME}-{entry.name}", model)


def of_model(name: str, model: str) -> str:
    """Return the name of a deployment of a model."""
    return f"{name}@{model}" if model else name


def check_entry(config: ServiceConfig, entry: EngineEntry) -> None:
    """Raise InvalidRequest, naming the entry, for a missing Python, or experts that cannot be as it says."""
    python = None if entry.environment is None else entry.environment.py_executable
    if python is not None and shutil.which(shlex.split(python)[0]) is None:  # Ray would try for ever
        raise InvalidRequest(f"engine {entry.name}: there is no {python}", param="engines.environment")
    if entry.expert_parallel and not model_sizes(config).has_experts:
        raise InvalidRequest(
            f"engine {entry.name}: expert_parallel needs a mixture of experts, and {config.model} is dense",
            param="engine.expert_parallel",
        )
    if entry.quantization is not None and entry.device == "cpu" and model_sizes(config).has_experts:
        raise InvalidRequest(
            f"engine {entry.name}: quantised experts have no kernel on device cpu", param="engine.quantization"
        )


def check_resources(config: ServiceConfig, available: Mapping[str, float]) -> None:
    """Raise InvalidRequest if all replicas together reserve more than a Ray cluster has: it would wait for ever."""
    for name, option in (("GPU", "device"), ("CPU", "num_cpus")):
        asked = {
            of_model(entry.name, model): (entry.replicas * entry.hosts, engine_bundle(one, entry).get(name, 0.0))
            for model, one in config.of_models.items()
            for entry in one.entries
        }
        total, there = sum(count * each for count, each in asked.values()), available.get(name, 0.0)
        if total > there:
            parts = " + ".join(f"{name} {count} x {each:g}" for name, (count, each) in asked.items() if each)
            raise InvalidRequest(
                f"the replicas ask for {total:g} {name}s ({parts}), and this Ray has {there:g}: "
                f"take fewer replicas, or engines that need less ({option})",
                param="replicas",
            )


def check_hosts(
    config: ServiceConfig, free: Mapping[str, Mapping[str, float]], labels: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise InvalidRequest if no nodes have the labels and resources of replicas that ask for labels or are over
    several hosts: Ray would wait for ever.

    `free` are the resources of each node and `labels` its labels, by its address; both empty before Ray is there.
    """
    left = {address: dict(resources) for address, resources in free.items()}
    for entry in config.entries:
        bundle, wanted = engine_bundle(config, entry), entry.node_labels
        for _ in range(entry.replicas if entry.hosts > 1 or (wanted and free) else 0):
            fitting = [
                node
                for address, node in left.items()
                if wanted.items() <= labels[address].items()
                and all(node.get(name, 0) >= bundle[name] for name in bundle)
            ]
            if len(fitting) < entry.hosts:
                asked = " and ".join(_facts(wanted, bundle, wanted, bundle, "free "))
                there = ", ".join(
                    " ".join([address, *_facts(wanted, bundle, labels[address], node)])
                    for address, node in left.items()
                )
                raise InvalidRequest(
                    f"engine {entry.name}: no {'node' if entry.hosts == 1 else f'{entry.hosts} nodes'} with {asked}"
                    f" (nodes: {there or 'this host alone'})",
                    param="hosts",
                )
            for node in sorted(fitting, key=lambda node: [-node[name] for name in bundle])[: entry.hosts]:
                node.update({name: node[name] - amount for name, amount in bundle.items()})


def _facts(
    labels: Iterable[str],
    resources: Iterable[str],
    of_labels: Mapping[str, str],
    amounts: Mapping[str, float],
    kind: str = "",
) -> list[str]:
    """Return words for the values of these labels and resources."""
    shown = [f"{name}={of_labels.get(name, '')}" for name in labels]
    return [*shown, *(f"{amounts.get(name, 0):g} {kind}{name}s" for name in resources)]


def mode_rules(config: ServiceConfig) -> ModeRules:
    """Return what the ingress lets an operator or a trainer do."""
    return ModeRules(
        mode=config.mode.value,
        allows_weights=config.allows_weights,
        allows_push=config.allows_push,
        allows_adapters=config.allows_adapters,
        names_adapters=config.max_loras is not None,
        can_sleep=config.can_sleep,
    )


def tool_names(config: ServiceConfig) -> tuple[str, ...]:
    """The tools that tasks may use: the shipped ones and the configured ones."""
    return tuple(sorted(config.tools))
