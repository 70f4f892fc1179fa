"""Texts that a call constraint allows: random walks with xgrammar, byte by byte, are parsed back."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import xgrammar

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.grammar import after_reasoning
from agentloop.types import Constraint, ConstraintKind, ToolCallStatus
from tests.parsers.writing import WRITE, dumps, mistral_list

STOP = 256
DAY = {
    "type": "object",
    "properties": {"hour": {"type": "integer"}, "name": {"enum": ["monday", "sunday"]}},
    "required": ["hour", "name"],
    "additionalProperties": False,
}
BOOKING = {
    "type": "object",
    "$defs": {"day": DAY},
    "properties": {
        "when": {"$ref": "#/$defs/day"},
        "seats": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "is_quick": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 6},
        "level": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["when", "seats", "is_quick", "note"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "today", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "book", "strict": True, "parameters": BOOKING}},
    {"type": "function", "function": {"name": "order", "strict": False, "parameters": BOOKING}},
]
BOOKED = {"when": {"hour": 7, "name": "sunday"}, "seats": [1, 2], "is_quick": True, "note": "é", "kind": "a"}
ONE_A_TURN = {"llama3_json", "harmony"}


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls as a policy writes them: gpt-oss writes the recipient after the channel, its template before."""
    if name == "harmony":
        begin = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
        return "".join(begin.format(tool, dumps(arguments)) for tool, arguments in calls)
    return WRITE[name](list(calls))


@lru_cache(maxsize=16)
def compiled(constraint: Constraint) -> Any:
    assert constraint.kind is ConstraintKind.STRUCTURAL_TAG
    tokens = [bytes([value]) for value in range(STOP)] + [b"<stop>"]
    vocabulary = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[STOP])
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_structural_tag(constraint.text)


def matcher(constraint: Constraint) -> Any:
    return xgrammar.GrammarMatcher(compiled(constraint))


def allows(constraint: Constraint, text: str) -> bool:
    walker = matcher(constraint)
    return bool(walker.accept_string(text) and walker.accept_token(STOP))


def walk(constraint: Constraint, seed: int) -> str:
    """Return a random text that ends at every second opportunity."""
    walker, choose, written = matcher(constraint), random.Random(seed), bytearray()
    mask = xgrammar.allocate_token_bitmask(1, STOP + 1)
    while len(written) < 4000:
        walker.fill_next_token_bitmask(mask, 0)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: STOP + 1]
        allowed = [int(value) for value in bits[:STOP].nonzero()[0]]
        if bits[STOP] and (not allowed or choose.random() < 0.5):
            return written.decode()
        printable = [value for value in allowed if value == 10 or (32 <= value < 127 and value != ord("\\"))]
        written.append(choose.choice(printable or allowed))
        assert walker.accept_token(written[-1])
    raise AssertionError("the walk did not end")


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize(("forced", "is_parallel"), [(None, True), (None, False), ("book", False), ("order", True)])
def test_whatever_is_written_is_read_as_calls(name: str, forced: str | None, is_parallel: bool) -> None:
    parser = get_parser(name)
    constraint = parser.call_constraint(TOOLS, forced=forced, is_parallel=is_parallel)
    names = set()
    for seed in range(12):
        text = walk(constraint, seed)
        assert text.startswith((*parser.delimiters.openings, *parser.delimiters.leading))
        turn = parser.parse(DecodedText(text, tuple(range(1, len(text) + 1))), TOOLS, 0)
        assert turn.content == ""
        assert [call.error for call in turn.calls if call.status is not ToolCallStatus.OK] == []
        assert len(turn.calls) == 1 or (is_parallel and name not in ONE_A_TURN)
        names |= {call.name for call in turn.calls}
        for call in turn.calls:
            if call.name in ("book", "order"):
                assert set(BOOKING["required"]) <= call.arguments.keys() <= BOOKING["properties"].keys()
                assert isinstance(call.arguments["when"]["hour"], int)
    assert names <= ({forced} if forced is not None else {"now", "today", "book", "order"})


@pytest.mark.parametrize("name", WRITE)
def test_what_templates_write_is_allowed_and_nothing_around_it(name: str) -> None:
    parser = get_parser(name)
    one = parser.call_constraint(TOOLS, forced=None, is_parallel=False)
    many = parser.call_constraint(TOOLS, forced=None, is_parallel=True)
    book, now = written(name, ("book", BOOKED)), written(name, ("now", {}))
    assert allows(one, book)
    assert allows(one, now)
    several = written(name, ("book", BOOKED), ("now", {}), ("book", BOOKED))
    assert allows(many, several) == (name not in ONE_A_TURN)
    assert not allows(one, f"{now}\n{now}")
    assert not allows(many, "")
    assert not allows(many, f"Well. {now}")
    assert not allows(parser.call_constraint(TOOLS, forced="book", is_parallel=True), now)
    assert not allows(one, book.replace("sunday", "someday"))


@pytest.mark.parametrize("name", WRITE)
def test_a_choice_without_its_tool_is_refused(name: str) -> None:
    for tools, forced in ((TOOLS, "unknown"), ([], None)):
        with pytest.raises(InvalidRequest) as caught:
            get_parser(name).call_constraint(tools, forced=forced, is_parallel=True)
        assert caught.value.param == "tool_choice"


def test_a_name_that_the_format_cannot_hold_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "a>b"}}]
    with pytest.raises(InvalidRequest):
        get_parser("qwen3_xml").call_constraint(tools, forced=None, is_parallel=True)
    constraint = get_parser("hermes").call_constraint(tools, forced=None, is_parallel=True)
    assert allows(constraint, '<tool_call>\n{"name": "a>b", "arguments": {}}\n</tool_call>')


def test_a_constraint_behind_a_thought_that_the_prompt_opened() -> None:
    parser = get_parser("hermes")
    calls = parser.call_constraint(TOOLS, forced=None, is_parallel=True)
    thoughts, now = parser.delimiters.reasoning, written("hermes", ("now", {}))
    for constraint, text in (
        (calls, now),
        (Constraint(ConstraintKind.JSON_OBJECT), '{"a": 1}'),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}'), "7"),
        (Constraint(ConstraintKind.REGEX, "yes|no"), "yes"),
    ):
        behind = after_reasoning(constraint, thoughts)
        assert allows(behind, f"I could write <tool_call> or 7.\n</think>\n\n{text}")
        assert allows(behind, f"</think>{text}")
        assert not allows(behind, text)
        assert not allows(behind, f"Hm.</think>So: {text}")


def test_both_forms_of_mistral_are_allowed() -> None:
    parser = get_parser("mistral")
    for is_parallel in (True, False):
        constraint = parser.call_constraint(TOOLS, forced=None, is_parallel=is_parallel)
        for calls in ([("book", BOOKED)], [("book", BOOKED), ("now", {})]):
            listed = mistral_list(calls, has_ids=False)
            assert (
                allows(constraint, listed)
                == allows(constraint, WRITE["mistral"](calls))
                == (is_parallel or len(calls) == 1)
            )


@pytest.mark.parametrize("name", WRITE)
def test_openings_are_what_calls_begin_with(name: str) -> None:
    marks, text = get_parser(name).delimiters, written(name, ("book", BOOKED))
    assert text.startswith((*marks.openings, *marks.leading))
    assert marks.closing is None or marks.closing in text
    assert text.endswith(marks.trailing)
