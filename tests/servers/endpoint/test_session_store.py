"""The session store on a real file: restored state, and the state after a crash or a disk failure."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from agentloop.errors import InvalidRequest, SessionFinished, SessionNotFound, StorageFull
from agentloop.score import Score
from agentloop.sessions.calls import SessionState
from agentloop.storage.home import Home
from agentloop.trajectory.node import CallRecord, ModelCallState
from agentloop.values import codec
from agentloop_servers.endpoint.open_calls_log import read_open_calls
from agentloop_servers.endpoint.session_store import MAX_WRITE_BATCH, SessionStore, StoredSession
from agentloop_servers.endpoint.shards import ShardRouter
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.records.turns import in_store, make_call, make_node, make_record

AnyHome = TypeVar("AnyHome", Path, Home)


class Wall:
    """A manually advanced wall clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.sqlite"


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, path: Path) -> Path | Home:
    """The storage backends of sessions: all of them pass the same tests."""
    return path if request.param == "sqlite" else request.getfixturevalue("postgres_run")


def store_at(place: AnyHome, wall: Wall | None = None) -> SessionStore:
    return SessionStore(place, wall or Wall(), shards=ShardRouter(FakeCoordinator()))


@asynccontextmanager
async def opened(place: AnyHome, wall: Wall | None = None) -> AsyncIterator[SessionStore]:
    store = store_at(place, wall)
    await store.start()
    try:
        yield store
    finally:
        await store.close()
        await store.close()


async def loaded(store: SessionStore, session_id: str = "s") -> StoredSession:
    stored = await store.load(session_id)
    assert stored is not None
    return stored


async def make_turns(store: SessionStore, num_turns: int, session_id: str = "s") -> None:
    for index in range(num_turns):
        parent = f"n{index - 1}" if index else None
        store.open_call(session_id, make_call(f"c{index}"))
        await store.close_call(
            session_id,
            make_call(f"c{index}", ModelCallState.COMMITTED),
            [make_node(f"n{index}", f"c{index}", parent)],
        )


def change(path: Path, statement: str, *arguments: object) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(statement, arguments).rowcount > 0
    db.close()


async def test_a_session_comes_back_as_it_was(place: AnyHome) -> None:
    async with opened(place) as store:
        assert await store.create(make_record(owner="o"))
        await make_turns(store, 3)
        store.open_call("s", make_call("open"))
        store.open_call("s", make_call("lost"))
        await store.close_call("s", make_call("lost", ModelCallState.FAILED, error="engine_lost"), [])
        stored = await loaded(store)
        assert (stored.state, stored.owner, stored.is_recorded) == (SessionState.OPEN, "o", False)
        assert stored.record == make_record(owner="o")
        assert [call.call_id for call in stored.calls] == ["c0", "c1", "c2", "open", "lost"]
        states = [call.state for call in stored.calls]
        assert states == [ModelCallState.COMMITTED] * 3 + [ModelCallState.OPEN, ModelCallState.FAILED]
        wanted = [make_node("n0", "c0"), make_node("n1", "c1", "n0"), make_node("n2", "c2", "n1")]
        assert codec.to_builtins(stored.nodes) == codec.to_builtins(tuple(wanted))
        assert await store.load("other") is None


async def test_a_later_word_about_a_call_replaces_the_earlier(place: AnyHome) -> None:
    async with opened(place) as store:
        await store.create(make_record())
        await make_turns(store, 1)
        store.open_call("s", make_call("c1"))
        nodes = [make_node("n1", "c1", "n0"), make_node("n2", "c1", "n0")]
        await store.close_call("s", make_call("c1", ModelCallState.COMMITTED), nodes)
        await store.close_call("s", make_call("c1", ModelCallState.COMMITTED), nodes)
        assert [node.node_id for node in (await loaded(store)).nodes] == ["n0", "n1", "n2"]
        await store.close_call("s", make_call("c1", ModelCallState.FAILED, error="gave up"), [])
        stored = await loaded(store)
        assert [node.node_id for node in stored.nodes] == ["n0"]
        assert [call.state for call in stored.calls] == [ModelCallState.COMMITTED, ModelCallState.FAILED]


async def test_after_a_restart_open_calls_have_failed(place: AnyHome) -> None:
    async with opened(place) as store:
        for session_id in ("a", "b", "c"):
            await store.create(make_record(session_id))
        await make_turns(store, 1, "a")
        store.open_call("a", make_call("open"))
        await store.save(replace(make_record("b"), state=SessionState.FINISHED))
        await store.delete("c", SessionState.DELETED)
    store = store_at(place)
    assert await store.start() == 1
    stored = await loaded(store, "a")
    assert [call.state for call in stored.calls] == [ModelCallState.COMMITTED, ModelCallState.FAILED]
    assert stored.calls[1].error
    assert (await loaded(store, "b")).state is SessionState.FINISHED
    assert (await loaded(store, "c")).state is SessionState.DELETED
    await store.close()


async def test_facts_are_replaced_and_a_finished_session_stays_finished(place: AnyHome) -> None:
    async with opened(place) as store:
        record = make_record()
        await store.create(record)
        assert not await store.save(replace(record, score=Score(1.0)))
        finished = replace(record, score=Score(2.0), state=SessionState.FINISHED)
        assert await store.save(finished)
        assert not await store.save(replace(finished, score=Score(3.0)))
        with pytest.raises(SessionFinished):
            await store.save(record)
        assert (await loaded(store)).record == replace(finished, score=Score(3.0))
        assert await store.pending("", 10) == ["s"]
        assert await store.pending("s", 10) == []
        assert not await store.is_recorded("s")
        await store.mark_recorded("s")
        assert await store.is_recorded("s")
        assert await store.pending("", 10) == []


@pytest.mark.parametrize("state", [SessionState.DELETED, SessionState.GONE])
async def test_nothing_brings_a_tombstone_back(place: AnyHome, state: SessionState) -> None:
    async with opened(place) as store:
        record = make_record(owner="o")
        await store.create(record)
        await make_turns(store, 2)
        store.open_call("s", make_call("late"))
        assert await store.delete("s", state)
        assert not await store.delete("s", state)
        for write in (
            store.close_call("s", make_call("late", ModelCallState.COMMITTED), [make_node("n", "late")]),
            store.save(record),
        ):
            with pytest.raises(SessionNotFound):
                await write
        assert not await store.create(record)
        stored = await loaded(store)
        assert (stored.state, stored.owner, stored.record, stored.calls) == (state, "o", None, ())
    async with opened(place) as store:
        assert await in_store(store, lambda db: db.execute("SELECT COUNT(*) FROM calls").fetchone()) == (0,)
        if not isinstance(place, Path):
            assert await in_store(store, lambda db: db.execute("SELECT * FROM open_calls").fetchall()) == []
    if isinstance(place, Path):
        assert read_open_calls(place.with_suffix(".open-calls")) == []


async def test_what_nobody_named_leaves_no_tombstone(place: AnyHome) -> None:
    async with opened(place) as store:
        await store.create(make_record())
        assert await store.delete("s", None)
        assert await store.load("s") is None
        with pytest.raises(SessionNotFound):
            await store.close_call("s", make_call("late", ModelCallState.FAILED), [])


async def test_use_extends_a_life(place: AnyHome) -> None:
    wall = Wall()
    async with opened(place, wall) as store:
        for session_id in ("idle", "used", "long"):
            await store.create(make_record(session_id, ttl_s=1e6 if session_id == "long" else 100.0))
        wall.now_s += 90
        await store.close_call("used", make_call("c", ModelCallState.COMMITTED), [])
        assert await store.expired(10) == []
        wall.now_s += 20
        assert await store.expired(10) == ["idle"]
        wall.now_s += 79
        assert await store.expired(10) == ["idle"]
        wall.now_s += 12  # a sixteenth of the time is tolerance
        assert await store.expired(10) == ["idle", "used"]
        assert await store.expired(1) == ["idle"]
        await store.extend("used")
        await store.delete("idle", SessionState.GONE)
        assert await store.expired(10) == []


async def test_a_full_disk_fails_the_calls_and_nothing_else(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record())
        await make_turns(store, 1)
        (num_pages,) = await in_store(store, lambda db: db.execute("PRAGMA page_count").fetchone())
        await in_store(store, lambda db: db.execute(f"PRAGMA max_page_count = {num_pages + 2}").fetchone())
        big = make_call("big", ModelCallState.FAILED, error="x" * 400_000)
        store.open_call("s", make_call("big"))
        outcomes = await asyncio.gather(
            store.close_call("s", make_call("small", ModelCallState.FAILED), []),
            store.close_call("s", big, []),
            store.close_call("other", make_call("none", ModelCallState.FAILED), []),
            return_exceptions=True,
        )
        assert outcomes[0] is None
        assert isinstance(outcomes[1], StorageFull)
        assert isinstance(outcomes[2], SessionNotFound)
        states = {call.call_id: call.state for call in (await loaded(store)).calls}
        assert states == {
            "c0": ModelCallState.COMMITTED,
            "big": ModelCallState.OPEN,
            "small": ModelCallState.FAILED,
        }
        await in_store(store, lambda db: db.execute("PRAGMA max_page_count = 100000").fetchone())
        await store.close_call("s", big, [])
        assert (await loaded(store)).calls[1] == big


async def test_a_bad_value_fails_its_own_write(place: AnyHome) -> None:
    async with opened(place) as store:
        await store.create(make_record())
        bad = replace(make_call("bad"), error=object())  # type: ignore[arg-type]
        outcomes = await asyncio.gather(
            *(store.close_call("s", call, []) for call in (make_call("a"), bad, make_call("b"))),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [type(None), TypeError, type(None)]
        assert [call.call_id for call in (await loaded(store)).calls] == ["a", "b"]


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        await SessionStore(Path(__file__), Wall()).start()
    with pytest.raises(InvalidRequest):
        await SessionStore(tmp_path / "no" / "folder", Wall()).start()


async def test_another_schema_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(InvalidRequest):
        await SessionStore(path, Wall()).start()


class CountingExecutor(ThreadPoolExecutor):
    """A single thread that counts its calls."""

    num_batches = 0

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.num_batches += 1
        return super().submit(fn, *args, **kwargs)


async def test_writes_that_wait_share_transactions(path: Path) -> None:
    executor = CountingExecutor(max_workers=1)
    store = SessionStore(path, Wall(), executor)
    await store.start()
    await store.create(make_record())
    executor.num_batches = 0
    await asyncio.gather(*(store.close_call("s", make_call(f"c{index}"), []) for index in range(600)))
    assert executor.num_batches <= 600 // MAX_WRITE_BATCH + 2
    assert len((await loaded(store)).calls) == 600
    await store.close()


# Open calls


def as_killed(path: AnyHome, name: str) -> AnyHome:
    """Copy the files that the process would leave if it were killed now."""
    if not isinstance(path, Path):
        return path
    folder = path.parent / name
    folder.mkdir()
    for file in path.parent.glob(f"{path.stem}.*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, folder)
    return folder / path.name


def log_of(path: Path) -> Path:
    return path.with_suffix(".open-calls")


async def states_after(path: Path) -> list[tuple[str, ModelCallState]]:
    """Return the calls of session "s" as the next process finds them after it has handled all open calls."""
    async with opened(path) as store:
        states = [(call.call_id, call.state) for call in (await loaded(store)).calls]
        assert read_open_calls(log_of(path)) == []
        return states


async def test_a_process_killed_at_any_moment_leaves_every_call_in_its_state(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record())
        before = as_killed(path, "before")
        store.open_call("s", make_call("c"))
        begun = as_killed(path, "begun")
        await store.close_call("s", make_call("c", ModelCallState.COMMITTED), [make_node("n", "c")])
        ended = as_killed(path, "ended")
        # Killed after the commit, before the line of the call's end was written.
        unmarked = as_killed(path, "unmarked")
        shutil.copy(log_of(begun), log_of(unmarked))
    assert await states_after(before) == []
    assert await states_after(begun) == [("c", ModelCallState.FAILED)]
    assert await states_after(ended) == [("c", ModelCallState.COMMITTED)]
    assert await states_after(unmarked) == [("c", ModelCallState.COMMITTED)]
    async with opened(unmarked) as store:
        assert [node.node_id for node in (await loaded(store)).nodes] == ["n"]
    async with opened(begun) as store:
        (call,) = (await loaded(store)).calls
        assert replace(call, error="") == make_call("c", ModelCallState.FAILED)
        assert call.error


async def test_open_calls_of_sessions_that_are_no_more_are_dropped(path: Path) -> None:
    async with opened(path) as store:
        for session_id in ("s", "finished", "deleted", "one-off"):
            await store.create(make_record(session_id))
        for session_id in ("s", "finished", "deleted", "one-off", "unknown"):
            store.open_call(session_id, make_call("c"))
        await store.save(replace(make_record("finished"), state=SessionState.FINISHED))
        killed = as_killed(path, "killed")
        await store.delete("deleted", SessionState.DELETED)
        await store.delete("one-off", None)
        later = as_killed(path, "later")
    assert [opened.session_id for opened in read_open_calls(log_of(later))] == ["s", "finished", "unknown"]
    shutil.copy(log_of(killed), log_of(later))
    assert await states_after(later) == [("c", ModelCallState.FAILED)]
    async with opened(later) as store:
        assert [call.state for call in (await loaded(store, "finished")).calls] == [ModelCallState.FAILED]
        rows = await in_store(store, lambda db: db.execute("SELECT session_id FROM calls").fetchall())
        assert sorted(rows) == [("finished",), ("s",)]
        assert await store.load("unknown") is None


async def test_calls_keep_the_order_they_began_in_and_turns_that_of_their_commits(place: AnyHome) -> None:
    def same(call_id: str, state: ModelCallState = ModelCallState.OPEN) -> CallRecord:
        return replace(make_call(call_id, state), digest=b"the same body")

    async with opened(place) as store:
        await store.create(make_record())
        store.open_call("s", same("a"))
        store.open_call("s", same("b"))
        store.open_call("s", same("c"))
        await store.close_call("s", same("c", ModelCallState.COMMITTED), [make_node("n", "c")])
        await store.close_call("s", same("a", ModelCallState.COMMITTED), [make_node("m", "a")])
        assert [call.call_id for call in (await loaded(store)).calls] == ["a", "b", "c"]
        killed = as_killed(place, "killed")
    async with opened(killed) as store:
        await loaded(store)  # as the first call of a session in a process does
        store.open_call("s", same("d"))
        store.open_call("s", same("e"))
        await store.close_call("s", same("e", ModelCallState.FAILED), [])
        killed = as_killed(killed, "again")
    async with opened(killed) as store:
        await loaded(store)  # as the first call of a session in a process does
        store.open_call("s", same("f"))
        stored = await loaded(store)
        assert [call.call_id for call in stored.calls] == ["a", "b", "c", "d", "e", "f"]
        failed = [call.call_id for call in stored.calls if call.state is ModelCallState.FAILED]
        assert failed == ["b", "d", "e"]
        assert [node.node_id for node in stored.nodes] == ["n", "m"]
        for _ in range(5):  # numbers without a row
            with pytest.raises(SessionNotFound):
                await store.close_call("unknown", same("x"), [])
        store.open_call("s", same("g"))
        killed = as_killed(killed, "once more")
    async with opened(killed) as store:
        await loaded(store)  # as the first call of a session in a process does
        store.open_call("s", same("h"))
        assert [call.call_id for call in (await loaded(store)).calls] == list("abcdefgh")


async def test_a_call_that_there_is_no_room_for_has_not_begun(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with opened(path) as store:
        await store.create(make_record())
        for index in range(5):
            store.open_call("s", make_call(f"c{index}"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            for _ in range(3):
                with pytest.raises(StorageFull, match="No space left"):
                    store.open_call("s", make_call("late"))
            assert len((await loaded(store)).calls) == 5
            # The log does not contain the end; the store does.
            await store.close_call("s", make_call("c0", ModelCallState.FAILED), [])
        store.open_call("s", make_call("late"))
        store.open_call("s", make_call("later"))
        calls = (await loaded(store)).calls
        assert [call.call_id for call in calls] == [*(f"c{i}" for i in range(5)), "late", "later"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        store = SessionStore(path, Wall())
        with pytest.raises(StorageFull, match="No space left"):
            await store.start()
        await store.close()
    assert len(await states_after(path)) == 5 + 2


@pytest.mark.long
async def test_a_thousand_calls_at_once(path: Path) -> None:
    random = Random(1)
    ids = [f"c{index}" for index in range(1000)]
    async with opened(path) as store:
        await store.create(make_record())
        for call_id in ids:
            store.open_call("s", make_call(call_id))
        assert [call.call_id for call in (await loaded(store)).calls] == ids

        async def end(call_id: str) -> None:
            await asyncio.sleep(random.choice((0.0, 0.001)))
            await store.close_call(
                "s", make_call(call_id, ModelCallState.COMMITTED), [make_node(f"of {call_id}", call_id)]
            )
            assert call_id not in {opened.call.call_id for opened in read_open_calls(log_of(path))}

        leaving = [asyncio.create_task(end(call_id)) for call_id in ids[::10]]
        rest = [asyncio.create_task(end(call_id)) for index, call_id in enumerate(ids) if index % 10]
        await asyncio.sleep(0.0005)
        for task in leaving:
            task.cancel()  # pending writes reach the disk
        await asyncio.gather(*rest, *leaving, return_exceptions=True)
        assert not any(task.cancelled() or task.exception() for task in rest)
        stored = await loaded(store)
        assert [call.call_id for call in stored.calls] == ids
        still_open = {call.call_id for call in stored.calls if call.state is ModelCallState.OPEN}
        assert still_open < set(ids[::10])
        assert {opened.call.call_id for opened in read_open_calls(log_of(path))} == still_open
        assert len(stored.nodes) == 1000 - len(still_open)


_WRITER = """
import asyncio, sys, time
from agentloop.trajectory.node import ModelCallState
from agentloop_servers.endpoint.session_store import SessionStore
from tests.support.records.turns import make_call, make_record, make_node

async def main():
    store = SessionStore(sys.argv[1], time.time)
    await store.start()
    await store.create(make_record(ttl_s=1e6))
    for index in range(100_000):
        parent = f"n{index - 1}" if index else None
        store.open_call("s", make_call(f"c{index}"))
        call = make_call(f"c{index}", ModelCallState.COMMITTED)
        await store.close_call("s", call, [make_node(f"n{index}", f"c{index}", parent)])
        print(index, flush=True)

asyncio.run(main())
"""


def test_what_was_answered_survives_a_killed_process(path: Path) -> None:
    root = Path(__file__).parents[3]
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert writer.stdout is not None
    acknowledged = -1
    for line in writer.stdout:
        acknowledged = int(line)
        if acknowledged >= 200:
            writer.send_signal(signal.SIGKILL)
            break
    acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait(30)
    writer.stdout.close()
    asyncio.run(check_survivors(path, acknowledged))


async def check_survivors(path: Path, acknowledged: int) -> None:
    async with opened(path) as store:
        stored = await loaded(store)
        assert len(stored.nodes) >= acknowledged + 1
        assert [node.node_id for node in stored.nodes] == [f"n{index}" for index in range(len(stored.nodes))]
        states = [call.state for call in stored.calls]
        assert states[: acknowledged + 1] == [ModelCallState.COMMITTED] * (acknowledged + 1)
        assert ModelCallState.OPEN not in states
