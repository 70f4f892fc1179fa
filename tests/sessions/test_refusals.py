"""Requests that a session refuses, its limits, and calls that it abandons."""

import asyncio
import json
from dataclasses import replace

import pytest

from agentloop.chat.call import ToolChoice
from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    UnsupportedParameter,
)
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.sessions.prompts import CallLimits
from agentloop.trajectory.node import ModelCallState
from agentloop.types import Constraint, ConstraintKind, Message, SamplingParams
from tests.support.endpoint.sessions import CALCULATOR, MemoryJournal, ask, key, make_session, streamed
from tests.support.engine.recording import RecordingEngine
from tests.support.engine.scripted import SPEC, scripted_engine, started
from tests.support.families.table import write_family

CALL = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def engine():
    async with started(scripted_engine()) as running:
        yield RecordingEngine(running)


async def test_what_cannot_be_constrained_is_refused(engine):
    session = make_session(engine)
    forced = ask("one", tools=(CALCULATOR,), tool_choice=ToolChoice.REQUIRED)
    with pytest.raises(UnsupportedParameter) as raised:
        await session.call(forced, key("a"))
    assert raised.value.param == "tool_choice"
    formed = ask("one", constraint_param="text.format")
    formed = replace(formed, sampling=SamplingParams(1, constraint=Constraint(ConstraintKind.JSON_OBJECT)))
    with pytest.raises(UnsupportedParameter) as raised:
        await session.call(formed, key("b"))
    assert raised.value.param == "text.format"
    assert session.calls == ()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_an_engine_cannot_constrain_names_the_field_that_came(engine, is_streamed):
    """The engine cannot constrain, although the session accepts the request."""
    session = make_session(engine, can_constrain=True)
    constrained = SamplingParams(1, constraint=Constraint(ConstraintKind.JSON_OBJECT))
    formed = replace(ask("one", constraint_param="response_format"), sampling=constrained)
    forced = ask("one", tools=(CALCULATOR,), tool_choice=ToolChoice.REQUIRED, constraint_param="response_format")
    for chat, param in ((formed, "response_format"), (forced, "tool_choice")):
        with pytest.raises(UnsupportedParameter) as raised:
            await (streamed(session, chat, key(param)) if is_streamed else session.call(chat, key(param)))
        assert raised.value.param == param
    assert session.is_complete


async def test_a_required_call_constrains_the_engine():
    spec_engine = scripted_engine(CALL)
    async with started(spec_engine) as running:
        engine = RecordingEngine(running)
        session = make_session(engine, can_constrain=True)
        chat = ask("one", tools=(CALCULATOR,), tool_choice=ToolChoice.REQUIRED, max_tokens=None)
        both = replace(chat, sampling=SamplingParams(1, constraint=Constraint(ConstraintKind.JSON_OBJECT)))
        with pytest.raises(InvalidRequest):
            await session.call(both, key("a"))
        with pytest.raises(InvalidRequest) as raised:
            await session.call(replace(chat, forced_tool="nothing"), key("b"))
        assert raised.value.param == "tool_choice"
        with pytest.raises(InvalidRequest):
            await session.call(replace(chat, tools=()), key("c"))
        assert not engine.requests


async def test_a_required_call_stands_behind_the_thought_that_the_prompt_opened(tmp_path):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, "qwen3_thinking_2507"))
    spec = replace(SPEC, can_constrain=True, vocab_size=renderer.vocab_size)
    async with started(scripted_engine(spec=spec)) as running:
        engine = RecordingEngine(running)
        session = make_session(engine, renderer=renderer, can_constrain=True, vocab_size=renderer.vocab_size)
        await session.call(ask("one", tools=(CALCULATOR,), tool_choice=ToolChoice.REQUIRED), key("a"))
    constraint = json.loads(engine.requests[0].sampling.constraint.text)
    thought, _, calls = constraint["format"]["elements"]
    assert (thought["end"], calls["type"]) == ("</think>", "tags_with_separator")


@pytest.mark.parametrize("max_tokens", [None, 10_000])
async def test_a_turn_takes_what_the_context_holds(engine, max_tokens):
    session = make_session(engine, max_context_tokens=60)
    result = await session.call(ask("one", max_tokens=max_tokens), key("a"))
    assert engine.requests[0].sampling.max_tokens == 60 - len(result.prompt_ids)


@pytest.mark.parametrize(
    ("chat", "kind", "param"),
    [
        (ask("word " * 3000), ContextLengthExceeded, "messages"),
        (ask(prompt_ids=(1,) * 3000), ContextLengthExceeded, "prompt"),
        (ask(), InvalidRequest, "messages"),
        (ask(prompt_ids=()), InvalidRequest, "prompt"),
        (ask(prompt_ids=(10**9,)), InvalidRequest, "prompt"),
        (ask("one", max_tokens=0), InvalidRequest, "max_tokens"),
        (ask("one", num_choices=0), InvalidRequest, "n"),
        (ask(Message("wizard", "one")), InvalidRequest, "messages"),
        (replace(ask("one"), sampling=SamplingParams(1, top_p=2.0)), InvalidRequest, "top_p"),
    ],
)
async def test_a_refused_call_leaves_no_trace(engine, chat, kind, param):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    with pytest.raises(kind) as raised:
        await session.call(chat, key("a"))
    assert raised.value.param == param
    with pytest.raises(kind):
        await streamed(session, chat, key("a", 1))
    assert (journal.writes, session.calls, engine.requests) == ([], (), [])
    assert session.is_complete
    assert session.num_open_calls == 0


async def test_an_engine_that_refuses_loses_nothing(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal, max_context_tokens=10**6)  # more than the engine's limit
    for retry_count in range(2):
        with pytest.raises(ContextLengthExceeded):
            await session.call(ask("word " * 3000), key("a", retry_count))
    assert journal.states == [ModelCallState.COMMITTED] * 2
    assert not journal.stored_nodes
    assert session.is_complete
    assert not journal.restored(session, engine).trajectory().error


async def test_budgets(engine):
    limits = CallLimits(max_open_calls=2, max_nodes=4, max_tokens=100)
    session = make_session(engine, limits=limits)
    calls = [asyncio.create_task(session.call(ask("one"), key(f"{n}"))) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await session.call(ask("one"), key("x"))
    await asyncio.gather(*calls)
    with pytest.raises(InvalidRequest, match="5 turns"):
        await session.call(ask("one", num_choices=3), key("x"))
    with pytest.raises(InvalidRequest, match="its limit is 100"):
        await session.call(ask("word " * 60), key("x"))
    assert session.is_complete


def test_a_deadline_loses_the_call():
    clock = VirtualClock()

    async def main():
        async with started(scripted_engine(decode_s=1.0, clock=clock)) as engine:
            journal = MemoryJournal()
            session = make_session(engine, journal, clock=clock)
            with pytest.raises(DeadlineExceeded):
                await session.call(ask("one", max_tokens=100, timeout_s=5.0), key("a"))
            assert 4.9 < clock.now() < 5.5
            assert journal.states == [ModelCallState.FAILED]
            assert not session.is_complete
            assert "1 of 1 calls were lost" in session.trajectory().error
            assert engine.load().num_running == 0

    clock.run(main())
