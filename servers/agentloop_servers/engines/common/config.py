"""The configuration that all engines have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from agentloop.engine.request_watch import ReportPace
from agentloop.values.capabilities import Feature, configured_features
from agentloop.values.sampling import LogprobsMode


@dataclass(frozen=True, slots=True)
class ProcessEngineConfig:
    """The configuration of one engine. `initial_version`: the version of `model`'s weights; None: dummy weights."""

    model: str  # a Hugging Face folder
    initial_version: int | None
    load_format: str = "auto"
    device: str = "cuda"  # or "cpu"
    dtype: str = "bfloat16"
    quantization: str | None = None  # of weights, when they are loaded; a name of `engine_config.Quantization`
    kv_cache_dtype: str = "auto"  # or "fp8"
    max_model_len: int = 4096
    max_num_seqs: int = 128
    scheduling_policy: str = "fcfs"  # or "priority"
    block_size: int = 16  # of the KV cache, in tokens
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    can_sleep: bool = False  # its memory can be given back; CUDA only
    weight_staging: str = "auto"  # where pushed weights wait: "auto", "device", "host" or "none"
    lora_rank: int | None = None  # the largest; None: no adapters
    enforce_eager: bool = False  # no CUDA graphs
    batch_invariant: bool = False  # a context has the same logits in every batch; CUDA only
    seed: int = 0
    control_timeout_s: float = 60.0  # pause, resume
    drain_timeout_s: float = 600.0  # pause(WAIT): as long as a request may run
    commit_timeout_s: float = 300.0
    stage_timeout_s: float = 600.0  # of a push, from the connection to the last byte
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    allow_untested: bool = False  # a newer version of the engine than the tested ones
    traces_url: str | None = None  # of an OTLP/HTTP receiver for the engine's own spans; None: it makes none
    pace: ReportPace = field(default_factory=ReportPace)  # of reports on requests under way

    def __post_init__(self) -> None:
        """Raise ValueError for a combination that no engine supports."""
        if (self.load_format == "dummy") != (self.initial_version is None):
            raise ValueError("initial_version is None exactly when load_format is 'dummy'")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is 'cpu' or 'cuda', not {self.device!r}")
        if self.device == "cpu" and self.can_sleep:
            # vLLM would only log a warning, and keep everything.
            raise ValueError("memory cannot be given back on CPU")
        if self.device == "cpu" and self.batch_invariant:
            raise ValueError("batch_invariant is for GPUs: no engine has such kernels for a CPU")

    @property
    def can_constrain(self) -> bool:
        """True if the model's tokenizer and xgrammar are there, which constraints need."""
        return (Path(self.model) / "tokenizer.json").is_file() and find_spec("xgrammar") is not None

    @property
    def features(self) -> frozenset[Feature]:
        """The features of the engine that do not depend on its model."""
        return configured_features(can_constrain=self.can_constrain, scheduling_policy=self.scheduling_policy)

    @property
    def num_workers(self) -> int:
        """The number of processes that hold weights."""
        return self.tensor_parallel_size
