"""The sessions of one endpoint process on disk: facts, calls and turns, in one SQLite file that it alone writes.

Ownership: the file, the one thread that touches it, and the file of intents beside it, which has the calls while
they run. All work that waits at a time is one transaction, and nobody's call returns before its transaction is
committed. In WAL mode with synchronous=NORMAL a commit survives a killed process, not a power cut: a session that
is being talked to dies with its machine anyway, and a finished one is in the run's TrajectoryStore, which waits for
the disk.

Invariants: a call that began is among the intents, in `calls`, or in both: what `calls` says counts. One count
numbers beginnings and ends, on and on over restarts: calls come back in the order they began, turns in the order
they were committed. A row carries a CRC, and one that fails it is counted, left out, and leaves its session
incomplete; what is deleted or expired stays as a tombstone, and no write of a late call brings it back.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agentloop import codec
from agentloop.errors import AgentLoopError, InvalidRequest, ServiceUnavailable
from agentloop.sessions import SessionFacts, SessionState
from agentloop.trajectory import CallRecord, Node
from agentloop_servers.endpoint.open_calls_log import Intent, Intents, read_intents
from agentloop_servers.endpoint.session_rows import (
    LIVE,
    SCHEMA,
    SCHEMA_VERSION,
    RowState,
    StoredCall,
    StoredSession,
    fail_open_calls,
    last_number,
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Work that waits for its transaction."""

    work: Work[Any]
    done: asyncio.Future[Any]
    on_committed: Callable[[], None] | None


class SessionStore:
    """The journal of sessions. `await start()`, and in the end `await close()`.

    Every coroutine returns once its work is committed, and raises ServiceUnavailable when the disk fails: nothing
    was stored then. `wall_s` is the time in seconds since 1970.
    """

    def __init__(self, path: str | Path, wall_s: Callable[[], float], executor: Executor | None = None) -> None:
        """`executor` runs one call at a time; a thread of its own by default."""
        self._path = Path(path)
        self._wall_s = wall_s
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="sessions")
        self._db: sqlite3.Connection | None = None
        self._intents_path = self._path.with_suffix(".intents")
        self._intents = Intents(self._intents_path)
        self._numbers = itertools.count(1)
        self._waiting: list[_Piece] = []  # their callers wait
        self._is_writing = False
        self.num_corrupt_rows = 0  # met so far

    async def start(self) -> int:
        """Open the files; calls that a dead process left open have failed. Returns how many sessions are open.

        Raises InvalidRequest if the file is no session store, and ServiceUnavailable when the disk fails.
        """
        loop = asyncio.get_running_loop()
        left, num_damaged = await loop.run_in_executor(self._executor, self._open)
        self.num_corrupt_rows += num_damaged
        last = max(await self._commit(last_number), *(intent.number for intent in left), 0)
        self._numbers = itertools.count(last + 1)
        num_open = await self._commit(lambda db: fail_open_calls(db, left, self._numbers))
        await loop.run_in_executor(self._executor, self._intents.open)
        return num_open

    async def close(self) -> None:
        """Finish what waits, then let go of the files. Idempotent."""
        while self._is_writing:
            await self._commit(lambda db: None)
        if self._db is not None:
            db, self._db = self._db, None
            self._intents.close()
            await asyncio.get_running_loop().run_in_executor(self._executor, db.close)
            self._executor.shutdown()

    # --- the journal of a session ---

    def begin(self, session_id: str, call: CallRecord) -> None:
        """A call is accepted: kept on return. Raises ServiceUnavailable, and nothing is kept then."""
        self._intents.begin(next(self._numbers), session_id, call)

    async def end(self, session_id: str, call: CallRecord, nodes: Sequence[Node]) -> None:
        """A call is committed, with its turns, or has failed; this replaces what was said of it before.

        Raises SessionNotFound for a tombstone.
        """
        intent, number = self._intents.of_call(session_id, call.call_id), next(self._numbers)
        began = number if intent is None else intent.number
        stored = StoredCall(call, tuple(nodes))

        def work(db: sqlite3.Connection) -> None:
            _, good_until = require(db, session_id, LIVE)
            put_call(db, session_id, stored, number, began)
            if good_until < self._wall_s():
                self._extend(db, session_id)

        await self._commit(work, lambda: self._intents.end(session_id, call.call_id))

    async def save(self, facts: SessionFacts) -> bool:
        """Replace a session's facts; whether this has finished it. Raises SessionNotFound for a tombstone, and
        SessionFinished rather than open it again."""

        def work(db: sqlite3.Connection) -> bool:
            allowed = LIVE if facts.state is SessionState.FINISHED else frozenset({RowState.OPEN})
            state, _ = require(db, facts.session_id, allowed)
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
        open_calls = self._intents.of_session(session_id)
        return await self._commit(lambda db: self._load(db, session_id, open_calls))

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
            db.execute("DELETE FROM calls WHERE session_id = ?", (session_id,))
            if state is None:
                db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            else:
                statement = "UPDATE sessions SET state = ?, value = x'', crc = 0 WHERE session_id = ?"
                db.execute(statement, (state, session_id))
            return was_open

        return await self._commit(work, lambda: self._intents.end_all(session_id))

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

    async def _commit(self, work: Work[T], on_committed: Callable[[], None] | None = None) -> T:
        """`on_committed` is called even if the caller has left."""
        if self._db is None:
            raise ServiceUnavailable("the session store is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Piece(work, done, on_committed))
        self._write_waiting()
        return await done

    def _write_waiting(self) -> None:
        """Give the thread a batch, unless it has one: when that is done, the next one goes."""
        if self._is_writing or not self._waiting:
            return
        self._is_writing = True
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
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

    def _open(self) -> tuple[list[Intent], int]:
        try:
            left = read_intents(self._intents_path)
        except OSError as error:
            raise InvalidRequest(f"{self._intents_path.name} cannot be read: {error}") from error
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
        return left

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Piece]) -> None:
        outcomes = self._run([piece.work for piece in batch])
        loop.call_soon_threadsafe(self._deliver, batch, outcomes)

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

    def _load(self, db: sqlite3.Connection, session_id: str, open_calls: Sequence[Intent]) -> StoredSession | None:
        columns = "state, owner, is_recorded, expires_at, CAST(value AS BLOB), crc"
        row = db.execute(f"SELECT {columns} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            return None
        state, owner, is_recorded, expires_at = RowState(row[0]), row[1], bool(row[2]), row[3]
        if state not in LIVE:
            return StoredSession(state, owner, is_recorded, expires_at)
        facts = self._unpacked(row[4], row[5], SessionFacts)
        statement = "SELECT call_id, began, CAST(value AS BLOB), crc FROM calls WHERE session_id = ? ORDER BY seq"
        rows = db.execute(statement, (session_id,)).fetchall()
        calls = sound([(call_id, self._unpacked(data, crc, StoredCall)) for call_id, _, data, crc in rows])
        records = {intent.call.call_id: (intent.number, intent.call) for intent in open_calls}
        for (call_id, began, _, _), call in zip(rows, calls, strict=True):
            records[call_id] = began, call.record  # some may have ended since `open_calls` was taken
        in_order = sorted(records.values(), key=lambda numbered: numbered[0])
        nodes = tuple(itertools.chain.from_iterable(call.nodes for call in calls))
        return StoredSession(
            state, owner, is_recorded, expires_at, facts, tuple(record for _, record in in_order), nodes
        )

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
