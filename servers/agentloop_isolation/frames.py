"""The frames between a worker and a process that runs one of its trajectories: bounded, and never pickle.

A frame is its kind (one byte), the length of its body (four, big-endian), and the codec's bytes of one value. The
worker keeps leases, addresses and keys. What the process asks of it are the calls in `WorkerCall`, for its own
trajectory.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from agentloop.api.coordinator import MAX_CALL_BYTES
from agentloop.engine.interface import Progress
from agentloop.errors import InvalidRequest
from agentloop.observability.logs import LOG_NAME
from agentloop.rollout.journal_homes import TURNS_FOLDER
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.types import Assignment
from agentloop.values.codec import decode, encode
from agentloop_servers.config.service import ServiceConfig

_FRAME = struct.Struct(">BI")


class WorkerCall(StrEnum):
    """A call that a process makes through its worker. The body is the codec's bytes of its one argument."""

    GENERATE = "generate"  # GenerateRequest -> Generation
    IMAGE_TOKENS = "image_tokens"  # tuple[Image, ...] -> tuple[ImageTokens, ...]
    ABORT = "abort"  # str -> None
    MOVE = "move"  # bool, that the replica failed -> Lease without its address
    KEEP_TURNS = "keep_turns"  # the arguments of WorkerPort.keep_turns -> its answer
    KEPT_TURNS = "kept_turns"  # str, the assignment -> the answer of WorkerPort.kept_turns
    CHAT = "chat"  # ModelCall -> str


@dataclass(frozen=True, slots=True)
class Setup:
    """The first frame to a process: all that it needs to load the same as its worker."""

    config: str  # of the service, as JSON
    worker: WorkerConfig
    takes_images: bool = False
    log_path: str = ""  # none: it logs nothing
    turns_folder: str | None = None  # of the journals of turns; "": they are in the run's store, None: nowhere

    @classmethod
    def of(
        cls, config: ServiceConfig, run_dir: Path, worker: WorkerConfig, *, takes_images: bool, stores_turns: bool
    ) -> Setup:
        """Return the setup of a worker's processes."""
        log_path, turns_folder = str(run_dir / LOG_NAME), "" if stores_turns else str(run_dir / TURNS_FOLDER)
        return cls(config.model_dump_json(), worker, takes_images, log_path, turns_folder)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The news that a process has loaded everything."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The order to run a trajectory. Its lease has no address."""

    assignment: Assignment
    newest_version: int | None  # of weights, that the worker has heard of


@dataclass(frozen=True, slots=True)
class Cancel:
    """The order to end the loop, because the client asks for that."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of the process."""

    call_id: int
    call: WorkerCall
    body: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """The process waits for a call no more."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The progress of a generation under way."""

    call_id: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a call: the codec's bytes of what it returned."""

    call_id: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that a call ended with, as JSON."""

    call_id: int
    error: bytes
    http_status: int


@dataclass(frozen=True, slots=True)
class HandIn:
    """The trajectory's record, encoded. A process that `is_clean` has no task or thread of it left."""

    record: bytes
    is_dropped: bool
    is_clean: bool
    num_malformed_calls: int
    num_logprob_problems: int


Frame: TypeAlias = Setup | Loaded | Begin | Cancel | Ask | Drop | Heard | Answered | Refused | HandIn
_KINDS: tuple[type[Frame], ...] = (Setup, Loaded, Begin, Cancel, Ask, Drop, Heard, Answered, Refused, HandIn)


def packed(value: Frame) -> bytes:
    """Return a value as a frame."""
    body = encode(value)
    return _FRAME.pack(_KINDS.index(type(value)), len(body)) + body


async def next_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next value; None at the end. Raises InvalidRequest for a malformed or too long frame."""
    try:
        kind, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
        if kind >= len(_KINDS) or length > MAX_CALL_BYTES:
            raise InvalidRequest(f"no frame: kind {kind}, {length} bytes")
        value: Frame = decode(await reader.readexactly(length), _KINDS[kind])
        return value
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
