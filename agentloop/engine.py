"""The engine port: what the service asks of an inference engine, in two Protocols, and the values that cross it.

`TokenEngine` is what generation needs, `EngineControl` what the weight controller needs; a replica owns the whole
`Engine`. Adapters live with their vendor (`agentloop_servers/engines/`); `agentloop/simulation/` ships one without
a model. The rules that all adapters share are in `engine_lifecycle.py`. One contract suite (`tests/contract/`)
proves every engine:

- prompt ids go in exactly, sampled ids come out exactly, the stop token included; one logprob an id, under the
  distribution that its `logprobs_mode` names; version spans tile the ids;
- `pause` and `resume` are idempotent; a pause(KEEP) loses, repeats and changes no token; `abort` works while
  paused; a request sent while paused is held until the resume or refused with `EnginePaused`, never lost;
- a cancelled `generate` aborts in the engine;
- a failed `commit` raises `WeightUpdateFailed` and leaves `is_usable` false until a later commit succeeds;
- `sleep` gives memory back and loses no request: those in flight freeze, and go on after `wake` and `resume`;
- the same prompt before and after an update shares KV only if `GenerateRequest.kv_version` says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from agentloop.capabilities import SAMPLING, Capabilities, Feature, bits_of
from agentloop.errors import InvalidRequest
from agentloop.images import Image, ImageTokens
from agentloop.sampling import LogprobsMode
from agentloop.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    Load,
    PauseMode,
    TopLogprobs,
    WeightVersionSpan,
)


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
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED

    @property
    def can(self) -> Capabilities:
        """The engine's abilities, as placement and leases know them."""
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

    `addresses` ("host:port") has one entry, or one for each worker of a replica, in the order of their ranks.
    """

    addresses: tuple[str, ...]
    token: str
    tensors: tuple[TensorInfo, ...]
    names: TensorNames = TensorNames.CHECKPOINT
    num_receivers: int = 0  # workers that it waits for; this and what follows is filled in by `ReplicaSync`
    num_optional: int = 0  # workers that may come beside these, and are not waited for
    is_optional: bool = False  # whoever is told this is one of those


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights on offer, from exactly one source. Raises InvalidRequest for none or several, and for a version
    that is none of 63 bits.

    `directory` holds safetensors files in checkpoint names, and is a new one for every version; `adapter` is a
    directory with a LoRA adapter in the PEFT format, for the base weights that are served. Weights that are
    `is_forced` are served whatever they make of the model.
    """

    version: int
    directory: str | None = None
    push: PushSource | None = None
    adapter: str | None = None
    is_forced: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.version < 1 << 63:
            raise InvalidRequest(f"a version is in [0, 2^63): {self.version}", param="version")
        if sum(source is not None for source in (self.directory, self.push, self.adapter)) != 1:
            raise InvalidRequest("an update has one source: a directory, a push or an adapter", param="directory")

    @property
    def is_repeatable(self) -> bool:
        """True if its source is still there for an engine that comes late."""
        return self.push is None


class HeldIn(StrEnum):
    """The place where staged weights wait for their commit."""

    DEVICE = "device"  # beside the served ones, in the accelerator's memory
    HOST = "host"  # in (pinned) host memory
    FILES = "files"  # in their files; the commit reads them
    NOWHERE = "nowhere"  # one phase: the memory does not allow staging, so the commit transfers


@dataclass(frozen=True, slots=True)
class StageReport:
    """The result of a stage. `transfer_ms` is from the first byte to the last, 0 where the commit transfers."""

    held_in: HeldIn
    transport: str  # "directory", "nccl", "ipc", "shm", "adapter"
    num_bytes: int = 0
    transfer_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The result of a commit, all of it while generation was frozen. Times are the slowest worker's."""

    swap_ms: float = 0.0
    verify_ms: float = 0.0
    num_verified: int = 0  # tensors or layers compared with what was staged
    num_unverified: int = 0
    transfer_ms: float = 0.0  # one phase only


class MemoryTag(StrEnum):
    """A part of memory that a sleeping engine can take back on its own."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_MEMORY = frozenset(MemoryTag)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed generation; the pieces' ids and logprobs concatenate to the `Generation`'s."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersionSpan, ...]  # offsets within this piece
    top_logprobs: TopLogprobs = ()  # this and the following as in `Generation`
    raw_logprobs: tuple[float, ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED


@dataclass(frozen=True, slots=True)
class Progress:
    """A report on a request under way: its tokens since the last report, and the seconds of it in all in which its
    engine was frozen."""

    tokens: Delta
    standstill_s: float = 0.0


OnProgress = Callable[[Progress], None]
"""A caller's ear. What it raises ends the request, and is raised."""


class TokenEngine(Protocol):
    """Token ids in, token ids out."""

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
        """Return what the model reads for each image: the same for the same file, whatever stands beside it.

        Works while paused. Raises UnsupportedParameter if the engine takes no images, InvalidRequest for one that
        it cannot read.
        """

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """Sample to a stop. Waits out a pause.

        `on_progress` hears every few seconds what is new, nothing too: not before the first interval, nor after the
        end. Raises ContextLengthExceeded or InvalidRequest (bad ids, no room for one token), EngineUnusable,
        EngineLost, EnginePaused, DeadlineExceeded. Cancelling the call aborts the request in the engine.
        """

    def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        """As `generate`, in pieces; the last item is the whole `Generation`. `on_progress` hears of no tokens."""

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what it has with FinishReason.ABORT. Unknown ids: no-op."""

    def load(self) -> Load:
        """Return the load now. Never blocks."""


class EngineControl(Protocol):
    """Pauses, weight updates and sleep."""

    @property
    def is_paused(self) -> bool:
        """True while generation is frozen."""

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The memory that is given back at the moment; empty while awake."""

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """Freeze generation; returns once no token can be sampled any more. Idempotent.

        A second pause may tighten the first: ABORT ends what KEEP froze, RECOMPUTE drops KV; WAIT after a completed
        pause changes nothing. Raises Conflict if a resume ends a WAIT. Under RECOMPUTE the KV of requests in flight
        and the prefix cache are dropped. After a commit under FRESH or RECOMPUTE no request that begins uses older
        KV, whatever its `kv_version` says.
        """

    async def resume(self) -> float:
        """Go on. Idempotent. Raises Conflict while memory is asleep.

        The first resume after a commit looks at a fixed prompt, and gives out no token before its answer: returns
        the seconds that took, else 0. Raises WeightsRefused if the new weights make the model noise,
        WeightUpdateFailed without an answer; the engine is then as after a failed commit.
        """

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive and check new weights beside the old ones, decoding goes on. Its weights must be awake.

        Raises CheckpointUnreadable (they do not fit, or cannot be had) or Conflict (asleep); the engine then goes
        on as before, and what was staged before is dropped. A cancelled stage leaves nothing running.
        """

    async def commit(self, version: int) -> CommitReport:
        """Swap in the staged weights, prove that they arrived, and stamp `version`. Must be paused.

        Raises Conflict (not paused, asleep, or another version staged) or WeightUpdateFailed, after which the
        engine is not usable until a later commit succeeds.
        """

    async def offer(self) -> PushSource | None:
        """Offer the served weights for another engine to stage; None if this engine cannot give them.

        The offer ends with the next commit, or after a few minutes.
        """

    async def sleep(self, level: int) -> None:
        """Freeze as `pause(KEEP)` does and give memory back. Idempotent; raises InvalidRequest if it cannot.

        Level 1 keeps the weights in host memory; level 2 discards them: the engine is unusable until a commit.
        The KV of all requests is dropped, and computed again after the resume. Raises Conflict if discarded weights
        are awake: they are committed first.
        """

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        """Take memory back; the engine stays paused. Idempotent.

        Raises Conflict for the KV cache while the weights are of unknown version: nothing could fill it.
        """


class Engine(TokenEngine, EngineControl, Protocol):
    """One engine: a tensor-parallel group or an expert-parallel gang behind one front door."""

    async def start(self) -> None:
        """Load and get ready. Call once, on the loop that will call the other methods."""

    async def close(self) -> None:
        """Stop and free everything; requests in flight raise `EngineLost`. Idempotent."""

    async def check_health(self) -> None:
        """Raises EngineLost if the engine is dead; works while paused."""
