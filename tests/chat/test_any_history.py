"""Histories with unknown fields: metadata is ignored in every dialect; content is rendered or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentloop.chat import anthropic, responses
from agentloop.chat import openai as openai_chat
from agentloop.chat.anthropic_bodies import MessagesBody
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.chat.fields import read_body
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.by_name import get_parser
from agentloop.types import Message, ToolCall

MODEL = ChatModel(get_parser("hermes"), 100, takes_images=True)
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAABQAAAAUCAIAAAAC64paAAAAHUlEQVR4nGM8ISfHQC5gIlvn"
    "qOZRzaOaRzVTRTMAOhEBLDUYsRcAAAAASUVORK5CYII="
)
METADATA: dict[str, Any] = {
    "id": 7,
    "reasoning": {"effort": "low"},
    "parsed": {"a": 1},
    "parsed_arguments": {"a": 1},
    "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
    "extra_content": {"google": {"thought_signature": "x"}},
    "cache_control": {"type": "ephemeral"},
    "prefix": True,
    "status": "completed",
    "annotations": [{"x": None}],
    "provider_specific_fields": None,
    "logprobs": [],
    "anything": [1.5, None],
}


def marked(value: Any) -> Any:
    """Add metadata to every object of a history except its free-form values."""
    if isinstance(value, list):
        return [marked(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = ("input", "arguments", "source")  # a call's arguments and the bytes of an image
    own = {key: one if key in kept else marked(one) for key, one in value.items()}
    return METADATA | own


CHAT = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "t"}]},
    {"role": "user", "content": "go on"},
]
RESPONSES = [
    {"role": "system", "content": [{"type": "input_text", "text": "s"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": None, "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "message", "role": "assistant", "content": None},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"x": 1}},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "t"}]},
    {"type": "message", "role": "user", "content": "go on"},
]
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "r", "signature": "x"},
            {"type": "redacted_thinking", "thinking": None, "data": "x"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "t"}]},
            {"type": "text", "text": "go on"},
        ],
    },
]
SHOWN = (
    Message("system", "s"),
    Message("user", "a\nb"),
    Message("assistant", "", (ToolCall("c", "f", {"x": 1}),), reasoning="r"),
    Message("tool", "t", tool_call_id="c", name="f"),
    Message("user", "go on"),
)


def chat(messages: Any, **fields: Any) -> ChatCall:
    data = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return openai_chat.to_call(openai_chat.read_chat(data, BodyCache()), MODEL)


def response(items: Any, **fields: Any) -> ChatCall:
    data = json.dumps({"model": "m", "input": items, **fields}).encode()
    return responses.to_call(read_body(data, ResponsesBody), MODEL)


def message(messages: Any, **fields: Any) -> ChatCall:
    data = json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields}).encode()
    return anthropic.to_call(read_body(data, MessagesBody), MODEL)


@pytest.mark.parametrize(("asked", "history"), [(chat, CHAT), (response, RESPONSES), (message, MESSAGES)])
def test_metadata_is_ignored_at_every_level(asked: Any, history: list[Any]) -> None:
    assert asked(history).messages == SHOWN
    assert asked(marked(history)).messages == SHOWN


@pytest.mark.parametrize(
    ("asked", "history", "param", "way_out"),
    [
        (chat, [{"role": "assistant", "function_call": {"name": "f"}}], "messages.0.function_call", "tool_calls"),
        (chat, [{"role": "assistant", "audio": {"id": "x"}}], "messages.0.audio", "transcript"),
        (chat, [{"role": "assistant", "prefix": True}], "messages.0.prefix", "continue_final_message"),
        (chat, [None], "messages.0", "object"),
        (chat, [{"role": "user", "content": None}], "messages.0.content", "null"),
        (chat, [{"role": "tool", "content": "a"}], "messages.0.tool_call_id", "the `id` of the tool call"),
        (chat, [{"role": "user", "content": [{"type": "file"}]}], "messages.0.content.0", "image_url"),
        (response, [None], "input.0", "received null"),
        (response, [{"type": "function_call_output", "output": "a"}], "input.0.call_id", "the `call_id`"),
        (response, [{"type": "computer_call"}], "input.0.type", "function_call"),
        (message, [None], "messages.0", "received null"),
        (message, [{"role": "user", "content": [{"type": "document"}]}], "messages.0.content.0.type", "image"),
        (message, [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}],
         "messages.0.content.0", "base64"),
    ],
)  # fmt: skip
def test_content_that_is_not_shown_is_refused_with_a_way_out(
    asked: Any, history: list[Any], param: str, way_out: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(history)
    assert refused.value.param == param
    assert way_out in refused.value.message


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20251124"])
def test_a_client_tool_of_anthropic_is_defined_as_a_custom_tool(kind: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        message([{"role": "user", "content": "a"}], tools=[{"type": kind, "name": "x", "max_characters": 9}])
    assert refused.value.param == "tools.0.type"
    assert kind in refused.value.message
    assert "custom" in refused.value.message


def test_a_json_schema_without_a_schema_names_the_format_that_needs_none() -> None:
    ours: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}
    theirs: dict[str, Any] = {"text": {"format": {"type": "json_schema", "name": "x"}}}
    user = [{"role": "user", "content": "a"}]
    for asked, fields in ((chat, ours), (response, theirs)):
        with pytest.raises(InvalidRequest, match="json_object") as refused:
            asked(user, **fields)
        assert str(refused.value.param).endswith(".schema")


@pytest.mark.parametrize(
    ("asked", "fields", "way_out"),
    [
        (response, {"background_options": {"prewarm": True}}, "`stream`"),
        (message, {"output_config": {"task_budget": {"type": "tokens", "total": 64}}}, "`max_tokens`"),
    ],
)
def test_a_field_that_is_refused_names_its_alternative(asked: Any, fields: dict[str, Any], way_out: str) -> None:
    with pytest.raises(UnsupportedParameter, match=way_out):
        asked([{"role": "user", "content": "a"}], **fields)


def test_images_of_responses_and_messages() -> None:
    url, source = f"data:image/png;base64,{PNG}", {"type": "base64", "media_type": "image/png", "data": PNG}
    pictured, block = (
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "image", "source": source},
    )
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    use, result = (
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "tool_result", "tool_use_id": "c"},
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, pictured]},
        called,
        {"type": "function_call_output", "call_id": "c", "output": [pictured, {"type": "input_text", "text": "b"}]},
    ]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, block]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "content": [block, {"type": "text", "text": "b"}]}]},
    ]
    ours, theirs = response(items), message(turns)
    assert ours.messages == theirs.messages
    assert [[image.at for image in one.images] for one in ours.messages] == [[1], [], [0]]
    assert [one.content for one in ours.messages] == ["a", "", "b"]
    assert len(ours.images) == len(theirs.images) == 1
    blind = ChatModel(get_parser("hermes"), 100)
    with pytest.raises(UnsupportedParameter, match="takes no images"):
        responses.to_call(ResponsesBody.model_validate({"model": "m", "input": items}), blind)


def test_an_error_and_examples_are_shown_to_the_policy() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "no such file", "is_error": True}
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "input_examples": [{"x": 1}]}
    call = message([{"role": "user", "content": [result]}], tools=[tool])
    assert call.messages[0].content == "Error: no such file"
    assert call.tools[0]["function"]["description"] == 'd\nExamples of the input:\n{"x":1}'


def test_a_thinking_budget_is_an_argument_of_the_template_or_refused() -> None:
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    for budget, reads, given in ((8, (), {}), (4, ("thinking_budget",), {"thinking_budget": 4}), (4, (), None)):
        body = read_body(
            json.dumps({**asked, "thinking": {"type": "enabled", "budget_tokens": budget}}).encode(), MessagesBody
        )
        model = ChatModel(get_parser("hermes"), 100, frozenset(reads))
        if given is None:
            with pytest.raises(UnsupportedParameter, match="adaptive"):
                anthropic.to_call(body, model)
        else:
            assert anthropic.to_call(body, model).template_kwargs == given
