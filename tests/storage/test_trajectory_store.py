from __future__ import annotations

import asyncio
import dataclasses
import gc
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from agentloop.api.annotations import SampleAnnotation, annotation_of
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import FactsQuery
from agentloop.errors import Conflict, InvalidRequest, NotFound
from agentloop.images import IMAGES_FOLDER
from agentloop.storage.trajectory_store import TrajectoryReader, TrajectoryStore
from agentloop.types import Trajectory
from agentloop.values import codec
from tests.support.records.samples import encoded, make_group, make_trajectory
from tests.support.records.vision_folder import picture
from tests.support.service.store_home import StoreHome


@pytest.fixture
async def store(home: StoreHome):
    store = TrajectoryStore(home.where)
    yield store
    await store.close()


async def read(store: TrajectoryStore, rollout_id: str, after: int, limit: int) -> list[tuple[int, Trajectory]]:
    """Return the store's records, decoded."""
    return [(seq, codec.decode(record, Trajectory)) for seq, record in await store.read(rollout_id, after, limit)]


async def test_a_record_comes_back_as_it_was(store: TrajectoryStore) -> None:
    await store.accept("r", [make_group()])
    trajectory = make_trajectory()
    assert await store.add_records(encoded([trajectory])) == 1
    [(cursor, record)] = await store.read("r", 0, 10)
    assert cursor > 0
    assert record == codec.encode(trajectory)
    [(_, known)] = await read(store, "r", 0, 10)
    assert codec.to_builtins(known) == codec.to_builtins(trajectory)
    assert known.path.response_ids.dtype == np.int32
    assert known.path.response_mask.dtype == np.bool_


async def test_a_second_commit_of_a_key_changes_nothing(store: TrajectoryStore) -> None:
    await store.accept("r", [make_group()])
    await store.add_records(encoded([make_trajectory(reward=1.0)]))
    assert await store.add_records(encoded([make_trajectory(reward=0.0), make_trajectory(sample_index=1)])) == 1
    assert [trajectory.reward for _, trajectory in await read(store, "r", 0, 10)] == [1.0, 1.0]
    assert await store.counts("r") == (2, 2)


async def test_reading_goes_on_from_a_cursor(store: TrajectoryStore) -> None:
    await store.accept("r", [make_group(num_samples=5)])
    await store.accept("other", [make_group()])
    await store.add_records(encoded([make_trajectory(rollout_id="other")]))
    await store.add_records(encoded([make_trajectory(sample_index=index) for index in (3, 1, 4, 0, 2)]))
    seen, cursor = [], 0
    while page := await read(store, "r", cursor, 2):
        assert len(page) <= 2
        seen += [trajectory.sample_index for _, trajectory in page]
        cursor = page[-1][0]
    assert seen == [3, 1, 4, 0, 2]


async def test_accepting_again_changes_nothing_and_adds_what_is_new(
    store: TrajectoryStore, home: StoreHome
) -> None:
    await store.accept("r", [make_group("a")])
    await store.accept("r", [make_group("a"), make_group("b", num_samples=3)])
    assert await store.counts("r") == (5, 0)
    reader = TrajectoryReader(home.where)
    assert reader.rollouts() == ["r"]
    reader.close()


async def test_images_of_accepted_tasks_are_files_or_in_the_database(
    store: TrajectoryStore, home: StoreHome
) -> None:
    red = picture(20, 20)
    group = make_group()
    shows = dataclasses.replace(group, task=dataclasses.replace(group.task, images=(red,)))
    for _ in range(2):
        await store.accept("r", [shows])
    reader = TrajectoryReader(home.where)
    if not isinstance(home.where, str | Path):
        assert not (home.folder / IMAGES_FOLDER).exists()
        reader.write_images(home.folder / IMAGES_FOLDER)
    reader.write_images(home.folder / IMAGES_FOLDER)  # existing files stay
    reader.close()
    (file,) = (home.folder / IMAGES_FOLDER).iterdir()
    assert (file.name, file.read_bytes()) == (red.sha256, red.data)
    [(known, _)] = await store.unfinished()
    assert known.task.images == (red,)  # samples that are not rolled out yet need them


async def test_an_unknown_rollout_is_not_found(store: TrajectoryStore) -> None:
    with pytest.raises(NotFound):
        await store.counts("nobody")
    await store.accept("empty", [])
    assert await store.counts("empty") == (0, 0)


async def test_unfinished_names_the_missing_samples(store: TrajectoryStore) -> None:
    await store.accept("r", [make_group("a", 3), make_group("b", 1), make_group("c", 2)])
    await store.add_records(encoded([make_trajectory("a", 1), make_trajectory("b", 0)]))
    assert [(group.group_id, missing) for group, missing in await store.unfinished()] == [
        ("a", (0, 2)),
        ("c", (0, 1)),
    ]
    assert (await store.unfinished())[0][0] == make_group("a", 3)


async def test_records_of_unaccepted_samples_do_not_hide_a_loss(store: TrajectoryStore) -> None:
    await store.accept("r", [make_group("a", 1)])
    await store.add_records(encoded([make_trajectory("a", 7), make_trajectory("never", 0)]))
    assert await store.counts("r") == (1, 0)


async def test_a_reader_in_another_connection_sees_commits_while_the_writer_is_open(
    store: TrajectoryStore, home: StoreHome
) -> None:
    await store.accept("r", [make_group()])
    reader = TrajectoryReader(home.where)
    try:
        assert reader.counts("r") == (2, 0)
        await store.add_records(encoded([make_trajectory()]))
        assert reader.counts("r") == (2, 1)
        [(_, known)] = reader.read("r", 0, 10)
        assert codec.to_builtins(known) == codec.to_builtins(make_trajectory())
    finally:
        reader.close()


async def test_a_failed_transaction_stores_nothing_and_the_next_one_works(
    store: TrajectoryStore, home: StoreHome
) -> None:
    await store.accept("r", [make_group()])
    if home.is_file:
        home.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON trajectories WHEN new.sample_index = 1"
            " BEGIN SELECT RAISE(ABORT, 'it is broken'); END"
        )
    else:
        home.execute("ALTER TABLE trajectories ADD CONSTRAINT broken CHECK (sample_index <> 1)")
    with pytest.raises(Exception, match="broken"):
        await store.add_records(encoded([make_trajectory(), make_trajectory(sample_index=1)]))
    assert await store.counts("r") == (2, 0)
    home.execute("DROP TRIGGER broken" if home.is_file else "ALTER TABLE trajectories DROP CONSTRAINT broken")
    assert await store.add_records(encoded([make_trajectory(), make_trajectory(sample_index=1)])) == 2


async def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and long enough to be read as a header of one" * 10)
    with pytest.raises(InvalidRequest, match="opened as a trajectory store"):
        TrajectoryStore(text)
    with pytest.raises(InvalidRequest, match="no trajectory store"):
        TrajectoryReader(tmp_path / "absent")
    newer = tmp_path / "newer"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(InvalidRequest, match="has schema version 99, but this release supports"):
        TrajectoryStore(newer)


WRITER = """
import asyncio, sys
from agentloop.storage.trajectory_store import TrajectoryReader, TrajectoryStore
from tests.support.records.samples import encoded, make_group, make_trajectory

async def main():
    store = TrajectoryStore(sys.argv[1])
    await store.accept("r", [make_group(num_samples=20_000)])
    for index in range(20_000):
        await store.add_records(encoded([make_trajectory(sample_index=index)]))
        print(index, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_everything_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(40)]
    writer.send_signal(signal.SIGKILL)  # while it commits
    acknowledged += [int(line) for line in writer.stdout.read().splitlines()]
    writer.stdout.close()
    assert writer.wait(timeout=30) == -signal.SIGKILL
    asyncio.run(check_survivors(path, acknowledged))


async def check_survivors(path: Path, acknowledged: list[int]) -> None:
    store = TrajectoryStore(path)
    stored = [trajectory.sample_index for _, trajectory in await read(store, "r", 0, 20_000)]
    assert stored[: len(acknowledged)] == acknowledged
    assert len(stored) - len(acknowledged) <= 1  # committed, not yet acknowledged
    assert (await store.unfinished())[0][1][0] == len(stored)
    await store.close()


async def test_a_recorded_session_is_read_and_counted_like_any_other(
    store: TrajectoryStore, home: StoreHome
) -> None:
    first, second = make_trajectory("s-1", rollout_id="sessions"), make_trajectory("s-2", rollout_id="sessions")
    assert not await store.holds_sessions("sessions")
    assert await store.record(EncodedRecord.of(first))
    assert await store.record(EncodedRecord.of(second))
    assert not await store.record(EncodedRecord.of(first))  # the answer was lost
    # The fleet has advanced in the meantime.
    assert not await store.record(EncodedRecord.of(dataclasses.replace(first, staleness=3)))
    assert await store.holds_sessions("sessions")
    assert await store.counts("sessions") == (2, 2)
    assert await store.unfinished() == []
    assert [trajectory.group_id for _, trajectory in await read(store, "sessions", 0, 10)] == ["s-1", "s-2"]
    reader = TrajectoryReader(home.where)
    assert reader.counts("sessions") == (2, 2)
    assert reader.rollouts() == ["sessions"]
    reader.close()


async def test_one_place_holds_one_session(store: TrajectoryStore) -> None:
    await store.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id="run", reward=1.0)))
    assert await store.record(EncodedRecord.of(make_trajectory("g", 1, rollout_id="run", reward=0.0)))
    with pytest.raises(Conflict):
        await store.record(EncodedRecord.of(make_trajectory("g", 0, rollout_id="run", reward=0.0)))
    assert [trajectory.reward for _, trajectory in await read(store, "run", 0, 10)] == [1.0, 0.0]


async def test_sessions_and_submitted_work_do_not_mix(store: TrajectoryStore) -> None:
    await store.accept("r", [make_group()])
    with pytest.raises(Conflict):
        await store.record(EncodedRecord.of(make_trajectory()))
    await store.record(EncodedRecord.of(make_trajectory(rollout_id="sessions")))
    with pytest.raises(Conflict):
        await store.accept("sessions", [make_group()])
    assert await store.counts("r") == (2, 0)
    assert await store.counts("sessions") == (1, 1)
    assert not await store.holds_sessions("r")
    assert not await store.holds_sessions("nobody")


class CountingThread(ThreadPoolExecutor):
    """A thread that counts its work items."""

    num_calls = 0

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        return super().submit(fn, *args, **kwargs)


async def test_the_counts_of_a_done_rollout_are_looked_up_once(home: StoreHome) -> None:
    thread = CountingThread(1)  # for the reads
    threads = {"trajectories": CountingThread(1), "trajectory-reads": thread}
    store = TrajectoryStore(home.where, threads.pop)
    await store.accept("r", [make_group("g", 2)])
    await store.add_records(encoded([make_trajectory("g", 0)]))
    assert await store.counts("r") == (2, 1)
    await store.add_records(encoded([make_trajectory("g", 1)]))
    assert await store.counts("r") == (2, 2)
    num_calls = thread.num_calls
    assert [await store.counts("r") for _ in range(100)] == [(2, 2)] * 100
    assert thread.num_calls == num_calls
    await store.close()


async def test_reads_and_the_look_at_the_owner_wait_for_no_commit(home: StoreHome) -> None:
    disk, may_go_on = ThreadPoolExecutor(1), threading.Event()
    store = TrajectoryStore(home.where, lambda name: disk if name == "trajectories" else ThreadPoolExecutor(1))
    try:
        await store.accept("r", [make_group("g", 2)])
        await store.add_records(encoded([make_trajectory("g", 0)]))
        disk.submit(may_go_on.wait)  # a slow disk
        committing = asyncio.create_task(store.add_records(encoded([make_trajectory("g", 1)])))
        async with asyncio.timeout(60.0):
            await store.check_owner()
            assert await store.counts("r") == (2, 1)
            assert len(await store.read("r", 0, 10)) == 1
        assert not committing.done()
        may_go_on.set()
        await committing
        assert len(await store.read("r", 0, 10)) == 2
    finally:
        may_go_on.set()
        await store.close()


async def test_a_commit_waits_for_the_disk_and_survives_the_machine(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t.sqlite")
    await store.take_over()
    connections = [one for one in gc.get_objects() if isinstance(one, sqlite3.Connection)]
    levels = []
    for one in connections:
        with suppress(sqlite3.ProgrammingError):  # closed by another test
            (_, _, file), *_ = one.execute("PRAGMA database_list").fetchall()
            levels += (
                [one.execute("PRAGMA synchronous").fetchone()[0]] if file == str(tmp_path / "t.sqlite") else []
            )
    assert levels == [2, 2]  # FULL: an fsync per commit
    await store.close()


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
async def test_a_number_that_no_row_holds_is_refused(store: TrajectoryStore, number: int) -> None:
    await store.accept("r", [make_group()])
    for call in (
        store.read("r", number, 1),
        store.acknowledge("r", number),
        store.add_records(encoded([make_trajectory(sample_index=number)])),
    ):
        with pytest.raises(InvalidRequest, match="63 bits"):
            await call
    assert await store.counts("r") == (2, 0)


async def test_a_text_with_a_nul_is_stored_or_refused_and_nothing_half(
    store: TrajectoryStore, home: StoreHome
) -> None:
    odd = dataclasses.replace(make_trajectory(), task_id="a\0b", error="\0", metrics={"\0": 1.0})
    await store.accept("r", [make_group(num_samples=2)])
    assert await store.add_records(encoded([odd])) == 1
    [(_, data)] = await store.read("r", 0, 10)
    assert codec.decode(data, Trajectory).task_id == "a\0b"
    (listed,) = (await store.list_records(FactsQuery())).records
    assert listed.task_id == "ab"
    if home.is_file:
        return
    calls = (
        store.accept("s", [make_group("g\0")]),
        store.add_records(encoded([make_trajectory("g\0")])),
        store.list_records(FactsQuery(task="\0")),
        store.annotate("r", [SampleAnnotation(odd.group_id, 0, "\0", annotation_of(1.0))]),
    )
    for call in calls:
        with pytest.raises(InvalidRequest, match=r"the text cannot be stored: .*NUL"):
            await call
    with pytest.raises(NotFound):
        await store.counts("s")
