"""The protocol between a worker and a process that runs one of its trajectories.

A frame has a kind (one byte), a body length (four bytes, big-endian), and one value encoded with the codec. Frames
are bounded and never contain pickles. Leases, addresses and keys stay in the worker; the process makes only the
calls in `WorkerCall`, for its own trajectory.
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
    """A call that a process makes through its worker. Its body is the encoded argument."""

    GENERATE = "generate"  # GenerateRequest -> Generation
    IMAGE_TOKENS = "image_tokens"  # tuple[Image, ...] -> tuple[ImageTokens, ...]
    ABORT = "abort"  # str -> None
    MOVE = "move"  # bool (True if the replica failed) -> Lease without its address
    KEEP_TURNS = "keep_turns"  # the arguments of WorkerPort.keep_turns -> its result
    KEPT_TURNS = "kept_turns"  # str (assignment id) -> the result of WorkerPort.kept_turns
    CHAT = "chat"  # ModelCall -> str


@dataclass(frozen=True, slots=True)
class Setup:
    """The first frame to a process: the configuration of its worker."""

    config: str  # the service's configuration as JSON
    worker: WorkerConfig
    takes_images: bool = False
    log_path: str = ""  # empty: no log
    turns_folder: str | None = None  # folder of turn journals; "": in the run's store; None: no journals

    @classmethod
    def of(
        cls, config: ServiceConfig, run_dir: Path, worker: WorkerConfig, *, takes_images: bool, stores_turns: bool
    ) -> Setup:
        """Return the setup of a worker's processes."""
        log_path, turns_folder = str(run_dir / LOG_NAME), "" if stores_turns else str(run_dir / TURNS_FOLDER)
        return cls(config.model_dump_json(), worker, takes_images, log_path, turns_folder)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Reports that a process has finished loading."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Starts a trajectory. Its lease has no address."""

    assignment: Assignment
    newest_version: int | None  # the newest weight version that the worker has observed


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests the end of the loop, because the client cancelled it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A call made by the process."""

    call_id: int
    call: WorkerCall
    body: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Reports that the process no longer waits for a call."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The progress of a running generation."""

    call_id: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Answered:
    """The encoded result of a call."""

    call_id: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The error of a call, as JSON."""

    call_id: int
    error: bytes
    http_status: int


@dataclass(frozen=True, slots=True)
class HandIn:
    """The result of a trajectory."""

    record: bytes  # encoded
    is_dropped: bool
    is_clean: bool  # no task or thread of the trajectory is left in the process
    num_malformed_calls: int
    num_logprob_problems: int


Frame: TypeAlias = Setup | Loaded | Begin | Cancel | Ask | Drop | Heard | Answered | Refused | HandIn
_KINDS: tuple[type[Frame], ...] = (Setup, Loaded, Begin, Cancel, Ask, Drop, Heard, Answered, Refused, HandIn)


def packed(value: Frame) -> bytes:
    """Return a value encoded as a frame."""
    body = encode(value)
    return _FRAME.pack(_KINDS.index(type(value)), len(body)) + body


async def next_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next value; None at the end. Raises InvalidRequest for a malformed or too long frame."""
    try:
        kind, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
        if kind >= len(_KINDS) or length > MAX_CALL_BYTES:
            raise InvalidRequest(
                f"invalid frame of kind {kind} with {length} bytes: there are {len(_KINDS)} kinds, and the limit "
                f"is {MAX_CALL_BYTES} bytes"
            )
        value: Frame = decode(await reader.readexactly(length), _KINDS[kind])
        return value
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
