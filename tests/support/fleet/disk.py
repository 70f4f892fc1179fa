"""A disk in virtual time: slow or full, and lost with its process at the moment of the process's death."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

from agentloop.api.encoded_record import EncodedRecord
from agentloop.errors import ServiceUnavailable
from agentloop.storage.trajectory_store import TrajectoryStore


class Disk:
    """The disk of all processes. `slowness_s` is per transaction; while it `is_full`, no file grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_copies = 0
        self.slowness_s = 0.0
        self.is_full = False
        self.database_returns_at = 0.0  # in loop time
        self.loses_answers = False

    async def until_database_returns(self) -> None:
        while (left_s := self.database_returns_at - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)

    def lose_answer(self) -> None:
        if self.loses_answers:
            raise ServiceUnavailable("injected: the answer of a commit was lost")

    @property
    def is_good(self) -> bool:
        return self.slowness_s == 0.0 and not self.is_full

    def executor(self, name: str = "") -> DiskThread:
        """The thread of one file."""
        return DiskThread(self)

    def after_a_kill(self, path: Path) -> Path:
        """Return the path at which the successor of a process that is killed now finds a file.

        Later writes of the dead process go to its own file.
        """
        self._num_copies += 1
        folder = self._folder / str(self._num_copies)
        folder.mkdir()
        for one in path.parent.iterdir():
            if one.is_dir():
                shutil.copytree(one, folder / one.name)
            elif not one.name.endswith("-shm"):
                shutil.copy(one, folder / one.name)
        return folder / path.name


class FaultyStore(TrajectoryStore):
    """A run's store in a database that stalls, recovers, and loses the answers of commits that took place."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, disk.executor)
        self._disk = disk

    async def accept(self, *arguments: Any) -> None:
        await self._disk.until_database_returns()
        await super().accept(*arguments)
        self._disk.lose_answer()

    async def add_records(self, records: Sequence[EncodedRecord]) -> int:
        await self._disk.until_database_returns()
        num_new = await super().add_records(records)
        self._disk.lose_answer()
        return num_new


class DiskThread(Executor):
    """Runs calls sequentially, each after the disk's delay."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._free_at = 0.0
        self.is_dead = False  # dead with its process: later calls are not executed

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if self.is_dead:
                future.cancel()  # the waiting caller is dead too
            if not future.set_running_or_notify_cancel():
                return
            try:
                with no_room() if self._disk.is_full else nullcontext():
                    future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        loop = asyncio.get_running_loop()
        if self._disk.slowness_s == 0.0 and self._free_at <= loop.time():
            run()
        else:
            self._free_at = max(self._free_at, loop.time()) + self._disk.slowness_s
            loop.call_at(self._free_at, run)
        return future


def damage(path: Path, rng: Random) -> None:
    """Flip a byte of a file, or truncate the file there."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        del data[at:]
    else:
        data[at] ^= rng.randint(1, 255)
    (part := path.with_name("part")).write_bytes(data)
    os.replace(part, path)


@contextmanager
def no_room() -> Iterator[None]:
    """Let every write of this process fail during the block, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
