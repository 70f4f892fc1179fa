"""The configuration of one vLLM engine, its environment variables, and its vLLM arguments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.images import MAX_IMAGES
from agentloop.values.capabilities import CONSTRAINTS, NOT_SPECULATIVE, Feature, configured_features
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.config import ProcessEngineConfig
from agentloop_servers.engines.vllm.extra_arguments import check_owned, read_arguments
from agentloop_servers.engines.vllm.scheduler import SCHEDULER

WORKER_EXTENSION = "agentloop_servers.weight_transfer.vllm_worker.WeightWorker"


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host's share of an engine that spans several hosts. Host 0 has the scheduler and the first ranks."""

    num_hosts: int
    number: int  # node rank
    address: str  # address of this host
    meeting_host: str  # address of host 0: the rendezvous of all ranks
    meeting_port: int


@dataclass(frozen=True, slots=True)
class Speculative:
    """Draft tokens per step; see `engine_config.SpeculativeSettings`."""

    num_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class VllmConfig(ProcessEngineConfig):
    """The configuration of one vLLM engine. On CPU, `kv_cache_memory_bytes` is required and the engine is eager."""

    device: str = "cpu"  # "cpu" or "cuda": must match the installed build of vLLM
    block_size: int = 32  # on CPU a multiple of 32
    data_parallel_size: int = 1
    max_loras: int | None = (
        None  # adapters served by name, in addition to the base; None: one adapter is the policy
    )
    num_threads: int = 1  # CPU only
    max_step_tokens: int = 2048  # on a GPU: decode and prefill tokens of a step
    max_graph_tokens: int = 512  # largest step that runs as a CUDA graph; larger steps launch each kernel
    speculative: Speculative | None = None
    has_metrics: bool = False  # export vLLM's own metrics in the process's prometheus_client registry
    worker_extension: str = WORKER_EXTENSION  # import path of our class inside vLLM's workers
    share: HostShare | None = None  # None: the engine is on one host

    def __post_init__(self) -> None:
        ProcessEngineConfig.__post_init__(self)  # `super()` does not work in a dataclass with slots
        check_owned(self.arguments)
        if self.device == "cpu" and self.block_size % 32:
            raise ValueError(f"block_size on CPU must be a multiple of 32, not {self.block_size}")
        if self.device == "cpu" and self.kv_cache_memory_bytes is None:
            # By default vLLM would reserve 92 % of all memory.
            raise ValueError("kv_cache_memory_bytes is required on CPU: set the size of the KV cache in bytes")

    @property
    def features(self) -> frozenset[Feature]:
        """The features of the engine that its configuration determines."""
        features = configured_features(can_constrain=self.can_constrain, scheduling_policy=self.scheduling_policy)
        if self.sampling_mask_top_k is not None:
            features -= {Feature.GREEDY}
        if self.speculative is None:
            return features
        # With drafts on a GPU, vLLM 0.32 samples tokens that the grammar forbids, and then ends the request.
        return features - NOT_SPECULATIVE - (frozenset() if self.device == "cpu" else CONSTRAINTS)

    @property
    def has_vision(self) -> bool:
        """True if the model's configuration has a vision encoder."""
        path = Path(self.model) / "config.json"
        try:
            return "vision_config" in json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False  # vLLM reports the problem when it loads the model

    @property
    def num_workers(self) -> int:
        """The number of processes that hold weights."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def num_lora_slots(self) -> int:
        """The number of LoRA slots of a worker. Adapters served by name have twice as many, so that running calls
        can finish under the previous versions and no call waits for a slot."""
        return 1 if self.max_loras is None else 2 * self.max_loras


def prepare_environment(config: VllmConfig) -> None:
    """Set the environment variables of vLLM that the user has not set. Call before the first import of vLLM."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",  # no telemetry
        "HF_HUB_OFFLINE": "1",  # models are local folders
        "VLLM_LOGGING_LEVEL": "ERROR",  # the warnings of each start would hide ours
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "3",  # a closing worker is then killed; it holds no state
        "VLLM_HOST_IP": "127.0.0.1",  # internal sockets stay on loopback; all workers are on this host
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy locks that our threads hold
    }
    if config.logprobs_mode is not LogprobsMode.SAMPLED:
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # `raw_logprobs.py` supports only the first generation
    if config.routed_experts or config.sampling_mask_top_k is not None:
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the first generation has neither
        # By default, the rows of each request are a separate message: with 512 requests a step takes 1.3 ms
        # longer on the way to the front end.
        wanted["VLLM_MSGPACK_ZERO_COPY_THRESHOLD"] = str(1 << 16)
    if config.traces_url is not None:
        wanted["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    if config.batch_invariant:
        wanted["VLLM_BATCH_INVARIANT"] = "1"
    if config.device == "cpu":
        wanted |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin all replicas of a host to the same cores
            "OMP_NUM_THREADS": str(config.num_threads),
        }
    if config.share is not None:
        # Overrides the user's value, which may be another network's.
        os.environ["VLLM_HOST_IP"] = config.share.address
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: VllmConfig) -> dict[str, Any]:
    """Make the keyword arguments of vLLM's `AsyncEngineArgs`. Raises InvalidRequest for `config.arguments`."""
    from vllm.config import StructuredOutputsConfig

    is_cpu = config.device == "cpu"
    arguments: dict[str, Any] = {
        "model": config.model,
        "load_format": config.load_format,
        "dtype": config.dtype,
        # vLLM's own `fp8` is for checkpoints that are already quantized.
        "quantization": "fp8_per_tensor" if config.quantization == "fp8" else config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        **_scheduler_arguments(config),
        "block_size": config.block_size,
        **_parallel_arguments(config),
        **_output_arguments(config),
        "seed": config.seed,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        # On CPU a compiled graph keeps the packed weights it was traced with, so an update would have no effect.
        "enforce_eager": config.enforce_eager or is_cpu,
        # Token ids in, token ids out: the tokenizer is for constraints only.
        "skip_tokenizer_init": not config.can_constrain,
        # With "auto", vLLM 0.32 selects a backend per request but then uses the first request's for all.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
        "generation_config": "vllm",  # the model folder's sampling defaults must not apply
        # Logprobs under the sampling distribution; `raw_logprobs.py` adds the raw ones.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": config.worker_extension,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # no periodic log lines; our stat logger still receives the statistics
        "enable_log_requests": False,
    }
    if config.traces_url is not None:
        arguments["otlp_traces_endpoint"] = config.traces_url
    if config.has_vision:
        arguments |= {
            "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
            "mm_processor_cache_gb": 0,  # `images.py` has its own cache and documents the reason
        }
    if config.can_sleep:
        arguments["enable_sleep_mode"] = True
    if config.speculative is not None:
        arguments["speculative_config"] = _speculative_arguments(config, config.speculative)
    if config.lora_rank is not None:
        num_slots = config.num_lora_slots
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": config.lora_rank,
            "max_loras": num_slots,
            "max_cpu_loras": num_slots,
        }
    if is_cpu:
        # A seeded request with chunked prefill crashes vLLM 0.32's CPU worker ("Generator does not use offset").
        arguments["enable_chunked_prefill"] = False
    else:
        arguments |= _gpu_arguments(config)
    return arguments | read_arguments(config.arguments)


def _output_arguments(config: VllmConfig) -> dict[str, Any]:
    # A raw logprob takes the place of one alternative (`raw_logprobs.py`).
    arguments: dict[str, Any] = {"max_logprobs": config.max_logprobs + (config.logprobs_mode is LogprobsMode.BOTH)}
    if config.routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.sampling_mask_top_k is not None:
        arguments["return_sampling_mask"] = True
    return arguments


def _scheduler_arguments(config: VllmConfig) -> dict[str, Any]:
    return {
        "scheduler_cls": SCHEDULER,
        "scheduling_policy": config.scheduling_policy,
        "max_num_seqs": config.max_num_seqs + 1,  # one slot is reserved for the canary check
        "max_num_active_seqs": config.max_num_seqs,
    }


def _speculative_arguments(config: VllmConfig, speculative: Speculative) -> dict[str, Any]:
    num_tokens, most = speculative.num_tokens, speculative.max_running
    arguments: dict[str, Any] = {
        # With `ngram` on a GPU, vLLM disables asynchronous scheduling: no step is scheduled while another runs.
        "method": "ngram" if config.device == "cpu" else "ngram_gpu",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    if most < config.max_num_seqs:
        steps = [(1, most, num_tokens), (most + 1, config.max_num_seqs + 1, 0)]
        arguments["num_speculative_tokens_per_batch_size"] = steps
    return arguments


def _gpu_arguments(config: VllmConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_batched_tokens": config.max_step_tokens,
    }
    if not config.enforce_eager:
        most = min(config.max_graph_tokens, config.max_step_tokens)
        arguments["cudagraph_capture_sizes"] = graph_sizes(most)
    return arguments


def graph_sizes(most: int) -> list[int]:
    """Return the step sizes, in tokens, to capture as CUDA graphs. A step is padded to the next size."""
    # vLLM's own intervals of 8 and 16, but 64 above 1,024, where steps are rare: half the captures at 2,048.
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 1024, 16), *range(1024, most, 64), most}
    return sorted(size for size in sizes if size <= most)


def _parallel_arguments(config: VllmConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {"tensor_parallel_size": config.tensor_parallel_size}
    if config.data_parallel_size > 1:
        arguments["data_parallel_size"] = config.data_parallel_size
    if config.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if config.num_workers > 1:
        # Inside a Ray actor, vLLM would select its Ray executor automatically.
        arguments["distributed_executor_backend"] = "mp"
    if config.share is not None:
        arguments |= {
            "nnodes": config.share.num_hosts,
            "node_rank": config.share.number,
            "master_addr": config.share.meeting_host,
            "master_port": config.share.meeting_port,
        }
    return arguments
