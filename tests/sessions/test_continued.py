"""A reply that its client has started: the policy continues it, and the record shows the author of each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentloop.chat import openai as openai_chat
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import RenderSettings
from agentloop.types import Message
from tests.sessions.test_forks import conversing
from tests.support.endpoint.sessions import (
    MemoryJournal,
    ask,
    check_pieces,
    check_trajectory,
    key,
    make_session,
    streamed,
)
from tests.support.engine.scripted import RENDERER, scripted_engine, started
from tests.support.families.table import write_family
from tests.support.records.model_folder import TEMPLATE, write_folder

BEGUN = Message("assistant", "It is ")
USER = {"role": "user", "content": "6*7?"}


def asked(*messages: dict[str, Any], **fields: Any) -> ChatCall:
    body = {"model": "m", "messages": list(messages), "continue_final_message": True, **fields}
    model = ChatModel(get_parser("hermes"), 1000)
    return openai_chat.to_call(openai_chat.read_chat(orjson.dumps(body), BodyCache()), model)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_was_begun_is_prompt_and_what_is_new_is_sampled(is_streamed: bool) -> None:
    async with started(scripted_engine("42.", "Yes.")) as engine:
        journal = MemoryJournal()
        session = make_session(engine, journal)
        chat = ask("6*7?", BEGUN, continues=True)
        if is_streamed:
            pieces, result = await streamed(session, chat, key("one"))
            check_pieces(pieces, result)
        else:
            result = await session.call(chat, key("one"))
        (node,) = result.choices
        assert node.reply.message.content == "42."
        assert RENDERER.decode(result.prompt_ids).endswith("<|im_start|>assistant\nIt is ")
        echo = replace(node.reply.message, content="It is 42.")
        for again in (session, journal.restored(session, engine)):
            following = await again.call(ask("6*7?", echo, "Sure?"), key("two"))
            assert following.choices[0].parent_id == node.node_id
            assert following.choices[0].split is None
            (path,) = again.trajectory().paths
            assert [message.content for message in path.messages] == ["6*7?", "It is 42.", "Sure?", "Yes."]
            assert tuple(path.prompt_ids) == result.prompt_ids
            sampled = path.response_ids[path.response_mask].tolist()
            assert sampled == [*node.reply.token_ids, *following.choices[0].reply.token_ids]
            check_trajectory(again.trajectory(), again.graph.nodes)


async def test_a_later_reply_that_is_begun_extends_the_path() -> None:
    async with started(scripted_engine("It is 42.", "sure.")) as engine:
        session = make_session(engine)
        first = (await session.call(ask("6*7?"), key("one"))).choices[0]
        asked_again = ask("6*7?", first.reply.message, "Sure?", Message("assistant", "I am "), continues=True)
        second = (await session.call(asked_again, key("two"))).choices[0]
        assert (second.parent_id, second.split, second.reply.message.content) == (first.node_id, None, "sure.")
        observed = RENDERER.decode(second.observed_ids.tolist())
        assert observed == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nI am "


async def test_a_cut_reply_goes_on_in_a_path_of_its_own() -> None:
    async with started(scripted_engine("It is 42.")) as engine:
        session = make_session(engine)
        cut = (await session.call(ask("6*7?", max_tokens=2), key("one"))).choices[0].reply.message
        await session.call(ask("6*7?", cut, continues=True), key("two"))
        paths = session.trajectory().paths
        assert [path.prompt_ids[-len(paths[0].response_ids) :].tolist() for path in paths[1:]] == [
            paths[0].response_ids.tolist()
        ]
        check_trajectory(session.trajectory(), session.graph.nodes)


async def test_a_template_that_rewrites_messages_refuses_by_name(tmp_path: Path) -> None:
    rewriting = TEMPLATE.replace("message.content", "message.content|replace('It is', 'It was')")
    assert rewriting != TEMPLATE
    async with conversing(write_folder(tmp_path, rewriting), RenderSettings()) as talk:
        with pytest.raises(UnsupportedParameter) as refused:
            await talk.session.call(ask("6*7?", BEGUN, continues=True), key("one"))
        assert refused.value.param == "continue_final_message"
        assert talk.session.num_turns == 0


async def test_a_model_that_thinks_goes_on_behind_its_thought(tmp_path: Path) -> None:
    async with conversing(write_family(tmp_path, "qwen3"), RenderSettings(), "42. <think> is no mark here") as talk:
        result = await talk.session.call(ask("6*7?", BEGUN, max_tokens=99, continues=True), key("one"))
        assert talk.renderer.decode(result.prompt_ids).endswith("<think>\n\n</think>\n\nIt is ")
        assert result.choices[0].reply.message.content == "42. <think> is no mark here"


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (USER, InvalidRequest),
        ({"role": "assistant", "content": " "}, InvalidRequest),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, UnsupportedParameter),
        ({"role": "assistant", "content": "<think>\nSo"}, UnsupportedParameter),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(last: dict[str, Any], error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as refused:
        asked(USER, last)
    assert (type(refused.value), refused.value.param) == (error, "continue_final_message")


def test_the_dialect_takes_vllms_names() -> None:
    begun = {"role": "assistant", "content": "It is "}
    assert asked(USER, begun, add_generation_prompt=False).begun == "It is "
    assert asked(USER, begun).continues
    for fields in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "continue_final_message": False},
    ):
        with pytest.raises(InvalidRequest) as refused:
            asked(USER, begun, **fields)
        assert refused.value.param == "add_generation_prompt"
