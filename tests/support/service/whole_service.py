"""The whole service in one process and without Ray: coordinator, simulated replicas, a worker and HTTP ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentloop.api.coordinator import FrontPort, WorkerPort
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import Engine
from agentloop.fleet.registry import FleetConfig
from agentloop.observability.metrics import MetricSample, MetricsTally
from agentloop.rollout.journal_homes import StoredJournals
from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import CoordinatorServer
from agentloop_servers.metrics import MetricsReporter
from agentloop_servers.net.tcp import listening_socket, url_of
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.coordinator import run_gauges
from agentloop_servers.processes.engine_parts import build_engine, initial_weights
from agentloop_servers.processes.ingress import IngressProcess, ingress_gauges
from agentloop_servers.processes.settings import balancer_config, replica_config
from agentloop_servers.processes.shared import (
    engine_traces,
    followed_store,
    served_versions,
    tool_names,
    user_table,
)
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.server import Replica
from agentloop_servers.run.store import open_store
from agentloop_servers.sinks import begin_sinks

SIMULATED = Path(__file__).parents[3] / "servers" / "simulated.yaml"
SECRET = Trust("in-process")


def simulated_config(**changed: object) -> ServiceConfig:
    """Return `servers/simulated.yaml` with some fields replaced; those of its engine as `engine={...}`."""
    document = ServiceConfig.load(SIMULATED).model_dump()
    engine = changed.pop("engine", {})
    return ServiceConfig.model_validate({**document, **changed, "engine": {**document["engine"], **engine}})


@dataclass(frozen=True, slots=True)
class ServiceSite:
    """The parts that a test may inspect and change. `urls`: the public ports, here one for each ingress process."""

    config: ServiceConfig
    run_dir: Path
    coordinator: Coordinator
    client: CoordinatorClient
    urls: tuple[str, ...]
    ingresses: list[IngressProcess]
    add_worker: Callable[[str, WorkerPort], Worker]

    @property
    def front(self) -> FrontPort:
        return self.client.front

    def ingress(self, **options: Any) -> IngressProcess:
        """Return another ingress process of this service, not started."""
        return IngressProcess(self.config, self.run_dir, SECRET, self.front, **options)


@asynccontextmanager
async def whole_service(
    config: ServiceConfig, run_dir: Path, build: Callable[[ServiceConfig], Engine] = build_engine
) -> AsyncIterator[str]:
    """Start the service; yields its base URL once a replica takes traffic. `build` makes its engines."""
    async with whole_site(config, run_dir, build) as site:
        yield site.urls[0]


@asynccontextmanager
async def whole_site(
    config: ServiceConfig,
    run_dir: Path,
    build: Callable[[ServiceConfig], Engine] = build_engine,
    *,
    has_worker: bool = True,
    num_hosts: int = 0,
    reports: bool = False,
    **options: Any,
) -> AsyncIterator[ServiceSite]:
    """Start the service like `whole_service`, and yield all its parts.

    `options` are those of its ingress processes. With several hosts, the test starts the ingress processes. With
    `reports`, each part reports its metrics like a separate process.
    """
    async with AsyncExitStack() as closing:
        store = open_store(config, run_dir, SECRET.key)
        clients = EngineClients(SECRET, await store.take_over(), store.take_over)
        closing.push_async_callback(clients.close)
        coordinator = Coordinator(
            store,
            clients.connect,
            CoordinatorConfig(
                kv_policy=config.kv_policy,
                initial_weights=initial_weights(config),
                fleet=FleetConfig(entries=frozenset(entry.name for entry in config.entries)),
                disk="head",
                num_endpoint_processes=num_hosts,
                balancer=balancer_config(config),
                read_users=lambda: user_table(config),
                follows=followed_store(config, run_dir),
            ),
            RealClock(),
            probe=clients.probe,
        )
        coordinator.replicas.tally.trace = begin_sinks(config, run_dir, closing)
        closing.push_async_callback(coordinator.close)
        await coordinator.start()
        server = CoordinatorServer(coordinator, SECRET, config.host)
        closing.push_async_callback(server.close)
        await server.start()

        def report(process: str, tally: MetricsTally, gauges: Callable[[], Sequence[MetricSample]] = tuple) -> None:
            if reports:
                reporter = MetricsReporter(process, tally, coordinator.metrics_book.report_metrics, gauges)
                closing.push_async_callback(reporter.close)

        report("coordinator", coordinator.replicas.tally, partial(run_gauges, config, run_dir))

        async def find() -> str:
            return server.url

        client = CoordinatorClient(find, SECRET)
        closing.push_async_callback(client.close)
        kinds = [entry for entry in config.entries for _ in range(entry.replicas)]
        for index, entry in enumerate(kinds):
            engine = build(config) if config.engines is None else build_engine(config, entry)
            name, bounds = f"{entry.name}-{index}", replica_config(config, entry)
            versions = served_versions(config, run_dir)  # each process has its own tracker
            located = None if versions is None else versions.located
            replica = Replica(name, engine, client.replicas, SECRET, config.host, config=bounds, located=located)
            closing.push_async_callback(replica.close)
            await replica.start()
            report(name, MetricsTally(), replica.gauges)
        toolbox = Toolbox(load_tools(tool_names(config), config.tools))
        closing.push_async_callback(toolbox.close)
        facts, chat = model_sizes(config), load_chat_format(config.model_path(), config.chat)

        def add_worker(name: str, port: WorkerPort) -> Worker:
            journal = None if config.store is None else TurnJournal(StoredJournals(port), young_s=0.0)
            tally = MetricsTally()
            tally.trace = begin_sinks(config, run_dir, closing)
            report(f"worker-{name}", tally)
            worker = Worker(
                name,
                port,
                clients.connect,
                chat.renderer,
                chat.parser,
                toolbox,
                WorkerConfig(
                    capacity=config.workers.num_at_once,
                    kv_policy=config.kv_policy,
                    traces=engine_traces(config, run_dir),
                ),
                max_context_tokens=facts.max_context_tokens,
                vocab_size=facts.vocab_size,
                journal=journal,
                tally=tally,
            )
            running = asyncio.create_task(worker.run())
            if journal is not None:
                closing.push_async_callback(journal.close)
            closing.push_async_callback(asyncio.wait, [running])
            closing.callback(worker.close)
            return worker

        if has_worker:
            add_worker("worker", client.workers)
        urls = []
        ingresses: list[IngressProcess] = []
        for index in range(0 if num_hosts else config.num_ingress):
            ingresses.append(IngressProcess(config, run_dir, SECRET, client.front, **options))
            closing.push_async_callback(ingresses[index].close)
            public = listening_socket(config.host)
            urls.append(url_of(config.host, public.getsockname()[1]))
            await ingresses[index].start(index, public)
            name = f"ingress-{index}"
            report(name, ingresses[index].tally, partial(ingress_gauges, name, ingresses[index]))
        async with asyncio.timeout(30):
            while len((await coordinator.status()).replicas) < config.num_replicas:
                await asyncio.sleep(0.01)
        yield ServiceSite(config, run_dir, coordinator, client, tuple(urls), ingresses, add_worker)
