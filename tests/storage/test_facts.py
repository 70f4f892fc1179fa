"""The facts of records: listed fields, order, and fields that are missing in older stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agentloop.api.coordinator import RolloutTerms
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import FactsPage, FactsQuery, ListOrder, facts_of
from agentloop.errors import InvalidRequest, NotFound
from agentloop.storage import facts
from agentloop.storage.retention import RetentionPolicy, Unfinished
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import Message, StopReason, Timings, Trajectory
from agentloop.values import codec
from tests.support.records.samples import encoded, make_group, make_trajectory
from tests.support.service.store_home import StoreHome


@pytest.fixture(params=[4096, 3], ids=["fresh", "rolled up"])
async def store(
    home: StoreHome, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TrajectoryStore]:
    monkeypatch.setattr(facts, "MAX_FRESH", request.param)
    store = TrajectoryStore(home.where)
    await store.accept("r", [make_group("g", 100)])
    yield store
    await store.close()


def record(index: int, *, seconds: float = 1.0, task: str = "", **fields: object) -> Trajectory:
    made = replace(make_trajectory("g", index), timings=Timings(total_s=seconds), **fields)
    return replace(made, task_id=task) if task else made


async def listed(store: TrajectoryStore, **query: object) -> list[int]:
    """Return the samples of all pages of a listing."""
    found, cursor = list[int](), ""
    while True:
        page = await store.list_records(FactsQuery(**{"limit": 2, "cursor": cursor, **query}))
        found += [one.sample_index for one in page.records]
        assert len(page.records) <= 2
        if not (cursor := page.cursor):
            return found


async def test_a_row_tells_its_record(store: TrajectoryStore) -> None:
    await store.add_records(encoded([make_trajectory("g", 3, num_tool_errors=1)]))
    page = await store.list_records(FactsQuery())
    (row,) = page.records
    assert (row.rollout_id, row.group_id, row.sample_index, row.task_id) == ("r", "g", 3, "task-g")
    assert (row.stop_reason, row.is_complete, row.failure, row.reward, row.attempt) == (
        "completed",
        True,
        None,
        1,
        0,
    )
    assert (row.began_at, row.total_s, row.replica, row.worker) == (1.7e9, 1.0, "replica-0", "worker-1")
    assert (row.num_turns, row.num_paths, row.num_tool_calls, row.num_tool_errors) == (2, 1, 1, 1)
    tokens = (row.num_prompt_tokens, row.num_observed_tokens, row.num_sampled_tokens, row.num_cached_tokens)
    assert (*tokens, row.num_lost_tokens) == (10, 2, 6, 8, 7)
    assert (row.oldest_version, row.newest_version, row.staleness) == (0, 0, None)
    assert (row.task, row.answer) == ("What is 2 + 3?", "5 \u2713")
    assert page.cursor == ""


async def test_listings_by_order_filter_and_cursor(store: TrajectoryStore) -> None:
    stops = {3: StopReason.LOOP_FAILED, 6: StopReason.ENGINE_FAILED}
    made = [
        record(
            index,
            seconds=float(index % 4),
            task="odd" if index % 2 else "even",
            reward=None if index == 7 else index % 3 / 2,
            stop_reason=stops.get(index, StopReason.COMPLETED),
            is_complete=index not in stops,
        )
        for index in range(8)
    ]
    await store.add_records(encoded(made[:5]))
    for one in made[5:]:
        await store.add_records(encoded([one]))
    assert await listed(store) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert await listed(store, order=ListOrder.SLOWEST) == [7, 3, 6, 2, 5, 1, 4, 0]
    assert await listed(store, order=ListOrder.BEST) == [5, 2, 4, 1, 6, 3, 0]
    assert await listed(store, order=ListOrder.WORST) == [0, 3, 6, 1, 4, 2, 5]
    assert await listed(store, failed=True) == [6, 3]
    assert await listed(store, failed=True, order=ListOrder.SLOWEST) == [3, 6]
    assert await listed(store, task="odd") == [7, 5, 3, 1]
    assert await listed(store, task="odd", order=ListOrder.SLOWEST) == [7, 3, 5, 1]
    assert await listed(store, group=f"r/{made[0].group_id}", order=ListOrder.SLOWEST) == [7, 3, 6, 2, 5, 1, 4, 0]
    assert await listed(store, group="r/none") == await listed(store, group="none") == []
    totals = (await store.list_records(FactsQuery())).totals
    assert {(one.stop_reason, one.failure): one.num_records for one in totals} == {
        ("completed", None): 6,
        ("engine_failed", "infrastructure"): 1,
        ("loop_failed", "infrastructure"): 1,
    }
    assert sum(one.num_rewarded for one in totals) == 7
    assert sum(one.reward for one in totals) == sum(one.reward or 0 for one in made)
    assert all(one.newest_version == 0 for one in totals)


async def test_a_search_looks_at_a_bounded_number_of_rows_a_page(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_MAX_SEARCHED", 4)
    words = ["Ant", "bee", "100%", "ANT_2", "cat", "dog", "eel", "fox", "gnu"]
    for index, word in enumerate(words):
        said = (Message("user", f"Tell of {word}\nand more"), Message("assistant", "Once."))
        await store.add_records(encoded([record(index, paths=(), task_messages=said)]))
    assert await listed(store, text="ant") == [3, 0]
    assert await listed(store, text="cat") == [4]
    assert await listed(store, text="0%") == [2]
    assert await listed(store, text="t_") == [3]
    assert await listed(store, text="and more") == []
    assert await listed(store, text="ONCE.") == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    with pytest.raises(InvalidRequest, match="newest"):
        await store.list_records(FactsQuery(ListOrder.BEST, text="ant"))
    for cursor in ("x", "5", "[]", '["a", 1]'):
        with pytest.raises(InvalidRequest, match="cursor"):
            await store.list_records(FactsQuery(cursor=cursor))


async def test_ranges_and_the_histograms_whose_buckets_they_are(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = [None, 0.0, 0.15, 0.3, 1.0, 1.0, 0.65, 0.3]
    made = [record(n, seconds=n / 2, task=f"t{n % 2}", reward=reward) for n, reward in enumerate(rewards)]
    await store.add_records(encoded(made))
    assert await listed(store, min_reward=0.3) == [7, 6, 5, 4, 3]
    assert await listed(store, min_reward=0.3, max_reward=1.0) == [7, 6, 3]
    assert await listed(store, max_reward=0.3, order=ListOrder.BEST) == [2, 1]
    assert await listed(store, min_reward=0.1, min_s=2.0, order=ListOrder.WORST) == [7, 6, 4, 5]
    assert await listed(store, min_s=0.5, max_s=2.0, task="t1") == [3, 1]
    assert await listed(store, min_s=9.0) == []
    for query in (FactsQuery(), FactsQuery(ListOrder.BEST, task="t0", min_s=0.5)):
        page = await store.list_records(query)
        assert set(page.histograms) == {"reward", "total_s", "num_sampled_tokens"}
        for name, ends in (("reward", ("min_reward", "max_reward")), ("total_s", ("min_s", "max_s"))):
            found = page.histograms[name]
            assert sum(found.counts) == sum(getattr(one, name) is not None for one in page.records)
            for count, *edges in zip(found.counts, found.edges, found.edges[1:], strict=False):
                bucket = replace(query, **dict(zip(ends, edges, strict=True)))
                assert len((await store.list_records(bucket)).records) == count
    for query in (FactsQuery(limit=2, cursor="[3,3]"), FactsQuery(limit=2, has_totals=False)):
        page = await store.list_records(query)
        assert (len(page.records), page.totals, page.histograms) == (2, (), {})
    monkeypatch.setattr(facts, "_MAX_SEARCHED", 2)  # the limit for indexed records
    page = await store.list_records(FactsQuery(limit=1))
    is_rolled_up = facts.MAX_FRESH != 4096
    assert (sum(page.histograms["total_s"].counts), page.is_of_latest) == (2 if is_rolled_up else 8, is_rolled_up)
    assert await listed(store, max_s=1.0) == [1, 0]


async def test_a_user_lists_its_own_and_counts_those_that_were_deleted(store: TrajectoryStore) -> None:
    for owner, rollout_id, number in (("alice", "alice~r", 5), ("bob", "bob~r", 2), ("", "alice", 1)):
        await store.accept(rollout_id, [make_group("g", 5)], RolloutTerms(owner))
        made = [replace(record(index, reward=index / 4), rollout_id=rollout_id) for index in range(number)]
        await store.add_records(encoded(made))
    [(first, _), *_] = await store.read("alice~r", 0, 10)
    await store.acknowledge("alice~r", first)
    await store.trim(RetentionPolicy(deletes_acknowledged=True), 0.0, Unfinished(live={"alice~r"}))
    for names, samples in ((("alice", "key-1"), [4, 3, 2, 1]), (("bob",), [1, 0]), (("eve",), [])):
        query = FactsQuery(ListOrder.BEST, limit=2)
        page = await store.list_records(query, names)
        found = list(page.records)
        while page.cursor:
            page = await store.list_records(replace(query, cursor=page.cursor), names)
            found += page.records
        assert [one.sample_index for one in found] == samples
        page = await store.list_records(FactsQuery(limit=1, min_reward=0.5), names)
        scored = [] if not page.histograms else page.histograms["reward"].counts
        assert sum(scored) == sum(index >= 2 for index in samples)
        num_counted = sum(total.num_records for total in page.totals)
        assert num_counted == len(samples) + (facts.MAX_FRESH == 3 and "alice" in names)
        for one in found:
            await store.record_at(one.seq, names)
            with pytest.raises(NotFound):
                await store.record_at(one.seq, ("eve",))
    assert sum(total.num_records for total in (await store.list_records(FactsQuery())).totals) >= 7


async def test_the_first_record_of_a_sample_is_listed_once(store: TrajectoryStore) -> None:
    both = encoded([record(0, reward=1.0), record(0, reward=0.0), record(1, reward=0.5)])
    assert await store.add_records(both) == 2
    assert await store.add_records(encoded([record(0, reward=0.25)])) == 0
    page = await store.list_records(FactsQuery())
    assert [(one.sample_index, one.reward) for one in page.records] == [(1, 0.5), (0, 1.0)]
    assert sum(one.num_records for one in page.totals) == 2


async def test_a_deleted_record_is_listed_no_more_and_stays_counted(store: TrajectoryStore) -> None:
    await store.add_records(encoded([record(index) for index in range(4)]))
    [_, (second, _), *_] = await store.read("r", 0, 10)
    await store.acknowledge("r", second)
    await store.trim(RetentionPolicy(deletes_acknowledged=True), 0.0, Unfinished(live={"r"}))
    assert await store.add_records(encoded([record(0)])) == 0  # a repeat
    page = await store.list_records(FactsQuery())
    assert [one.sample_index for one in page.records] == [3, 2]
    if facts.MAX_FRESH == 3:
        assert sum(one.num_records for one in page.totals) == 4


def test_facts_travel_with_the_record_and_have_no_more_than_400_bytes() -> None:
    long = Message("user", "\n  " + "x" * 5000), Message("assistant", "y\0" * 5000)
    sent = EncodedRecord.of(replace(make_trajectory(), paths=(), task_messages=long))
    arrived = codec.decode(codec.encode(sent), EncodedRecord)
    assert arrived.facts == sent.facts == facts_of(arrived.decoded())
    assert (sent.facts[-2], sent.facts[-1]) == ("x" * 64, "y" * 64)
    assert len(codec.encode(facts.row_of(sent))) < 400


def test_a_page_survives_the_wire() -> None:
    page = FactsPage((), "[1,2]", ())
    assert codec.decode(codec.encode(page), FactsPage) == page
