"""Room on the disk: how a full one is recognised, and the watermark below which nothing new is accepted.

What is under way may use what is left below the watermark: records of work that was accepted, and turns of sessions
that exist.

A store keeps a reserve beside it, and gives it up when the disk is full: for its owner's epoch and orders, for
cancels, and for what trainers acknowledge. Records and new work wait until there is room for the reserve again.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from agentloop.errors import StorageFull

_LOOK_EVERY_S = 1.0
_RESERVE_BYTES = 1 << 20
_RESERVE_SHARE = 16  # of the disk at most: a small one has a smaller reserve
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_FULL_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMSIZE,
    }
)

_SERVER_FULL = "53100"  # PostgreSQL's code

PRIMARY_CODE = 0xFF
"""The bits of an extended result code of SQLite that name its kind."""

_log = structlog.stdlib.get_logger(__name__)


def is_full(error: Exception) -> bool:
    """Tell if an error means that the disk cannot be written: it is full, over its quota, or read-only."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0)
        return code in _FULL_CODES or code & PRIMARY_CODE == sqlite3.SQLITE_READONLY
    if getattr(error, "sqlstate", None) == _SERVER_FULL:
        return True
    return isinstance(error, OSError) and error.errno in _FULL


class DiskRoom:
    """The free bytes of a folder's disk against a watermark. The disk is asked at most once a second."""

    def __init__(
        self,
        folder: Path,
        min_free_bytes: int,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """0: no watermark, and nothing is asked for."""
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._free_bytes = free_bytes
        self._now = now
        self._looked_at: float | None = None
        self._free = min_free_bytes
        self._was_low = False

    def check(self) -> None:
        """Raises StorageFull below the watermark."""
        if self._min_free_bytes == 0:
            return
        now = self._now()
        if self._looked_at is None or now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at, self._free = now, self._free_bytes(self._folder)
        is_low = self._free < self._min_free_bytes
        if is_low != self._was_low:
            self._was_low = is_low
            write = _log.error if is_low else _log.info
            event = "disk_below_watermark" if is_low else "disk_has_room_again"
            write(
                event, folder=str(self._folder), free_mib=self._free >> 20, min_free_mib=self._min_free_bytes >> 20
            )
        if is_low:
            raise StorageFull(
                f"{self._free >> 20} MiB are free on the run's disk, and new work needs"
                f" {self._min_free_bytes >> 20} MiB: make room, or acknowledge what was read"
            )


class Reserve:
    """A file that reserves room on the disk for records."""

    def __init__(self, path: Path) -> None:
        """Take the room if there is any; an earlier owner's file is kept."""
        self._path = path
        self._is_held = path.is_file()
        self.take_back()

    def take_back(self) -> bool:
        """Hold the room again if the disk has twice as much. False: it has not."""
        if not self._is_held:
            try:
                num_bytes = min(_RESERVE_BYTES, shutil.disk_usage(self._path.parent).total // _RESERVE_SHARE)
                with open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 2 * num_bytes)
                    file.truncate(num_bytes)
                self._is_held = True
            except OSError:
                self.give_up()
        return self._is_held

    def give_up(self) -> bool:
        """Free the room for the next write. False: it was not held."""
        was_held, self._is_held = self._is_held, False
        with suppress(OSError):
            self._path.unlink()
        return was_held
