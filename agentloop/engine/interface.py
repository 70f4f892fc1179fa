"""The interface between the service and inference engines.

Generation uses `TokenEngine`, the weight controller uses `EngineControl`, and a replica owns the complete `Engine`.
Implementations are in `agentloop_servers/engines/`; `agentloop/simulation/` has one without a model. The rules that
they share are in `engine/lifecycle.py`. One contract test suite (`tests/contract/`) checks for every engine:

- the engine receives exactly the prompt ids and returns exactly the sampled ids, including the stop token, with one
  logprob per id under the distribution of its `logprobs_mode`; version spans cover the ids without gaps;
- `pause` and `resume` are idempotent; a pause(KEEP) neither loses, repeats nor changes a token; `abort` works while
  paused; a request sent while paused is held until the resume or refused with `EnginePaused`, never lost;
- a cancelled `generate` aborts the request in the engine;
- a request that does not accept the served version (`VersionDemand`) is refused, and a commit of a version that it
  does not accept ends it;
- a failed `commit` raises `WeightUpdateFailed` and leaves `is_usable` false until a later commit succeeds;
- `sleep` releases memory and loses no request: requests in flight freeze, and continue after `wake` and `resume`;
- equal prompts before and after an update share KV only if `GenerateRequest.kv_version` allows it;
- a call with an adapter uses one version of it from admission to end, and shares KV only with that version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from agentloop.errors import InvalidRequest
from agentloop.images import Image, ImageTokens
from agentloop.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    Load,
    PauseMode,
    TopLogprobs,
    WeightVersionSpan,
)
from agentloop.values.aux_rows import Aux
from agentloop.values.capabilities import SAMPLING, Capabilities, Feature, bits_of
from agentloop.values.sampling import LogprobsMode


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties of an engine that are fixed at its start."""

    name: str  # "vllm", "simulated", ...
    max_context_tokens: int
    vocab_size: int
    block_size: int
    kv_capacity_tokens: int
    max_running: int
    num_workers: int = 1  # processes with weights: tensor-parallel size times data-parallel size
    weight_dtype: str | None = None  # compute dtype of the weights, such as "bfloat16"; None without a model
    can_sleep: bool = False
    features: frozenset[Feature] = SAMPLING  # features that requests may use
    lora_rank: int | None = None  # maximum rank of an adapter; None: adapters are not supported
    max_loras: int | None = None  # maximum number of adapters served by name; None: not supported
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    quantization: str = ""  # quantization of the weights during computation; empty if not quantized
    max_logprobs: int = 20  # maximum number of alternatives per token

    @property
    def can(self) -> Capabilities:
        """The engine's features and context length, which placement compares with a request's requirements."""
        return Capabilities(bits_of(self.features), self.max_context_tokens)

    @property
    def takes_images(self) -> bool:
        """True if the model accepts `GenerateRequest.images`."""
        return Feature.IMAGES in self.features


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint: name, dtype ("bfloat16", "float32", ...) and unsharded shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TensorNames(StrEnum):
    """The naming of the tensors in a push."""

    CHECKPOINT = "checkpoint"  # names and shapes of the model's safetensors files
    RUNTIME = "runtime"  # parameters of an engine worker, for the worker of the same rank in an equal engine


@dataclass(frozen=True, slots=True)
class PushSource:
    """A process that holds weights and listens for the engines' workers (`weight_transfer/protocol.py`).

    `addresses` ("host:port") has one entry, or one per worker of a replica in order of rank. For encrypted
    connections, `certificates` has the PEM certificate of each address.
    """

    addresses: tuple[str, ...]
    token: str
    tensors: tuple[TensorInfo, ...]
    names: TensorNames = TensorNames.CHECKPOINT
    certificates: tuple[str, ...] = ()
    # `ReplicaSync` sets the following fields.
    num_receivers: int = 0  # workers that the source waits for
    num_optional: int = 0  # further workers that may connect, for which the source does not wait
    is_optional: bool = False  # the receiver of this value is an optional one


class GroupBackend(StrEnum):
    """The transport of tensors from a trainer's own group to the workers."""

    VLLM = "vllm"  # NCCL as set up by vLLM's trainer helper; gloo if the engine has no GPU
    NCCL = "nccl"  # NCCL as set up by a torch.distributed process group
    GLOO = "gloo"
    IPC = "ipc"  # no group: each part has handles of memory on the workers' own GPUs


class Packing(StrEnum):
    """The packing of a part's tensors into broadcasts, in order and without gaps."""

    PLAIN = "plain"  # one broadcast per tensor
    PACKED = "packed"  # vLLM's: one broadcast per run of tensors that first exceeds `buffer_bytes`
    FLAT = "flat"  # one broadcast of all tensors: SGLang's flattened bucket


class GroupInit(msgspec.Struct, frozen=True, tag=True):
    """A trainer's broadcast group. The trainer is rank 0; the workers' ranks begin at `rank_offset`."""

    name: str
    backend: GroupBackend
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    packing: Packing = Packing.PLAIN  # the default of parts, as is `buffer_bytes`
    buffer_bytes: int = 0


class TransferPart(msgspec.Struct, frozen=True, tag=True):
    """Tensors that rank 0 of a group broadcasts, or that are in shared memory (`handles`)."""

    group: str
    tensors: tuple[TensorInfo, ...]  # empty, from a trainer: the tensors of the group's last part
    packing: Packing | None = None  # None: the group's packing
    buffer_bytes: int = 0
    handles: bytes = b""  # IPC handles in vLLM's pickled form
    version: int | None = None  # the version of the transfer, unless the end of the transfer names one
    transfer_id: str = ""  # set by the coordinator


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """Ends a group and its transfer."""

    name: str


GroupOrder: TypeAlias = GroupInit | TransferPart | LeaveGroup
"""A command about a trainer's group to an engine's workers."""


class PullVersion(msgspec.Struct, frozen=True, tag=True):
    """A command to a host: assemble a version from the folder `source`, and link the path `folder` to it."""

    source: str
    folder: str
    version: int
    base: str  # the checkpoint used as version 0 if the source has no version 0


TrainerOrder: TypeAlias = GroupOrder | PullVersion
"""A trainer's command to a replica."""


@dataclass(frozen=True, slots=True)
class PublishedSource:
    """A run's published versions in a directory or at an fsspec URL (docs/guides/published-versions.md).

    `names` are the folders of versions that are not in `weight_vNNNNNN`: the update's own version first, then the
    earlier versions that its deltas need.
    """

    store: str
    run: str
    names: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights for an engine, from exactly one source.

    Raises InvalidRequest unless there is exactly one source, and for a version that is not in [0, 2^63).
    """

    version: int
    directory: str | None = None  # safetensors files with checkpoint names; each version has its own directory
    push: PushSource | None = None
    adapter: str | None = None  # directory of a LoRA adapter in the PEFT format, for the served base weights
    transfer: str | None = None  # id of a transfer in a trainer's group, received by the replicas `receivers`
    receivers: tuple[str, ...] = ()
    is_forced: bool = False  # serve the weights without a canary check
    published: PublishedSource | None = None  # converted to a directory on the replica's host before staging
    # Identifies the content (`engine/weight_digest.py`); empty if unknown. An engine refuses a folder with a
    # different digest, and labels weights received from a peer with it.
    digest: str = ""
    is_probe: bool = False  # only return the folder's digest, without staging

    def __post_init__(self) -> None:
        if not 0 <= self.version < 1 << 63:
            raise InvalidRequest(f"a version must be in [0, 2^63), received {self.version}", param="version")
        sources = (self.directory, self.push, self.adapter, self.transfer, self.published)
        if (num_sources := sum(source is not None for source in sources)) != 1:
            raise InvalidRequest(
                f"an update has exactly one source (a directory, a push or an adapter), received {num_sources}",
                param="directory",
            )

    @property
    def is_repeatable(self) -> bool:
        """True if an engine can stage the update again later: all updates except pushes and trainers' transfers."""
        return self.push is None and self.transfer is None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version of a LoRA adapter that is served by name."""

    name: str
    version: int
    directory: str  # in the PEFT format
    digest: str = ""  # an engine that reads the folder refuses a different digest; empty accepts any


class StagingDevice(StrEnum):
    """The staging device: where staged weights are stored until their commit."""

    DEVICE = "device"  # in the accelerator's memory, in addition to the served weights
    HOST = "host"  # in (pinned) host memory
    FILES = "files"  # in their files, which the commit reads
    NOWHERE = "nowhere"  # blocking update: the memory is too small for staging, so the commit transfers the weights


@dataclass(frozen=True, slots=True)
class StageReport:
    """The result of staging weights."""

    staging_device: StagingDevice
    transport: str  # "directory", "published", "nccl", "ipc", "shm", "adapter"
    num_bytes: int = 0
    transfer_ms: float = 0.0  # from the first to the last byte; 0 if the commit transfers
    digest: str = ""  # digest of the source's tensors; empty if the commit transfers


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The result of a commit. Times are those of the slowest worker, during which generation was frozen."""

    swap_ms: float = 0.0
    verify_ms: float = 0.0
    num_verified: int = 0  # tensors or layers compared with the staged ones
    num_unverified: int = 0
    transfer_ms: float = 0.0  # only in a blocking update
    canary_ms: float = 0.0  # duration of the canary check, if the commit resumed the engine


class MemoryTag(StrEnum):
    """A part of a sleeping engine's memory that can be woken independently."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_MEMORY = frozenset(MemoryTag)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed generation. All pieces concatenate to the ids and logprobs of the `Generation`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersionSpan, ...]  # offsets are relative to this piece
    top_logprobs: TopLogprobs = ()  # this and the following fields are documented in `Generation`
    raw_logprobs: tuple[float, ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    aux: Aux | None = None  # routed experts may come with a later piece, or with the `Generation`


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress report of a running request, with the tokens since the last report."""

    tokens: Delta
    unavailable_s: float = 0.0  # seconds since the request's start during which its engine was frozen


OnProgress = Callable[[Progress], None]
"""A caller's callback for progress reports. If it raises, the request ends and the call raises its exception."""


class TokenEngine(Protocol):
    """The part of an engine that generation uses: token ids in, token ids out."""

    @property
    def info(self) -> EngineInfo:
        """The engine's fixed properties. Valid after `start`."""

    @property
    def weight_version(self) -> int | None:
        """The weight version with which new tokens are sampled; None while it is unknown (see `is_usable`)."""

    @property
    def is_usable(self) -> bool:
        """False while weights are dummy, discarded by a sleep(2), or in an unknown state after a failed commit."""

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        """Return each image's tokens, which depend only on its file.

        Works while paused. Raises UnsupportedParameter if the engine takes no images, and InvalidRequest for a file
        that it cannot read.
        """

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """Sample until the request stops. Waits during a pause. A cancelled call aborts the request.

        `on_progress` is called every few seconds with the new tokens (possibly none), first after one interval, and
        not at the end. Raises ContextLengthExceeded, InvalidRequest (bad ids, no space for one token),
        ModelNotFound (unknown adapter), EngineUnusable, EngineLost, EnginePaused, DeadlineExceeded or
        WeightVersionNotServed.
        """

    def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        """Like `generate`, but yield pieces and then the complete `Generation`. Progress reports have no tokens."""

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns the tokens so far with FinishReason.ABORT. No-op for an unknown id."""

    def load(self) -> Load:
        """Return the current load. Never blocks."""


class TrainerFollower(Protocol):
    """The part of an engine that a trainer's own broadcast group uses."""

    async def follow_trainer(self, order: TrainerOrder) -> None:
        """Join a trainer's group, receive a part of its transfer while decoding continues, or leave the group.

        The first part of a transfer drops previously staged weights; `stage` then uses all parts. Raises
        CheckpointUnreadable (the part does not match the model, or does not arrive) and the errors of `stage`.
        """


class AdapterServer(Protocol):
    """The part of an engine to which adapters are pushed by name. Decoding does not pause for them."""

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        """Serve an adapter version to all calls that begin from now on. Idempotent for the served version.

        Calls in flight keep the version with which they began. `directory` is not read after the return. Raises
        CheckpointUnreadable (format, base, rank), AdaptersFull, Conflict (the weights are asleep) or EngineError;
        the previously served version then stays.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. No-op for an unknown name. Raises AdapterInUse while calls in flight use it."""


class EngineControl(TrainerFollower, AdapterServer, Protocol):
    """The part of an engine that the weight controller uses: pauses, weight updates and sleep."""

    @property
    def weight_version(self) -> int | None:
        """See `TokenEngine`."""

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """Freeze generation, and return when no more tokens can be sampled. Idempotent.

        A second pause may be stricter: ABORT ends frozen requests, RECOMPUTE drops KV; WAIT after a completed pause
        has no effect. Raises Conflict if a resume ends a WAIT. RECOMPUTE drops the KV of requests in flight and the
        prefix cache. After a commit with FRESH or RECOMPUTE, new requests use no older KV, even if their
        `kv_version` allows it.
        """

    async def resume(self) -> float:
        """End a pause. Idempotent. Raises Conflict while memory is asleep.

        The first resume after a commit runs the canary check before any token is released. Returns the duration of
        the check in seconds, else 0. Raises WeightsRefused if the logits are broken, and WeightUpdateFailed if the
        check has no result; the engine's state is then that after a failed commit.
        """

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for requests in flight that do not accept `version`, unless frozen.

        Other requests continue. The commit of `version` aborts the remaining requests that do not accept it.
        """

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive and check new weights in addition to the served ones, while decoding continues.

        Drops previously staged weights. Raises CheckpointUnreadable (the new weights do not match the model, or do
        not arrive) or Conflict (the served weights are asleep); the engine then continues to serve. Cancellation
        leaves no running work.
        """

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        """Swap in the staged weights, verify them, and set `version`. The engine must be paused.

        With `resumes`, also resume, without a round trip in between. Raises Conflict (not paused, asleep, or
        another version is staged), or WeightUpdateFailed, after which the engine is unusable until a commit
        succeeds; with `resumes` also the errors of `resume`.
        """

    async def offer(self) -> PushSource | None:
        """Return a peer source of the served weights for other engines; None if this engine cannot send them.

        The source ends with the next commit, or after a few minutes.
        """

    async def sleep(self, level: int) -> None:
        """Freeze like `pause(KEEP)` and release memory. Idempotent. No-op if the engine has ended.

        Level 1 keeps the weights in host memory. Level 2 discards them: the engine is unusable until a commit, and
        a second sleep before that commit ends all requests with EngineUnusable. The KV of all requests is dropped
        and recomputed after the resume. Raises InvalidRequest if the engine cannot sleep.
        """

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        """Allocate memory again. The engine stays paused. Idempotent.

        Raises Conflict for the KV cache while the weight version is unknown.
        """


class Engine(TokenEngine, EngineControl, Protocol):
    """One engine on one or several GPUs, such as a tensor-parallel or expert-parallel group."""

    @property
    def weight_digest(self) -> str:
        """The digest of the served weights (`engine/weight_digest.py`); empty if unknown."""

    @property
    def is_paused(self) -> bool:
        """True while generation is frozen."""

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The released memory; empty while awake."""

    async def start(self) -> None:
        """Load the model and serve. Call once, on the event loop of all later calls."""

    async def close(self) -> None:
        """Stop the engine and free its resources. Requests in flight raise `EngineLost`. Idempotent."""

    async def check_health(self) -> None:
        """Raise EngineLost if the engine is dead. Works while paused."""
