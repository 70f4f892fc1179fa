"""The wiring of engines: the engine, its configuration and its Ray options, made from an engine pool of the config.

Functions with an optional `entry` use the config's first engine pool by default.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, cast

from agentloop.engine.interface import Engine, WeightUpdate
from agentloop.engine.request_watch import ReportPace
from agentloop.plugins import resolve
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.simulation.weights import ReadFolder, WeightSource
from agentloop.values.capabilities import PRIORITY_POLICY
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.cluster.host import THREADS
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.engines.vllm.config import Speculative, VllmConfig, engine_arguments
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.engines.vllm.extra_arguments import command_line
from agentloop_servers.engines.vllm.process import OtherHosts
from agentloop_servers.processes.placement import number_of_replicas

RECEIVED_WEIGHTS = "agentloop_servers.weight_transfer.simulated:ReceivedWeights"
FOLDER_READER = "agentloop_servers.weight_transfer.checkpoint:folder_reader"
SIMULATED_CONTEXTS = 64  # KV capacity of a simulated engine, in contexts of maximum length
# About the latencies of a small model on one GPU.
SIMULATED_LATENCY = LatencyModel(
    prefill_s=0.001, prefill_s_per_token=2e-6, decode_s=0.002, decode_s_per_request=2e-5
)


def build_engine(
    config: ServiceConfig, entry: EngineEntry | None = None, other_hosts: OtherHosts | None = None
) -> Engine:
    """Construct the engine of a replica without starting it. `other_hosts` is set for an engine on several
    hosts."""
    entry = config.entries[0] if entry is None else entry
    if entry.kind == "vllm":
        return VllmEngine(vllm_config(config, entry), other_hosts)
    if entry.kind != "simulated":
        kind, own = entry.registered()
        return cast(Engine, kind.build(entry, process_fields(config, entry), **own))
    max_context_tokens, model = config.max_context_tokens(entry), config.model_path()
    has_weights = any(model.glob("*.safetensors"))
    return SimulatedEngine(
        SimulatedSpec(
            vocab_size=model_sizes(config).vocab_size,
            max_context_tokens=max_context_tokens,
            block_size=entry.block_size,
            num_blocks=SIMULATED_CONTEXTS * max_context_tokens // entry.block_size,
            max_running=entry.num_seats,
            latency=SIMULATED_LATENCY,
            initial_version=config.model_version if entry.load_format == "auto" else None,
            num_workers=entry.num_workers,
            can_sleep=config.can_sleep,
            logprobs_mode=LogprobsMode(entry.logprobs_mode),
            scheduling_policy=entry.scheduling_policy,
            lora_rank=entry.lora_rank,
            max_loras=entry.max_loras,
            model=str(model) if has_weights and entry.load_format == "auto" else "",
            pace=ReportPace(entry.report_interval_s, entry.report_tokens),
            routed_experts=entry.routed_experts,
            sampling_mask=entry.sampling_mask_top_k is not None,
            max_logprobs=max_logprobs(config),
        ),
        weight_source=_pushed_weights(config, entry) if config.allows_push else None,
        read_folder=cast(Callable[[str], ReadFolder], resolve(FOLDER_READER, param="mode"))(str(model)),
    )


def _pushed_weights(config: ServiceConfig, entry: EngineEntry) -> WeightSource:
    """Return the receiver of a simulated engine's pushes: the only part of a simulated run that requires torch."""
    make = cast(Callable[..., WeightSource], resolve(RECEIVED_WEIGHTS, param="mode"))
    return make(
        entry.num_workers,
        can_hold=config.weight_staging(entry) != "none",
        model=str(config.model_path()),
        timeout_s=entry.stage_timeout_s,
    )


def takes_images(config: ServiceConfig) -> bool:
    """Return True if the model's configuration has a vision encoder and a vLLM replica could use it.

    An engine whose model turns out not to support images rejects them itself.
    """
    return any(entry.kind == "vllm" and vllm_config(config, entry).has_vision for entry in config.entries)


def has_priority(config: ServiceConfig) -> bool:
    """Return True if an engine pool orders waiting requests by priority."""
    return any(entry.scheduling_policy == PRIORITY_POLICY for entry in config.entries)


def can_constrain(config: ServiceConfig) -> bool:
    """Return True if any engine pool may support constraints. The coordinator places such requests by actual
    features."""
    return any(entry.kind != "simulated" for entry in config.entries)


def max_logprobs(config: ServiceConfig) -> int:
    """Return the number of alternatives per token that all engines return."""
    limit = config.entries[0].max_logprobs  # equal in all engine pools
    return model_sizes(config).vocab_size if limit == -1 else limit


def vllm_config(config: ServiceConfig, entry: EngineEntry | None = None) -> VllmConfig:
    """Return the configuration of a vLLM replica of this service."""
    entry = config.entries[0] if entry is None else entry
    return VllmConfig(
        **process_fields(config, entry),
        data_parallel_size=entry.data_parallel_size,
        max_loras=entry.max_loras,
        num_threads=entry.num_threads or 1,
        max_step_tokens=entry.step_tokens,
        max_graph_tokens=entry.graph_tokens,
        speculative=None if entry.speculative is None else Speculative(**entry.speculative.model_dump()),
        has_metrics=config.metrics.engine,
    )


def vllm_command(config: ServiceConfig, entry: EngineEntry) -> str:
    """Return the `vllm serve` command line of an engine pool. Imports vLLM; raises the errors of its arguments."""
    arguments = engine_arguments(vllm_config(config, entry))
    return shlex.join(["vllm", "serve", arguments.pop("model"), *command_line(arguments)])


def process_fields(config: ServiceConfig, entry: EngineEntry) -> dict[str, Any]:
    """Return the fields of `ProcessEngineConfig` for the replicas of an engine pool."""
    return {
        "model": str(config.model_path()),
        "initial_version": config.model_version if entry.load_format == "auto" else None,
        "load_format": entry.load_format,
        "device": entry.device,
        "dtype": entry.dtype,
        "quantization": entry.quantization,
        "kv_cache_dtype": entry.kv_cache_dtype,
        "max_model_len": config.max_context_tokens(entry),
        "max_num_seqs": entry.num_seats,
        "scheduling_policy": entry.scheduling_policy,
        "block_size": entry.block_size,
        "kv_cache_memory_bytes": None if entry.kv_cache_mib is None else entry.kv_cache_mib * 2**20,
        "gpu_memory_utilization": entry.gpu_memory_utilization,
        "tensor_parallel_size": entry.tensor_parallel_size,
        "expert_parallel": entry.expert_parallel,
        "can_sleep": config.can_sleep,
        "weight_staging": config.weight_staging(entry),
        "lora_rank": entry.lora_rank,
        "enforce_eager": entry.enforce_eager,
        "batch_invariant": entry.batch_invariant,
        "logprobs_mode": LogprobsMode(entry.logprobs_mode),
        "max_logprobs": max_logprobs(config),
        "routed_experts": entry.routed_experts,
        "sampling_mask_top_k": entry.sampling_mask_top_k,
        "allow_untested": entry.allow_untested,
        "arguments": entry.arguments,
        "stage_timeout_s": entry.stage_timeout_s,
        "commit_timeout_s": entry.commit_timeout_s,
        "traces_url": config.engine_traces_url,
        "pace": ReportPace(entry.report_interval_s, entry.report_tokens),
    }


def engine_actor_options(config: ServiceConfig, entry: EngineEntry | None = None) -> dict[str, Any]:
    """Return the Ray actor options of a replica: its resources on each host, and its process's environment."""
    entry = config.entries[0] if entry is None else entry
    options: dict[str, Any] = {"num_cpus": entry.num_cpus}
    environment: dict[str, Any] = {} if entry.environment is None else dict(entry.environment.runtime_env)
    variables: dict[str, str] = {} if entry.environment is None else entry.environment.env_vars
    if entry.on_gpu:
        options["num_gpus"] = entry.num_workers // entry.hosts * entry.gpu_share
    if entry.node_labels and entry.hosts == 1:
        options["label_selector"] = entry.node_labels
    if entry.kind != "simulated" and (entry.device == "cpu" or entry.num_threads is not None):
        # Set here, because Ray otherwise sets this variable from num_cpus before the engine can set its own value.
        variables = {THREADS: str(entry.num_threads or 1), **variables}
    if variables:
        environment["env_vars"] = variables
    if entry.environment is not None and entry.environment.py_executable is not None:
        environment["py_executable"] = entry.environment.py_executable
    return {**options, "runtime_env": environment} if environment else options


def engine_bundle(config: ServiceConfig, entry: EngineEntry) -> dict[str, float]:
    """Return the resources that Ray reserves for a replica on each of its hosts, by Ray's resource name."""
    options = engine_actor_options(config, entry)
    bundle = {"GPU": options.get("num_gpus", 0.0), "CPU": options["num_cpus"]}
    return {name: float(amount) for name, amount in bundle.items() if amount}


def engine_placement(config: ServiceConfig, entry: EngineEntry) -> dict[str, Any]:
    """Return Serve's placement options for the replicas of an engine pool.

    A replica on several hosts has a placement group with one bundle per host, and runs in the first bundle.
    """
    number = number_of_replicas(entry)
    if entry.hosts == 1:
        return number
    bundles = [engine_bundle(config, entry)] * entry.hosts
    placement = {**number, "placement_group_bundles": bundles, "placement_group_strategy": "STRICT_SPREAD"}
    if entry.node_labels:
        placement["placement_group_bundle_label_selector"] = [entry.node_labels] * entry.hosts
    return placement


def initial_weights(config: ServiceConfig) -> WeightUpdate | None:
    """Return the weights with which the service started; None if it started with dummy weights.

    Also None if the service has adapters: their base weights are loaded at the engine's start and never updated.
    """
    if config.awaits_weights or config.entries[0].lora_rank is not None:
        return None
    return WeightUpdate(config.model_version, str(config.model_path()))
