"""The sessions of one endpoint process on disk: records, calls and turns, in one SQLite file that it alone writes.

Ownership: the file, through the one thread that touches it, and the open-call log beside it. In WAL mode with
synchronous=NORMAL a commit survives a killed process, not a power cut: a session that is being talked to dies with
its machine anyway, and a finished one is in the run's TrajectoryStore, which waits for the disk.

Invariants: a call that began is in the open-call log, in `calls`, or in both: what `calls` says counts. One count
numbers beginnings and ends, on and on over restarts: calls come back in the order they began, turns in the order
they were committed. A damaged row is left out, and leaves its session incomplete; what is deleted or expired stays
as a tombstone, and no write of a late call brings it back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentloop.errors import InvalidRequest, ServiceUnavailable, SessionFinished, SessionNotFound
from agentloop.sessions.journal import SessionRecord, SessionState
from agentloop.storage.disk_room import DiskRoom
from agentloop.storage.home import Schema
from agentloop.storage.sqlite import BatchWriter, RowChecker, Work, one_thread, open_database, packed
from agentloop.trajectory.node import CallRecord, ModelCallState, Node
from agentloop_servers.endpoint.open_calls_log import OpenCall, OpenCallsLog, read_open_calls

T = TypeVar("T")

MAX_WRITE_BATCH = 32
"""Pieces of work in one transaction: as many calls go on at once when it is committed."""

_EXPIRY_SLACK = 1 / 16  # of the time to live: a session's expiry is written when it moved by that much
_PROCESS_ENDED = "the endpoint's process ended meanwhile"
_DAMAGED = "what the disk had of it is damaged"
_LIVE = frozenset({SessionState.OPEN, SessionState.FINISHED})

_SCHEMA = Schema(
    kind="session store",
    version=1,
    tables="""
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, is_recorded INTEGER NOT NULL,
    ttl_s REAL NOT NULL, expires_at REAL NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    seq INTEGER PRIMARY KEY, began INTEGER NOT NULL, session_id TEXT NOT NULL, call_id TEXT NOT NULL,
    value BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (session_id, call_id));
CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_at) WHERE state IN ('open', 'finished');
CREATE INDEX IF NOT EXISTS sessions_by_owner ON sessions (owner) WHERE state IN ('open', 'finished');
CREATE INDEX IF NOT EXISTS sessions_owed ON sessions (session_id) WHERE state = 'finished' AND is_recorded = 0;
""",
    synchronous="NORMAL",
)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call that has ended, with its turns: one row."""

    record: CallRecord
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as it is on disk. A tombstone has no record, nor has one whose record is damaged."""

    state: SessionState
    owner: str
    is_recorded: bool
    expires_at: float
    record: SessionRecord | None = None
    calls: tuple[CallRecord, ...] = ()
    nodes: tuple[Node, ...] = ()


class SessionStore:
    """The sessions on disk. `await start()`, and in the end `await close()`.

    Every coroutine returns once its work is committed, and raises StorageFull when the disk is full,
    ServiceUnavailable when it fails otherwise: nothing was stored then. `wall_s` is the time in seconds since 1970.
    """

    def __init__(
        self,
        path: str | Path,
        wall_s: Callable[[], float],
        executor: Executor | None = None,
        *,
        min_free_bytes: int = 0,
    ) -> None:
        """`executor` runs one call at a time; a thread of its own by default. With fewer than `min_free_bytes` free
        on the disk no session is created."""
        self._path = Path(path)
        self._room = DiskRoom(self._path.parent, min_free_bytes)
        self._wall_s = wall_s
        self._executor = executor or one_thread("sessions")
        self._writer: BatchWriter | None = None
        self._log = OpenCallsLog(self._log_path)
        self._numbers = itertools.count(1)
        self._rows = RowChecker(_SCHEMA.kind)
        self._num_damaged_lines = 0

    @property
    def _log_path(self) -> Path:
        return self._path.with_suffix(".open-calls")

    @property
    def num_corrupt_rows(self) -> int:
        """Damaged rows, and damaged lines of the open-call log, met so far."""
        return self._rows.num_corrupt_rows + self._num_damaged_lines

    async def start(self) -> int:
        """Open the files; calls that a dead process left open have failed. Returns how many sessions are open.

        Raises InvalidRequest if the file is no session store, StorageFull when the disk is full or read-only, and
        ServiceUnavailable when it fails otherwise.
        """
        loop = asyncio.get_running_loop()
        try:
            left, self._num_damaged_lines = await loop.run_in_executor(
                self._executor, read_open_calls, self._log_path
            )
        except OSError as error:
            raise InvalidRequest(f"{self._log_path.name} cannot be read: {error}") from error
        db = await loop.run_in_executor(self._executor, open_database, self._path, _SCHEMA)
        self._writer = BatchWriter(db, _SCHEMA.kind, self._executor, max_batch=MAX_WRITE_BATCH)
        last = max(await self._run(_last_number), *(opened.number for opened in left), 0)
        self._numbers = itertools.count(last + 1)
        num_open = await self._run(lambda db: _fail_open_calls(db, left, self._numbers))
        await loop.run_in_executor(self._executor, self._log.open)
        return num_open

    async def close(self) -> None:
        """Finish what waits, then let go of the files. Idempotent."""
        if self._writer is not None:
            await self._writer.close()
            self._log.close()

    # --- the journal of a session ---

    def open_call(self, session_id: str, call_record: CallRecord) -> None:
        """Keep an accepted call, before it is sampled. Raises ServiceUnavailable, and nothing is kept then."""
        self._log.add(next(self._numbers), session_id, call_record)

    async def close_call(self, session_id: str, call_record: CallRecord, nodes: Sequence[Node]) -> None:
        """Keep a call with its turns, committed or failed, in place of an earlier record of it. Raises
        SessionNotFound for a tombstone."""
        opened, number = self._log.of_call(session_id, call_record.call_id), next(self._numbers)
        began = number if opened is None else opened.number
        stored = StoredCall(call_record, tuple(nodes))

        def work(db: sqlite3.Connection) -> None:
            _, good_until = _require(db, session_id, _LIVE)
            _put_call(db, session_id, stored, number, began)
            if good_until < self._wall_s():
                self._extend(db, session_id)

        await self._run(work, lambda: self._log.remove(session_id, call_record.call_id))

    async def save(self, record: SessionRecord) -> bool:
        """Replace a session's record. Returns true if this has finished it.

        Raises SessionNotFound for a tombstone, and SessionFinished rather than open it again.
        """

        def work(db: sqlite3.Connection) -> bool:
            allowed = _LIVE if record.state is SessionState.FINISHED else frozenset({SessionState.OPEN})
            state, _ = _require(db, record.session_id, allowed)
            db.execute(
                "UPDATE sessions SET state = ?, value = ?, crc = ? WHERE session_id = ?",
                (record.state, *packed(record), record.session_id),
            )
            self._extend(db, record.session_id)
            return state is SessionState.OPEN and record.state is SessionState.FINISHED

        return await self._run(work)

    # --- a session's life ---

    async def create(self, record: SessionRecord) -> bool:
        """Store a new session. False: its id was used before. Raises StorageFull."""
        self._room.check()
        expires_at = self._wall_s() + record.ttl_s
        row = (record.session_id, record.owner, record.state, 0, record.ttl_s, expires_at)

        def work(db: sqlite3.Connection) -> bool:
            statement = "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            return db.execute(statement, (*row, *packed(record))).rowcount > 0

        return await self._run(work)

    async def load(self, session_id: str) -> StoredSession | None:
        """Load a session with everything it has, or its tombstone; None for an id that was never used."""
        open_calls = self._log.of_session(session_id)
        return await self._run(lambda db: self._load(db, session_id, open_calls))

    async def mark_recorded(self, session_id: str) -> None:
        """Note that a finished session's record is in the run's store, or never will be."""
        statement = "UPDATE sessions SET is_recorded = 1 WHERE session_id = ?"
        await self._run(lambda db: db.execute(statement, (session_id,)).rowcount)

    async def is_recorded(self, session_id: str) -> bool:
        """Tell if a finished session's record needs no more care."""
        statement = "SELECT 1 FROM sessions WHERE session_id = ? AND is_recorded = 1"
        return await self._run(lambda db: db.execute(statement, (session_id,)).fetchone() is not None)

    async def extend(self, session_id: str) -> None:
        """Let a session live for its whole time from now."""
        await self._run(lambda db: self._extend(db, session_id))

    async def delete(self, session_id: str, state: SessionState | None) -> bool:
        """Delete a session with its calls. A tombstone in `state` remains; None: nothing. Returns true if it was
        open."""

        def work(db: sqlite3.Connection) -> bool:
            was_open = _state_of(db, session_id) is SessionState.OPEN
            db.execute("DELETE FROM calls WHERE session_id = ?", (session_id,))
            if state is None:
                db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            else:
                statement = "UPDATE sessions SET state = ?, value = x'', crc = 0 WHERE session_id = ?"
                db.execute(statement, (state, session_id))
            return was_open

        return await self._run(work, lambda: self._log.remove_all(session_id))

    async def last_use(self) -> float:
        """Return about the latest use of a live session, in seconds since 1970; 0 without one."""
        statement = (
            "SELECT COALESCE(MAX(expires_at - ttl_s * ?), 0) FROM sessions WHERE state IN ('open', 'finished')"
        )
        return await self._run(lambda db: float(db.execute(statement, (1 + _EXPIRY_SLACK,)).fetchone()[0]))

    async def spare(self, grace_s: float) -> None:
        """Let every live session live for `grace_s`, or its whole time, from now: it was out of reach before."""
        statement = (
            "UPDATE sessions SET expires_at = MAX(expires_at, ? + MIN(ttl_s, ?))"
            " WHERE state IN ('open', 'finished')"
        )
        await self._run(lambda db: db.execute(statement, (self._wall_s(), grace_s)).rowcount)

    async def expired(self, limit: int) -> list[str]:
        """Return up to `limit` live sessions whose time is over, the oldest first."""
        statement = (
            "SELECT session_id FROM sessions WHERE state IN ('open', 'finished') AND expires_at <= ?"
            " ORDER BY expires_at LIMIT ?"
        )
        arguments = (self._wall_s(), limit)
        return await self._run(lambda db: [row[0] for row in db.execute(statement, arguments)])

    async def num_of_owners(self) -> dict[str, int]:
        """Count the open sessions of each owner."""
        statement = "SELECT owner, COUNT(*) FROM sessions WHERE state = 'open' GROUP BY owner"
        return await self._run(lambda db: dict(db.execute(statement).fetchall()))

    async def of_owners(self, owners: Sequence[str], after: str, limit: int) -> list[SessionRecord]:
        """Return up to `limit` live sessions of these owners after id `after`, as owners know it, in that order."""
        marks = ", ".join("?" * len(owners))
        shown = "substr(session_id, instr(session_id, '~') + 1)"  # as `shown_id` does
        statement = (
            f"SELECT session_id, CAST(value AS BLOB), crc FROM sessions WHERE owner IN ({marks})"
            f" AND state IN ('open', 'finished') AND {shown} > ? ORDER BY {shown} LIMIT ?"
        )

        def work(db: sqlite3.Connection) -> list[SessionRecord]:
            rows = db.execute(statement, (*owners, after, limit)).fetchall()
            found = (self._rows.value("sessions", SessionRecord, *row) for row in rows)
            return [record for record in found if record is not None]

        return await self._run(work)

    async def owed(self, after: str, limit: int) -> list[str]:
        """Return up to `limit` finished sessions after id `after`, by id, that the run's store lacks."""
        statement = (
            "SELECT session_id FROM sessions WHERE state = 'finished' AND is_recorded = 0 AND session_id > ?"
            " ORDER BY session_id LIMIT ?"
        )
        return await self._run(lambda db: [row[0] for row in db.execute(statement, (after, limit))])

    # --- inside ---

    async def _run(self, work: Work[T], on_committed: Callable[[], None] | None = None) -> T:
        if self._writer is None:
            raise ServiceUnavailable("the session store is closed")
        try:
            return await self._writer.run(work, on_committed)
        except sqlite3.Error as error:
            raise ServiceUnavailable(f"the session store failed: {error}") from error

    def _extend(self, db: sqlite3.Connection, session_id: str) -> None:
        """Move the expiry: never too early, and at most the slack too late."""
        db.execute(
            "UPDATE sessions SET expires_at = :now + ttl_s * :slack"
            " WHERE session_id = :session AND expires_at < :now + ttl_s",
            {"now": self._wall_s(), "slack": 1 + _EXPIRY_SLACK, "session": session_id},
        )

    def _load(
        self, db: sqlite3.Connection, session_id: str, open_calls: Sequence[OpenCall]
    ) -> StoredSession | None:
        columns = "state, owner, is_recorded, expires_at, CAST(value AS BLOB), crc"
        row = db.execute(f"SELECT {columns} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            return None
        state, owner, is_recorded, expires_at = SessionState(row[0]), row[1], bool(row[2]), row[3]
        if state not in _LIVE:
            return StoredSession(state, owner, is_recorded, expires_at)
        record = self._rows.value("sessions", SessionRecord, session_id, row[4], row[5])
        statement = "SELECT call_id, began, CAST(value AS BLOB), crc FROM calls WHERE session_id = ? ORDER BY seq"
        rows = db.execute(statement, (session_id,)).fetchall()
        calls = _sound(
            [
                (call_id, self._rows.value("calls", StoredCall, (session_id, call_id), data, crc))
                for call_id, _, data, crc in rows
            ]
        )
        ended_or_open = {opened.call.call_id: (opened.number, opened.call) for opened in open_calls}
        for (call_id, began, _, _), call in zip(rows, calls, strict=True):
            ended_or_open[call_id] = began, call.record  # some may have ended since `open_calls` was taken
        in_order = sorted(ended_or_open.values(), key=lambda numbered: numbered[0])
        nodes = tuple(itertools.chain.from_iterable(call.nodes for call in calls))
        return StoredSession(
            state, owner, is_recorded, expires_at, record, tuple(call for _, call in in_order), nodes
        )


# --- in the thread, inside its transaction: what raises does so before it writes ---


def _state_of(db: sqlite3.Connection, session_id: str) -> SessionState | None:
    """Return a session's state; None for an id that was never used."""
    row = db.execute("SELECT state FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else SessionState(row[0])


def _require(
    db: sqlite3.Connection, session_id: str, allowed: frozenset[SessionState]
) -> tuple[SessionState, float]:
    """Return the session's state, if it is an allowed one, and the time until which it needs no later expiry.

    Raises SessionNotFound or SessionFinished.
    """
    statement = "SELECT state, expires_at - ttl_s FROM sessions WHERE session_id = ?"
    row = db.execute(statement, (session_id,)).fetchone()
    state = None if row is None else SessionState(row[0])
    if state is None or state not in _LIVE:
        raise SessionNotFound(f"there is no session {session_id!r}", param="session_id")
    if state not in allowed:
        raise SessionFinished(f"session {session_id!r} is finished", param="session_id")
    return state, row[1]


def _put_call(db: sqlite3.Connection, session_id: str, call: StoredCall, number: int, began: int) -> None:
    """Write a call down that ended as `number`, in its old place if it has one."""
    row = (number, began, session_id, call.record.call_id, *packed(call))
    db.execute(
        "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (session_id, call_id) DO UPDATE"
        " SET value = excluded.value, crc = excluded.crc",
        row,
    )


def _last_number(db: sqlite3.Connection) -> int:
    """Return the greatest number there is: a call ends after it began."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) FROM calls").fetchone()[0])


def _fail_open_calls(db: sqlite3.Connection, left: Sequence[OpenCall], numbers: Iterator[int]) -> int:
    """Write down that these calls failed with their process. Returns how many sessions are open."""
    for opened in left:
        record = dataclasses.replace(opened.call, state=ModelCallState.FAILED, error=_PROCESS_ENDED)
        ids = opened.session_id, record.call_id
        db.execute(
            "INSERT OR IGNORE INTO calls SELECT ?, ?, ?, ?, ?, ? FROM sessions"
            " WHERE session_id = ? AND state IN ('open', 'finished')",
            (next(numbers), opened.number, *ids, *packed(StoredCall(record)), opened.session_id),
        )
    return int(db.execute("SELECT COUNT(*) FROM sessions WHERE state = 'open'").fetchone()[0])


def _damaged(call: CallRecord) -> CallRecord:
    return dataclasses.replace(call, state=ModelCallState.FAILED, error=_DAMAGED)


def _sound(found: Sequence[tuple[str, StoredCall | None]]) -> list[StoredCall]:
    """Return calls in the order they ended, without the turns that descend from damaged ones: those have failed.

    A call's turns stand and fall together, so what comes of a damaged one is known by its absence.
    """
    known: set[str | None] = {None}  # nodes that a turn may follow; None: a root follows nothing
    calls = []
    for call_id, call in found:
        if call is None:  # no retry can heal it: its digest is nobody's
            lost = CallRecord(call_id, b"", 0, ModelCallState.FAILED, error=_DAMAGED)
            calls.append(StoredCall(lost))
        elif any(node.parent_id not in known for node in call.nodes):
            calls.append(StoredCall(_damaged(call.record)))
        else:
            known.update(node.node_id for node in call.nodes)
            calls.append(call)
    return calls
