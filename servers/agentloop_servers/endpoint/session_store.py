"""Stores the sessions of an endpoint process: records, calls and turns.

They are in a SQLite file that only this process writes, with a write-ahead log of open calls next to it, or in the
tables of the run's database, where a failover owner finds the sessions of a lost process. In the database each row
has a partition (`ShardRouter.place_of`), a process reads its own partitions only, each commit renews the process's
lease, and a process without the lease commits nothing.

Invariants: a started call is in the open-call log, in `calls`, or in both, and `calls` takes precedence. One
counter, which continues over restarts, numbers the starts and ends of calls: calls are restored in the order of
their starts, turns in the order of their commits. A deleted or expired session stays as a tombstone, and a late
write of a call does not restore it.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from agentloop.api.coordinator import sessions_lease
from agentloop.concurrency.aio import OwnedTasks
from agentloop.errors import (
    InvalidRequest,
    ServiceUnavailable,
    SessionFinished,
    SessionNotFound,
)
from agentloop.sessions.calls import SessionRecord, SessionState
from agentloop.storage.disk_room import DiskRoom
from agentloop.storage.home import Database, Home, Ownership, Schema
from agentloop.storage.sqlite import BatchWriter, Work, one_thread, open_database
from agentloop.storage.trajectory_store import folder_of
from agentloop.trajectory.node import CallRecord, ModelCallState, Node
from agentloop.values import codec
from agentloop_servers.endpoint.open_calls_log import OpenCall, OpenCallsLog, read_open_calls
from agentloop_servers.endpoint.shards import ShardRouter

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)

MAX_WRITE_BATCH = 32
"""Maximum number of writes in a transaction. All calls that wait for it continue at once when it is committed."""

_EXPIRY_SLACK = 1 / 16  # share of the time to live: an expiry is written only if it moved by at least this much
_PROCESS_ENDED = "the endpoint's process ended during the call"
_LIVE = frozenset({SessionState.OPEN, SessionState.FINISHED})

_SESSIONS = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, is_recorded INTEGER NOT NULL,
    ttl_s REAL NOT NULL, expires_at REAL NOT NULL, value BLOB NOT NULL{place}) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    seq INTEGER {key}, began INTEGER NOT NULL, session_id TEXT NOT NULL, call_id TEXT NOT NULL,
    value BLOB NOT NULL, UNIQUE (session_id, call_id));
CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_at) WHERE state IN ('open', 'finished');
CREATE INDEX IF NOT EXISTS sessions_by_owner ON sessions (owner) WHERE state IN ('open', 'finished');
CREATE INDEX IF NOT EXISTS pending_sessions ON sessions (session_id) WHERE state = 'finished' AND is_recorded = 0;
"""
_OPEN_CALLS = """
CREATE TABLE IF NOT EXISTS open_calls (
    session_id TEXT NOT NULL, call_id TEXT NOT NULL, number INTEGER NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (session_id, call_id));
"""
_SCHEMA = Schema(
    kind="session store",
    version=3,
    tables=_SESSIONS.format(place="", key="PRIMARY KEY"),
    synchronous="NORMAL",
)
_FORGET_CALL = "DELETE FROM open_calls WHERE session_id = ? AND call_id = ?"
_SHARED = replace(_SCHEMA, tables=_SESSIONS.format(place=", place INTEGER NOT NULL", key="NOT NULL") + _OPEN_CALLS)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A finished call with its turns: one row of `calls`."""

    record: CallRecord
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as stored. A tombstone has no record."""

    state: SessionState
    owner: str
    is_recorded: bool
    expires_at: float
    record: SessionRecord | None = None
    calls: tuple[CallRecord, ...] = ()
    nodes: tuple[Node, ...] = ()


class SessionStore:
    """The stored sessions of a process. Call `start` first and `close` last.

    Every coroutine returns once its transaction is committed. It raises StorageFull if the disk is full and
    ServiceUnavailable for other failures; nothing is stored then. `wall_s` returns seconds since 1970.
    """

    def __init__(
        self,
        where: str | Path | Home,
        wall_s: Callable[[], float],
        executor: Executor | None = None,
        *,
        min_free_bytes: int = 0,
        shards: ShardRouter | None = None,
    ) -> None:
        """`where` is a file, or a storage backend in which `shards` has the partitions of this process.

        `executor` runs one call at a time; by default it is one new thread. With fewer than `min_free_bytes` free
        on the disk no session is created.
        """
        self._where = Path(where) if isinstance(where, str) else where
        # None: a file belongs to this process alone.
        self._shards = None if isinstance(where, str | Path) else shards
        self._failure = sqlite3.Error if isinstance(where, str | Path) else where.failure
        self._lease: Ownership | None = None
        self._lease_number: int | None = None
        self.is_taken_over = False  # another process owns these sessions
        self._room = DiskRoom(folder_of(where), min_free_bytes)
        self._wall_s = wall_s
        self._executor = executor or one_thread("sessions")
        self._writer: BatchWriter | None = None
        self._log = OpenCallsLog(self._log_path)
        self._notes = OwnedTasks("open-calls")
        self._number = 0  # the last number given to a call's start or end

    @property
    def _log_path(self) -> Path | None:
        return self._where.with_suffix(".open-calls") if isinstance(self._where, Path) else None

    async def start(self) -> int:
        """Open the files, and fail the calls that an earlier process left open. Returns the number of open
        sessions.

        Raises InvalidRequest if the file is not a session store, StorageFull if the disk is full or read-only, and
        ServiceUnavailable for other failures.
        """
        loop = asyncio.get_running_loop()
        if not isinstance(self._where, Path):
            assert self._shards is not None
            self._lease = self._where.lease(sessions_lease(self._shards.rank))
            db = await loop.run_in_executor(self._executor, self._where.open, _SHARED)
            self._writer = BatchWriter(
                db, _SHARED.kind, self._executor, max_batch=MAX_WRITE_BATCH, guard=self._check_owner
            )
            await self._run(self._take_lease)
            return await self.take_in(self._shards.places)
        log_path = self._where.with_suffix(".open-calls")
        try:
            left = await loop.run_in_executor(self._executor, read_open_calls, log_path)
        except OSError as error:
            raise InvalidRequest(f"{log_path.name} cannot be read: {error}") from error
        file = await loop.run_in_executor(self._executor, open_database, self._where, _SCHEMA)
        self._writer = BatchWriter(file, _SCHEMA.kind, self._executor, max_batch=MAX_WRITE_BATCH)
        self._number = max(await self._run(_last_number), *(opened.number for opened in left), 0)
        numbers = self._next_numbers(len(left))
        await self._run(lambda db: _fail_open_calls(db, left, numbers))
        await loop.run_in_executor(self._executor, self._log.open)
        return await self._run(lambda db: _num_open(db, ""))

    async def take_in(self, places: Collection[int]) -> int:
        """Take over the sessions of these partitions of a database, and fail their open calls.

        Returns the number of open sessions among them.
        """

        def work(db: Database) -> int:
            rows = db.execute(
                "SELECT number, session_id, call_id, value FROM open_calls WHERE session_id IN"
                f" (SELECT session_id FROM sessions WHERE {_at(places)}) ORDER BY number"
            ).fetchall()
            db.executemany(_FORGET_CALL, [row[1:3] for row in rows])
            left = [
                OpenCall(number, session_id, codec.decode(value, CallRecord))
                for number, session_id, _, value in rows
            ]
            _fail_open_calls(db, left, [opened.number for opened in left])
            return _num_open(db, f" AND {_at(places)}")

        return await self._run(work)

    async def close(self) -> None:
        """Commit the pending writes, then close the files. Idempotent."""
        if self._writer is not None:
            await self._notes.close()
            await self._writer.close()
            self._log.close()

    # Journal of a session

    def open_call(self, session_id: str, call_record: CallRecord) -> None:
        """Record an accepted call before it is sampled. Raises ServiceUnavailable; nothing is recorded then."""
        (number,) = self._next_numbers(1)
        self._log.add(number, session_id, call_record)
        if self._shards is not None:
            # Not awaited: if the host is lost before the commit, the database has no record of this call.
            row = (session_id, call_record.call_id, number, codec.encode(call_record))
            statement = "INSERT INTO open_calls VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
            self._notes.start(self._run(lambda db: db.execute(statement, row).rowcount))

    async def close_call(self, session_id: str, call_record: CallRecord, nodes: Sequence[Node]) -> None:
        """Store a committed or failed call with its turns, and replace an earlier record of it.

        Raises SessionNotFound for a tombstone.
        """
        opened, (number,) = self._log.of_call(session_id, call_record.call_id), self._next_numbers(1)
        began = number if opened is None else opened.number
        stored = StoredCall(call_record, tuple(nodes))

        def work(db: Database) -> None:
            _, good_until = _require(db, session_id, _LIVE)
            _put_call(db, session_id, stored, number, began)
            if self._shards is not None:
                db.execute(_FORGET_CALL, (session_id, call_record.call_id))
            if good_until < self._wall_s():
                self._extend(db, session_id)

        await self._run(work, lambda: self._log.remove(session_id, call_record.call_id))

    async def save(self, record: SessionRecord) -> bool:
        """Replace a session's record. Returns True if this write finished the session.

        Raises SessionNotFound for a tombstone, and SessionFinished if the record would open a finished session
        again.
        """

        def work(db: Database) -> bool:
            allowed = _LIVE if record.state is SessionState.FINISHED else frozenset({SessionState.OPEN})
            state, _ = _require(db, record.session_id, allowed)
            db.execute(
                "UPDATE sessions SET state = ?, value = ? WHERE session_id = ?",
                (record.state, codec.encode(record), record.session_id),
            )
            self._extend(db, record.session_id)
            return state is SessionState.OPEN and record.state is SessionState.FINISHED

        return await self._run(work)

    # Lifecycle of a session

    async def create(self, record: SessionRecord) -> bool:
        """Store a new session. Returns False if its id was used before. Raises StorageFull."""
        self._room.check()
        expires_at = self._wall_s() + record.ttl_s
        row: tuple[object, ...] = (record.session_id, record.owner, record.state, 0, record.ttl_s, expires_at)
        row += (codec.encode(record),)
        if self._shards is not None:
            row += (self._shards.place_of(record.session_id),)
        statement = f"INSERT INTO sessions VALUES ({', '.join('?' * len(row))}) ON CONFLICT DO NOTHING"

        def work(db: Database) -> bool:
            return db.execute(statement, row).rowcount > 0

        return await self._run(work)

    async def load(self, session_id: str) -> StoredSession | None:
        """Return a session with its calls and turns, or its tombstone; None for an id that was never used."""
        open_calls = self._log.of_session(session_id)
        stored, last_number = await self._run(lambda db: self._load(db, session_id, open_calls))
        self._number = max(self._number, last_number)  # another process may have counted further
        return stored

    async def mark_recorded(self, session_id: str) -> None:
        """Record that a finished session's trajectory is in the run's store, or is never written there."""
        statement = "UPDATE sessions SET is_recorded = 1 WHERE session_id = ?"
        await self._run(lambda db: db.execute(statement, (session_id,)).rowcount)

    async def is_recorded(self, session_id: str) -> bool:
        """Return True if `mark_recorded` was called for a session."""
        statement = "SELECT 1 FROM sessions WHERE session_id = ? AND is_recorded = 1"
        return await self._run(lambda db: db.execute(statement, (session_id,)).fetchone() is not None)

    async def extend(self, session_id: str) -> None:
        """Restart a session's time to live."""
        await self._run(lambda db: self._extend(db, session_id))

    async def delete(self, session_id: str, state: SessionState | None) -> bool:
        """Delete a session with its calls. Returns True if it was open.

        A tombstone with `state` remains; with None nothing remains.
        """

        def work(db: Database) -> bool:
            was_open = _state_of(db, session_id) is SessionState.OPEN
            for table in ("calls",) if self._shards is None else ("calls", "open_calls"):
                db.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))
            if state is None:
                db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            else:
                statement = "UPDATE sessions SET state = ?, value = ? WHERE session_id = ?"
                db.execute(statement, (state, b"", session_id))
            return was_open

        return await self._run(work, lambda: self._log.remove_all(session_id))

    async def last_use(self, places: Collection[int] = ()) -> float:
        """Return the approximate time of the latest use of a live session, in seconds since 1970; 0 without a
        session.

        In a database, `places` selects other partitions than this process's own.
        """
        statement = (
            "SELECT COALESCE(MAX(expires_at - ttl_s * ?), 0) FROM sessions"
            f" WHERE state IN ('open', 'finished'){self._own(places)}"
        )
        return await self._run(lambda db: float(db.execute(statement, (1 + _EXPIRY_SLACK,)).fetchone()[0]))

    async def spare(self, grace_s: float, places: Collection[int] = ()) -> None:
        """Extend live sessions to `grace_s` from now, at most their time to live: they could not be used before.

        `places` is as in `last_use`.
        """
        spared = "? + CASE WHEN ttl_s < ? THEN ttl_s ELSE ? END"
        statement = (
            f"UPDATE sessions SET expires_at = {spared}"
            f" WHERE state IN ('open', 'finished') AND expires_at < {spared}{self._own(places)}"
        )
        values = (self._wall_s(), grace_s, grace_s) * 2
        await self._run(lambda db: db.execute(statement, values).rowcount)

    async def expired(self, limit: int) -> list[str]:
        """Return up to `limit` live sessions past their expiry, the earliest expiry first."""
        statement = (
            "SELECT session_id FROM sessions WHERE state IN ('open', 'finished') AND expires_at <= ?"
            f"{self._own()} ORDER BY expires_at LIMIT ?"
        )
        arguments = (self._wall_s(), limit)
        return await self._run(lambda db: [row[0] for row in db.execute(statement, arguments)])

    async def shown_as(self, shown_id: str) -> list[str]:
        """Return the ids of up to 8 live sessions that owners address by this id. Scans all sessions."""
        statement = (
            "SELECT session_id FROM sessions WHERE state IN ('open', 'finished')"
            f" AND substr(session_id, instr(session_id, '~') + 1) = ?{self._own()} LIMIT 8"
        )
        return await self._run(lambda db: [row[0] for row in db.execute(statement, (shown_id,)).fetchall()])

    async def num_of_owners(self, places: Collection[int] = ()) -> dict[str, int]:
        """Return the number of open sessions of each owner. `places` is as in `last_use`."""
        statement = f"SELECT owner, COUNT(*) FROM sessions WHERE state = 'open'{self._own(places)} GROUP BY owner"
        return await self._run(lambda db: dict(db.execute(statement).fetchall()))

    async def of_owners(self, owners: Sequence[str], after: str, limit: int) -> list[SessionRecord]:
        """Return up to `limit` live sessions of these owners, ordered by their shown ids, after id `after`."""
        placeholders = ", ".join("?" * len(owners))
        shown = "substr(session_id, instr(session_id, '~') + 1) COLLATE BINARY"  # as `shown_id` does
        statement = (
            f"SELECT value FROM sessions WHERE owner IN ({placeholders})"
            f" AND state IN ('open', 'finished') AND {shown} > ?{self._own()} ORDER BY {shown} LIMIT ?"
        )

        def work(db: Database) -> list[SessionRecord]:
            rows = db.execute(statement, (*owners, after, limit)).fetchall()
            return [codec.decode(value, SessionRecord) for (value,) in rows]

        return await self._run(work)

    async def pending(self, after: str, limit: int) -> list[str]:
        """Return up to `limit` finished sessions that the run's store does not have, by id, after id `after`."""
        statement = (
            "SELECT session_id FROM sessions WHERE state = 'finished' AND is_recorded = 0 AND session_id > ?"
            f"{self._own()} ORDER BY session_id LIMIT ?"
        )
        return await self._run(lambda db: [row[0] for row in db.execute(statement, (after, limit))])

    async def _run(self, work: Work[T], on_committed: Callable[[], None] | None = None) -> T:
        if self._writer is None:
            raise ServiceUnavailable("the session store is closed")
        try:
            return await self._writer.run(work, on_committed)
        except self._failure as error:
            raise ServiceUnavailable(f"the session store failed: {error}") from error

    def _take_lease(self, db: Database) -> None:
        """Take the lease of an earlier process with this number. The number's lock excludes other processes."""
        assert self._lease is not None
        self._lease.revoke(db)
        self._lease_number = self._lease.take(db, None, 0)

    def _check_owner(self, db: Database) -> None:
        """Renew the lease. Raises ServiceUnavailable if another process has taken it."""
        if self._lease is None or (own := self._lease_number) is None:
            return
        if self._lease.newest(db, own) != own:
            if not self.is_taken_over:
                _log.error("sessions_taken_over", lease=own)
            self.is_taken_over = True
            raise ServiceUnavailable("another process has taken over these sessions")

    def _own(self, places: Collection[int] = ()) -> str:
        """Return the SQL condition for the sessions of these partitions; of this process's by default."""
        return "" if self._shards is None else f" AND {_at(places or self._shards.places)}"

    def _next_numbers(self, num: int) -> Sequence[int]:
        first, self._number = self._number + 1, self._number + num
        return range(first, first + num)

    def _extend(self, db: Database, session_id: str) -> None:
        """Move the expiry if it is due. It is never too early, and at most the slack too late."""
        now = self._wall_s()
        db.execute(
            "UPDATE sessions SET expires_at = ? + ttl_s * ? WHERE session_id = ? AND expires_at < ? + ttl_s",
            (now, 1 + _EXPIRY_SLACK, session_id, now),
        )

    def _load(
        self, db: Database, session_id: str, open_calls: Sequence[OpenCall]
    ) -> tuple[StoredSession | None, int]:
        """Return a session, and the last number of its calls."""
        columns = "state, owner, is_recorded, expires_at, value"
        row = db.execute(f"SELECT {columns} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            return None, 0
        state, owner, is_recorded, expires_at = SessionState(row[0]), row[1], bool(row[2]), row[3]
        if state not in _LIVE:
            return StoredSession(state, owner, is_recorded, expires_at), 0
        record = codec.decode(row[4], SessionRecord)
        statement = "SELECT began, value, seq FROM calls WHERE session_id = ? ORDER BY seq"
        rows = db.execute(statement, (session_id,)).fetchall()
        calls = [codec.decode(value, StoredCall) for _, value, _ in rows]
        ended_or_open = {opened.call.call_id: (opened.number, opened.call) for opened in open_calls}
        for (began, *_), call in zip(rows, calls, strict=True):
            ended_or_open[call.record.call_id] = began, call.record  # may have ended since `open_calls` was taken
        in_order = sorted(ended_or_open.values(), key=lambda numbered: numbered[0])
        nodes = tuple(itertools.chain.from_iterable(call.nodes for call in calls))
        in_order_calls = tuple(call for _, call in in_order)
        stored = StoredSession(state, owner, is_recorded, expires_at, record, in_order_calls, nodes)
        return stored, rows[-1][2] if rows else 0


# The functions below run in the writer's thread, inside its transaction. They raise before they write.


def _state_of(db: Database, session_id: str) -> SessionState | None:
    """Return a session's state; None for an id that was never used."""
    row = db.execute("SELECT state FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else SessionState(row[0])


def _require(db: Database, session_id: str, allowed: frozenset[SessionState]) -> tuple[SessionState, float]:
    """Return the session's state, and the time up to which a use need not extend its expiry.

    Raises SessionNotFound, or SessionFinished if the state is not in `allowed`.
    """
    statement = "SELECT state, expires_at - ttl_s FROM sessions WHERE session_id = ?"
    row = db.execute(statement, (session_id,)).fetchone()
    state = None if row is None else SessionState(row[0])
    if state is None or state not in _LIVE:
        raise SessionNotFound(f"there is no session {session_id!r}", param="session_id")
    if state not in allowed:
        raise SessionFinished(f"session {session_id!r} is finished: create another session", param="session_id")
    return state, row[1]


def _put_call(db: Database, session_id: str, call: StoredCall, number: int, began: int) -> None:
    """Insert a call that ended as `number`, or replace its row."""
    row = (number, began, session_id, call.record.call_id, codec.encode(call))
    db.execute(
        "INSERT INTO calls VALUES (?, ?, ?, ?, ?) ON CONFLICT (session_id, call_id) DO UPDATE"
        " SET value = excluded.value",
        row,
    )


def _last_number(db: Database) -> int:
    """Return the greatest number of a call's end, which is greater than that of its start."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) FROM calls").fetchone()[0])


def _fail_open_calls(db: Database, left: Sequence[OpenCall], numbers: Sequence[int]) -> None:
    """Write down that these calls failed with their process."""
    for number, opened in zip(numbers, left, strict=True):
        record = replace(opened.call, state=ModelCallState.FAILED, error=_PROCESS_ENDED)
        ids = opened.session_id, record.call_id
        db.execute(
            "INSERT INTO calls SELECT ?, ?, ?, ?, ? FROM sessions"
            " WHERE session_id = ? AND state IN ('open', 'finished') ON CONFLICT DO NOTHING",
            (number, opened.number, *ids, codec.encode(StoredCall(record)), opened.session_id),
        )


def _num_open(db: Database, condition: str) -> int:
    return int(db.execute(f"SELECT COUNT(*) FROM sessions WHERE state = 'open'{condition}").fetchone()[0])


def _at(places: Collection[int]) -> str:
    return f"place IN ({', '.join(map(str, sorted(places))) or 'NULL'})"
