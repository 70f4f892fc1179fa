"""Retention: deletes records of a run by policy, in batches that delay submitted results only briefly.

A record's value is deleted first ("emptied"). Its row stays, so that the record is still counted and never stored
or rolled out again. When all records of a finished rollout are empty, its rows are deleted and its id is listed as
deleted. Rollouts of sessions never finish, so their empty rows stay. Free pages are reused; if they exceed a
quarter of the file, the file shrinks. Age is measured with marks, which store the greatest row number at a time, so
that rows need no timestamp. The caller provides the time, which must never decrease.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from agentloop.storage import facts
from agentloop.storage.home import Database

TABLES = """
CREATE TABLE IF NOT EXISTS acknowledged (
    rollout_id TEXT PRIMARY KEY, seq INTEGER NOT NULL, emptied INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS record_times (at REAL PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deleted_rollouts (rollout_id TEXT PRIMARY KEY) WITHOUT ROWID;
"""

MAX_EMPTIED = 64
"""Maximum number of records emptied in one transaction."""

HAS_VALUE = "length(value) > 0"
"""The SQL condition for rows of `trajectories` that are not emptied."""

_PAGE_ROWS = 1000  # rows read by one statement
_MARKS_PER_AGE = 100  # marks per maximum age: the resolution of ages


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The conditions under which records are deleted. By default no record is deleted.

    By age and size, the oldest records of finished rollouts are deleted first, acknowledged or not.
    """

    deletes_acknowledged: bool = False  # records that a trainer acknowledged
    max_age_s: float | None = None
    max_bytes: int | None = None  # size of the store without its free pages

    @property
    def deletes(self) -> bool:
        """True if the policy deletes anything."""
        return self.deletes_acknowledged or self.max_age_s is not None or self.max_bytes is not None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Unfinished rollouts (`live`), and rollouts whose records are needed to compute staleness (`counted`)."""

    live: Collection[str] = field(default_factory=frozenset)
    counted: Collection[str] = field(default_factory=frozenset)


def acknowledge(db: Database, rollout_id: str, cursor: int) -> None:
    """Store the cursor up to which a trainer has received a rollout's records. An earlier cursor has no effect.

    A cursor beyond the last record is reduced to that record: later records have not been read.
    """
    newest = "SELECT COALESCE(MAX(seq), 0) FROM trajectories WHERE rollout_id = ? AND seq <= ?"
    (last,) = db.execute(newest, (rollout_id, cursor)).fetchone()
    db.execute(
        "INSERT INTO acknowledged VALUES (?, ?, 0)"
        " ON CONFLICT (rollout_id) DO UPDATE SET seq = excluded.seq WHERE excluded.seq > acknowledged.seq",
        (rollout_id, last),
    )


def last_mark(db: Database) -> float:
    """Return the time of the last mark, or 0."""
    return float(db.execute("SELECT COALESCE(MAX(at), 0) FROM record_times").fetchone()[0])


def trim(db: Database, policy: RetentionPolicy, now: float, unfinished: Unfinished) -> int:
    """Delete one batch by policy. Returns the number of emptied rows, else of freed pages; 0 if nothing is left."""
    _mark(db, policy, now)
    rows = list(_rows_to_empty(db, policy, now, unfinished))
    db.executemany("UPDATE trajectories SET value = ? WHERE seq = ?", [(b"", seq) for seq, _ in rows])
    facts.forget(db, [seq for seq, _ in rows])
    for rollout_id in {rollout_id for _, rollout_id in rows} - set(unfinished.live):
        _delete_if_empty(db, rollout_id)
    return len(rows) or db.shrink()


def _mark(db: Database, policy: RetentionPolicy, now: float) -> None:
    if policy.max_age_s is None or now - last_mark(db) < policy.max_age_s / _MARKS_PER_AGE:
        return
    newest = db.execute("SELECT COALESCE(MAX(seq), 0) FROM trajectories").fetchone()[0]
    db.execute(
        "INSERT INTO record_times VALUES (?, ?) ON CONFLICT (at) DO UPDATE SET seq = excluded.seq", (now, newest)
    )
    db.execute("DELETE FROM record_times WHERE at < ?", (now - 2 * policy.max_age_s,))


def _rows_to_empty(
    db: Database, policy: RetentionPolicy, now: float, unfinished: Unfinished
) -> Iterator[tuple[int, str]]:
    """Yield the `seq` and rollout id of at most `MAX_EMPTIED` rows."""
    if policy.deletes_acknowledged:
        acknowledged = _acknowledged(db, unfinished)
        if acknowledged:
            yield from acknowledged
            return
    old = 0
    if policy.max_age_s is not None:
        statement = "SELECT COALESCE(MAX(seq), 0) FROM record_times WHERE at <= ?"
        old = db.execute(statement, (now - policy.max_age_s,)).fetchone()[0]
    if policy.max_bytes is not None and db.num_bytes() > policy.max_bytes:
        old = db.execute("SELECT COALESCE(MAX(seq), 0) FROM trajectories").fetchone()[0]
    statement = (
        f"SELECT seq, rollout_id FROM trajectories WHERE seq > ? AND seq <= ? AND {HAS_VALUE} ORDER BY seq LIMIT ?"
    )
    num_found = last = 0
    while rows := db.execute(statement, (last, old, _PAGE_ROWS)).fetchall():
        for seq, rollout_id in rows:
            if rollout_id not in unfinished.live:
                num_found += 1
                yield seq, rollout_id
            if num_found == MAX_EMPTIED:
                return
        last = rows[-1][0]


def _acknowledged(db: Database, unfinished: Unfinished) -> list[tuple[int, str]]:
    waiting = db.execute("SELECT rollout_id, seq, emptied FROM acknowledged WHERE emptied < seq").fetchall()
    for rollout_id, cursor, emptied in waiting:
        if rollout_id in unfinished.counted:
            continue
        found: list[tuple[int, str]] = db.execute(
            "SELECT seq, rollout_id FROM trajectories WHERE rollout_id = ? AND seq > ? AND seq <= ?"
            " ORDER BY seq LIMIT ?",
            (rollout_id, emptied, cursor, MAX_EMPTIED),
        ).fetchall()
        upto = found[-1][0] if found else cursor
        db.execute("UPDATE acknowledged SET emptied = ? WHERE rollout_id = ?", (upto, rollout_id))
        if found:
            return found
        if rollout_id not in unfinished.live:
            _delete_if_empty(db, rollout_id)
    return []


def _delete_if_empty(db: Database, rollout_id: str) -> None:
    """Delete a submitted, finished rollout if all of its records are empty."""
    is_submitted = db.execute("SELECT 1 FROM groups WHERE rollout_id = ? LIMIT 1", (rollout_id,)).fetchone()
    left = f"SELECT 1 FROM trajectories WHERE rollout_id = ? AND {HAS_VALUE} LIMIT 1"
    if is_submitted is None or db.execute(left, (rollout_id,)).fetchone() is not None:
        return
    for table in ("trajectories", "groups", "rollout_terms", "acknowledged", "rollouts"):
        db.execute(f"DELETE FROM {table} WHERE rollout_id = ?", (rollout_id,))
    db.execute("INSERT INTO deleted_rollouts VALUES (?) ON CONFLICT DO NOTHING", (rollout_id,))
