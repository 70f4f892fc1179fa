"""The rows of the session store: what they hold, how they are checked, and what a damaged one leaves.

Functions run in the store's thread, inside its transaction; those that raise do so before they write.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentloop import codec
from agentloop.capture.node import CallRecord, CallState, Node
from agentloop.errors import SessionFinished, SessionNotFound
from agentloop.session_facts import SessionFacts

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, is_recorded INTEGER NOT NULL,
    ttl_s REAL NOT NULL, expires_at REAL NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL, call_id TEXT NOT NULL, is_open INTEGER NOT NULL,
    value BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (session_id, call_id));
CREATE TABLE IF NOT EXISTS nodes (
    seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL, call_id TEXT NOT NULL, value BLOB NOT NULL,
    crc INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_at) WHERE state IN ('open', 'finished');
CREATE INDEX IF NOT EXISTS sessions_owed ON sessions (session_id) WHERE state = 'finished' AND is_recorded = 0;
CREATE INDEX IF NOT EXISTS calls_open ON calls (seq) WHERE is_open = 1;
CREATE INDEX IF NOT EXISTS nodes_by_call ON nodes (session_id, call_id);
"""


class RowState(StrEnum):
    """Where a session is in its life. The last two are tombstones."""

    OPEN = "open"
    FINISHED = "finished"
    DELETED = "deleted"
    GONE = "gone"  # expired


LIVE = frozenset({RowState.OPEN, RowState.FINISHED})


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


def require(db: sqlite3.Connection, session_id: str, allowed: frozenset[RowState]) -> RowState:
    """The session's state, if it is an allowed one. Raises SessionNotFound or SessionFinished."""
    state = state_of(db, session_id)
    if state is None or state not in LIVE:
        raise SessionNotFound(f"there is no session {session_id!r}", param="session_id")
    if state not in allowed:
        raise SessionFinished(f"session {session_id!r} is finished", param="session_id")
    return state


def put_call(db: sqlite3.Connection, session_id: str, call: CallRecord) -> None:
    """Write a call down, in its old place if it has one."""
    db.execute(
        "INSERT INTO calls (session_id, call_id, is_open, value, crc) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
        " SET is_open = excluded.is_open, value = excluded.value, crc = excluded.crc",
        (session_id, call.call_id, call.state is CallState.OPEN, *packed(call)),
    )


def fail_open_calls(db: sqlite3.Connection) -> int:
    """The process that ran them has ended. Returns how many sessions are open."""
    rows = db.execute("SELECT seq, call_id, CAST(value AS BLOB), crc FROM calls WHERE is_open = 1").fetchall()
    for seq, call_id, data, crc in rows:
        call = codec.decode(data, CallRecord) if zlib.crc32(data) == crc else None
        if call is None:
            call = CallRecord(call_id, b"", 0, CallState.OPEN)
        failed = dataclasses.replace(call, state=CallState.FAILED, error="the endpoint's process ended meanwhile")
        db.execute("UPDATE calls SET is_open = 0, value = ?, crc = ? WHERE seq = ?", (*packed(failed), seq))
    return int(db.execute("SELECT COUNT(*) FROM sessions WHERE state = 'open'").fetchone()[0])


def lost_call(call_id: str) -> CallRecord:
    """What stands for a call whose row is damaged. No retry can heal it: its digest is nobody's."""
    return damaged(CallRecord(call_id, b"", 0, CallState.FAILED))


def damaged(call: CallRecord) -> CallRecord:
    """The call, as failed for what the disk lost."""
    return dataclasses.replace(call, state=CallState.FAILED, error="what the disk had of it is damaged")


def sound(
    calls: list[CallRecord], found: list[tuple[str, Node | None]]
) -> tuple[tuple[CallRecord, ...], tuple[Node, ...]]:
    """Without what is damaged and what descends from it. The calls of those turns have failed."""
    nodes: dict[str, Node] = {}
    lost: set[str] = set()
    for call_id, node in found:
        if node is None or (node.parent_id is not None and node.parent_id not in nodes):
            lost.add(call_id)
        else:
            nodes[node.node_id] = node
    # A call's turns stand and fall together: its siblings may be the ones that are whole.
    kept: dict[str, Node] = {}
    for node in nodes.values():
        if node.call_id in lost or (node.parent_id is not None and node.parent_id not in kept):
            lost.add(node.call_id)
        else:
            kept[node.node_id] = node
    whole = tuple(node for node in kept.values() if node.call_id not in lost)
    return tuple(damaged(call) if call.call_id in lost else call for call in calls), whole
