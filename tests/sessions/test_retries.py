"""Retries: the call that a retry matches, the clients that wait for it, and the time when it is dropped."""

import asyncio

import pytest

from agentloop.chat.call import CallKey
from agentloop.errors import EngineLost
from agentloop.generation.turn_reader import joined
from agentloop.observability.metrics import MetricsTally
from agentloop.trajectory.node import ModelCallState
from tests.support.endpoint.sessions import MemoryJournal, ask, check_pieces, key, make_session, streamed
from tests.support.engine.recording import RecordingEngine
from tests.support.engine.scripted import scripted_engine, started
from tests.support.records.samples import counted

CHAT = ask("one", max_tokens=40)


@pytest.fixture
async def engine():
    """Return an engine with about 40 ms per turn, slow enough to disconnect in the middle."""
    async with started(scripted_engine(decode_s=0.001)) as running:
        yield RecordingEngine(running)


async def until(condition, within_s=5.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


async def leave(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def is_running(engine):
    return engine.engine.load().num_running > 0


@pytest.mark.parametrize("joins", [2, 20])
async def test_retries_join_the_call_in_flight(engine, joins):
    session = make_session(engine)
    first = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    retries = [session.call(CHAT, key("a", n + 1)) for n in range(joins)]
    streams = [streamed(session, CHAT, key("a", n + 1)) for n in range(joins)]
    results = await asyncio.gather(first, *retries)
    assert len(session.graph.nodes) == len(engine.requests) == 1
    assert all(result == results[0] for result in results)
    for pieces, result in await asyncio.gather(*streams):
        assert result.call_id == results[0].call_id
        check_pieces(pieces, result)


async def test_retries_join_before_the_prompt_is_made(engine):
    session = make_session(engine)
    chat = ask("word " * 10_000, max_tokens=5)  # a long prompt is rendered in a thread
    roomy = make_session(engine, max_context_tokens=100_000)
    both = (roomy.call(chat, key("a")), roomy.call(chat, key("a", 1)))
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert [error.code for error in errors] == ["context_length_exceeded"] * 2
    assert len(roomy.calls) == 1
    calls = asyncio.gather(session.call(CHAT, key("a")), session.call(CHAT, key("a", 1)))
    one, two = await calls
    assert one is two


async def test_a_stream_and_its_retries_say_the_same(engine):
    session = make_session(engine)
    first = session.stream(CHAT, key("a"))
    begun = [await anext(first), await anext(first)]
    retried = asyncio.create_task(streamed(session, CHAT, key("a", 1)))
    whole = asyncio.create_task(session.call(CHAT, key("a", 1)))
    *rest, result = [item async for item in first]
    pieces, again = await retried
    # pieces that wait for a reader arrive as one piece
    assert list(joined(pieces)) == list(joined([*begun, *rest]))
    assert len(pieces) > 2
    assert result == again == await whole
    check_pieces(pieces, result)
    assert len(session.graph.nodes) == 1


async def test_a_retry_takes_over_when_the_first_leaves(engine):
    session = make_session(engine)
    first = asyncio.create_task(session.call(CHAT, key("a")))
    stream = session.stream(CHAT, key("a", 1))
    await until(lambda: is_running(engine))
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await leave(first)
    await reading
    result = [item async for item in stream][-1]
    assert result.choices == session.graph.nodes
    assert session.is_complete


async def test_the_last_to_leave_ends_the_call_in_the_engine(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    stream = session.stream(CHAT, key("a"))
    await anext(stream)
    second = asyncio.create_task(session.call(CHAT, key("a", 1)))
    await asyncio.sleep(0)
    await stream.aclose()
    await asyncio.sleep(0.003)
    assert is_running(engine)
    await leave(second)
    await until(lambda: not session.num_open_calls)
    assert not is_running(engine)
    assert journal.states == [ModelCallState.FAILED]
    assert "left" in journal.records[0].error
    assert not session.is_complete
    assert not session.graph.nodes


async def test_a_retry_heals(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    first = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    first.cancel()
    await asyncio.sleep(0)
    assert session.num_open_calls == 1
    result = await session.call(CHAT, key("a", 1))  # it arrives before the cancelled call has ended
    assert [node.node_id for node in session.graph.nodes] == [result.choices[0].node_id]
    await until(lambda: not session.num_open_calls)
    assert journal.states == [ModelCallState.FAILED, ModelCallState.COMMITTED]
    assert session.is_complete
    engine.engine.faults.num_lost = 2
    for retry_count in range(2):
        with pytest.raises(EngineLost):
            await session.call(CHAT, key("b", retry_count))
        assert not session.is_complete
    await session.call(CHAT, key("b", 2))
    assert session.is_complete
    assert journal.restored(session, engine).is_complete
    assert session.trajectory().num_resampled_turns == 3  # the client received none of their answers


async def test_an_earlier_success_heals_nothing(engine):
    session = make_session(engine)
    await session.call(CHAT, key("a"))
    engine.engine.faults.num_lost = 1
    with pytest.raises(EngineLost):
        await session.call(CHAT, key("a"))
    assert not session.is_complete
    await session.call(CHAT, key("a", 1))  # runs again: the retry matches the failed call
    assert len(session.graph.nodes) == 2
    assert session.is_complete


async def test_a_committed_answer_is_given_again(engine):
    journal, tally = MemoryJournal(), MetricsTally()
    session = make_session(engine, journal, tally=tally)
    first = await session.call(ask("one", num_choices=2), key("a"))
    again = await session.call(ask("one", num_choices=2), key("a", 1))
    pieces, third = await streamed(session, ask("one", num_choices=2), key("a", 2))
    assert first == again == third
    check_pieces(pieces, third)
    assert counted(tally) == {("calls_repeated_total", ()): 2}
    assert len(engine.requests) == 2
    assert journal.writes == ["begin", "end committed"]


async def test_a_client_that_leaves_during_the_commit_finds_its_answer(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    first = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: is_running(engine))
    journal.gate = asyncio.Event()
    await until(lambda: not is_running(engine))
    await asyncio.sleep(0.01)
    await leave(first)
    waiting = asyncio.create_task(session.call(CHAT, key("a", 1)))
    await asyncio.sleep(0)
    journal.gate.set()
    result = await waiting
    assert result.choices == session.graph.nodes
    assert journal.states == [ModelCallState.COMMITTED]
    assert len(engine.requests) == 1


async def test_identical_bodies_are_two_samples(engine):
    session = make_session(engine)
    await asyncio.gather(session.call(CHAT, key("a")), session.call(CHAT, key("a")))
    await session.call(CHAT, key("a"))
    assert len(session.graph.nodes) == 3
    assert len(session.trajectory().paths) == 3


async def test_a_retry_of_what_never_arrived_is_a_call(engine):
    session = make_session(engine)
    result = await session.call(CHAT, key("a", 2))
    assert result.choices == session.graph.nodes


async def test_a_joined_call_fails_for_all(engine):
    engine.engine.faults.num_hung = 1
    session = make_session(engine)
    calls = [asyncio.create_task(session.call(CHAT, key("a", n))) for n in range(3)]
    calls.append(asyncio.create_task(streamed(session, CHAT, key("a", 3))))
    await until(lambda: len(engine.requests) == 1)
    await asyncio.sleep(0.005)
    engine.engine.kill()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineLost] * 4
    assert len(session.calls) == 1


class HeldEngine:
    """An engine that holds its answers until they are released."""

    def __init__(self, engine):
        self.engine = engine
        self.held = []

    async def generate(self, request, on_progress=None):
        generation = await self.engine.generate(request, on_progress)
        self.held.append(asyncio.get_running_loop().create_future())
        await self.held[-1]
        return generation


async def test_the_last_leaves_as_the_reply_comes(engine):
    """The following retry counts: the first reply must not be stored in addition to its reply."""
    journal, held = MemoryJournal(), HeldEngine(engine.engine)
    session = make_session(held, journal)
    first = asyncio.create_task(session.call(CHAT, key("a")))
    await until(lambda: held.held)
    first.cancel()
    held.held[0].set_result(None)
    await asyncio.sleep(0)
    retry = asyncio.create_task(session.call(CHAT, key("a", 1)))
    await until(lambda: len(held.held) == 2)
    held.held[1].set_result(None)
    result = await retry
    assert journal.states == [ModelCallState.FAILED, ModelCallState.COMMITTED]
    assert session.graph.nodes == result.choices


def counted_key(retry_count, *, num_refused=0):
    """Return the key of a call from an SDK, without an `Idempotency-Key`."""
    return CallKey(b"equal", retry_count, is_unique=False, num_refused=num_refused)


@pytest.mark.parametrize(
    ("first_counts", "num_refused", "retry_counts", "num_turns"),
    [
        ([0], 0, [1, 2, 5], 1),  # one client that increments its retry count
        ([0], 0, [1, 1], 2),  # the second retry with the same count is from another client
        ([0], 0, [2, 1], 2),
        ([0], 1, [1], 2),  # it may be the retry of the refused call
        ([0, 0], 0, [1, 1], 4),
        ([], 0, [1, 1, 1], 3),  # the first attempts never arrived
        ([], 1, [1, 2, 3], 1),  # the refused client's own retries
        ([], 2, [1, 2, 2], 3),  # after the first retry, the other refused client still has to retry
    ],
)
async def test_an_sdks_retry_never_takes_another_clients_answer(
    engine, first_counts, num_refused, retry_counts, num_turns
):
    session = make_session(engine)
    await asyncio.gather(*(session.call(CHAT, counted_key(count)) for count in first_counts))
    for count in retry_counts:
        await session.call(CHAT, counted_key(count, num_refused=num_refused))
    assert session.num_turns == num_turns


async def test_equal_calls_that_all_failed_once_are_as_many_samples(engine):
    engine.engine.faults.num_lost = 8
    session = make_session(engine)
    lost = [session.call(CHAT, counted_key(0)) for _ in range(8)]
    errors = await asyncio.gather(*lost, return_exceptions=True)
    assert {type(error) for error in errors} == {EngineLost}
    results = await asyncio.gather(*(session.call(CHAT, counted_key(1)) for _ in range(8)))
    assert len({result.call_id for result in results}) == session.num_turns == 8


async def test_a_failed_calls_client_may_repeat_its_retry(engine):
    """Its first call fails; the answer of its second call is lost on the network, unnoticed by the service."""
    engine.engine.faults.num_lost = 1
    session = make_session(engine)
    with pytest.raises(EngineLost):
        await session.call(CHAT, counted_key(0))
    first, second = [await session.call(CHAT, counted_key(count)) for count in (1, 2)]
    assert first.call_id == second.call_id
    assert session.num_turns == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_without_a_client_goes_to_one_retry(engine, is_streamed):
    """Two calls are equal; one loses its client while its answer is being written."""
    journal = MemoryJournal()
    session = make_session(engine, journal)
    await session.call(CHAT, counted_key(0))
    begin = streamed if is_streamed else type(session).call
    first = asyncio.create_task(begin(session, CHAT, counted_key(0)))
    await until(lambda: is_running(engine))
    journal.gate = asyncio.Event()
    await until(lambda: not is_running(engine))
    await asyncio.sleep(0.01)
    await leave(first)
    journal.gate.set()
    await until(lambda: not session.num_open_calls)
    retried = await session.call(CHAT, counted_key(1))
    assert retried.choices == session.graph.nodes[1:]
    await session.call(CHAT, counted_key(1))
    assert session.num_turns == 3
