"""The turns, branches, choices and versions that a session records."""

import asyncio
from dataclasses import replace

import pytest

from agentloop.chat.call import ToolChoice
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import WeightUpdate
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.score import Score
from agentloop.sessions.calls import SessionEnd, SessionRecord
from agentloop.trajectory.node import ModelCallState
from agentloop.types import (
    Constraint,
    ConstraintKind,
    KVPolicy,
    Message,
    PauseMode,
    SplitReason,
    VersionDemand,
    WeightVersionSpan,
)
from agentloop.values import codec
from agentloop.values.sampling import LogprobsMode, turn_sampling
from tests.support.endpoint.sessions import (
    CALCULATOR,
    MemoryJournal,
    ask,
    check_pieces,
    check_trajectory,
    key,
    make_session,
    streamed,
)
from tests.support.engine.recording import RecordingEngine
from tests.support.engine.scripted import RENDERER, SPEC, ids, scripted_engine, started
from tests.support.records.model_folder import write_folder

CALL = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def engine():
    async with started(scripted_engine()) as running:
        yield RecordingEngine(running)


async def converse(session, *texts, name="turn", before=()):
    """Converse with these user messages after those in `before`, echoing replies. Returns the conversation."""
    messages = [*before]
    for number, text in enumerate(texts):
        messages.append(Message("user", text))
        result = await session.call(ask(*messages), key(f"{name} {number}"))
        messages.append(result.choices[0].reply.message)
    return messages


async def test_a_call_that_ignores_eos_stops_at_its_own_stop_tokens_only(engine):
    session, own = make_session(engine), ids("e")[0]
    for ignores, stops in ((False, (*RENDERER.stop_token_ids, own)), (True, (own,))):
        chat = ask(Message("user", f"ignores: {ignores}"))
        sampling = replace(chat.sampling, ignore_eos=ignores, stop_token_ids=(own,))
        await session.call(replace(chat, sampling=sampling), key(f"ignores {ignores}"))
        assert engine.requests[-1].sampling.stop_token_ids == stops


async def test_a_call_without_a_demand_has_that_of_its_session(engine):
    own, of_session = VersionDemand(min_version=0), VersionDemand(exact_version=0)
    session = make_session(engine, record=SessionRecord("s", 0.0, 3600.0, weight_version=of_session))
    for given, sent in ((None, of_session), (own, own)):
        chat = ask(f"demands {given}")
        await session.call(
            replace(chat, sampling=replace(chat.sampling, weight_version=given)), key(f"demands {given}")
        )
        assert engine.requests[-1].sampling.weight_version == sent


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_record_says_how_each_turn_was_sampled_also_after_a_restart(is_streamed):
    spec = replace(SPEC, logprobs_mode=LogprobsMode.BOTH)
    async with started(scripted_engine(spec=spec)) as running:
        engine, journal = RecordingEngine(running), MemoryJournal()
        session = make_session(engine, journal=journal)
        for number, shape in enumerate(({"seed": 5, "temperature": 0.5}, {"logit_bias": ((9, -100.0),)})):
            chat = ask(Message("user", f"{number}"), max_tokens=6)
            chat = replace(chat, sampling=replace(chat.sampling, **shape))
            if is_streamed:
                await streamed(session, chat, key(f"{number}"))
            else:
                await session.call(chat, key(f"{number}"))
        for kept in (session, journal.restored(session, engine)):
            paths = kept.trajectory().paths
            for path, request in zip(paths, engine.requests, strict=True):
                [turn] = path.turns
                assert turn.sampling == turn_sampling(request.sampling, LogprobsMode.BOTH)
                assert turn.seed == request.sampling.seed
                assert path.raw_logprobs is not None
                assert (path.raw_logprobs < 0).all()
            assert not paths[0].constrained.any()
            assert paths[1].constrained.all()
            assert (paths[0].raw_logprobs != paths[0].logprobs).any()


async def test_a_conversation_is_one_path_of_what_the_engine_saw(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two", "three")
    trajectory = session.trajectory()
    [path] = trajectory.paths
    assert trajectory.messages == tuple(messages)
    last = engine.generations[-1]
    assert (*path.prompt_ids, *path.response_ids) == (*engine.requests[-1].token_ids, *last.token_ids)
    for earlier, answer, later in zip(engine.requests, engine.generations, engine.requests[1:], strict=False):
        assert later.token_ids[: len(earlier.token_ids) + len(answer.token_ids)] == (
            *earlier.token_ids,
            *answer.token_ids,
        )
        assert later.num_known_tokens == len(earlier.token_ids) + len(answer.token_ids)
    assert engine.requests[0].num_known_tokens == 0
    check_trajectory(trajectory, session.graph.nodes)
    assert trajectory.is_complete
    assert trajectory.error is None


async def test_a_stream_is_the_same_answer(engine):
    chat = ask("one", max_tokens=40, seed=7)
    pieces, result = await streamed(make_session(engine), chat, key("a"))
    whole = await make_session(engine).call(chat, key("a"))
    check_pieces(pieces, result)
    ours, theirs = result.choices[0].reply, whole.choices[0].reply
    assert ours.message == theirs.message
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    assert result.prompt_ids == whole.prompt_ids


async def test_the_answer_leaves_after_the_journal():
    async with started(scripted_engine("Hello.")) as engine:
        journal = MemoryJournal()
        session = make_session(engine, journal)
        stream = session.stream(ask("one"), key("a"))
        first = await anext(stream)
        assert first.finish is None
        journal.gate = asyncio.Event()
        rest = asyncio.create_task(asyncio.wait_for(collect(stream), 60))
        await asyncio.sleep(0.05)
        assert not rest.done()
        journal.gate.set()
        *_, last, result = await rest
        assert last.finish is not None
        assert result.choices == session.graph.nodes
        assert journal.writes == ["begin", "end committed"]


async def collect(stream):
    return [item async for item in stream]


@pytest.mark.parametrize("chosen", [0, 1])
async def test_choices_that_say_the_same_are_told_apart_by_their_call_ids(chosen):
    async with started(scripted_engine(CALL, "It is 4.")) as engine:
        session = make_session(engine)
        asked = ask("one", num_choices=2, tools=(CALCULATOR,), max_tokens=100)
        first = await session.call(asked, key("a"))
        replies = [node.reply.message for node in first.choices]
        assert [reply.tool_calls[0].id for reply in replies] == ["call_0_0", "call_1_0"]
        assert (await session.call(asked, key("b"))).choices[1].reply.message.tool_calls[0].id == "call_3_0"
        for place, reply in enumerate(replies):
            answer = Message("tool", "4", tool_call_id=reply.tool_calls[0].id, name="calculator")
            result = await session.call(ask("one", reply, answer, tools=(CALCULATOR,)), key(f"c {place}"))
            assert result.choices[0].parent_id == first.choices[place].node_id
            assert result.choices[0].split is None
        answer = Message("tool", "4", tool_call_id=replies[chosen].tool_calls[0].id, name="calculator")
        final = result.choices[0].reply.message
        deeper = ask("one", replies[chosen], answer, final, "and then?", tools=(CALCULATOR,))
        prompt = await session.preview(deeper)
        assert session.graph.node(prompt.parent_id).parent_id == first.choices[chosen].node_id


async def test_choices_are_siblings_with_seeds_of_their_own(engine):
    session = make_session(engine)
    first = await session.call(ask("one", seed=3, num_choices=3), key("a"))
    assert [node.choice_index for node in first.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in engine.requests] == [3, 4, 5]
    assert len({tuple(node.reply.token_ids) for node in first.choices}) > 1
    reply = first.choices[1].reply.message
    second = await session.call(ask("one", reply, "two"), key("b"))
    assert second.choices[0].parent_id == first.choices[1].node_id
    trajectory = session.trajectory()
    assert len(trajectory.paths) == 3
    check_trajectory(trajectory, session.graph.nodes)
    pieces, result = await streamed(session, ask("one", seed=3, num_choices=3), key("c"))
    check_pieces(pieces, result)
    assert [n.reply.token_ids.tolist() for n in result.choices] == [
        n.reply.token_ids.tolist() for n in first.choices
    ]


async def test_all_choices_or_none(engine):
    journal = MemoryJournal()
    session = make_session(engine, journal)
    engine.engine.faults.num_lost = 1
    with pytest.raises(Exception, match="injected") as raised:
        await session.call(ask("one", num_choices=3), key("a"))
    assert raised.value.code == "engine_lost"
    assert journal.states == [ModelCallState.FAILED]
    assert not session.graph.nodes
    assert engine.engine.load().num_running == 0


async def test_two_hundred_turns_at_once(engine):
    session = make_session(engine)
    base = await converse(session, "one")
    chats = [ask(*base, f"question {n % 100}") for n in range(200)]
    results = await asyncio.gather(*(session.call(chat, key(f"{n}")) for n, chat in enumerate(chats)))
    assert len({result.choices[0].node_id for result in results}) == 200
    assert {result.choices[0].parent_id for result in results} == {session.graph.nodes[0].node_id}
    trajectory = session.trajectory()
    assert len(trajectory.paths) == 200
    assert [path.split_reason for path in trajectory.paths] == [None] + [SplitReason.BRANCH] * 199
    check_trajectory(trajectory, session.graph.nodes)
    assert trajectory.is_complete


async def test_sub_agents_side_by_side(engine):
    session = make_session(engine)
    talks = [converse(session, *(f"agent {n}: {m}" for m in range(4)), name=f"{n}") for n in range(5)]
    conversations = await asyncio.gather(*talks)
    trajectory = session.trajectory()
    assert len(trajectory.paths) == 5
    assert [path.split_reason for path in trajectory.paths[1:]] == [SplitReason.NEW_CONVERSATION] * 4
    assert all(len(path.turns) == 4 for path in trajectory.paths)
    assert trajectory.messages in [tuple(one) for one in conversations]
    check_trajectory(trajectory, session.graph.nodes)


async def test_a_title_call_after_the_main_conversation_does_not_replace_it(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two", "three")
    await session.call(ask(Message("system", "Name this."), "a chat about numbers", max_tokens=100), key("title"))
    trajectory = await session.finish(SessionEnd(score=Score(0.5)))
    assert [path.split_reason for path in trajectory.paths] == [None, SplitReason.NEW_CONVERSATION]
    assert trajectory.main_conversation == (0,)
    assert trajectory.path is trajectory.paths[0]
    assert trajectory.messages == tuple(messages)
    assert trajectory.paths[1].messages[0].content == "Name this."
    assert trajectory.reward == 0.5


async def test_a_title_call_before_the_main_conversation_does_not_replace_it_either(engine):
    session = make_session(engine)
    await session.call(ask("name this chat", max_tokens=100), key("title"))
    messages = await converse(session, "one", "two")
    trajectory = session.trajectory()
    assert trajectory.main_conversation == (1,)
    assert trajectory.messages == tuple(messages)


async def test_a_title_call_that_repeats_the_user_under_another_system_message_does_not_either(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two", before=(Message("system", "Be brief."),))
    await session.call(ask(Message("system", "Name this chat."), "one", max_tokens=100), key("title"))
    trajectory = session.trajectory()
    assert [path.split_reason for path in trajectory.paths] == [None, SplitReason.SYSTEM_CHANGED]
    assert (trajectory.main_conversation, trajectory.messages) == ((0,), tuple(messages))


async def test_a_conversation_goes_on_under_another_system_message(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two", before=(Message("system", "It is Monday."),))
    changed = [Message("system", "It is Tuesday."), *messages[1:], Message("user", "three")]
    result = await session.call(ask(*changed), key("changed"))
    trajectory = session.trajectory()
    assert [path.split_reason for path in trajectory.paths] == [None, SplitReason.SYSTEM_CHANGED]
    assert trajectory.main_conversation == (0, 1)
    assert trajectory.messages == (*changed, result.choices[0].reply.message)


async def test_a_sub_agent_that_ends_last_does_not_replace_its_caller(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two", "three")
    compacted = [messages[0], Message("assistant", "we talked"), *messages[4:], Message("user", "four")]
    result = await session.call(ask(*compacted), key("compacted"))
    await converse(session, "agent: find", "agent: go on", name="agent")
    trajectory = session.trajectory()
    assert [path.split_reason for path in trajectory.paths] == [None, "history_edit", "new_conversation"]
    assert trajectory.main_conversation == (0, 1)
    assert trajectory.messages == (*compacted, result.choices[0].reply.message)


async def test_compaction_begins_anew_and_says_so(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two", "three")
    compacted = [messages[0], Message("assistant", "we talked"), *messages[4:], Message("user", "four")]
    result = await session.call(ask(*compacted), key("x"))
    node = result.choices[0]
    assert node.parent_id is None
    assert node.split.reason is SplitReason.HISTORY_EDIT
    assert "we talked" in node.split.detail
    path = session.trajectory().paths[1]
    assert path.split_reason == "history_edit"
    assert path.parent == 0
    assert tuple(path.prompt_ids) == result.prompt_ids


async def test_a_rollback_goes_on_from_the_turn_before(engine):
    session = make_session(engine)
    messages = await converse(session, "one", "two")
    result = await session.call(ask(*messages[:2], "other"), key("x"))
    first = session.graph.nodes[0]
    assert result.choices[0].parent_id == first.node_id
    assert result.choices[0].split.reason is SplitReason.BRANCH
    trajectory = session.trajectory()
    assert trajectory.paths[1].num_shared == len(first.observed_ids) + len(first.reply.token_ids)
    check_trajectory(trajectory, session.graph.nodes)


async def test_a_trailing_reply_is_rendered_whole(engine):
    """No bridge starts with an assistant message: the prompt extends the path only if its ids do."""
    session = make_session(engine)
    messages = await converse(session, "one")
    result = await session.call(ask(*messages), key("x"))
    assert list(result.prompt_ids) == RENDERER.render(messages, [])
    check_trajectory(session.trajectory(), session.graph.nodes)


async def test_a_raw_prompt_goes_on_by_its_ids(engine):
    session = make_session(engine)
    first = await session.call(ask(prompt_ids=(5, 6, 7)), key("a"))
    before = (*first.prompt_ids, *first.choices[0].reply.token_ids.tolist())
    second = await session.call(ask(prompt_ids=(*before, 9, 10)), key("b"))
    assert second.choices[0].parent_id == first.choices[0].node_id
    assert second.choices[0].observed_ids.tolist() == [9, 10]
    assert len(session.trajectory().paths) == 1


async def test_tool_calls_are_read_and_numbered_within_the_history():
    async with started(scripted_engine(CALL, CALL, "Done.")) as engine:
        session = make_session(engine)
        chat = ask("one", tools=(CALCULATOR,), max_tokens=None)
        first = (await session.call(chat, key("a"))).choices[0].reply.message
        answer = Message("tool", "5", tool_call_id=first.tool_calls[0].id, name="calculator")
        chat = ask("one", first, answer, tools=(CALCULATOR,), max_tokens=None)
        second = (await session.call(chat, key("b"))).choices[0].reply.message
        assert first.tool_calls[0].id != second.tool_calls[0].id
        assert session.trajectory().num_tool_calls == 2
        assert len(session.trajectory().paths) == 1
        elsewhere = await make_session(engine).call(chat, key("b"))  # as a one-off session renders the same history
        assert elsewhere.choices[0].reply.message.tool_calls[0].id != first.tool_calls[0].id


async def test_a_completion_is_read_as_the_text_it_is():
    text = f"<think>hm</think> {CALL}\n"
    async with started(scripted_engine(text)) as engine:
        session = make_session(engine)
        for chat in (ask(prompt_ids=(5, 6, 7), max_tokens=None), ask(prompt_ids=(5, 6, 7), tools=(CALCULATOR,))):
            pieces, result = await streamed(session, replace(chat, max_tokens=None), key("a"))
            message = result.choices[0].reply.message
            assert (message.content, message.reasoning, message.tool_calls) == (text, "", ())
            check_pieces(pieces, result)


async def test_tool_choice_none_bans_the_mark_and_reads_no_calls():
    async with started(scripted_engine(CALL)) as running:
        engine = RecordingEngine(running)
        chat = ask("one", tools=(CALCULATOR,), tool_choice=ToolChoice.NONE, max_tokens=None)
        session = make_session(engine)
        reply = (await session.call(chat, key("a"))).choices[0].reply.message
        assert not reply.tool_calls
        assert "calculator" in reply.content
        [opening] = ids("<tool_call>")
        assert engine.requests[0].sampling.logit_bias == ((opening, -100.0),)
        assert session.trajectory().path.constrained.all()


async def test_a_long_constraint_is_stored_with_its_first_turn_and_in_the_record():
    long = Constraint(ConstraintKind.REGEX, "|".join(f"word{n}" for n in range(1000)))
    how = {"sampling": replace(ask("one").sampling, constraint=long), "max_tokens": None, "num_choices": 2}
    async with started(scripted_engine("word1", spec=replace(SPEC, can_constrain=True))) as running:
        journal = MemoryJournal()
        session = make_session(running, journal, can_constrain=True)
        said = [Message("user", "one")]
        for number in range(3):
            result = await session.call(replace(ask(*said), **how), key(f"{number}"))
            said += [result.choices[0].reply.message, Message("user", "more")]
        assert sum(data.count(b"word999") for nodes in journal.nodes.values() for data in nodes) == 1
        for one in (session, journal.restored(session, running, can_constrain=True)):
            record = one.trajectory()
            digests = {turn.sampling.constraint_digest for path in record.paths for turn in path.turns}
            assert dict(record.constraints) == dict.fromkeys(digests, long.text)
            assert codec.encode(record).count(b"word999") == 1


async def test_a_forced_call_is_constrained_in_the_record_and_the_answer_to_it_is_not():
    async with started(scripted_engine(CALL, "Done.", spec=replace(SPEC, can_constrain=True))) as running:
        session = make_session(running, can_constrain=True)
        question = Message("user", "one")
        chat = ask(question, tools=(CALCULATOR,), tool_choice=ToolChoice.REQUIRED, max_tokens=None)
        called = (await session.call(chat, key("a"))).choices[0].reply.message
        answer = Message("tool", "5", tool_call_id=called.tool_calls[0].id)
        await session.call(ask(question, called, answer, tools=(CALCULATOR,), max_tokens=None), key("b"))
        trajectory = session.trajectory()
        first, second = trajectory.path.turns
        assert first.sampling.constraint_kind is ConstraintKind.STRUCTURAL_TAG
        assert (second.sampling.constraint_kind, second.sampling.constraint_digest) == (None, "")
        assert trajectory.path.constrained.nonzero()[0].tolist() == [*range(first.end)]
        kept = trajectory.without_constrained()
        assert kept.path.response_mask.nonzero()[0].tolist() == [*range(second.start, second.end)]
        assert kept.num_masked_tokens == first.end


@pytest.mark.parametrize(("policy", "expected"), [(KVPolicy.KEEP, [None, 0, 0]), (KVPolicy.FRESH, [None] * 3)])
async def test_the_kv_version_is_that_of_the_start(engine, policy, expected):
    journal = MemoryJournal()
    session = make_session(engine, journal, kv_policy=policy)
    messages = await converse(session, "one", "two")
    restored = journal.restored(session, engine, kv_policy=policy)
    await restored.call(ask(*messages, "three"), key("x"))
    assert [request.kv_version for request in engine.requests] == expected
    assert {request.trajectory_id for request in engine.requests} == {"s"}


def test_a_weight_update_in_the_middle_of_a_turn(tmp_path):
    clock = VirtualClock()
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    async def main():
        async with started(scripted_engine(decode_s=0.1, clock=clock)) as engine:
            session = make_session(engine, clock=clock)
            chat = ask("one", max_tokens=20, seed=1)
            calls = [asyncio.create_task(session.call(chat, key("a")))]
            calls.append(asyncio.create_task(streamed(session, ask("two", max_tokens=20, seed=2), key("b"))))
            await clock.sleep(0.55)
            await engine.stage(WeightUpdate(1, str(tmp_path)))
            await engine.pause(PauseMode.KEEP)
            await engine.commit(1)
            await engine.resume()
            await asyncio.gather(*calls)
            for node in session.graph.nodes:
                num_ids = len(node.reply.token_ids)
                before = node.reply.weight_versions[0].end
                assert 0 < before < num_ids
                spans = (WeightVersionSpan(0, 0, before), WeightVersionSpan(1, before, num_ids))
                assert node.reply.weight_versions == spans
            trajectory = session.trajectory()
            assert trajectory.versions == (0, 1)
            check_trajectory(trajectory, session.graph.nodes)

    clock.run(main())


async def test_a_template_that_rewrites_history_splits(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if loop.last %} last{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    folder = write_folder(tmp_path, template)
    renderer = TemplateRenderer.from_directory(folder, RenderSettings(on_unstable=OnUnstable.FORK))
    assert renderer.facts.user_turns is not None or renderer.facts.plain_turns is not None
    async with started(scripted_engine(spec=replace(SPEC, vocab_size=renderer.vocab_size))) as running:
        session = make_session(running, renderer=renderer, vocab_size=renderer.vocab_size)
        await converse(session, "one", "two")
        second = session.graph.nodes[1]
        assert second.parent_id is None
        assert second.split.reason is SplitReason.TEMPLATE
        assert second.split.from_node == session.graph.nodes[0].node_id
        check_trajectory(session.trajectory(), session.graph.nodes)


async def test_a_preview_changes_nothing(engine):
    session = make_session(engine)
    messages = await converse(session, "one")
    shown = await session.preview(ask(*messages, "two"))
    assert shown.parent_id == session.graph.nodes[0].node_id
    assert len(session.graph.nodes) == 1
    assert not (await make_session(engine).preview(ask("word " * 9000))).parent_id
    result = await session.call(ask(*messages, "two"), key("x"))
    assert result.prompt_ids == shown.ids
