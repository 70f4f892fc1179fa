"""Request bodies of the OpenAI dialect: accepted fields, and refusals with the name of the field."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from agentloop.chat.fields import read_body
from agentloop.chat.openai_bodies import ChatBody, CompletionBody, TokenizeBody
from agentloop.errors import InvalidRequest, UnsupportedParameter

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatBody:
    return read_body(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), ChatBody)


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def deep(num_levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "object"}
    for _ in range(num_levels):
        value = {"type": "object", "properties": {"x": value}}
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": "1"}, "n"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"reasoning_effort": "<|im_end|>"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "x" * 2**20}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5.[key]"),
        ({"logit_bias": {str(i): 1 for i in range(10**4)}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"what": 1}}, "stream_options.what"),
        ({"tools": [TOOL] * 10**5}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0"),
        ({"messages": [USER, {"role": "user"}]}, "messages.1.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"guided_json": {}}, "guided_json"),
        ({"session": "a/b"}, "session"),
        (schema(deep(40)), "response_format.json_schema.schema"),
        (schema({"x": "y" * 2**19}), "response_format.json_schema.schema"),
        (schema({"$ref": "#"}), "response_format.json_schema.schema"),
        (schema({"$ref": "http://a/b"}), "response_format.json_schema.schema"),
        (schema({"$ref": "#/$defs/none"}), "response_format.json_schema.schema"),
        (
            schema({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}),
            "response_format.json_schema.schema",
        ),
        (schema({"type": "string", "pattern": "(a+)+" * 1000}), "response_format.json_schema.schema"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.code == "invalid_request"
    assert caught.value.param == param
    assert "~" not in caught.value.message
    assert len(caught.value.message) < 4000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {"x": 1}}, "web_search_options"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, "tools.1.type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        *(
            ({"messages": [USER, {"role": "user", "content": [{"type": kind, kind: {}}]}]}, "messages.1.content.0")
            for kind in ("image", "input_audio", "file")
        ),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**fields)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)


def test_what_is_harmless_is_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prompt_cache_options={"x": 1},
        verbosity="low",
        moderation={"x": 1},
        reasoning_effort="high",
        modalities=["text"],
        stream_options={"include_obfuscation": False},
        functions=None,
        audio=None,
    )


def test_null_is_absent() -> None:
    names = set(ChatBody.model_fields) - {"model", "messages"}
    body = chat(**dict.fromkeys(names - {"metadata"}))
    assert body == chat()


def test_history_as_clients_echo_it() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}, "index": 0}
    chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be kind", "cache_control": {"a": 1}}]},
            {"role": "user", "content": "x", "name": "Bob"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
                "reasoning_content": "hm",
                "annotations": [],
                "function_call": None,
            },
        ]
    )


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}]', None),
        (b'{"model":"m"} x', None),
        (b"[" * 100_000, None),
        (b'{"seed":' + b"9" * 5000 + b"}", None),
        (b'{"model":"\xff"}', None),
        ('{"model":"m"}'.encode("utf-16"), None),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', None),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}', "temperature"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}', "temperature"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":{"a":-Infinity}}', "metadata"),
    ],
)
def test_what_is_no_json(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_body(data, ChatBody)
    assert (caught.value.param or "").startswith(param or "")


def test_the_last_of_two_equal_keys_counts_and_nul_passes() -> None:
    data = b'{"model":"m","model":"k","messages":[{"role":"user","content":"a\\u0000b"}]}'
    body = read_body(data, ChatBody)
    assert (body.model, body.messages[0].content) == ("k", "a\x00b")


def test_many_problems_make_a_short_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", "content": 3}] * 8000, **{f"unknown{i}": 1 for i in range(12_000)})
    assert len(caught.value.message) < 4000


def test_recursive_schemas_that_read_something_are_fine() -> None:
    tree = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    }
    chat(**schema({"$defs": {"node": tree}, "$ref": "#/$defs/node"}))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"best_of": 2}, UnsupportedParameter),
        ({"echo": True}, UnsupportedParameter),
        ({"suffix": "x"}, UnsupportedParameter),
        ({"prompt": ["a", "b"], "stream": True}, UnsupportedParameter),
        ({"prompt": [[1, 2], []]}, InvalidRequest),
        ({"prompt": []}, InvalidRequest),
        ({"prompt": [-1]}, InvalidRequest),
        ({"prompt": [True]}, InvalidRequest),
        ({"logprobs": 21}, InvalidRequest),
        ({"tools": [TOOL]}, InvalidRequest),
    ],
)
def test_completions(fields: dict[str, Any], error: type[InvalidRequest]) -> None:
    good = {"model": "m", "prompt": "hi", "best_of": 1, "echo": False, "suffix": None}
    assert read_body(orjson.dumps(good), CompletionBody).prompt == "hi"
    with pytest.raises(error) as caught:
        read_body(orjson.dumps({**good, **fields}), CompletionBody)
    assert type(caught.value) is error
    assert (caught.value.param or "").startswith(next(iter(fields)))


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    assert read_body(b'{"prompt":""}', TokenizeBody).prompt == ""
    for bad in ({}, {"prompt": "x", "messages": [USER]}):
        with pytest.raises(InvalidRequest):
            read_body(json.dumps(bad).encode(), TokenizeBody)


def test_schemas_of_bodies_can_be_told() -> None:
    for kind in (ChatBody, CompletionBody, TokenizeBody):
        assert kind.model_json_schema()["additionalProperties"] is False
