"""The process of an engine replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ray
from ray import serve

from agentloop_servers.cluster.host import prepare_engine_process
from agentloop_servers.cluster.nodes import node_address, prepare_engine_network
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.metrics import engine_text
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.engine_hosts import EngineHosts
from agentloop_servers.processes.engine_parts import build_engine
from agentloop_servers.processes.serve_process import ends_unless_done
from agentloop_servers.processes.settings import replica_config
from agentloop_servers.processes.shared import begin_serve_process, coordinator_client, served_versions
from agentloop_servers.replica.server import Replica


class EngineReplicaDeployment:
    """One engine and its private port. Requests use the private port, not the Serve handle."""

    async def __init__(  # type: ignore[misc]
        self, service: ServiceConfig, run_dir: Path, trust: Trust, entry_index: int, model: str
    ) -> None:
        self._closing, config = begin_serve_process(service, run_dir), service.of_model(model)
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
