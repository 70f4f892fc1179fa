"""The Engine port: what the rest of the service asks of an inference engine.

Adapters live with their vendor (`agentloop_servers/engines/`); `simulate.py` ships one without a model. One
contract suite (`tests/contract/`) proves every engine:

- prompt ids go in exactly, sampled ids come out exactly, the stop token included; one logprob an id, under the
  sampling distribution; version spans tile the ids;
- `pause` and `resume` are idempotent; a pause(KEEP) loses, repeats and changes no token; `abort` works while
  paused; a request sent while paused is held until the resume or refused with `EnginePaused`, never lost;
- a cancelled `generate` aborts in the engine;
- a failed `commit` raises `WeightUpdateFailed` and leaves `is_usable` false until a later commit succeeds;
- the same prompt before and after an update shares KV only if `GenerateRequest.kv_version` says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from agentloop.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    Load,
    PauseMode,
    WeightVersionSpan,
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, fixed at start."""

    name: str  # "vllm", "simulated", ...
    max_context_tokens: int
    vocab_size: int
    block_size: int
    kv_capacity_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights on offer: a folder of safetensors files, in checkpoint names, new for every version."""

    version: int
    directory: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed generation; the pieces' ids and logprobs concatenate to the `Generation`'s."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersionSpan, ...]  # offsets within this piece


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """KV of these blocks is now reusable. Hashes are the engine's own and chain from `parent_hash`."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    kv_version: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """KV of these blocks is gone."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No KV of any finished request is reusable any more."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class Engine(Protocol):
    """One engine: a tensor-parallel group or an expert-parallel gang behind one front door."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts. Valid after `start`."""

    @property
    def weight_version(self) -> int | None:
        """The version new tokens are sampled under; None before the first commit of a dummy-loaded engine."""

    @property
    def is_paused(self) -> bool:
        """Whether generation is frozen."""

    @property
    def is_usable(self) -> bool:
        """False while weights are dummy, or of unknown state after a failed commit."""

    async def start(self) -> None:
        """Load and get ready. Call once, on the loop that will call the other methods."""

    async def close(self) -> None:
        """Stop and free everything; requests in flight raise `EngineLost`. Idempotent."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample to a stop. Waits out a pause.

        Raises ContextLengthExceeded or InvalidRequest (bad ids, no room for one token), EngineUnusable,
        EngineLost, EnginePaused. Cancelling the call aborts the request in the engine.
        """

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        """As `generate`, in pieces; the last item is the whole `Generation`."""

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what it has with FinishReason.ABORT. Unknown ids: no-op."""

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """Freeze generation; returns once no token can be sampled any more. Idempotent.

        Under RECOMPUTE the KV of requests in flight and the prefix cache are dropped.
        """

    async def resume(self) -> None:
        """Go on. Idempotent."""

    async def stage(self, update: WeightUpdate) -> None:
        """Receive and check new weights beside the old ones, decoding goes on.

        Raises CheckpointUnreadable; the engine then goes on as before.
        """

    async def commit(self, version: int) -> None:
        """Swap in the staged weights and stamp `version`. Must be paused.

        Raises Conflict (not paused, or another version staged) or WeightUpdateFailed, after which the engine
        is not usable until a later commit succeeds.
        """

    def load(self) -> Load:
        """The load now. Never blocks."""

    def kv_events(self) -> AsyncIterator[KVEvent]:
        """What enters and leaves the prefix cache, from now on."""

    async def check_health(self) -> None:
        """Raises EngineLost if the engine is dead; works while paused."""
