"""SQLite for an event loop, and a batching writer for any `Database`.

The writer runs all pending work as one transaction in its own thread. Invariants: work returns after its
transaction is committed; work runs in the order of its submission; if a transaction fails, each piece of work is
retried in its own transaction, so that only the faulty piece fails.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import structlog

from agentloop.errors import AgentLoopError, InvalidRequest, ServiceUnavailable, StorageFull
from agentloop.storage.disk_room import PRIMARY_CODE, is_full
from agentloop.storage.home import Database, Schema

MAX_WAL_BYTES = 64 << 20
"""Size to which a write-ahead log is truncated after a checkpoint."""

_VACUUM_PAGES = 256  # pages returned to the filesystem in one transaction
_SLOW_S = 2.0  # seconds after which the status reports a running transaction
_CHECKPOINT_BYTES = 4 << 20  # size of the write-ahead log that triggers a checkpoint

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


Work: TypeAlias = Callable[[Any], T]
"""A function that is called with a `Database` in the database's thread."""


class SqliteDatabase(sqlite3.Connection):
    """A `Database` in a SQLite file."""

    def begin(self, *, writes: bool) -> None:
        self.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def num_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def shrink(self) -> int:
        num_free = self._pragma("freelist_count")
        if num_free <= _VACUUM_PAGES or 4 * num_free < self._pragma("page_count"):
            return 0
        for _ in range(_VACUUM_PAGES):  # Python executes one step of the statement, which moves one page
            self.execute("PRAGMA incremental_vacuum(1)")
        return num_free - self._pragma("freelist_count")

    def _pragma(self, name: str) -> int:
        return int(self.execute(f"PRAGMA {name}").fetchone()[0])


def open_database(path: Path, schema: Schema, *, is_read_only: bool = False) -> SqliteDatabase:
    """Open a store's file, or create it. Any thread may use the connection, one at a time.

    Raises InvalidRequest if the file does not have this schema, cannot be opened, or (read-only) does not exist.
    Raises StorageFull if it is opened for writing and its disk is full or read-only.
    """
    if is_read_only and not path.is_file():
        raise InvalidRequest(f"there is no {schema.kind} at {path}: check the path of the run")
    if not is_read_only:
        with suppress(OSError):  # SQLite reports the reason
            path.touch(mode=0o600)  # SQLite copies the mode to the write-ahead log and the shared memory
    uri = f"{path.resolve().as_uri()}?mode={'ro' if is_read_only else 'rwc'}"
    try:
        db = sqlite3.connect(
            uri, uri=True, timeout=30.0, isolation_level=None, check_same_thread=False, factory=SqliteDatabase
        )
    except sqlite3.Error as error:
        if not is_read_only and _has_no_room(error, path.parent):
            raise _storage_full(f"{schema.kind} {path}") from error
        raise InvalidRequest(f"{path} cannot be opened: {error}") from error
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, schema.version) or (version == 0 and is_read_only):
            raise InvalidRequest(
                f"{path} has schema version {version}, but this release supports only version {schema.version} of"
                f" a {schema.kind}: use the release that wrote it"
            )
        if not is_read_only:
            if version == 0:
                db.execute(f"PRAGMA page_size={schema.page_bytes}")
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # can only be set in a new file; `shrink` needs it
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA journal_size_limit={MAX_WAL_BYTES}")
            page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
            db.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_BYTES // page_bytes}")
            db.execute(f"PRAGMA synchronous={schema.synchronous}")
            db.executescript(f"BEGIN IMMEDIATE; {schema.tables} PRAGMA user_version={schema.version}; COMMIT;")
    except sqlite3.DatabaseError as error:
        db.close()
        if not is_read_only and _has_no_room(error, path.parent):
            raise _storage_full(f"{schema.kind} {path}") from error
        raise InvalidRequest(f"{path} cannot be opened as a {schema.kind}: {error}") from error
    except InvalidRequest:
        db.close()
        raise
    return db


def check_file(path: Path) -> None:
    """Check the structure of a store's file. Reads the complete file, and may run while a process writes it.

    Raises InvalidRequest if the file is damaged.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        result = str(error)
    if result != "ok":
        reason = " ".join(result.split())
        raise InvalidRequest(
            f"{path} is damaged ({reason}): restore a copy of it, or start with a new run directory"
        )


def _has_no_room(error: sqlite3.Error, folder: Path) -> bool:
    """Return True if a file in `folder` could not be opened because the disk is full or read-only."""
    if is_full(error):
        return True
    # SQLite does not report why it could not create a file or extend its shared memory: try to write a file.
    if getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return False
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"x")
    except OSError as refusal:
        return is_full(refusal)
    return False


def _storage_full(name: str) -> StorageFull:
    return StorageFull(f"the disk of the {name} is full or cannot be written")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Pending work."""

    work: Work[Any]
    done: asyncio.Future[Any]
    on_committed: Callable[[], None] | None


class BatchWriter:
    """Runs all pending work as one transaction in one thread.

    Owns the connection and the executor until `close`, and is their only user. The number of pending pieces is
    bounded by the number of callers.
    """

    def __init__(
        self,
        db: Database,
        kind: str,
        executor: Executor,
        *,
        max_batch: int,
        guard: Callable[[Database], None] = lambda db: None,
        finish: Callable[[Database], None] = lambda db: None,
        is_read_only: bool = False,
    ) -> None:
        """`executor` runs one call at a time; a transaction has at most `max_batch` pieces of work.

        Each transaction begins with `guard` and ends with `finish`; an error of these fails all of its work. With
        `is_read_only`, transactions only read and do not wait for another connection's commit.
        """
        self._guard, self._finish = guard, finish
        self._is_read_only = is_read_only
        self._db = db
        self._kind = kind
        self._executor = executor
        self._max_batch = max_batch
        self._waiting: list[_Piece] = []
        self._is_writing = False
        self._is_closed = False
        self._is_full = False  # the last write failed because the disk was full
        self._batch_began_at: float | None = None  # start of the running transaction
        self._away = ""
        # Called in the writer's thread with the duration of each transaction in seconds.
        self.on_time: Callable[[float], None] = lambda seconds: None

    @property
    def away(self) -> str:
        """The reason why the database is unreachable or slow; empty if the last transaction succeeded."""
        began_at = self._batch_began_at
        waited_s = 0.0 if began_at is None else time.perf_counter() - began_at
        return self._away or (
            f"the {self._kind} has not answered for {waited_s:.0f} s" if waited_s > _SLOW_S else ""
        )

    async def run(self, work: Work[T], on_committed: Callable[[], None] | None = None) -> T:
        """Run `work` in a transaction and return its result after the commit.

        `on_committed` is called after the commit, even if the caller was cancelled. `work` must raise an
        AgentLoopError only before its first write. Raises that error, InvalidRequest for a number that is too
        large, StorageFull if the disk is full or read-only, ServiceUnavailable after `close` and while the database
        is unreachable, and other database errors unchanged. After an error nothing was stored.
        """
        if self._is_closed:
            raise ServiceUnavailable(f"the {self._kind} is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Piece(work, done, on_committed))
        self._write_waiting()
        return await done

    async def close(self) -> None:
        """Finish pending work, then close the connection. Idempotent."""
        while self._is_writing:
            # Returns after all work that was submitted before it. That work has its own outcome: a lost lease or
            # database must not keep the connection open.
            with suppress(Exception):
                await self.run(lambda db: None)
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._executor, self._db.close)
            self._executor.shutdown()

    # Methods that run in the event loop

    def _write_waiting(self) -> None:
        """Submit the next batch, unless one is running. `_deliver` calls this again after each batch."""
        if self._is_writing or not self._waiting:
            return
        self._is_writing = True
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        self._executor.submit(self._run_batch, asyncio.get_running_loop(), batch)

    def _deliver(self, batch: Sequence[_Piece], outcomes: Sequence[Any]) -> None:
        self._is_writing = False
        self._write_waiting()  # first, so that the thread commits the next batch while callers continue
        for piece, outcome in zip(batch, outcomes, strict=True):
            is_committed = not isinstance(outcome, Exception)
            if is_committed and piece.on_committed is not None:
                piece.on_committed()
            if piece.done.done():
                continue  # the caller was cancelled
            if is_committed:
                piece.done.set_result(outcome)
            else:
                piece.done.set_exception(outcome)

    # Methods that run in the writer's thread

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Piece]) -> None:
        self._batch_began_at = began_at = time.perf_counter()
        outcomes = self._outcomes([piece.work for piece in batch])
        self._batch_began_at = None
        self.on_time(time.perf_counter() - began_at)
        loop.call_soon_threadsafe(self._deliver, batch, outcomes)

    def _outcomes(self, works: Sequence[Work[Any]], *, is_part: bool = False) -> list[Any]:
        """Run all works in one transaction; if it fails, each in its own. Returns results and exceptions."""
        db = self._db
        try:
            num_changes = db.total_changes
            # On a full disk a writing transaction fails even for work that only reads, so begin a reading one.
            db.begin(writes=not (self._is_full or self._is_read_only))
            self._guard(db)
            outcomes = [_outcome(work, db) for work in works]
            self._finish(db)
            db.commit()
            self._away = ""
            self._note_room(is_full=self._is_full and (is_part or db.total_changes == num_changes))
            return outcomes
        except Exception as error:
            problem = error
            if db.in_transaction:
                db.rollback()
            if isinstance(error, ConnectionError):  # a retry of each piece would fail too
                self._away = str(error)
                return [ServiceUnavailable(str(error))] * len(works)
            if is_full(error):
                self._note_room(is_full=True, reason=repr(error))
                problem = _storage_full(self._kind)
            elif isinstance(error, OverflowError):  # caused by a caller's value
                problem = InvalidRequest("integers of more than 63 bits cannot be stored")
            elif isinstance(error, UnicodeError):  # caused by a caller's value
                problem = InvalidRequest(f"the text cannot be stored: {error}")
            elif not isinstance(error, AgentLoopError):
                _log.error("not_written", store=self._kind, num_pieces=len(works), error=repr(error))
        return [problem] if len(works) == 1 else [self._outcomes([work], is_part=True)[0] for work in works]

    def _note_room(self, *, is_full: bool, reason: str = "") -> None:
        """Log the transitions between a full and a writable disk."""
        if is_full and not self._is_full:
            _log.error("storage_full", store=self._kind, reason=reason)
        elif self._is_full and not is_full:
            _log.info("storage_has_room_again", store=self._kind)
        self._is_full = is_full


def _outcome(work: Work[Any], db: Database) -> Any:
    try:
        return work(db)
    except AgentLoopError as error:
        return error


def one_thread(name: str) -> Executor:
    """Return a new executor with one thread."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
