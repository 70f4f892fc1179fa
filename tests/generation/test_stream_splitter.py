"""Streamed pieces concatenate to the turn wherever its text is cut, and they are sent early."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.generation.stream_splitter import TurnSplitter
from agentloop.generation.turn_reader import CallDelta, Reading, TurnPiece, TurnReader, arguments_text
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.types import Message, ToolCallStatus
from tests.parsers.writing import COMMON_FRAGMENTS, FRAGMENTS, WRITE
from tests.support.engine.scripted import RENDERER

READERS = {name: TurnReader(RENDERER, get_parser(name)) for name in WRITE}
HERMES = READERS["hermes"]
WITH_CALLS = Reading((), 2, True, True, False)


def call(name: str = "add", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def xml(name: str = "add", value: str = "1") -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def whole(reader: TurnReader, text: str, reading: Reading) -> Message:
    return reader.read(DecodedText(text, tuple(range(1, len(text) + 1))), reading)[0]


def split(reader: TurnReader, pieces: list[str], reading: Reading = WITH_CALLS) -> list[TurnPiece]:
    splitter = TurnSplitter(reader, reading)
    increments = [splitter.add(piece) for piece in pieces]
    return [*increments, splitter.finish(whole(reader, "".join(pieces), reading))]


def check(reader: TurnReader, pieces: list[str], reading: Reading) -> None:
    increments, message = split(reader, pieces, reading), whole(reader, "".join(pieces), reading)
    assert "".join(i.content for i in increments) == message.content
    assert "".join(i.reasoning for i in increments) == message.reasoning
    deltas = [delta for i in increments for delta in i.calls]
    expected = []
    for index, made in enumerate(message.tool_calls):
        expected += [CallDelta(index, made.id, made.name), CallDelta(index, arguments=arguments_text(made))]
    assert deltas == expected


def parts(parser: str) -> st.SearchStrategy[str]:
    marks, write = get_parser(parser).delimiters, WRITE[parser]
    calls = (
        write([("add", {})]),
        write([("é", {"a": "</tool_call>"}), ("sub", {})]),
        write([("f", {"a": marks.openings[0]})]),
    )
    thoughts = (marks.reasoning.open, marks.reasoning.close, *marks.headers)
    blanks = ("\t\n ", "Hello there.", "\ufffd", " " * 9)
    marked = (*marks.openings, *marks.leading, marks.closing or "", marks.trailing)
    half = tuple(mark[: len(mark) // 2] for mark in (*thoughts, *marked))
    return st.sampled_from((*FRAGMENTS[parser], *COMMON_FRAGMENTS, *calls * 2, *thoughts, *marked, *half, *blanks))


readings = st.builds(Reading, st.just(()), st.just(2), st.booleans(), st.booleans(), st.booleans())


@pytest.mark.slow
@pytest.mark.parametrize("parser", READERS)
@settings(max_examples=60)
@given(data=st.data())
def test_increments_concatenate_to_the_turn(parser: str, data: st.DataObject):
    text = data.draw(st.lists(parts(parser), max_size=14).map("".join))
    sizes, reading = data.draw(st.lists(st.integers(0, 12), max_size=60)), data.draw(readings)
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    check(READERS[parser], [*pieces, text], reading)


def test_every_part_comes_as_soon_as_it_is_certain():
    text = f"<think>\nhm \n</think>\n Hi <b> {call(a=1)} and\n{call('sub')}  <tool_call>{{bad}}</tool_call> rest"
    seen: list[object] = []
    for increment in split(HERMES, list(text)):
        seen += [("thought", c) for c in increment.reasoning] + [("text", c) for c in increment.content]
        seen += increment.calls
    after = [CallDelta(2, "call_2_2", ""), CallDelta(2, arguments="<tool_call>{bad}</tool_call>")]
    assert seen == [
        *(("thought", c) for c in "hm"),
        *(("text", c) for c in "Hi <b>"),
        *(CallDelta(0, "call_2_0", "add"), CallDelta(0, arguments='{"a":1}')),
        *(("text", c) for c in "\nand"),
        *(CallDelta(1, "call_2_1", "sub"), CallDelta(1, arguments="{}")),
        *(("text", c) for c in "\nrest"),
        *after,
    ]


def test_the_beginning_of_a_mark_is_held_until_it_is_none():
    splitter = TurnSplitter(READERS["qwen3_xml"], WITH_CALLS)
    given_out = [splitter.add(piece).content for piece in ("a <too", "l", "s> <function", "s <tool_call", ">")]
    assert given_out == ["a", "", " <tools>", " <functions", ""]


def test_a_closed_call_is_given_out_at_its_last_character():
    splitter = TurnSplitter(HERMES, WITH_CALLS)
    assert all(splitter.add(char).is_empty for char in call(a="</tool_call>")[:-1])
    assert [delta.arguments for delta in splitter.add(">").calls] == ["", '{"a":"</tool_call>"}']


def times_given(parser: str, text: str) -> dict[str, int]:
    """Return the number of characters after which the first piece of each kind was sent."""
    splitter, given = TurnSplitter(READERS[parser], WITH_CALLS), {}
    for count, char in enumerate(text, 1):
        piece = splitter.add(char)
        for kind, part in (("thought", piece.reasoning), ("content", piece.content), ("call", piece.calls)):
            if part:
                given.setdefault(kind, count)
    return given


@pytest.mark.parametrize("parser", READERS)
def test_thoughts_and_content_come_at_once_in_every_format(parser: str):
    marks = READERS[parser].delimiters
    header = marks.headers[-3] if marks.headers else ""
    head = f"{marks.reasoning.open}h{marks.reasoning.close}{header}"
    assert times_given(parser, f"{head}ab c") == {
        "thought": len(marks.reasoning.open) + 1,
        "content": len(head) + 1,
    }


@pytest.mark.parametrize("parser", [name for name in READERS if get_parser(name).delimiters.closing is not None])
def test_calls_of_every_format_with_a_closing_mark_come_with_it(parser: str):
    marks, text = READERS[parser].delimiters, WRITE[parser]([("f", {"a": "x"}), ("g", {})])
    assert times_given(parser, f"{text} end")["call"] == text.index(marks.closing or "") + len(marks.closing or "")


def test_an_object_at_the_beginning_may_be_a_call_of_llama():
    assert times_given("llama3_json", ' {"answer": 4}') == {}
    assert times_given("llama3_json", 'So {"answer": 4}') == {"content": 1}


@pytest.mark.parametrize("size", [1, 50, 100_000])
def test_the_calls_beyond_the_limit_wait_and_are_reported(size: int):
    text = "\n".join(call(a=i) for i in range(300)) + " end"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    check(HERMES, pieces, WITH_CALLS)
    message = whole(HERMES, text, WITH_CALLS)
    assert len(message.tool_calls) == 257
    assert message.tool_calls[-1].status is ToolCallStatus.MALFORMED


HOSTILE = {
    "blanks": " " * 500_000,
    "openings": "<tool_call>" * 45_000,
    "closings": "<tool_call>" + "</tool_call>" * 41_000,
    "half marks": "<tool_cal" * 55_000,
    "long call": "<tool_call>" + '{"a": "' * 70_000 + "</tool_call>",
    "bad calls": "<tool_call>{</tool_call>" * 20_000,
    "good calls": call(a=1) * 7_000,
    "thought": "<think>" + "</thin" * 80_000,
    "brackets": "<tool_call>" + "[" * 500_000 + "</tool_call>",
}


def takes_less_than(bound_s: float, parser: str, text: str) -> bool:
    """Return True if splitting the text in pieces of four characters uses less CPU time, in one of two tries."""
    for _ in range(2):
        started = time.thread_time()
        check(READERS[parser], [text[i : i + 4] for i in range(0, len(text), 4)], WITH_CALLS)
        if time.thread_time() - started < bound_s:
            return True
    return False


@pytest.mark.parametrize("parser", [name for name in READERS if name not in ("hermes", "qwen3_xml")])
@pytest.mark.parametrize("num_chars", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_streams_of_every_format_take_linear_time(parser: str, num_chars: int):
    marks = get_parser(parser).delimiters
    units = (
        *marks.openings,
        *marks.headers,
        marks.reasoning.open,
        WRITE[parser]([("f", {"a": "x"})]),
        " ",
        "<",
        "x",
    )
    for unit in units:
        text = (marks.openings[0] + unit * (num_chars // len(unit)))[:num_chars]
        assert takes_less_than(num_chars / 25_000, parser, text), unit  # about a tenth of the bound


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml"])
@pytest.mark.parametrize("num_chars", [100_000, pytest.param(500_000, marks=pytest.mark.long)])
def test_hostile_text_takes_linear_time(text: str, parser: str, num_chars: int):
    """The bound is far above the linear time for pieces of four characters, and far below quadratic time."""
    assert takes_less_than(num_chars / 50_000, parser, text[:num_chars])
