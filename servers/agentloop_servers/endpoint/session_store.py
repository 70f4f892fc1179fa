"""The sessions of one endpoint process on disk: facts, calls and turns, in one SQLite file that it alone writes.

Ownership: the file, and the one thread that touches it. All work that waits at a time is one transaction, and
nobody's call returns before its transaction is committed. In WAL mode with synchronous=NORMAL a commit survives a
killed process, not a power cut: a session that is being talked to dies with its machine anyway, and a finished one
is in the run's TrajectoryStore, which waits for the disk.

Invariants: a row carries a CRC, and one that fails it is counted, left out, and leaves its session incomplete; what
is deleted or expired stays as a tombstone, and no write of a late call brings it back.
"""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agentloop import codec
from agentloop.capture.node import CallRecord, Node
from agentloop.errors import AgentLoopError, InvalidRequest, ServiceUnavailable
from agentloop.session_facts import SessionFacts, SessionState
from agentloop_servers.endpoint.session_rows import (
    LIVE,
    SCHEMA,
    SCHEMA_VERSION,
    RowState,
    StoredSession,
    fail_open_calls,
    lost_call,
    packed,
    put_call,
    require,
    sound,
    state_of,
)

__all__ = ["RowState", "SessionStore", "StoredSession"]

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_BATCH = 32  # pieces of work in one transaction; as many calls go on at once when it is committed

_EXPIRY_SLACK = 1 / 16  # of the time to live: a session's expiry is written when it moved by that much

_log = structlog.stdlib.get_logger(__name__)


class SessionStore:
    """The journal of sessions. `await start()`, and in the end `await close()`.

    Every method returns once its work is committed, and raises ServiceUnavailable when the disk fails: nothing was
    stored then. `wall_s` is the time in seconds since 1970.
    """

    def __init__(self, path: str | Path, wall_s: Callable[[], float], executor: Executor | None = None) -> None:
        """`executor` runs one call at a time; a thread of its own by default."""
        self._path = Path(path)
        self._wall_s = wall_s
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="sessions")
        self._db: sqlite3.Connection | None = None
        self._waiting: list[tuple[Work[Any], asyncio.Future[Any]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self.num_corrupt_rows = 0  # met so far

    async def start(self) -> int:
        """Open the file; calls that a dead process left open have failed. Returns how many sessions are open.

        Raises InvalidRequest if the file is no session store.
        """
        await asyncio.get_running_loop().run_in_executor(self._executor, self._open)
        return await self._commit(fail_open_calls)

    async def close(self) -> None:
        """Finish what waits, then let go of the file. Idempotent."""
        while self._flusher is not None:
            await self._flusher
        if self._db is not None:
            db, self._db = self._db, None
            await asyncio.get_running_loop().run_in_executor(self._executor, db.close)
            self._executor.shutdown()

    # --- the journal of a session ---

    async def begin(self, session_id: str, call: CallRecord) -> None:
        """A call is accepted. Raises SessionFinished or SessionNotFound."""

        def work(db: sqlite3.Connection) -> None:
            require(db, session_id, frozenset({RowState.OPEN}))
            put_call(db, session_id, call)
            self._extend(db, session_id)

        await self._commit(work)

    async def end(self, session_id: str, call: CallRecord, nodes: Sequence[Node]) -> None:
        """A call is committed, with its turns, or has failed; this replaces what was said of it before.

        Raises SessionNotFound for a tombstone.
        """

        def work(db: sqlite3.Connection) -> None:
            require(db, session_id, LIVE)
            put_call(db, session_id, call)
            db.execute("DELETE FROM nodes WHERE session_id = ? AND call_id = ?", (session_id, call.call_id))
            rows = [(session_id, node.call_id, *packed(node)) for node in nodes]
            db.executemany("INSERT INTO nodes (session_id, call_id, value, crc) VALUES (?, ?, ?, ?)", rows)
            self._extend(db, session_id)

        await self._commit(work)

    async def save(self, facts: SessionFacts) -> bool:
        """Replace a session's facts; whether this has finished it. Raises SessionNotFound for a tombstone, and
        SessionFinished rather than open it again."""

        def work(db: sqlite3.Connection) -> bool:
            allowed = LIVE if facts.state is SessionState.FINISHED else frozenset({RowState.OPEN})
            state = require(db, facts.session_id, allowed)
            db.execute(
                "UPDATE sessions SET state = ?, value = ?, crc = ? WHERE session_id = ?",
                (RowState(facts.state.value), *packed(facts), facts.session_id),
            )
            self._extend(db, facts.session_id)
            return state is RowState.OPEN and facts.state is SessionState.FINISHED

        return await self._commit(work)

    # --- a session's life ---

    async def create(self, facts: SessionFacts) -> bool:
        """Store a new session. False: there is, or was, one of that id."""
        expires_at = self._wall_s() + facts.ttl_s
        row = (facts.session_id, facts.owner, RowState(facts.state.value), 0, facts.ttl_s, expires_at)

        def work(db: sqlite3.Connection) -> bool:
            statement = "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            return db.execute(statement, (*row, *packed(facts))).rowcount > 0

        return await self._commit(work)

    async def load(self, session_id: str) -> StoredSession | None:
        """A session with everything it has, or its tombstone; None for an id that was never used."""
        return await self._commit(lambda db: self._load(db, session_id))

    async def mark_recorded(self, session_id: str) -> None:
        """A finished session's record is in the run's store, or never will be."""
        statement = "UPDATE sessions SET is_recorded = 1 WHERE session_id = ?"
        await self._commit(lambda db: db.execute(statement, (session_id,)).rowcount)

    async def is_recorded(self, session_id: str) -> bool:
        """Whether a finished session's record needs no more care."""
        statement = "SELECT 1 FROM sessions WHERE session_id = ? AND is_recorded = 1"
        return await self._commit(lambda db: db.execute(statement, (session_id,)).fetchone() is not None)

    async def extend(self, session_id: str) -> None:
        """Let a session live for its whole time from now."""
        await self._commit(lambda db: self._extend(db, session_id))

    async def bury(self, session_id: str, state: RowState | None) -> bool:
        """Drop all that a session has; it leaves a tombstone, or nothing for None. Whether it was open."""

        def work(db: sqlite3.Connection) -> bool:
            was_open = state_of(db, session_id) is RowState.OPEN
            for table in ("nodes", "calls"):
                db.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))
            if state is None:
                db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            else:
                statement = "UPDATE sessions SET state = ?, value = x'', crc = 0 WHERE session_id = ?"
                db.execute(statement, (state, session_id))
            return was_open

        return await self._commit(work)

    async def expired(self, limit: int) -> list[str]:
        """Up to `limit` live sessions whose time is over, the oldest first."""
        statement = (
            "SELECT session_id FROM sessions WHERE state IN ('open', 'finished') AND expires_at <= ?"
            " ORDER BY expires_at LIMIT ?"
        )
        arguments = (self._wall_s(), limit)
        return await self._commit(lambda db: [row[0] for row in db.execute(statement, arguments)])

    async def owed(self, after: str, limit: int) -> list[str]:
        """Up to `limit` finished sessions after id `after`, by id, that lack their record in the run's store."""
        statement = (
            "SELECT session_id FROM sessions WHERE state = 'finished' AND is_recorded = 0 AND session_id > ?"
            " ORDER BY session_id LIMIT ?"
        )
        return await self._commit(lambda db: [row[0] for row in db.execute(statement, (after, limit))])

    # --- the event loop's side ---

    async def _commit(self, work: Work[T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name="sessions-flush")
        return await done

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                works = [work for work, _ in batch]
                outcomes = await loop.run_in_executor(self._executor, self._run, works)
                for (_, done), outcome in zip(batch, outcomes, strict=True):
                    if done.done():
                        continue  # its caller has left
                    if isinstance(outcome, Exception):
                        done.set_exception(outcome)
                    else:
                        done.set_result(outcome)
        finally:
            self._flusher = None

    # --- the thread's side ---

    def _open(self) -> None:
        try:
            db = sqlite3.connect(self._path, timeout=30.0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise InvalidRequest(f"{self._path.name} cannot be opened: {error}") from error
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise InvalidRequest(f"{self._path.name} is not a session store of schema {SCHEMA_VERSION}")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            db.close()
            raise InvalidRequest(f"{self._path.name} is not a session store: {error}") from error
        except InvalidRequest:
            db.close()
            raise
        self._db = db

    def _run(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Do everything in one transaction; the outcomes, errors among them. Where one piece of work spoils the
        transaction, each gets its own."""
        db = self._db
        if db is None:
            return [ServiceUnavailable("the session store is closed")] * len(works)
        try:
            db.execute("BEGIN IMMEDIATE")
            outcomes = [_outcome(work, db) for work in works]
            db.execute("COMMIT")
            return outcomes
        except Exception as error:
            problem: Exception = error
            if isinstance(error, sqlite3.Error):
                problem = ServiceUnavailable(f"the session store failed: {error}")
                _log.error("sessions_not_written", num_calls=len(works), error=repr(error))
            if db.in_transaction:
                db.execute("ROLLBACK")
        return [problem] if len(works) == 1 else [self._run([work])[0] for work in works]

    def _extend(self, db: sqlite3.Connection, session_id: str) -> None:
        """Never too early, and at most the slack too late."""
        db.execute(
            "UPDATE sessions SET expires_at = :now + ttl_s * :slack"
            " WHERE session_id = :session AND expires_at < :now + ttl_s",
            {"now": self._wall_s(), "slack": 1 + _EXPIRY_SLACK, "session": session_id},
        )

    def _load(self, db: sqlite3.Connection, session_id: str) -> StoredSession | None:
        columns = "state, owner, is_recorded, expires_at, CAST(value AS BLOB), crc"
        row = db.execute(f"SELECT {columns} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            return None
        state, owner, is_recorded, expires_at = RowState(row[0]), row[1], bool(row[2]), row[3]
        if state not in LIVE:
            return StoredSession(state, owner, is_recorded, expires_at)
        facts = self._unpacked(row[4], row[5], SessionFacts)
        calls, nodes = self._load_calls(db, session_id), self._load_nodes(db, session_id)
        return StoredSession(state, owner, is_recorded, expires_at, facts, *sound(calls, nodes))

    def _load_calls(self, db: sqlite3.Connection, session_id: str) -> list[CallRecord]:
        rows = db.execute(
            "SELECT call_id, CAST(value AS BLOB), crc FROM calls WHERE session_id = ? ORDER BY seq", (session_id,)
        )
        # A damaged one is a failed call that no retry can heal: whatever it was, the session is not complete.
        return [self._unpacked(data, crc, CallRecord) or lost_call(call_id) for call_id, data, crc in rows]

    def _load_nodes(self, db: sqlite3.Connection, session_id: str) -> list[tuple[str, Node | None]]:
        rows = db.execute(
            "SELECT call_id, CAST(value AS BLOB), crc FROM nodes WHERE session_id = ? ORDER BY seq", (session_id,)
        )
        return [(call_id, self._unpacked(data, crc, Node)) for call_id, data, crc in rows]

    def _unpacked(self, data: bytes, crc: int, kind: type[T]) -> T | None:
        if zlib.crc32(data) == crc:
            try:
                return codec.decode(data, kind)
            except InvalidRequest as error:
                _log.error("corrupt_session_row", kind=kind.__name__, reason=error.message)
        self.num_corrupt_rows += 1
        return None


def _outcome(work: Work[Any], db: sqlite3.Connection) -> Any:
    """What the work returns, or the error of ours that it raised: those come before it writes anything."""
    try:
        return work(db)
    except AgentLoopError as error:
        return error
