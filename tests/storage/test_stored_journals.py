"""Turn journals in the store: the entries that a worker on another host resumes from, safe from a lost worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from agentloop.api.coordinator import JournalPart
from agentloop.errors import InvalidRequest, ServiceUnavailable
from agentloop.rollout.journal_homes import StoredJournals
from agentloop.rollout.turn_journal import FinishedTurn, RunJournal, ToolAnswers, TurnJournal
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import ToolResult
from agentloop.values.codec import encode
from tests.rollout.test_turn_journal import ASSIGNMENT, finished_turns
from tests.support.records.samples import encoded, make_group, make_trajectory
from tests.support.service.store_home import StoreHome

SAMPLE = replace(ASSIGNMENT, assignment_id="r/g-0/0")


@pytest.fixture
async def store(home: StoreHome) -> AsyncIterator[TrajectoryStore]:
    store = TrajectoryStore(home.where)
    await store.take_over()
    await store.accept("r", [make_group(num_samples=2)])
    yield store
    await store.close()


class Port:
    """The coordinator's calls for a worker whose answers may be lost."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self.num_lost_answers = 0
        self.is_cut = False
        self.num_parts: list[int] = []

    async def keep_turns(self, parts: tuple[JournalPart, ...], forgotten: tuple[tuple[str, str], ...]) -> Any:
        if self.is_cut:
            raise ServiceUnavailable("cut off")
        self.num_parts.append(len(parts))
        answer = await self._store.keep_turns(parts, forgotten)
        if self.num_lost_answers:
            self.num_lost_answers -= 1
            raise ServiceUnavailable("the answer was lost")
        return answer

    async def kept_turns(self, assignment_id: str) -> Any:
        return tuple(await self._store.kept_turns(assignment_id))


@asynccontextmanager
async def worker_of(port: Any, flush_s: float = 60.0) -> AsyncIterator[TurnJournal]:
    journal = TurnJournal(StoredJournals(port), flush_s, young_s=0.0)
    try:
        yield journal
    finally:
        await journal.close()


async def begun(journal: TurnJournal, attempt: int = 0, mark: bytes = b"task") -> RunJournal:
    return await journal.begin(replace(SAMPLE, attempt=attempt), lambda: mark)


async def test_another_hosts_worker_reads_what_was_written(store: TrajectoryStore) -> None:
    entries = finished_turns(3)
    answers = ToolAnswers("2", (ToolResult("c", "lookup", "x"),), {"pot": b"4"}, 1.5)
    async with worker_of(store) as lost:
        run = await begun(lost)
        for entry in (*entries[:2], entries[2], answers):
            run.append(entry)
            await lost.flush()
    async with worker_of(store) as other:
        run = await begun(other, 1)
        assert run.kept is not None
        assert encode(run.kept.turns) == encode(tuple(entries))
        assert (run.kept.answers, run.kept.states, run.kept.left_s) == (answers.results, {"pot": b"4"}, 1.5)
        run.append(finished_turns(4)[3])
        await other.flush()
    async with worker_of(store) as third:
        kept = (await begun(third, 2)).kept
        assert kept is not None
        assert (len(kept.turns), kept.attempt) == (4, 1), "with the turns that it went on from"
        assert (await begun(third, 2, b"another task")).kept is None


async def test_what_was_not_answered_is_written_again_and_is_there_once(store: TrajectoryStore) -> None:
    port = Port(store)
    port.num_lost_answers = 1
    entries = finished_turns(4)
    async with worker_of(port) as journal:
        run = await begun(journal)
        for entry in entries[:2]:
            run.append(entry)
        await journal.flush()
        assert not run.is_over
        port.is_cut = True
        for entry in entries[2:]:
            run.append(entry)
        await journal.flush()
        port.is_cut = False
        await journal.flush()
        kept = (await begun(journal, 1)).kept
    assert kept is not None
    assert encode(kept.turns) == encode(tuple(entries))


async def test_many_large_parts_go_in_several_calls(store: TrajectoryStore) -> None:
    port = Port(store)
    async with worker_of(port) as journal:
        runs = [await journal.begin(replace(SAMPLE, assignment_id=f"r/g/{n}"), lambda: b"task") for n in range(5)]
        for run in runs:
            run.append(ToolAnswers("0", (), {"pot": b"x" * (1 << 20)}, None))
        await journal.flush()
        assert port.num_parts == [3, 2]
        assert {len(await store.kept_turns(run.assignment_id)) for run in runs} == {1}


async def begun_twice(
    lost: TurnJournal, other: TurnJournal, entries: Sequence[FinishedTurn]
) -> tuple[RunJournal, RunJournal]:
    """Return the runs of one sample by a lost worker and by its successor, each with an entry."""
    late = await begun(lost)
    late.append(entries[0])
    await lost.flush()
    run = await begun(other, 1)
    run.append(entries[1])
    await other.flush()
    return late, run


async def test_a_sample_with_a_record_has_no_journal_and_gets_none(store: TrajectoryStore, home: StoreHome) -> None:
    entries = finished_turns(3)
    async with worker_of(store) as lost, worker_of(store) as other:
        late, _ = await begun_twice(lost, other, entries)
        assert len(await store.kept_turns(SAMPLE.assignment_id)) == 2
        await store.add_records(encoded([make_trajectory()]))
        assert await store.kept_turns(SAMPLE.assignment_id) == []
        late.append(entries[1])
        await lost.flush()
        assert late.is_over
        again = await begun(lost)  # only now it learns that the sample belongs to another worker
        again.append(entries[0])
        await lost.flush()
        assert again.is_over
        assert await store.kept_turns(SAMPLE.assignment_id) == []
        sibling = await lost.begin(replace(SAMPLE, assignment_id="r/g-0/1"), lambda: b"task")
        sibling.append(entries[0])
        await lost.flush()
        assert not sibling.is_over


async def test_a_worker_that_was_given_up_for_lost_spoils_nothing(store: TrajectoryStore) -> None:
    entries = finished_turns(3)
    async with worker_of(store) as lost, worker_of(store) as other:
        late, run = await begun_twice(lost, other, entries)
        late.append(ToolAnswers("0", (), {}, 1.0))
        late.forget()
        await lost.flush()
        run.append(entries[2])
        await other.flush()
        kept = (await begun(other, 2)).kept
        assert kept is not None
        assert (len(kept.turns), run.is_over) == (3, False)
        run.forget()
        await other.flush()
        assert await store.kept_turns(SAMPLE.assignment_id) == []
        await lost.forget_sample("r/g-0/1")


Call = Callable[[TrajectoryStore], Awaitable[object]]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.keep_turns([JournalPart("r/g-0/0", "run", 0, b"x")], []),
        lambda store: store.keep_turns([], [("r/g-0/0", "")]),
        lambda store: store.kept_turns("r/g-0/0"),
    ],
)
async def test_a_coordinator_that_was_shut_out_keeps_and_gives_nothing(home: StoreHome, call: Call) -> None:
    first = TrajectoryStore(home.where)
    await first.take_over()
    await first.keep_turns([JournalPart("r/g-0/0", "theirs", 0, b"before")], [])
    if not home.is_file:
        home.execute("UPDATE leases SET until = clock_timestamp()")
    second = TrajectoryStore(home.where)
    await second.take_over()
    with pytest.raises(ServiceUnavailable, match="has taken this run over"):
        await call(first)
    assert await second.kept_turns("r/g-0/0") == [("theirs", b"before")]
    await first.close()
    await second.close()


async def test_a_name_that_is_no_samples_is_refused_and_its_journal_is_over(store: TrajectoryStore) -> None:
    with pytest.raises(InvalidRequest, match="invalid assignment id"):
        await store.keep_turns([JournalPart("r", "run", 0, b"x")], [])
    async with worker_of(store) as journal:
        run = await journal.begin(replace(SAMPLE, assignment_id="r"), lambda: b"task")
        run.append(finished_turns(1)[0])
        await journal.flush()
        assert run.is_over
