"""Calls between tags: parsed calls, reported malformed calls, and linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import MAX_CALLS, DecodedText, ParsedTurn
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.call_format import FormatParser
from agentloop.types import ToolCallStatus
from tests.parsers.writing import check_linear_time


def parse(text: str, turn_index: int = 0) -> ParsedTurn:
    """Parse with one token per character, so that spans are offsets into the text."""
    return get_parser("hermes").parse(DecodedText(text, tuple(range(1, len(text) + 1))), [], turn_index)


def call_text(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_text_without_a_call_is_content():
    assert parse("\nThe answer is 4.\n") == ParsedTurn("The answer is 4.", ())
    assert parse("") == ParsedTurn("", ())


def test_calls_have_ids_arguments_and_spans():
    first, second = call_text("add", {"a": 1, "b": [2.5, None]}), call_text("sub", {})
    text = f"Let me see.\n{first}\n{second}"

    turn = parse(text, turn_index=3)

    assert turn.content == "Let me see."
    assert [(c.id, c.name, dict(c.arguments), c.status) for c in turn.calls] == [
        ("call_3_0", "add", {"a": 1, "b": [2.5, None]}, ToolCallStatus.OK),
        ("call_3_1", "sub", {}, ToolCallStatus.OK),
    ]
    assert [text[c.token_start : c.token_end] for c in turn.calls] == [first, second]


def test_spans_cover_tokens_that_hold_part_of_a_call():
    text = "xé<tool_call>{}</tool_call>y"
    # Tokens: "x" + first byte of é | second byte of é + "<tool" | the rest of the call and "y"
    turn = get_parser("hermes").parse(DecodedText(text, (1, 7, len(text))), [], 0)
    assert [(c.token_start, c.token_end) for c in turn.calls] == [(1, 3)]


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ("", "", "empty"),
        ("{", "", "not valid JSON"),
        ("[1]", "", "must be a JSON object"),
        ("5", "", "must be a JSON object"),
        ('{"arguments": {}}', "", '"name"'),
        ('{"name": "", "arguments": {}}', "", '"name"'),
        ('{"name": 7, "arguments": {}}', "", '"name"'),
        ('{"name": "add"}', "add", '"arguments"'),
        ('{"name": "add", "arguments": [1]}', "add", "must be a JSON object"),
        ('{"name": "add", "arguments": null}', "add", "must be a JSON object"),
        ('{"name": "add", "arguments": "{"}', "add", "string that is not valid JSON"),
        ('{"name": "add", "arguments": "[1]"}', "add", "must be a JSON object"),
        ('{"name": "add", "arguments": {"a": NaN}}', "add", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "add", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "add", "infinity"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "add", "duplicate key"),
        ('{"name": "add", "arguments": {"a": 1180591620717411303424}}', "add", "64 bits"),
        ('{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}", "add", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "add", "surrogate"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 65 + "]" * 65 + "}}", "add", "levels deep"),
        ('{"name": "add", "arguments": {}} and more', "add", "not valid JSON"),
        ("{'name': 'add', 'arguments': {}}", "", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_reported(body: str, name: str, error: str):
    turn = parse(f"before <tool_call>{body}</tool_call> after {call_text('add', {})}")

    broken, sound = turn.calls
    assert (broken.status, broken.name, dict(broken.arguments)) == (ToolCallStatus.MALFORMED, name, {})
    assert broken.error is not None
    assert error in broken.error
    assert "\n" not in broken.error
    assert (sound.status, sound.id) == (ToolCallStatus.OK, "call_0_1")
    assert turn.content == "before\nafter"


def test_a_lenient_parser_reads_what_others_forgive_and_notes_it():
    strict = get_parser("hermes")
    assert isinstance(strict, FormatParser)
    lenient = strict.lenient()
    assert lenient.delimiters == strict.delimiters
    one, listed = '{"name": "now"}', f'[{{"name": "now"}}, {json.dumps({"name": "add", "arguments": {"a": 1}})}]'
    for body, calls, notes in (
        (one, [("now", {})], ["no arguments"]),
        (listed, [("now", {}), ("add", {"a": 1})], ["no arguments", "a list of calls"]),
        ('{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})], [None]),
    ):
        text = f"Well. <tool_call>\n{body}\n</tool_call> Done."
        decoded = DecodedText(text, tuple(range(1, len(text) + 1)))
        turn = lenient.parse(decoded, [], 0)
        assert [(call.name, dict(call.arguments)) for call in turn.calls] == calls
        assert [call.error for call in turn.calls] == [note and f"read leniently: {note}" for note in notes]
        assert turn.content == "Well.\nDone."
        assert (strict.parse(decoded, [], 0) == turn) == (notes == [None])
    tools = [{"type": "function", "function": {"name": "now"}}]
    written = [one.call_constraint(tools, forced=None, is_parallel=True) for one in (strict, lenient)]
    assert written[0] == written[1]


def test_arguments_given_as_a_string_are_decoded_once():
    (call,) = parse(call_text("add", json.dumps({"a": '{"b": 1}'}))).calls
    assert dict(call.arguments) == {"a": '{"b": 1}'}


def test_a_missing_close_tag_is_forgiven_if_the_json_is_complete():
    complete = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    assert [c.status for c in parse(complete).calls] == [ToolCallStatus.OK]
    assert [c.status for c in parse(complete + complete).calls] == [ToolCallStatus.OK] * 2
    assert [c.status for c in parse(complete[:-10]).calls] == [ToolCallStatus.MALFORMED]


def test_tags_inside_a_json_string_belong_to_the_string():
    arguments = {"code": "print('</tool_call><tool_call>{}</tool_call>')"}
    turn = parse(f"a{call_text('python', arguments)}b")
    assert [dict(c.arguments) for c in turn.calls] == [arguments]
    assert turn.content == "a\nb"


def test_an_unclosed_call_does_not_hide_the_next_one():
    turn = parse(f'<tool_call>{{"name": "add", "argu{call_text("sub", {})}')
    assert [(c.status, c.name) for c in turn.calls] == [
        (ToolCallStatus.MALFORMED, "add"),
        (ToolCallStatus.OK, "sub"),
    ]


def test_calls_beyond_the_cap_are_reported_as_one():
    turn = parse(call_text("add", {}) * (MAX_CALLS + 1000))
    assert [c.status for c in turn.calls] == [ToolCallStatus.OK] * MAX_CALLS + [ToolCallStatus.MALFORMED]
    assert turn.calls[-1].error == f"1000 tool calls after the first {MAX_CALLS} were not parsed"
    assert turn.calls[-1].token_start == turn.calls[-2].token_end


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        ("", "<tool_call>", ""),
        ("", "<tool_call>", "</tool_call>"),
        ("", '<tool_call>{"', ""),
        ("", "<tool_call>{</tool_call>", ""),
        ("", '<tool_call>{"name":"a","arguments":{}}</tool_call>', ""),
        ('<tool_call>{"name":"a","arguments":', "[", ""),
        ("<tool_call>", '"\\', "</tool_call>"),
        ('<tool_call>{"', "</tool_call>", ""),
        ("<tool_call>", " ", ""),
        ('<tool_call>{"a":"', "é", ""),
    ],
)
def test_hostile_text_takes_linear_time(head: str, unit: str, tail: str):
    check_linear_time("hermes", head, unit, tail)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "a", "arguments": {}}',
        '{"name": "',
        '"',
        "{",
        "}",
        "\n",
        "é",
        "x ",
        "\\",
    ]
)


@pytest.mark.slow
@given(st.lists(FRAGMENTS | st.text(max_size=4), max_size=30).map("".join))
def test_no_text_raises_and_no_call_vanishes(text: str):
    turn = parse(text)
    starts = [call.token_start for call in turn.calls]
    assert starts == sorted(starts)
    assert bool(turn.calls) == ("<tool_call>" in text)
    outside, position = "", 0
    for call in turn.calls:
        assert text.startswith("<tool_call>", call.token_start)
        assert call.token_start >= position
        outside += text[position : call.token_start]
        position = call.token_end
    outside += text[position:]
    assert "".join(turn.content.split()) == "".join(outside.split())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), json_values, max_size=4))
def test_any_arguments_come_back(arguments: dict[str, object]):
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments}, ensure_ascii=False)}</tool_call>"
    (call,) = parse(text).calls
    assert (call.status, dict(call.arguments)) == (ToolCallStatus.OK, arguments)


def test_an_unknown_parser_is_refused():
    with pytest.raises(InvalidRequest, match="hermes") as caught:
        get_parser("nonsense")
    assert caught.value.param == "parser"
