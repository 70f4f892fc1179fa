"""The end of sessions in a registry, and the state after failures."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from agentloop.errors import (
    Conflict,
    EngineLost,
    Gone,
    InvalidRequest,
    ServiceUnavailable,
    SessionFinished,
    SessionNotFound,
    StorageFull,
)
from agentloop.score import Score
from agentloop.sessions.calls import SessionEnd, SessionState
from agentloop.trajectory.node import ModelCallState
from agentloop.types import Message, StopReason
from agentloop.values.codec import to_builtins
from agentloop_servers.endpoint.registry import NewSession, Sessions
from tests.support.endpoint.session_site import LIMITS, NOBODY, SessionSite, say, talk, virtually

# Ends


@virtually()
async def test_a_finished_session_is_recorded_once_and_can_be_read(site: SessionSite, sessions: Sessions) -> None:
    session = await sessions.create(NewSession("s", rollout_id="run", group_id="g", sample_index=2), NOBODY)
    await talk(session, 2)
    trajectory = await sessions.finish("s", NOBODY, SessionEnd(score=Score(0.5)))
    again = await sessions.finish("s", NOBODY, SessionEnd(score=Score(0.7)))
    assert to_builtins(again) == to_builtins(trajectory)
    assert (trajectory.reward, trajectory.is_complete, trajectory.stop_reason) == (0.5, True, StopReason.COMPLETED)
    (record,) = site.coordinator.finished["run"]
    assert to_builtins(record) == to_builtins(trajectory)
    assert (record.group_id, record.sample_index) == ("g", 2)
    await site.clock.sleep(5.0)
    assert site.coordinator.leases == {}
    assert (await sessions.find("s", NOBODY)).trajectory() is not None
    with pytest.raises(SessionFinished):
        await talk(session, 1)
    await site.clock.sleep(100.0)
    session = await sessions.find("s", NOBODY)  # loaded from disk
    with pytest.raises(SessionFinished):
        await talk(session, 1)
    assert to_builtins(await sessions.finish("s", NOBODY)) == to_builtins(trajectory)
    assert len(site.coordinator.finished["run"]) == 1
    await site.clock.sleep(1100.0)
    with pytest.raises(Gone):
        await sessions.find("s", NOBODY)
    assert len(site.coordinator.finished["run"]) == 1


@virtually(replace(LIMITS, max_sessions=64))
async def test_sessions_that_finish_together_are_written_together(site: SessionSite, sessions: Sessions) -> None:
    """48 records and 48 notes would be 96 transactions, with a read of each session's file."""
    for number in range(48):
        await talk(await sessions.create(NewSession(f"s{number}"), NOBODY), 1)
    statements: list[str] = []
    await site.in_store(lambda db: db.set_trace_callback(statements.append))
    await asyncio.gather(*(sessions.finish(f"s{number}", NOBODY) for number in range(48)))
    await site.stop()  # pending writes come first
    assert sum("is_recorded = 1 WHERE" in statement for statement in statements) == 48
    assert sum(statement.startswith("SELECT 1 FROM sessions") for statement in statements) == 0
    assert statements.count("COMMIT") <= 10
    assert len(site.recorded) == 48
    await site.start()
    await site.clock.sleep(5.0)
    assert len(site.recorded) == 48


@virtually()
async def test_a_record_whose_note_was_lost_is_handed_in_again(site: SessionSite, sessions: Sessions) -> None:
    await talk(await sessions.create(NewSession("s"), NOBODY), 1)
    await sessions.finish("s", NOBODY)
    await site.stop()
    with closing(sqlite3.connect(site.path / "sessions.sqlite")) as db, db:
        assert db.execute("UPDATE sessions SET is_recorded = 0 WHERE is_recorded = 1").rowcount == 1
    await site.start()
    await site.clock.sleep(5.0)
    assert site.recorded == [("s", "completed", True)]
    assert await site.store.is_recorded("s")


@virtually()
async def test_what_the_coordinator_did_not_take_follows_later(site: SessionSite, sessions: Sessions) -> None:
    await talk(await sessions.create(NewSession("s"), NOBODY), 1)
    site.coordinator.next_errors = [ServiceUnavailable("restarting")] * 4
    with pytest.raises(ServiceUnavailable):
        await sessions.finish("s", NOBODY)
    assert (await sessions.find("s", NOBODY)).record.state is SessionState.FINISHED
    await site.clock.sleep(10.0)
    assert site.recorded == [("s", "completed", True)]


@virtually()
async def test_a_taken_place_is_told_and_not_tried_for_ever(site: SessionSite, sessions: Sessions) -> None:
    for session_id in ("a", "b"):
        await talk(await sessions.create(NewSession(session_id, group_id="g"), NOBODY), 1)
    await sessions.finish("a", NOBODY)
    site.coordinator.next_errors = [Conflict("the record of another session")] * 2
    with pytest.raises(Conflict):
        await sessions.finish("b", NOBODY)
    await site.clock.sleep(10.0)
    assert site.coordinator.next_errors == []
    assert (await sessions.finish("b", NOBODY)).is_complete  # its data can still be read
    assert len(site.coordinator.finished["sessions"]) == 1


@virtually()
async def test_an_unused_session_expires_and_is_recorded_as_incomplete(
    site: SessionSite, sessions: Sessions
) -> None:
    await talk(await sessions.create(NewSession("used", ttl_s=100.0), NOBODY), 1)
    await sessions.create(NewSession("empty", ttl_s=100.0), NOBODY)
    await site.clock.sleep(99.0)
    await talk(await sessions.find("used", NOBODY), 1)
    await site.clock.sleep(20.0)
    assert site.recorded == [("empty", "deadline", False)]
    with pytest.raises(Gone):
        await sessions.find("empty", NOBODY)
    await site.clock.sleep(100.0)
    with pytest.raises(Gone):
        await sessions.find_or_create("used", NOBODY)
    with pytest.raises(Conflict):
        await sessions.create(NewSession("used"), NOBODY)
    with pytest.raises(SessionNotFound):
        await sessions.find("used", "another")
    assert site.recorded == [("empty", "deadline", False), ("used", "deadline", False)]
    assert site.coordinator.finished["sessions"][1].num_sampled_tokens > 0
    assert (sessions.num_open, len(sessions.cache)) == (0, 0)


@virtually()
async def test_a_one_off_session_ends_by_itself(site: SessionSite, sessions: Sessions) -> None:
    kept, left, failed, unused = [await sessions.find_or_create(None, NOBODY) for _ in range(4)]
    await talk(kept, 1)
    await talk(left, 1)
    site.talker.errors = [InvalidRequest("no")]
    with pytest.raises(InvalidRequest):
        await talk(failed, 1)
    await sessions.finish(kept.session_id, NOBODY)
    await site.clock.sleep(200.0)
    groups = [group_id for group_id, _, _ in site.recorded]
    assert groups == [kept.session_id, left.session_id]
    [record] = [one for one in site.coordinator.finished["sessions"] if one.group_id == left.session_id]
    assert (record.stop_reason, record.is_complete, record.error) == (StopReason.COMPLETED, True, None)
    for session in (kept, left, failed, unused):
        with pytest.raises(SessionNotFound):
            await sessions.find(session.session_id, NOBODY)
    assert sessions.num_open == 0


@virtually()
async def test_a_deleted_session_is_gone_for_good(site: SessionSite, sessions: Sessions) -> None:
    session = await sessions.find_or_create("s", NOBODY)
    await talk(session, 1)
    site.talker.gate.clear()
    late = asyncio.create_task(say(session, Message("user", "late")))
    await site.clock.sleep(1.0)
    await sessions.delete("s", NOBODY)
    with pytest.raises(SessionNotFound):
        await late
    with pytest.raises(SessionNotFound):
        await talk(session, 1)
    for attempt in (
        sessions.find("s", NOBODY),
        sessions.find_or_create("s", NOBODY),
        sessions.delete("s", NOBODY),
        sessions.finish("s", NOBODY),
    ):
        with pytest.raises(SessionNotFound):
            await attempt
    with pytest.raises(Conflict):
        await sessions.create(NewSession("s"), NOBODY)
    await site.clock.sleep(2000.0)
    assert site.recorded == []
    assert sessions.num_open == 0
    sessions = await site.restart()
    with pytest.raises(SessionNotFound):
        await sessions.find_or_create("s", NOBODY)


@virtually()
async def test_calls_under_way_end_with_the_service(site: SessionSite, sessions: Sessions) -> None:
    session = await sessions.find_or_create("s", NOBODY)
    site.talker.gate.clear()
    late = asyncio.create_task(say(session, Message("user", "late")))
    await site.clock.sleep(1.0)
    await sessions.close()
    with pytest.raises(ServiceUnavailable):
        await late
    sessions = await site.restart()
    session = await sessions.find("s", NOBODY)
    assert [(call.state, call.error) for call in session.calls] == [
        (ModelCallState.FAILED, "the service is stopping")
    ]
    site.talker.gate.set()
    await say(session, Message("user", "late"), retry_count=1)
    assert session.is_complete


# Failures


@virtually(replace(LIMITS, max_sessions=1000))
async def test_a_full_disk_fails_calls_and_then_all_goes_on(site: SessionSite, sessions: Sessions) -> None:
    session = await sessions.find_or_create("s", NOBODY)
    history = await talk(session, 1)
    await site.disk(1)  # SQLite treats the present size as a smaller one
    long = Message("user", "word " * 1000)

    async def say_much() -> None:
        for index in range(50):
            await say(session, *history, long, Message("user", str(index)))

    async def make_many() -> None:
        for index in range(200):
            await sessions.find_or_create(f"new{index}", NOBODY)

    with pytest.raises(StorageFull):
        await say_much()
    with pytest.raises(StorageFull):
        await make_many()
    await site.disk(1_000_000)
    await say(session, *history, Message("user", "again"))
    sessions.check_health()
    sessions = await site.restart()
    assert (await sessions.find("s", NOBODY)).num_turns == session.num_turns


@virtually()
async def test_a_restart_knows_every_session(site: SessionSite, sessions: Sessions) -> None:
    open_one = await sessions.create(NewSession("open"), "alice")
    history = await talk(open_one, 2)
    await talk(await sessions.create(NewSession("cut"), NOBODY), 1)
    await talk(await sessions.create(NewSession("finished"), NOBODY), 1)
    await sessions.finish("finished", NOBODY)
    await talk(await sessions.create(NewSession("owed"), NOBODY), 1)
    site.coordinator.next_errors = [ServiceUnavailable("away")]
    with pytest.raises(ServiceUnavailable):
        await sessions.finish("owed", NOBODY)
    await sessions.create(NewSession("deleted"), NOBODY)
    await sessions.delete("deleted", NOBODY)
    # A process that dies leaves its files with an open call in them.
    cut = await sessions.find("cut", NOBODY)
    site.talker.gate.clear()
    dying = asyncio.create_task(say(cut, Message("user", "too late")))
    await site.clock.sleep(0.5)
    (site.path / "after").mkdir()
    with sqlite3.connect(site.path / "after" / "sessions.sqlite") as copy:
        source = sqlite3.connect(site.path / "sessions.sqlite")
        source.backup(copy)
        source.close()
    copy.close()
    shutil.copy(site.path / "sessions.open-calls", site.path / "after")
    site.talker.gate.set()
    await dying
    await site.stop()
    site.path /= "after"
    sessions = await site.start()
    assert sessions.num_open == 2
    restored = await sessions.find("open", "alice")
    assert restored.is_complete
    result = await say(restored, *history, Message("user", "more"))
    assert result.choices[0].split is None
    lost = await sessions.find("cut", NOBODY)
    assert not lost.is_complete
    assert [call.state for call in lost.calls] == [ModelCallState.COMMITTED, ModelCallState.FAILED]
    await say(lost, Message("user", "too late"), retry_count=1)  # the client's retry repeats it
    assert lost.is_complete
    with pytest.raises(SessionFinished):
        await talk(await sessions.find("finished", NOBODY), 1)
    with pytest.raises(SessionNotFound):
        await sessions.find("deleted", NOBODY)
    await site.clock.sleep(3.0)
    assert sorted(site.recorded) == [("finished", "completed", True), ("owed", "completed", True)]


@virtually()
async def test_a_call_that_the_engines_failed_is_lost_until_its_retry(
    site: SessionSite, sessions: Sessions
) -> None:
    session = await sessions.find_or_create("s", NOBODY)
    site.talker.errors = [EngineLost("died")] * 4
    with pytest.raises(EngineLost):
        await say(session, Message("user", "hello"))
    assert not session.is_complete
    await say(session, Message("user", "hello"), retry_count=1)
    assert (await sessions.finish("s", NOBODY)).is_complete


@virtually()
async def test_a_clock_that_jumps_on_ends_no_session(site: SessionSite, sessions: Sessions) -> None:
    await lives_its_time(site, sessions, 7200.0)


@virtually()
async def test_a_clock_that_jumps_back_keeps_no_session(site: SessionSite, sessions: Sessions) -> None:
    await lives_its_time(site, sessions, -7200.0)


async def lives_its_time(site: SessionSite, sessions: Sessions, jump_s: float) -> None:
    await sessions.create(NewSession("s", ttl_s=100.0), NOBODY)
    site.wall_jump_s = jump_s
    await site.clock.sleep(50.0)
    await talk(await sessions.find("s", NOBODY), 1)
    await site.clock.sleep(60.0)
    await sessions.find("s", NOBODY)
    await site.stop()
    sessions = await site.start()  # it reads the wrong clock
    await site.clock.sleep(90.0)
    await sessions.find("s", NOBODY)
    await site.clock.sleep(120.0)
    with pytest.raises(Gone):
        await sessions.find("s", NOBODY)
    assert site.recorded == [("s", "deadline", False)]
