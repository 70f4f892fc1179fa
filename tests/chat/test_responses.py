"""Responses bodies, answers and events, validated with the types of the openai package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentloop.chat.call import ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.choices import TokenTexts
from agentloop.chat.fields import read_body
from agentloop.chat.responses import ResponseWriter, to_call
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.errors import EngineLost, InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_reader import TurnPiece
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.port import Renderer
from agentloop.trajectory.node import message_key
from agentloop.types import (
    ConstraintKind,
    FinishReason,
    Message,
    ToolCall,
    ToolCallStatus,
)
from tests.support.records.chat_answers import (
    CALLS,
    CUT,
    KEY,
    MESSAGES,
    TURN,
    check_echo,
    pieces_of,
    result,
    written,
)


class Letters:
    """A vocabulary of single letters."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])


TEXTS = TokenTexts(cast(Renderer, Letters()))
HERMES = get_parser("hermes")
VOCAB_SIZE = 100
ARGUMENTS = frozenset({"enable_thinking", "reasoning_effort", "date"})
LOOKUP = {
    "type": "function",
    "name": "lookup",
    "description": "Look it up.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    "strict": True,
}


def body(**fields: Any) -> ResponsesBody:
    return read_body(json.dumps({"model": "default", "input": "hi", **fields}).encode(), ResponsesBody)


def asked(**fields: Any) -> ChatCall:
    return to_call(body(**fields), ChatModel(HERMES, VOCAB_SIZE, ARGUMENTS))


def written_for(asked_body: ResponsesBody, items: Sequence[TurnPiece | ChatResult]) -> list[dict[str, Any]]:
    writer = ResponseWriter(asked_body, TEXTS, 1_700_000_000)
    writer.begin("s1", "c1")
    return written(writer.events, items)


def whole(answer: ChatResult, **fields: Any) -> dict[str, Any]:
    written_answer = ResponseWriter(body(**fields), TEXTS, 1_700_000_000).whole(answer)
    json.dumps(written_answer)
    return written_answer


# Requests


def test_text_and_instructions():
    call = asked(input="What is it?", instructions="Be brief.")
    assert call.messages == (Message("system", "Be brief."), Message("user", "What is it?"))
    assert (call.tool_choice, call.max_tokens, call.sampling.temperature) == (ToolChoice.AUTO, None, 1.0)


def test_a_history_of_items():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_x", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_x",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": '{"q":"a"}', "id": "fc_x"},
        {"type": "function_call", "call_id": "c2", "name": "lookup", "arguments": "{oops", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "A"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "go on"},
    ]
    system, user, assistant, first, second, last = asked(input=items).messages
    assert (system, user) == (Message("system", "Be brief."), Message("user", "one\ntwo"))
    assert (assistant.content, assistant.reasoning) == ("Looking.", "Hm.")
    assert assistant.tool_calls[0] == ToolCall("c1", "lookup", {"q": "a"})
    assert (assistant.tool_calls[1].status, assistant.tool_calls[1].text) == (ToolCallStatus.MALFORMED, "{oops")
    assert first == Message("tool", "A", tool_call_id="c1", name="lookup")
    assert second == Message("tool", "B", tool_call_id="c2", name="lookup")
    assert last == Message("user", "go on")


NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}, "defer_loading": True}],
}
SEARCH = {"type": "web_search", "external_web_access": False}


def test_the_tools_of_a_namespace_are_tools():
    call = asked(tools=[LOOKUP, NAMESPACE], tool_choice={"type": "function", "name": "find", "namespace": "crm"})
    assert [tool["function"]["name"] for tool in call.tools] == ["lookup", "crm.find"]
    assert call.forced_tool == "crm.find"
    item = {"type": "function_call", "call_id": "c1", "name": "find", "namespace": "crm", "arguments": "{}"}
    assert asked(input=[item]).messages[0].tool_calls == (ToolCall("c1", "crm.find", {}),)
    turn = Message("assistant", "", (ToolCall("call_0_0", "crm.find", {}), ToolCall("call_0_1", "lookup", {})))
    answer = whole(result(turn), tools=[LOOKUP, NAMESPACE])
    places = [(one["name"], one.get("namespace")) for one in answer["output"]]
    assert places == [("find", "crm"), ("lookup", None)]
    tools = answer["tools"]
    assert (tools[1]["type"], tools[1]["tools"][0]["name"]) == ("namespace", "find")
    events = written_for(body(tools=[LOOKUP, NAMESPACE], stream=True), [*pieces_of(turn), result(turn)])
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["name"], item.get("namespace")) for item in added] == places
    done = [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == ["find", "lookup"]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)


def test_a_search_that_nobody_runs_is_left_out_beside_other_tools():
    call = asked(tools=[LOOKUP, SEARCH])
    assert [tool["function"]["name"] for tool in call.tools] == ["lookup"]
    assert [tool["type"] for tool in whole(result(TURN), tools=[SEARCH, LOOKUP])["tools"]] == ["function"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [SEARCH]}, "tools.0.type"),
        ({"tools": [LOOKUP, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [LOOKUP, {"type": "file_search", "vector_store_ids": ["v"]}]}, "tools.1.type"),
        ({"tools": [LOOKUP, {"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools.1.type"),
        ({"tools": [{**NAMESPACE, "tools": [{"type": "custom", "name": "x"}]}]}, "tools.0.tools.0.type"),
    ],
)
def test_other_tools_that_openai_runs_are_refused(fields, param):
    with pytest.raises(UnsupportedParameter) as refused:
        asked(**fields)
    assert refused.value.param == param


def test_what_codex_sends_is_taken():
    """Requests of Codex 0.169 with its default configuration are accepted."""
    asked(
        tools=[LOOKUP, NAMESPACE, SEARCH],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"session_id": "s", "turn_id": "t"},
        stream=True,
    )


def test_efforts_are_arguments_of_the_template():
    assert asked(reasoning={"effort": "low"}).template_kwargs == {"reasoning_effort": "low"}
    assert asked(reasoning={"effort": "none"}).template_kwargs["enable_thinking"] is False
    assert asked(reasoning={"summary": "auto"}).template_kwargs == {}
    assert whole(result(TURN), reasoning={"effort": "low"})["reasoning"]["effort"] == "low"


def test_results_between_the_calls_of_one_response():
    def call(index: int) -> dict[str, Any]:
        ids = {"id": f"fc_{KEY}_{index}", "call_id": f"c{index}"}
        return {"type": "function_call", "name": "lookup", "arguments": "{}", **ids}

    def output(index: int) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": f"c{index}", "output": str(index)}

    items = [{"role": "user", "content": "hi"}, call(0), output(0), call(1), output(1)]
    roles = [(message.role, len(message.tool_calls)) for message in asked(input=items).messages]
    assert roles == [("user", 0), ("assistant", 2), ("tool", 0), ("tool", 0)]


def test_two_turns_in_a_row_stay_two():
    def said(text: str, item_id: str | None) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": text, "id": item_id}

    known = asked(input=[said("a", f"msg_{KEY}_0"), said("b", f"msg_{KEY[::-1]}_0")]).messages
    assert [message.content for message in known] == ["a", "b"]
    unknown = asked(input=[said("a", None), said("b", None)]).messages
    assert [message.content for message in unknown] == ["ab"]


def test_tools_and_choice():
    call = asked(tools=[LOOKUP], tool_choice={"type": "function", "name": "lookup"}, parallel_tool_calls=False)
    definition = {key: LOOKUP[key] for key in ("name", "description", "parameters")}
    assert call.tools == ({"type": "function", "function": definition},)
    assert (call.tool_choice, call.forced_tool, call.is_parallel) == (ToolChoice.REQUIRED, "lookup", False)
    other = {**LOOKUP, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    call = asked(tools=[LOOKUP, other], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in call.tools] == ["other"]
    assert (call.tool_choice, call.forced_tool) == (ToolChoice.REQUIRED, None)


def test_formats_of_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    constraint = asked(text=wanted).sampling.constraint
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.text)) == (ConstraintKind.JSON_SCHEMA, schema)
    anything = asked(text={"format": {"type": "json_object"}}).sampling.constraint
    assert anything is not None and anything.kind is ConstraintKind.JSON_OBJECT  # noqa: PT018
    beside_tools = asked(text=wanted, tools=[LOOKUP]).sampling.constraint
    assert beside_tools is not None and beside_tools.kind is ConstraintKind.STRUCTURAL_TAG  # noqa: PT018
    assert asked(text={"format": {"type": "text"}}).sampling.constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"background_options": {"prewarm": True}}, "background_options"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "computer_call_output"}]}, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
            "input.0.content.0",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(UnsupportedParameter) as refused:
        asked(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOKUP], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"tools": [LOOKUP, LOOKUP]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"session": "a", "session_id": "b"}, None),
    ],
)
def test_bad_bodies(fields: dict[str, Any], param: str | None):
    with pytest.raises(InvalidRequest) as refused:
        asked(**fields)
    assert refused.value.param == param
    assert not isinstance(refused.value, UnsupportedParameter)


def test_harmless_fields_are_taken():
    asked(
        store=True,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        reasoning={"effort": "low", "summary": None},
        text={"verbosity": "low"},
        prompt_cache_key="k",
        previous_response_id=None,
        background=False,
        max_tool_calls=3,
        stream_options={"include_obfuscation": False},
    )


# Answers


def test_the_whole_answer_is_a_response():
    answer = whole(result(TURN), tools=[LOOKUP], instructions="x", return_token_ids=True)
    response = Response.model_validate(answer, strict=True)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (response.output_text, response.status) == ("Looking.", "completed")
    assert response.output[2].arguments == '{"q":"a"}'  # type: ignore[union-attr]
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (4, 2)
    assert (answer["prompt_token_ids"], answer["token_ids"]) == (list(range(7)), list(range(5)))
    assert answer["weight_versions"] == [{"version": 3, "start": 0, "end": 5}]
    assert (answer["session"]["session_id"], answer["session"]["turn_ids"]) == ("s1", ["n1"])


def test_token_ids_only_if_asked_for():
    assert "token_ids" not in whole(result(TURN))


def test_an_answer_that_was_cut_is_incomplete():
    answer = whole(result(Message("assistant", "abc"), FinishReason.LENGTH))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"


def test_a_cut_call_keeps_its_name_and_what_there_is_of_its_arguments():
    answer = whole(result(Message("assistant", "", (CUT,)), FinishReason.LENGTH))
    [item] = answer["output"]
    assert (item["name"], item["arguments"], item["status"]) == ("lookup", '{"q": "a', "incomplete")
    [again] = asked(input=[item]).messages
    assert message_key(again) == message_key(Message("assistant", "", (CUT,)))


def test_an_empty_turn_is_an_empty_message():
    [item] = whole(result(Message("assistant")))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_stream_ends_with_the_whole_answer(name: str):
    message = MESSAGES[name]
    events = written_for(body(stream=True), [*pieces_of(message), result(message)])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(adapter.validate_python(event))  # raises if events are out of order
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert (final["type"], final["response"]) == ("response.completed", whole(result(message)))
    assert final["response"]["output"] == [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ]


def test_the_order_of_events():
    message = Message("assistant", "ab", CALLS[:1], reasoning="h")
    kinds = [
        event["type"].removeprefix("response.")
        for event in written_for(body(), [*pieces_of(message), result(message)])
    ]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        *[*opened, "reasoning_text.delta", "reasoning_text.done", *closed],
        *[*opened, "output_text.delta", "output_text.delta", "output_text.done", *closed],
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_text_after_a_call_is_an_item_of_its_own():
    message = Message("assistant", "a\nb", CALLS[:1])
    text, *calls = [TurnPiece(0, content="a"), *pieces_of(Message("assistant", tool_calls=CALLS[:1]))]
    events = written_for(body(), [text, *calls, TurnPiece(0, content="\nb"), result(message)])
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    again = asked(input=output).messages
    assert (len(again), again[0].content, again[0].tool_calls[0].arguments) == (1, "a\nb", {"q": "a"})


def test_an_error_event_is_numbered_and_has_the_envelope():
    writer = ResponseWriter(body(), TEXTS, 0)
    event = writer.error_event(EngineLost("gone", param="x"))
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    assert adapter.validate_python(event).type == "error"
    assert (event["sequence_number"], event["code"], event["error"]["code"]) == (0, "engine_lost", "engine_lost")


@pytest.mark.parametrize("name", MESSAGES)
def test_an_echoed_answer_is_the_turn_that_made_it(name: str):
    answer = result(MESSAGES[name])
    typed = Response.model_validate(whole(answer))
    echo = [item.model_dump(exclude_unset=True) for item in typed.output]
    check_echo(answer, asked(input=[{"role": "user", "content": "hi"}, *echo, {"role": "user", "content": "and?"}]))


def test_the_answer_reports_that_strict_was_not_enforced() -> None:
    for choice, is_enforced in (("auto", False), (None, False), ("required", True)):
        (tool,) = whole(result(MESSAGES["text"]), tools=[LOOKUP], tool_choice=choice)["tools"]
        assert tool["strict"] is is_enforced
