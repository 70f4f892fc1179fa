"""Disk space: detection of a full disk, a watermark for new work, and a reserve for small writes.

Below the watermark no new work is accepted; accepted work and existing sessions may use the remaining space. A
store keeps a reserve file and deletes it when the disk is full, to have space for the owner's epoch, cancellations,
acknowledgments and deletions. Records and new work are refused until the reserve can be allocated again.
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
_RESERVE_SHARE = 16  # the reserve is at most 1/16 of the disk
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

_SERVER_FULL = "53100"  # PostgreSQL's SQLSTATE disk_full

PRIMARY_CODE = 0xFF
"""The mask of the primary result code in SQLite's extended result codes."""

_log = structlog.stdlib.get_logger(__name__)


def is_full(error: Exception) -> bool:
    """Return True if the error means that the disk is full, over its quota, or read-only."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0)
        return code in _FULL_CODES or code & PRIMARY_CODE == sqlite3.SQLITE_READONLY
    if getattr(error, "sqlstate", None) == _SERVER_FULL:
        return True
    return isinstance(error, OSError) and error.errno in _FULL


class DiskRoom:
    """Compares the free space of a folder's disk with a watermark. Queries the disk at most once per second."""

    def __init__(
        self,
        folder: Path,
        min_free_bytes: int,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """With a `min_free_bytes` of 0 there is no watermark."""
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._free_bytes = free_bytes
        self._now = now
        self._looked_at: float | None = None
        self._free = min_free_bytes
        self._was_low = False

    def check(self) -> None:
        """Raise StorageFull if the free space is below the watermark."""
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
                f"{self._free >> 20} MiB are free on the run's disk, but new work requires"
                f" {self._min_free_bytes >> 20} MiB: free disk space, or acknowledge the records that were read"
            )


class Reserve:
    """A file that reserves disk space for small writes."""

    def __init__(self, path: Path) -> None:
        """Allocate the reserve if the disk has space; the file of an earlier owner is reused."""
        self._path = path
        self._is_held = path.is_file()
        self.take_back()

    def take_back(self) -> bool:
        """Create the reserve file if it is missing and the disk has twice its size free.

        Returns True if the file exists.
        """
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
        """Delete the reserve file, so that the next write has space. Returns False if it was not allocated."""
        was_held, self._is_held = self._is_held, False
        with suppress(OSError):
            self._path.unlink()
        return was_held
