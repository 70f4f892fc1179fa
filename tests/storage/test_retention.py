"""Retention: deleted records, remaining records, and the report of the deletion."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentloop.api.encoded_record import EncodedRecord
from agentloop.errors import Conflict, Gone
from agentloop.storage.retention import MAX_EMPTIED, RetentionPolicy, Unfinished
from agentloop.storage.trajectory_store import TrajectoryReader, TrajectoryStore
from tests.support.records.samples import encoded, make_group, make_trajectory
from tests.support.service.store_home import StoreHome

ACKNOWLEDGED = RetentionPolicy(deletes_acknowledged=True)
NONE = Unfinished()


@pytest.fixture
async def store(home: StoreHome) -> AsyncIterator[TrajectoryStore]:
    store = TrajectoryStore(home.where)
    yield store
    await store.close()


async def fill(
    store: TrajectoryStore, rollout_id: str, num_samples: int, num_finished: int | None = None
) -> list[int]:
    """Accept a group and finish some of it. Returns the cursors."""
    await store.accept(rollout_id, [make_group("g", num_samples)])
    finished = range(num_samples if num_finished is None else num_finished)
    await store.add_records(encoded([make_trajectory("g", index, rollout_id=rollout_id) for index in finished]))
    return [cursor for cursor, _ in await store.read(rollout_id, 0, 10_000)]


def read_acknowledged(home: StoreHome) -> frozenset[tuple[str, str, int]] | None:
    """Return the records that a trainer has, read by another process."""
    reader = TrajectoryReader(home.where)
    try:
        return reader.acknowledged()
    finally:
        reader.close()


async def trim(store: TrajectoryStore, policy: RetentionPolicy, now: float = 0.0, live: Unfinished = NONE) -> int:
    num_batches = 0
    while await store.trim(policy, now, live):
        num_batches += 1
    return num_batches


async def test_by_default_nothing_is_deleted(store: TrajectoryStore, home: StoreHome) -> None:
    cursors = await fill(store, "r", 10)
    assert read_acknowledged(home) is None
    await store.acknowledge("r", cursors[-1])
    assert not RetentionPolicy().deletes
    assert await trim(store, RetentionPolicy(), 1e12) == 0
    assert len(await store.read("r", 0, 100)) == 10


async def test_what_is_acknowledged_goes_and_the_counts_stay(store: TrajectoryStore, home: StoreHome) -> None:
    cursors = await fill(store, "r", 200, 150)
    await store.acknowledge("r", cursors[99])
    await store.acknowledge("r", cursors[9])  # late, so without effect
    unfinished = Unfinished({"r"})
    assert await trim(store, ACKNOWLEDGED, live=unfinished) == 2
    assert MAX_EMPTIED < 100
    assert [cursor for cursor, _ in await store.read("r", 0, 1000)] == cursors[100:]
    assert read_acknowledged(home) == {("r", "g", index) for index in range(100)}
    assert await store.counts("r") == (200, 150)
    [(_, missing)] = await store.unfinished()
    assert missing == tuple(range(150, 200))  # none of the deleted samples is rolled out again
    assert await store.add_records(encoded([make_trajectory("g", 0, rollout_id="r")])) == 0
    reader = TrajectoryReader(home.where)
    assert len(list(reader.trajectories("r"))) == 50  # the export contains the rest
    reader.close()


async def test_a_live_rollout_stays_when_all_that_it_has_so_far_is_deleted(
    store: TrajectoryStore, home: StoreHome
) -> None:
    cursors = await fill(store, "r", 3, 2)
    await store.acknowledge("r", cursors[-1] + 1000)  # a later record was not read
    await trim(store, ACKNOWLEDGED, live=Unfinished({"r"}))
    assert await store.read("r", 0, 10) == []
    [(_, missing)] = await store.unfinished()
    assert missing == (2,)
    assert await store.add_records(encoded([make_trajectory("g", 2, rollout_id="r")])) == 1
    assert read_acknowledged(home) == {("r", "g", index) for index in range(2)}


async def test_a_done_rollout_goes_as_a_whole_and_its_name_is_not_used_again(store: TrajectoryStore) -> None:
    cursors = await fill(store, "r", 3)
    await fill(store, "other", 3)
    assert await store.counts("r") == (3, 3)
    await store.acknowledge("r", cursors[-1])
    await trim(store, ACKNOWLEDGED)
    with pytest.raises(Gone, match="rollout r was deleted"):
        await store.counts("r")
    assert await store.read("r", 0, 10) == []
    assert await store.counts("other") == (3, 3)


async def test_records_whose_staleness_is_counted_wait_for_their_rollouts_end(store: TrajectoryStore) -> None:
    cursors = await fill(store, "r", 3, 2)
    await store.acknowledge("r", cursors[-1])
    await trim(store, ACKNOWLEDGED, live=Unfinished({"r"}, {"r"}))
    assert len(await store.read("r", 0, 10)) == 2


async def test_old_records_of_done_rollouts_go(store: TrajectoryStore) -> None:
    policy = RetentionPolicy(max_age_s=1000.0)
    await fill(store, "old", 3)
    await fill(store, "running", 3, 2)
    live = Unfinished({"running"})
    await trim(store, policy, 5000.0, live)
    await fill(store, "new", 3)
    await trim(store, policy, 5999.0, live)
    assert (await store.counts("old"), await store.last_mark()) == ((3, 3), 5999.0)
    await trim(store, policy, 6000.0, live)
    with pytest.raises(Gone):
        await store.counts("old")
    assert len(await store.read("running", 0, 10)) == 2
    assert len(await store.read("new", 0, 10)) == 3


async def test_beyond_its_bytes_the_oldest_go_and_the_file_shrinks(store: TrajectoryStore, home: StoreHome) -> None:
    policy = RetentionPolicy(max_bytes=3 << 20)
    for number in range(8):
        await fill(store, f"r{number}", 500)
    await store.accept("last", [make_group("g", 1)])
    size = home.where.stat().st_size if home.is_file else 0
    assert size > 6 << 20 or not home.is_file
    await trim(store, policy)
    await store.add_records(encoded([make_trajectory("g", 0, rollout_id="last")]))
    with pytest.raises(Gone):
        await store.counts("r0")
    assert (await store.counts("r7"))[1] == 500
    assert len(await store.read("r7", 0, 1000)) > 400
    await store.close()  # the write-ahead log is checkpointed
    assert not home.is_file or home.where.stat().st_size < 2 * size / 3


async def test_a_deleted_session_is_not_recorded_again(store: TrajectoryStore) -> None:
    one = make_trajectory("s", 0, rollout_id="sessions")
    assert await store.record(EncodedRecord.of(one))
    [(cursor, _)] = await store.read("sessions", 0, 10)
    await store.acknowledge("sessions", cursor)
    await trim(store, ACKNOWLEDGED)
    assert await store.read("sessions", 0, 10) == []
    assert not await store.record(EncodedRecord.of(one))
    assert await store.counts("sessions") == (1, 1)
    with pytest.raises(Conflict):
        await store.accept("sessions", [make_group("g", 1)])
