"""The configuration of one SGLang engine, its environment variables, and its SGLang arguments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.errors import InvalidRequest
from agentloop.values.capabilities import PRIORITY_POLICY
from agentloop_servers.config.engines import DTYPE_BYTES, kv_bytes_per_token
from agentloop_servers.engines.common.config import ProcessEngineConfig

_SPARE_CONTEXT_TOKENS = 8
"""Additional context length: SGLang 0.5.17 reserves two tokens of a context, which must not reduce ours."""

SPARE_SLOTS = 2
"""Slots in addition to `max_num_seqs`: one for the canary check, and one because SGLang 0.5.17 counts a chunked
prompt twice in the step that finishes it, which would keep another request in the queue."""


_OWNED = frozenset(
    {
        "tokenizer_path",
        "quantization",
        "kv_cache_dtype",
        "max_total_tokens",
        "dp_size",
        "pp_size",
        "schedule_policy",
    }
    | {"enable_priority_scheduling", "schedule_low_priority_values_first", "disable_priority_preemption"}
    | {"enable_lora", "lora_paths", "enable_memory_saver", "enable_weights_cpu_backup", "disable_radix_cache"}
    | {"speculative_algorithm", "disaggregation_mode", "nnodes", "node_rank", "dist_init_addr", "enable_trace"}
)
"""SGLang's arguments on which logprobs, updates, admission or other keys depend, besides those that
`server_arguments` sets."""


@dataclass(frozen=True, slots=True)
class SglangConfig(ProcessEngineConfig):
    """The configuration of one SGLang engine. `block_size` is its page size; sleep requires torch_memory_saver."""

    attention_backend: str | None = None  # None: "triton", on CPU "torch_native"; others need additional packages
    progress_tokens: int = 16  # tokens between two outputs of a request that is not streamed, or is polled

    def __post_init__(self) -> None:
        ProcessEngineConfig.__post_init__(self)  # `super()` does not work in a dataclass with slots
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype must be bfloat16 or float16 on cuda: SGLang's kernels do not support float32")
        if self.lora_rank is not None:
            # SGLang 0.5.17 assigns a new id to an adapter at each load, and frozen requests keep the old id, so no
            # call can replace the adapter that they use.
            raise ValueError(f"lora_rank must be None, not {self.lora_rank}: adapters are supported by vLLM only")
        if self.progress_tokens < 1:
            raise ValueError(f"progress_tokens is {self.progress_tokens}, not positive")


def prepare_environment(config: SglangConfig) -> None:
    """Set the environment variables of SGLang that the user has not set. Call before the first import of SGLang."""
    wanted = {
        "HF_HUB_OFFLINE": "1",  # models are local folders
        # SGLang would disable both, and a trainer in which they are enabled could not join its NCCL group. These
        # are NCCL's defaults.
        "NCCL_CUMEM_ENABLE": "-2",
        "NCCL_NVLS_ENABLE": "2",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for `_SPARE_CONTEXT_TOKENS`
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
    """Return the keyword arguments of SGLang's `ServerArgs`. Raises InvalidRequest for `config.arguments`."""
    is_cpu = config.device == "cpu"
    arguments: dict[str, Any] = {
        "model_path": config.model,
        "load_format": config.load_format,
        "device": config.device,
        "dtype": config.dtype,
        "context_length": config.max_model_len + _SPARE_CONTEXT_TOKENS,
        "max_running_requests": config.max_num_seqs + SPARE_SLOTS,
        "pp_max_micro_batch_size": config.max_num_seqs,  # the actual limit of a batch, even without pipelines
        "page_size": config.block_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_parallel_size,
        "ep_size": config.tensor_parallel_size if config.expert_parallel else 1,
        "random_seed": config.seed,
        "disable_cuda_graph": config.enforce_eager or is_cpu,
        "cuda_graph_max_bs_decode": config.max_num_seqs,  # SGLang's default on most GPUs is 256
        "attention_backend": config.attention_backend or ("torch_native" if is_cpu else "triton"),
        "sampling_backend": "pytorch",  # not used: `sampler.py` samples
        "enable_deterministic_inference": config.batch_invariant,
        "grammar_backend": "none",  # `scheduler.py` installs ours
        # Token ids in, token ids out, directly from the scheduler. The tokenizer is for constraints only.
        "skip_tokenizer_init": True,
        "log_level": "error",
        # A scheduler with a hung step exits after this time. The commit of an update counts as a step.
        "watchdog_timeout": max(300.0, 2 * config.commit_timeout_s),
        "incremental_streaming_output": False,
    }
    if config.kv_cache_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    if config.kv_cache_memory_bytes is not None:
        document = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
        arguments["max_total_tokens"] = config.kv_cache_memory_bytes // kv_bytes_per_token(config, document)
    if config.scheduling_policy == PRIORITY_POLICY:
        # Like vLLM: lower values first. A waiting request does not preempt a running one.
        arguments |= {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            "disable_priority_preemption": True,
        }
    if config.traces_url is not None:
        arguments |= {"enable_trace": True, "otlp_traces_endpoint": config.traces_url}
    if config.can_sleep:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    for name in config.arguments:
        if name in _OWNED or (name in arguments and name != "attention_backend"):
            raise InvalidRequest(
                f"arguments: SGLang's {name!r} cannot be set here, because the service sets it",
                param="engine.arguments",
            )
    return arguments | dict(config.arguments)
