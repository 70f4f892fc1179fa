"""The process of a worker, which runs agent loops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import serve

from agentloop import parts
from agentloop.concurrency.aio import tune_interpreter
from agentloop.errors import EngineLost
from agentloop.generation.leased_engine import CallLeases
from agentloop.generation.leases import LeaseReporter
from agentloop.observability.trace_context import EngineTraces
from agentloop.rollout.journal_homes import TURNS_FOLDER, JournalFolder, StoredJournals
from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.cluster.nodes import node_address
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.endpoint.token_calls import TokenCalls
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


class AgentLoopWorkerDeployment:
    """A worker: fetches tasks from the coordinator and runs their agent loops.

    It has the workers' restricted credential instead of the run's secret, because it runs user code.
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
        """Return the client with which loops and rewards call another model."""
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
            raise EngineLost(
                "the worker's main task has ended: Serve restarts the worker"
            ) from self._running.exception()

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
        traces=traces,
    )
