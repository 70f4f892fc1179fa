"""The process of a model's coordinator."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import ray
import structlog
from ray import serve

from agentloop import __version__
from agentloop.concurrency.aio import tune_interpreter
from agentloop.concurrency.clock import RealClock
from agentloop.errors import Conflict, error_line
from agentloop.fleet.registry import FleetConfig
from agentloop.observability.metrics import MetricSample
from agentloop.scheduling.waiting import WaitingConfig
from agentloop.storage.retention import RetentionPolicy
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryStore
from agentloop_servers.cluster.nodes import announce_coordinator, announce_wanted, dead_nodes, disk_of, node_address
from agentloop_servers.config.service import ServiceConfig, TurnSettings
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.model_turns import ModelTurns, TurnsModel
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import CoordinatorServer
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.processes.engine_parts import initial_weights
from agentloop_servers.processes.placement import engine_deployment, replicas_wanted
from agentloop_servers.processes.serve_process import on_sighup
from agentloop_servers.processes.settings import balancer_config, weight_config
from agentloop_servers.processes.shared import (
    ModelRun,
    begin_serve_process,
    coordinator_client,
    followed_store,
    user_table,
)
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.run.locks import take_run_lock
from agentloop_servers.run.store import open_store
from agentloop_servers.sinks import begin_sinks

RUN_LOCK_TIMEOUT_S = 30.0  # wait for the previous coordinator to exit
LEASE_RETRY_S = 0.5
LOOK_AT_WORK_S = 2.0  # between two computations of the wanted number of replicas

_log = structlog.get_logger("app")


class CoordinatorDeployment:
    """The coordinator of a model: `Replicas` and `Rollouts` in one event loop, served on a private port."""

    async def __init__(  # type: ignore[misc]
        self,
        service: ServiceConfig,
        run_dir: Path,
        trust: Trust,
        head: str,
        model: str,
        others: Sequence[ModelRun],
    ) -> None:
        """`others` are the models that share the accelerators with `model`, if any."""
        self._closing = begin_serve_process(service, run_dir)
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
        self._closing.report("coordinator", self._coordinator.metrics_book.report_metrics, tally, gauges)
        await self._serve(service, model, trust, others)

    async def _serve(self, service: ServiceConfig, model: str, trust: Trust, others: Sequence[ModelRun]) -> None:
        """Open the private port, announce its address, and start the tasks that watch the fleet."""
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
        """Time-share the accelerators between this model and the others."""
        clients = {other.name: coordinator_client(other.trust, model=other.name) for other in others}
        configs, replicas = service.of_models, self._coordinator.replicas
        settings = cast(TurnSettings, service.turns)
        ports = {"": (self._coordinator.status, replicas.sleep, replicas.wake)}
        ports |= {
            name: (client.front.status, client.front.sleep, client.front.wake) for name, client in clients.items()
        }
        turns = ModelTurns(
            {name: TurnsModel(*port, configs[name].num_replicas) for name, port in ports.items()},
            RealClock(),
            min_stay_s=settings.min_stay_s,
            max_wait_s=settings.max_wait_s,
            start_timeout_s=max(entry.start_timeout_s for config in configs.values() for entry in config.entries),
        )
        try:
            await turns.run()
        finally:
            await asyncio.gather(*(client.close() for client in clients.values()))

    async def _keep_wanted(self, config: ServiceConfig, model: str) -> None:
        """Report to Serve the wanted number of replicas, for engines with `max_replicas`."""
        app_name, announced = serve.get_replica_context().app_name, dict[str, int]()
        entries = {
            entry.name: engine_deployment(config, entry, model) for entry in config.entries if entry.max_replicas
        }
        while True:
            await asyncio.sleep(LOOK_AT_WORK_S)
            wanted = replicas_wanted(config.entries, await self._coordinator.status())
            for name, deployment in entries.items():
                if wanted[name] != announced.get(name):
                    try:
                        await asyncio.to_thread(announce_wanted, app_name, deployment, wanted[name])
                    except Exception as error:  # Ray raises plain exceptions; retry in the next iteration
                        _log.warning("replicas_not_announced", entry=name, reason=error_line(error))
                        continue
                    _log.info("replicas_wanted", entry=name, num=wanted[name])
                    announced[name] = wanted[name]

    async def check_health(self) -> None:
        await self._coordinator.check_health()

    async def __del__(self) -> None:
        await self._closing.aclose()


async def taken_over(store: TrajectoryStore) -> int:
    """Take over a store when the lease of its previous owner expires. Return the owner's number.

    Raises Conflict after `RUN_LOCK_TIMEOUT_S`.
    """
    deadline_at = time.monotonic() + RUN_LOCK_TIMEOUT_S
    while True:
        try:
            return await store.take_over()
        except Conflict:
            if time.monotonic() >= deadline_at:
                raise
        await asyncio.sleep(LEASE_RETRY_S)


async def end_with_lease(store: TrajectoryStore) -> None:
    """Renew the store's lease, and terminate this process if the lease is lost."""
    await store.keep_lease()
    os.kill(os.getpid(), signal.SIGTERM)


def run_gauges(config: ServiceConfig, run_dir: Path) -> tuple[MetricSample, ...]:
    """Return the metrics of the run: its build, and its disk use in bytes."""
    store = run_dir / STORE_NAME
    engines = "+".join(sorted({entry.kind for entry in config.entries}))
    build = __version__, engines, ray.__version__, config.mode.value
    return (
        MetricSample("build_info", build, 1.0),
        MetricSample("disk_free_bytes", (), shutil.disk_usage(run_dir).free),
        *([MetricSample("store_bytes", (), store.stat().st_size)] if store.exists() else []),
    )
