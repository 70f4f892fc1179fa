"""Calls as XML-like tags: typed by the schema, reported if malformed, parsed in linear time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import DecodedText, ParsedTurn
from agentloop.parsers.by_name import get_parser
from agentloop.types import ToolCallStatus
from tests.parsers.writing import check_linear_time, read_streamed
from tests.support.families.derived import derived_chat

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "is_on": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"},
    "maybe_text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "maybe_count": {"type": ["integer", "null"]},
    "color": {"enum": ["red", "blue"]},
    "level": {"$ref": "#/$defs/Level"},
    "anything": {},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Level": {"enum": [1, 2], "type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": PARAMETERS}}]


def parse(text: str) -> ParsedTurn:
    return get_parser("qwen3_coder").parse(DecodedText(text, tuple(range(1, len(text) + 1))), TOOLS, 0)


def call_text(**parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", " spaced ", " spaced "),
        ("text", "\ntwo\n\n", "\ntwo\n\n"),
        ("text", "", ""),
        ("text", "null", "null"),
        ("text", "<function=g></function> & </tool_call>", "<function=g></function> & </tool_call>"),
        ("count", "5", 5),
        ("ratio", "2.5", 2.5),
        ("is_on", "true", True),
        ("is_on", "False", False),
        ("items", "[1, 2]", [1, 2]),
        ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("maybe_text", "null", None),
        ("maybe_text", "7", "7"),
        ("maybe_count", "null", None),
        ("maybe_count", "7", 7),
        ("color", "red", "red"),
        ("level", "2", 2),
        ("anything", "[1]", [1]),
        ("anything", "a b", "a b"),
        ("undeclared", "5", "5"),
    ],
)
def test_values_have_the_schemas_type(key: str, written: str, value: object):
    turn = parse(f"Before.\n{call_text(**{key: written})}\nAfter.")
    (call,) = turn.calls
    assert (call.status, call.name, dict(call.arguments)) == (ToolCallStatus.OK, "f", {key: value})
    assert type(call.arguments[key]) is type(value)
    assert turn.content == "Before.\nAfter."


def test_the_compact_form_and_the_missing_outer_tags_are_read():
    inner = "<function=f><parameter=count>1</parameter></function>"
    for text in (f"<tool_call>{inner}</tool_call>", inner, f"<tool_call>{inner}", f"{inner}</tool_call>"):
        turn = parse(text)
        assert [(c.status, dict(c.arguments)) for c in turn.calls] == [(ToolCallStatus.OK, {"count": 1})]
        assert turn.content == ""
    assert [c.status for c in parse(f"<tool_call>{inner}\n{inner}</tool_call>").calls] == [ToolCallStatus.OK] * 2


def test_two_calls_have_their_spans():
    first, second = call_text(text="a"), call_text(count="2")
    text = f"x {first}\n{second} y"
    assert [text[c.token_start : c.token_end] for c in parse(text).calls] == [first, second]
    assert [c.id for c in parse(text).calls] == ["call_0_0", "call_0_1"]


@pytest.mark.parametrize(
    ("broken", "name", "error"),
    [
        ("<tool_call>junk</tool_call>", "", "<function=...>"),
        ("<tool_call></tool_call>", "", "<function=...>"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", "<function=...>"),
        ("<tool_call><function= ></function></tool_call>", "", "<function=...>"),
        ("<tool_call><function=f>junk</function></tool_call>", "f", "expected <parameter=... or "),
        ("<tool_call><function=f><parameter=text>1</function></tool_call>", "f", "no </parameter>"),
        ("<tool_call><function=f><parameter=text>1</parameter></tool_call>", "f", "</function>"),
        (
            "<tool_call><function=f><parameter=count>x</parameter></function></tool_call>",
            "f",
            "type that its schema",
        ),
        (
            "<tool_call><function=f><parameter=ratio>NaN</parameter></function></tool_call>",
            "f",
            "type that its schema",
        ),
        (
            "<tool_call><function=f><parameter=is_on>__import__('os')</parameter></function></tool_call>",
            "f",
            "type",
        ),
        (call_text(text="1").replace("</function>", "<parameter=text>2</parameter></function>"), "f", "repeated"),
    ],
)
def test_a_call_that_cannot_be_read_is_reported(broken: str, name: str, error: str):
    turn = parse(f"before {broken} after {call_text(text='1')}")
    assert [call.status for call in turn.calls] == [ToolCallStatus.MALFORMED, ToolCallStatus.OK]
    assert turn.calls[0].name == name
    assert turn.calls[0].error is not None
    assert error in turn.calls[0].error
    assert "\n" not in turn.calls[0].error
    assert turn.content == "before\nafter"


def test_what_the_token_limit_cut_is_reported():
    whole = call_text(text="1")
    for end in range(len("<tool_call>"), whole.index("</function>")):
        (call,) = parse(whole[:end]).calls
        assert call.status is ToolCallStatus.MALFORMED


def test_an_unclosed_call_does_not_hide_the_next_one():
    turn = parse(f"<tool_call><tool_call><function=f>{call_text(text='1')}")
    assert [c.status for c in turn.calls] == [ToolCallStatus.MALFORMED, ToolCallStatus.MALFORMED, ToolCallStatus.OK]


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        ("", "<tool_call>", ""),
        ("", "<function=", ""),
        ("", "<tool_call><function=a>", ""),
        ("", "<tool_call><function=a><parameter=x>", ""),
        ("", "<tool_call><function=a><parameter=x></function></tool_call>", "</parameter>"),
        ("", "<tool_call><function=a><parameter=x>1</parameter></function></tool_call>", ""),
        ("<tool_call><function=f><parameter=items>", "[", "</parameter></function></tool_call>"),
        ("<tool_call><function=a>", "<parameter=x>1</parameter>", ""),
        ("<tool_call><function=a><parameter=x>", "</function> ", ""),
        ("<tool_call>", " ", ""),
        ("<function=", "a", ""),
    ],
)
def test_hostile_text_takes_linear_time(head: str, unit: str, tail: str):
    check_linear_time("qwen3_xml", head, unit, tail, TOOLS)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=count>",
        "</parameter>",
        "1",
        "\n",
        "x ",
    ]
)


@pytest.mark.slow
@given(st.lists(FRAGMENTS | st.text(max_size=4), max_size=30).map("".join))
def test_no_text_raises_and_no_call_vanishes(text: str):
    turn = parse(text)
    assert bool(turn.calls) == ("<tool_call>" in text or "<function=" in text)
    outside, position = "", 0
    for call in turn.calls:
        assert text.startswith(("<tool_call>", "<function="), call.token_start)
        assert call.token_start >= position
        outside += text[position : call.token_start]
        position = call.token_end
    outside += text[position:]
    assert "".join(turn.content.split()) == "".join(outside.split())


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "</parameter>" not in text))
def test_any_text_value_comes_back(value: str):
    (call,) = parse(call_text(text=value)).calls
    assert dict(call.arguments) == {"text": value}


FORMATS: dict[str, tuple[str, str, str, str]] = {  # start and end of a call, start of a parameter and its end
    "qwen3_xml": (
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        "<parameter=KEY>\n",
        "\n</parameter>\n",
    ),
    "glm45": ("<tool_call>NAME\n", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        "</invoke>\n</minimax:tool_call>",
        '<parameter name="KEY">',
        "</parameter>\n",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_value_that_was_not_closed_is_never_executed(name: str) -> None:
    renderer, derived = derived_chat("minimax_m2")
    reader = TurnReader(renderer, derived if name == "minimax_m2" else get_parser(name))
    begin, end, key, close = FORMATS[name]
    path, text, nested = key.replace("KEY", "path"), key.replace("KEY", "text"), key.replace("KEY", "text")
    save, now = (begin.replace("NAME", one) for one in ("save", "now"))
    whole = f"{save}{path}x{close}{text}y{close}{end}"
    broken = [
        f"{save}{path}x\n{text}y{close}{end}",  # the value is not closed
        f"{save}{path}x\n{text}y{close}",
        f"{save}{path}x\n{end}",
        f"{save}{path}x",
        f"{save}{path}x\n{text.rstrip()[:-1]}\ny{close}{end}",  # no complete delimiter of the next parameter either
        f"{save}{path}{now}{end}{close}{end}",  # a complete call inside a value
        f"{save}{path}{now}{nested}1{close}{end}{close}{end}",
        f"{save}{path}see {nested}1{close} there{close}{end}",
    ]
    for turn in broken:
        reading = Reading(TOOLS, 0, True, False, False)
        message = read_streamed(reader, turn, reading, list(turn), [turn[:25], turn[25:]])
        assert [call.status for call in message.tool_calls] == [ToolCallStatus.MALFORMED], turn
        assert message.tool_calls[0].name == "save"
    message = read_streamed(reader, f"{broken[2]}\n{whole}", Reading(TOOLS, 0, True, False, False))
    assert [call.status for call in message.tool_calls] == [ToolCallStatus.MALFORMED, ToolCallStatus.OK]
    assert message.tool_calls[1].arguments == {"path": "x", "text": "y"}
