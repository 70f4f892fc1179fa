"""SQLite for an event loop: one thread a file, the work that waits as one transaction.

The writer is of any database (`home.py`).

Invariants: no work returns before its transaction is committed; work is done in the order it came; where one piece
spoils a transaction, each of it gets its own, so a bad piece fails alone.
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
"""Size to which a write-ahead log is cut when it has been copied into its file."""

_VACUUM_PAGES = 256  # given back to the filesystem in one transaction
_SLOW_S = 2.0  # of a transaction: status says so from then on
_CHECKPOINT_BYTES = 4 << 20  # of a write-ahead log, that are copied into its file

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


Work: TypeAlias = Callable[[Any], T]
"""Called with a `Database`, in its thread."""


class SqliteDatabase(sqlite3.Connection):
    """A `Database` in a file."""

    def begin(self, *, writes: bool) -> None:
        self.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def num_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def shrink(self) -> int:
        num_free = self._pragma("freelist_count")
        if num_free <= _VACUUM_PAGES or 4 * num_free < self._pragma("page_count"):
            return 0
        for _ in range(_VACUUM_PAGES):  # Python steps such a statement once, which moves one page
            self.execute("PRAGMA incremental_vacuum(1)")
        return num_free - self._pragma("freelist_count")

    def _pragma(self, name: str) -> int:
        return int(self.execute(f"PRAGMA {name}").fetchone()[0])


def open_database(path: Path, schema: Schema, *, is_read_only: bool = False) -> SqliteDatabase:
    """Open or make a store. Any one thread at a time may use the connection; transactions are explicit.

    Raises InvalidRequest if the file is none of this schema, cannot be opened, or (read-only) does not exist; and
    StorageFull if it is to be written, and its disk is full or read-only.
    """
    if is_read_only and not path.is_file():
        raise InvalidRequest(f"no {schema.kind} at {path}")
    if not is_read_only:
        with suppress(OSError):  # SQLite says why it cannot
            path.touch(mode=0o600)  # as its log and its shared memory then are
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
                f"{path} has schema version {version}, but this release reads a {schema.kind} of version"
                f" {schema.version} only: use the release that wrote it"
            )
        if not is_read_only:
            if version == 0:
                db.execute(f"PRAGMA page_size={schema.page_bytes}")
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # pages can be given back; of a new file only
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
        raise InvalidRequest(f"{path} is not a {schema.kind}: {error}") from error
    except InvalidRequest:
        db.close()
        raise
    return db


def check_file(path: Path) -> None:
    """Check the structure of a store's file, also while a process writes it. Reads the whole file.

    Raises InvalidRequest if the file is damaged.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        found = str(error)
    if found != "ok":
        reason = " ".join(found.split())
        raise InvalidRequest(
            f"{path} is damaged ({reason}): restore a copy of it, or start with a new run directory"
        )


def _has_no_room(error: sqlite3.Error, folder: Path) -> bool:
    """Tell if a file in `folder` could not be opened because nothing can be written there.

    Of a file that it could not make, or extend for shared memory, SQLite does not say why.
    """
    if is_full(error):
        return True
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
    """Work that waits for its transaction."""

    work: Work[Any]
    done: asyncio.Future[Any]
    on_committed: Callable[[], None] | None


class BatchWriter:
    """The only user of a connection: all work that waits at a time is one transaction in one thread.

    Ownership: the connection and the executor, until `close`. What waits is as many pieces as there are callers.
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

        Each begins with `guard`, and ends with `finish`: what these raise is the outcome of all of them. With
        `is_read_only` no work writes, and none waits for another connection's commit.
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
        self._is_full = False  # the last that was to be written found no room
        self._batch_began_at: float | None = None  # of the transaction under way
        self._away = ""
        self.on_time: Callable[[float], None] = lambda seconds: None  # told the seconds of each, in the thread

    @property
    def away(self) -> str:
        """Why the database does not answer now; empty: it does, or was not asked."""
        began_at = self._batch_began_at
        waited_s = 0.0 if began_at is None else time.perf_counter() - began_at
        return self._away or (
            f"the {self._kind} has not answered for {waited_s:.0f} s" if waited_s > _SLOW_S else ""
        )

    async def run(self, work: Work[T], on_committed: Callable[[], None] | None = None) -> T:
        """Run `work` in a transaction. Returns its result once it is committed.

        `on_committed` is called even if the caller has left. Work that raises an error of ours does so before it
        writes anything. Raises that error, InvalidRequest for a number that is too large, StorageFull when the disk
        is full or read-only, the database's own error as it comes when it fails otherwise, and ServiceUnavailable
        after `close` and while the database is away: nothing was stored then.
        """
        if self._is_closed:
            raise ServiceUnavailable(f"the {self._kind} is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Piece(work, done, on_committed))
        self._write_waiting()
        return await done

    async def close(self) -> None:
        """Finish what waits, then let go of the file. Idempotent."""
        while self._is_writing:
            await self.run(lambda db: None)
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._executor, self._db.close)
            self._executor.shutdown()

    # --- the event loop's side ---

    def _write_waiting(self) -> None:
        """Give the thread a batch, unless it has one: when that is done, the next one goes."""
        if self._is_writing or not self._waiting:
            return
        self._is_writing = True
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        self._executor.submit(self._run_batch, asyncio.get_running_loop(), batch)

    def _deliver(self, batch: Sequence[_Piece], outcomes: Sequence[Any]) -> None:
        self._is_writing = False
        self._write_waiting()
        for piece, outcome in zip(batch, outcomes, strict=True):
            is_committed = not isinstance(outcome, Exception)
            if is_committed and piece.on_committed is not None:
                piece.on_committed()
            if piece.done.done():
                continue  # its caller has left
            if is_committed:
                piece.done.set_result(outcome)
            else:
                piece.done.set_exception(outcome)

    # --- the thread's side ---

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Piece]) -> None:
        self._batch_began_at = began_at = time.perf_counter()
        outcomes = self._outcomes([piece.work for piece in batch])
        self._batch_began_at = None
        self.on_time(time.perf_counter() - began_at)
        loop.call_soon_threadsafe(self._deliver, batch, outcomes)

    def _outcomes(self, works: Sequence[Work[Any]], *, is_part: bool = False) -> list[Any]:
        """Do everything in one transaction, or else each piece in its own; errors are outcomes."""
        db = self._db
        try:
            num_changes = db.total_changes
            # Where nothing can be written, what only reads shall not ask for the right to write.
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
            if isinstance(error, ConnectionError):  # of the others too
                self._away = str(error)
                return [ServiceUnavailable(str(error))] * len(works)
            if is_full(error):
                self._note_room(is_full=True, reason=repr(error))
                problem = _storage_full(self._kind)
            elif isinstance(error, OverflowError):  # a caller's number
                problem = InvalidRequest("an integer of more than 63 bits cannot be stored")
            elif isinstance(error, UnicodeError):  # a caller's text
                problem = InvalidRequest(f"a text cannot be stored: {error}")
            elif not isinstance(error, AgentLoopError):
                _log.error("not_written", store=self._kind, num_pieces=len(works), error=repr(error))
        return [problem] if len(works) == 1 else [self._outcomes([work], is_part=True)[0] for work in works]

    def _note_room(self, *, is_full: bool, reason: str = "") -> None:
        """Log once that the disk is full, and once that it has room again."""
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
    """Make an executor that runs one call at a time."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
