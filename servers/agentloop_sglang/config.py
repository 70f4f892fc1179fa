"""The setup of one SGLang engine: its configuration, its environment, and SGLang's arguments made from them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.values.capabilities import PRIORITY_POLICY
from agentloop_servers.config.engines import DTYPE_BYTES, kv_bytes_per_token
from agentloop_servers.engines.common.config import ProcessEngineConfig

_SPARE_CONTEXT_TOKENS = 8
"""SGLang 0.5.17 keeps two places of a context to itself; its own is longer than the one we promise."""

SPARE_SLOTS = 2
"""Slots beyond `max_num_seqs`: one for the canary check, and one because a chunked prompt counts twice against free
slots in the step that finishes it (0.5.17), which would keep another request in the queue."""


@dataclass(frozen=True, slots=True)
class SglangConfig(ProcessEngineConfig):
    """The configuration of one SGLang engine. `block_size` is its page size; sleep needs torch_memory_saver."""

    attention_backend: str | None = None  # None: "triton", on CPU "torch_native"; others need packages of their own
    progress_tokens: int = 16  # sampled between two outputs of a request that is not streamed, or of many streams

    def __post_init__(self) -> None:
        ProcessEngineConfig.__post_init__(self)  # `super()` does not know a dataclass with slots
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype is bfloat16 or float16 on cuda: SGLang's kernels take no float32")
        if self.lora_rank is not None:
            # SGLang 0.5.17 gives an adapter a new id at each load, and frozen requests keep theirs: none of its
            # calls replaces the adapter that they go on with.
            raise ValueError("lora_rank is None: adapters are served by vLLM only")
        if self.progress_tokens < 1:
            raise ValueError(f"progress_tokens is {self.progress_tokens}, not positive")


def prepare_environment(config: SglangConfig) -> None:
    """Set the environment variables that SGLang reads and the user has not set. Call before its first import."""
    wanted = {
        "HF_HUB_OFFLINE": "1",  # models are folders
        # SGLang would switch both off, and a trainer in which they are not could not join its NCCL. These are the
        # values that NCCL takes where nothing is set.
        "NCCL_CUMEM_ENABLE": "-2",
        "NCCL_NVLS_ENABLE": "2",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare places
        "SGLANG_FORCE_STREAM_INTERVAL": str(config.progress_tokens),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.traces_url is not None:
        wanted["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    if config.device == "cpu":
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def server_arguments(config: SglangConfig) -> dict[str, Any]:
    """Make the keyword arguments of SGLang's `ServerArgs`."""
    is_cpu = config.device == "cpu"
    arguments: dict[str, Any] = {
        "model_path": config.model,
        "load_format": config.load_format,
        "device": config.device,
        "dtype": config.dtype,
        "context_length": config.max_model_len + _SPARE_CONTEXT_TOKENS,
        "max_running_requests": config.max_num_seqs + SPARE_SLOTS,
        "pp_max_micro_batch_size": config.max_num_seqs,  # what really bounds a batch, without pipelines too
        "page_size": config.block_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_parallel_size,
        "ep_size": config.tensor_parallel_size if config.expert_parallel else 1,
        "random_seed": config.seed,
        "disable_cuda_graph": config.enforce_eager or is_cpu,
        "cuda_graph_max_bs_decode": config.max_num_seqs,  # its own, 256 on most GPUs, leaves larger batches without
        "attention_backend": config.attention_backend or ("torch_native" if is_cpu else "triton"),
        "sampling_backend": "pytorch",  # not used: `sampler.py` samples
        "enable_deterministic_inference": config.batch_invariant,
        "grammar_backend": "none",  # ours is put in its place
        # Token ids in, token ids out, straight from the scheduler; the tokenizer is for constraints only.
        "skip_tokenizer_init": True,
        "log_level": "error",
        # A scheduler whose step hangs ends itself after this long; an update's commit is a step too.
        "watchdog_timeout": max(300.0, 2 * config.commit_timeout_s),
        "incremental_streaming_output": False,
    }
    if config.kv_cache_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    if config.kv_cache_memory_bytes is not None:
        document = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
        arguments["max_total_tokens"] = config.kv_cache_memory_bytes // kv_bytes_per_token(config, document)
    if config.scheduling_policy == PRIORITY_POLICY:
        # In vLLM's direction. A request that runs is not put back for one that waits.
        arguments |= {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            "disable_priority_preemption": True,
        }
    if config.traces_url is not None:
        arguments |= {"enable_trace": True, "otlp_traces_endpoint": config.traces_url}
    if config.can_sleep:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments
