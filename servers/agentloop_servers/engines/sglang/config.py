"""The setup of one SGLang engine: its configuration, its environment, and SGLang's arguments made from them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentloop.errors import CheckpointUnreadable
from agentloop.request_watch import ReportPace
from agentloop.sampling import LogprobsMode
from agentloop_servers.engines.common import replay_endpoint

_SPARE_CONTEXT_TOKENS = 8
"""SGLang 0.5.17 keeps two places of a context to itself; its own is longer than the one we promise."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """One engine. `initial_version` is the version `model`'s weights are; None exactly with dummy weights."""

    model: str  # a Hugging Face folder
    initial_version: int | None
    load_format: str = "auto"
    device: str = "cuda"
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    max_num_seqs: int = 128
    block_size: int = 16  # SGLang's page size
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    can_sleep: bool = False  # its memory can be given back; needs torch_memory_saver
    weight_staging: str = "auto"  # where pushed weights wait: "auto", "device", "host" or "none"
    lora_rank: int | None = None  # None: it serves no adapters
    enforce_eager: bool = False  # no CUDA graphs
    attention_backend: str | None = None  # None: "triton", on CPU "torch_native"; others need packages of their own
    seed: int = 0
    control_timeout_s: float = 60.0  # pause, resume
    drain_timeout_s: float = 600.0  # pause(WAIT): as long as a request may run
    commit_timeout_s: float = 300.0
    stage_timeout_s: float = 600.0  # of a push, from the connection to the last byte
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    pace: ReportPace = field(default_factory=ReportPace)  # of reports on requests under way
    progress_tokens: int = 16  # sampled between two outputs of a request that is not streamed, or of many streams

    def __post_init__(self) -> None:
        if (self.load_format == "dummy") != (self.initial_version is None):
            raise ValueError("initial_version is None exactly when load_format is 'dummy'")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is 'cpu' or 'cuda', not {self.device!r}")
        if self.device == "cpu" and self.can_sleep:
            raise ValueError("memory cannot be given back on CPU")
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"dtype is one of {', '.join(_DTYPE_BYTES)}, not {self.dtype!r}")
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype is bfloat16 or float16 on cuda: SGLang's kernels take no float32")
        if self.lora_rank is not None:
            # SGLang 0.5.17 gives an adapter a new id at each load, and frozen requests keep theirs: none of its
            # calls replaces the adapter that they go on with.
            raise ValueError("lora_rank is None: adapters are served by vLLM only")
        if self.progress_tokens < 1:
            raise ValueError(f"progress_tokens is {self.progress_tokens}, not positive")

    @property
    def can_constrain(self) -> bool:
        """True if all that is needed to constrain is there: the model's tokenizer, and xgrammar."""
        return (Path(self.model) / "tokenizer.json").is_file() and find_spec("xgrammar") is not None

    @property
    def num_workers(self) -> int:
        """The number of processes that hold weights."""
        return self.tensor_parallel_size


def prepare_environment(config: SglangConfig) -> None:
    """Set what SGLang reads from the environment. Call before its first import; what the user set stays."""
    wanted = {
        "HF_HUB_OFFLINE": "1",  # models are folders
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare places
        "SGLANG_FORCE_STREAM_INTERVAL": str(config.progress_tokens),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device == "cpu":
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def server_arguments(config: SglangConfig, kv_endpoint: str) -> dict[str, Any]:
    """Return the keyword arguments of SGLang's `ServerArgs`."""
    is_cpu = config.device == "cpu"
    events = {"publisher": "zmq", "endpoint": kv_endpoint, "replay_endpoint": replay_endpoint(kv_endpoint)}
    arguments: dict[str, Any] = {
        "model_path": config.model,
        "load_format": config.load_format,
        "device": config.device,
        "dtype": config.dtype,
        "context_length": config.max_model_len + _SPARE_CONTEXT_TOKENS,
        "max_running_requests": config.max_num_seqs,
        "page_size": config.block_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_parallel_size,
        "random_seed": config.seed,
        "disable_cuda_graph": config.enforce_eager or is_cpu,
        "cuda_graph_max_bs_decode": config.max_num_seqs,  # its own, 256 on most GPUs, leaves larger batches without
        "attention_backend": config.attention_backend or ("torch_native" if is_cpu else "triton"),
        "sampling_backend": "pytorch",  # not used: `sampler.py` samples
        "grammar_backend": "none",  # ours is put in its place
        # Token ids in, token ids out, straight from the scheduler; the tokenizer is for constraints only.
        "skip_tokenizer_init": True,
        "kv_events_config": json.dumps(events),
        "log_level": "error",
        # A scheduler whose step hangs ends itself after this long; an update's commit is a step too.
        "watchdog_timeout": max(300.0, 2 * config.commit_timeout_s),
        "incremental_streaming_output": False,
    }
    if config.kv_cache_memory_bytes is not None:
        arguments["max_total_tokens"] = config.kv_cache_memory_bytes // _kv_bytes_per_token(config)
    if config.can_sleep:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments


def _kv_bytes_per_token(config: SglangConfig) -> int:
    """Return the bytes that a token takes in one worker's cache. Raises CheckpointUnreadable."""
    path = Path(config.model) / "config.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
        model = model.get("text_config", model)
        num_heads = int(model["num_attention_heads"])
        num_kv_heads = int(model.get("num_key_value_heads", num_heads))
        head_dim = int(model.get("head_dim") or model["hidden_size"] // num_heads)
        num_layers = int(model["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnreadable(f"{path} does not say how large a token's KV is", param="model") from error
    num_own = max(1, num_kv_heads // config.tensor_parallel_size)
    return 2 * num_layers * num_own * head_dim * _DTYPE_BYTES[config.dtype]
