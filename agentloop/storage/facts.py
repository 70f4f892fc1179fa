"""Database rows with the facts of records (`api.facts`), for listings, searches and totals.

A record's transaction adds its facts to `fresh_facts`, which has no index; after `MAX_FRESH` rows they move
together to `facts`, which has indexes. Commits therefore write no index pages, and listings read one indexed and
one small table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson

from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import FactsPage, FactsQuery, FactsTotal, Histogram, ListOrder, RecordFacts, Values
from agentloop.api.owners import own_id
from agentloop.errors import InvalidRequest
from agentloop.storage.home import Database

MAX_FRESH = 4096
_Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # the database's integers

_MAX_SEARCHED = 5_000  # indexed rows read for one page of a search, and for the histograms
_COUNTED = ("reward", "total_s", "num_sampled_tokens")
_NUM_BUCKETS = 20

_SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}
_COLUMNS = ", ".join(
    f"{one.name} {_SQL_TYPES[str(one.type).partition(' ')[0]]}{'' if '|' in str(one.type) else ' NOT NULL'}"
    for one in fields(RecordFacts)[1:]
)
TABLES = f"""
CREATE TABLE IF NOT EXISTS fresh_facts (seq INTEGER PRIMARY KEY, {_COLUMNS});
CREATE TABLE IF NOT EXISTS facts (seq INTEGER PRIMARY KEY, {_COLUMNS});
CREATE INDEX IF NOT EXISTS facts_by_time ON facts (total_s, seq);
CREATE INDEX IF NOT EXISTS facts_by_reward ON facts (reward, seq) WHERE reward IS NOT NULL;
CREATE INDEX IF NOT EXISTS facts_by_task ON facts (task_id, seq);
CREATE INDEX IF NOT EXISTS facts_failed ON facts (seq) WHERE failure IS NOT NULL;
CREATE INDEX IF NOT EXISTS facts_failed_by_time ON facts (total_s, seq) WHERE failure IS NOT NULL;
CREATE TABLE IF NOT EXISTS totals_by_owner (
    owner TEXT, stop_reason TEXT, failure TEXT, newest_version INTEGER, num_records INTEGER NOT NULL,
    num_rewarded INTEGER NOT NULL, reward REAL NOT NULL, total_s REAL NOT NULL, num_sampled_tokens INTEGER NOT NULL,
    PRIMARY KEY (owner, stop_reason, failure, newest_version));
"""
_OWNER_PREFIX = "substr(rollout_id, 1, instr(rollout_id, '~'))"  # the prefix that `own_id` adds, including '~'
_FRESH_TOTALS = f"""
SELECT {_OWNER_PREFIX} AS owner, stop_reason, COALESCE(failure, '') AS f, COALESCE(newest_version, -1) AS v,
    COUNT(*), COUNT(reward), COALESCE(SUM(reward), 0.0), SUM(total_s), CAST(SUM(num_sampled_tokens) AS INTEGER)
FROM fresh_facts WHERE seq > 0 GROUP BY 1, stop_reason, f, v
"""
_SUMS = ("num_records", "num_rewarded", "reward", "total_s", "num_sampled_tokens")
_ADD_TOTALS = (
    f"INSERT INTO totals_by_owner {_FRESH_TOTALS} ON CONFLICT (owner, stop_reason, failure, newest_version)"
    " DO UPDATE SET " + ", ".join(f"{name} = totals_by_owner.{name} + excluded.{name}" for name in _SUMS)
)
_ADD = f"""
INSERT INTO fresh_facts SELECT t.seq, {", ".join("?" * (len(fields(RecordFacts)) - 1))} FROM trajectories t
WHERE t.rollout_id = ? AND t.group_id = ? AND t.sample_index = ? AND t.digest = ?
    AND length(t.value) > 0 AND NOT EXISTS (SELECT 1 FROM facts f WHERE f.seq = t.seq) ON CONFLICT DO NOTHING
"""
_ORDERS = {
    ListOrder.NEWEST: ("seq", "DESC", "<"),
    ListOrder.SLOWEST: ("total_s", "DESC", "<"),
    ListOrder.BEST: ("reward", "DESC", "<"),
    ListOrder.WORST: ("reward", "ASC", ">"),
}


def row_of(record: EncodedRecord) -> Values:
    """Return a record's row without its `seq`."""
    identity = (record.rollout_id, record.group_id, record.sample_index, record.attempt, record.stop_reason.value)
    versions = (record.oldest_version, record.newest_version, record.staleness)
    return (*identity, int(record.is_complete), *versions, *record.facts)


def add(db: Database, records: Sequence[EncodedRecord]) -> int:
    """Add the facts of records that were just stored, and return the number of new rows.

    A repeated record, a second record of a sample and a deleted record add no row.
    """
    rows = [
        (*row_of(record), record.rollout_id, record.group_id, record.sample_index, record.digest)
        for record in records
    ]
    return max(db.executemany(_ADD, rows).rowcount, 0)


def roll_up(db: Database) -> None:
    """Move the rows of `fresh_facts` to `facts` and add them to the totals."""
    db.execute(_ADD_TOTALS)
    db.execute("INSERT INTO facts SELECT * FROM fresh_facts ORDER BY seq")
    db.execute("DELETE FROM fresh_facts")


def forget(db: Database, seqs: Iterable[int]) -> None:
    """Delete the facts and annotations of deleted records. The totals keep counting these records."""
    rows = [(seq,) for seq in seqs]
    for table in ("facts", "fresh_facts", "annotations"):
        db.executemany(f"DELETE FROM {table} WHERE seq = ?", rows)


def of_users(user_names: Sequence[str] | None, owner: str = _OWNER_PREFIX) -> tuple[str, list[str]]:
    """Return the SQL condition, with its values, that a rollout belongs to one of these names; None allows all."""
    if user_names is None:
        return "1 = 1", []
    return f"{owner} IN ({', '.join('?' * len(user_names))})", [own_id(name, "") for name in user_names]


def page(db: Database, query: FactsQuery, user_names: Sequence[str] | None = None) -> FactsPage:
    """Return a page of a listing of the records of a user (`user_names`), or of all. Raises InvalidRequest."""
    column, way, beyond = _ORDERS[query.order]
    if query.text and query.order is not ListOrder.NEWEST:
        raise InvalidRequest("a text search supports only the order 'newest'", param="order")
    is_owned, owners = of_users(user_names)
    wheres, values = ["seq > ?", is_owned], list[str | int | float]([0, *owners])
    if query.failed:
        wheres.append("failure IS NOT NULL")
    if column == "reward":
        wheres.append("reward IS NOT NULL")
    if query.task:
        wheres.append("task_id = ?")
        values.append(query.task)
    if query.group:
        in_group, ids = _in_group(query.group, user_names)
        wheres.append(in_group)
        values += ids
    if query.cursor:
        wheres.append(f"({column}, seq) {beyond} (?, ?)")
        values += _read_cursor(query.cursor)
    ordered = f"ORDER BY {column} {way}, seq {way}"
    filters, limits = _filters(query)
    is_search, is_first = query.order is ListOrder.NEWEST and bool(filters), query.has_totals and not query.cursor
    left_out = _newest_left_out(db, wheres, values) if is_search or is_first else 0
    wheres += filters
    latest = [left_out, *values[1:], *limits]
    histograms = _histograms(db, " AND ".join(wheres), latest) if is_first else {}
    values = latest if is_search else [*values, *limits]
    parts = " UNION ALL ".join(
        f"SELECT * FROM (SELECT * FROM {table} WHERE {' AND '.join(wheres)} {ordered} LIMIT ?) {table}_part"
        for table in ("facts", "fresh_facts")
    )
    most = query.limit + 1
    statement = f"SELECT * FROM ({parts}) both_parts {ordered} LIMIT ?"
    rows = db.execute(statement, (*values, most, *values, most, most)).fetchall()
    records = tuple(_read_row(row) for row in rows[: query.limit])
    cursor = ""
    if len(rows) > query.limit:
        cursor = orjson.dumps([getattr(records[-1], column), records[-1].seq]).decode()
    elif is_search and left_out:
        cursor = orjson.dumps([left_out + 1] * 2).decode()
    totals = _totals(db, user_names) if is_first else ()
    return FactsPage(records, cursor, totals, histograms, left_out > 0)


def _filters(query: FactsQuery) -> tuple[list[str], list[str | int | float]]:
    """Return the conditions that no index supports (ranges and text search), with their values."""
    ranges = {
        "reward >= ?": query.min_reward,
        "reward < ?": query.max_reward,
        "total_s >= ?": query.min_s,
        "total_s < ?": query.max_s,
    }
    conditions: dict[str, str | int | float] = {where: end for where, end in ranges.items() if end is not None}
    if query.text:
        escaped = query.text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        conditions["LOWER(task || ' ' || answer) LIKE LOWER(?) ESCAPE '\\'"] = f"%{escaped}%"
    return list(conditions), list(conditions.values())


def _newest_left_out(db: Database, wheres: Sequence[str], values: Sequence[str | int | float]) -> int:
    """Return the `seq` of the newest indexed record beyond the search limit; 0 if the search covers all records."""
    statement = f"SELECT seq FROM facts WHERE {' AND '.join(wheres)} ORDER BY seq DESC LIMIT 1 OFFSET ?"
    row = db.execute(statement, (*values, _MAX_SEARCHED)).fetchone()
    return row[0] if row else 0


def _in_group(group: str, user_names: Sequence[str] | None) -> tuple[str, list[str]]:
    rollout_id, _, group_id = group.partition("/")
    ids = [rollout_id] if user_names is None else [own_id(name, rollout_id) for name in user_names]
    condition = f"rollout_id IN ({', '.join('?' * len(ids))}) AND group_id = ?"
    return f"seq IN (SELECT seq FROM trajectories WHERE {condition})", [*ids, group_id]


def _read_row(row: tuple[Any, ...]) -> RecordFacts:
    return RecordFacts(*(*row[:6], bool(row[6]), *row[7:]))


def _read_cursor(cursor: str) -> tuple[int | float, int]:
    try:
        return msgspec.json.decode(cursor, type=tuple[_Integer | float, _Integer])
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"invalid cursor {cursor[:64]!r}: send the `cursor` of the previous page", param="cursor"
        ) from error


def _histograms(db: Database, where: str, values: Sequence[Any]) -> dict[str, Histogram]:
    selects = (f"SELECT {', '.join(_COUNTED)} FROM {table} WHERE {where}" for table in ("facts", "fresh_facts"))
    columns = zip(*db.execute(" UNION ALL ".join(selects), (*values, *values)).fetchall(), strict=True)
    return {name: _histogram(column) for name, column in zip(_COUNTED, columns, strict=False)}


def _histogram(column: Iterable[float | None]) -> Histogram:
    values = [value for value in column if value is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high - low < 1e-9 * max(abs(low), abs(high), 1.0):  # the range is too small for distinct bucket edges
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(values, _NUM_BUCKETS, (low, high))
    edges[-1] = np.nextafter(edges[-1], np.inf)  # ranges exclude their end: include the largest value
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def _totals(db: Database, user_names: Sequence[str] | None) -> tuple[FactsTotal, ...]:
    by, sums = "stop_reason, f, v", ", ".join(f"SUM({name})" for name in _SUMS)
    stored = (
        f"SELECT owner, stop_reason, failure AS f, newest_version AS v, {', '.join(_SUMS)} FROM totals_by_owner"
    )
    is_owned, owners = of_users(user_names, "owner")
    parts = f"({stored} UNION ALL {_FRESH_TOTALS}) both_parts WHERE {is_owned}"
    rows = db.execute(f"SELECT {by}, {sums} FROM {parts} GROUP BY {by} ORDER BY {by}", owners)
    return tuple(
        FactsTotal(
            *(reason, failure or None, None if version < 0 else version),
            *(int(num), int(scored), reward, total_s, int(tokens)),
        )
        for reason, failure, version, num, scored, reward, total_s, tokens in rows
    )
