"""Write-ahead log of open calls: the file from which the next process learns which calls ran when this one died.

A call's frame is written before its first token is sampled, a second one once its result is on disk. When the file
is large, the calls that are still open are copied to a new file. The log owns the file from `open` on.
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
"""A file of this size is replaced if most of its calls have ended."""

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that has started. Numbers increase in the order in which calls start."""

    number: int
    session_id: str
    call: CallRecord


class OpenCallsLog:
    """The running calls of this process, by session. Synchronous, and used by one thread once it is open."""

    def __init__(self, path: Path | None) -> None:
        """Without a path the calls are kept in memory only."""
        self._path = path
        self._fd = -1
        self._num_bytes = 0
        self._rotate_at = ROTATE_BYTES
        self._held: dict[str, dict[str, tuple[OpenCall, bytes]]] = {}  # calls with their frames, in order

    def open(self) -> None:
        """Create the file empty, in place of an earlier process's file.

        Raises StorageFull, or ServiceUnavailable if the disk fails otherwise.
        """
        assert self._path is not None
        try:
            # Unlink instead of truncate: an old process that still runs then writes to its own file.
            self._path.unlink(missing_ok=True)
            self._fd = open_log(self._path, is_new=True)
        except OSError as error:
            kind = StorageFull if is_full(error) else ServiceUnavailable
            raise kind(f"{self._path.name} cannot be created: {error}") from error

    def close(self) -> None:
        """Close the file and keep it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def add(self, number: int, session_id: str, call: CallRecord) -> None:
        """Add an open call: its number, ids, digest and creation time.

        Raises ServiceUnavailable or StorageFull if it cannot be written, and InvariantBroken for a known call;
        nothing is added then.
        """
        calls = self._held.get(session_id, {})
        if call.call_id in calls:
            raise InvariantBroken(f"call {call.call_id} is already open")
        fields = number, session_id, call.call_id, call.digest.hex(), call.created_at
        framed = frame(msgspec.json.encode(fields))
        try:
            self._append(framed)
        except OSError as error:
            kind = StorageFull if is_full(error) else ServiceUnavailable
            raise kind(f"the call cannot be logged as open: {error}") from error
        calls[call.call_id] = OpenCall(number, session_id, call), framed
        self._held[session_id] = calls

    def of_call(self, session_id: str, call_id: str) -> OpenCall | None:
        """Return an open call; None if it is not open."""
        held = self._held.get(session_id, {}).get(call_id)
        return None if held is None else held[0]

    def of_session(self, session_id: str) -> list[OpenCall]:
        """Return a session's open calls in the order in which they started."""
        return [opened for opened, _ in self._held.get(session_id, {}).values()]

    def remove(self, session_id: str, call_id: str) -> None:
        """Remove a call whose result is on disk. Unknown calls are ignored."""
        calls = self._held.get(session_id, {})
        held = calls.pop(call_id, None)
        if held is None:
            return
        if not calls:
            del self._held[session_id]
        try:
            self._append(frame(b"[%d]" % held[0].number))
        except (OSError, ServiceUnavailable) as error:
            # The result in the store takes precedence over the log.
            _log.debug("end_not_logged", call=call_id, error=repr(error))

    def remove_all(self, session_id: str) -> None:
        """Remove all calls of a deleted session."""
        for opened in self.of_session(session_id):
            self.remove(session_id, opened.call.call_id)

    def _append(self, framed: bytes) -> None:
        """Append a complete frame. Raises OSError, and ServiceUnavailable if the file is closed."""
        if self._path is None:
            return
        if self._fd < 0:
            raise ServiceUnavailable("the session store is closed")
        if self._num_bytes >= self._rotate_at:
            self._rotate()
        append(self._fd, framed)
        self._num_bytes += len(framed)

    def _rotate(self) -> None:
        """Continue in a new file that has only the open calls; if that fails, in the current file."""
        assert self._path is not None
        frames = b"".join(framed for calls in self._held.values() for _, framed in calls.values())
        self._rotate_at = max(ROTATE_BYTES, 4 * len(frames), 2 * self._num_bytes)
        fresh, fd = self._path.with_name(f"{self._path.name}.fresh"), -1
        try:
            fresh.unlink(missing_ok=True)
            fd = open_log(fresh, is_new=True)
            append(fd, frames)
            # Otherwise another process has replaced the file.
            if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                os.replace(fresh, self._path)
                self._fd, fd = fd, self._fd
                self._num_bytes, self._rotate_at = len(frames), max(ROTATE_BYTES, 4 * len(frames))
        except OSError:
            fresh.unlink(missing_ok=True)
        finally:
            if fd >= 0:
                os.close(fd)


def read_open_calls(path: Path) -> list[OpenCall]:
    """Return the calls in a dead process's file, in the order in which they started.

    A truncated last frame is ignored: its call was never sampled. Without a file there are no calls. Raises
    OSError.
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
