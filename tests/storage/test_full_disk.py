"""A full disk: refusals, stored data, logs, and recovery."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agentloop.concurrency.clock import RealClock
from agentloop.errors import AgentLoopError, ServiceUnavailable, StorageFull
from agentloop.sessions.calls import SessionRecord
from agentloop.storage.disk_room import DiskRoom, is_full
from agentloop.storage.sqlite import BatchWriter, Schema, one_thread, open_database
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import PauseMode
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.endpoint.session_store import SessionStore
from tests.support.fleet.disk import no_room
from tests.support.records.samples import encoded, make_group, make_trajectory

SCHEMA = Schema("test store", 1, "CREATE TABLE IF NOT EXISTS blobs (n INTEGER PRIMARY KEY, b BLOB);", "NORMAL")


def add(number: int, num_bytes: int = 10_000) -> Callable[[sqlite3.Connection], int]:
    return lambda db: db.execute("INSERT INTO blobs VALUES (?, ?)", (number, bytes(num_bytes))).rowcount


def count(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT COUNT(*) FROM blobs").fetchone()[0])


@pytest.mark.parametrize(
    ("shut", "opened"),
    [("max_page_count=20", "max_page_count=100000"), ("query_only=1", "query_only=0")],
    ids=["full", "read-only"],
)
async def test_what_finds_no_room_is_refused_and_later_written(tmp_path: Path, shut: str, opened: str) -> None:
    writer = BatchWriter(open_database(tmp_path / "t", SCHEMA), SCHEMA.kind, one_thread("t"), max_batch=100)
    await writer.run(add(0))
    with capture_logs() as logs:
        await writer.run(lambda db: db.execute(f"PRAGMA {shut}").fetchone())
        adding = [writer.run(add(number)) for number in range(1, 50)]
        outcomes = await asyncio.gather(*adding, return_exceptions=True)
        failed = [number for number, outcome in enumerate(outcomes, 1) if isinstance(outcome, StorageFull)]
        assert len(failed) > 30
        assert {outcome for outcome in outcomes if not isinstance(outcome, StorageFull)} <= {1}
        assert await writer.run(count) == 50 - len(failed)  # reading continues
        await writer.run(lambda db: db.execute(f"PRAGMA {opened}").fetchone())
        assert await asyncio.gather(*(writer.run(add(number)) for number in failed)) == [1] * len(failed)
    assert [entry["event"] for entry in logs] == ["storage_full", "storage_has_room_again"]
    assert await writer.run(count) == 50
    await writer.close()


def test_a_full_filesystem_is_told_from_other_errors() -> None:
    assert is_full(OSError(errno.ENOSPC, "No space left on device"))
    assert is_full(OSError(errno.EROFS, "Read-only file system"))
    assert not is_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_full(sqlite3.OperationalError("database is locked"))
    assert not is_full(ValueError("x"))


def test_below_the_watermark_nothing_new_is_accepted(tmp_path: Path) -> None:
    free, now = [10 << 20], [0.0]
    room = DiskRoom(tmp_path, 5 << 20, lambda folder: free[0], lambda: now[0])
    with capture_logs() as logs:
        room.check()
        free[0] = 4 << 20
        room.check()  # it checks once a second
        for now[0] in (1.0, 1.5, 2.0):
            with pytest.raises(StorageFull, match="4 MiB are free"):
                room.check()
        free[0], now[0] = 6 << 20, 3.0
        room.check()
    assert [entry["event"] for entry in logs] == ["disk_below_watermark", "disk_has_room_again"]
    DiskRoom(tmp_path, 0, lambda folder: 0).check()
    DiskRoom(tmp_path, 1).check()


async def test_the_watermark_is_of_submits_and_sessions_not_of_records(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    store = TrajectoryStore(path)
    await store.accept("r", [make_group("g", 2)])
    await store.close()
    store = TrajectoryStore(path, min_free_bytes=1 << 62)
    with pytest.raises(StorageFull):
        await store.accept("s", [make_group("g", 2)])
    assert await store.add_records(encoded([make_trajectory("g", 0)])) == 1
    await store.close()
    sessions = SessionStore(tmp_path / "s.sqlite", lambda: 0.0, min_free_bytes=1 << 62)
    await sessions.start()
    with pytest.raises(StorageFull):
        await sessions.create(SessionRecord("s", 0.0, 60.0, "owner"))
    await sessions.close()


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
def test_a_store_that_finds_no_room_when_it_is_opened_says_so(tmp_path: Path, is_new: bool) -> None:
    path = tmp_path / "t"
    if not is_new:
        open_database(path, SCHEMA).close()
    with no_room(), pytest.raises(StorageFull) as caught:
        open_database(path, SCHEMA)
    assert caught.value.retryable
    assert str(caught.value) == f"the disk of the test store {path} is full or cannot be written"
    open_database(path, SCHEMA).close()


async def test_trajectories_and_sessions_that_find_no_room_when_they_are_opened(tmp_path: Path) -> None:
    sessions = SessionStore(tmp_path / "s.sqlite", lambda: 0.0)
    with no_room():
        with pytest.raises(StorageFull, match="trajectory store"):
            TrajectoryStore(tmp_path / "t.sqlite")
        with pytest.raises(StorageFull, match="session store"):
            await sessions.start()
    assert await sessions.start() == 0
    await sessions.close()


def test_a_store_on_a_filesystem_without_a_right_or_room_to_write(small_disk: Path) -> None:
    open_database(small_disk / "old", SCHEMA).close()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(16 << 20))
    for name in ("old", "new"):
        with pytest.raises(StorageFull):
            open_database(small_disk / name, SCHEMA)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for name in ("old", "newer"):
        with pytest.raises(StorageFull):
            open_database(small_disk / name, SCHEMA)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mounting.returncode != 0:
        pytest.skip("needs the right to mount a filesystem (root)")
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_a_real_filesystem_fills_up_and_has_room_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    store = TrajectoryStore(small_disk / "t.sqlite")
    sessions = SessionStore(small_disk / "s.sqlite", lambda: 0.0)
    await sessions.start()
    await store.accept("r", [make_group("g", 4000)])
    free = DiskRoom(small_disk, 1)
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(16 << 20))
    stored, failed = [], []
    for index in range(600):
        try:
            await store.add_records(encoded([make_trajectory("g", index)]))
            stored.append(index)
        except StorageFull:
            failed.append(index)
    refused: list[AgentLoopError] = []
    for index in range(300):
        try:
            assert await sessions.create(SessionRecord(f"s-{index}", 0.0, 60.0, "owner" * 100))
        except AgentLoopError as error:
            refused.append(error)
    assert failed
    assert refused
    assert not [error for error in refused if type(error) is ServiceUnavailable]
    assert len(await store.read("r", 0, 5000)) == len(stored)
    with pytest.raises(StorageFull):
        free.check()
    ballast.unlink()
    await store.add_records(encoded([make_trajectory("g", index) for index in failed]))
    assert (await store.counts("r"))[1] == 600
    assert await sessions.create(SessionRecord("after", 0.0, 60.0, "owner"))
    await store.close()
    await sessions.close()


async def test_an_owner_starts_on_a_full_disk_and_takes_orders(small_disk: Path) -> None:
    path, ballast = small_disk / "t.sqlite", small_disk / "ballast"
    first = TrajectoryStore(path)
    epoch = await first.take_over()
    await first.accept("r", [make_group("g", 9)])
    await first.add_records(encoded([make_trajectory("g", 0), make_trajectory("g", 1)]))
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(16 << 20))
    outcomes = [
        await asyncio.gather(first.add_records(encoded([make_trajectory("h", n)])), return_exceptions=True)
        for n in range(600)
    ]
    assert any(isinstance(outcome, StorageFull) for (outcome,) in outcomes)  # fill it to the last block
    owners = [first]
    for owner in range(1, 4):  # the previous store is not closed, as if it was killed
        store = TrajectoryStore(path)
        owners.append(store)
        assert await store.take_over() == epoch + owner
        await store.save_state("orders", owner)
        await store.cancel("r")
        await store.acknowledge("r", 1)
        assert store.is_full
        with pytest.raises(StorageFull, match="free disk space"):
            await store.add_records(encoded([make_trajectory("g", 5)]))
        assert await store.saved_state("orders", int) == owner
        assert (await store.terms("r")).is_cancelled
        assert len(await store.read("r", 0, 10)) >= 2
    ballast.unlink()
    assert not store.is_full
    assert await store.add_records(encoded([make_trajectory("g", 5)])) == 1
    for store in owners:
        await store.close()


async def test_a_coordinator_on_a_full_disk_serves_says_so_and_goes_on_with_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    await TrajectoryStore(small_disk / "t.sqlite").close()
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(16 << 20))
    async with asyncio.timeout(60.0):
        for _ in range(2):
            coordinator = await started(small_disk)
            assert any("disk is full" in line for line in (await coordinator.status()).degraded)
            await coordinator.replicas.pause(PauseMode.KEEP)
            assert (await coordinator.status()).is_paused
            with pytest.raises(StorageFull):
                await coordinator.rollouts.submit("r", (make_group("g", 1),))
            await coordinator.close()
        ballast.unlink()
        coordinator = await started(small_disk)
        status = await coordinator.status()
        assert status.is_paused
        assert not any("disk is full" in line for line in status.degraded)
        await coordinator.close()


async def started(folder: Path) -> Coordinator:
    def connect(url: str) -> Any:
        raise AssertionError(f"there is no replica at {url}")

    store = TrajectoryStore(folder / "t.sqlite")
    coordinator = Coordinator(store, connect, CoordinatorConfig(), RealClock(), probe=connect)
    await coordinator.start()
    return coordinator
