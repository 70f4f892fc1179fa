"""ServiceConfig: the one description of a service, in YAML; and the directory of a run.

`serve deploy FILE` and `agentloop serve` read the same file: it is a Ray Serve config whose application arguments
are this model.
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
"""Where relative paths of a config are looked for when the working directory has no such path."""

IMPORT_PATH = "agentloop_servers.app:build"
"""What a Serve config names as its application."""

_getenv = ctypes.CDLL(None).getenv
_getenv.restype = ctypes.c_void_p

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as the architectures call it


_ONLY_NGRAMS = "remove it: drafts are always n-grams, since a draft model does not follow the policy"
_OF_SGLANG = "with `kind: sglang` it is `settings.attention_backend`"
_REMOVED: Mapping[str, str] = {
    "balancer.order": "groups go out by `age`",
    "balancer.retention": "a holder at a long tool gives its room to others while they wait for it",
    "balancer.step_times": "work is spread by the KV that each replica has",
    "engine.attention_backend": _OF_SGLANG,
    "engine.speculative.method": _ONLY_NGRAMS,
    "engine.speculative.model": _ONLY_NGRAMS,
    "engine.tells_cache": "engines publish no KV events",
    "engines.attention_backend": _OF_SGLANG,
    "engines.speculative.method": _ONLY_NGRAMS,
    "engines.speculative.model": _ONLY_NGRAMS,
    "engines.step_times": "work is spread by the KV that each replica has",
    "engines.tells_cache": "engines publish no KV events",
    "log": "use `logrotate` or a similar program to bound the size of `service.log`",
    "updates.consistency": "replicas switch one by one, and all together where `engine.weight_staging` is none",
}
"""Why a removed key is refused: its successor, or the reason why it has none."""


class _Strict(BaseModel):
    # An error's text would have the input, of which `store` may have a password.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)


class Mode(StrEnum):
    """Ownership of the accelerators, and the source of weights."""

    STANDALONE = "standalone"  # engines own theirs; a trainer elsewhere pushes weights
    HYBRID = "hybrid"  # shared with a trainer: engines sleep while it trains, and take its weights on waking
    COLOCATED = "colocated"  # shared, weights never change: judge and reward models sleep and wake
    DEBUG = "debug"  # weights from a checkpoint, no trainer; an operator may load another directory by hand


class TemplateSettings(_Strict):
    """The chat template, and what it is given with every rendering."""

    file: str | None = None
    """A Jinja file in place of the model folder's template."""
    kwargs: dict[str, JsonValue] = {}
    """Variables that the template is given, as `enable_thinking`; a request's own go before them."""
    date: datetime.date | None = None
    """The day that a template is told; left out: always 2025-01-01."""


class ChatSettings(_Strict):
    """Rendering and parsing of messages, for workers and the endpoint. See docs/guides/models.md."""

    renderer: str = "template"
    """`template`, `renderers:FAMILY` of the package renderers, or an import path."""
    parser: str = "auto"
    """`auto`, a name of ours, `none`, `renderers:FAMILY`, or an import path."""
    lenient: bool = False
    """Read what vLLM and SGLang forgive too, calls without arguments and lists of calls; records say so."""
    template: TemplateSettings = TemplateSettings()
    """The chat template."""
    thinking: Literal["keep", "template"] = "keep"
    """Earlier thoughts at a user's message: kept, or treated as the template does."""
    stop_tokens: list[str] = []
    """The tokens that end a turn, in place of those that the model folder declares."""
    on_unstable_template: Literal["raise", "fork"] = "fork"
    """Where turns cannot be bridged: refuse to start, or fork the path."""


ModuleName = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class WorkerSettings(_Strict):
    """The agent-loop workers."""

    replicas: Annotated[int, Field(ge=1)] | None = None
    """Worker processes; left out: 1, or on GPUs by the number of engines and CPUs."""
    capacity: Annotated[int, Field(ge=1)] | None = None
    """Trajectories that one worker runs at once; left out: 256, or on GPUs twice the engines' seats."""
    turn_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """The time of one turn."""
    max_standstill_s: Annotated[float, Field(gt=0)] = 4 * 3600.0
    """The time that a trajectory may stand without a replica, or frozen."""
    isolation: str = "none"
    """`process`: each trajectory has a process, and user code harms its own trajectory only. Packages may register
    others."""
    max_processes: Annotated[int, Field(ge=1)] = 32
    """With isolation: the trajectories that a worker runs at once."""
    tools: dict[str, str] = {}
    """Tools in addition to the default ones: name to registered name (`shell`) or import path."""
    allowed_imports: list[ModuleName] | None = None
    """The modules that tasks may name; left out: none where users have keys, else any."""
    silent_after_s: Annotated[float, Field(ge=5)] = 15.0
    """The silence after which a worker is lost."""
    cut_after_s: Annotated[float, Field(ge=2)] = 3.0
    """The same, after its connection broke; at most half of `silent_after_s`."""

    @model_validator(mode="after")
    def _check_silence(self) -> Self:
        if self.cut_after_s > self.silent_after_s / 2:
            raise ValueError("cut_after_s is at most half of silent_after_s")
        return self

    def imports(self, *, has_user_keys: bool) -> AllowedImports:
        """Return what tasks may import: what the operator lists, else nothing where users have keys."""
        if self.allowed_imports is None:
            return AllowedImports(() if has_user_keys else None)
        return AllowedImports(tuple(self.allowed_imports))

    @property
    def num_at_once(self) -> int:
        """Trajectories that one worker runs at once; with isolation each has a process."""
        capacity = self.capacity or 256
        return capacity if self.isolation == "none" else min(capacity, self.max_processes)


class KeysConfig(_Strict):
    """Environment variables that hold bearer keys. Both are optional on loopback and required beyond it."""

    user_key_env: str = "AGENTLOOP_KEY"
    """The environment variable with the users' key."""
    admin_key_env: str = "AGENTLOOP_ADMIN_KEY"
    """The environment variable with the admin key."""
    metrics_key_env: str = "AGENTLOOP_METRICS_KEY"
    """The environment variable with a key that opens `GET /metrics` alone; the admin key does too."""

    def hide(self) -> dict[str, str]:
        """Take the keys out of this process's environment, and so out of those that it starts; return them.

        They are overwritten too in the memory that `/proc/PID/environ` shows.
        """
        names = (self.user_key_env, self.admin_key_env, self.metrics_key_env)
        taken = {name: os.environ[name] for name in names if name in os.environ}
        for name in taken:
            if (place := _getenv(name.encode())) is not None:
                ctypes.memset(place, 0, len(ctypes.string_at(place)))
            del os.environ[name]
        return taken


class TlsSettings(_Strict):
    """The certificate chain and the key, in PEM files, by which the public port speaks TLS."""

    cert: str
    """The certificate chain, a PEM file."""
    key: str
    """The private key, a PEM file."""

    def check(self) -> None:
        """Raise InvalidRequest if no server could use them."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.cert, self.key)
        except OSError as error:  # an SSLError too
            raise InvalidRequest(f"tls: {self.cert} with {self.key}: {error}", param="tls") from error


class ClusterTlsSettings(TlsSettings):
    """The certificates of private connections, in PEM files at the same paths on every node."""

    cert: str
    """The certificate chain of the node, which names its address."""
    ca: str
    """The authority that has signed the certificates of all nodes."""


class EndpointSettings(_Strict):
    """The chat endpoint of each ingress process."""

    model_name: str | None = None
    """The model's name for clients; left out: its folder's name."""
    max_sessions: Annotated[int, Field(ge=1)] = 20_000
    """Open sessions of one user in one ingress process; the next one gets 429."""
    max_resident_mib: Annotated[int, Field(ge=1)] = 512
    """Memory of sessions; beyond it idle ones are on disk alone."""
    session_ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    """The time that a session lives without use."""
    max_open_calls: Annotated[int, Field(ge=1)] = 4096
    """Calls under way in one ingress process; the next one gets 429."""
    score_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the engines' time that scores may take while other calls run; below 1 one score at a time."""


class TracingSettings(_Strict):
    """Traces of trajectories and weight updates for an OpenTelemetry receiver. See docs/guides/observability.md."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s?#/]+(/[^\s?#]*)?$")]
    """The OTLP/HTTP receiver's URL, without its `/v1/traces`."""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The share of trajectories that is sent."""
    keep: list[Literal["failed", "slowest"]] = ["failed", "slowest"]
    """Those that are sent beside them: failed ones, and such as take longer than 99 % of their process's others."""
    content: bool = False
    """Send messages and errors too."""
    engine: bool = False
    """Have the engines send their own spans, of the share that is sampled, each within its turn's."""


class MetricsSettings(_Strict):
    """Metrics that `GET /metrics` has beside the service's own."""

    engine: bool = False
    """vLLM's own `vllm:...` too, with the label `replica`."""


class UpdateSettings(_Strict):
    """Weight updates."""

    straggler_grace_s: Annotated[float, Field(gt=0)] = 10.0
    """The time that the others wait for a replica that is late with a step."""
    exact_grace_s: Annotated[float, Field(ge=0)] = 5.0
    """Seconds that a replica gives calls in flight that accept only the old version: docs/guides/contracts.md."""
    timeout_s: Annotated[float, Field(gt=0)] = 2400.0
    """The time of a whole update; longer than its steps together."""


class WeightStoreSettings(_Strict):
    """A store of published versions, which the service follows. See docs/guides/contracts.md."""

    store: Annotated[str, Field(pattern=r"^(/|[a-z][a-z0-9+.:-]*://).")]
    """A directory, or a URL that fsspec knows, as `s3://BUCKET/PREFIX`; credentials come from the environment."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    """The run whose versions are served: a folder of the store."""
    source: str = "store"
    """The reader of the store: `store`, or the name that a package registers for another format."""
    settings: dict[str, JsonValue] = {}
    """Settings of a `source` that a package registers."""
    poll_s: Annotated[float, Field(ge=0.1)] = 5.0
    """The time between two looks at the pointer."""
    cache: str | None = None
    """The folder in which each host keeps two versions; left out: `weights` in the run's directory."""


class BalancerSettings(_Strict):
    """Settings of what begins and where; none has to be set. See docs/guides/operations.md."""

    limits_kv: bool = True
    """Samples wait in the queue while those that run may need all KV; false: everything begins at once."""
    min_kv_share: Annotated[float, Field(gt=0, le=10)] | None = None
    """The least share of a replica's KV that may be taken and promised; left out: 0.3."""
    max_kv_share: Annotated[float, Field(gt=0, le=10)] | None = None
    """The largest such share; left out: 4."""
    call_overcommit: Annotated[float, Field(ge=0, le=4)] = 0.25
    """The share of that room that sessions and direct calls may take beyond it."""
    lease_ttl_s: Annotated[float, Field(ge=10)] = 60.0
    """The silence of a process after which its leases end."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        least, most = self.min_kv_share, self.max_kv_share
        if least is not None and most is not None and least > most:
            raise ValueError("min_kv_share is at most max_kv_share")
        return self


class RetentionSettings(_Strict):
    """Records that may be deleted; by default none. See docs/guides/operations.md."""

    delete_acknowledged: bool = False
    """Delete records that a trainer has acknowledged."""
    max_age_s: Annotated[float, Field(gt=0)] | None = None
    """The age at which records of rollouts that are done are deleted, read or not."""
    max_mib: Annotated[int, Field(ge=1)] | None = None
    """The size of the store, beyond which the oldest of those are deleted."""

    @property
    def bounds(self) -> tuple[bool, float | None, int | None]:
        """The settings as a RetentionPolicy's fields."""
        return self.delete_acknowledged, self.max_age_s, None if self.max_mib is None else self.max_mib << 20


class ClusterSettings(_Strict):
    """The nodes of a Ray cluster. See docs/guides/cluster.md."""

    network: str | None = None
    """The network of the nodes' private ports, as `10.0.0.0/8`; left out: each node's address in Ray."""
    tls: Literal["run"] | ClusterTlsSettings | None = None
    """TLS between nodes: `run`, by an authority that each run has for itself, or files; left out: none."""
    min_nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes to wait for before the service is placed: one that is placed on a single node stays on it."""

    @field_validator("network")
    @classmethod
    def _check_network(cls, given: str | None) -> str | None:
        return None if given is None else str(ipaddress.ip_network(given))


class ModelConfig(_Strict):
    """A model and its engines: the policy's part of a service, and an entry of its `models`."""

    mode: Mode = Mode.STANDALONE
    """The owner of the accelerators and the source of weights: `standalone`, `hybrid`, `colocated` or `debug`."""
    model: str
    """The model's folder."""
    model_version: Annotated[int, Field(ge=0)] = 0
    """The weight version of what the folder holds."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Engine replicas, where `engines` is left out."""
    engine: EngineConfig = EngineConfig()
    """The engine of all replicas, where `engines` is left out."""
    engines: Annotated[list[EngineEntry], Field(min_length=1)] | None = None
    """Kinds of replicas, in place of `engine` and `replicas`."""
    chat: ChatSettings = ChatSettings()
    """The model's chat format."""
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE
    """What an update does to older KV: `keep`, `fresh` or `recompute`."""
    updates: UpdateSettings = UpdateSettings()
    """Weight updates."""
    weights: WeightStoreSettings | None = None
    """A store of published versions to follow; needs the extra `store`."""
    balancer: BalancerSettings = BalancerSettings()
    """What begins, and where."""
    weight_roots: list[str] = []
    """Directories that weights may be loaded from; the model's parent always may."""
    max_pause_s: Annotated[float, Field(gt=0)] = 600.0
    """The time that new requests wait for a resume; then they get 503."""

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.engines is not None and (self.engine != EngineConfig() or self.replicas != 1):
            raise ValueError("`engines` stands in place of `engine` and `replicas`: a config has one form")
        check_entries(self.entries)
        for entry in self.entries:
            at = "" if self.engines is None else f"engine {entry.name}: "
            if self.can_sleep and entry.kind != "simulated" and entry.device == "cpu":
                raise ValueError(f"{at}mode {self.mode} needs device cuda: no engine gives memory back on CPU")
            if self.mode in (Mode.COLOCATED, Mode.DEBUG) and entry.load_format == "dummy":
                raise ValueError(f"{at}mode {self.mode} needs load_format auto: nobody pushes weights")
            if self.weights is not None and (not self.allows_push or entry.lora_rank is not None):
                raise ValueError(f"{at}`weights` is for modes standalone and hybrid, and engines without adapters")
            if self.weights is not None and self.weights.cache is None and entry.hosts > 1:
                raise ValueError(f"{at}an engine over several hosts needs `weights.cache`, a folder that all see")
        return self

    @property
    def entries(self) -> tuple[EngineEntry, ...]:
        """The kinds of replicas: those of `engines`, else the one that `engine` and `replicas` say."""
        if self.engines is not None:
            return tuple(self.engines)
        return (EngineEntry.model_validate({**self.engine.model_dump(), "replicas": self.replicas}),)

    @property
    def allows_push(self) -> bool:
        """Tell if a trainer may push tensors."""
        return self.mode in (Mode.STANDALONE, Mode.HYBRID)

    @property
    def can_sleep(self) -> bool:
        """Tell if the fleet can give its memory back."""
        return self.mode in (Mode.HYBRID, Mode.COLOCATED)


class NamedModel(ModelConfig):
    """A model beside the policy, as a judge, a teacher or a user simulator. See docs/guides/models.md."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
    """The name by which calls pick it; its own routes are below `/models/NAME`."""
    mode: Mode = Mode.DEBUG
    """The source of its weights, as of the policy; `debug` and `colocated` keep those of the folder."""
    keys: KeysConfig | None = None
    """The environment variables of its own keys; left out: the service's keys open it."""


class TurnSettings(_Strict):
    """Models that share their accelerators: one is awake at a time, and a call to another one wakes it."""

    min_stay_s: Annotated[float, Field(ge=0)] = 10.0
    """The least time that a model is awake, while it has work."""
    max_wait_s: Annotated[float, Field(gt=0)] = 60.0
    """The time after which a model that calls wait for gets its turn, though the other one has work."""


class ServiceConfig(ModelConfig):
    """A whole service. With `load_format: dummy` replicas take no traffic until weights are pushed."""

    models: list[NamedModel] = []
    """Models beside the policy, each with engines, weights and records of its own."""
    turns: TurnSettings | None = None
    """How all models take turns on their accelerators; left out: all are awake."""
    workers: WorkerSettings = WorkerSettings()
    """The agent-loop workers."""
    ingress_replicas: Annotated[int, Field(ge=1)] | None = None
    """Ingress processes, each with its share of the sessions; left out: what the run began with."""
    endpoint: EndpointSettings = EndpointSettings()
    """The chat endpoint."""
    cluster: ClusterSettings | None = None
    """The nodes of a Ray cluster; on one node nothing of it counts."""
    host: str = "127.0.0.1"
    """The address of the public port; beyond loopback keys are required."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The public port; 0: a free one, on a Ray of its own."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s?#/]+(/[^\s?#]*)?$")] | None = None
    """The URL by which others reach the service, as behind a proxy; left out: by `host` and `port`."""
    tls: TlsSettings | None = None
    """The certificate of the public port."""
    image_roots: list[str] = []
    """Folders whose images a task may show; left out: images come as data URLs only."""
    keys: KeysConfig = KeysConfig()
    """The environment variables of the keys."""
    routes: dict[str, dict[str, JsonValue]] = {}
    """Settings of the HTTP routes that packages register, by name. Other registered routes are served too."""
    sinks: dict[str, dict[str, JsonValue]] = {}
    """Other receivers of ended trajectories and updates: the settings of each sink that a package registers."""
    tracing: TracingSettings | None = None
    """Spans for an OpenTelemetry receiver; needs the extra `otel`."""
    metrics: MetricsSettings = MetricsSettings()
    """The metrics of `GET /metrics`."""
    run_dir: str | None = None
    """The run's directory; left out: a new one under `runs`."""
    keep_tokenizer: bool = False
    """Keep a copy of the tokenizer in the run's directory, for the viewer once the model's folder is gone."""
    store: Annotated[SecretStr | None, Field(exclude=True)] = None
    """A database for records, sessions and turn journals, `postgresql://USER@HOST:PORT/DATABASE`; left out: SQLite
    and files in the run directory."""
    max_queued_trajectories: Annotated[int, Field(ge=1)] = 100_000
    """Trajectories that wait; a submit beyond it gets 429."""
    max_queued_mib: Annotated[int, Field(ge=1)] = 1024
    """Tasks with unfinished samples, in memory; a submit beyond it gets 429."""
    retention: RetentionSettings = RetentionSettings()
    """Records that are deleted."""
    users: str | None = None
    """A file of users with keys and limits, in place of `keys`."""
    min_free_mib: Annotated[int, Field(ge=0)] = 256
    """Free space on the run's disk, below which nothing new is accepted."""

    @model_validator(mode="before")
    @classmethod
    def _check_removed(cls, given: object) -> object:
        for place in _removed_keys(given):
            raise ValueError(f"{place} was removed: {_REMOVED[place]}")
        return given

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = [one.name for one in self.models]
        if len({*names, "default"}) <= len(names):
            raise ValueError(f"models: names are unique, and not 'default': {', '.join(names)}")
        if self.models and self.cluster is not None:
            raise ValueError("models beside the policy run on one host: give `cluster` or `models`")
        are_able = self.models and self.can_sleep and all(one.can_sleep for one in self.models)
        if self.turns is not None and not are_able:
            raise ValueError("turns are of several models in modes hybrid or colocated, which can sleep")
        return self

    def of_model(self, name: str) -> ServiceConfig:
        """Return the config of a model beside the policy, as that of a service of its own; "" is the policy."""
        if not name:
            return self
        found = next(one for one in self.models if one.name == name)
        endpoint = self.endpoint.model_copy(update={"model_name": name})
        update = {field: getattr(found, field) for field in ModelConfig.model_fields}
        update |= {"models": [], "turns": None, "endpoint": endpoint}
        if found.keys is not None:
            update |= {"keys": found.keys, "users": None}
        return self.model_copy(update=update)

    @property
    def of_models(self) -> dict[str, ServiceConfig]:
        """The configs of all models by name; "" is the policy."""
        return {name: self.of_model(name) for name in ("", *(one.name for one in self.models))}

    def hide_keys(self) -> dict[str, str]:
        """Take all keys out of this process's environment; return them."""
        hidden = self.keys.hide()
        for one in self.models:
            hidden |= {} if one.keys is None else one.keys.hide()
        return hidden

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.endpoint.model_name or self.model_path().name

    @property
    def num_replicas(self) -> int:
        """The replicas of all entries."""
        return sum(entry.replicas for entry in self.entries)

    @property
    def num_gpu_engines(self) -> int:
        """Engines on GPUs that step side by side."""
        return sum(entry.replicas * entry.data_parallel_size for entry in self.entries if entry.on_gpu)

    @property
    def num_ingress(self) -> int:
        """Ingress processes; one before the config is sized."""
        return self.ingress_replicas or 1

    @property
    def engine_traces_url(self) -> str | None:
        """The URL that engines send their own spans to; None: they make none."""
        return f"{self.tracing.endpoint.rstrip('/')}/v1/traces" if self.tracing and self.tracing.engine else None

    @property
    def tls_files(self) -> tuple[str, str] | None:
        """The files of the certificate chain and its key; None without TLS."""
        return None if self.tls is None else (self.tls.cert, self.tls.key)

    @property
    def scheme(self) -> str:
        """That of the public port's URLs."""
        return "http" if self.tls is None else "https"

    @property
    def allows_weights(self) -> bool:
        """Tell if served weights may change at all: a directory, an adapter, or a push where that is allowed."""
        return self.mode is not Mode.COLOCATED and self.max_loras is None

    @property
    def max_loras(self) -> int | None:
        """Adapters that are served by name; None: none."""
        return self.entries[0].max_loras

    @property
    def allows_adapters(self) -> bool:
        """Tell if a LoRA adapter may be served."""
        return self.allows_weights and self.entries[0].lora_rank is not None

    @property
    def awaits_weights(self) -> bool:
        """Tell if no replica has weights before somebody sends some."""
        return all(entry.load_format == "dummy" for entry in self.entries)

    def weight_staging(self, entry: EngineEntry) -> Staging:
        """Return the place where new weights of an entry's replicas wait for their commit."""
        return entry.weight_staging or ("none" if self.mode is Mode.HYBRID else "auto")

    def max_context_tokens(self, entry: EngineEntry) -> int:
        """Return the longest context of an entry's replicas. Raises InvalidRequest as `model_sizes`."""
        return entry.max_context_tokens or _own_sizes(self)[0].max_context_tokens

    @classmethod
    def load(cls, path: Path) -> ServiceConfig:
        """Read a Serve config file: its first application's arguments.

        Raises InvalidRequest, naming the file and the field.
        """
        try:
            document = yaml.safe_load(path.read_text())
            imported = document["applications"][0].get("import_path", IMPORT_PATH)
            if imported != IMPORT_PATH:
                raise InvalidRequest(
                    f"{path}: import_path is {imported!r}, and this command runs {IMPORT_PATH} alone",
                    param="import_path",
                )
            if document.get("http_options"):
                raise InvalidRequest(
                    f"{path}: http_options are of Serve's own proxy, which is not used: `host` and `port` of the "
                    "service stand among the application's args",
                    param="http_options",
                )
            return cls.model_validate(document["applications"][0]["args"])
        except OSError as error:
            raise InvalidRequest(f"cannot read the config {path}: {error.strerror}", param="config") from error
        except yaml.MarkedYAMLError as error:
            mark, reason = error.problem_mark, error.problem or "it cannot be read"
            where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            raise InvalidRequest(f"{path}{where}: not a Serve config: {reason}", param="config") from error
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{path} is not a Serve config of an agentloop application: it begins as servers/cpu.yaml does",
                param="config",
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                reason = f"there is no such key{_nearest(cls, first['loc'])}"
            raise InvalidRequest(": ".join(filter(None, (str(path), where, reason))), param=where) from error

    @property
    def tools(self) -> dict[str, str]:
        """The tools of workers by the names that tasks use: the default ones, and those of `workers.tools`."""
        return {**parts.registered(parts.DEFAULT_TOOLS), **self.workers.tools}

    def model_path(self) -> Path:
        """The model's folder, absolute. Raises InvalidRequest if there is none."""
        path = located(self.model)
        if not (path / "config.json").is_file():
            raise InvalidRequest(
                f"no model at {self.model}: 'model' is a Hugging Face folder with config.json, safetensors and a "
                "tokenizer; download a model of a hub first ('hf download NAME --local-dir DIR'), and convert a "
                ".gguf file to such a folder",
                param="model",
            )
        return path

    def allowed_weight_roots(self) -> tuple[Path, ...]:
        """The folders under which pushed weights must lie."""
        return (self.model_path().parent, *(located(root) for root in self.weight_roots))


def _removed_keys(document: object) -> Iterator[str]:
    """Yield each removed key that a config's document has."""
    if not isinstance(document, dict):
        return
    for place in _REMOVED:
        *sections, key = place.split(".")
        held = [document]
        for section in sections:
            found = [settings[section] for settings in held if isinstance(settings.get(section), dict | list)]
            listed = [one for part in found for one in (part if isinstance(part, list) else [part])]
            held = [one for one in listed if isinstance(one, dict)]
        if any(key in settings for settings in held):
            yield place


def _nearest(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return a suggestion for a key that is unknown at its place within a model's document; "" without one."""
    for part in place[:-1]:
        if part in model.model_fields:
            model = next(_models_in(model.model_fields[str(part)].annotation), model)
    found = difflib.get_close_matches(str(place[-1]), model.model_fields, n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, by its config.json; the context is the longest that any replica serves."""

    max_context_tokens: int
    vocab_size: int
    has_experts: bool = False


def model_sizes(config: ServiceConfig) -> ModelSizes:
    """Return what the model's config.json says of it.

    Raises InvalidRequest if it does not, and if a replica's KV cache is too small for one context.
    """
    sizes, document = _own_sizes(config)
    for entry in config.entries:
        _check_kv_cache(entry, document, entry.max_context_tokens or sizes.max_context_tokens)
    longest = max(entry.max_context_tokens or sizes.max_context_tokens for entry in config.entries)
    return replace(sizes, max_context_tokens=longest)


_PARTIAL_KV = ("kv_lora_rank", "sliding_window", "layers_block_type", "attn_layer_indices")
_NUM_KEPT_BLOCKS = 2  # of a KV cache: vLLM's null block and that of the canary check


def _check_kv_cache(entry: EngineEntry, document: Mapping[str, Any], max_context_tokens: int) -> None:
    """Raise InvalidRequest if `kv_cache_mib` does not hold one context: the engine would find it after minutes."""
    if entry.kind == "simulated" or entry.kv_cache_mib is None or entry.dtype not in DTYPE_BYTES:
        return
    try:
        block_bytes = entry.block_size * kv_bytes_per_token(entry, document)
    except CheckpointUnreadable:
        return  # a model of another kind: the engine itself decides
    is_partial = set(document.get("layer_types") or ()) - {"full_attention"}
    if is_partial or any(document.get(name) for name in _PARTIAL_KV):
        return  # some layers keep less KV: the engine itself has to say how much
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
    """Return the size of one copy of the model's weights, in bytes, by its safetensors files."""
    return sum(file.stat().st_size for file in config.model_path().glob("*.safetensors"))


def _own_sizes(config: ServiceConfig) -> tuple[ModelSizes, Mapping[str, Any]]:
    """Return the model's sizes, and its config.json with the fields of its text part on the top level."""
    path = config.model_path() / "config.json"
    try:
        document = json.loads(path.read_text())
        document |= document.get("text_config") or {}  # a multimodal model has one
        is_given = all(entry.max_context_tokens for entry in config.entries)
        context = 0 if is_given else int(document["max_position_embeddings"])
        has_experts = any(int(document.get(name) or 0) > 1 for name in _NUM_EXPERTS)
        return ModelSizes(context, int(document["vocab_size"]), has_experts), document
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path}: no usable model description ({error!r})", param="model") from error


def located(path: str) -> Path:
    """A config's path: absolute, else in the working directory, else in the checkout of this package."""
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given.resolve()
    return (CHECKOUT / given).resolve()


SECRET_NAME = "secret"
"""The file of a run directory that holds its secret."""

AUTHORITY_NAME = "authority"
"""The file of a run directory that holds its own authority of certificates."""


def run_secret(run_dir: Path) -> str:
    """The secret of a run, made at its first start: what is deployed again knows the keys of its sessions."""
    return kept_secret(run_dir, SECRET_NAME, lambda: secrets.token_hex(16))


def kept_secret(run_dir: Path, name: str, make: Callable[[], str]) -> str:
    """Return what a run's directory keeps under a name, for its owner alone; made at its first use."""
    path = run_dir / name
    if path.exists():
        return path.read_text()
    with suppress(FileExistsError):
        made_run_dir(run_dir)
        made = path.with_suffix(f".{secrets.token_hex(4)}")
        made.touch(mode=0o600)
        made.write_text(make())
        try:
            os.link(made, path)  # never half-written, and the first of two wins
        finally:
            made.unlink()
    return path.read_text()


def run_dir_in(parent: Path) -> Path:
    """Return a path for a new run under `parent`, not made yet: the time and a few random digits."""
    return parent / f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def new_run_dir(parent: Path) -> Path:
    """A new directory under `parent`. Raises InvalidRequest."""
    return made_run_dir(run_dir_in(parent))


def made_run_dir(path: Path) -> Path:
    """Return a run directory, made if it is new, which its owner alone may enter. Raises InvalidRequest."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise InvalidRequest(
            f"no run can be written to {path}: {error.strerror}; --out, or run_dir in the config, names a place",
            param="run_dir",
        ) from error
    return path


CONFIG_NAME = "config.json"
"""The file of a run directory that holds the config of its first start."""


def saved_config(run_dir: Path) -> ServiceConfig | None:
    """Return the config that a run directory was begun with; None if it is new. Raises InvalidRequest."""
    try:
        return ServiceConfig.model_validate_json((run_dir / CONFIG_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise InvalidRequest(f"{run_dir / CONFIG_NAME} is of another release: {reason}", param="run_dir") from error


def model_of(run_dir: Path) -> Path | None:
    """Return the model folder that a run was begun with; None if nothing tells. Raises InvalidRequest."""
    config = saved_config(run_dir)
    return None if config is None else located(config.model)


TOKENIZER_NAME = "tokenizer.json"
"""The file of a model folder that has its tokenizer, and of a run directory that has the copy."""

TOKENIZER_HASH_NAME = "tokenizer.sha256"
"""The file of a run directory that has the SHA-256 of the tokenizer that it was begun with."""


def keep_tokenizer(config: ServiceConfig, run_dir: Path) -> None:
    """Keep the hash of a new run's tokenizer, and the tokenizer if that is set or it was converted."""
    model, copy = located(config.model), run_dir / TOKENIZER_NAME
    content = tokenizer_json(model)
    kept_secret(run_dir, TOKENIZER_HASH_NAME, lambda: hashlib.sha256(content).hexdigest())
    if (config.keep_tokenizer or not (model / TOKENIZER_NAME).is_file()) and not copy.exists():
        copy.write_bytes(content)


def keep_config(config: ServiceConfig, run_dir: Path) -> None:
    """Keep a new run's config in its directory. Raises InvalidRequest for one that the run cannot go on with.

    On one host the owner of a session follows from the number of ingress processes, so that never changes.
    """
    first = saved_config(run_dir)
    if first is None:
        (run_dir / CONFIG_NAME).write_text(config.model_dump_json(indent=2))
    elif config.cluster is None and first.num_ingress != config.num_ingress:
        raise InvalidRequest(
            f"the sessions of {run_dir} are shared by {first.num_ingress} ingress processes, not"
            f" {config.num_ingress}",
            param="ingress_replicas",
        )
