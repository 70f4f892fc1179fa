"""The wire of an engine's private port: control bodies and answers, stream frames.

Bodies are MessagePack (`agentloop.codec`), never pickle. A stream is frames of a kind, a length and a body. While a
request is under way, a Progress comes every few seconds: silence means that the replica is gone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentloop.codec import encode
from agentloop.engine import Delta, EngineInfo, MemoryTag, Progress
from agentloop.types import Generation, KVPolicy, Load, PauseMode

T = TypeVar("T")

FRAME = struct.Struct(">BI")  # kind, length
FRAMES = "application/octet-stream"  # the content type of frames; a Generation alone comes as the codec's bytes
FRAME_KINDS: dict[int, type] = {
    0: Delta,
    1: Generation,
    2: Progress,
}
ERROR_FRAME = 255
PROBE_ID = "probe-"
"""The beginning of the ids of the coordinator's own requests, whose tokens belong to no turn."""

_KIND_OF = {kind: number for number, kind in FRAME_KINDS.items()}


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's state, as control answers carry it."""

    info: EngineInfo
    weight_version: int | None
    is_paused: bool
    is_usable: bool
    asleep: frozenset[MemoryTag]
    load: Load


@dataclass(frozen=True, slots=True)
class ControlAnswer(Generic[T]):
    """The answer to a control call: its result, and the engine's state after it."""

    value: T
    state: EngineState


@dataclass(frozen=True, slots=True)
class PauseOrder:
    mode: PauseMode
    kv_policy: KVPolicy


def frame(piece: Delta | Generation | Progress) -> bytes:
    """Encode one piece of a stream."""
    body = encode(piece)
    return FRAME.pack(_KIND_OF[type(piece)], len(body)) + body


def error_frame(body: bytes) -> bytes:
    """Encode the error that ends a stream."""
    return FRAME.pack(ERROR_FRAME, len(body)) + body
