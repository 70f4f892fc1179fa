"""The calls that run, in a mapped file: what a process that dies leaves of them, at the price of a memory copy.

Ownership: the file, from `open` on: slots of one size, with one call each. Invariants: a slot's mark is written
after all else in it, and taken off once the call's end is on disk. So at whatever moment the process is killed, a
marked slot is whole, and a call that went on has a mark or an end. What is written survives a killed process, as
the store's commits do, not a power cut.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from agentloop.errors import InvariantBroken, ServiceUnavailable
from agentloop.trajectory import CallRecord, ModelCallState

SLOT_BYTES = 256
NUM_CHUNK_SLOTS = 256  # the file grows by so many

_CHUNK_BYTES = NUM_CHUNK_SLOTS * SLOT_BYTES
_MARK_AT = SLOT_BYTES - 1
_CRC_BYTES = 4
_HEAD = struct.Struct("<QqBBB")  # number, created_at, lengths of session id, call id and digest
_MAX_BYTES = (128, 64, 32)  # session id, call id and digest: with the head, less than a slot


@dataclass(frozen=True, slots=True)
class Intent:
    """A call that was begun. Of two calls the one with the greater number began later."""

    number: int
    session_id: str
    call: CallRecord


class Intents:
    """The calls of this process that have not ended, by session. Synchronous; of one thread once it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._fd = -1
        self._num_slots = 0
        self._free: list[int] = []  # the last one is taken next: few pages are ever touched
        self._held: dict[str, dict[str, tuple[int, Intent]]] = {}  # slots and what is in them

    def open(self) -> None:
        """Make the file anew: what an earlier process left is gone. Raises ServiceUnavailable."""
        try:
            self._path.unlink(missing_ok=True)  # not truncated: a process that still has it mapped would be killed
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._grow()
        except OSError as error:
            self.close()
            raise ServiceUnavailable(f"{self._path.name} cannot be made: {error}") from error

    def close(self) -> None:
        """Let go of the file, which stays as it is. Idempotent."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin(self, number: int, session_id: str, call: CallRecord) -> None:
        """Keep an open call, of which the number, ids, digest and creation time count.

        Raises ServiceUnavailable if there is no room for it, and InvariantBroken for one that has begun or does not
        fit; nothing is kept then.
        """
        calls = self._held.get(session_id, {})
        if call.call_id in calls:
            raise InvariantBroken(f"call {call.call_id} has begun already")
        body = _packed(number, session_id, call)
        if self._map is None:
            raise ServiceUnavailable("the session store is closed")
        if not self._free:
            try:
                self._grow()
            except OSError as error:
                raise ServiceUnavailable(f"there is no room for another open call: {error}") from error
        slot = self._free.pop()
        start = slot * SLOT_BYTES
        self._map[start : start + len(body)] = body
        self._map[start + _MARK_AT] = 1
        calls[call.call_id] = slot, Intent(number, session_id, call)
        self._held[session_id] = calls

    def of_call(self, session_id: str, call_id: str) -> Intent | None:
        """What a call began with; None if it does not run."""
        held = self._held.get(session_id, {}).get(call_id)
        return None if held is None else held[1]

    def of_session(self, session_id: str) -> list[Intent]:
        """A session's open calls, in the order they began."""
        return [intent for _, intent in self._held.get(session_id, {}).values()]

    def end(self, session_id: str, call_id: str) -> None:
        """A call's end is on disk. Unknown calls: no-op."""
        calls = self._held.get(session_id, {})
        held = calls.pop(call_id, None)
        if held is None:
            return
        if not calls:
            del self._held[session_id]
        slot = held[0]
        if self._map is not None:
            self._map[slot * SLOT_BYTES + _MARK_AT] = 0
        self._free.append(slot)

    def end_all(self, session_id: str) -> None:
        """A session and all that it had is gone."""
        for intent in self.of_session(session_id):
            self.end(session_id, intent.call.call_id)

    def _grow(self) -> None:
        """One chunk more. Its blocks are there before it is mapped: a full disk must not show as a SIGBUS."""
        num_bytes = self._num_slots * SLOT_BYTES
        os.posix_fallocate(self._fd, num_bytes, _CHUNK_BYTES)
        if self._map is None:
            self._map = mmap.mmap(self._fd, _CHUNK_BYTES)
        else:
            self._map.resize(num_bytes + _CHUNK_BYTES)
        self._free += range(self._num_slots + NUM_CHUNK_SLOTS - 1, self._num_slots - 1, -1)
        self._num_slots += NUM_CHUNK_SLOTS


def read_intents(path: Path) -> tuple[list[Intent], int]:
    """What a process left in its file, in the order the calls began, and how many slots are damaged.

    No file: nothing. Raises OSError.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    marked = [at for at in range(0, len(data) - _MARK_AT, SLOT_BYTES) if data[at + _MARK_AT]]
    read = [_unpacked(data[at : at + _MARK_AT]) for at in marked]
    found = [intent for intent in read if intent is not None]
    return sorted(found, key=lambda intent: intent.number), len(read) - len(found)


def _packed(number: int, session_id: str, call: CallRecord) -> bytes:
    """A slot's content but for its mark."""
    session, call_id, digest = session_id.encode(), call.call_id.encode(), call.digest
    lengths = len(session), len(call_id), len(digest)
    if any(length > bound for length, bound in zip(lengths, _MAX_BYTES, strict=True)):
        raise InvariantBroken(f"ids and digest of call {call.call_id!r} do not fit: {lengths} bytes")
    body = _HEAD.pack(number, call.created_at, *lengths) + session + call_id + digest
    return zlib.crc32(body).to_bytes(_CRC_BYTES, "little") + body


def _unpacked(slot: bytes) -> Intent | None:
    """None if it is damaged."""
    number, created_at, *lengths = _HEAD.unpack_from(slot, _CRC_BYTES)
    end = _CRC_BYTES + _HEAD.size + sum(lengths)
    if zlib.crc32(slot[_CRC_BYTES:end]).to_bytes(_CRC_BYTES, "little") != slot[:_CRC_BYTES]:
        return None
    session_end = _CRC_BYTES + _HEAD.size + lengths[0]
    call_end = session_end + lengths[1]
    session_id = slot[_CRC_BYTES + _HEAD.size : session_end].decode()
    call_id, digest = slot[session_end:call_end].decode(), slot[call_end:end]
    return Intent(number, session_id, CallRecord(call_id, digest, created_at, ModelCallState.OPEN))
