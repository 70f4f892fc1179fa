"""The engines of a service, as its config describes them: one kind for all replicas, or a list of entries.

An entry is a kind of engine with its own settings, number of replicas and environment. vLLM and SGLang cannot share
an environment, so an entry names its own: another Python, or what else Ray can make for its processes. All entries
serve the service's one model, and report their logprobs in one mode, so that a trajectory may go on on any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from agentloop.capabilities import Feature


class _EngineModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Staging = Literal["auto", "device", "host", "none"]
"""Where new weights wait for their commit; auto: the device's memory if they fit, else the host's, else none."""

EngineKind = Literal["vllm", "sglang", "simulated"]

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The adapter ranks that vLLM has kernels for."""


class EngineConfig(_EngineModel):
    """One engine replica: a tensor-parallel group, or `data_parallel_size` of them as one gang."""

    kind: EngineKind = "vllm"
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: str = "bfloat16"
    load_format: Literal["auto", "dummy"] = "auto"
    max_context_tokens: int | None = None  # None: what the model's config.json says
    max_running: Annotated[int, Field(ge=1)] | None = None  # of one engine; None: 512 on a GPU, else 256
    max_step_tokens: Annotated[int, Field(ge=1)] | None = (
        None  # decodes and prefill; vLLM only; None: its own, 2048
    )
    # Of steps that run as CUDA graphs, on vLLM: larger ones are launched kernel by kernel. None: as `graph_tokens`.
    max_graph_tokens: Annotated[int, Field(ge=1)] | None = None
    scheduling_policy: Literal["fcfs", "priority"] = (
        "fcfs"  # of requests that wait; only the second serves `priority`
    )
    block_size: Annotated[int, Field(ge=1)] = 32  # of KV, in tokens (SGLang: a page); vLLM on CPU: times 32
    kv_cache_mib: Annotated[int, Field(ge=1)] | None = None  # CPU: required, the default takes most of the memory
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    data_parallel_size: Annotated[int, Field(ge=1)] = 1  # a dense model is better served by more replicas
    expert_parallel: bool = False  # experts are spread over the whole gang; mixture-of-experts models only
    weight_staging: Staging | None = None  # None: auto; none in hybrid mode, where memory is short
    lora_rank: LoraRank | None = None  # the largest rank of an adapter; None: no adapters
    stage_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # of a push, from the connection to the last byte
    commit_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0  # with loading and compiling; then it is started again
    stall_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # without a step while requests run: it is restarted
    report_interval_s: Annotated[float, Field(gt=0, le=5)] = 2.0  # of turns under way; a crash loses as much
    report_tokens: Annotated[int, Field(ge=1)] = 256  # and where that comes sooner
    enforce_eager: bool = False  # always on for CPU
    batch_invariant: bool = False  # a context has the same logits in whatever batch, for some speed; GPUs only
    logprobs_mode: Literal["sampled", "raw", "both"] = "sampled"  # the distribution: `docs/distribution.md`
    num_threads: Annotated[int, Field(ge=1)] | None = None  # None: on CPU 1; on CUDA many while it loads, then 1
    num_cpus: Annotated[float, Field(ge=0)] = 1.0  # what Ray reserves for a replica
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of its GPU; the rest is for others on the same Ray
    attention_backend: str | None = None  # of SGLang, as it calls them; None: its own choice

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        is_cpu_vllm = self.kind == "vllm" and self.device == "cpu"
        if is_cpu_vllm and self.kv_cache_mib is None:
            raise ValueError("kv_cache_mib is required on device cpu: vLLM would take most of the memory")
        if is_cpu_vllm and self.block_size % 32:
            raise ValueError(f"block_size on device cpu is a multiple of 32, not {self.block_size}")
        if self.batch_invariant and not self.on_gpu:
            raise ValueError("batch_invariant is for vLLM and SGLang on GPUs")
        if self.expert_parallel and self.num_workers == 1:
            raise ValueError("expert_parallel needs a tensor_parallel_size or data_parallel_size above 1")
        if self.gpu_share < 1 and self.num_workers > 1:
            raise ValueError("gpu_share is for replicas of one GPU: Ray shares no others")
        if self.kind != "vllm" and (self.max_step_tokens or self.max_graph_tokens):
            raise ValueError(
                "max_step_tokens and max_graph_tokens are vLLM's: SGLang decodes in steps of their own"
            )
        if self.kind != "sglang" and self.attention_backend:
            raise ValueError("attention_backend is SGLang's")
        if self.kind == "sglang" and self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype on cuda: SGLang's kernels take bfloat16 or float16, no float32")
        if self.kind == "sglang" and self.lora_rank is not None:
            raise ValueError("lora_rank: adapters are served by vLLM only")
        if self.kind == "sglang" and (self.data_parallel_size > 1 or self.expert_parallel):
            raise ValueError("SGLang takes no data_parallel_size or expert_parallel: more replicas serve as well")
        return self

    @property
    def num_workers(self) -> int:
        """Processes that hold weights, and on CUDA the GPUs of a replica."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def on_gpu(self) -> bool:
        """Tell if the engine computes on GPUs."""
        return self.kind != "simulated" and self.device == "cuda"

    @property
    def num_seats(self) -> int:
        """Requests that one engine runs at once."""
        return self.max_running or (512 if self.on_gpu else 256)

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step: a decode of every seat, and as much prefill or more."""
        return self.max_step_tokens or max(2048, 2 * self.num_seats)

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest step that runs as a CUDA graph: decodes, and the prefill of new turns.

        In a steady state nearly every step has some prefill. With 512 seats, graphs of 512, 1,024 and 2,048 tokens
        gave 12,000, 15,200 and 17,100 tokens a second (`tests/benchmarks/RESULTS.md`).
        """
        return self.max_graph_tokens or min(self.step_tokens, 4 * self.num_seats)


class EngineEnvironment(_EngineModel):
    """The environment of an entry's processes, where it is not the service's own.

    Ray starts the replicas with `py_executable`, and makes what `runtime_env` says (`env_vars`, for one). The
    Python must have the service's minor version, and the same Ray and agentloop: see docs/operations.md.
    """

    py_executable: str | None = None  # a command: the path of another environment's python
    runtime_env: dict[str, JsonValue] = {}  # as Ray takes it

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.py_executable is None and not self.runtime_env:
            raise ValueError("an environment has a py_executable, a runtime_env, or both")
        if self.py_executable is not None and not self.py_executable.strip():
            raise ValueError("py_executable is empty")
        if "py_executable" in self.runtime_env:
            raise ValueError("py_executable stands beside runtime_env, not in it")
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            raise ValueError("env_vars of a runtime_env are strings by name")
        return self

    @property
    def env_vars(self) -> dict[str, str]:
        """The environment variables that its processes get."""
        variables = self.runtime_env.get("env_vars", {})
        return {name: str(value) for name, value in variables.items()} if isinstance(variables, dict) else {}


class EngineEntry(EngineConfig):
    """One kind of replicas of a service, with its name, which their ids begin with."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")] = ""
    replicas: Annotated[int, Field(ge=1)] = 1
    environment: EngineEnvironment | None = None  # None: the service's own
    withheld: list[Feature] = []  # what its engine can do and is not used for

    @model_validator(mode="before")
    @classmethod
    def _check_model(cls, given: object) -> object:
        if isinstance(given, dict) and ("model" in given or "tokenizer" in given):
            raise ValueError("an entry has no model of its own: all engines serve the service's `model`")
        return given

    @model_validator(mode="after")
    def _name_it(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", self.kind)  # frozen, and complete only now
        return self


def check_entries(entries: Sequence[EngineEntry]) -> None:
    """Raise ValueError, naming the entry, for entries that cannot serve one model together."""
    first = entries[0]
    for number, entry in enumerate(entries):
        if any(other.name == entry.name for other in entries[:number]):
            raise ValueError(f"two engines are named {entry.name}: give each a `name` of its own")
        if entry.logprobs_mode != first.logprobs_mode:
            raise ValueError(
                f"engine {entry.name} reports logprobs as {entry.logprobs_mode} and {first.name} as"
                f" {first.logprobs_mode}: a trajectory may go on on either"
            )
        if (entry.lora_rank is None) != (first.lora_rank is None):
            raise ValueError(
                f"of the engines {first.name} and {entry.name} one has a lora_rank: an adapter is served by all"
            )
        if (entry.kind == "simulated") != (first.kind == "simulated"):
            raise ValueError(f"of the engines {first.name} and {entry.name} one is simulated: it has no model")
