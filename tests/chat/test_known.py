"""Messages that are read once: what is found again is what reading it anew makes, and it takes bounded memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.capture.canonical import message_key
from agentloop.chat.bodies import ChatBody, read_body
from agentloop.chat.known import KnownMessage, KnownMessages
from agentloop.chat.openai_chat import read_chat, to_call
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers import get_parser
from agentloop.types import Message

HERMES = get_parser("hermes")
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1.0}'}}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "found"}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Bob"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Look."},
    ANSWER,
    {"role": "assistant", "content": "long " * 500},
    {"role": "user", "content": "go on"},
]


def data_of(messages: list[Any]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


def messages_of(body: ChatBody) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    call = to_call(body, HERMES, 100, 1.0)
    return call.messages, call.keys


def test_a_history_that_is_known_is_what_it_was_when_it_was_read() -> None:
    known = KnownMessages()
    for end in range(1, len(HISTORY) + 1):
        data = data_of(HISTORY[:end])
        messages, keys = messages_of(read_chat(data, known))
        assert (messages, keys) == messages_of(read_body(data, ChatBody))
        assert keys == tuple(message_key(message) for message in messages)
        assert len(known) == end


def test_a_known_message_is_not_read_again() -> None:
    known = KnownMessages()
    first = read_chat(data_of(HISTORY), known).messages
    again = read_chat(data_of(HISTORY), known).messages
    assert all(isinstance(one, KnownMessage) for one in again)
    assert [id(one) for one in first] == [id(one) for one in again]


@pytest.mark.parametrize(
    ("good", "other"),
    [
        ({"role": "assistant", "content": "x", "tool_calls": [{**CALL, "index": 1}]}, {"index": True}),
        ({"role": "assistant", "content": "x", "tool_calls": [{**CALL, "index": 1}]}, {"index": 1.5}),
    ],
)
def test_only_the_same_json_is_the_same_message(good: dict[str, Any], other: dict[str, Any]) -> None:
    known = KnownMessages()
    read_chat(data_of([good]), known)
    with pytest.raises(InvalidRequest) as caught:
        read_chat(data_of([{**good, "tool_calls": [{**CALL, **other}]}]), known)
    assert caught.value.param == "messages.0.tool_calls.0.index"


@given(st.permutations(HISTORY), st.permutations(HISTORY))
def test_a_message_is_the_same_in_every_history(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    known = KnownMessages()
    read_chat(data_of(one), known)
    assert messages_of(read_chat(data_of(two), known)) == messages_of(read_body(data_of(two), ChatBody))


def test_a_tool_answer_has_the_name_that_its_own_history_gives_it() -> None:
    known = KnownMessages()
    for name in ("look", "find", "look"):
        call = {**CALL, "function": {"name": name, "arguments": "{}"}}
        said = [HISTORY[0], {"role": "assistant", "tool_calls": [call]}, ANSWER]
        messages, _ = messages_of(read_chat(data_of(said), known))
        assert messages[-1].name == name
    messages, _ = messages_of(read_chat(data_of([HISTORY[0], ANSWER]), known))
    assert messages[-1].name is None


def test_what_is_wrong_is_told_at_its_place_behind_known_messages() -> None:
    known = KnownMessages()
    read_chat(data_of(HISTORY), known)
    with pytest.raises(InvalidRequest) as caught:
        read_chat(data_of([*HISTORY, {"role": "user", "content": 5}]), known)
    assert caught.value.param == f"messages.{len(HISTORY)}.content"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(UnsupportedParameter) as refused:
        read_chat(data_of([*HISTORY, image]), known)
    assert refused.value.param == f"messages.{len(HISTORY)}.content.0"
    assert len(known) == len(HISTORY)


def test_an_integer_that_no_json_writer_takes_is_refused_as_ever() -> None:
    known = KnownMessages()
    message = b'{"role":"assistant","content":"x","annotations":123456789012345678901234567890}'
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            read_chat(b'{"model":"m","messages":[' + message + b"]}", known)
        assert caught.value.param == "messages.0.annotations"
    assert len(known) == 0


@pytest.mark.parametrize("messages", [None, {}, "x", 5, [], [None], [5], ["x"]])
def test_what_is_no_history_is_refused(messages: Any) -> None:
    known = KnownMessages()
    with pytest.raises(InvalidRequest):
        read_chat(data_of(messages), known)
    with pytest.raises(InvalidRequest):
        read_chat(b"[]", known)
    assert len(known) == 0


def test_memory_is_bounded_and_what_is_in_use_stays() -> None:
    known = KnownMessages(max_bytes=200_000)
    kept = {"role": "user", "content": "always there"}
    first = read_chat(data_of([kept]), known).messages[0]
    most = 0
    for number in range(2000):
        again = read_chat(data_of([kept, {"role": "user", "content": f"{number} " * 20}]), known).messages[0]
        assert again is first
        most = max(most, len(known))
    assert 100 < most < 600  # of 400 bytes and more each
    assert len(known) < 600
