"""The storage backends of turn journals: files on the worker's own disk, or the run's store for workers elsewhere.

Both stay. Files lose the turns of a lost host. The store (SQLite, over the coordinator's port) takes 2 to 10 times
the CPU of files per turn: 26 and 60 µs with 50 turns in one write, 160 and 1,100 µs with one turn.

Invariants: a journal that was removed with its sample keeps nothing that is appended later, and is over. A file
survives a killed process, not a power cut, since nothing is synced, and goes with its host. The turns in the store
were committed by the coordinator, which alone may write there; a call may be repeated, a part is kept once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from agentloop.api.coordinator import JournalPart, WorkerPort
from agentloop.rollout.turn_journal import RunHeader, mark_of, read_entries
from agentloop.storage.append_log import append, open_log

P = ParamSpec("P")
T = TypeVar("T")

TURNS_FOLDER = "turns"
MAX_NAMES_A_CALL = 1000
MAX_HEADER_BYTES = 4096
MAX_CALL_PARTS_BYTES = 4 << 20
STRAY_AFTER_S = 3600.0  # a file without a readable header goes at this age

_log = structlog.stdlib.get_logger(__name__)


class _Thread:
    """The one thread of a home."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="turn-journal")

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: a cancelled caller must not take back what the thread has yet to do and no list has any more.
        return await asyncio.shield(loop.run_in_executor(self._executor, lambda: work(*args, **kwargs)))

    def close(self) -> None:
        self._executor.shutdown(wait=False)


class JournalFolder(_Thread):
    """The JournalHome of a worker's own disk: a file for each run, named by its sample."""

    def __init__(self, folder: Path, executor: Executor | None = None) -> None:
        """`executor` runs one call at a time; a thread of its own by default."""
        super().__init__(executor)
        self._folder = folder
        self._left_behind: set[str] = set()  # marks of samples that other workers had a file of, at the last look
        self._is_failing = False

    async def write(
        self, parts: Callable[[], Sequence[JournalPart]], forgotten: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        return await self.in_thread(lambda: self._write_all(parts(), forgotten))

    async def read(self, assignment_id: str) -> Sequence[tuple[str, bytes]]:
        return await self.in_thread(self._read, assignment_id)

    def may_have(self, assignment_id: str) -> bool:
        return mark_of(assignment_id) in self._left_behind

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        found = await self.in_thread(self._names)
        names = list(found)
        # Until the coordinator, which may have died with their workers, says which of them have their records.
        self._left_behind = {path.name.partition(".")[0] for paths in found.values() for path in paths}
        left_behind: set[str] = set()
        for start in range(0, len(names), MAX_NAMES_A_CALL):
            some = tuple(names[start : start + MAX_NAMES_A_CALL])
            owed = set(await unfinished(some))
            left_behind.update(path.name.partition(".")[0] for name in owed for path in found[name])
            doomed = [(name, path.name) for name in set(some) - owed for path in found[name]]
            await self.in_thread(self._write_all, (), doomed)
        self._left_behind = left_behind

    # --- the thread's side ---

    def _write_all(self, parts: Sequence[JournalPart], forgotten: Sequence[tuple[str, str]]) -> list[str]:
        for assignment_id, run in forgotten:
            try:
                for path in [self._folder / run] if run else self._files_of(assignment_id):
                    path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("journal_not_removed", error=repr(error))
        over: list[str] = []
        for part in parts:
            try:
                self._append(part)
            except OSError as error:
                over.append(part.run)
                if not isinstance(error, FileNotFoundError) and not self._is_failing:  # that one's sample has ended
                    consequence = "lost workers' work begins anew"
                    _log.error("journal_not_written", error=repr(error), consequence=consequence)
        self._is_failing = bool(over)
        return over

    def _append(self, part: JournalPart) -> None:
        is_new = part.number == 0  # a file that is gone later was removed with its sample
        try:
            fd = open_log(self._folder / part.run, is_new=is_new)
        except FileNotFoundError:
            if not is_new:
                raise
            self._folder.mkdir(parents=True, exist_ok=True)
            fd = open_log(self._folder / part.run, is_new=True)
        try:
            append(fd, part.frames)
        finally:
            os.close(fd)

    def _files_of(self, assignment_id: str) -> list[Path]:
        files = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        return [self._folder / file for file in files if file.startswith(mark_of(assignment_id))]

    def _read(self, assignment_id: str) -> list[tuple[str, bytes]]:
        found = []
        for path in self._files_of(assignment_id):
            data = b""
            try:
                data = path.read_bytes()
            except OSError as error:
                _log.error("journal_unreadable", assignment=assignment_id, error=repr(error))
            found.append((path.name, data))
        return found

    def _names(self) -> dict[str, list[Path]]:
        """Return the files by the ids of their assignments. An unreadable one goes when it is old."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):  # its record became durable meanwhile
                header = _header(path)
                if header is not None:
                    found.setdefault(header.assignment_id, []).append(path)
                elif time.time() - path.stat().st_mtime > STRAY_AFTER_S:
                    path.unlink()
        return found


class StoredJournals(_Thread):
    """The JournalHome that is the run's store. Where a sample gets its record, the store removes its journals."""

    def __init__(self, coordinator: WorkerPort) -> None:
        super().__init__()
        self._coordinator = coordinator

    async def write(
        self, parts: Callable[[], Sequence[JournalPart]], forgotten: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        over: list[str] = []
        for some in _calls_of(await self.in_thread(parts)):
            over += await self._coordinator.keep_turns(tuple(some), tuple(forgotten))
            forgotten = ()
        return over

    async def read(self, assignment_id: str) -> Sequence[tuple[str, bytes]]:
        return await self._coordinator.kept_turns(assignment_id)

    def may_have(self, assignment_id: str) -> bool:
        return False  # an assignment that was restored says so

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        pass


def _calls_of(parts: Sequence[JournalPart]) -> Iterator[list[JournalPart]]:
    """Yield the parts of one call after the other, at least of one, up to a bound of their bytes."""
    some: list[JournalPart] = []
    num_bytes = 0
    for part in parts:
        num_bytes += len(part.frames)
        if some and num_bytes > MAX_CALL_PARTS_BYTES:
            yield some
            some, num_bytes = [], len(part.frames)
        some.append(part)
    yield some


def _header(path: Path) -> RunHeader | None:
    with path.open("rb") as file:
        _, header = next(read_entries(file.read(MAX_HEADER_BYTES)), (0, None))
    return header if isinstance(header, RunHeader) else None
