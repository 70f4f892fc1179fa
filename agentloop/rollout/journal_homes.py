"""Storage backends of turn journals: files (`JournalFolder`) or the run's store (`StoredJournals`).

Files survive a killed process, but not a power failure (they are not synced) and not the loss of the host. The
store survives both, at 2 to 10 times the CPU time per turn: 60 instead of 26 µs with 50 turns per write, 1,100
instead of 160 µs with one turn. The coordinator performs all writes to the store; a repeated write stores each part
once.

Invariant: after a sample's journals were removed, appends to them store nothing and report the journal as ended.
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
STRAY_AFTER_S = 3600.0  # age at which a file without a readable header is removed

_log = structlog.stdlib.get_logger(__name__)


class _Thread:
    """Runs the blocking work of a storage backend in one thread."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="turn-journal")

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: entries in a queued write are no longer in any list, so cancelling the write would lose them.
        return await asyncio.shield(loop.run_in_executor(self._executor, lambda: work(*args, **kwargs)))

    def close(self) -> None:
        self._executor.shutdown(wait=False)


class JournalFolder(_Thread):
    """The JournalHome on a worker's disk: one file per run, whose name begins with the sample's mark."""

    def __init__(self, folder: Path, executor: Executor | None = None) -> None:
        """`executor` must run one call at a time; by default a new thread does."""
        super().__init__(executor)
        self._folder = folder
        self._left_behind: set[str] = set()  # marks of unfinished samples with files of other workers, at `sweep`
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
        files = await self.in_thread(self._names)
        names = list(files)
        # Assume that all samples are unfinished until the coordinator, which may be down, reports which are.
        self._left_behind = {path.name.partition(".")[0] for paths in files.values() for path in paths}
        left_behind: set[str] = set()
        for start in range(0, len(names), MAX_NAMES_A_CALL):
            chunk = tuple(names[start : start + MAX_NAMES_A_CALL])
            pending = set(await unfinished(chunk))
            left_behind.update(path.name.partition(".")[0] for name in pending for path in files[name])
            doomed = [(name, path.name) for name in set(chunk) - pending for path in files[name]]
            await self.in_thread(self._write_all, (), doomed)
        self._left_behind = left_behind

    # The methods below run in the thread.

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
                # FileNotFoundError means that the sample has ended. Log the first of several failures only.
                if not isinstance(error, FileNotFoundError) and not self._is_failing:
                    consequence = "trajectories of lost workers restart from their first turn"
                    _log.error("journal_not_written", error=repr(error), consequence=consequence)
        self._is_failing = bool(over)
        return over

    def _append(self, part: JournalPart) -> None:
        # Only part 0 may create the file: a later missing file was removed with its sample.
        is_new = part.number == 0
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
        journals = []
        for path in self._files_of(assignment_id):
            data = b""
            try:
                data = path.read_bytes()
            except OSError as error:
                _log.error("journal_unreadable", assignment=assignment_id, error=repr(error))
            journals.append((path.name, data))
        return journals

    def _names(self) -> dict[str, list[Path]]:
        """Return the files by assignment id. Removes unreadable files older than `STRAY_AFTER_S`."""
        files: dict[str, list[Path]] = {}
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):  # another worker removed it after its sample's record was stored
                header = _header(path)
                if header is not None:
                    files.setdefault(header.assignment_id, []).append(path)
                elif time.time() - path.stat().st_mtime > STRAY_AFTER_S:
                    path.unlink()
        return files


class StoredJournals(_Thread):
    """The JournalHome in the run's store, which removes a sample's journals when it stores the sample's record."""

    def __init__(self, coordinator: WorkerPort) -> None:
        super().__init__()
        self._coordinator = coordinator

    async def write(
        self, parts: Callable[[], Sequence[JournalPart]], forgotten: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        over: list[str] = []
        for chunk in _calls_of(await self.in_thread(parts)):
            over += await self._coordinator.keep_turns(tuple(chunk), tuple(forgotten))
            forgotten = ()
        return over

    async def read(self, assignment_id: str) -> Sequence[tuple[str, bytes]]:
        return await self._coordinator.kept_turns(assignment_id)

    def may_have(self, assignment_id: str) -> bool:
        return False  # `Assignment.is_restored` reports earlier runs

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        pass


def _calls_of(parts: Sequence[JournalPart]) -> Iterator[list[JournalPart]]:
    """Split parts into calls of at most `MAX_CALL_PARTS_BYTES`. Yields at least one call, which may be empty."""
    chunk: list[JournalPart] = []
    num_bytes = 0
    for part in parts:
        num_bytes += len(part.frames)
        if chunk and num_bytes > MAX_CALL_PARTS_BYTES:
            yield chunk
            chunk, num_bytes = [], len(part.frames)
        chunk.append(part)
    yield chunk


def _header(path: Path) -> RunHeader | None:
    with path.open("rb") as file:
        _, header = next(read_entries(file.read(MAX_HEADER_BYTES)), (0, None))
    return header if isinstance(header, RunHeader) else None
