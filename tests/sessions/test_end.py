"""The end of a session, failing journals, and sessions restored from the journal."""

import asyncio
import math
from dataclasses import replace

import pytest

from agentloop.errors import Gone, InvalidRequest, ServiceUnavailable, SessionFinished
from agentloop.score import PathScore, Score
from agentloop.sessions.calls import SessionEnd, SessionState
from agentloop.sessions.prompts import CallLimits
from agentloop.trajectory.node import ModelCallState
from agentloop.types import Message, StopReason
from tests.sessions.test_retries import is_running, leave, until
from tests.support.endpoint.sessions import (
    CREATED_AT,
    MemoryJournal,
    Wall,
    ask,
    check_trajectory,
    key,
    make_session,
    streamed,
)
from tests.support.engine.recording import RecordingEngine
from tests.support.engine.scripted import scripted_engine, started

CHAT = ask("one", max_tokens=40)


@pytest.fixture
async def engine():
    async with started(scripted_engine(decode_s=0.001)) as running:
        yield RecordingEngine(running)


async def test_finish_gives_the_record(engine):
    journal, wall = MemoryJournal(), Wall()
    session = make_session(engine, journal, unix_time=wall)
    await session.call(CHAT, key("a"))
    await session.set_score(Score(0.25))
    wall.now_s += 7.0
    trajectory = await session.finish(SessionEnd(score=Score(1.0)))
    assert (trajectory.reward, trajectory.is_complete, trajectory.error) == (1.0, True, None)
    assert (trajectory.rollout_id, trajectory.group_id, trajectory.task_id) == ("sessions", "s", "t")
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.timings.total_s == 7.0
    assert trajectory.timings.generate_s > 0
    wall.now_s += 7.0
    assert (
        await session.finish(SessionEnd(score=Score(0.0), error="late", stop_reason=StopReason.LOOP_FAILED))
        is trajectory
    )
    restored = journal.restored(session, engine)
    assert trajectory.reward_error is None
    again = await restored.finish()
    assert again.timings == trajectory.timings
    (turn,), times = trajectory.path.turns, trajectory.times
    assert (times.began_at, times.ended_us) == (CREATED_AT, 7_000_000)
    assert 0 <= turn.times.begun_us < turn.times.first_token_us < turn.times.ended_us
    assert again.times == times
    assert (again.reward, again.stop_reason, again.is_complete) == (1.0, StopReason.COMPLETED, True)
    assert session.record.created_at == CREATED_AT


async def test_tokens_of_a_call_that_was_left_are_told_also_by_a_later_process(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    stream = session.stream(CHAT, key("a"))
    await anext(stream)
    await stream.aclose()
    trajectory = await session.finish()
    lost_tokens = trajectory.times.lost_tokens
    assert list(lost_tokens) == ["cancel"]
    assert 1 <= lost_tokens["cancel"] <= 40
    assert journal.restored(session, engine).trajectory().times == trajectory.times


@pytest.mark.parametrize("call", [key("a"), key("a", 1), key("b"), key("b", 1)])
async def test_a_late_call_is_refused(engine, call):
    session = make_session(engine)
    await session.call(CHAT, key("a"))
    await session.finish()
    with pytest.raises(SessionFinished):
        await session.call(CHAT, call)
    with pytest.raises(SessionFinished):
        await streamed(session, CHAT, call)
    with pytest.raises(SessionFinished):
        await session.set_score(Score(1.0))
    assert session.num_turns == 1


async def test_finish_waits_for_open_calls(engine):
    session = make_session(engine)
    call = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    assert not session.trajectory().is_complete
    finishing = asyncio.create_task(session.finish(SessionEnd(wait_s=30.0)))
    await asyncio.sleep(0)
    with pytest.raises(SessionFinished):
        await session.call(CHAT, key("b"))
    retried = asyncio.create_task(session.call(CHAT, key("a", 1)))  # still accepted
    trajectory = await finishing
    assert trajectory.is_complete
    assert len(trajectory.paths) == 1
    assert await call == await retried


@pytest.mark.parametrize("wait_s", [0.0, 0.01])
async def test_finish_loses_what_is_open_then(engine, wait_s):
    engine.engine.faults.num_hung = 1
    journal = MemoryJournal()
    session = make_session(engine, journal)
    call = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: len(engine.requests) == 1)
    first, second = await asyncio.gather(session.finish(SessionEnd(wait_s=wait_s)), session.finish())
    assert first is second
    assert not first.is_complete
    assert "lost" in first.error
    with pytest.raises(SessionFinished):
        await call
    assert journal.writes == ["begin", "end failed", "save"]
    assert engine.engine.load().num_waiting == 0


async def test_finish_goes_on_when_its_caller_leaves(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    call = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    finishing = asyncio.create_task(session.finish(SessionEnd(wait_s=30.0)))
    await asyncio.sleep(0)
    await leave(finishing)
    await call
    trajectory = await session.finish()
    assert trajectory.is_complete
    assert session.record.state is SessionState.FINISHED


@pytest.mark.parametrize(
    ("options", "is_complete"),
    [
        ({"error": "the agent\ncrashed"}, False),
        ({"stop_reason": StopReason.LOOP_FAILED}, False),
        ({"stop_reason": StopReason.CANCELLED}, False),
        ({"stop_reason": StopReason.DEADLINE}, True),
    ],
)
async def test_how_the_agent_ended(engine, options, is_complete):
    session = make_session(engine)
    trajectory = await session.finish(SessionEnd(**options))
    assert trajectory.is_complete is session.is_complete is is_complete
    assert "\n" not in (trajectory.error or "")


async def test_a_failed_reward_leaves_a_complete_record(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    await session.call(CHAT, key("a"))
    trajectory = await session.finish(SessionEnd(reward_error="ZeroDivisionError: division by zero"))
    assert (trajectory.reward, trajectory.is_complete, trajectory.error) == (None, True, None)
    assert trajectory.reward_error == "ZeroDivisionError: division by zero"
    assert journal.restored(session, engine).trajectory().reward_error == trajectory.reward_error


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_reward_is_a_number(engine, reward):
    session = make_session(engine)
    with pytest.raises(InvalidRequest):
        await session.set_score(Score(reward))
    with pytest.raises(InvalidRequest):
        await session.finish(SessionEnd(score=Score(reward)))
    assert (await session.finish()).reward is None


async def test_a_score_of_turns_and_paths_is_kept_and_restored(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    turn_id = (await session.call(CHAT, key("a"))).choices[0].node_id
    await session.set_score(Score(components={"form": 1.0}, turn_rewards={turn_id: 0.5}))
    await session.set_score(
        Score(0.25, {"form": 0.0}, {"length": 7.0}, paths={turn_id: PathScore(is_trainable=False)})
    )
    for trajectory in (journal.restored(session, engine).trajectory(), await session.finish()):
        assert (trajectory.reward, trajectory.components) == (0.25, {"form": 0.0})
        assert (trajectory.metrics, trajectory.reward_error) == ({"length": 7.0}, None)
        assert [(turn.turn_id, turn.reward) for turn in trajectory.path.turns] == [(turn_id, 0.5)]
        assert not trajectory.path.is_trainable
    with pytest.raises(InvalidRequest, match="unknown turn 'x'"):
        await session.finish(SessionEnd(score=Score(turn_rewards={"x": 1.0})))


async def test_a_path_that_went_on_after_its_score_is_told(engine):
    session = make_session(engine)
    result = await session.call(CHAT, key("a"))
    await session.set_score(Score(1.0, paths={result.choices[0].node_id: PathScore(reward=1.0)}))
    went_on = (*CHAT.messages, result.choices[0].reply.message, Message("user", "Go on."))
    await session.call(replace(CHAT, messages=went_on, keys=()), key("b"))
    trajectory = await session.finish()
    assert (trajectory.reward, trajectory.is_complete) == (None, True)
    assert trajectory.reward_error == (
        f"unknown path '{result.choices[0].node_id}': expected an index below 1 or the id of a path's last turn"
    )


# Failing journals


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_could_not_be_begun_leaves_no_trace(engine, is_streamed):
    journal = MemoryJournal()
    journal.failures.append(("begin", OSError("disk full")))
    session = make_session(engine, journal)
    with pytest.raises(ServiceUnavailable, match="disk full") as raised:
        await (streamed(session, CHAT, key("a")) if is_streamed else session.call(CHAT, key("a")))
    assert raised.value.retryable
    assert (engine.requests, journal.calls, session.calls) == ([], {}, ())
    assert session.is_complete
    await session.call(CHAT, key("a", 1))
    assert session.num_turns == 1


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_call_that_could_not_be_committed_has_failed(engine, is_late):
    journal = MemoryJournal()
    journal.failures.append(("end committed", OSError("disk full")))
    journal.loses_answers = is_late
    session = make_session(engine, journal)
    pieces = []

    async def read():
        async for piece in session.stream(CHAT, key("a")):
            pieces.append(piece)

    with pytest.raises(ServiceUnavailable):
        await read()
    assert pieces
    assert not any(piece.finish for piece in pieces)
    assert journal.states == [ModelCallState.FAILED]
    assert not journal.stored_nodes
    assert not session.graph.nodes
    assert not session.is_complete
    result = await session.call(CHAT, key("a", 1))
    assert session.graph.nodes == result.choices
    assert [node.node_id for node in journal.stored_nodes] == [result.choices[0].node_id]
    assert journal.restored(session, engine).is_complete


async def test_a_failure_that_cannot_be_written_is_found_by_the_next_process(engine):
    journal = MemoryJournal()
    journal.failures += [("end committed", OSError("disk full")), ("end failed", OSError("disk full"))]
    session = make_session(engine, journal)
    with pytest.raises(ServiceUnavailable):
        await session.call(CHAT, key("a"))
    assert journal.states == [ModelCallState.OPEN]
    restored = journal.restored(session, engine)
    assert not session.is_complete
    assert not restored.is_complete
    await restored.call(CHAT, key("a", 1))
    assert restored.is_complete


async def test_a_journal_that_hangs_is_given_up(engine):
    journal = MemoryJournal()
    journal.gate = asyncio.Event()
    session = make_session(engine, journal, limits=CallLimits(journal_timeout_s=0.02))
    with pytest.raises(ServiceUnavailable, match="within"):
        await session.call(CHAT, key("a"))
    assert (session.num_turns, journal.states) == (0, [ModelCallState.OPEN])
    assert not session.is_complete  # as the next process may find it
    with pytest.raises(ServiceUnavailable):
        await session.set_score(Score(1.0))
    assert session.record.score.reward is None
    with pytest.raises(ServiceUnavailable):
        await session.finish()
    assert session.record.state is SessionState.OPEN
    journal.gate.set()
    await session.call(CHAT, key("a", 1))
    assert (await session.finish()).is_complete


@pytest.mark.parametrize("num_steps", range(12))
async def test_a_cancelled_task_leaves_nothing_open(engine, num_steps):
    """Like the end of a process: the call's own task is cancelled at any point."""
    journal = MemoryJournal()
    session = make_session(engine, journal)
    call = asyncio.create_task(session.call(ask("one", max_tokens=3), key("a")))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    for task in asyncio.all_tasks():
        if task.get_name().startswith("call "):
            task.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: not session.num_open_calls)
    assert ModelCallState.OPEN not in journal.states
    assert len(journal.stored_nodes) == session.num_turns == journal.states.count(ModelCallState.COMMITTED)
    assert journal.restored(session, engine).is_complete is session.is_complete


@pytest.mark.parametrize("num_steps", range(16))
async def test_a_client_that_leaves_at_any_moment_leaves_nothing_open(engine, num_steps):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    call = asyncio.create_task(session.call(ask("one", max_tokens=2), key("a")))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    await leave(call)
    await until(lambda: not session.num_open_calls)
    assert ModelCallState.OPEN not in journal.states
    assert not is_running(engine)
    await session.call(ask("one", max_tokens=2), key("a", 1))
    assert session.num_turns == 1
    assert session.is_complete


async def test_close_ends_everything(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    call = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    await session.close(Gone("expired"))
    assert session.num_open_calls == 0
    with pytest.raises(Gone):
        await call
    with pytest.raises(Gone):
        await session.call(CHAT, key("a", 1))
    with pytest.raises(Gone):
        await session.finish()
    assert journal.states == [ModelCallState.FAILED]


# The next process


async def test_a_restored_session_goes_on_and_answers_again(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    first = await session.call(ask("one", num_choices=2), key("a"))
    reply = first.choices[1].reply.message
    second = await session.call(ask("one", reply, "two"), key("b"))
    await session.set_score(Score(0.5))
    restored = journal.restored(session, engine)
    assert restored.trajectory().reward == 0.5
    assert restored.trajectory().timings.generate_s == session.trajectory().timings.generate_s > 0
    assert_same_paths(restored.trajectory(), session.trajectory())
    num_requests = len(engine.requests)
    for known, chat, name in ((first, ask("one", num_choices=2), "a"), (second, ask("one", reply, "two"), "b")):
        again = await restored.call(chat, key(name, 1))
        assert (again.call_id, again.created_at, again.prompt_ids) == (
            known.call_id,
            known.created_at,
            known.prompt_ids,
        )
        assert [node.reply.message for node in again.choices] == [node.reply.message for node in known.choices]
        assert [n.reply.token_ids.tolist() for n in again.choices] == [
            n.reply.token_ids.tolist() for n in known.choices
        ]
    assert len(engine.requests) == num_requests
    messages = (Message("user", "one"), reply, Message("user", "two"), second.choices[0].reply.message)
    third = await restored.call(ask(*messages, "three"), key("c"))
    assert third.choices[0].parent_id == second.choices[0].node_id
    check_trajectory(restored.trajectory(), restored.graph.nodes)


async def test_what_a_dead_process_left_open_is_lost(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    call = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    restored = journal.restored(session, engine)
    assert not restored.is_complete
    assert restored.num_open_calls == 0
    await restored.call(CHAT, key("a", 1))
    assert restored.is_complete
    await leave(call)
    await until(lambda: not session.num_open_calls)


def assert_same_paths(one, two):
    assert len(one.paths) == len(two.paths)
    for mine, theirs in zip(one.paths, two.paths, strict=True):
        for name in ("prompt_ids", "response_ids", "response_mask", "logprobs"):
            assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
        for name in ("weight_versions", "turns", "split_reason", "parent", "num_shared", "split_detail"):
            assert getattr(mine, name) == getattr(theirs, name)
