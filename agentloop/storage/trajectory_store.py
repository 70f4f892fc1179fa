"""The trajectory store: what was accepted and what became of it, in one SQLite file of the run directory.

Ownership: one process writes (the coordinator's executor, one thread at a time); any process may read.
Invariants: `accept`, `commit` and `record` have reached the disk when they return, so an acknowledged record
survives `kill -9` and a power cut; a key (rollout, group, sample) holds one record, the first one committed; a
rollout holds accepted groups or recorded sessions, never both; rows carry a CRC, and a row that fails it is counted
and left out, never returned and never fatal to the others.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from agentloop import codec
from agentloop.engine import WeightUpdate
from agentloop.errors import Conflict, InvalidRequest, NotFound
from agentloop.types import KVPolicy, RolloutGroup, Trajectory

STORE_NAME = "trajectories.sqlite"
"""The store's file within a run directory."""

T = TypeVar("T")

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (rollout_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, group_id TEXT NOT NULL, num_samples INTEGER NOT NULL,
    value BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (rollout_id, group_id));
CREATE TABLE IF NOT EXISTS trajectories (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL, group_id TEXT NOT NULL,
    sample_index INTEGER NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL,
    UNIQUE (rollout_id, group_id, sample_index));
CREATE TABLE IF NOT EXISTS weight_update (
    id INTEGER PRIMARY KEY CHECK (id = 1), kv_policy TEXT NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS trajectories_by_rollout ON trajectories (rollout_id, seq);
"""
_COUNT_FINISHED = """
SELECT COUNT(*) FROM trajectories t JOIN groups g ON g.rollout_id = t.rollout_id AND g.group_id = t.group_id
WHERE t.rollout_id = ? AND t.sample_index < g.num_samples
"""

_COUNT_GROUPS = "SELECT COALESCE(SUM(num_samples), 0) FROM groups WHERE rollout_id = ?"
_COUNT_RECORDS = "SELECT COUNT(*) FROM trajectories WHERE rollout_id = ?"
_ADD_RECORD = (
    "INSERT OR IGNORE INTO trajectories (rollout_id, group_id, sample_index, value, crc) VALUES (?, ?, ?, ?, ?)"
)

_BLOB = "CAST(value AS BLOB)"  # a damaged row may claim to be text

_log = structlog.stdlib.get_logger(__name__)


class TrajectoryStore:
    """Accepted groups and their terminal records. Methods block: call them off the event loop.

    Raises InvalidRequest if `path` is no store (or, read-only, does not exist), and `sqlite3.Error` as it comes
    when the disk fails: nothing was stored then.
    """

    def __init__(self, path: str | Path, *, is_read_only: bool = False) -> None:
        self._path = Path(path)
        self._corrupt: set[tuple[str, int]] = set()  # (table, seq)
        if is_read_only and not self._path.is_file():
            raise InvalidRequest(f"no trajectory store at {self._path}")
        mode = "ro" if is_read_only else "rwc"
        self._db = sqlite3.connect(
            f"{self._path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=30.0,
            isolation_level=None,  # transactions are explicit
            check_same_thread=False,  # an executor's threads take turns
        )
        try:
            self._prepare(is_read_only)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise InvalidRequest(f"{self._path} is not a trajectory store: {error}") from error
        except InvalidRequest:
            self._db.close()
            raise

    def _prepare(self, is_read_only: bool) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _SCHEMA_VERSION) or (version == 0 and is_read_only):
            raise InvalidRequest(f"{self._path} is not a trajectory store of schema {_SCHEMA_VERSION}")
        if is_read_only:
            return
        self._db.execute("PRAGMA journal_mode=WAL")
        # In WAL mode NORMAL survives a killed process but may lose the last commits with the machine. What
        # `commit` returned for is acknowledged to a trainer, so each commit waits for the disk: one fsync a batch.
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_SCHEMA_VERSION}; COMMIT;")

    @property
    def num_corrupt_rows(self) -> int:
        """Distinct rows met so far whose checksum or content was wrong."""
        return len(self._corrupt)

    def accept(self, rollout_id: str, groups: Iterable[RolloutGroup]) -> None:
        """Record work as accepted. Groups already accepted stay as they are, so a repeat is harmless.

        Raises Conflict for a rollout of recorded sessions.
        """
        if self.holds_sessions(rollout_id):
            raise Conflict(f"rollout {rollout_id} holds recorded sessions", param="rollout_id")
        rows = []
        for group in groups:
            data = codec.encode(dataclasses.replace(group, rollout_id=rollout_id))
            rows.append((rollout_id, group.group_id, group.num_samples, data, zlib.crc32(data)))
        self._write(
            ("INSERT OR IGNORE INTO rollouts VALUES (?)", [(rollout_id,)]),
            (
                "INSERT OR IGNORE INTO groups (rollout_id, group_id, num_samples, value, crc)"
                " VALUES (?, ?, ?, ?, ?)",
                rows,
            ),
        )

    def commit(self, trajectories: Iterable[Trajectory]) -> int:
        """Store terminal records in one transaction; returns how many were new. The first of a key stays."""
        return self._write((_ADD_RECORD, [_row(trajectory) for trajectory in trajectories]))

    def record(self, trajectory: Trajectory) -> bool:
        """Store a finished session, which nobody submitted; returns whether it is new. A repeat changes nothing.

        Raises Conflict if its place (rollout, group, sample) has another record, or its rollout accepted groups.
        """
        rollout_id = trajectory.rollout_id
        if self._db.execute("SELECT 1 FROM groups WHERE rollout_id = ?", (rollout_id,)).fetchone() is not None:
            raise Conflict(f"rollout {rollout_id} was submitted: sessions need another", param="rollout_id")
        row = _row(trajectory)
        if self._write(("INSERT OR IGNORE INTO rollouts VALUES (?)", [(rollout_id,)]), (_ADD_RECORD, [row])):
            return True
        where = "rollout_id = ? AND group_id = ? AND sample_index = ?"
        seq, data, crc = self._db.execute(
            f"SELECT seq, {_BLOB}, crc FROM trajectories WHERE {where}", row[:3]
        ).fetchone()
        known = self._decoded("trajectories", seq, data, crc, Trajectory)
        if known is None or _unaged(known) != _unaged(trajectory):
            name = f"{rollout_id}/{trajectory.group_id}/{trajectory.sample_index}"
            raise Conflict(f"{name} is the record of another session", param="sample_index")
        return False

    def holds_sessions(self, rollout_id: str) -> bool:
        """Whether a rollout consists of recorded sessions."""
        if self._db.execute("SELECT 1 FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone() is None:
            return False
        (num_accepted,) = self._db.execute(_COUNT_GROUPS, (rollout_id,)).fetchone()
        (num_recorded,) = self._db.execute(_COUNT_RECORDS, (rollout_id,)).fetchone()
        return bool(num_accepted == 0 and num_recorded > 0)

    def read(self, rollout_id: str, after: int, limit: int) -> list[tuple[int, Trajectory]]:
        """Up to `limit` records in commit order, each with its cursor, all greater than `after`.

        Corrupt rows are passed over, so an empty answer means that there is nothing more.
        """
        rows = self._db.execute(
            f"SELECT seq, {_BLOB}, crc FROM trajectories WHERE rollout_id = ? AND seq > ? ORDER BY seq",
            (rollout_id, after),
        )
        found: list[tuple[int, Trajectory]] = []
        while len(found) < limit and (row := rows.fetchone()) is not None:
            seq, data, crc = row
            trajectory = self._decoded("trajectories", seq, data, crc, Trajectory)
            if trajectory is not None:
                found.append((seq, trajectory))
        rows.close()
        return found

    def counts(self, rollout_id: str) -> tuple[int, int]:
        """(accepted, finished) in trajectories. Raises NotFound for a rollout nobody submitted or recorded.

        Of recorded sessions none is outstanding: each counts as both.
        """
        if self._db.execute("SELECT 1 FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone() is None:
            raise NotFound(f"unknown rollout {rollout_id!r}", param="rollout_id")
        num_accepted = int(self._db.execute(_COUNT_GROUPS, (rollout_id,)).fetchone()[0])
        if num_accepted == 0:
            num_recorded = int(self._db.execute(_COUNT_RECORDS, (rollout_id,)).fetchone()[0])
            return num_recorded, num_recorded
        return num_accepted, int(self._db.execute(_COUNT_FINISHED, (rollout_id,)).fetchone()[0])

    def unfinished(self) -> list[tuple[RolloutGroup, tuple[int, ...]]]:
        """The groups that lack records, in order of acceptance, with the samples each still owes."""
        done: dict[tuple[str, str], set[int]] = {}
        for rollout_id, group_id, sample in self._db.execute(
            "SELECT rollout_id, group_id, sample_index FROM trajectories"
        ):
            done.setdefault((rollout_id, group_id), set()).add(sample)
        owed = []
        columns = f"rollout_id, group_id, num_samples, seq, {_BLOB}, crc"
        rows = self._db.execute(f"SELECT {columns} FROM groups ORDER BY seq")
        for rollout_id, group_id, num_samples, seq, data, crc in rows:
            finished = done.get((rollout_id, group_id), set())
            missing = tuple(sample for sample in range(num_samples) if sample not in finished)
            group = self._decoded("groups", seq, data, crc, RolloutGroup) if missing else None
            if group is not None:
                owed.append((group, missing))
        return owed

    def rollouts(self) -> list[str]:
        """Every rollout ever accepted, by id."""
        return [row[0] for row in self._db.execute("SELECT rollout_id FROM rollouts ORDER BY rollout_id")]

    def save_weights(self, update: WeightUpdate, kv_policy: KVPolicy) -> None:
        """Remember the update that the fleet serves: a restarted coordinator brings late replicas to it."""
        data = codec.encode(update)
        row = (kv_policy.value, data, zlib.crc32(data))
        self._write(("INSERT OR REPLACE INTO weight_update VALUES (1, ?, ?, ?)", [row]))

    def saved_weights(self) -> tuple[WeightUpdate, KVPolicy] | None:
        """The last update saved, or None."""
        row = self._db.execute(f"SELECT kv_policy, {_BLOB}, crc FROM weight_update").fetchone()
        update = None if row is None else self._decoded("weight_update", 1, row[1], row[2], WeightUpdate)
        return None if update is None else (update, KVPolicy(row[0]))

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._db.close()

    def _write(self, *statements: tuple[str, Sequence[tuple[object, ...]]]) -> int:
        """Run everything in one transaction; returns the rows that the last statement added."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            num_added = 0
            for statement, rows in statements:
                cursor = self._db.executemany(statement, rows)
                num_added = max(cursor.rowcount, 0)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return num_added

    def _decoded(self, table: str, seq: int, data: bytes, crc: int, kind: type[T]) -> T | None:
        reason = "checksum differs"
        if zlib.crc32(data) == crc:
            try:
                return codec.decode(data, kind)
            except InvalidRequest as error:
                reason = error.message
        if (table, seq) not in self._corrupt:
            self._corrupt.add((table, seq))
            _log.error("corrupt_row", table=table, seq=seq, reason=reason)
        return None


def _row(trajectory: Trajectory) -> tuple[str, str, int, bytes, int]:
    data = codec.encode(trajectory)
    return trajectory.rollout_id, trajectory.group_id, trajectory.sample_index, data, zlib.crc32(data)


def _unaged(trajectory: Trajectory) -> bytes:
    """A record without what the coordinator adds at each hand-in."""
    return codec.encode(dataclasses.replace(trajectory, staleness=None))
