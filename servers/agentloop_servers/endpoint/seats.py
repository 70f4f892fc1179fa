"""Which of the endpoint's processes a process is: each holds one numbered seat, and so one file of sessions.

Ownership: a lock on the seat's file, which the system takes back from a process that dies, however it dies. So no
two processes write the sessions of one seat, not even while a wedged one is being replaced, when Serve's own rank
of the new one is beyond their number. The file also says on which port the seat was last reached: whoever takes it
over listens there again, and the URLs that agents hold go on working.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from agentloop.errors import ServiceUnavailable

TAKE_TIMEOUT_S = 60.0
_RETRY_S = 0.1


class Seat:
    """A seat that this process holds until it ends or releases it."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self._descriptor: int | None = descriptor

    @property
    def port(self) -> int:
        """Where the seat was last reached; 0 if it is new."""
        text = b"" if self._descriptor is None else os.pread(self._descriptor, 8, 0)
        return int(text) if text.isdigit() else 0

    def set_port(self, port: int) -> None:
        """Keep it for whoever has the seat next."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(port).encode(), 0)

    def release(self) -> None:
        """Leave it to others. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


async def take_seat(run_dir: Path, num_seats: int, *, first: int = 0, timeout_s: float = TAKE_TIMEOUT_S) -> Seat:
    """A free seat, `first` if it is; waits for one. Raises ServiceUnavailable if none gets free in time."""
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + timeout_s
    while True:
        for offset in range(num_seats):
            seat = _taken(run_dir, (first + offset) % num_seats)
            if seat is not None:
                return seat
        if loop.time() >= deadline_at:
            raise ServiceUnavailable(f"other processes hold all {num_seats} seats of {run_dir}")
        await asyncio.sleep(_RETRY_S)


def _taken(run_dir: Path, number: int) -> Seat | None:
    descriptor = os.open(run_dir / f"sessions-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return Seat(number, descriptor)
