"""The wire format of an engine's private port: control messages and the frames of a stream.

Bodies are MessagePack (`values/codec.py`), never pickle. The token ids of a request come first, as a count and
int32 values, because MessagePack takes twice as long for them. A stream consists of frames with a kind, a length
and a body. While a request runs, a Progress frame is sent every few seconds, so silence means that the replica is
lost.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from agentloop.engine.interface import Delta, EngineInfo, MemoryTag, Progress
from agentloop.errors import InvalidRequest
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop.values.codec import decode, encode

T = TypeVar("T")

FRAME = struct.Struct(">BI")  # kind, length
FRAMES = "application/octet-stream"  # content type of frames; a single Generation is sent as MessagePack
FRAME_KINDS: dict[int, type] = {
    0: Delta,
    1: Generation,
    2: Progress,
}
ERROR_FRAME = 255
PROBE_ID = "probe-"
"""The prefix of the coordinator's own request ids, whose tokens belong to no turn."""

_KIND_OF = {kind: number for number, kind in FRAME_KINDS.items()}


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's state, as part of each control response."""

    info: EngineInfo
    weight_version: int | None
    is_paused: bool
    is_usable: bool
    asleep: frozenset[MemoryTag]
    load: Load


@dataclass(frozen=True, slots=True)
class ControlAnswer(Generic[T]):
    """The response to a control call: its result, and the engine's state after it."""

    value: T
    state: EngineState


@dataclass(frozen=True, slots=True)
class PauseOrder:
    mode: PauseMode
    kv_policy: KVPolicy


def request_body(request: GenerateRequest) -> bytes:
    """Encode a request. Raises InvalidRequest if a token id does not fit into int32."""
    ids = request.token_ids
    try:
        return struct.pack(f"<I{len(ids)}i", len(ids), *ids) + encode(replace(request, token_ids=()))
    except struct.error as error:
        raise InvalidRequest(f"a token id does not fit into int32: {error}", param="token_ids") from error


def request_of(body: bytes) -> GenerateRequest:
    """Decode a request. Raises InvalidRequest for malformed bytes."""
    try:
        num_ids, *_ = struct.unpack_from("<I", body)
        ids = struct.unpack_from(f"<{num_ids}i", body, 4)
    except struct.error as error:
        raise InvalidRequest(f"not a GenerateRequest: {error}") from error
    return replace(decode(body[4 + 4 * num_ids :], GenerateRequest), token_ids=ids)


def frame(piece: Delta | Generation | Progress) -> bytes:
    """Encode one frame of a stream."""
    body = encode(piece)
    return FRAME.pack(_KIND_OF[type(piece)], len(body)) + body


def error_frame(body: bytes) -> bytes:
    """Encode the error frame that ends a stream."""
    return FRAME.pack(ERROR_FRAME, len(body)) + body
