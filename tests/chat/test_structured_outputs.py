"""vLLM's extra fields on chat completions: the structure of an answer, and fields that no engine here supports."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest

from agentloop.chat import openai as openai_chat
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.grammar import MAX_JSON_WHITESPACE_CHARS
from agentloop.types import Constraint, ConstraintKind
from tests.parsers.test_call_constraint import allows

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def asked(parser: str = "hermes", **fields: Any) -> ChatCall:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    model = ChatModel(get_parser(parser), 1000)
    return openai_chat.to_call(openai_chat.read_chat(orjson.dumps(body), BodyCache()), model)


@pytest.mark.parametrize(
    ("wanted", "constraint"),
    [
        ({"regex": "a|b"}, Constraint(ConstraintKind.REGEX, "a|b")),
        ({"json_object": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"json": SCHEMA}, Constraint(ConstraintKind.JSON_SCHEMA, orjson.dumps(SCHEMA).decode())),
        (
            {"json": orjson.dumps(SCHEMA).decode()},
            Constraint(ConstraintKind.JSON_SCHEMA, orjson.dumps(SCHEMA).decode()),
        ),
        ({"structural_tag": "{}"}, Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
    ],
)
def test_an_answer_has_the_form_that_is_asked_for(wanted: dict[str, Any], constraint: Constraint) -> None:
    call = asked(structured_outputs=wanted)
    assert call.sampling.constraint == constraint
    assert call.constraint_param == "structured_outputs"


def test_a_choice_is_one_of_the_texts_as_they_are() -> None:
    constraint = asked(structured_outputs={"choice": ["yes.", "no (really)"]}).sampling.constraint
    assert constraint is not None
    assert [bool(re.fullmatch(constraint.text, one)) for one in ("yes.", "no (really)", "yesx")] == [
        True,
        True,
        False,
    ]


def test_beside_tools_it_is_the_answer_or_a_call() -> None:
    constraint = asked(structured_outputs={"regex": "a|b"}, tools=[TOOL]).sampling.constraint
    assert constraint is not None
    either = orjson.loads(constraint.text)["format"]["elements"]
    assert either[0] == {"type": "regex", "pattern": "a|b"}
    assert either[1]["type"] == "tags_with_separator"


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "glm45", "lfm2", "mistral", "harmony"])
def test_next_to_tools_whitespace_is_bounded_and_no_tools_schema_refuses_the_request(
    parser: str, wanted: dict[str, Any]
) -> None:
    properties = {
        "a": {"type": "string", "pattern": "(?=a)b", "format": "none", "maxLength": 2},
        "b": {"type": "array", "uniqueItems": True, "contains": {"type": "integer"}},
        "c": {"not": {"const": 3}},
        "d": {"type": "nonsense"},
        "e": False,
    }
    parameters = {"properties": properties, "minProperties": 1, "required": ["z"], "anyOf": [{"required": ["a"]}]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    constraint = asked(parser, tools=[TOOL | {"function": {"name": "g"}}, tool], **wanted).sampling.constraint
    assert constraint is not None
    answer, calls = orjson.loads(constraint.text)["format"]["elements"]
    assert answer["max_whitespace_cnt"] == MAX_JSON_WHITESPACE_CHARS
    for keyword in ("maxLength", "uniqueItems", "contains", "minProperties", "nonsense", "not"):
        assert f'"{keyword}"' not in json.dumps(calls)
    assert allows(constraint, "{" + "\n" * 8 + "}")
    assert not allows(constraint, "{" + "\n" * 9 + "}")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"structured_outputs": {"grammar": "x"}}, UnsupportedParameter, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, InvalidRequest, "structured_outputs"),
        ({"structured_outputs": {"json": "[1"}}, InvalidRequest, None),
        ({"structured_outputs": {"structural_tag": "{}"}, "tools": [TOOL]}, InvalidRequest, "constraint"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            InvalidRequest,
            "structured_outputs",
        ),
        ({"priority": 1 << 31}, InvalidRequest, None),
        ({"continue_final_message": True}, InvalidRequest, "continue_final_message"),
        ({"add_generation_prompt": False}, InvalidRequest, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, Any], error: type[InvalidRequest], param: str | None) -> None:
    with pytest.raises(error) as refused:
        asked(**fields)
    assert param is None or refused.value.param == param


def test_a_priority_is_the_requests_own() -> None:
    assert asked(priority=-3).sampling.priority == -3


def test_what_asks_for_nothing_is_taken() -> None:
    assert asked(priority=0, continue_final_message=False, add_generation_prompt=True).sampling.constraint is None
    assert asked(structured_outputs={"regex": None, "json_object": False}).sampling.constraint is None
