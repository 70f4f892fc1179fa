"""What a config says of the engine and its model, made into them: the engine's half of the wiring in `app.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from agentloop.engine import Engine, WeightUpdate
from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve
from agentloop.simulation import LatencyModel, SimulatedEngine, SimulatedSpec, WeightSource
from agentloop_servers.config import ServiceConfig
from agentloop_servers.engines.vllm import VllmConfig, VllmEngine

RECEIVED_WEIGHTS = "agentloop_servers.weight_transfer.simulated:ReceivedWeights"
SIMULATED_CONTEXTS = 64  # full contexts that a simulated engine's KV cache holds
SIMULATED_LATENCY = LatencyModel(
    prefill_s=0.001, prefill_s_per_token=2e-6, decode_s=0.002, decode_s_per_request=2e-5
)  # of the order of a small model on one GPU


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
