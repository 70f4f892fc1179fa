"""The cache of parsed messages: a cached message equals a newly parsed one, and memory is bounded."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.chat.body_cache import BodyCache, CachedMessage, TwoGenerationLru, cache_key
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.chat.openai import ChatRequest, read_chat, to_call
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.by_name import get_parser
from agentloop.trajectory.node import message_key, tools_key
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


def messages_of(request: ChatRequest) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    call = to_call(request, ChatModel(HERMES, 100))
    return call.messages, call.keys


def test_a_history_that_is_known_is_what_it_was_when_it_was_read() -> None:
    cache = BodyCache()
    for end in range(1, len(HISTORY) + 1):
        data = data_of(HISTORY[:end])
        messages, keys = messages_of(read_chat(data, cache))
        assert (messages, keys) == messages_of(read_chat(data, BodyCache()))
        assert keys == tuple(message_key(message) for message in messages)
        assert len(cache.messages) == end


def test_a_known_message_is_not_read_again() -> None:
    cache = BodyCache()
    first = read_chat(data_of(HISTORY), cache).messages
    again = read_chat(data_of(HISTORY), cache).messages
    assert [id(one) for one in first] == [id(one) for one in again]


def test_only_the_same_json_is_the_same_message() -> None:
    cache = BodyCache()
    read_chat(data_of([{"role": "assistant", "content": "x", "name": "1"}]), cache)
    with pytest.raises(InvalidRequest) as caught:
        read_chat(data_of([{"role": "assistant", "content": "x", "name": 1}]), cache)
    assert caught.value.param == "messages.0.name"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_not_taken_for_null(number: str) -> None:
    cache = BodyCache()
    text = '{"model":"m","messages":[{"role":"assistant","content":%s,"tool_calls":[]}]}'
    read_chat((text % "null").encode(), cache)
    assert len(cache.messages) == 1
    with pytest.raises(InvalidRequest) as caught:
        read_chat((text % number).encode(), cache)
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages.0.content")


@given(st.permutations(HISTORY), st.permutations(HISTORY))
def test_a_message_is_the_same_in_every_history(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    cache = BodyCache()
    read_chat(data_of(one), cache)
    assert messages_of(read_chat(data_of(two), cache)) == messages_of(read_chat(data_of(two), BodyCache()))


def test_a_tool_answer_has_the_name_that_its_own_history_gives_it() -> None:
    cache = BodyCache()
    for name in ("look", "find", "look"):
        call = {**CALL, "function": {"name": name, "arguments": "{}"}}
        said = [HISTORY[0], {"role": "assistant", "tool_calls": [call]}, ANSWER]
        messages, _ = messages_of(read_chat(data_of(said), cache))
        assert messages[-1].name == name
    messages, _ = messages_of(read_chat(data_of([HISTORY[0], ANSWER]), cache))
    assert messages[-1].name is None


def test_what_is_wrong_is_told_at_its_place_behind_known_messages() -> None:
    cache = BodyCache()
    read_chat(data_of(HISTORY), cache)
    with pytest.raises(InvalidRequest) as caught:
        read_chat(data_of([*HISTORY, {"role": "user", "content": 5}]), cache)
    assert caught.value.param == f"messages.{len(HISTORY)}.content"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(UnsupportedParameter) as refused:
        read_chat(data_of([*HISTORY, image]), cache)
    assert refused.value.param == f"messages.{len(HISTORY)}.content.0"
    assert len(cache.messages) == len(HISTORY)


def test_an_integer_that_no_json_writer_takes_is_refused_as_ever() -> None:
    cache = BodyCache()
    message = b'{"role":"assistant","content":"x","name":123456789012345678901234567890}'
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            read_chat(b'{"model":"m","messages":[' + message + b"]}", cache)
        assert caught.value.param == "messages.0.name"
    assert len(cache.messages) == 0


@pytest.mark.parametrize("messages", [None, {}, "x", 5, [], [None], [5], ["x"]])
def test_what_is_no_history_is_refused(messages: Any) -> None:
    cache = BodyCache()
    with pytest.raises(InvalidRequest):
        read_chat(data_of(messages), cache)
    with pytest.raises(InvalidRequest):
        read_chat(b"[]", cache)
    assert len(cache.messages) == 0


def test_memory_is_bounded_and_what_is_in_use_stays() -> None:
    cache = BodyCache(messages=TwoGenerationLru(200_000))
    kept = {"role": "user", "content": "always there"}
    first = read_chat(data_of([kept]), cache).messages[0]
    most = 0
    for number in range(2000):
        again = read_chat(data_of([kept, {"role": "user", "content": f"{number} " * 20}]), cache).messages[0]
        assert again is first
        most = max(most, len(cache.messages))
    assert 100 < most < 600  # each takes 400 bytes or more
    assert len(cache.messages) < 600


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def call_with(tools: Any, cache: BodyCache, **fields: Any) -> ChatCall:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}
    return to_call(read_chat(json.dumps(body).encode(), cache), ChatModel(HERMES, 100))


def test_known_tools_are_what_they_were_when_they_were_read() -> None:
    cache = BodyCache()
    for tools in ([tool("a"), tool("b")], [tool("b"), tool("a")], [], None, [tool("a", minProperties=1)]):
        first = call_with(tools, cache)
        again = call_with(tools, cache)
        assert first == again == call_with(tools, BodyCache())
        assert again.tools is first.tools or not tools
        assert first.tools_key == tools_key(first.tools)
    assert len(cache.tools) == 4


def test_a_part_of_the_tools_has_no_known_key() -> None:
    cache, tools = BodyCache(), [tool("a"), tool("b")]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}]}
    for _ in range(2):
        call = call_with(tools, cache, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        assert [one["function"]["name"] for one in call.tools] == ["b"]
        assert call.tools_key is None
    assert call_with(tools, cache).tools_key == tools_key(call_with(tools, cache).tools)


@pytest.mark.parametrize("tools", [{}, "x", [None], [tool("a b")], [{"type": "function"}]])
def test_bad_tools_are_refused_however_often_they_come(tools: Any) -> None:
    cache = BodyCache()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            call_with(tools, cache)
    assert len(cache.tools) == 0


def test_the_bound_is_near_what_python_says() -> None:
    """The estimate also holds for short messages: orjson allocates 4 KiB for bytes that report a smaller size."""
    max_bytes = 1 << 20
    gc.collect()
    tracemalloc.start()
    try:
        cache: TwoGenerationLru[CachedMessage] = TwoGenerationLru(max_bytes)
        for number in range(2_000):
            content = f"answer {number}"
            message = CachedMessage(Message("tool", content))
            cache.add(cache_key({"role": "tool", "content": content}), message, message.num_bytes)
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(cache) < 2_000
    assert max_bytes / 3 < measured < 1.1 * max_bytes
