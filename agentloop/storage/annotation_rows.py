"""Database rows of record annotations (`api.annotations`). They are deleted with their record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentloop.api.annotations import RecordAnnotation, SampleAnnotation
from agentloop.errors import Conflict, InvalidRequest, NotFound
from agentloop.storage.home import Database
from agentloop.storage.retention import HAS_VALUE
from agentloop.types import IntArray
from agentloop.values import codec

MAX_OF_RECORD = 64
"""Maximum number of annotations per record, including earlier annotations with the same name."""

ANNOTATION_TABLES = """
CREATE TABLE IF NOT EXISTS annotations (
    number INTEGER PRIMARY KEY, seq INTEGER NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS annotations_by_record ON annotations (seq, name);
"""
_FIND = f"""
SELECT seq, value FROM trajectories
WHERE rollout_id = ? AND group_id = ? AND sample_index = ? AND {HAS_VALUE}
"""
_COUNT = """
SELECT (SELECT COUNT(*) FROM annotations a WHERE a.seq = t.seq), group_id, sample_index FROM trajectories t
WHERE seq = ?
"""
_ADD = f"""
INSERT INTO annotations (seq, name, value) SELECT seq, ?, ? FROM trajectories WHERE seq = ? AND {HAS_VALUE}
"""
_NEWEST = """
SELECT name, value FROM annotations
WHERE number IN (SELECT MAX(number) FROM annotations WHERE seq = ? GROUP BY name) ORDER BY name
"""

Row: TypeAlias = tuple[str, bytes, int]


@dataclass(frozen=True, slots=True)
class _Path:
    response_ids: IntArray


@dataclass(frozen=True, slots=True)
class _Record:
    """The part of an encoded `Trajectory` that annotations are validated against."""

    paths: tuple[_Path, ...]


def located(db: Database, rollout_id: str, given: Sequence[SampleAnnotation]) -> list[Row]:
    """Validate annotations against their records and return their rows. Raises NotFound and InvalidRequest."""
    rows = []
    for sample in given:
        key = (rollout_id, sample.group_id, sample.sample_index)
        shown = "/".join(map(str, key[1:]))
        row = db.execute(_FIND, key).fetchone()
        if row is None:
            raise NotFound(f"unknown record {shown}: it was deleted or never stored", param="annotations")
        seq, value = row
        paths = codec.decode(value, _Record).paths
        if objection := sample.annotation.objection([len(path.response_ids) for path in paths]):
            raise InvalidRequest(f"record {shown}: {objection}", param="annotations")
        rows.append((sample.name, codec.encode(sample.annotation), seq))
    return rows


def add(db: Database, rows: Sequence[Row]) -> None:
    """Add rows, except for records that have been deleted.

    Raises Conflict, without adding any row, if a record would have more than `MAX_OF_RECORD` annotations.
    """
    for seq, num_new in Counter(row[2] for row in rows).items():
        record = db.execute(_COUNT, (seq,)).fetchone()
        if record is not None and record[0] + num_new > MAX_OF_RECORD:
            raise Conflict(
                f"record {record[1]}/{record[2]} has {record[0]} annotations: {num_new} more exceed the limit of"
                f" {MAX_OF_RECORD}",
                param="annotations",
            )
    db.executemany(_ADD, rows)


def newest(db: Database, seq: int) -> dict[str, RecordAnnotation]:
    """Return the newest annotation of a record for each annotation name."""
    return {name: codec.decode(value, RecordAnnotation) for name, value in db.execute(_NEWEST, (seq,))}
