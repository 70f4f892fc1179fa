"""The engines of a service, as its config describes them: one kind for all replicas, or a list of entries.

An entry is a kind of engine with its own settings, number of replicas and environment. vLLM and SGLang cannot share
an environment, so an entry names its own: another Python, or what else Ray can make for its processes. All entries
serve the service's one model, and report their logprobs in one mode, so that a trajectory may go on on any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from agentloop import parts
from agentloop.errors import CheckpointUnreadable, InvalidRequest
from agentloop.values.capabilities import Feature


class _EngineModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Staging = Literal["auto", "device", "host", "none"]
"""Where new weights wait for their commit; auto: the device's memory if they fit, else the host's, else none."""

Quantization = Literal["fp8", "fp8_per_channel", "fp8_per_block"]
"""The scales of FP8 weights: one for a layer, one for each output channel, one for each block of 128 x 128."""

OWN_KINDS = ("vllm", "simulated")
"""The kinds of engines that the core has; optional parts register others."""

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The adapter ranks that vLLM has kernels for."""


class SpeculativeSettings(_EngineModel):
    """Speculative decoding: the model verifies several draft tokens (n-grams) a step: docs/guides/engines.md."""

    num_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Draft tokens of a request in one step."""
    max_running: Annotated[int, Field(ge=1)] = 32
    """Running requests up to which a step has drafts."""


class EngineConfig(_EngineModel):
    """One engine replica: a tensor-parallel group, or `data_parallel_size` of them as one gang."""

    kind: str = "vllm"
    """`vllm`, `sglang` or `simulated`."""
    device: Literal["cpu", "cuda"] = "cuda"
    """`cuda` or `cpu`."""
    dtype: str = "bfloat16"
    """The type of weights and KV."""
    quantization: Quantization | None = None
    """`fp8`, `fp8_per_channel` or `fp8_per_block`: weights are quantised when loaded; vLLM only (engines.md)."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """The type of KV; `auto`: that of weights."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights, and no traffic until the first push."""
    max_context_tokens: int | None = None
    """The longest context; left out: what the model's config.json says."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Requests that one engine runs at once; left out: 512 on a GPU, else 256."""
    max_step_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the largest step, of decodes and prefill; vLLM only; left out: 2,048 or twice `max_running`."""
    max_graph_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the largest step that runs as a CUDA graph; vLLM only; left out: four times `max_running`."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """The order of requests that wait in the engine; `priority` alone serves `priority` of calls."""
    block_size: Annotated[int, Field(ge=1)] = 32
    """Tokens of a KV block (SGLang: a page); on CPU vLLM's is a multiple of 32."""
    kv_cache_mib: Annotated[int, Field(ge=1)] | None = None
    """The size of the KV cache; required on CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The share of a GPU's memory that the engine takes."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that share each layer."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """Nodes over which each replica's GPUs are spread evenly; vLLM only: docs/guides/cluster.md."""
    accelerator_type: str | None = None
    """The GPUs of its nodes, by Ray's name, as `H100`; left out: any."""
    labels: dict[str, str] = {}
    """Ray's labels of its nodes, as `ray start --labels zone=a` sets them: docs/guides/cluster.md."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel groups in one gang; a dense model is better served by more replicas."""
    expert_parallel: bool = False
    """Spread experts over the whole gang; mixture-of-experts models only."""
    weight_staging: Staging | None = None
    """The place where new weights wait for their commit; left out: `auto`, in hybrid mode `none`."""
    lora_rank: LoraRank | None = None
    """The largest rank of an adapter; left out: no adapters."""
    max_loras: Annotated[int, Field(ge=1)] | None = None
    """Adapters served by name beside the base; left out: one adapter, which is the policy."""
    stage_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """The time of a push, from the connection to the last byte."""
    commit_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """The time of a commit."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """The time of a start, with loading and compiling; then it is started again."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """The time without a step while requests run; then it is restarted."""
    report_interval_s: Annotated[float, Field(gt=0, le=5)] = 2.0
    """Seconds between reports of turns under way; a crash loses as much."""
    report_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens between such reports, where they come sooner."""
    speculative: SpeculativeSettings | None = None
    """Speculative decoding where few requests run; vLLM only; left out: none."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation; always so on CPU."""
    batch_invariant: bool = False
    """A context has the same logits in whatever batch, at some cost in speed; GPUs only."""
    logprobs_mode: Literal["sampled", "raw", "both"] = "sampled"
    """The distribution of logprobs: `sampled`, `raw` or `both` (distribution.md)."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of an engine process; left out: on CPU 1, on CUDA many while it loads, then 1."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that Ray reserves for a replica, on each of its hosts."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of a GPU that Ray reserves; the rest is for others on the same Ray."""
    allow_untested: bool = False
    """Start a newer version of the engine than the tested ones, with a warning; otherwise it is refused."""
    settings: dict[str, JsonValue] = {}
    """Settings of a `kind` that a package registers, in addition to these: its page lists them."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        is_cpu_vllm = self.kind == "vllm" and self.device == "cpu"
        if is_cpu_vllm and self.kv_cache_mib is None:
            raise ValueError("kv_cache_mib is required on device cpu: vLLM would take most of the memory")
        if is_cpu_vllm and self.block_size % 32:
            raise ValueError(f"block_size on device cpu is a multiple of 32, not {self.block_size}")
        if self.quantization is not None:
            self._check_quantization()
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
        if self.kind in OWN_KINDS and self.settings:
            raise ValueError(f"settings: the kind {self.kind} has none")
        if self.kind not in OWN_KINDS:
            self._check_registered()
        if self.max_loras is not None:
            self._check_max_loras()
        if self.hosts > 1:
            self._check_hosts()
        if self.speculative is not None:
            self._check_speculative(self.speculative)
        return self

    def registered(self) -> tuple[Any, dict[str, BaseModel]]:
        """Return the registered kind, and its own settings as an argument. Raises InvalidRequest."""
        return parts.configured(parts.ENGINES, self.kind, self.settings, param="kind")

    def _check_registered(self) -> None:
        try:
            engine, _ = self.registered()
        except InvalidRequest as error:
            raise ValueError(f"kind: {error.message}") from error
        engine.check(self)

    def _check_quantization(self) -> None:
        if self.kind != "vllm":
            raise ValueError(
                "quantization is for vLLM: SGLang quantises at its first load only, and takes no update"
            )
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"quantization is of bfloat16 or float16 weights, not of {self.dtype}")
        if self.device == "cpu" and self.quantization != "fp8_per_channel":
            raise ValueError(f"quantization {self.quantization} has no kernel on device cpu: fp8_per_channel has")

    def _check_max_loras(self) -> None:
        if self.lora_rank is None:
            raise ValueError("max_loras needs a lora_rank, the largest of the adapters")
        if self.load_format == "dummy":
            raise ValueError("max_loras needs load_format auto: the base weights never change")

    def _check_speculative(self, speculative: SpeculativeSettings) -> None:
        if self.kind != "vllm":
            raise ValueError(
                "speculative is vLLM's: SGLang verifies drafts beside the sampler that gives exact logprobs"
            )
        if self.data_parallel_size > 1:
            raise ValueError("speculative takes no data_parallel_size: vLLM drops speculative.max_running there")

    def _check_hosts(self) -> None:
        if self.kind != "vllm":
            raise ValueError(f"hosts above 1 are for vLLM: a {self.kind} engine is on one host")
        if self.data_parallel_size > 1 or self.expert_parallel:
            raise ValueError(
                "hosts above 1 take no data_parallel_size or expert_parallel: neither is proven over several hosts"
            )
        if self.lora_rank is not None:
            raise ValueError("hosts above 1 take no lora_rank: an adapter is read on one host")
        if self.tensor_parallel_size % self.hosts:
            raise ValueError(
                f"hosts divide tensor_parallel_size: {self.tensor_parallel_size} ranks are not spread evenly over"
                f" {self.hosts} hosts"
            )
        if not self.on_gpu and self.num_cpus == 0:
            raise ValueError("hosts above 1 on device cpu need num_cpus above 0: Ray spreads nothing by nothing")

    @property
    def num_workers(self) -> int:
        """Processes that hold weights, and on CUDA the GPUs of a replica."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def node_labels(self) -> dict[str, str]:
        """Labels that each node of a replica has."""
        return self.labels | ({"ray.io/accelerator-type": self.accelerator_type} if self.accelerator_type else {})

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
    Python must have the service's minor version, and the same Ray and agentloop: see docs/guides/engines.md.
    """

    py_executable: str | None = None
    """The command of another environment's Python."""
    runtime_env: dict[str, JsonValue] = {}
    """A runtime environment, as Ray takes it."""

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
    """The name that its replicas' ids begin with; left out: its kind."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Replicas of this kind; with `max_replicas` the least."""
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    """The most replicas: up to it their number follows the work; left out: it is fixed."""
    environment: EngineEnvironment | None = None
    """The environment of its processes; left out: the service's own."""
    withheld: list[Feature] = []
    """Features that its engine has and that are not used."""

    @model_validator(mode="before")
    @classmethod
    def _check_model(cls, given: object) -> object:
        if isinstance(given, dict) and ("model" in given or "tokenizer" in given):
            raise ValueError("an entry has no model of its own: all engines serve the service's `model`")
        return given

    @model_validator(mode="after")
    def _name_it(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError("max_replicas is less than replicas")
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
        if entry.quantization != first.quantization:
            raise ValueError(
                f"engine {entry.name} has quantization {entry.quantization} and {first.name} {first.quantization}:"
                " a trajectory may go on on either"
            )
        if (entry.lora_rank is None) != (first.lora_rank is None):
            raise ValueError(
                f"of the engines {first.name} and {entry.name} one has a lora_rank: an adapter is served by all"
            )
        if entry.max_loras != first.max_loras:
            raise ValueError(
                f"engine {entry.name} has max_loras {entry.max_loras} and {first.name} {first.max_loras}: all serve"
                " the same adapters"
            )
        if (entry.kind == "simulated") != (first.kind == "simulated"):
            raise ValueError(f"of the engines {first.name} and {entry.name} one is simulated: it has no model")


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(Protocol):
    """The fields of an engine's configuration that decide how large a token's KV is."""

    @property
    def dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def tensor_parallel_size(self) -> int: ...


def kv_bytes_per_token(layout: KvLayout, document: Mapping[str, Any]) -> int:
    """Return the bytes of one token's KV in one worker's cache, for a model whose layers all keep it.

    `document` is the model's config.json. Raises CheckpointUnreadable if it does not give the sizes.
    """
    try:
        sizes = document.get("text_config", document)
        num_heads = int(sizes["num_attention_heads"])
        num_kv_heads = int(sizes.get("num_key_value_heads", num_heads))
        head_dim = int(sizes.get("head_dim") or sizes["hidden_size"] // num_heads)
        num_layers = int(sizes["num_hidden_layers"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnreadable("config.json does not say how large a token's KV is", param="model") from error
    num_own = max(1, num_kv_heads // layout.tensor_parallel_size)
    value_bytes = 1 if layout.kv_cache_dtype == "fp8" else DTYPE_BYTES[layout.dtype]
    return 2 * num_layers * num_own * head_dim * value_bytes
