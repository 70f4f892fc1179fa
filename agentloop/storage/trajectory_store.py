"""The trajectory store: accepted groups and their records, in SQLite or PostgreSQL.

One process writes (the coordinator), any process may read. After a failover the writes of every earlier coordinator
are refused; in PostgreSQL, failover is possible once the earlier coordinator's lease has expired. Invariants:
`accept`, `add_records` and `record` return after the data is on disk, so an acknowledged record survives `kill -9`
and a power failure. A key (rollout, group, sample) has one record, the first committed one. A rollout has either
accepted groups or recorded sessions. A record is stored and returned as the bytes that its producer encoded
(`EncodedRecord.value`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import structlog

from agentloop.api.annotations import AnnotatedRecord, SampleAnnotation
from agentloop.api.coordinator import JournalPart, RolloutTerms, UpdateReport, assignment_id_of, place_of
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import FactsPage, FactsQuery
from agentloop.api.owners import owner_of, shown_id
from agentloop.errors import Conflict, Gone, InvalidRequest, NotFound, ServiceUnavailable, StorageFull
from agentloop.images import IMAGES_FOLDER, Image, ImageFiles
from agentloop.observability.metrics import MetricsPage, SavedMetrics
from agentloop.storage import annotation_rows, facts, retention
from agentloop.storage.disk_room import DiskRoom, Reserve, is_full
from agentloop.storage.home import COORDINATOR_LEASE, LEASE_S, Database, Home, Schema
from agentloop.storage.sqlite import BatchWriter, Work, one_thread, open_database
from agentloop.storage.summary import RecordKey
from agentloop.types import RolloutGroup, Trajectory
from agentloop.values import codec

STORE_NAME = "trajectories.sqlite"
"""The name of the store's file in the run directory."""

UPDATES, METRICS = "updates", "metrics"
"""Names in the service's state: the reports of the latest weight updates, and the metrics."""

MAX_RECORD_BATCH = 512
"""Maximum number of pieces of work, and of records added by one piece, in one transaction."""

_RENEW_S = 3.0
_PAGE_TRAJECTORIES = 64
_LOCATED = 64  # records to annotate that are read in one transaction: other readers wait for it
_MAX_SETTLED = 4096  # finished rollouts whose counts are cached

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)

_SCHEMA = Schema(
    kind="trajectory store",
    version=3,
    tables=retention.TABLES
    + facts.TABLES
    + annotation_rows.ANNOTATION_TABLES
    + """
CREATE TABLE IF NOT EXISTS rollouts (rollout_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollout_terms (
    rollout_id TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, group_id TEXT NOT NULL, num_samples INTEGER NOT NULL,
    value BLOB NOT NULL, UNIQUE (rollout_id, group_id));
CREATE TABLE IF NOT EXISTS trajectories (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL, group_id TEXT NOT NULL,
    sample_index INTEGER NOT NULL, value BLOB NOT NULL, digest BLOB NOT NULL,
    UNIQUE (rollout_id, group_id, sample_index));
CREATE TABLE IF NOT EXISTS turn_journals (
    assignment_id TEXT NOT NULL, run TEXT NOT NULL, number INTEGER NOT NULL, frames BLOB NOT NULL,
    PRIMARY KEY (assignment_id, run, number));
CREATE TABLE IF NOT EXISTS images (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS service_state (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS trajectories_by_rollout ON trajectories (rollout_id, seq);
""",
    # Committed records are acknowledged to trainers, so they must survive a power failure.
    synchronous="FULL",
    page_bytes=16384,  # half the CPU time of 4 KiB pages for a record of half a megabyte; pages are written twice
)
_COUNT_ALL_FINISHED = """
SELECT COUNT(*) FROM trajectories t JOIN groups g ON g.rollout_id = t.rollout_id AND g.group_id = t.group_id
WHERE t.sample_index < g.num_samples
"""
_COUNT_FINISHED = f"{_COUNT_ALL_FINISHED} AND t.rollout_id = ?"

_KNOWN_ROLLOUT = "SELECT 1 FROM rollouts WHERE rollout_id = ?"
_COUNT_ALL_GROUPS = "SELECT COALESCE(SUM(num_samples), 0) FROM groups"
_COUNT_GROUPS = f"{_COUNT_ALL_GROUPS} WHERE rollout_id = ?"
_COUNT_RECORDS = "SELECT COUNT(*) FROM trajectories WHERE rollout_id = ?"
_ADD_ROLLOUT = "INSERT INTO rollouts VALUES (?) ON CONFLICT DO NOTHING"
_ADD_TERMS = "INSERT INTO rollout_terms VALUES (?, ?) ON CONFLICT DO NOTHING"
_ROWS_AFTER = (
    f"SELECT seq, value FROM trajectories WHERE rollout_id = ? AND seq > ? AND {retention.HAS_VALUE}"
    " ORDER BY seq LIMIT ?"
)
_VALUE_AT = f"SELECT value FROM trajectories WHERE seq = ? AND {retention.HAS_VALUE}"
_REPLACES = "DO UPDATE SET value = excluded.value"
_SET_TERMS = f"INSERT INTO rollout_terms VALUES (?, ?) ON CONFLICT (rollout_id) {_REPLACES}"
_ADD_GROUP = (
    "INSERT INTO groups (rollout_id, group_id, num_samples, value) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_GROUP_VALUE = "SELECT value FROM groups WHERE rollout_id = ? AND group_id = ?"
_ADD_IMAGE = "INSERT INTO images VALUES (?, ?) ON CONFLICT DO NOTHING"
_SAVE_STATE = f"INSERT INTO service_state VALUES (?, ?) ON CONFLICT (name) {_REPLACES}"
_EPOCH = "epoch"  # the epoch of the store's newest owner
_ADD_RECORD = (
    "INSERT INTO trajectories (rollout_id, group_id, sample_index, value, digest) VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT DO NOTHING"
)
_AT_PLACE = "FROM trajectories WHERE rollout_id = ? AND group_id = ? AND sample_index = ?"
_FORGET_RUN = "DELETE FROM turn_journals WHERE assignment_id = ? AND (run = ? OR ? = '')"
_FORGET_SAMPLE = "DELETE FROM turn_journals WHERE assignment_id = ?"
_BEGIN_JOURNAL = (
    "INSERT INTO turn_journals SELECT ?, ?, ?, ? WHERE NOT EXISTS"
    " (SELECT 1 FROM trajectories WHERE rollout_id = ? AND group_id = ? AND sample_index = ?)"
    " ON CONFLICT DO NOTHING"
)
_HAS_JOURNAL = "SELECT 1 FROM turn_journals WHERE assignment_id = ? AND run = ? AND number = 0"
_GO_ON_JOURNAL = f"INSERT INTO turn_journals SELECT ?, ?, ?, ? WHERE EXISTS ({_HAS_JOURNAL}) ON CONFLICT DO NOTHING"


def encoded_groups(groups: Sequence[RolloutGroup]) -> list[bytes]:
    """Return groups in their stored encoding, which omits the rollout id."""
    return [
        codec.encode(dataclasses.replace(group, rollout_id="") if group.rollout_id else group) for group in groups
    ]


def groups_digest(encoded: Sequence[bytes]) -> str:
    """Return the hexadecimal SHA-256 of a submission's encoded groups, independent of their order."""
    digest = hashlib.sha256()
    for group in sorted(encoded):
        digest.update(group)
    return digest.hexdigest()


class TrajectoryReader:
    """Reads a store from any process, including while the service writes it. Methods block."""

    def __init__(self, where: str | Path | Home) -> None:
        """`where` is a file or a storage backend. Raises InvalidRequest if it is not a trajectory store."""
        self._db = _opener(where)(_SCHEMA, is_read_only=True)
        self._name = f"{_SCHEMA.kind} of {folder_of(where)}"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert SQLite's errors (an incomplete copy, a damaged disk) to InvalidRequest with the store's name."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise InvalidRequest(f"the {self._name} cannot be read: {error}") from error

    def rollouts(self) -> list[str]:
        """Return the sorted ids of all accepted or recorded rollouts."""
        with self._reading():
            return [row[0] for row in self._db.execute("SELECT rollout_id FROM rollouts ORDER BY rollout_id")]

    def progress(self) -> tuple[int, int]:
        """Return the numbers of (accepted, finished) trajectories in all submitted rollouts."""
        with self._reading():
            accepted, finished = self._db.execute(_COUNT_ALL_GROUPS), self._db.execute(_COUNT_ALL_FINISHED)
            return int(accepted.fetchone()[0]), int(finished.fetchone()[0])

    def counts(self, rollout_id: str) -> tuple[int, int]:
        """See `TrajectoryStore.counts`."""
        with self._reading():
            return _counts(self._db, rollout_id)

    def read(self, rollout_id: str, after: int, limit: int) -> list[tuple[int, Trajectory]]:
        """Return decoded records; see `TrajectoryStore.read`."""
        with self._reading():
            rows = self._db.execute(_ROWS_AFTER, (rollout_id, after, limit))
            return [(seq, codec.decode(value, Trajectory)) for seq, value in rows]

    def trajectories(self, rollout_id: str | None = None) -> Iterator[Trajectory]:
        """Yield all trajectories by rollout, in commit order, with one page in memory. Raises NotFound."""
        if rollout_id is not None:
            self.counts(rollout_id)
        for name in self.rollouts() if rollout_id is None else [rollout_id]:
            cursor = 0
            while page := self.read(name, cursor, _PAGE_TRAJECTORIES):
                yield from (trajectory for _, trajectory in page)
                cursor = page[-1][0]

    def list_records(self, query: FactsQuery) -> FactsPage:
        """Return a page of the facts of all records. Raises InvalidRequest."""
        with self._reading():
            return facts.page(self._db, query)

    def record_at(self, seq: int) -> AnnotatedRecord:
        """Return the record with this `seq` of a listing. Raises NotFound."""
        with self._reading():
            return _record_at(self._db, seq)

    def group(self, rollout_id: str, group_id: str) -> RolloutGroup | None:
        """Return an accepted group; None for records of sessions, and after the rollout was deleted."""
        with self._reading():
            row = self._db.execute(_GROUP_VALUE, (rollout_id, group_id)).fetchone()
            return None if row is None else codec.decode(row[0], RolloutGroup)

    def annotated(self, name: str = "", rollout_id: str | None = None) -> Iterator[AnnotatedRecord]:
        """Yield records with their annotations, in commit order: those with the annotation `name`, or all.

        Raises NotFound for an unknown rollout.
        """
        if rollout_id is not None:
            self.counts(rollout_id)
        conditions, values = [retention.HAS_VALUE], []
        if name:
            conditions, values = [*conditions, "seq IN (SELECT seq FROM annotations WHERE name = ?)"], [name]
        if rollout_id is not None:
            conditions, values = [*conditions, "rollout_id = ?"], [*values, rollout_id]
        with self._reading():
            found = self._db.execute(
                f"SELECT seq FROM trajectories WHERE {' AND '.join(conditions)} ORDER BY seq", values
            )
            seqs = [row[0] for row in found.fetchall()]
        yield from map(self.record_at, seqs)

    def updates(self) -> tuple[UpdateReport, ...]:
        """Return the reports of the latest weight updates, oldest first."""
        with self._reading():
            return _state(self._db, UPDATES, tuple[UpdateReport, ...]) or ()

    def metrics(self) -> MetricsPage:
        """Return the last saved metrics of the service's processes."""
        saved = _state(self._db, METRICS, SavedMetrics)
        return MetricsPage((), ()) if saved is None else saved.counted

    def write_images(self, folder: Path) -> None:
        """Write the images in a database to a folder, unless it has them. A SQLite store has no images."""
        files = ImageFiles(folder)
        for (sha256,) in self._db.execute("SELECT sha256 FROM images").fetchall():
            if files.lacks(sha256):
                (data,) = self._db.execute("SELECT data FROM images WHERE sha256 = ?", (sha256,)).fetchone()
                files.write([Image(sha256, data)])

    def acknowledged(self) -> frozenset[RecordKey] | None:
        """Return the acknowledged records; None if nothing was acknowledged."""
        if self._db.execute("SELECT 1 FROM acknowledged").fetchone() is None:
            return None
        return frozenset(
            self._db.execute(
                "SELECT t.rollout_id, t.group_id, t.sample_index FROM trajectories t"
                " JOIN acknowledged a ON a.rollout_id = t.rollout_id AND t.seq <= a.seq"
            )
        )

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._db.close()


class TrajectoryStore:
    """Stores accepted groups and their records; written by one process. Call `await close()` at the end.

    Coroutines return after the commit. They raise StorageFull if the disk is full, ServiceUnavailable while the
    database is unreachable, and other database errors unchanged. After an error nothing was stored.
    """

    def __init__(
        self,
        where: str | Path | Home,
        new_thread: Callable[[str], Executor] = one_thread,
        *,
        min_free_bytes: int = 0,
    ) -> None:
        """`where` is a file or a storage backend. `new_thread` returns an executor that runs one call at a time.

        With less than `min_free_bytes` of free disk space, `accept` is refused. Raises InvalidRequest if `where` is
        not a trajectory store, and StorageFull if its disk is full or read-only.
        """
        folder, opened = folder_of(where), _opener(where)
        self._home = None if isinstance(where, str | Path) else where
        self._lease = None if self._home is None else self._home.lease(COORDINATOR_LEASE)
        self._room = DiskRoom(folder, min_free_bytes)
        self._settled: OrderedDict[str, tuple[int, int]] = OrderedDict()  # final counts of finished rollouts
        self._reserve = Reserve(Path(where).with_suffix(".reserve")) if isinstance(where, str | Path) else None
        try:
            db = opened(_SCHEMA)
        except StorageFull:
            # Opening a store writes, so a service can restart on a full disk only by using the reserve.
            if self._reserve is None or not self._reserve.give_up():
                raise
            db = opened(_SCHEMA)
        self._images = ImageFiles(folder / IMAGES_FOLDER)
        self._new_facts: list[EncodedRecord] = []  # records of the running transaction
        (self._num_fresh,) = db.execute("SELECT COUNT(*) FROM fresh_facts").fetchone()
        self._epoch: int | None = None
        self._successor: int | None = None
        self._writer = BatchWriter(
            db,
            _SCHEMA.kind,
            new_thread("trajectories"),
            max_batch=MAX_RECORD_BATCH,
            guard=self._begin,
            finish=self._add_facts,
        )
        # A separate connection for reads, so that workers and trainers do not wait for the writer's next commit.
        self._reader = BatchWriter(
            opened(_SCHEMA, is_read_only=True),
            _SCHEMA.kind,
            new_thread("trajectory-reads"),
            max_batch=MAX_RECORD_BATCH,
            guard=self._check_owner,
            is_read_only=True,
        )

    @property
    def is_shared(self) -> bool:
        """True if the storage backend is a database, which other processes use for the same run."""
        return self._home is not None

    @property
    def is_full(self) -> bool:
        """True if the disk has no space for records."""
        return self._reserve is not None and not self._reserve.take_back()

    @property
    def away(self) -> str:
        """The reason why the store is unreachable, or empty. `keep_lease` updates it every few seconds."""
        return self._writer.away

    @property
    def successor(self) -> int | None:
        """The epoch of a later owner that took the store over; None if no such owner is known."""
        return self._successor

    async def accept(
        self,
        rollout_id: str,
        groups: Sequence[RolloutGroup],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        encoded: Sequence[bytes] | None = None,
    ) -> None:
        """Store groups and their images as accepted. Idempotent.

        `encoded` is the result of `encoded_groups`. Raises Conflict if the rollout has recorded sessions, and
        StorageFull.
        """
        self._room.check()
        self._require_room()
        rows = encoded_groups(groups) if encoded is None else encoded
        digest = groups_digest(rows)

        def work(db: Database) -> None:
            if _holds_sessions(db, rollout_id):
                raise Conflict(
                    f"rollout {rollout_id} has recorded sessions: submit groups to another rollout",
                    param="rollout_id",
                )
            db.execute(_ADD_ROLLOUT, (rollout_id,))
            db.execute(_ADD_TERMS, (rollout_id, codec.encode(dataclasses.replace(terms, groups_digest=digest))))
            db.executemany(
                _ADD_GROUP,
                (
                    (rollout_id, group.group_id, group.num_samples, row)
                    for group, row in zip(groups, rows, strict=True)
                ),
            )

        # Images first: an accepted group must never refer to a missing image.
        await self.keep_images([image for group in groups for image in group.task.images])
        await self._writer.run(work)

    async def keep_images(self, images: Sequence[Image]) -> None:
        """Store images without duplicates, in the run directory or in the database. Raises StorageFull."""
        if self._home is not None:
            rows = [(image.sha256, image.data) for image in images]
            if rows:
                await self._writer.run(lambda db: db.executemany(_ADD_IMAGE, rows).rowcount)
            return
        try:
            await self._images.keep(images)
        except OSError as error:
            if not is_full(error):
                raise
            raise StorageFull("the disk of the run's images is full or cannot be written") from error

    async def add_records(self, records: Sequence[EncodedRecord]) -> int:
        """Store records in one transaction and delete the turn journals of their samples.

        Returns the number of new records: a sample keeps its first record.
        """
        self._require_room()

        def work(db: Database) -> int:
            # In one transaction, so that a sample with a record never has journals from which it would resume.
            db.executemany(_FORGET_SAMPLE, [(_assignment_id(record),) for record in records])
            return self._add(db, records)

        return await self._writer.run(work)

    async def keep_turns(
        self, parts: Sequence[JournalPart], forgotten: Sequence[tuple[str, str]]
    ) -> tuple[str, ...]:
        """Delete turn journals and append to others, as `WorkerPort.keep_turns`. Idempotent."""
        self._require_room()
        rows = [(part.assignment_id, part.run, part.number, part.frames) for part in parts]
        new = [(*row, *place_of(row[0])) for row in rows if row[2] == 0]
        later = [(*row, *row[:2]) for row in rows if row[2] > 0]

        def work(db: Database) -> tuple[str, ...]:
            db.executemany(_FORGET_RUN, [(assignment_id, run, run) for assignment_id, run in forgotten])
            num_kept = sum(
                max(db.executemany(statement, some).rowcount, 0)
                for statement, some in ((_BEGIN_JOURNAL, new), (_GO_ON_JOURNAL, later))
                if some
            )
            if num_kept == len(rows):
                return ()
            return tuple(row[1] for row in rows if db.execute(_HAS_JOURNAL, row[:2]).fetchone() is None)

        return await self._writer.run(work)

    async def kept_turns(self, assignment_id: str) -> list[tuple[str, bytes]]:
        """Return the turn journals of a sample, as `WorkerPort.kept_turns`."""
        statement = "SELECT run, frames FROM turn_journals WHERE assignment_id = ? ORDER BY run, number"
        rows = await self._reader.run(lambda db: db.execute(statement, (assignment_id,)).fetchall())
        return [
            (run, b"".join(frames for _, frames in parts)) for run, parts in itertools.groupby(rows, itemgetter(0))
        ]

    async def claim(self, rollout_id: str, owner: str) -> None:
        """Reserve a rollout for its owner's sessions. Raises Conflict if the rollout has accepted groups."""

        def work(db: Database) -> None:
            _check_sessions(db, rollout_id)
            db.execute(_ADD_ROLLOUT, (rollout_id,))
            db.execute(_ADD_TERMS, (rollout_id, codec.encode(RolloutTerms(owner))))

        await self._writer.run(work)

    async def record(self, record: EncodedRecord) -> bool:
        """Store the record of a finished session. Returns True if it is new. Idempotent.

        Raises Conflict if its key (rollout, group, sample) has another record, or its rollout has accepted groups.
        """
        rollout_id = record.rollout_id
        terms = RolloutTerms(owner_of(rollout_id))
        key = _place(record)

        def work(db: Database) -> bool:
            _check_sessions(db, rollout_id)
            stored = db.execute(f"SELECT digest, {retention.HAS_VALUE} {_AT_PLACE}", key).fetchone()
            if stored is None:
                db.execute(_ADD_ROLLOUT, (rollout_id,))
                db.execute(_ADD_TERMS, (rollout_id, codec.encode(terms)))
                self._add(db, [record])
                return True
            if stored[0] != record.digest and stored[1]:  # any record is accepted as a repeat of a deleted one
                name = "/".join(map(str, key))
                raise Conflict(
                    f"{name} has the record of another session, with the digest {stored[0].hex()} instead of"
                    f" {record.digest.hex()}",
                    param="sample_index",
                )
            return False

        return await self._writer.run(work)

    async def terms(self, rollout_id: str) -> RolloutTerms:
        """Return the terms of an accepted rollout; default terms for an unknown rollout."""
        return await self._writer.run(lambda db: _terms(db, rollout_id))

    async def cancel(self, rollout_id: str) -> None:
        """Store that a rollout was cancelled. Its missing records will have the stop reason CANCELLED."""

        def work(db: Database) -> None:
            terms = dataclasses.replace(_terms(db, rollout_id), is_cancelled=True)
            db.execute(_SET_TERMS, (rollout_id, codec.encode(terms)))

        await self._order(work)

    async def check_owner(self) -> None:
        """Raise ServiceUnavailable if another owner has taken the store over."""
        await self._reader.run(lambda db: None)

    async def has_record(self, record: EncodedRecord) -> bool:
        """Return True if the record's sample has, or had, a record. Raises NotFound or Gone for its rollout."""
        key = _place(record)

        def work(db: Database) -> bool:
            _counts(db, record.rollout_id)
            return db.execute(f"SELECT 1 {_AT_PLACE}", key).fetchone() is not None

        return await self._writer.run(work)

    async def stored(self, assignment_id: str) -> EncodedRecord | None:
        """Return a sample's record with the digest of its submission; None if it is missing or deleted.

        When this returns, every earlier commit, even one whose result was lost, has either happened or never will.
        """
        statement = f"SELECT value, digest {_AT_PLACE} AND {retention.HAS_VALUE}"

        def work(db: Database) -> EncodedRecord | None:
            row = db.execute(statement, place_of(assignment_id)).fetchone()
            if row is None:
                return None
            return dataclasses.replace(EncodedRecord.of(codec.decode(row[0], Trajectory)), digest=row[1])

        # Use the writer: its transactions are ordered in the database, even across a reconnect.
        return await self._writer.run(work)

    async def holds_sessions(self, rollout_id: str) -> bool:
        """Return True if the rollout has recorded sessions."""
        return await self._writer.run(lambda db: _holds_sessions(db, rollout_id))

    async def read(self, rollout_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return up to `limit` (cursor, record) pairs in commit order with cursors greater than `after`.

        A record is in its stored encoding: forward it unchanged, or decode it with `codec.decode(record,
        Trajectory)`.
        """
        return await self._reader.run(lambda db: db.execute(_ROWS_AFTER, (rollout_id, after, limit)).fetchall())

    async def counts(self, rollout_id: str) -> tuple[int, int]:
        """Return the numbers of (accepted, finished) trajectories. A recorded session counts as both.

        Raises NotFound for an unknown rollout, and Gone for a deleted one.
        """
        settled = self._settled.get(rollout_id)
        if settled is not None:
            return settled
        num_accepted, num_finished, is_submitted = await self._reader.run(
            lambda db: (*_counts(db, rollout_id), _is_submitted(db, rollout_id))
        )
        # The counts of a submitted rollout with all records are final, unless retention deletes it (see `trim`).
        if is_submitted and num_finished >= num_accepted:
            self._settled[rollout_id] = num_accepted, num_finished
            if len(self._settled) > _MAX_SETTLED:
                self._settled.popitem(last=False)
        return num_accepted, num_finished

    async def list_records(self, query: FactsQuery, user_names: tuple[str, ...] | None = None) -> FactsPage:
        """Return a page of record facts, as `RecordsPort.list_records`. Raises InvalidRequest."""
        return await self._reader.run(lambda db: facts.page(db, query, user_names))

    async def record_at(self, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
        """Return the record with this `seq` of a listing, as `RecordsPort.record_at`. Raises NotFound."""
        return await self._reader.run(lambda db: _record_at(db, seq, user_names))

    async def annotate(self, rollout_id: str, given: Sequence[SampleAnnotation]) -> None:
        """Add all annotations to records of a rollout, or none.

        Raises NotFound, InvalidRequest for values that do not match their record, and Conflict if a record would
        have too many annotations.
        """
        self._require_room()
        rows = list[annotation_rows.Row]()
        for start in range(0, len(given), _LOCATED):
            chunk = given[start : start + _LOCATED]
            located = partial(annotation_rows.located, rollout_id=rollout_id, given=chunk)
            rows += await self._reader.run(located)
        await self._writer.run(lambda db: annotation_rows.add(db, rows))

    async def acknowledge(self, rollout_id: str, cursor: int) -> None:
        """Store the cursor up to which a trainer has received a rollout's records, which retention may delete."""
        await self._order(lambda db: retention.acknowledge(db, rollout_id, cursor))

    async def last_mark(self) -> float:
        """Return the time of the last mark that `trim` stored, or 0."""
        return await self._writer.run(retention.last_mark)

    async def trim(self, policy: retention.RetentionPolicy, now: float, unfinished: retention.Unfinished) -> int:
        """Delete one batch by policy. Returns its size; 0 if nothing is left to delete."""

        def forget() -> None:
            self._settled.clear()

        return await self._order(lambda db: retention.trim(db, policy, now, unfinished), forget)

    async def unfinished(self, rollout_id: str | None = None) -> list[tuple[RolloutGroup, tuple[int, ...]]]:
        """Return the groups with missing records, of one rollout or all, each with its missing sample indices."""
        of_one = "" if rollout_id is None else " WHERE rollout_id = ?"
        names = () if rollout_id is None else (rollout_id,)

        def work(db: Database) -> list[tuple[RolloutGroup, tuple[int, ...]]]:
            done: dict[tuple[str, str], set[int]] = {}
            for rollout_id, group_id, sample in db.execute(
                f"SELECT rollout_id, group_id, sample_index FROM trajectories{of_one}", names
            ):
                done.setdefault((rollout_id, group_id), set()).add(sample)
            incomplete = []
            for rollout_id, group_id, num_samples, value in db.execute(
                f"SELECT rollout_id, group_id, num_samples, value FROM groups{of_one} ORDER BY seq", names
            ):
                finished = done.get((rollout_id, group_id), set())
                if missing := tuple(sample for sample in range(num_samples) if sample not in finished):
                    group = codec.decode(value, RolloutGroup)
                    incomplete.append((dataclasses.replace(group, rollout_id=rollout_id), missing))
            return incomplete

        return await self._writer.run(work)

    async def take_over(self, above: int = 0) -> int:
        """Become the store's only writer, with an epoch greater than `above` and all earlier epochs.

        Afterwards the writes of every earlier owner raise ServiceUnavailable. A repeated call returns a greater
        epoch. Raises Conflict with the owner's name while another owner has the lease.
        """

        def work(db: Database) -> int:
            if self._lease is not None:
                self._epoch = self._lease.take(db, self._epoch, above)
            else:
                self._epoch = max(_state(db, _EPOCH, int) or 0, above) + 1
                db.execute(_SAVE_STATE, (_EPOCH, codec.encode(self._epoch)))
            return self._epoch

        return await self._order(work)

    async def keep_lease(self) -> None:
        """Renew the lease until this owner must stop, then return.

        It must stop if another owner has the lease, or may have it, because the database's host has been
        unreachable for the lease's duration. A reachable host that refuses connections cannot grant the lease to
        another owner.
        """
        assert self._home is not None
        renewed_at = time.monotonic()
        while self._successor is None:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(LEASE_S):
                    await self._writer.run(lambda db: None)  # the writer's guard renews the lease
                renewed_at = started_at  # the earliest time at which the database may have renewed it
            except Exception as error:
                _log.debug("lease_not_renewed", error=repr(error))
                is_over = time.monotonic() - renewed_at >= LEASE_S
                if is_over and not await asyncio.to_thread(self._home.is_reachable):
                    _log.error("lease_is_over", reason=str(error), epoch=self._epoch)
                    return
            await asyncio.sleep(_RENEW_S)

    async def save_state(self, name: str, value: object, revokes: Sequence[str] = ()) -> None:
        """Store a named value of the service's state, replacing the previous value.

        In a database, the same transaction revokes the leases named in `revokes`.
        """
        leases = [] if self._home is None else [self._home.lease(lease) for lease in revokes]

        def work(db: Database) -> None:
            for lease in leases:
                lease.revoke(db)
            db.execute(_SAVE_STATE, (name, codec.encode(value)))

        await self._order(work)

    async def saved_state(self, name: str, kind: type[T]) -> T | None:
        """Return the last value stored under a name, or None."""
        return await self._writer.run(lambda db: _state(db, name, kind))

    def time_commits(self, observe: Callable[[float], None]) -> None:
        """Call `observe`, which must be thread-safe, with the duration of each transaction in seconds."""
        self._writer.on_time = observe

    async def close(self) -> None:
        """Finish pending work, release the lease and close the connections. Idempotent."""
        if (lease := self._lease) is not None and (own := self._epoch) is not None:
            with suppress(ServiceUnavailable):  # the lease then expires by itself
                await self._writer.run(lambda db: lease.release(db, own))
        await self._reader.close()
        await self._writer.close()

    def _add(self, db: Database, records: Sequence[EncodedRecord]) -> int:
        """Add records, and their facts at the end of the transaction. Returns the number of new records."""
        self._new_facts += records
        return max(db.executemany(_ADD_RECORD, map(_row, records)).rowcount, 0)

    def _add_facts(self, db: Database) -> None:
        if self._new_facts:
            self._num_fresh += facts.add(db, self._new_facts)
            if self._num_fresh >= facts.MAX_FRESH:
                facts.roll_up(db)
                self._num_fresh = 0

    def _begin(self, db: Database) -> None:
        self._new_facts = []
        self._check_owner(db)

    def _require_room(self) -> None:
        """Raise StorageFull while the reserve is not allocated."""
        if self.is_full:
            raise StorageFull("the run's disk is full: free disk space, or acknowledge the records that were read")

    async def _order(self, work: Work[T], on_committed: Callable[[], None] | None = None) -> T:
        """Run work that may use the reserve, because it is small or frees disk space."""
        try:
            return await self._writer.run(work, on_committed)
        except StorageFull:
            if self._reserve is None or not self._reserve.give_up():
                raise
            return await self._writer.run(work, on_committed)

    def _check_owner(self, db: Database) -> None:
        """Raise ServiceUnavailable if another process has taken the store over, else renew the lease."""
        if (own := self._epoch) is None:
            return
        stored = _state(db, _EPOCH, int) if self._lease is None else self._lease.newest(db, own)
        if stored is not None and stored > own:
            if self._successor is None:
                _log.error("store_taken_over", epoch=stored, own_epoch=own)
            self._successor = stored
            raise ServiceUnavailable(
                f"another coordinator has taken this run over (its epoch is {stored}, this one's is {own})"
            )


def _opener(where: str | Path | Home) -> Callable[..., Database]:
    return partial(open_database, Path(where)) if isinstance(where, str | Path) else where.open


def check_home(home: Home) -> None:
    """Create the tables of a new store. Raises InvalidRequest if it is not writable or not a trajectory store."""
    home.open(_SCHEMA).close()


def folder_of(where: str | Path | Home) -> Path:
    """Return the run directory of a store."""
    return Path(where).parent if isinstance(where, str | Path) else where.folder


def _holds_sessions(db: Database, rollout_id: str) -> bool:
    if db.execute(_KNOWN_ROLLOUT, (rollout_id,)).fetchone() is None:
        return False
    (num_accepted,) = db.execute(_COUNT_GROUPS, (rollout_id,)).fetchone()
    (num_recorded,) = db.execute(_COUNT_RECORDS, (rollout_id,)).fetchone()
    return bool(num_accepted == 0 and num_recorded > 0)


def _check_sessions(db: Database, rollout_id: str) -> None:
    """Raise Conflict if the rollout has accepted groups."""
    if _is_submitted(db, rollout_id):
        raise Conflict(
            f"rollout {shown_id(rollout_id)} has submitted groups: use another rollout for sessions",
            param="rollout_id",
        )


def _is_submitted(db: Database, rollout_id: str) -> bool:
    return db.execute("SELECT 1 FROM groups WHERE rollout_id = ?", (rollout_id,)).fetchone() is not None


def _counts(db: Database, rollout_id: str) -> tuple[int, int]:
    if db.execute(_KNOWN_ROLLOUT, (rollout_id,)).fetchone() is None:
        if db.execute("SELECT 1 FROM deleted_rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone() is not None:
            raise Gone(f"rollout {rollout_id} was deleted by the run's retention policy", param="rollout_id")
        raise NotFound(f"unknown rollout {rollout_id!r}", param="rollout_id")
    num_accepted = int(db.execute(_COUNT_GROUPS, (rollout_id,)).fetchone()[0])
    if num_accepted == 0:
        num_recorded = int(db.execute(_COUNT_RECORDS, (rollout_id,)).fetchone()[0])
        return num_recorded, num_recorded
    return num_accepted, int(db.execute(_COUNT_FINISHED, (rollout_id,)).fetchone()[0])


def _terms(db: Database, rollout_id: str) -> RolloutTerms:
    row = db.execute("SELECT value FROM rollout_terms WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return RolloutTerms() if row is None else codec.decode(row[0], RolloutTerms)


def _state(db: Database, name: str, kind: type[T]) -> T | None:
    row = db.execute("SELECT value FROM service_state WHERE name = ?", (name,)).fetchone()
    return None if row is None else codec.decode(row[0], kind)


def _record_at(db: Database, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
    is_owned, owners = facts.of_users(user_names)
    row = db.execute(f"{_VALUE_AT} AND {is_owned}", (seq, *owners)).fetchone()
    if row is None:
        raise NotFound(f"unknown record {seq}: it was deleted or never stored", param="seq")
    return AnnotatedRecord(row[0], annotation_rows.newest(db, seq))


def _assignment_id(record: EncodedRecord) -> str:
    return assignment_id_of(record.rollout_id, record.group_id, record.sample_index)


def _place(record: EncodedRecord) -> tuple[str, str, int]:
    return record.rollout_id, record.group_id, record.sample_index


def _row(record: EncodedRecord) -> tuple[str, str, int, bytes, bytes]:
    return (*_place(record), record.value, record.digest)
