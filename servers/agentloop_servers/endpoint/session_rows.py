"""The rows of the session store: what they hold, how they are checked, and what a damaged one leaves.

Functions run in the store's thread, inside its transaction; those that raise do so before they write.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentloop import codec
from agentloop.errors import SessionFinished, SessionNotFound
from agentloop.sessions import SessionFacts
from agentloop.trajectory import CallRecord, ModelCallState, Node
from agentloop_servers.endpoint.open_calls_log import Intent

_PROCESS_ENDED = "the endpoint's process ended meanwhile"

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, is_recorded INTEGER NOT NULL,
    ttl_s REAL NOT NULL, expires_at REAL NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    seq INTEGER PRIMARY KEY, began INTEGER NOT NULL, session_id TEXT NOT NULL, call_id TEXT NOT NULL,
    value BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (session_id, call_id));
CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_at) WHERE state IN ('open', 'finished');
CREATE INDEX IF NOT EXISTS sessions_owed ON sessions (session_id) WHERE state = 'finished' AND is_recorded = 0;
"""


class RowState(StrEnum):
    """Where a session is in its life. The last two are tombstones."""

    OPEN = "open"
    FINISHED = "finished"
    DELETED = "deleted"
    GONE = "gone"  # expired


LIVE = frozenset({RowState.OPEN, RowState.FINISHED})


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call that has ended, with its turns: one row."""

    record: CallRecord
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as it is on disk. A tombstone has no facts, nor has one whose facts are damaged."""

    state: RowState
    owner: str
    is_recorded: bool
    expires_at: float
    facts: SessionFacts | None = None
    calls: tuple[CallRecord, ...] = ()
    nodes: tuple[Node, ...] = ()


def packed(value: Any) -> tuple[bytes, int]:
    """A value as it is stored: its bytes and their checksum."""
    data = codec.encode(value)
    return data, zlib.crc32(data)


def state_of(db: sqlite3.Connection, session_id: str) -> RowState | None:
    """A session's state; None for an id that was never used."""
    row = db.execute("SELECT state FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return None if row is None else RowState(row[0])


def require(db: sqlite3.Connection, session_id: str, allowed: frozenset[RowState]) -> tuple[RowState, float]:
    """The session's state, if it is an allowed one, and the time until which it needs no later expiry.

    Raises SessionNotFound or SessionFinished.
    """
    statement = "SELECT state, expires_at - ttl_s FROM sessions WHERE session_id = ?"
    row = db.execute(statement, (session_id,)).fetchone()
    state = None if row is None else RowState(row[0])
    if state is None or state not in LIVE:
        raise SessionNotFound(f"there is no session {session_id!r}", param="session_id")
    if state not in allowed:
        raise SessionFinished(f"session {session_id!r} is finished", param="session_id")
    return state, row[1]


def put_call(db: sqlite3.Connection, session_id: str, call: StoredCall, number: int, began: int) -> None:
    """Write a call down that ended as `number`, in its old place if it has one."""
    row = (number, began, session_id, call.record.call_id, *packed(call))
    db.execute(
        "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (session_id, call_id) DO UPDATE"
        " SET value = excluded.value, crc = excluded.crc",
        row,
    )


def last_number(db: sqlite3.Connection) -> int:
    """The greatest number there is: a call ends after it began."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) FROM calls").fetchone()[0])


def fail_open_calls(db: sqlite3.Connection, intents: Sequence[Intent], numbers: Iterator[int]) -> int:
    """The process that ran them has ended. Returns how many sessions are open."""
    for intent in intents:
        record = dataclasses.replace(intent.call, state=ModelCallState.FAILED, error=_PROCESS_ENDED)
        ids = intent.session_id, record.call_id
        db.execute(
            "INSERT OR IGNORE INTO calls SELECT ?, ?, ?, ?, ?, ? FROM sessions"
            " WHERE session_id = ? AND state IN ('open', 'finished')",
            (next(numbers), intent.number, *ids, *packed(StoredCall(record)), intent.session_id),
        )
    return int(db.execute("SELECT COUNT(*) FROM sessions WHERE state = 'open'").fetchone()[0])


def lost_call(call_id: str) -> CallRecord:
    """What stands for a call whose row is damaged. No retry can heal it: its digest is nobody's."""
    return damaged(CallRecord(call_id, b"", 0, ModelCallState.FAILED))


def damaged(call: CallRecord) -> CallRecord:
    """The call, as failed for what the disk lost."""
    return dataclasses.replace(call, state=ModelCallState.FAILED, error="what the disk had of it is damaged")


def sound(found: Sequence[tuple[str, StoredCall | None]]) -> list[StoredCall]:
    """Calls by id, in the order they ended, without the turns that descend from damaged ones: those have failed.

    A call's turns stand and fall together, so what comes of a damaged one is known by its absence.
    """
    known: set[str | None] = {None}  # nodes that a turn may follow; None: a root follows nothing
    calls = []
    for call_id, call in found:
        if call is None:
            calls.append(StoredCall(lost_call(call_id)))
        elif any(node.parent_id not in known for node in call.nodes):
            calls.append(StoredCall(damaged(call.record)))
        else:
            known.update(node.node_id for node in call.nodes)
            calls.append(call)
    return calls
