"""The annotations of a store's records (`api.annotations`). They go with their record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentloop import codec
from agentloop.api.annotations import RecordAnnotation, SampleAnnotation
from agentloop.errors import Conflict, InvalidRequest, NotFound
from agentloop.storage.home import Database
from agentloop.storage.retention import HAS_VALUE
from agentloop.storage.sqlite import RowChecker, packed
from agentloop.types import IntArray

MAX_OF_RECORD = 64
"""Annotations of one record, earlier ones of a name too."""

ANNOTATION_TABLES = """
CREATE TABLE IF NOT EXISTS annotations (
    number INTEGER PRIMARY KEY, seq INTEGER NOT NULL, name TEXT NOT NULL,
    value BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS annotations_by_record ON annotations (seq, name);
"""
_FIND = f"""
SELECT seq, (SELECT COUNT(*) FROM annotations a WHERE a.seq = t.seq), CAST(value AS BLOB), crc FROM trajectories t
WHERE rollout_id = ? AND group_id = ? AND sample_index = ? AND {HAS_VALUE}
"""
_ADD = f"""
INSERT INTO annotations (seq, name, value, crc) SELECT seq, ?, ?, ? FROM trajectories WHERE seq = ? AND {HAS_VALUE}
"""
_NEWEST = """
SELECT name, number, CAST(value AS BLOB), crc FROM annotations
WHERE number IN (SELECT MAX(number) FROM annotations WHERE seq = ? GROUP BY name) ORDER BY name
"""

Row: TypeAlias = tuple[str, bytes, int, int]


@dataclass(frozen=True, slots=True)
class _Path:
    response_ids: IntArray


@dataclass(frozen=True, slots=True)
class _Record:
    """The part of an encoded `Trajectory` that annotations are checked against."""

    paths: tuple[_Path, ...]


def located(db: Database, rows: RowChecker, rollout_id: str, given: Sequence[SampleAnnotation]) -> list[Row]:
    """Return the rows of annotations that fit their records. Raises NotFound, InvalidRequest, Conflict."""
    found = []
    for one in given:
        place = (rollout_id, one.group_id, one.sample_index)
        shown = "/".join(map(str, place[1:]))
        row = db.execute(_FIND, place).fetchone()
        data = None if row is None else rows.data("trajectories", row[0], *row[2:])
        if data is None:
            raise NotFound(f"no record {shown}: it was deleted, is damaged, or never was", param="annotations")
        paths = codec.decode(data, _Record).paths
        if objection := one.annotation.objection([len(path.response_ids) for path in paths]):
            raise InvalidRequest(f"record {shown}: {objection}", param="annotations")
        if row[1] >= MAX_OF_RECORD:
            raise Conflict(f"record {shown} has {MAX_OF_RECORD} annotations", param="annotations")
        found.append((one.name, *packed(one.annotation), row[0]))
    return found


def add(db: Database, rows: Sequence[Row]) -> None:
    """Add rows, but for records that were deleted meanwhile."""
    db.executemany(_ADD, rows)


def newest(db: Database, rows: RowChecker, seq: int) -> dict[str, RecordAnnotation]:
    """Return the newest annotation of each name of a record."""
    stored = db.execute(_NEWEST, (seq,))
    found = {name: rows.value("annotations", RecordAnnotation, *row) for name, *row in stored}
    return {name: one for name, one in found.items() if one is not None}
