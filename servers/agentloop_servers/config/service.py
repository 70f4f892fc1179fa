"""ServiceConfig, the configuration of a service in YAML, and the files of a run directory.

`serve deploy FILE` and `agentloop serve` read the same file: a Ray Serve config whose application arguments are
this model. Unknown and removed keys are rejected.
"""

from __future__ import annotations

import ctypes
import datetime
import difflib
import hashlib
import ipaddress
import json
import os
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from agentloop import parts
from agentloop.errors import CheckpointUnreadable, InvalidRequest
from agentloop.plugins import AllowedImports
from agentloop.types import KVPolicy
from agentloop.values.vocabulary import tokenizer_json
from agentloop_servers.config.engines import (
    DTYPE_BYTES,
    EngineConfig,
    EngineEntry,
    Staging,
    check_entries,
    kv_bytes_per_token,
)

CHECKOUT = Path(__file__).resolve().parents[3]
"""The folder in which relative paths are resolved if they do not exist in the working directory."""

IMPORT_PATH = "agentloop_servers.app:build"
"""The `import_path` of the application in a Serve config."""

_getenv = ctypes.CDLL(None).getenv
_getenv.restype = ctypes.c_void_p

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the names that the architectures use


_ONLY_NGRAMS = "delete the key (drafts are always n-grams: a draft model would not follow weight updates)"
_OF_SGLANG = "with `kind: sglang` use `settings.attention_backend`"
_REMOVED: Mapping[str, str] = {
    "balancer.order": "delete the key (groups are dispatched by `age`)",
    "balancer.retention": "delete the key (a long tool call releases its capacity while others wait)",
    "balancer.step_times": "delete the key (work is distributed by the KV capacity of each replica)",
    "engine.attention_backend": _OF_SGLANG,
    "engine.speculative.method": _ONLY_NGRAMS,
    "engine.speculative.model": _ONLY_NGRAMS,
    "engine.tells_cache": "delete the key (engines publish no KV events)",
    "engines.attention_backend": _OF_SGLANG,
    "engines.speculative.method": _ONLY_NGRAMS,
    "engines.speculative.model": _ONLY_NGRAMS,
    "engines.step_times": "delete the key (work is distributed by the KV capacity of each replica)",
    "engines.tells_cache": "delete the key (engines publish no KV events)",
    "log": "use `logrotate` or a similar program to limit the size of `service.log`",
    "workers.max_standstill_s": "use `workers.max_unavailable_s`",
    "updates.consistency": (
        "delete the key (replicas swap weights one by one, or all at once if `engine.weight_staging` is none)"
    ),
}
"""The instructions in the error for each removed key."""


class _Strict(BaseModel):
    # Validation errors must not include the input: `store` may contain a password.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)


class Mode(StrEnum):
    """The owner of the accelerators, and the source of weights."""

    STANDALONE = "standalone"  # engines have their own accelerators; a trainer elsewhere pushes weights
    HYBRID = "hybrid"  # shared with a trainer: engines sleep while it trains, and receive its weights after waking
    COLOCATED = "colocated"  # shared, constant weights: judge and reward models sleep and wake
    DEBUG = "debug"  # weights from a checkpoint, no trainer; an operator can load another directory manually


class TemplateSettings(_Strict):
    """The chat template and its variables."""

    file: str | None = None
    """A Jinja file that replaces the model folder's template."""
    kwargs: dict[str, JsonValue] = {}
    """Template variables, for example `enable_thinking`; a request's own variables take precedence."""
    date: datetime.date | None = None
    """The current date in the template. Default: always 2025-01-01."""


class ChatSettings(_Strict):
    """Rendering and parsing of messages, in workers and the endpoint. See docs/guides/models.md."""

    renderer: str = "template"
    """`template`, `renderers:FAMILY` of the package renderers, or an import path."""
    parser: str = "auto"
    """`auto`, a built-in parser, `none`, `renderers:FAMILY`, or an import path."""
    lenient: bool = False
    """Also parse malformed calls that vLLM and SGLang accept: calls without arguments, lists of calls. Records say
    so."""
    template: TemplateSettings = TemplateSettings()
    """The chat template."""
    thinking: Literal["keep", "template"] = "keep"
    """Reasoning of earlier turns when a user message follows: `keep` it, or let the `template` decide."""
    stop_tokens: list[str] = []
    """Tokens that end a turn, instead of the tokens that the model folder declares."""
    on_unstable_template: Literal["raise", "fork"] = "fork"
    """If a turn cannot extend the previous tokens: refuse to start (`raise`), or start a new branch (`fork`)."""


ModuleName = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class WorkerSettings(_Strict):
    """The agent-loop workers."""

    replicas: Annotated[int, Field(ge=1)] | None = None
    """Number of worker processes. Default: 1, or on GPUs computed from the number of engines and CPUs."""
    capacity: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of running trajectories per worker. Default: 256, or on GPUs twice the engines'
    `max_running`."""
    turn_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Timeout of one turn."""
    max_unavailable_s: Annotated[float, Field(gt=0)] = 4 * 3600.0
    """Maximum total time that a trajectory waits without an available replica, or frozen in a pause."""
    isolation: str = "none"
    """`process`: run each trajectory in its own process, so that user code can harm only its own trajectory.
    Packages can register other values."""
    max_processes: Annotated[int, Field(ge=1)] = 32
    """With isolation: maximum number of running trajectories per worker."""
    tools: dict[str, str] = {}
    """Tools in addition to the default ones: maps a name to a registered name (`shell`) or an import path."""
    allowed_imports: list[ModuleName] | None = None
    """Modules that tasks may import. Default: none if users have keys, otherwise any."""
    silent_after_s: Annotated[float, Field(ge=5)] = 15.0
    """Time without a heartbeat after which a worker is lost."""
    cut_after_s: Annotated[float, Field(ge=2)] = 3.0
    """Time after which a worker with a broken connection is lost; at most half of `silent_after_s`."""

    @model_validator(mode="after")
    def _check_silence(self) -> Self:
        if self.cut_after_s > self.silent_after_s / 2:
            raise ValueError(
                f"cut_after_s must be at most half of silent_after_s {self.silent_after_s:g}, not"
                f" {self.cut_after_s:g}"
            )
        return self

    def imports(self, *, has_user_keys: bool) -> AllowedImports:
        """Return the modules that tasks may import: `allowed_imports`, or by default none if users have keys."""
        if self.allowed_imports is None:
            return AllowedImports(() if has_user_keys else None)
        return AllowedImports(tuple(self.allowed_imports))

    @property
    def num_at_once(self) -> int:
        """The maximum number of running trajectories per worker; with isolation each has its own process."""
        capacity = self.capacity or 256
        return capacity if self.isolation == "none" else min(capacity, self.max_processes)


class KeysConfig(_Strict):
    """The names of the environment variables with bearer keys. Keys are optional on loopback, otherwise
    required."""

    user_key_env: str = "AGENTLOOP_KEY"
    """Environment variable with the users' key."""
    admin_key_env: str = "AGENTLOOP_ADMIN_KEY"
    """Environment variable with the admin key."""
    metrics_key_env: str = "AGENTLOOP_METRICS_KEY"
    """Environment variable with a key for `GET /metrics` only; the admin key is also accepted there."""

    def hide(self) -> dict[str, str]:
        """Remove the keys from this process's environment, so that child processes do not inherit them. Return
        them."""
        names = (self.user_key_env, self.admin_key_env, self.metrics_key_env)
        keys = {name: os.environ[name] for name in names if name in os.environ}
        for name in keys:
            # `del` does not clear the initial environment block, which `/proc/PID/environ` shows: overwrite it.
            if (address := _getenv(name.encode())) is not None:
                ctypes.memset(address, 0, len(ctypes.string_at(address)))
            del os.environ[name]
        return keys


class TlsSettings(_Strict):
    """The certificate chain and private key of the public port, as PEM files."""

    cert: str
    """Path of the certificate chain, a PEM file."""
    key: str
    """Path of the private key, a PEM file."""

    def check(self) -> None:
        """Raise InvalidRequest if a server cannot load the files."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes SSLError
            raise InvalidRequest(
                f"tls: cannot load certificate {self.cert} with key {self.key}: {error}", param="tls"
            ) from error


class ClusterTlsSettings(TlsSettings):
    """The certificates of private connections, as PEM files at the same paths on every node."""

    cert: str
    """Path of the node's certificate chain, which must name the node's address."""
    ca: str
    """Path of the certificate authority that signed the certificates of all nodes."""


class EndpointSettings(_Strict):
    """The chat endpoint of each ingress process."""

    model_name: str | None = None
    """The model's name for clients. Default: the name of the model's folder."""
    max_sessions: Annotated[int, Field(ge=1)] = 20_000
    """Maximum number of open sessions per user and ingress process; more are rejected with 429."""
    max_resident_mib: Annotated[int, Field(ge=1)] = 512
    """Maximum memory of sessions; when exceeded, idle sessions are moved to disk."""
    session_ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time after which an unused session expires."""
    max_open_calls: Annotated[int, Field(ge=1)] = 4096
    """Maximum number of running calls per ingress process; more are rejected with 429."""
    score_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum share of the engines' time for scores while other calls run; below 1, one score runs at a time."""


class TracingSettings(_Strict):
    """Traces of trajectories and weight updates, sent to OpenTelemetry. See docs/guides/observability.md."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s?#/]+(/[^\s?#]*)?$")]
    """URL of the OTLP/HTTP receiver, without `/v1/traces`."""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of trajectories whose traces are sent."""
    keep: list[Literal["failed", "slowest"]] = ["failed", "slowest"]
    """Trajectories that are always sent: `failed` ones, and those slower than 99 % of their process'
    (`slowest`)."""
    content: bool = False
    """Include messages and errors."""
    engine: bool = False
    """Also send the engines' own spans of the sampled trajectories, as children of the turns' spans."""


class MetricsSettings(_Strict):
    """Additional metrics of `GET /metrics`."""

    engine: bool = False
    """Include vLLM's own `vllm:...` metrics, with the label `replica`."""


class UpdateSettings(_Strict):
    """Weight updates."""

    straggler_grace_s: Annotated[float, Field(gt=0)] = 10.0
    """Time to wait for a late replica after the other replicas have completed a step."""
    exact_grace_s: Annotated[float, Field(ge=0)] = 5.0
    """Time to wait for running calls that accept only the old version. See docs/guides/contracts.md."""
    timeout_s: Annotated[float, Field(gt=0)] = 2400.0
    """Timeout of a complete update; must exceed the sum of its steps."""


class WeightStoreSettings(_Strict):
    """A store of published weight versions that the service follows. See docs/guides/published-versions.md."""

    store: Annotated[str, Field(pattern=r"^(/|[a-z][a-z0-9+.:-]*://).")]
    """A directory or an fsspec URL, for example `s3://BUCKET/PREFIX`; credentials come from the environment."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    """The run whose versions are served: a folder of the store."""
    source: str = "store"
    """Reader of the store: `store`, or a name that a package registers for another format."""
    settings: dict[str, JsonValue] = {}
    """Settings of a `source` that a package registers."""
    poll_s: Annotated[float, Field(ge=0.1)] = 5.0
    """Interval between two checks for a new version."""
    follows: bool = True
    """Serve each version that the run's pointer names; false: only versions that a hot load names. See
    docs/guides/hot-load.md."""
    cache: str | None = None
    """Folder in which each host keeps two versions. Default: `weights` in the run's directory."""


class BalancerSettings(_Strict):
    """Admission and placement of work; all settings are optional. See docs/concepts/balancing.md."""

    limits_kv: bool = True
    """Queue samples while the running ones may need all KV; false: start all samples immediately."""
    min_kv_share: Annotated[float, Field(gt=0, le=10)] | None = None
    """Minimum of the adaptive limit on used and reserved KV, as a fraction of a replica's KV. Default: 0.3."""
    max_kv_share: Annotated[float, Field(gt=0, le=10)] | None = None
    """Maximum of that limit. Default: 4."""
    call_overcommit: Annotated[float, Field(ge=0, le=4)] = 0.25
    """Fraction of the limit that sessions and direct calls may use in addition."""
    lease_ttl_s: Annotated[float, Field(ge=10)] = 60.0
    """Time without a report from a process after which its leases expire."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        least, most = self.min_kv_share, self.max_kv_share
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_kv_share {least:g} must be at most max_kv_share {most:g}")
        return self


class RetentionSettings(_Strict):
    """Automatic deletion of records; by default none are deleted. See docs/guides/storage.md."""

    delete_acknowledged: bool = False
    """Delete records that a trainer has acknowledged."""
    max_age_s: Annotated[float, Field(gt=0)] | None = None
    """Age at which records of finished rollouts are deleted, even if they were not read."""
    max_mib: Annotated[int, Field(ge=1)] | None = None
    """Maximum size of the store; when exceeded, the oldest records of finished rollouts are deleted."""

    @property
    def bounds(self) -> tuple[bool, float | None, int | None]:
        """The settings as fields of a RetentionPolicy."""
        return self.delete_acknowledged, self.max_age_s, None if self.max_mib is None else self.max_mib << 20


class ClusterSettings(_Strict):
    """The nodes of a Ray cluster. See docs/guides/cluster.md."""

    network: str | None = None
    """Network of the nodes' private ports, for example `10.0.0.0/8`. Default: each node's address in Ray."""
    tls: Literal["run"] | ClusterTlsSettings | None = None
    """TLS between nodes: `run` creates a certificate authority for each run; or PEM files. Default: no TLS."""
    min_nodes: Annotated[int, Field(ge=1)] = 1
    """Number of nodes to wait for before the service is placed; a service placed on one node stays on it."""

    @field_validator("network")
    @classmethod
    def _check_network(cls, given: str | None) -> str | None:
        return None if given is None else str(ipaddress.ip_network(given))


class ModelConfig(_Strict):
    """A model and its engines: the policy of a service, or one of its additional `models`."""

    mode: Mode = Mode.STANDALONE
    """The owner of the accelerators and the source of weights: `standalone`, `hybrid`, `colocated` or `debug`."""
    model: str
    """A folder, a name of `agentloop models list`, a Hugging Face id (`org/name`, `org/name@revision`), or a .gguf
    file."""
    model_version: Annotated[int, Field(ge=0)] = 0
    """Weight version of the model's folder."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Number of engine replicas, if `engines` is not set."""
    engine: EngineConfig = EngineConfig()
    """Engine of all replicas, if `engines` is not set."""
    engines: Annotated[list[EngineEntry], Field(min_length=1)] | None = None
    """Engine pools, instead of `engine` and `replicas`."""
    chat: ChatSettings = ChatSettings()
    """The model's chat format."""
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE
    """Effect of an update on KV of older versions: `keep`, `fresh` or `recompute`."""
    updates: UpdateSettings = UpdateSettings()
    """Weight updates."""
    weights: WeightStoreSettings | None = None
    """A store of published weight versions to follow; requires the extra `store`."""
    balancer: BalancerSettings = BalancerSettings()
    """Admission and placement of work."""
    weight_roots: list[str] = []
    """Directories from which weights may be loaded, in addition to the parent of the model's folder."""
    max_pause_s: Annotated[float, Field(gt=0)] = 600.0
    """Time that new requests wait for the end of a pause; then they are rejected with 503."""

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.engines is not None and (self.engine != EngineConfig() or self.replicas != 1):
            raise ValueError("`engines` replaces `engine` and `replicas`: remove `engine` and `replicas`")
        check_entries(self.entries)
        for entry in self.entries:
            at = "" if self.engines is None else f"engine {entry.name}: "
            if self.can_sleep and entry.kind != "simulated" and entry.device == "cpu":
                raise ValueError(
                    f"{at}mode {self.mode} requires device cuda: engines cannot release their memory on CPU"
                )
            if self.mode in (Mode.COLOCATED, Mode.DEBUG) and entry.load_format == "dummy":
                raise ValueError(
                    f"{at}mode {self.mode} requires load_format auto: weights are not pushed in this mode"
                )
            if self.weights is not None and (not self.allows_push or entry.lora_rank is not None):
                raise ValueError(
                    f"{at}`weights` requires mode standalone or hybrid (not {self.mode}) and an engine without"
                    " lora_rank"
                )
            if self.weights is not None and self.weights.cache is None and entry.hosts > 1:
                raise ValueError(
                    f"{at}an engine on several hosts requires `weights.cache`: set it to a folder that all hosts"
                    " share"
                )
        return self

    @property
    def entries(self) -> tuple[EngineEntry, ...]:
        """The engine pools: `engines`, or one pool made from `engine` and `replicas`."""
        if self.engines is not None:
            return tuple(self.engines)
        return (EngineEntry.model_validate({**self.engine.model_dump(), "replicas": self.replicas}),)

    @property
    def allows_push(self) -> bool:
        """True if a trainer may push tensors."""
        return self.mode in (Mode.STANDALONE, Mode.HYBRID)

    @property
    def can_sleep(self) -> bool:
        """True if the engines can release their memory by sleeping."""
        return self.mode in (Mode.HYBRID, Mode.COLOCATED)


class NamedModel(ModelConfig):
    """An additional model, such as a judge, a teacher or a user simulator. See docs/guides/models.md."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
    """The model name in calls; its own routes are under `/models/NAME`."""
    mode: Mode = Mode.DEBUG
    """Source of the model's weights, as for the policy; `debug` and `colocated` keep the folder's weights."""
    keys: KeysConfig | None = None
    """Environment variables of the model's own keys. Default: the service's keys."""


class TurnSettings(_Strict):
    """Models that share accelerators: one model is awake at a time, and a call to another model wakes it."""

    min_stay_s: Annotated[float, Field(ge=0)] = 10.0
    """Minimum time that a model with work stays awake."""
    max_wait_s: Annotated[float, Field(gt=0)] = 60.0
    """Maximum time that calls wait for a sleeping model while the awake model has work."""


class ServiceConfig(ModelConfig):
    """A complete service. With `load_format: dummy`, replicas accept no traffic until weights are pushed."""

    models: list[NamedModel] = []
    """Additional models, each with its own engines, weights and records."""
    turns: TurnSettings | None = None
    """Time sharing of the accelerators by all models. Default: all models are awake."""
    workers: WorkerSettings = WorkerSettings()
    """The agent-loop workers."""
    ingress_replicas: Annotated[int, Field(ge=1)] | None = None
    """Number of ingress processes, which partition the sessions. Default: the number at the run's first start."""
    endpoint: EndpointSettings = EndpointSettings()
    """The chat endpoint."""
    cluster: ClusterSettings | None = None
    """The nodes of a Ray cluster; ignored on a single node."""
    host: str = "127.0.0.1"
    """Address of the public port; keys are required unless it is a loopback address."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The public port; 0: a free port, with a separate Ray instance."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s?#/]+(/[^\s?#]*)?$")] | None = None
    """URL of the service for clients, for example the URL of a proxy. Default: from `host` and `port`."""
    tls: TlsSettings | None = None
    """Certificate of the public port."""
    image_roots: list[str] = []
    """Folders from which tasks may use image files. Default: none, tasks can only use data URLs."""
    keys: KeysConfig = KeysConfig()
    """Environment variables of the keys."""
    routes: dict[str, dict[str, JsonValue]] = {}
    """Settings of HTTP routes that packages register, by name. Registered routes are served even without
    settings."""
    sinks: dict[str, dict[str, JsonValue]] = {}
    """Additional receivers of finished trajectories and updates: settings of each sink that a package registers."""
    tracing: TracingSettings | None = None
    """Spans for OpenTelemetry; requires the extra `otel`."""
    metrics: MetricsSettings = MetricsSettings()
    """The metrics of `GET /metrics`."""
    run_dir: str | None = None
    """The run's directory. Default: a new directory under `runs`."""
    keep_tokenizer: bool = False
    """Copy the tokenizer to the run's directory, so that the viewer works after the model's folder is removed."""
    store: Annotated[SecretStr | None, Field(exclude=True)] = None
    """Database for records, sessions and turn journals, `postgresql://USER@HOST:PORT/DATABASE`. Default: SQLite and
    files in the run's directory."""
    max_queued_trajectories: Annotated[int, Field(ge=1)] = 100_000
    """Maximum number of queued trajectories; submits that exceed it are rejected with 429."""
    max_queued_mib: Annotated[int, Field(ge=1)] = 1024
    """Maximum memory of tasks with unfinished samples; submits that exceed it are rejected with 429."""
    retention: RetentionSettings = RetentionSettings()
    """Automatic deletion of records."""
    users: str | None = None
    """A file of users with keys and limits, instead of `keys`."""
    min_free_mib: Annotated[int, Field(ge=0)] = 256
    """Minimum free space on the run's disk; with less, new work is rejected."""

    @model_validator(mode="before")
    @classmethod
    def _check_removed(cls, given: object) -> object:
        for place in _removed_keys(given):
            raise ValueError(f"{place} was removed: {_REMOVED[place]}")
        return given

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = [model.name for model in self.models]
        if len({*names, "default"}) <= len(names):
            raise ValueError(f"models: names must be unique and not 'default': {', '.join(names)}")
        if self.models and self.cluster is not None:
            raise ValueError("`models` and `cluster` exclude each other: additional models run on one host only")
        are_able = self.models and self.can_sleep and all(model.can_sleep for model in self.models)
        if self.turns is not None and not are_able:
            raise ValueError(
                "`turns` requires several models that can sleep: set `models`, and mode hybrid or colocated"
            )
        return self

    def of_model(self, name: str) -> ServiceConfig:
        """Return the config of an additional model in the form of a separate service; "" is the policy."""
        if not name:
            return self
        named = next(model for model in self.models if model.name == name)
        endpoint = self.endpoint.model_copy(update={"model_name": name})
        update = {field: getattr(named, field) for field in ModelConfig.model_fields}
        update |= {"models": [], "turns": None, "endpoint": endpoint}
        if named.keys is not None:
            update |= {"keys": named.keys, "users": None}
        return self.model_copy(update=update)

    @property
    def of_models(self) -> dict[str, ServiceConfig]:
        """The configs of all models by name; "" is the policy."""
        return {name: self.of_model(name) for name in ("", *(model.name for model in self.models))}

    def hide_keys(self) -> dict[str, str]:
        """Remove all keys from this process's environment, and return them by variable name."""
        hidden = self.keys.hide()
        for model in self.models:
            hidden |= {} if model.keys is None else model.keys.hide()
        return hidden

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.endpoint.model_name or self.model_path().name

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all engine pools, without autoscaling."""
        return sum(entry.replicas for entry in self.entries)

    @property
    def num_gpu_engines(self) -> int:
        """The number of engines on GPUs that step in parallel."""
        return sum(entry.replicas * entry.data_parallel_size for entry in self.entries if entry.on_gpu)

    @property
    def num_ingress(self) -> int:
        """The number of ingress processes; 1 until the default number is computed."""
        return self.ingress_replicas or 1

    @property
    def engine_traces_url(self) -> str | None:
        """The URL to which engines send their own spans; None if they send none."""
        return f"{self.tracing.endpoint.rstrip('/')}/v1/traces" if self.tracing and self.tracing.engine else None

    @property
    def tls_files(self) -> tuple[str, str] | None:
        """The paths of the certificate chain and its key; None without TLS."""
        return None if self.tls is None else (self.tls.cert, self.tls.key)

    @property
    def scheme(self) -> str:
        """The URL scheme of the public port."""
        return "http" if self.tls is None else "https"

    @property
    def allows_weights(self) -> bool:
        """True if the served weights may change, by a directory, an adapter, or (see `allows_push`) a push."""
        return self.mode is not Mode.COLOCATED and self.max_loras is None

    @property
    def max_loras(self) -> int | None:
        """The number of adapters served by name; None if adapters are not served by name."""
        return self.entries[0].max_loras

    @property
    def default_top_k(self) -> int:
        """The `top_k` of tasks and calls without one: engines with a sampling mask require it. 0: none."""
        return self.entries[0].sampling_mask_top_k or 0  # equal in all engine pools

    @property
    def allows_adapters(self) -> bool:
        """True if a LoRA adapter may be served as the policy."""
        return self.allows_weights and self.entries[0].lora_rank is not None

    @property
    def awaits_weights(self) -> bool:
        """True if no replica has weights until the first push."""
        return all(entry.load_format == "dummy" for entry in self.entries)

    def weight_staging(self, entry: EngineEntry) -> Staging:
        """Return the staging device of new weights for the replicas of an engine pool."""
        return entry.weight_staging or ("none" if self.mode is Mode.HYBRID else "auto")

    def max_context_tokens(self, entry: EngineEntry) -> int:
        """Return the maximum context length of an engine pool. Raises InvalidRequest like `model_sizes`."""
        return entry.max_context_tokens or _own_sizes(self)[0].max_context_tokens

    @classmethod
    def load(cls, path: Path) -> ServiceConfig:
        """Read the arguments of the first application of a Serve config file.

        Raises InvalidRequest, naming the file and the field.
        """
        try:
            document = yaml.safe_load(path.read_text())
            imported = document["applications"][0].get("import_path", IMPORT_PATH)
            if imported != IMPORT_PATH:
                raise InvalidRequest(
                    f"{path}: import_path is {imported!r}: this command supports only {IMPORT_PATH}",
                    param="import_path",
                )
            if document.get("http_options"):
                raise InvalidRequest(
                    f"{path}: http_options configures Serve's own proxy, which is not used: set `host` and `port`"
                    " in the application's args",
                    param="http_options",
                )
            return cls.model_validate(document["applications"][0]["args"])
        except OSError as error:
            raise InvalidRequest(f"cannot read the config {path}: {error.strerror}", param="config") from error
        except yaml.MarkedYAMLError as error:
            mark, reason = error.problem_mark, error.problem or "invalid YAML"
            where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            raise InvalidRequest(f"{path}{where}: not a Serve config: {reason}", param="config") from error
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{path} is not a Serve config of an agentloop application: see servers/cpu.yaml for the structure",
                param="config",
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                reason = f"unknown key{_nearest(cls, first['loc'])}"
            raise InvalidRequest(": ".join(filter(None, (str(path), where, reason))), param=where) from error

    @property
    def tools(self) -> dict[str, str]:
        """The workers' tools by the names that tasks use: the default tools and `workers.tools`."""
        return {**parts.registered(parts.DEFAULT_TOOLS), **self.workers.tools}

    def model_path(self) -> Path:
        """The absolute path of the model's folder. Raises InvalidRequest if it has no config.json."""
        path = located(self.model)
        if not (path / "config.json").is_file():
            raise InvalidRequest(
                f"no model at {self.model}: the folder has no config.json; expected a Hugging Face folder with"
                " config.json, safetensors and a tokenizer",
                param="model",
            )
        return path

    def allowed_weight_roots(self) -> tuple[Path, ...]:
        """The folders that may contain weights to load."""
        return (self.model_path().parent, *(located(root) for root in self.weight_roots))


def _removed_keys(document: object) -> Iterator[str]:
    """Yield each removed key that a config document contains."""
    if not isinstance(document, dict):
        return
    for place in _REMOVED:
        *sections, key = place.split(".")
        tables = [document]
        for section in sections:
            # A section is a table or, like `engines`, a list of tables.
            values = [table[section] for table in tables if isinstance(table.get(section), dict | list)]
            items = [item for value in values for item in (value if isinstance(value, list) else [value])]
            tables = [item for item in items if isinstance(item, dict)]
        if any(key in table for table in tables):
            yield place


def _nearest(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return a suggestion for the unknown key at `place` in a config document; "" if no known key is similar."""
    for part in place[:-1]:
        if part in model.model_fields:
            model = next(_models_in(model.model_fields[str(part)].annotation), model)
    matches = difflib.get_close_matches(str(place[-1]), model.model_fields, n=1)
    return f": did you mean {matches[0]!r}?" if matches else ""


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model from its config.json; the context length is the maximum over all replicas."""

    max_context_tokens: int
    vocab_size: int
    has_experts: bool = False


def model_sizes(config: ServiceConfig) -> ModelSizes:
    """Return the sizes of the model from its config.json.

    Raises InvalidRequest if config.json lacks them, or if a replica's KV cache is too small for one context.
    """
    sizes, document = _own_sizes(config)
    for entry in config.entries:
        _check_kv_cache(entry, document, entry.max_context_tokens or sizes.max_context_tokens)
    longest = max(entry.max_context_tokens or sizes.max_context_tokens for entry in config.entries)
    return replace(sizes, max_context_tokens=longest)


_PARTIAL_KV = ("kv_lora_rank", "sliding_window", "layers_block_type", "attn_layer_indices")
_NUM_KEPT_BLOCKS = 2  # reserved KV blocks: vLLM's null block and the block of the canary check


def _check_kv_cache(entry: EngineEntry, document: Mapping[str, Any], max_context_tokens: int) -> None:
    """Raise InvalidRequest if `kv_cache_mib` is too small for one context. The engine would fail only after
    minutes."""
    if entry.kind == "simulated" or entry.kv_cache_mib is None or entry.dtype not in DTYPE_BYTES:
        return
    try:
        block_bytes = entry.block_size * kv_bytes_per_token(entry, document)
    except CheckpointUnreadable:
        return  # unknown architecture: the engine itself checks its KV cache
    is_partial = set(document.get("layer_types") or ()) - {"full_attention"}
    if is_partial or any(document.get(name) for name in _PARTIAL_KV):
        return  # some layers keep less KV, so only the engine can compute the size
    num_needed = -(-max_context_tokens // entry.block_size) + _NUM_KEPT_BLOCKS
    if num_needed * block_bytes <= entry.kv_cache_mib * 2**20:
        return
    num_blocks = entry.kv_cache_mib * 2**20 // block_bytes - _NUM_KEPT_BLOCKS
    needed_mib = -(-num_needed * block_bytes // 2**20)
    raise InvalidRequest(
        f"a context of {max_context_tokens:,} tokens needs {needed_mib:,} MiB of KV cache, and engine.kv_cache_mib "
        f"is {entry.kv_cache_mib:,}: raise it, or set engine.max_context_tokens to at most "
        f"{max(0, num_blocks) * entry.block_size:,}",
        param="engine.kv_cache_mib",
    )


def weight_bytes(config: ServiceConfig) -> int:
    """Return the size of the model's weights in bytes: the total size of its safetensors files."""
    return sum(file.stat().st_size for file in config.model_path().glob("*.safetensors"))


def _own_sizes(config: ServiceConfig) -> tuple[ModelSizes, Mapping[str, Any]]:
    """Return the model's sizes, and its config.json with the fields of `text_config` merged into the top level."""
    path = config.model_path() / "config.json"
    try:
        document = json.loads(path.read_text())
        document |= document.get("text_config") or {}  # a multimodal model has one
        is_given = all(entry.max_context_tokens for entry in config.entries)
        context = 0 if is_given else int(document["max_position_embeddings"])
        has_experts = any(int(document.get(name) or 0) > 1 for name in _NUM_EXPERTS)
        return ModelSizes(context, int(document["vocab_size"]), has_experts), document
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{path}: the context length, vocabulary size or number of experts cannot be read: {error!r}",
            param="model",
        ) from error


def located(path: str) -> Path:
    """Resolve a path of a config: absolute, or relative to the working directory, or else to this package's
    checkout."""
    expanded = Path(path).expanduser()
    if expanded.is_absolute() or expanded.exists():
        return expanded.resolve()
    return (CHECKOUT / expanded).resolve()


SECRET_NAME = "secret"
"""The name of the file with the run's secret in the run directory."""

AUTHORITY_NAME = "authority"
"""The name of the file with the run's certificate authority in the run directory."""


def run_secret(run_dir: Path) -> str:
    """Return the secret of a run, created at its first start. A redeployed run therefore accepts its session
    keys."""
    return kept_secret(run_dir, SECRET_NAME, lambda: secrets.token_hex(16))


def kept_secret(run_dir: Path, name: str, make: Callable[[], str]) -> str:
    """Return the text of the file `name` in a run directory, readable by its owner only; create it on first use."""
    path = run_dir / name
    if path.exists():
        return path.read_text()
    with suppress(FileExistsError):
        made_run_dir(run_dir)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.touch(mode=0o600)
        temporary.write_text(make())
        try:
            os.link(temporary, path)  # atomic: the file is never incomplete, and the first of two processes wins
        finally:
            temporary.unlink()
    return path.read_text()


def run_dir_in(parent: Path) -> Path:
    """Return a path for a new run directory under `parent`, named by time and random digits; do not create it."""
    return parent / f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def new_run_dir(parent: Path) -> Path:
    """Create a new run directory under `parent`. Raises InvalidRequest."""
    return made_run_dir(run_dir_in(parent))


def made_run_dir(path: Path) -> Path:
    """Create a run directory that only its owner can access, if it is missing. Raises InvalidRequest."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise InvalidRequest(
            f"cannot create the run directory {path}: {error.strerror}; choose another one with --out, or run_dir"
            " in the config",
            param="run_dir",
        ) from error
    return path


CONFIG_NAME = "config.json"
"""The name of the file with the config of the run's first start in the run directory."""


def saved_config(run_dir: Path) -> ServiceConfig | None:
    """Return the config of a run's first start; None for a new run directory. Raises InvalidRequest."""
    try:
        return ServiceConfig.model_validate_json((run_dir / CONFIG_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise InvalidRequest(
            f"{run_dir / CONFIG_NAME} is not valid in this release: {reason}; resume the run with the release that"
            " started it",
            param="run_dir",
        ) from error


def model_of(run_dir: Path) -> Path | None:
    """Return the model folder of a run's first start; None if it is unknown. Raises InvalidRequest."""
    config = saved_config(run_dir)
    return None if config is None else located(config.model)


TOKENIZER_NAME = "tokenizer.json"
"""The name of the tokenizer file in a model folder, and of its copy in a run directory."""

TOKENIZER_HASH_NAME = "tokenizer.sha256"
"""The name of the file with the SHA-256 of the run's initial tokenizer in the run directory."""


def keep_tokenizer(config: ServiceConfig, run_dir: Path) -> None:
    """Store the hash of a new run's tokenizer, and a copy if `keep_tokenizer` is set or the tokenizer was
    converted."""
    model, copy = located(config.model), run_dir / TOKENIZER_NAME
    content = tokenizer_json(model)
    kept_secret(run_dir, TOKENIZER_HASH_NAME, lambda: hashlib.sha256(content).hexdigest())
    if (config.keep_tokenizer or not (model / TOKENIZER_NAME).is_file()) and not copy.exists():
        copy.write_bytes(content)


def keep_config(config: ServiceConfig, run_dir: Path) -> None:
    """Store a new run's config in its directory. Raises InvalidRequest if an existing run cannot continue with
    it."""
    first = saved_config(run_dir)
    if first is None:
        (run_dir / CONFIG_NAME).write_text(config.model_dump_json(indent=2))
    elif config.cluster is None and first.num_ingress != config.num_ingress:
        # On one host, the number of ingress processes determines the owner of each session, so it cannot change.
        raise InvalidRequest(
            f"the sessions of {run_dir} are partitioned over {first.num_ingress} ingress processes, not"
            f" {config.num_ingress}: set ingress_replicas to {first.num_ingress}",
            param="ingress_replicas",
        )
