"""vLLM arguments from `engine.arguments`, read by vLLM's own command-line parser.

The service sets some arguments itself, because exact logprobs, weight updates or admission depend on them. These
are refused, with the key that replaces them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from agentloop.errors import InvalidRequest
from agentloop.types import JSON
from agentloop_servers.engines.common.config import check_names

_EXACT = "exact logprobs depend on it"
_SWAPS = "weight updates depend on it"
_OWN = "the service sets it"
OWNED: Mapping[str, str] = {
    "model": "set `model`",
    "tokenizer": "set `tokenizer`",
    "dtype": "set `engine.dtype`",
    "quantization": "set `engine.quantization`",
    "kv_cache_dtype": "set `engine.kv_cache_dtype`",
    "load_format": "set `engine.load_format`",
    "max_model_len": "set `engine.max_context_tokens`",
    "max_num_seqs": "set `engine.max_running`",
    "max_num_batched_tokens": "set `engine.max_step_tokens`",
    "cudagraph_capture_sizes": "set `engine.max_graph_tokens`",
    "max_cudagraph_capture_size": "set `engine.max_graph_tokens`",
    "scheduling_policy": "set `engine.scheduling_policy`",
    "block_size": "set `engine.block_size`",
    "kv_cache_memory_bytes": "set `engine.kv_cache_mib`",
    "gpu_memory_utilization": "set `engine.gpu_memory_utilization`",
    "tensor_parallel_size": "set `engine.tensor_parallel_size`",
    "data_parallel_size": "set `engine.data_parallel_size`",
    "enable_expert_parallel": "set `engine.expert_parallel`",
    "enforce_eager": "set `engine.enforce_eager`",
    "enable_lora": "set `engine.lora_rank`",
    "max_lora_rank": "set `engine.lora_rank`",
    "max_loras": "set `engine.max_loras`",
    "max_cpu_loras": "set `engine.max_loras`",
    "speculative_config": "set `engine.speculative`",
    "otlp_traces_endpoint": "set `traces.url`",
    "enable_sleep_mode": "set `mode: hybrid`",
    "logprobs_mode": "set `engine.logprobs_mode`",
    "enable_return_routed_experts": "set `engine.routed_experts`",
    "return_sampling_mask": "set `engine.sampling_mask_top_k`",
    "max_logprobs": "set `engine.max_logprobs`",
    "generation_config": _EXACT,
    "override_generation_config": _EXACT,
    "logits_processors": _EXACT,
    "structured_outputs_config": _EXACT,
    "worker_cls": _SWAPS,
    "worker_extension_cls": _SWAPS,
    "weight_transfer_config": _SWAPS,
    "model_loader_extra_config": _SWAPS,
    "pipeline_parallel_size": "weight updates of pipeline stages are not supported",
    "scheduler_cls": "admission and the canary check depend on it",
    "max_num_active_seqs": "set `engine.max_running`",
    "enable_prefix_caching": "admission depends on it",
    "skip_tokenizer_init": _OWN,
    "seed": _OWN,
    "use_tqdm_on_load": _OWN,
    "disable_log_stats": _OWN,
    "enable_log_requests": _OWN,
    "limit_mm_per_prompt": _OWN,
    "mm_processor_cache_gb": _OWN,
    "enable_chunked_prefill": _OWN,
    "distributed_executor_backend": _OWN,
    "nnodes": "set `engine.hosts`",
    "node_rank": "set `engine.hosts`",
    "master_addr": _OWN,
    "master_port": _OWN,
}


def check_owned(arguments: Mapping[str, JSON]) -> None:
    """Raise ValueError for an argument that the service sets. vLLM is not imported."""
    for name in arguments:
        if name in OWNED:
            raise ValueError(f"arguments: vLLM's {name!r} cannot be set here: {OWNED[name]}")


def read_arguments(arguments: Mapping[str, JSON]) -> dict[str, Any]:
    """Return the values as vLLM's `AsyncEngineArgs` expects them. Imports vLLM.

    Raises InvalidRequest for an unknown name, with the nearest names, and for a value that vLLM refuses.
    """
    if not arguments:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    check_names("vLLM", arguments, AsyncEngineArgs)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False, allow_abbrev=False))
    parser.error = _refuse  # argparse would end the process
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        # One at a time, so that an error names its argument.
        values[name] = getattr(parser.parse_args(command_line({name: value})), name)
    return values


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as the options of `vllm serve`."""
    options: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {"backend": value.backend} if hasattr(value, "backend") else dataclasses.asdict(value)
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list | tuple):
            options += [f"--{option}", *map(_text, value)]
        elif value is not None:
            options += [f"--{option}", _text(value)]
    return options


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(f"arguments: vLLM refuses {message}", param="engine.arguments")
