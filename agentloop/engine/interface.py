"""The engine port: what the service asks of an inference engine, in two Protocols, and the values that cross it.

`TokenEngine` is what generation needs, `EngineControl` what the weight controller needs; a replica owns the whole
`Engine`. Adapters live with their vendor (`agentloop_servers/engines/`); `agentloop/simulation/` ships one without
a model. The rules that all adapters share are in `engine/lifecycle.py`. One contract suite (`tests/contract/`)
proves every engine:

- prompt ids go in exactly, sampled ids come out exactly, the stop token included; one logprob an id, under the
  distribution that its `logprobs_mode` names; version spans tile the ids;
- `pause` and `resume` are idempotent; a pause(KEEP) loses, repeats and changes no token; `abort` works while
  paused; a request sent while paused is held until the resume or refused with `EnginePaused`, never lost;
- a cancelled `generate` aborts in the engine;
- a request that does not accept the served version is refused, and ended by a commit of another (`VersionDemand`);
- a failed `commit` raises `WeightUpdateFailed` and leaves `is_usable` false until a later commit succeeds;
- `sleep` gives memory back and loses no request: those in flight freeze, and go on after `wake` and `resume`;
- the same prompt before and after an update shares KV only if `GenerateRequest.kv_version` says so;
- a call under an adapter has one version of it from its admission to its end, and shares KV with that alone.
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
from agentloop.values.capabilities import SAMPLING, Capabilities, Feature, bits_of
from agentloop.values.sampling import LogprobsMode


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts of an engine that are fixed at its start."""

    name: str  # "vllm", "simulated", ...
    max_context_tokens: int
    vocab_size: int
    block_size: int
    kv_capacity_tokens: int
    max_running: int
    num_workers: int = 1  # processes that hold weights: tensor-parallel size times data-parallel size
    weight_dtype: str | None = None  # "bfloat16", ...: the type weights are computed in; None: it has none
    can_sleep: bool = False
    features: frozenset[Feature] = SAMPLING  # what requests may ask of it
    lora_rank: int | None = None  # the largest of an adapter; None: it serves none
    max_loras: int | None = None  # adapters that it serves by name; None: none
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    quantization: str = ""  # of the weights that it computes with; empty: none

    @property
    def can(self) -> Capabilities:
        """The engine's features and context length, as placement compares them with a request's needs."""
        return Capabilities(bits_of(self.features), self.max_context_tokens)

    @property
    def takes_images(self) -> bool:
        """True if the model sees `GenerateRequest.images`."""
        return Feature.IMAGES in self.features


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint: its name, its dtype ("bfloat16", "float32", ...) and its whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TensorNames(StrEnum):
    """The naming of a push's tensors."""

    CHECKPOINT = "checkpoint"  # the names and shapes of the model's safetensors files
    RUNTIME = "runtime"  # the parameters of one engine worker, for the same worker of an equal engine


@dataclass(frozen=True, slots=True)
class PushSource:
    """A process that holds weights and listens for the engines' workers (`weight_transfer/protocol.py`).

    `addresses` ("host:port") has one entry, or one for each worker of a replica, in the order of their ranks. Where
    connections are encrypted, `certificates` has that of each address, in PEM.
    """

    addresses: tuple[str, ...]
    token: str
    tensors: tuple[TensorInfo, ...]
    names: TensorNames = TensorNames.CHECKPOINT
    certificates: tuple[str, ...] = ()
    num_receivers: int = 0  # workers that it waits for; this and what follows is filled in by `ReplicaSync`
    num_optional: int = 0  # workers that may come beside these, and are not waited for
    is_optional: bool = False  # the receiver of this value is one of those


class GroupBackend(StrEnum):
    """The way in which tensors of a trainer's own group reach the workers."""

    VLLM = "vllm"  # NCCL, as vLLM's trainer helper sets it up; gloo where the engine has no GPU
    NCCL = "nccl"  # NCCL, as a process group of torch.distributed sets it up
    GLOO = "gloo"
    IPC = "ipc"  # no group: each part has handles of memory on the workers' own GPUs


class Packing(StrEnum):
    """The broadcasts of a part's tensors, which lie in their order, without gaps."""

    PLAIN = "plain"  # one for each tensor
    PACKED = "packed"  # vLLM's: one for each run of tensors that first exceeds `buffer_bytes`
    FLAT = "flat"  # one for all: SGLang's flattened bucket


class GroupInit(msgspec.Struct, frozen=True, tag=True):
    """A trainer's broadcast group: rank 0 is the trainer, and workers have the ranks from `rank_offset` on."""

    name: str
    backend: GroupBackend
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    packing: Packing = Packing.PLAIN  # of parts that do not say, as `buffer_bytes`
    buffer_bytes: int = 0


class TransferPart(msgspec.Struct, frozen=True, tag=True):
    """Tensors that rank 0 of a group broadcasts, or that `handles` name, which are IPC's as vLLM pickles them."""

    group: str
    tensors: tuple[TensorInfo, ...]  # none, from a trainer: those of the group's last part
    packing: Packing | None = None  # None: the group's
    buffer_bytes: int = 0
    handles: bytes = b""
    version: int | None = None  # that the transfer becomes, if its end does not say
    transfer_id: str = ""  # filled in by the coordinator


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """The end of a group and of its transfer."""

    name: str


GroupOrder: TypeAlias = GroupInit | TransferPart | LeaveGroup
"""An order to an engine's workers about a trainer's group."""


class PullVersion(msgspec.Struct, frozen=True, tag=True):
    """An order to a host: make a version of those in the folder `source`, and have the path `folder` lead to it."""

    source: str
    folder: str
    version: int
    base: str  # the checkpoint that is version 0 where the source has none


TrainerOrder: TypeAlias = GroupOrder | PullVersion
"""An order to a replica."""


@dataclass(frozen=True, slots=True)
class PublishedSource:
    """A run's published versions in a store: a directory or a URL of fsspec (docs/guides/contracts.md)."""

    store: str
    run: str


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights for an engine, from exactly one source.

    `directory` holds safetensors files in checkpoint names, a new directory for every version. `adapter` is a
    directory with a LoRA adapter in the PEFT format, for the served base weights. `published` becomes a directory
    of the replica's host before an engine stages it. `transfer` identifies parts of a trainer's group that the
    replicas of `receivers` have received. `is_forced` weights are served even if they sample noise.

    `digest` identifies the content (`engine/weight_digest.py`); it is empty while unknown. An engine refuses a
    folder of another digest, and labels a peer's weights with it. With `is_probe` an engine stages nothing: it only
    returns the folder's digest. Raises InvalidRequest for no or several sources, and a version beyond 63 bits.
    """

    version: int
    directory: str | None = None
    push: PushSource | None = None
    adapter: str | None = None
    transfer: str | None = None
    receivers: tuple[str, ...] = ()
    is_forced: bool = False
    published: PublishedSource | None = None
    digest: str = ""
    is_probe: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.version < 1 << 63:
            raise InvalidRequest(f"a version is in [0, 2^63): {self.version}", param="version")
        sources = (self.directory, self.push, self.adapter, self.transfer, self.published)
        if sum(source is not None for source in sources) != 1:
            raise InvalidRequest("an update has one source: a directory, a push or an adapter", param="directory")

    @property
    def is_repeatable(self) -> bool:
        """True if an engine can still stage the update later: any but a push and a trainer's transfer."""
        return self.push is None and self.transfer is None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version of a LoRA adapter that is served by name. `directory` is in the PEFT format.

    An engine that has to read the folder refuses one of another `digest`; an empty one accepts any.
    """

    name: str
    version: int
    directory: str
    digest: str = ""


class HeldIn(StrEnum):
    """The place where staged weights wait for their commit."""

    DEVICE = "device"  # beside the served ones, in the accelerator's memory
    HOST = "host"  # in (pinned) host memory
    FILES = "files"  # in their files; the commit reads them
    NOWHERE = "nowhere"  # one phase: the memory does not allow staging, so the commit transfers


@dataclass(frozen=True, slots=True)
class StageReport:
    """The result of a stage. `transfer_ms`: from the first byte to the last, 0 if the commit transfers."""

    held_in: HeldIn
    transport: str  # "directory", "published", "nccl", "ipc", "shm", "adapter"
    num_bytes: int = 0
    transfer_ms: float = 0.0
    digest: str = ""  # of the source's tensors; empty if they arrive in the commit


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The result of a commit, which ran while generation was frozen. Times are the slowest worker's."""

    swap_ms: float = 0.0
    verify_ms: float = 0.0
    num_verified: int = 0  # tensors or layers compared with what was staged
    num_unverified: int = 0
    transfer_ms: float = 0.0  # one phase only
    canary_ms: float = 0.0  # of the canary check, if the commit resumed the engine


class MemoryTag(StrEnum):
    """A part of memory that a sleeping engine can take back on its own."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_MEMORY = frozenset(MemoryTag)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed generation: all pieces, concatenated, have the `Generation`'s ids and logprobs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersionSpan, ...]  # offsets within this piece
    top_logprobs: TopLogprobs = ()  # this and the following as in `Generation`
    raw_logprobs: tuple[float, ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED


@dataclass(frozen=True, slots=True)
class Progress:
    """A report on a request under way: its tokens since the last report.

    `standstill_s`: the seconds since the request's start in which its engine was frozen.
    """

    tokens: Delta
    standstill_s: float = 0.0


OnProgress = Callable[[Progress], None]
"""A caller's function for reports. An exception of it ends the request, and is raised by the call."""


class TokenEngine(Protocol):
    """An engine as generation uses it: token ids in, token ids out."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts. Valid after `start`."""

    @property
    def weight_version(self) -> int | None:
        """The version new tokens are sampled under; None while it is unknown (see `is_usable`)."""

    @property
    def is_usable(self) -> bool:
        """False while weights are dummy, discarded by a sleep(2), or of unknown state after a failed commit."""

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        """Return each image's tokens, which depend on its file alone.

        Works while paused. Raises UnsupportedParameter if the engine takes no images, InvalidRequest for a file
        that it cannot read.
        """

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """Sample until the request stops. Waits out a pause.

        `on_progress` is called every few seconds with the new tokens, which may be none: not before the first
        interval, nor after the end. Raises ContextLengthExceeded or InvalidRequest (bad ids, no room for one
        token), ModelNotFound (no such adapter), EngineUnusable, EngineLost, EnginePaused, DeadlineExceeded,
        WeightVersionNotServed. A cancelled call aborts the request.
        """

    def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        """Sample as `generate` does, in pieces, the last one the whole `Generation`. Reports have no tokens."""

    async def abort(self, request_id: str) -> None:
        """End a request now: its call returns the tokens so far and FinishReason.ABORT. Unknown id: no-op."""

    def load(self) -> Load:
        """Return the load now. Never blocks."""


class TrainerFollower(Protocol):
    """An engine as a trainer's own broadcast group uses it."""

    async def follow_trainer(self, order: TrainerOrder) -> None:
        """Join a trainer's group, receive a part of its transfer while decoding goes on, or leave the group.

        The first part of a transfer drops what was staged before; `stage` then takes all parts. Raises
        CheckpointUnreadable (the part does not fit, or does not arrive) and what `stage` raises.
        """


class AdapterServer(Protocol):
    """An engine as adapters by name are pushed to it. Nothing pauses for them."""

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        """Serve a version to the calls that begin from now on. Idempotent for the version that is served.

        Calls in flight end under the version they began with. `directory` is not read after the return. Raises
        CheckpointUnreadable (form, base, rank), AdaptersFull, Conflict (the weights are asleep) or EngineError, and
        what is served then stays.
        """

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more. Unknown: no-op. Raises AdapterInUse while calls are in flight under it."""


class EngineControl(TrainerFollower, AdapterServer, Protocol):
    """An engine as the weight controller uses it: pauses, weight updates and sleep."""

    @property
    def weight_version(self) -> int | None:
        """As in `TokenEngine`."""

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """Freeze generation; returns once no token can be sampled any more. Idempotent.

        A second pause may tighten the first: ABORT ends frozen requests, RECOMPUTE drops KV; WAIT after a completed
        pause changes nothing. Raises Conflict if a resume ends a WAIT. Under RECOMPUTE the KV of requests in flight
        and the prefix cache are dropped. After a commit under FRESH or RECOMPUTE no request that begins uses older
        KV, whatever its `kv_version` says.
        """

    async def resume(self) -> float:
        """End a pause. Idempotent. Raises Conflict while memory is asleep.

        The first resume after a commit runs the canary check: the engine answers a fixed prompt before it releases
        any token. Returns the seconds of the check, else 0. Raises WeightsRefused if the logits are broken,
        WeightUpdateFailed without one; the engine is then as after a failed commit.
        """

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        """Wait, `grace_s` at most, while a request in flight does not accept `version`; not in a frozen engine.

        All others go on. The commit of `version` then ends those that are left, as `abort` does.
        """

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive and check new weights beside the served ones, while decoding goes on.

        Drops what was staged before. Raises CheckpointUnreadable (the new weights do not fit, or do not arrive) or
        Conflict (the served ones are asleep); the engine then serves on. A cancelled stage leaves nothing running.
        """

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        """Swap in the staged weights, verify them, and set `version`. The engine must be paused.

        With `resumes` this is also the `resume` that follows, without a round trip between the two. Raises Conflict
        (not paused, asleep, or another version staged) or WeightUpdateFailed, after which the engine is not usable
        until a later commit succeeds; with `resumes` what `resume` raises too.
        """

    async def offer(self) -> PushSource | None:
        """Offer the served weights for another engine to stage; None if this engine cannot send them.

        The offer ends with the next commit, or after a few minutes.
        """

    async def sleep(self, level: int) -> None:
        """Freeze as `pause(KEEP)` does and give memory back. Idempotent.

        Level 1 keeps the weights in host memory; level 2 discards them: the engine is unusable until a commit.
        The KV of all requests is dropped, and computed again after the resume. A second sleep before the commit
        that follows level 2 ends all requests with EngineUnusable. No-op if the engine has ended: it holds no
        memory. Raises InvalidRequest if the engine cannot sleep.
        """

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        """Take memory back; the engine stays paused. Idempotent.

        Raises Conflict for the KV cache while the weights, which fill it, are of unknown version.
        """


class Engine(TokenEngine, EngineControl, Protocol):
    """One engine, of one or many GPUs: a tensor-parallel or an expert-parallel group behind one interface."""

    @property
    def weight_digest(self) -> str:
        """The digest of the weights of `weight_version` (`engine/weight_digest.py`); empty if it is not known."""

    @property
    def is_paused(self) -> bool:
        """True while generation is frozen."""

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The memory that is given back at the moment; empty while awake."""

    async def start(self) -> None:
        """Load the model and serve. Call once, on the event loop of all later calls."""

    async def close(self) -> None:
        """Stop the engine and free everything; requests in flight raise `EngineLost`. Idempotent."""

    async def check_health(self) -> None:
        """Raise EngineLost if the engine is dead; works while paused."""
