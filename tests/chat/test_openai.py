"""Chat completions: bodies to calls, and answers validated with the types of the openai package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.choices import TokenTexts
from agentloop.chat.fields import read_body
from agentloop.chat.openai import ChatRequest, ChatWriter, read_chat, to_call
from agentloop.chat.openai_bodies import ChatBody, CompletionBody
from agentloop.chat.openai_completions import CompletionWriter, prompts_of
from agentloop.chat.openai_completions import to_call as completion_call
from agentloop.errors import InvalidRequest
from agentloop.generation.turn_reader import CallDelta, TurnPiece, arguments_text
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.grammar import MAX_JSON_WHITESPACE_CHARS
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.trajectory.node import Node, Reply, Split, message_key
from agentloop.types import (
    ConstraintKind,
    FinishReason,
    Message,
    SamplingParams,
    SplitReason,
    ToolCall,
    ToolCallStatus,
    WeightVersionSpan,
)

HERMES = get_parser("hermes")
VOCAB_SIZE = 100
ARGUMENTS = frozenset({"enable_thinking", "reasoning_effort", "date"})
STRICT = AsyncOpenAI(api_key="k", _strict_response_validation=True)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
FIND = {"type": "function", "function": {"name": "find", "description": "Find it."}}
CALLS = (
    ToolCall("c0", "look", {"x": 1.5, "y": "é"}, token_start=1, token_end=3),
    ToolCall("c1", "", {}, ToolCallStatus.MALFORMED, "bad", 3, 5, text="<tool_call>{oops"),
)
PLAIN = Message("assistant", "Hello you")
BUSY = Message("assistant", "Well.", CALLS, reasoning="They want x.")
CUT = ToolCall(
    "c2",
    "find",
    {},
    ToolCallStatus.MALFORMED,
    "cut",
    text='<tool_call>{"name": "find"',
    partial_arguments='{"q": "',
)


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer.from_directory("examples/tiny_policy/v0")


@pytest.fixture(scope="module")
def texts(renderer: TemplateRenderer) -> TokenTexts:
    return TokenTexts(renderer)


def request(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return read_chat(json.dumps({"model": "default", "messages": messages, **fields}).encode(), BodyCache())


def body(**fields: Any) -> ChatBody:
    return request(**fields).body


def asked(**fields: Any) -> ChatCall:
    return to_call(request(**fields), ChatModel(HERMES, VOCAB_SIZE, ARGUMENTS))


def result(*messages: Message, finish: FinishReason = FinishReason.STOP, split: Split | None = None) -> ChatResult:
    return ChatResult(
        "c1",
        1_700_000_000,
        "s1",
        (7, 8, 9),
        tuple(
            Node(
                f"n{index}",
                "c1",
                index,
                None,
                (Message("user", "hi"),),
                np.array([7, 8, 9], np.int32),
                Reply(
                    message,
                    np.arange(5, dtype=np.int32),
                    np.full(5, -0.5, np.float32),
                    (WeightVersionSpan(3, 0, 2), WeightVersionSpan(4, 2, 5)),
                    finish,
                    True,
                    num_reasoning_tokens=2,
                    cached_tokens=1,
                    top_logprobs=(((1, -0.5), (2, -1.5)),) * 5,
                ),
                split=split,
            )
            for index, message in enumerate(messages)
        ),
    )


def pieces_of(answer: ChatResult) -> list[TurnPiece | ChatResult]:
    """Return a stream of one-character pieces that alternates between the choices; its last items have no text."""
    found: list[TurnPiece | ChatResult] = []
    for node in answer.choices:
        index, reply = node.choice_index, node.reply
        texts = [TurnPiece(index, reasoning=char) for char in reply.message.reasoning]
        texts += [TurnPiece(index, content=char) for char in reply.message.content]
        for place, call in enumerate(reply.message.tool_calls):
            texts.append(TurnPiece(index, calls=(CallDelta(place, call.id, call.name),)))
            texts += [TurnPiece(index, calls=(CallDelta(place, arguments=char),)) for char in arguments_text(call)]
        found += texts
        for at in range(len(reply.token_ids)):
            ids, logprobs = tuple(reply.token_ids[at : at + 1].tolist()), (-0.5,)
            spans = (WeightVersionSpan(3, 0, 1),)
            found.append(TurnPiece(index, "", "", (), ids, logprobs, reply.top_logprobs[at : at + 1], spans))
    return [*found, answer]


def chunks_of(asked_body: ChatBody, answer: ChatResult, texts: TokenTexts) -> list[dict[str, Any]]:
    writer = ChatWriter(asked_body, texts, 1_700_000_000)
    return [chunk for item in pieces_of(answer) for chunk in writer.chunks(item)]


def strictly(kind: Any, value: dict[str, Any]) -> Any:
    """Validate the value strictly with the openai package and return the result."""
    return STRICT._process_response_data(data=value, cast_to=kind, response=None)  # type: ignore[arg-type]


# Requests


def test_sampling() -> None:
    call = asked(
        temperature=0.5,
        top_p=0.9,
        n=3,
        stop=["a", "b", "a"],
        seed=-1,
        max_completion_tokens=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100, "2": 1.5},
        logprobs=True,
        top_logprobs=4,
        top_k=-1,
        min_tokens=2,
    )
    assert call.sampling == SamplingParams(
        7,
        temperature=0.5,
        top_p=0.9,
        min_tokens=2,
        seed=(1 << 62) - 1,
        frequency_penalty=-1.0,
        presence_penalty=1.0,
        logit_bias=((2, 1.5), (5, -100.0)),
        num_top_logprobs=4,
    )
    assert (call.num_choices, call.stop, call.max_tokens, call.timeout_s) == (3, ("a", "b"), 7, 600.0)
    assert asked().sampling == SamplingParams(1)
    assert asked().max_tokens is None
    assert asked(top_p=0).sampling.top_k == 1
    assert [asked(temperature=t).sampling.temperature for t in (0, 1e-7, 0.01)] == [0.0, 0.0, 0.01]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "q"}}}, "tool_choice"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        (
            {
                "tools": [LOOK],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "q"}}]},
                },
            },
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_what_does_not_fit_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_history() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{ "x": 1 }'}},
        {"id": "b", "type": "function", "function": {"name": "look", "arguments": "[oops"}},
    ]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "x", "name": "Bob"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "why"},
    ]
    system, user, assistant, tool, refusal = asked(messages=messages).messages
    assert (system, user) == (Message("system", "a\nb"), Message("user", "x", name="Bob"))
    assert assistant.reasoning == "hm"
    assert [call.status for call in assistant.tool_calls] == [ToolCallStatus.OK, ToolCallStatus.MALFORMED]
    assert (assistant.tool_calls[0].arguments, assistant.tool_calls[1].text) == ({"x": 1}, "[oops")
    assert tool == Message("tool", "1", tool_call_id="a", name="look")
    assert (refusal.content, refusal.reasoning) == ("no", "why")


def test_tool_choices() -> None:
    named = {"type": "function", "function": {"name": "find"}}
    call = asked(tools=[LOOK, FIND], parallel_tool_calls=False)
    assert call.tools == (
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "find", "description": "Find it."}},
    )
    assert (call.tool_choice, call.forced_tool, call.is_parallel) == (ToolChoice.AUTO, None, False)
    assert asked(tools=[LOOK], tool_choice="none").tool_choice is ToolChoice.NONE
    assert asked(tools=[LOOK], tool_choice="required").tool_choice is ToolChoice.REQUIRED
    call = asked(tools=[LOOK, FIND], tool_choice=named)
    assert (call.tool_choice, call.forced_tool) == (ToolChoice.REQUIRED, "find")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    call = asked(tools=[LOOK, FIND], tool_choice=allowed)
    assert (call.tool_choice, [tool["function"]["name"] for tool in call.tools]) == (ToolChoice.REQUIRED, ["find"])


def test_parameters_of_engines() -> None:
    sampling = asked(min_p=0.1, repetition_penalty=1.2, stop_token_ids=[5, 6, 5], ignore_eos=True, top_k=3).sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.top_k) == (0.1, 1.2, 3)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((5, 6), True)
    plain = asked().sampling
    assert (plain.min_p, plain.repetition_penalty, plain.stop_token_ids, plain.ignore_eos) == (0.0, 1.0, (), False)
    with pytest.raises(InvalidRequest, match="outside") as refused:
        asked(stop_token_ids=[VOCAB_SIZE])
    assert refused.value.param == "stop_token_ids"


def test_integers_may_be_written_as_floats() -> None:
    call = asked(max_tokens=5.0, n=2.0, seed=7.0, top_k=4.0, min_tokens=1.0, logprobs=True, top_logprobs=3.0)
    assert (call.max_tokens, call.num_choices, call.sampling.seed) == (5, 2, 7)
    assert (call.sampling.top_k, call.sampling.min_tokens, call.sampling.num_top_logprobs) == (4, 1, 3)
    assert all(type(number) is int for number in (call.max_tokens, call.num_choices, call.sampling.seed))


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"date": "1 May", "unread": [1]}}, {"date": "1 May"}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_arguments_of_the_template(fields: dict[str, Any], given: dict[str, Any]) -> None:
    assert asked(**fields).template_kwargs == given


def test_a_template_that_reads_no_arguments_gets_none() -> None:
    asked_request = request(reasoning_effort="none", enable_thinking=True, chat_template_kwargs={"a": 1})
    assert to_call(asked_request, ChatModel(HERMES, VOCAB_SIZE)).template_kwargs == {}


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert asked(response_format={"type": "text"}).sampling.constraint is None
    constraint = asked(response_format={"type": "json_object"}).sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_OBJECT
    constraint = asked(response_format=wanted).sampling.constraint
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.text)) == (ConstraintKind.JSON_SCHEMA, schema)
    assert asked(response_format=wanted, tools=[LOOK], tool_choice="required").sampling.constraint is None


def test_a_turn_with_tools_and_a_response_format_is_one_or_the_other() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    constraint = asked(response_format=wanted, tools=[LOOK]).sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.STRUCTURAL_TAG
    answer, calls = json.loads(constraint.text)["format"]["elements"]
    assert answer["json_schema"]["properties"].keys() == {"a"}
    assert answer["max_whitespace_cnt"] == MAX_JSON_WHITESPACE_CHARS
    assert calls["tags"][0]["begin"].startswith("<tool_call>")


# Answers


@pytest.mark.parametrize(
    "messages",
    [
        (PLAIN,),
        (BUSY,),
        (PLAIN, BUSY),
        (Message("assistant", ""),),
        (Message("assistant", "", (CALLS[1], CALLS[0], CUT)), PLAIN),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}])
async def test_streamed_and_whole_answers_are_the_same(
    texts: TokenTexts, messages: Sequence[Message], fields: dict[str, Any]
) -> None:
    asked_body = body(**fields, stream_options={"include_usage": True})
    answer = result(*messages)
    whole = ChatWriter(asked_body, texts, 0).whole(answer)
    parsed = strictly(ChatCompletion, whole)
    chunks = chunks_of(asked_body, answer, texts)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(strictly(ChatCompletionChunk, chunk))
    final = state.get_final_completion()
    for mine, theirs in zip(parsed.choices, final.choices, strict=True):
        assert (mine.finish_reason, mine.index) == (theirs.finish_reason, theirs.index)
        assert (mine.message.content or "") == (theirs.message.content or "")
        assert getattr(mine.message, "reasoning_content", "") == getattr(theirs.message, "reasoning_content", "")
        calls = [(call.id, call.function.name, call.function.arguments) for call in mine.message.tool_calls or []]
        assert calls == [
            (call.id, call.function.name, call.function.arguments) for call in theirs.message.tool_calls or []
        ]
        entries = mine.logprobs.content if mine.logprobs else None
        assert entries == (theirs.logprobs.content if theirs.logprobs else None)
    shown = [chunk for chunk in chunks if "session" in chunk]
    assert [chunk["session"] for chunk in shown] == [whole["session"]]
    if fields:
        assert shown[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [7, 8, 9]
        for choice in whole["choices"]:
            ids = [
                token_id
                for chunk in chunks
                for one in chunk["choices"]
                if one["index"] == choice["index"]
                for token_id in one.get("token_ids", ())
            ]
            assert ids == choice["token_ids"]
    else:
        assert "prompt_token_ids" not in whole
        assert "token_ids" not in whole["choices"][0]


def test_a_streamed_call_is_one_entry_a_chunk(texts: TokenTexts) -> None:
    """A client that reads only a chunk's first entry receives the complete call, which may arrive in one piece."""
    deltas = tuple(
        delta
        for index in range(2)
        for delta in (CallDelta(index, f"c{index}", "look"), CallDelta(index, arguments=f'{{"x":{index}}}'))
    )
    piece = TurnPiece(0, "Hm.", "", deltas, (7, 8), (-0.5, -0.5), ((), ()), (WeightVersionSpan(3, 0, 2),))
    writer = ChatWriter(body(return_token_ids=True, logprobs=True), texts, 1_700_000_000)
    chunks = [chunk for item in (piece, result(PLAIN)) for chunk in writer.chunks(item)][1:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [list(choice["delta"]) for choice in choices] == [["content"], *[["tool_calls"]] * 4]
    assert [choice.get("token_ids") for choice in choices] == [[7, 8], None, None, None, None]
    assert [choice["logprobs"] is not None for choice in choices] == [True, False, False, False, False]
    entries = [choice["delta"]["tool_calls"] for choice in choices[1:]]
    assert [len(entry) for entry in entries] == [1] * 4
    assert [(one["index"], one.get("id"), one["function"]["arguments"]) for [one] in entries] == [
        (0, "c0", ""),
        (0, None, '{"x":0}'),
        (1, "c1", ""),
        (1, None, '{"x":1}'),
    ]


async def test_the_order_of_a_stream(texts: TokenTexts) -> None:
    chunks = chunks_of(body(), result(PLAIN, finish=FinishReason.LENGTH), texts)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == list("Hello you")
    assert all("usage" not in chunk for chunk in chunks)
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["delta"]) == ("length", {})
    assert last["weight_versions"] == [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 5}]
    assert (chunks[1]["system_fingerprint"], chunks[-1]["system_fingerprint"]) == (None, "v4")


def test_a_whole_answer(texts: TokenTexts) -> None:
    split = Split(SplitReason.HISTORY_EDIT, "n7", "a -> b")
    answer = ChatWriter(body(model="m"), texts, 0).whole(result(BUSY, split=split))
    assert (answer["id"], answer["model"], answer["system_fingerprint"]) == ("chatcmpl-c1", "m", "v4")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "They want x."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "look", "arguments": '{"x":1.5,"y":"é"}'},
        {"name": "", "arguments": "<tool_call>{oops"},
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert answer["session"]["split_reason"] == "history_edit"
    assert answer["session"]["tool_calls"][1] == {
        "choice": 0,
        "id": "c1",
        "status": "malformed",
        "token_start": 3,
        "token_end": 5,
        "error": "bad",
    }


def test_a_cut_call_keeps_its_name_and_what_there_is_of_its_arguments(texts: TokenTexts) -> None:
    message = Message("assistant", "", (CUT,))
    [choice] = ChatWriter(body(), texts, 0).whole(result(message, finish=FinishReason.LENGTH))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"], choice["finish_reason"]) == ({"name": "find", "arguments": '{"q": "'}, "length")
    for arguments in ('{"q": "', '{"INVALID_JSON": "{\\"q\\": \\""}'):  # pydantic-ai echoes the second one
        echo = {**call, "function": {**call["function"], "arguments": arguments}}
        [again] = asked(messages=[{"role": "assistant", "tool_calls": [echo]}]).messages
        assert message_key(again) == message_key(message)


def test_tokens_are_text_and_bytes(renderer: TemplateRenderer, texts: TokenTexts) -> None:
    ids = renderer.ids("Hello")
    entries = texts.entries(ids, [-0.5] * len(ids), ())
    assert "".join(entry["token"] for entry in entries) == "Hello"
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == b"Hello"
    assert entries[0]["top_logprobs"] == []
    parts = texts.entries(renderer.ids("😀"), [-0.5] * len(renderer.ids("😀")), ())
    assert len(parts) > 1
    assert bytes(byte for entry in parts for byte in entry["bytes"]).decode() == "😀"
    assert "\ufffd" in parts[0]["token"]


# Completions


def completion(**fields: Any) -> CompletionBody:
    return read_body(json.dumps({"model": "default", "prompt": "Hello", **fields}).encode(), CompletionBody)


def test_a_completion_call(renderer: TemplateRenderer) -> None:
    asked_body = completion(stop="x", logprobs=3, max_tokens=4)
    [ids] = prompts_of(asked_body, renderer)
    assert renderer.decode(ids) == "Hello"
    call = completion_call(asked_body, ids, ChatModel(HERMES, renderer.vocab_size, timeout_s=5.0))
    assert (call.prompt_ids, call.messages, call.max_tokens, call.stop) == (ids, (), 4, ("x",))
    assert call.sampling.num_top_logprobs == 3
    assert completion_call(completion(), ids, ChatModel(HERMES, renderer.vocab_size)).max_tokens == 16
    with pytest.raises(InvalidRequest):
        prompts_of(completion(prompt=[renderer.vocab_size]), renderer)


def test_completions_streamed_and_whole(texts: TokenTexts) -> None:
    asked_body = completion(logprobs=2, return_token_ids=True, stream_options={"include_usage": True})
    answer = result(PLAIN, PLAIN)
    whole = CompletionWriter(asked_body, texts, 0).whole(answer)
    strictly(Completion, whole)

    writer = CompletionWriter(asked_body, texts, 1_700_000_000)
    chunks = [chunk for item in pieces_of(answer) for chunk in writer.chunks(item)]
    for index, choice in enumerate(whole["choices"]):
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in mine) == choice["text"] == "Hello you"
        assert [token for one in mine for token in one.get("token_ids", ())] == choice["token_ids"]
        columns = [one["logprobs"] for one in mine if one["logprobs"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for one in columns for value in one[name]] == choice["logprobs"][name]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ["look"]),
        (None, ["look"]),
        ("required", None),
        ({"type": "function", "function": {"name": "look"}}, None),
    ],
)
def test_the_answer_reports_that_strict_was_not_enforced(
    texts: TokenTexts, choice: Any, names: list[str] | None
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "strict": True}}, LOOK | {"function": {"name": "b"}}]
    asked_body, answer = body(tools=tools, tool_choice=choice), result(PLAIN)
    assert ChatWriter(asked_body, texts, 0).whole(answer).get("strict_not_enforced") == names
    assert chunks_of(asked_body, answer, texts)[-1].get("strict_not_enforced") == names
