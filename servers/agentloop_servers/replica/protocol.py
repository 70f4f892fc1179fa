"""What the two ends of a data plane say to each other: headers, control bodies and answers, stream frames.

Bodies are MessagePack (`agentloop.codec`), never pickle. A stream is frames of a kind, a length and a body.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

from agentloop.codec import encode
from agentloop.engine import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CommitReport,
    Delta,
    EngineInfo,
    KVEvent,
    MemoryTag,
    PushSource,
    StageReport,
)
from agentloop.errors import Conflict
from agentloop.types import Generation, KVPolicy, Load, PauseMode

SECRET_HEADER = "x-agentloop-secret"
EPOCH_HEADER = "x-agentloop-epoch"
ORDER_HEADER = "x-agentloop-order"

FRAME = struct.Struct(">BI")  # kind, length
FRAME_KINDS: dict[int, type] = {0: Delta, 1: Generation, 2: BlocksStored, 3: BlocksRemoved, 4: AllBlocksCleared}
ERROR_FRAME = 255
_KIND_OF = {kind: number for number, kind in FRAME_KINDS.items()}


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a control answer says of the engine."""

    info: EngineInfo
    weight_version: int | None
    is_paused: bool
    is_usable: bool
    asleep: frozenset[MemoryTag]
    load: Load


@dataclass(frozen=True, slots=True)
class StageAnswer:
    report: StageReport
    state: EngineState


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    report: CommitReport
    state: EngineState


@dataclass(frozen=True, slots=True)
class OfferAnswer:
    source: PushSource | None
    state: EngineState


@dataclass(frozen=True, slots=True)
class PauseOrder:
    mode: PauseMode
    kv_policy: KVPolicy


@dataclass(frozen=True, slots=True, order=True)
class OrderNumber:
    """The place of a control order among all of them: `number` grows within a controller, `epoch` over them."""

    epoch: int
    number: int


class Lane(StrEnum):
    """Orders that are counted together, because one may undo another."""

    FREEZE = "freeze"  # pause, resume, commit, sleep, wake
    STAGE = "stage"  # minutes long: what freezes and goes on meanwhile does not make it late


class Fence:
    """Lets each control order pass once and none after a newer one of its lane.

    An order whose caller has given up, a copy of one, or one of a coordinator that was replaced may arrive at any
    time later: a pause after its resume would freeze a replica for which nobody feels responsible.
    """

    def __init__(self) -> None:
        self._last: dict[Lane, OrderNumber] = {}

    def admit(self, lane: Lane, order: OrderNumber) -> None:
        """Raises Conflict if the order is late or was here before."""
        last = self._last.get(lane)
        if last is not None and order <= last:
            raise Conflict(f"order {order.epoch}.{order.number} came after {last.epoch}.{last.number}")
        self._last[lane] = order


def frame(piece: Delta | Generation | KVEvent) -> bytes:
    """One piece of a stream."""
    body = encode(piece)
    return FRAME.pack(_KIND_OF[type(piece)], len(body)) + body


def error_frame(body: bytes) -> bytes:
    """The end of a stream that failed."""
    return FRAME.pack(ERROR_FRAME, len(body)) + body
