"""Configuration fields that all engine adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentloop.engine.request_watch import ReportPace
from agentloop.errors import InvalidRequest
from agentloop.types import JSON
from agentloop.values.capabilities import Feature, configured_features
from agentloop.values.sampling import LogprobsMode


@dataclass(frozen=True, slots=True)
class ProcessEngineConfig:
    """The configuration of one engine. `initial_version` is the version of `model`'s weights; None: dummy
    weights."""

    model: str  # path of a folder in Hugging Face format
    initial_version: int | None
    load_format: str = "auto"
    device: str = "cuda"  # or "cpu"
    dtype: str = "bfloat16"
    quantization: str | None = None  # applied to the weights at load; a name of `engine_config.Quantization`
    kv_cache_dtype: str = "auto"  # or "fp8"
    max_model_len: int = 4096
    max_num_seqs: int = 128
    scheduling_policy: str = "fcfs"  # or "priority"
    block_size: int = 16  # tokens per KV cache block
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    can_sleep: bool = False  # memory can be released by sleep; CUDA only
    weight_staging: str = "auto"  # staging device of pushed weights: "auto", "device", "host" or "none"
    lora_rank: int | None = None  # maximum rank; None: adapters are not supported
    enforce_eager: bool = False  # no CUDA graphs
    batch_invariant: bool = False  # a context has the same logits in every batch; CUDA only
    seed: int = 0
    control_timeout_s: float = 60.0  # pause, resume
    drain_timeout_s: float = 600.0  # pause(WAIT): the longest duration of a request
    commit_timeout_s: float = 300.0
    stage_timeout_s: float = 600.0  # for a push, from the connection to the last byte
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    max_logprobs: int = 20  # maximum number of alternatives per token
    routed_experts: bool = False  # return the experts that routed each token
    sampling_mask_top_k: int | None = None  # return the kept ids; `top_k` of requests without one; None: do not
    allow_untested: bool = False  # start engine versions newer than the tested ones
    arguments: Mapping[str, JSON] = field(default_factory=dict)  # additional arguments, by the engine's own names
    traces_url: str | None = None  # OTLP/HTTP receiver for the engine's own spans; None: no spans
    pace: ReportPace = field(default_factory=ReportPace)  # how often progress of running requests is reported

    def __post_init__(self) -> None:
        """Raise ValueError for a combination that no engine supports."""
        if (self.load_format == "dummy") != (self.initial_version is None):
            raise ValueError(
                "initial_version must be None if and only if load_format is 'dummy', not"
                f" {self.initial_version} with {self.load_format!r}"
            )
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', not {self.device!r}")
        if self.device == "cpu" and self.can_sleep:
            # vLLM would only log a warning and keep all memory.
            raise ValueError("can_sleep is not supported on CPU: an engine can release memory only on a GPU")
        if self.device == "cpu" and self.batch_invariant:
            raise ValueError("batch_invariant is not supported on CPU: the engines have such kernels for GPUs only")

    @property
    def can_constrain(self) -> bool:
        """True if the model folder has a tokenizer and xgrammar is installed: constraints need both."""
        return (Path(self.model) / "tokenizer.json").is_file() and find_spec("xgrammar") is not None

    @property
    def features(self) -> frozenset[Feature]:
        """The features of the engine that its configuration determines."""
        return configured_features(can_constrain=self.can_constrain, scheduling_policy=self.scheduling_policy)

    @property
    def num_workers(self) -> int:
        """The number of processes that hold weights."""
        return self.tensor_parallel_size


def check_names(engine: str, arguments: Mapping[str, JSON], kind: type[Any]) -> None:
    """Raise InvalidRequest for an argument that is not a field of the dataclass `kind`, with the nearest names."""
    known = [one.name for one in fields(kind)]
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, 3)
            hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise InvalidRequest(f"arguments: {engine} has no argument {name!r}{hint}", param="engine.arguments")
