"""File locks: one process at a time owns a part of a run directory.

The operating system releases the lock of a process that exits for any reason, so a held lock has a live owner. A
stopped (SIGSTOP) process keeps its locks. The text of the file names the owner or its address for other processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from agentloop.errors import Conflict

T = TypeVar("T")

RUN_LOCK = "service.lock"
"""The lock of a run directory's coordinator."""

MAX_TEXT_BYTES = 256
RETRY_S = 0.1


class FileLock:
    """A lock that this process holds until it releases it or exits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @property
    def text(self) -> str:
        """The text that the last owner wrote; empty after the release."""
        if self._descriptor is None:
            return ""
        return os.pread(self._descriptor, MAX_TEXT_BYTES, 0).decode("utf-8", "replace")

    def set_text(self, text: str) -> None:
        """Write the text for other processes and the next owner, cut to `MAX_TEXT_BYTES`."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode()[:MAX_TEXT_BYTES], 0)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def take_lock(path: Path) -> FileLock | None:
    """Acquire a lock without waiting; return None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return FileLock(descriptor)


async def taken_in_time(take: Callable[[], T | None], timeout_s: float) -> T | None:
    """Call `take` until it returns a value, and return the value; None after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + timeout_s
    while True:
        taken = take()
        if taken is not None or loop.time() >= deadline_at:
            return taken
        await asyncio.sleep(RETRY_S)


async def take_run_lock(run_dir: Path, timeout_s: float) -> FileLock:
    """Acquire the lock of a run directory's service. Raises Conflict, naming the owner's process, after
    `timeout_s`."""
    path = run_dir / RUN_LOCK
    lock = await taken_in_time(lambda: take_lock(path), timeout_s)
    if lock is None:
        raise Conflict(
            f"another service is still running in {run_dir}: process {path.read_text() or 'unknown'}; stop it first"
        )
    lock.set_text(str(os.getpid()))
    return lock


def pass_on_signal(run_dir: Path, number: int) -> None:
    """Send a signal to the coordinator's process of a run directory, if it is running."""
    if (lock := take_lock(run_dir / RUN_LOCK)) is not None:
        return lock.release()
    with suppress(OSError, ValueError):
        os.kill(int((run_dir / RUN_LOCK).read_text()), number)
