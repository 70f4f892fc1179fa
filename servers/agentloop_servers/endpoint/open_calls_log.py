"""The open-call log: the calls that run, in a file that a process which dies leaves behind.

Ownership: the file, an append log, from `open` on. A call's frame is written before its first token is sampled,
another one once its end is on disk: each a few microseconds. When the file has become large, calls that go on are
written into a fresh one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from agentloop.errors import InvariantBroken, ServiceUnavailable, StorageFull
from agentloop.storage.append_log import append, frame, open_log, read_frames
from agentloop.storage.disk_room import is_full
from agentloop.trajectory.node import CallRecord, ModelCallState

ROTATE_BYTES = 256 << 10
"""Size of a file, from which on it is replaced if most of its calls have ended."""

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that was begun. Of two calls the one with the greater number began later."""

    number: int
    session_id: str
    call: CallRecord


class OpenCallsLog:
    """The calls of this process that have not ended, by session. Synchronous; of one thread once it is open."""

    def __init__(self, path: Path | None) -> None:
        """Without a path they are in memory alone."""
        self._path = path
        self._fd = -1
        self._num_bytes = 0
        self._rotate_at = ROTATE_BYTES
        self._held: dict[str, dict[str, tuple[OpenCall, bytes]]] = {}  # calls with their frames, in order

    def open(self) -> None:
        """Make the file anew, without an earlier process's calls.

        Raises StorageFull, or ServiceUnavailable when the disk fails otherwise.
        """
        assert self._path is not None
        try:
            self._path.unlink(missing_ok=True)  # not truncated: a process that lingers writes into its own file
            self._fd = open_log(self._path, is_new=True)
        except OSError as error:
            kind = StorageFull if is_full(error) else ServiceUnavailable
            raise kind(f"{self._path.name} cannot be made: {error}") from error

    def close(self) -> None:
        """Let go of the file, which stays as it is. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def add(self, number: int, session_id: str, call: CallRecord) -> None:
        """Keep an open call: its number, ids, digest and creation time. Raises ServiceUnavailable if it cannot be
        written, and InvariantBroken for a known call; nothing is kept then."""
        calls = self._held.get(session_id, {})
        if call.call_id in calls:
            raise InvariantBroken(f"call {call.call_id} has begun already")
        fields = number, session_id, call.call_id, call.digest.hex(), call.created_at
        framed = frame(msgspec.json.encode(fields))
        try:
            self._append(framed)
        except OSError as error:
            kind = StorageFull if is_full(error) else ServiceUnavailable
            raise kind(f"there is no room for another open call: {error}") from error
        calls[call.call_id] = OpenCall(number, session_id, call), framed
        self._held[session_id] = calls

    def of_call(self, session_id: str, call_id: str) -> OpenCall | None:
        """Return an open call; None if it is not open."""
        held = self._held.get(session_id, {}).get(call_id)
        return None if held is None else held[0]

    def of_session(self, session_id: str) -> list[OpenCall]:
        """Return a session's open calls, in the order they began."""
        return [opened for opened, _ in self._held.get(session_id, {}).values()]

    def remove(self, session_id: str, call_id: str) -> None:
        """Take out a call whose end is on disk. Unknown calls: no-op."""
        calls = self._held.get(session_id, {})
        held = calls.pop(call_id, None)
        if held is None:
            return
        if not calls:
            del self._held[session_id]
        try:
            self._append(frame(b"[%d]" % held[0].number))
        except (OSError, ServiceUnavailable) as error:
            _log.debug("end_not_logged", call=call_id, error=repr(error))  # the store has it, which counts

    def remove_all(self, session_id: str) -> None:
        """Take out all calls of a session that is gone."""
        for opened in self.of_session(session_id):
            self.remove(session_id, opened.call.call_id)

    def _append(self, framed: bytes) -> None:
        """Write a frame whole or not at all. Raises OSError, and ServiceUnavailable if the file is closed."""
        if self._path is None:
            return
        if self._fd < 0:
            raise ServiceUnavailable("the session store is closed")
        if self._num_bytes >= self._rotate_at:
            self._rotate()
        append(self._fd, framed)
        self._num_bytes += len(framed)

    def _rotate(self) -> None:
        """Go on in a file that has only the open calls. Where that fails, go on in this one."""
        assert self._path is not None
        frames = b"".join(framed for calls in self._held.values() for _, framed in calls.values())
        self._rotate_at = max(ROTATE_BYTES, 4 * len(frames), 2 * self._num_bytes)
        fresh, fd = self._path.with_name(f"{self._path.name}.fresh"), -1
        try:
            fresh.unlink(missing_ok=True)
            fd = open_log(fresh, is_new=True)
            append(fd, frames)
            if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):  # else it is another process's
                os.replace(fresh, self._path)
                self._fd, fd = fd, self._fd
                self._num_bytes, self._rotate_at = len(frames), max(ROTATE_BYTES, 4 * len(frames))
        except OSError:
            fresh.unlink(missing_ok=True)
        finally:
            if fd >= 0:
                os.close(fd)


def read_open_calls(path: Path) -> list[OpenCall]:
    """Return the calls in a dead process's file, in the order they began.

    A last frame that was cut off is none: its call has not begun. No file: nothing. Raises OSError.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found: dict[int, OpenCall] = {}
    for _, _, body in read_frames(data):
        number, *rest = msgspec.json.decode(body)
        if rest:
            session_id, call_id, digest, created_at = rest
            call = CallRecord(call_id, bytes.fromhex(digest), created_at, ModelCallState.OPEN)
            found[number] = OpenCall(number, session_id, call)
        else:
            found.pop(number, None)
    return sorted(found.values(), key=lambda opened: opened.number)
