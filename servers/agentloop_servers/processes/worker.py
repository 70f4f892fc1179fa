"""The process of a worker, which runs agent loops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve

from agentloop import parts
from agentloop.concurrency.aio import tune_interpreter
from agentloop.errors import EngineLost
from agentloop.generation.leased_engine import CallLeases
from agentloop.generation.leases import LeaseReporter
from agentloop.observability.metrics import MetricsTally
from agentloop.observability.trace_context import EngineTraces
from agentloop.rollout.journal_homes import TURNS_FOLDER, JournalFolder, StoredJournals
from agentloop.rollout.models import ModelsPort
from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop_servers.chat_format.load import ChatFormat, load_chat_format
from agentloop_servers.cluster.nodes import node_address
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.metrics import MetricsReporter
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.endpoint import session_parts
from agentloop_servers.processes.engine_parts import takes_images
from agentloop_servers.processes.model_calls import ModelCalls
from agentloop_servers.processes.shared import (
    ModelRun,
    begin_serve_process,
    coordinator_client,
    engine_traces,
    tool_names,
)
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.sinks import begin_sinks


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """A model of the service, with this process's connections to its coordinator and replicas."""

    run: ModelRun
    config: ServiceConfig
    chat: ChatFormat
    clients: EngineClients
    client: CoordinatorClient
    tally: MetricsTally


class AgentLoopWorkerDeployment:
    """A worker process: fetches tasks from the coordinator of each model and runs their agent loops.

    It has the workers' restricted credentials instead of the runs' secrets, because it runs user code.
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        stores_turns: bool,
        others: Sequence[ModelRun],
    ) -> None:
        self._closing = begin_serve_process(config, run_dir)
        self._worker_id = serve.get_replica_context().replica_id.unique_id
        policy = await self._open(config, ModelRun("", run_dir, trust), self._closing.tally)
        opened = [await self._open(config, other, MetricsTally()) for other in others]
        self._toolbox = Toolbox(load_tools(tool_names(config), config.tools))
        self._closing.push_async_callback(self._toolbox.close)
        calls = ModelCalls({model.run.name: self._calls_of(model) for model in opened})
        workers = [self._worker_of(model, calls, stores_turns) for model in (policy, *opened)]
        for model in (policy, *opened):
            name, report = f"worker-{self._worker_id}", model.client.metrics.report_metrics
            self._closing.push_async_callback(MetricsReporter(name, model.tally, report).close)
        self._running = [asyncio.create_task(worker.run(), name="worker") for worker in workers]
        self._closing.push_async_callback(asyncio.wait, self._running)
        for worker in workers:
            self._closing.callback(worker.close)
        tune_interpreter()

    async def _open(self, service: ServiceConfig, model: ModelRun, tally: MetricsTally) -> _ServedModel:
        """Connect to a model's processes, and load its chat format."""
        config, closing = service.of_model(model.name), self._closing
        chat = await asyncio.to_thread(load_chat_format, config.model_path(), config.chat)
        clients, client = EngineClients(model.trust), coordinator_client(model.trust, model=model.name)
        closing.push_async_callback(clients.close)
        closing.push_async_callback(client.close)
        tally.trace = begin_sinks(config, model.run_dir, closing)
        return _ServedModel(model, config, chat, clients, client, tally)

    def _worker_of(self, model: _ServedModel, models: ModelsPort, stores_turns: bool) -> Worker:
        """Return the worker of a model's rollouts, not started. `models` are called by its loops and rewards."""
        config, run_dir, client, connect = model.config, model.run.run_dir, model.client, model.clients.connect
        facts, settings = model_sizes(config), config.workers
        home = StoredJournals(client.workers) if stores_turns else JournalFolder(run_dir / TURNS_FOLDER)
        journal = TurnJournal(home)
        self._closing.push_async_callback(journal.close)
        limits = worker_config(config, engine_traces(config, run_dir))
        shared: dict[str, Any] = {"tally": model.tally, "parser_name": model.chat.name, "models": models}
        shared |= {"journal": journal, "takes_images": takes_images(config)}
        reporter, isolated = LeaseReporter(self._worker_id, client.workers.report_leases), None
        if settings.isolation != "none":
            of_worker = parts.load(parts.TRAJECTORY_RUNNERS, settings.isolation, param="workers.isolation")
            isolated = of_worker(
                config,
                run_dir,
                limits,
                client.workers,
                connect,
                reporter,
                stores_turns=stores_turns,
                own_s=self._toolbox.own_s,
                **shared,
            )
            self._closing.push_async_callback(isolated.close)
        return Worker(
            self._worker_id,
            client.workers,
            connect,
            model.chat.renderer,
            model.chat.parser,
            self._toolbox,
            limits,
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
            begin=None if isolated is None else isolated.begin,
            reporter=reporter,
            host=node_address(config),
            **shared,
        )

    def _calls_of(self, model: _ServedModel) -> TokenCalls:
        """Return the client with which loops and rewards call a model next to the policy."""
        client = model.client
        reporter = LeaseReporter(f"{self._worker_id}-{model.run.name}", client.workers.report_leases)
        self._closing.push_async_callback(reporter.close)
        leases = CallLeases(client.front, model.clients.connect, reporter)
        self._closing.push_async_callback(leases.close)
        return TokenCalls(session_parts(model.config, model.chat, model.tally), leases)

    async def check_health(self) -> None:
        for running in self._running:
            if running.done():
                message = "the worker's main task has ended: Serve restarts the worker"
                raise EngineLost(message) from running.exception()

    async def __del__(self) -> None:
        await self._closing.aclose()


def worker_config(config: ServiceConfig, traces: EngineTraces | None) -> WorkerConfig:
    """Return the limits and settings of a worker."""
    settings = config.workers
    return WorkerConfig(
        capacity=settings.num_at_once,
        turn_timeout_s=settings.turn_timeout_s,
        max_unavailable_s=settings.max_unavailable_s,
        kv_policy=config.kv_policy,
        default_top_k=config.default_top_k,
        traces=traces,
    )
