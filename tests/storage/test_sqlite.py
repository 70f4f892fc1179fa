"""The writer that both stores use: shared transactions, isolation of failures, and shutdown."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import InvalidRequest, NotFound, ServiceUnavailable
from agentloop.storage.home import Schema
from agentloop.storage.sqlite import BatchWriter, check_file, open_database

SCHEMA = Schema("test store", 3, "CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY);", "NORMAL")


class Counting(ThreadPoolExecutor):
    """A thread that counts its work items and does nothing while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.num_batches = 0
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_batches += 1

        def gated() -> Any:
            self.gate.wait()
            return fn(*args, **kwargs)

        return super().submit(gated)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "numbers.sqlite"


@pytest.fixture
def executor() -> Counting:
    return Counting()


@pytest.fixture
async def writer(path: Path, executor: Counting) -> AsyncIterator[BatchWriter]:
    writer = BatchWriter(open_database(path, SCHEMA), SCHEMA.kind, executor, max_batch=100)
    yield writer
    executor.gate.set()
    await writer.close()
    await writer.close()


def add(number: int) -> Callable[[sqlite3.Connection], int]:
    return lambda db: db.execute("INSERT INTO numbers VALUES (?)", (number,)).rowcount


def all_numbers(db: sqlite3.Connection) -> list[int]:
    return [row[0] for row in db.execute("SELECT n FROM numbers ORDER BY n")]


async def test_work_that_waits_together_shares_a_transaction(writer: BatchWriter, executor: Counting) -> None:
    await asyncio.gather(*(writer.run(add(number)) for number in range(1000)))
    assert executor.num_batches <= 12
    assert await writer.run(all_numbers) == list(range(1000))


async def test_one_bad_piece_does_not_fail_the_others_of_its_transaction(writer: BatchWriter) -> None:
    def bad(db: sqlite3.Connection) -> None:
        add(7)(db)
        raise TypeError("bad")

    def unknown(db: sqlite3.Connection) -> None:
        raise NotFound("there is no such thing")

    works = [add(1), add(1), bad, unknown, add(2)]
    outcomes = await asyncio.gather(*map(writer.run, works), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, sqlite3.IntegrityError, TypeError, NotFound, int]
    assert await writer.run(all_numbers) == [1, 2]


async def test_nothing_is_answered_before_it_is_committed(
    writer: BatchWriter, executor: Counting, path: Path
) -> None:
    committed: list[int] = []
    executor.gate.clear()
    staying = asyncio.create_task(writer.run(add(1), lambda: committed.append(1)))
    leaving = asyncio.create_task(writer.run(add(2), lambda: committed.append(2)))
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert not staying.done()
    assert committed == []
    executor.gate.set()
    assert await staying == 1
    reader = open_database(path, SCHEMA, is_read_only=True)
    assert 1 in all_numbers(reader)
    reader.close()
    assert await writer.run(all_numbers) == [1, 2]  # pending writes reach the disk
    assert committed == [1, 2]


async def test_closing_finishes_what_waits_and_refuses_what_comes_later(path: Path) -> None:
    writer = BatchWriter(open_database(path, SCHEMA), SCHEMA.kind, Counting(), max_batch=2)
    adding = [asyncio.create_task(writer.run(add(number))) for number in range(9)]
    await asyncio.sleep(0)
    await writer.close()
    assert await asyncio.gather(*adding) == [1] * 9
    with pytest.raises(ServiceUnavailable, match="the test store is closed"):
        await writer.run(add(10))


def test_a_file_of_another_kind_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no test store"):
        open_database(path, SCHEMA, is_read_only=True)
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        open_database(tmp_path / "no" / "folder", SCHEMA)
    with pytest.raises(InvalidRequest, match="cannot be opened as a test store"):
        open_database(Path(__file__), SCHEMA)
    open_database(path, SCHEMA).close()
    with pytest.raises(InvalidRequest, match="only version 4 of a test store"):
        open_database(path, Schema("test store", 4, "", "NORMAL"))


def test_a_damaged_file_is_refused_and_a_sound_one_that_is_written_is_not(path: Path) -> None:
    schema = Schema("test store", 3, "CREATE TABLE IF NOT EXISTS blobs (n INTEGER PRIMARY KEY, b BLOB);", "NORMAL")
    db = open_database(path, schema)
    with db:
        db.executemany("INSERT INTO blobs VALUES (?, ?)", [(number, bytes(3000)) for number in range(200)])
    check_file(path)
    db.close()
    check_file(path)
    data = bytearray(path.read_bytes())
    data[4096 * 150 : 4096 * 151] = b"\xff" * 4096
    path.write_bytes(bytes(data))
    with pytest.raises(InvalidRequest, match=r"numbers.sqlite is damaged \(.+\): restore a copy .* run directory$"):
        check_file(path)
    path.write_bytes(bytes(data[: 4096 * 10]))
    with pytest.raises(InvalidRequest, match=r"numbers.sqlite is damaged \(.+\): "):
        check_file(path)
    path.write_text("no database" * 1000)
    with pytest.raises(InvalidRequest, match=r"numbers.sqlite is damaged \(file is not a database\)"):
        check_file(path)


async def test_a_writer_that_lost_its_lease_closes_its_connection(path: Path, executor: Counting) -> None:
    def refuse(db: object) -> None:
        raise ServiceUnavailable("another process has the lease")

    database = open_database(path, SCHEMA)
    writer = BatchWriter(database, SCHEMA.kind, executor, max_batch=100, guard=refuse)
    executor.gate.clear()
    pending = asyncio.create_task(writer.run(add(1)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    executor.gate.set()
    with pytest.raises(ServiceUnavailable, match="has the lease"):
        await pending
    await closing
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.begin(writes=False)
