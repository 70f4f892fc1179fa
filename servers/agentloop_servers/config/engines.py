"""The engine configuration of a service: one kind of engine for all replicas, or a list of engine pools.

An engine pool (`EngineEntry`) has a kind of engine, settings, a number of replicas and an environment. vLLM and
SGLang cannot be installed in one environment, so a pool can name another Python or a Ray runtime environment. All
pools serve the same model with the same logprobs mode, so that a trajectory can continue on any replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from agentloop import parts
from agentloop.errors import CheckpointUnreadable, InvalidRequest
from agentloop.values.aux_rows import ZSTD
from agentloop.values.capabilities import Feature


class _EngineModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Staging = Literal["auto", "device", "host", "none"]
"""Staging device of new weights until their commit; auto: device memory if they fit, else host memory, else
none."""

Quantization = Literal["fp8", "fp8_per_channel", "fp8_per_block"]
"""Granularity of the FP8 scales: one per layer, per output channel, or per block of 128 x 128."""

OWN_KINDS = ("vllm", "simulated")
"""The built-in kinds of engines; packages can register others."""

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The adapter ranks that vLLM has kernels for."""


_FOREIGN_KV = ("Nixl", "MoRIIO", "Mooncake")
"""Beginnings of the names of vLLM's KV connectors that read KV which another engine computed."""


def _connectors(config: Any) -> list[str]:
    """Return the names of the KV connectors in vLLM's `kv_transfer_config`, with those of a MultiConnector."""
    if not isinstance(config, Mapping):
        return []
    inner = (config.get("kv_connector_extra_config") or {}).get("connectors") or []
    return [str(config.get("kv_connector", "")), *(name for one in inner for name in _connectors(one))]


class SpeculativeSettings(_EngineModel):
    """Speculative decoding: the model verifies several n-gram draft tokens per step. See docs/guides/engines.md."""

    num_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Draft tokens per request and step."""
    max_running: Annotated[int, Field(ge=1)] = 32
    """Maximum number of running requests for which a step uses drafts."""


class EngineConfig(_EngineModel):
    """One engine replica: a tensor-parallel group, or a gang of `data_parallel_size` such groups."""

    kind: str = "vllm"
    """`vllm`, `sglang` or `simulated`."""
    device: Literal["cpu", "cuda"] = "cuda"
    """`cuda` or `cpu`."""
    dtype: str = "bfloat16"
    """Data type of the weights and the KV cache."""
    quantization: Quantization | None = None
    """`fp8`, `fp8_per_channel` or `fp8_per_block`: quantize weights at load; vLLM only (engines.md)."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache; `auto`: the type of the weights."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: start with random weights, and accept no traffic until the first push."""
    max_context_tokens: int | None = None
    """Maximum context length in tokens. Default: from the model's config.json."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of running requests per engine. Default: 512 on a GPU, otherwise 256."""
    max_step_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum decode and prefill tokens per step; vLLM only. Default: twice `max_running`, at least 2,048."""
    max_graph_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of a step that runs as a CUDA graph; vLLM only. Default: four times `max_running`."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests in the engine; the `priority` of calls requires `priority`."""
    block_size: Annotated[int, Field(ge=1)] = 32
    """Tokens per KV block (SGLang: page); vLLM on CPU requires a multiple of 32."""
    kv_cache_mib: Annotated[int, Field(ge=1)] | None = None
    """Size of the KV cache in MiB; required on CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory that the engine uses."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Number of GPUs over which each layer is split."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """Number of nodes over which the GPUs of a replica are spread evenly; vLLM only. See docs/guides/cluster.md."""
    accelerator_type: str | None = None
    """GPU type of the nodes, by Ray's name, for example `H100`. Default: any."""
    labels: dict[str, str] = {}
    """Required Ray node labels, as set by `ray start --labels zone=a`. See docs/guides/cluster.md."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Number of tensor-parallel groups in one gang; for a dense model, use more replicas instead."""
    expert_parallel: bool = False
    """Distribute experts over the complete gang; mixture-of-experts models only."""
    weight_staging: Staging | None = None
    """Where new weights are staged until their commit. Default: `auto`, in hybrid mode `none`."""
    lora_rank: LoraRank | None = None
    """Maximum rank of an adapter. Default: adapters are not supported."""
    max_loras: Annotated[int, Field(ge=1)] | None = None
    """Number of adapters served by name, in addition to the base. Default: one adapter, which is the policy."""
    stage_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Timeout of a push, from the connection to the last byte."""
    commit_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Timeout of a commit."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Timeout of an engine start, including loading and compilation; the engine is then started again."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Maximum time without a step while requests are running; the engine is then restarted."""
    report_interval_s: Annotated[float, Field(gt=0, le=5)] = 2.0
    """Seconds between progress reports of running turns; a crash loses the tokens since the last report."""
    report_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens after which a running turn is reported before `report_interval_s` has passed."""
    speculative: SpeculativeSettings | None = None
    """Speculative decoding while few requests run; vLLM only. Default: off."""
    enforce_eager: bool = False
    """Disable CUDA graphs and compilation; always disabled on CPU."""
    batch_invariant: bool = False
    """Compute the same logits for a context in every batch, at some cost in speed; GPUs only."""
    logprobs_mode: Literal["sampled", "raw", "both"] = "sampled"
    """The distribution of logprobs: `sampled`, `raw` or `both` (distribution.md)."""
    max_logprobs: Annotated[int, Field(ge=1, le=256)] | Literal[-1] = 20
    """Maximum alternatives per token, in scores and samples; -1: the whole vocabulary. See logprobs.md."""
    routed_experts: bool = False
    """Record the experts that routed each token, for replay in the trainer; mixture-of-experts models only."""
    sampling_mask_top_k: Annotated[int, Field(ge=1)] | None = None
    """Record the ids that each token was sampled from; `top_k` of requests without one. See distribution.md."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of an engine process. Default: 1 on CPU; on CUDA many during loading, then 1."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that Ray reserves for a replica on each of its hosts."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a GPU that Ray reserves; the rest stays available to other users of the Ray cluster."""
    allow_untested: bool = False
    """Start engine versions that are newer than the tested ones, with a warning, instead of refusing them."""
    arguments: dict[str, JsonValue] = {}
    """Any other arguments of the engine, by vLLM's or SGLang's own names. See docs/guides/engines.md."""
    settings: dict[str, JsonValue] = {}
    """Additional settings of a `kind` that a package registers; see the package's page."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        is_cpu_vllm = self.kind == "vllm" and self.device == "cpu"
        if is_cpu_vllm and self.kv_cache_mib is None:
            raise ValueError("kv_cache_mib is required on device cpu: vLLM would reserve most of the memory")
        if is_cpu_vllm and self.block_size % 32:
            raise ValueError(f"block_size on device cpu must be a multiple of 32, not {self.block_size}")
        if self.quantization is not None:
            self._check_quantization()
        if self.batch_invariant and not self.on_gpu:
            raise ValueError(
                "batch_invariant is supported by vLLM and SGLang on GPUs only, not by"
                f" {self.kind} on device {self.device}"
            )
        if self.expert_parallel and self.num_workers == 1:
            raise ValueError("expert_parallel requires a tensor_parallel_size or data_parallel_size above 1")
        if self.gpu_share < 1 and self.num_workers > 1:
            raise ValueError(
                f"gpu_share {self.gpu_share:g} requires a replica with one GPU, not {self.num_workers}: Ray can"
                " reserve a fraction of one GPU only"
            )
        if self.kind != "vllm" and (self.max_step_tokens or self.max_graph_tokens):
            raise ValueError(
                "max_step_tokens and max_graph_tokens are supported by vLLM only: SGLang runs decode and prefill in"
                " separate steps"
            )
        if self.kind == "simulated" and self.arguments:
            raise ValueError(f"arguments: a simulated engine has none: remove {list(self.arguments)}")
        if self.kind in OWN_KINDS and self.settings:
            raise ValueError(
                f"settings: the kind {self.kind} has no additional settings: remove {list(self.settings)}"
            )
        if self.kind not in OWN_KINDS:
            self._check_registered()
        if self.max_loras is not None:
            self._check_max_loras()
        if self.hosts > 1:
            self._check_hosts()
        if self.speculative is not None:
            self._check_speculative(self.speculative)
        if self.routed_experts or self.sampling_mask_top_k is not None:
            self._check_aux()
        return self

    def registered(self) -> tuple[Any, dict[str, BaseModel]]:
        """Return the registered engine kind, and its validated settings as keyword arguments. Raises
        InvalidRequest."""
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
                f"quantization is supported by vLLM only, not by {self.kind}: SGLang quantizes only at its first"
                " load, so it could not receive weight updates"
            )
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"quantization requires dtype bfloat16 or float16, not {self.dtype}")
        if self.device == "cpu" and self.quantization != "fp8_per_channel":
            raise ValueError(f"quantization {self.quantization} has no kernel on device cpu: use fp8_per_channel")

    def _check_max_loras(self) -> None:
        if self.lora_rank is None:
            raise ValueError("max_loras requires lora_rank, the maximum rank of the adapters")
        if self.load_format == "dummy":
            raise ValueError("max_loras requires load_format auto: base weights are never pushed to such engines")

    def _check_speculative(self, speculative: SpeculativeSettings) -> None:
        if self.kind != "vllm":
            raise ValueError(
                "speculative is supported by vLLM only: SGLang verifies drafts outside of the sampler that returns"
                " exact logprobs"
            )
        if self.data_parallel_size > 1:
            raise ValueError(
                f"speculative requires data_parallel_size 1, not {self.data_parallel_size}: vLLM ignores"
                " speculative.max_running with data parallelism"
            )

    def _check_aux(self) -> None:
        """Refuse what engines with `routed_experts` or `sampling_mask_top_k` refuse, or return wrong rows for."""
        key = "routed_experts" if self.routed_experts else "sampling_mask_top_k"
        if find_spec(ZSTD) is None:
            raise ValueError(f"{key} needs the package {ZSTD}, which packs the recorded rows: pip install {ZSTD}")
        if self.kind != "simulated" and (self.kind != "vllm" or not self.on_gpu):
            raise ValueError(f"{key} is supported by vLLM on GPUs only, not by {self.kind} on {self.device}")
        if self.logprobs_mode != "sampled":
            raise ValueError(
                f"{key} requires logprobs_mode sampled, not {self.logprobs_mode}: vLLM's Model Runner V2"
            )
        if self.speculative is not None:
            raise ValueError(
                f"{key} cannot be combined with speculative: the rows of rejected drafts are not tested"
            )
        if self.routed_experts:
            self._check_routes()

    def _check_routes(self) -> None:
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if self.arguments.get(name, 1) != 1:
                raise ValueError(
                    f"routed_experts cannot be combined with arguments.{name} {self.arguments[name]}: each rank"
                    " would have the experts of a part only"
                )
        for name in _connectors(self.arguments.get("kv_transfer_config")):
            if name.startswith(_FOREIGN_KV):
                raise ValueError(
                    f"routed_experts cannot be combined with arguments.kv_transfer_config {name}: the experts of"
                    " prompts that another engine read are not transferred"
                )

    def _check_hosts(self) -> None:
        if self.kind != "vllm":
            raise ValueError(f"hosts above 1 is supported by vLLM only: a {self.kind} engine runs on one host")
        if self.data_parallel_size > 1 or self.expert_parallel:
            raise ValueError(
                "hosts above 1 does not support data_parallel_size above 1 or expert_parallel: neither is tested on"
                " several hosts"
            )
        if self.lora_rank is not None:
            raise ValueError("hosts above 1 does not support lora_rank: adapter files are read on one host only")
        if self.tensor_parallel_size % self.hosts:
            raise ValueError(
                f"tensor_parallel_size must be a multiple of hosts: {self.tensor_parallel_size} ranks cannot be"
                f" spread evenly over {self.hosts} hosts"
            )
        if not self.on_gpu and self.num_cpus == 0:
            raise ValueError(
                "hosts above 1 on device cpu requires num_cpus above 0: Ray needs a resource to spread over nodes"
            )

    @property
    def num_workers(self) -> int:
        """The number of processes that hold weights; on CUDA also the number of GPUs of a replica."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def node_labels(self) -> dict[str, str]:
        """The labels that each node of a replica must have."""
        return self.labels | ({"ray.io/accelerator-type": self.accelerator_type} if self.accelerator_type else {})

    @property
    def on_gpu(self) -> bool:
        """True if the engine runs on GPUs."""
        return self.kind != "simulated" and self.device == "cuda"

    @property
    def num_seats(self) -> int:
        """The maximum number of running requests per engine."""
        return self.max_running or (512 if self.on_gpu else 256)

    @property
    def step_tokens(self) -> int:
        """The maximum number of tokens per step: one decode token per running request, and at least as much
        prefill."""
        return self.max_step_tokens or max(2048, 2 * self.num_seats)

    @property
    def graph_tokens(self) -> int:
        """The maximum number of tokens of a step that runs as a CUDA graph: decode tokens and prefill of new
        turns."""
        # In steady state nearly every step has some prefill. With 512 running requests, graphs of 512, 1,024 and
        # 2,048 tokens gave 12,000, 15,200 and 17,100 tokens/s (`tests/benchmarks/RESULTS.md`).
        return self.max_graph_tokens or min(self.step_tokens, 4 * self.num_seats)


class EngineEnvironment(_EngineModel):
    """The environment of an engine pool's processes, if it differs from the service's.

    Ray starts the replicas with `py_executable` and applies `runtime_env` (for example `env_vars`). The Python must
    have the service's minor version, and the same versions of Ray and agentloop. See docs/guides/engines.md.
    """

    py_executable: str | None = None
    """Command that starts the other environment's Python."""
    runtime_env: dict[str, JsonValue] = {}
    """A Ray runtime environment."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.py_executable is None and not self.runtime_env:
            raise ValueError("environment is empty: set py_executable, runtime_env, or both")
        if self.py_executable is not None and not self.py_executable.strip():
            raise ValueError("py_executable is empty: give the command that starts Python, or remove the key")
        if "py_executable" in self.runtime_env:
            raise ValueError("py_executable is a key of environment, next to runtime_env, not inside it")
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            raise ValueError("env_vars of runtime_env must map names to strings")
        return self

    @property
    def env_vars(self) -> dict[str, str]:
        """The environment variables of the pool's processes."""
        variables = self.runtime_env.get("env_vars", {})
        return {name: str(value) for name, value in variables.items()} if isinstance(variables, dict) else {}


class EngineEntry(EngineConfig):
    """An engine pool: replicas of one kind with a common name."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")] = ""
    """Prefix of the pool's replica ids. Default: `kind`."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Number of replicas; with `max_replicas` the minimum."""
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of replicas: their number follows the load. Default: the number is fixed."""
    environment: EngineEnvironment | None = None
    """Environment of the pool's processes. Default: the service's environment."""
    withheld: list[Feature] = []
    """Features of the engine that the service must not use."""

    @model_validator(mode="before")
    @classmethod
    def _check_model(cls, given: object) -> object:
        if isinstance(given, dict) and ("model" in given or "tokenizer" in given):
            raise ValueError(
                "an engine pool has no `model` or `tokenizer`: all engines serve the service's `model`"
            )
        return given

    @model_validator(mode="after")
    def _name_it(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is less than replicas {self.replicas}")
        if not self.name:
            object.__setattr__(self, "name", self.kind)  # the model is frozen, and the default is known only now
        return self


def check_entries(entries: Sequence[EngineEntry]) -> None:
    """Raise ValueError, naming the engine pool, if the pools cannot serve one model together."""
    first = entries[0]
    for number, entry in enumerate(entries):
        if any(other.name == entry.name for other in entries[:number]):
            raise ValueError(f"two engines are named {entry.name}: give each a unique `name`")
        if entry.logprobs_mode != first.logprobs_mode:
            raise ValueError(
                f"engine {entry.name} has logprobs_mode {entry.logprobs_mode} and {first.name}"
                f" {first.logprobs_mode}: it must be equal, because a trajectory can continue on either"
            )
        for key in ("max_logprobs", "routed_experts", "sampling_mask_top_k"):
            if getattr(entry, key) != getattr(first, key):
                raise ValueError(
                    f"engine {entry.name} has {key} {getattr(entry, key)} and {first.name} {getattr(first, key)}:"
                    " it must be equal, because a trajectory can continue on either"
                )
        if entry.quantization != first.quantization:
            raise ValueError(
                f"engine {entry.name} has quantization {entry.quantization} and {first.name} {first.quantization}:"
                " it must be equal, because a trajectory can continue on either"
            )
        if (entry.lora_rank is None) != (first.lora_rank is None):
            raise ValueError(
                f"only one of the engines {first.name} and {entry.name} has a lora_rank: all engines must serve an"
                " adapter"
            )
        if entry.max_loras != first.max_loras:
            raise ValueError(
                f"engine {entry.name} has max_loras {entry.max_loras} and {first.name} {first.max_loras}: all"
                " engines must serve the same adapters"
            )
        if (entry.kind == "simulated") != (first.kind == "simulated"):
            raise ValueError(
                f"only one of the engines {first.name} and {entry.name} is simulated: a simulated engine does not"
                " run the model"
            )


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(Protocol):
    """The fields of an engine's configuration that determine the KV size of a token."""

    @property
    def dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def tensor_parallel_size(self) -> int: ...


def kv_bytes_per_token(layout: KvLayout, document: Mapping[str, Any]) -> int:
    """Return the KV bytes of one token in one worker, for a model with full attention in all layers.

    `document` is the model's config.json. Raises CheckpointUnreadable if it lacks the sizes.
    """
    try:
        sizes = document.get("text_config", document)
        num_heads = int(sizes["num_attention_heads"])
        num_kv_heads = int(sizes.get("num_key_value_heads", num_heads))
        head_dim = int(sizes.get("head_dim") or sizes["hidden_size"] // num_heads)
        num_layers = int(sizes["num_hidden_layers"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnreadable(
            f"the KV size of a token cannot be computed from config.json: {error!r}", param="model"
        ) from error
    num_own = max(1, num_kv_heads // layout.tensor_parallel_size)
    value_bytes = 1 if layout.kv_cache_dtype == "fp8" else DTYPE_BYTES[layout.dtype]
    return 2 * num_layers * num_own * head_dim * value_bytes
