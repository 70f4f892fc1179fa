"""Messages bodies, answers and events, validated with the types of the anthropic package if it is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentloop.chat.anthropic import MALFORMED_KEY, MessageWriter, error_body, prompt, to_call
from agentloop.chat.anthropic_bodies import CountTokensBody, MessagesBody
from agentloop.chat.call import ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.fields import read_body
from agentloop.errors import EngineLost, InvalidRequest, Overloaded, SessionNotFound, UnsupportedParameter
from agentloop.parsers.by_name import get_parser
from agentloop.types import (
    ConstraintKind,
    FinishReason,
    Message,
    ToolCall,
    ToolCallStatus,
)
from tests.support.records.chat_answers import (
    CALLS,
    KEY,
    MESSAGES,
    TURN,
    check_echo,
    pieces_of,
    result,
    written,
)

HERMES = get_parser("hermes")
VOCAB_SIZE = 100
ARGUMENTS = frozenset({"enable_thinking", "reasoning_effort", "date"})
LOOKUP = {
    "name": "lookup",
    "description": "Look it up.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The Anthropic SDK, imported only in the process of these tests: its types take more than a second."""
    return pytest.importorskip("anthropic")


def body(**fields: Any) -> MessagesBody:
    given = {"model": "default", "max_tokens": 64, "messages": [HI], **fields}
    return read_body(json.dumps(given).encode(), MessagesBody)


def asked(**fields: Any) -> ChatCall:
    return to_call(body(**fields), ChatModel(HERMES, VOCAB_SIZE, ARGUMENTS))


def whole(answer: ChatResult, **fields: Any) -> dict[str, Any]:
    written_answer = MessageWriter(body(**fields), KEY).whole(answer)
    json.dumps(written_answer)
    return written_answer


# Requests


def test_a_conversation():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "Loo"},
                {"type": "text", "text": "king."},
                {"type": "tool_use", "id": "c1", "name": "lookup", "input": {"q": "a"}, "cache_control": None},
                {"type": "tool_use", "id": "c2", "name": "", "input": {MALFORMED_KEY: "{oops"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "A"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "B"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    user, assistant, first, second, last = asked(messages=messages).messages
    assert user == Message("user", "one\ntwo")
    assert (assistant.content, assistant.reasoning) == ("Looking.", "Hm.")
    assert assistant.tool_calls[0] == ToolCall("c1", "lookup", {"q": "a"})
    assert (assistant.tool_calls[1].status, assistant.tool_calls[1].text) == (ToolCallStatus.MALFORMED, "{oops")
    assert first == Message("tool", "A", tool_call_id="c1", name="lookup")
    assert (second.content, second.tool_call_id) == ("Error: B", "c2")
    assert last == Message("user", "go on")


def test_system_prompts():
    top = asked(system="Be brief.").messages
    assert top == (Message("system", "Be brief."), Message("user", "hi"))
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc12;"},
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    assert asked(system=blocks).messages[0] == Message("system", "Be\nbrief.")
    assert asked(messages=[{"role": "system", "content": "x"}, HI]).messages[0] == Message("system", "x")


def test_tools_and_choice():
    definition = {"name": "lookup", "description": "Look it up.", "parameters": LOOKUP["input_schema"]}
    call = asked(tools=[LOOKUP], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert call.tools == ({"type": "function", "function": definition},)
    assert (call.tool_choice, call.is_parallel) == (ToolChoice.AUTO, False)
    assert asked(tools=[LOOKUP], tool_choice={"type": "any"}).tool_choice is ToolChoice.REQUIRED
    assert asked(tools=[LOOKUP], tool_choice={"type": "none"}).tool_choice is ToolChoice.NONE
    named = asked(tools=[LOOKUP], tool_choice={"type": "tool", "name": "lookup"})
    assert (named.tool_choice, named.forced_tool) == (ToolChoice.REQUIRED, "lookup")


def test_sampling_and_stops():
    call = asked(temperature=0.5, top_p=0.9, top_k=4, seed=7, stop_sequences=["a", "b", "a"], max_tokens=9)
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 4, 7)
    assert (call.stop, call.max_tokens, call.is_parallel) == (("a", "b"), 9, True)


def test_a_form_of_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        constraint = asked(**wanted).sampling.constraint
        assert constraint is not None
        assert (constraint.kind, json.loads(constraint.text)) == (ConstraintKind.JSON_SCHEMA, schema)


def test_what_claude_code_sends_is_taken():
    asked(
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        tools=[{**LOOKUP, "type": "custom", "eager_input_streaming": True}],
        stream=True,
        mcp_servers=[],
    )


def test_a_thread_is_refused_so_that_the_sdk_goes_on_without():
    with pytest.raises(UnsupportedParameter) as refused:
        asked(thread={"type": "create"})
    error = error_body(refused.value, "r")["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert asked(thread=None).messages


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "medium"}}, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, {"enable_thinking": True}),
        ({"chat_template_kwargs": {"date": "1 May"}}, {"date": "1 May"}),
    ],
)
def test_thinking_and_effort_are_arguments_of_the_template(fields, given):
    assert asked(**fields).template_kwargs == given


def test_a_search_that_nobody_runs_is_left_out_beside_other_tools():
    call = asked(tools=[LOOKUP, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}])
    assert [tool["function"]["name"] for tool in call.tools] == ["lookup"]
    assert asked(tools=[{**LOOKUP, "defer_loading": True}]).tools


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"compaction": {"type": "auto"}}, "compaction"),
        ({"tools": [LOOKUP, {"type": "code_execution_20250825", "name": "x"}]}, "tools.1.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "document"}]}]}
                ]
            },
            "messages.0.content.0.content.0.type",
        ),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 64}}}, "output_config.task_budget"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"messages": [HI, {"role": "assistant", "content": "The answer is"}]}, "messages"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(UnsupportedParameter) as refused:
        asked(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_token": 1}, "max_token"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOKUP], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOKUP], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}
                ]
            },
            "messages",
        ),
    ],
)
def test_bad_bodies(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as refused:
        asked(**fields)
    assert refused.value.param == param
    assert not isinstance(refused.value, UnsupportedParameter)


def test_a_count_needs_no_max_tokens():
    given = {"model": "default", "messages": [HI], "system": "x", "tools": [LOOKUP]}
    messages, tools, _ = prompt(read_body(json.dumps(given).encode(), CountTokensBody))
    assert [message.role for message in messages] == ["system", "user"]
    assert len(tools) == 1


# Answers


def test_the_whole_answer_is_a_message(anthropic: Any):
    answer = whole(result(TURN), return_token_ids=True)
    message = anthropic.types.Message.model_validate(answer, strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[3].input == {"n": 1.5, "q": "é"}
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 4, 5)
    assert (answer["prompt_token_ids"], answer["token_ids"]) == (list(range(7)), list(range(5)))
    assert answer["weight_versions"] == [{"version": 3, "start": 0, "end": 5}]
    assert answer["session"]["turn_ids"] == ["n1"]
    assert "token_ids" not in whole(result(TURN))


@pytest.mark.parametrize(
    ("finish", "stop_text", "reason"),
    [
        (FinishReason.STOP, "", "end_turn"),
        (FinishReason.STOP, "END", "stop_sequence"),
        (FinishReason.LENGTH, "", "max_tokens"),
    ],
)
def test_stop_reasons(finish: FinishReason, stop_text: str, reason: str):
    answer = whole(result(Message("assistant", "abc"), finish, stop_text))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop_text or None)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_stream_accumulates_to_the_whole_answer(anthropic: Any, name: str):
    accumulate = pytest.importorskip("anthropic.lib.streaming._messages").accumulate_event
    answer = result(MESSAGES[name])
    events = written(MessageWriter(body(stream=True), KEY).events, [*pieces_of(MESSAGES[name]), answer])
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    snapshot, buffers = None, {}
    for event in events:
        if event["type"] != "ping":
            snapshot = accumulate(event=event, current_snapshot=snapshot, json_bufs=buffers)
    expected = anthropic.types.Message.model_validate(whole(answer))
    assert snapshot is not None
    got = snapshot.to_dict()
    assert got["content"] == [block.to_dict() for block in expected.content]
    assert (got["stop_reason"], got["id"]) == (expected.stop_reason, expected.id)
    assert got["usage"] == expected.usage.to_dict()


def test_blocks_come_one_after_the_other():
    message = Message("assistant", "ab", CALLS[:1], reasoning="h")
    kinds = [
        (event["type"], event.get("delta", {}).get("type"))
        for event in written(MessageWriter(body(stream=True), KEY).events, [*pieces_of(message), result(message)])
        if event["type"].startswith("content")
    ]
    start, stop = ("content_block_start", None), ("content_block_stop", None)

    def delta(kind: str) -> tuple[str, str]:
        return "content_block_delta", f"{kind}_delta"

    assert kinds == [
        *[start, delta("thinking"), delta("signature"), stop],
        *[start, delta("text"), delta("text"), stop],
        *[start, delta("input_json"), stop],
    ]


@pytest.mark.parametrize("name", MESSAGES)
def test_an_echoed_answer_is_the_turn_that_made_it(anthropic: Any, name: str):
    answer = result(MESSAGES[name])
    echo = [block.to_dict() for block in anthropic.types.Message.model_validate(whole(answer)).content]
    messages = [HI, {"role": "assistant", "content": echo}, {"role": "user", "content": "and?"}]
    check_echo(answer, asked(messages=messages))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("bad", param="x"), "invalid_request_error"),
        (SessionNotFound("none"), "not_found_error"),
        (Overloaded("full"), "rate_limit_error"),
        (EngineLost("gone"), "overloaded_error"),
    ],
)
def test_errors(error: Any, kind: str):
    written_error = error_body(error, "r1")
    assert (written_error["type"], written_error["request_id"]) == ("error", "r1")
    assert (written_error["error"]["type"], written_error["error"]["code"]) == (kind, error.code)


def test_the_answer_reports_that_strict_was_not_enforced() -> None:
    tool = {"name": "lookup", "strict": True, "input_schema": {"type": "object"}}
    for choice, names in (("auto", ["lookup"]), ("any", None)):
        fields = {"tools": [tool, tool | {"name": "b", "strict": False}], "tool_choice": {"type": choice}}
        assert whole(result(MESSAGES["text"]), **fields).get("strict_not_enforced") == names
