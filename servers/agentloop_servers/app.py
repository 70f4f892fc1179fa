"""The wiring: the only file that constructs. Reading it is reading the architecture.

One Ray Serve application of four deployments; everything that carries tokens goes over the replicas' own ports.
`build` is what a Serve config imports; `local.py` starts the same application on a local Ray of its own. (Serve
awaits an `async __init__`, which mypy does not know, and calls `__del__` also on what failed half-way through it.)
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from agentloop.clock import RealClock
from agentloop.engine import Engine, WeightUpdate
from agentloop.errors import EngineLost, InvalidRequest
from agentloop.import_path import resolve
from agentloop.logs import LOG_NAME, configure_logging
from agentloop.parsers import get_parser
from agentloop.renderer import OnUnstable, Renderer
from agentloop.simulate import LatencyModel, SimulatedEngine, SimulatedSpec, WeightSource
from agentloop.store import STORE_NAME, TrajectoryStore
from agentloop.toolbox import Toolbox, load_tools
from agentloop.worker import Worker, WorkerConfig
from agentloop_servers.admin import ModeRules
from agentloop_servers.config import ServiceConfig
from agentloop_servers.coordinator import Coordinator
from agentloop_servers.coordinator_config import CoordinatorConfig
from agentloop_servers.dataplane import EngineClients
from agentloop_servers.engines.vllm import VllmConfig, VllmEngine
from agentloop_servers.handle import CoordinatorClient
from agentloop_servers.http_guard import Keys
from agentloop_servers.ingress import create_app
from agentloop_servers.process import settle_heap
from agentloop_servers.replica import Replica
from agentloop_tools import SHIPPED_TOOLS

APP_NAME = "agentloop"
RECEIVED_WEIGHTS = "agentloop_servers.transfer.simulated:ReceivedWeights"
SIMULATED_CONTEXTS = 64  # full contexts that a simulated engine's KV cache holds
SIMULATED_LATENCY = LatencyModel(
    prefill_s=0.001, prefill_s_per_token=2e-6, decode_s=0.002, decode_s_per_request=2e-5
)  # of the order of a small model on one GPU


class CoordinatorDeployment(Coordinator):
    """One per service: `Fleet`, `Balancer`, `RolloutQueue` and `WeightController` in one event loop."""

    async def __init__(self, config: ServiceConfig, run_dir: Path, secret: str) -> None:  # type: ignore[misc]
        self._closing = AsyncExitStack()
        configure_logging(run_dir / LOG_NAME)
        clients = EngineClients(secret)
        self._closing.push_async_callback(clients.close)
        super().__init__(
            store=TrajectoryStore(run_dir / STORE_NAME),
            connect=clients.connect,
            config=CoordinatorConfig(
                kv_policy=config.kv_policy,
                max_queued_trajectories=config.max_queued_trajectories,
                initial_weights=initial_weights(config),
            ),
            clock=RealClock(),
        )
        self._closing.push_async_callback(self.close)
        await self.start()
        settle_heap()

    async def __del__(self) -> None:
        await self._closing.aclose()


class EngineReplicaDeployment:
    """One engine and its private port; the Serve handle is never called with tokens."""

    async def __init__(  # type: ignore[misc]
        self, config: ServiceConfig, run_dir: Path, secret: str, coordinator: DeploymentHandle
    ) -> None:
        self._closing = AsyncExitStack()
        configure_logging(run_dir / LOG_NAME)
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(
            replica_id, build_engine(config), CoordinatorClient(coordinator), secret, config.host
        )
        self._closing.push_async_callback(self._replica.close)
        await self._replica.start()

    async def check_health(self) -> None:
        await self._replica.check_health()

    async def __del__(self) -> None:
        await self._closing.aclose()


class AgentLoopWorkerDeployment:
    """Runs agent loops; takes its work from the coordinator."""

    async def __init__(  # type: ignore[misc]
        self, config: ServiceConfig, run_dir: Path, secret: str, coordinator: DeploymentHandle
    ) -> None:
        self._closing = AsyncExitStack()
        configure_logging(run_dir / LOG_NAME)
        facts = model_facts(config)
        settings = config.workers
        clients = EngineClients(secret)
        self._closing.push_async_callback(clients.close)
        toolbox = Toolbox(load_tools(tool_names(config), SHIPPED_TOOLS | settings.tools))
        self._closing.push_async_callback(toolbox.close)
        worker = Worker(
            serve.get_replica_context().replica_id.unique_id,
            CoordinatorClient(coordinator),
            clients.connect,
            Renderer.from_directory(config.model_path(), on_unstable=OnUnstable(settings.on_unstable_template)),
            get_parser(settings.parser),
            toolbox,
            WorkerConfig(
                capacity=settings.capacity, turn_timeout_s=settings.turn_timeout_s, kv_policy=config.kv_policy
            ),
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
        )
        self._running = asyncio.create_task(worker.run(), name="worker")
        self._closing.push_async_callback(asyncio.wait, [self._running])
        self._closing.callback(worker.close)
        settle_heap()

    async def check_health(self) -> None:
        if self._running.done():
            raise EngineLost("the worker's loop has ended") from self._running.exception()

    async def __del__(self) -> None:
        await self._closing.aclose()


@serve.ingress()
class IngressDeployment:
    """The HTTP edge; no policy."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServiceConfig,
        run_dir: Path,
        secret: str,
        coordinator: DeploymentHandle,
        *deployed_with: DeploymentHandle,
    ) -> None:
        configure_logging(run_dir / LOG_NAME)
        self._config = config
        self._clients = EngineClients(secret)
        self._coordinator = CoordinatorClient(coordinator)

    def __serve_build_asgi_app__(self) -> FastAPI:
        config = self._config
        return create_app(
            self._coordinator,
            self._clients.connect,
            keys=Keys.from_environment(config.keys.user_key_env, config.keys.admin_key_env),
            weight_roots=config.allowed_weight_roots(),
            tool_names=frozenset(tool_names(config)),
            rules=mode_rules(config),
        )

    async def __del__(self) -> None:
        await self._clients.close()


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a Serve config's `args`; see ServiceConfig."""
    config = ServiceConfig.model_validate(args)
    run_dir = Path(config.run_dir) if config.run_dir else new_run_dir(Path("runs"))
    return application(config, run_dir)


def application(config: ServiceConfig, run_dir: Path) -> serve.Application:
    """The four deployments, bound. Raises InvalidRequest if the model is not there, or not what it must be."""
    config.model_path()
    if config.engine.expert_parallel and not model_facts(config).has_experts:
        raise InvalidRequest(
            f"expert_parallel needs a mixture of experts, and {config.model} is dense",
            param="engine.expert_parallel",
        )
    secret = secrets.token_hex(16)
    common = (config, run_dir.resolve(), secret)  # replicas have working directories of their own
    coordinator = serve.deployment(
        CoordinatorDeployment,
        name="Coordinator",
        num_replicas=1,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=5,
    ).bind(*common)
    engines = serve.deployment(
        EngineReplicaDeployment,
        name="EngineReplica",
        num_replicas=config.replicas,
        max_ongoing_requests=100,
        ray_actor_options=engine_actor_options(config),
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
    ).bind(*common, coordinator)
    workers = serve.deployment(
        AgentLoopWorkerDeployment,
        name="AgentLoopWorker",
        num_replicas=config.workers.replicas,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=5,
    ).bind(*common, coordinator)
    ingress = serve.deployment(
        IngressDeployment,
        name="Ingress",
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=5,
    )
    # Serve deploys what the ingress is bound to: the engines and workers are named here for that reason alone.
    return ingress.bind(*common, coordinator, engines, workers)


def build_engine(config: ServiceConfig) -> Engine:
    """The engine that a replica owns, not started."""
    settings, facts = config.engine, model_facts(config)
    initial_version = config.model_version if settings.load_format == "auto" else None
    if settings.kind == "vllm":
        return VllmEngine(vllm_config(config))
    return SimulatedEngine(
        SimulatedSpec(
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            block_size=settings.block_size,
            num_blocks=SIMULATED_CONTEXTS * facts.max_context_tokens // settings.block_size,
            max_running=settings.max_running,
            latency=SIMULATED_LATENCY,
            initial_version=initial_version,
            num_workers=settings.num_workers,
            can_sleep=config.can_sleep,
        ),
        weight_source=pushed_weights(config) if config.allows_push else None,
    )


def pushed_weights(config: ServiceConfig) -> WeightSource:
    """What a simulated engine receives pushes with. It needs torch, which nothing else of a simulated run does."""
    make = cast(Callable[..., WeightSource], resolve(RECEIVED_WEIGHTS, param="mode"))
    return make(
        config.engine.num_workers,
        can_hold=config.weight_staging != "none",
        timeout_s=config.engine.stage_timeout_s,
    )


def vllm_config(config: ServiceConfig) -> VllmConfig:
    """What a vLLM replica of this service is."""
    settings = config.engine
    return VllmConfig(
        model=str(config.model_path()),
        initial_version=config.model_version if settings.load_format == "auto" else None,
        load_format=settings.load_format,
        dtype=settings.dtype,
        max_model_len=model_facts(config).max_context_tokens,
        max_num_seqs=settings.max_running,
        block_size=settings.block_size,
        device=settings.device,
        kv_cache_memory_bytes=None if settings.kv_cache_mib is None else settings.kv_cache_mib * 2**20,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        expert_parallel=settings.expert_parallel,
        can_sleep=config.can_sleep,
        weight_staging=config.weight_staging,
        lora_rank=settings.lora_rank,
        enforce_eager=settings.enforce_eager,
        num_threads=settings.num_threads,
        stage_timeout_s=settings.stage_timeout_s,
        commit_timeout_s=settings.commit_timeout_s,
    )


def engine_actor_options(config: ServiceConfig) -> dict[str, Any]:
    """What Ray reserves for a replica, and the environment its engine reads at import."""
    settings = config.engine
    options: dict[str, Any] = {"num_cpus": settings.num_cpus}
    if settings.kind == "vllm" and settings.device == "cuda":
        options["num_gpus"] = settings.num_workers * settings.gpu_share
    elif settings.kind == "vllm":
        # Ray derives this variable from num_cpus, before the engine could set its own.
        options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(settings.num_threads)}}
    return options


def initial_weights(config: ServiceConfig) -> WeightUpdate | None:
    """Where a replica finds the weights that the service began with; None if it began with dummy ones.

    None also where adapters are served: base weights are then loaded at the start and never again.
    """
    if config.engine.load_format == "dummy" or config.engine.lora_rank is not None:
        return None
    return WeightUpdate(config.model_version, str(config.model_path()))


def mode_rules(config: ServiceConfig) -> ModeRules:
    """What the front door lets an operator or a trainer do."""
    return ModeRules(
        mode=config.mode.value,
        allows_weights=config.allows_weights,
        allows_push=config.allows_push,
        allows_adapters=config.allows_adapters,
        can_sleep=config.can_sleep,
    )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    max_context_tokens: int
    vocab_size: int
    has_experts: bool = False


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as the architectures call it


def model_facts(config: ServiceConfig) -> ModelFacts:
    """What the model's config.json says of it. Raises InvalidRequest if it does not."""
    path = config.model_path() / "config.json"
    try:
        document = json.loads(path.read_text())
        context = config.engine.max_context_tokens or int(document["max_position_embeddings"])
        has_experts = any(int(document.get(name) or 0) > 1 for name in _NUM_EXPERTS)
        return ModelFacts(context, int(document["vocab_size"]), has_experts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path}: no usable model description ({error!r})", param="model") from error


def tool_names(config: ServiceConfig) -> tuple[str, ...]:
    """The tools that tasks may use: the shipped ones and the configured ones."""
    return tuple(sorted(SHIPPED_TOOLS | config.workers.tools))


def new_run_dir(parent: Path) -> Path:
    """A new directory under `parent`, named by the time and a few random digits."""
    path = parent / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    path.mkdir(parents=True)
    return path
