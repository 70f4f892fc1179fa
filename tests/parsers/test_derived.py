"""Formats derived from templates: parsed complete, cut and streamed alike, enforced by the grammar, or refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.errors import ParserMismatch
from agentloop.generation.round_trip import DERIVED, derived_parser, round_trip_test
from agentloop.generation.stream_splitter import TurnSplitter
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import DecodedText, segments
from agentloop.parsers.call_format import FormatParser
from agentloop.parsers.derive import Underivable, derive
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.types import Message, ToolCall, ToolCallStatus
from tests.parsers.test_call_constraint import BOOKED, BOOKING, allows, walk
from tests.parsers.writing import COMMON_FRAGMENTS, made, read_streamed
from tests.support.families import table
from tests.support.families.derived import NAMES, derived_chat

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}
    for name, parameters in (
        ("now", {"type": "object", "properties": {}}),
        ("book", BOOKING),
        ("order", BOOKING),
        (
            "jot",
            {
                "type": "object",
                "properties": {"level": {"type": "integer"}, "note": {"type": "string", "maxLength": 9}},
            },
        ),
    )
]
JOTTED = {"level": 3, "note": "é it"}
SHORT_FUZZ, LONG_FUZZ = 100, 1000  # turns per family


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chat(family: str) -> tuple[TemplateRenderer, FormatParser]:
    return derived_chat(family)


def rendered(chat: tuple[TemplateRenderer, FormatParser], *calls: tuple[str, dict]) -> str:
    """Return the turn of these calls as the model samples it, without the delimiters of reasoning and text."""
    renderer, marks = chat[0], chat[1].delimiters
    asked = Message("user", "Well?")
    made = tuple(ToolCall(f"call0000{index}", name, arguments) for index, (name, arguments) in enumerate(calls))
    answers = [Message("tool", "noon", tool_call_id=call.id, name=call.name) for call in made]
    prompt = renderer.decode(renderer.render([asked], TOOLS))
    whole = renderer.decode(renderer.render([asked, Message("assistant", "", made), *answers], TOOLS))
    start = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    ends = [at for stop in renderer.facts.stop_tokens if (at := whole.find(stop, start)) >= 0]
    turn = whole[start : min(ends)]
    # the prompt has another delimiter there with the same beginning
    begun = re.search(r"<[^<>\s]*$", whole[:start])
    turn = (begun[0] if begun is not None and start < len(prompt) else "") + turn
    thoughts = "|".join(map(re.escape, (marks.reasoning.open, marks.reasoning.close)))
    return "\n".join(segments(re.sub(rf"^(?:\s*(?:{thoughts}))*", "", turn), marks.headers))


def read(
    reader: TurnReader, text: str, pieces: Sequence[str] | None = None, *, reads_calls: bool = True
) -> Message:
    """Parse the complete turn, and check that the turn streamed in these pieces is the same."""
    return read_streamed(reader, text, Reading(TOOLS, 0, reads_calls, True, False), pieces or list(text))


def test_calls_are_read_as_they_were_written_and_cut_ones_are_no_others(family, chat) -> None:
    renderer, parser = chat
    round_trip_test(renderer, parser, DERIVED)
    reader = TurnReader(renderer, parser)
    calls = [("book", BOOKED), ("now", {}), ("order", {"note": "a\nb <x> 日本", "level": 3, "seats": []})]
    text = rendered(chat, *calls)
    message = read(reader, text)
    assert (made(message), message.content) == (calls, "")
    for end in range(0, len(text), 3):
        whole = [one for one in read(reader, text[:end]).tool_calls if one.status is ToolCallStatus.OK]
        assert made(Message("assistant", "", tuple(whole))) == calls[: len(whole)]


@pytest.mark.parametrize("num_turns", [SHORT_FUZZ, pytest.param(LONG_FUZZ, marks=pytest.mark.long)])
def test_what_is_streamed_is_what_is_read_whole(family, chat, num_turns: int) -> None:
    renderer, parser = chat
    reader, choose = TurnReader(renderer, parser), random.Random(family)
    wholes = [rendered(chat, ("now", {})), rendered(chat, ("book", BOOKED), ("now", {}))]
    marks = [
        *parser.delimiters.openings,
        parser.form.end,
        *parser.form.section,
        parser.form.separator,
        "now",
        "book",
    ]
    marks += parser.delimiters.headers
    for _ in range(num_turns):
        text = ""
        for _ in range(choose.randint(1, 12)):
            cut = choose.choice(wholes)
            ends = sorted(choose.randint(0, len(cut)) for _ in range(2))
            parts = (*COMMON_FRAGMENTS, *marks, cut, cut, cut[: ends[1]], cut[slice(*ends)], "Well, ")
            text += choose.choice(parts)
        size = choose.choice((1, 2, 7, 31))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        message = read(reader, text, pieces)
        answer = read(reader, text, pieces, reads_calls=False).content
        assert not any(header in part for header in parser.delimiters.headers for part in answer.split("\n"))
        position, outside = 0, ""
        for call in reader.parse(
            DecodedText(text, tuple(range(1, len(text) + 1))), Reading(TOOLS, 0, True, False)
        ).calls:
            assert position <= call.token_start < call.token_end
            position = call.token_end
        assert all(call.status is ToolCallStatus.OK or call.error for call in message.tool_calls), outside


def test_an_answer_is_streamed_where_its_header_begins_as_a_call_does() -> None:
    splitter = TurnSplitter(TurnReader(*derived_chat("muse_glimmer")), Reading(TOOLS, 0, True, True, False))
    assert "".join(splitter.add(piece).content for piece in (" to=us", "er<|mess", "age|>A bi", "rd.")) == "A bird."


@pytest.mark.parametrize("is_parallel", [True, False])
def test_what_the_grammar_writes_is_read(family, chat, is_parallel: bool) -> None:
    renderer, parser = chat
    constraint = parser.call_constraint(TOOLS, forced=None, is_parallel=is_parallel)
    for seed in range(4):
        text = walk(constraint, seed)
        message = read(TurnReader(renderer, parser), text)
        assert message.content == ""
        assert [call.error for call in message.tool_calls if call.error] == []
        assert len(message.tool_calls) == 1 or is_parallel


def test_what_the_template_writes_is_allowed(family, chat) -> None:
    parser = chat[1]
    one = parser.call_constraint(TOOLS, forced="jot", is_parallel=False)
    assert allows(one, rendered(chat, ("jot", JOTTED)))
    assert not allows(one, rendered(chat, ("now", {})))
    if not parser.form.is_bare:
        many = parser.call_constraint(TOOLS, forced=None, is_parallel=True)
        assert allows(many, rendered(chat, ("jot", JOTTED), ("now", {}), ("jot", {"note": "b"})))


def test_what_cannot_be_told_apart_is_refused_with_the_text() -> None:
    with pytest.raises(Underivable, match="no delimiter distinguishes"):
        derive(lambda calls: ", ".join(f"{c.name} {json.dumps(dict(c.arguments))}" for c in calls))
    with pytest.raises(Underivable, match="omits the call from the assistant turn"):
        derive(lambda calls: "I call.")
    with pytest.raises(Underivable, match="does not show its arguments"):
        derive(lambda calls: "".join(f"<c>{c.name}</c>" for c in calls))
    with pytest.raises(Underivable, match="contain the tool name or an argument name"):
        derive(
            lambda calls: "".join(
                f"<c>{c.name}{''.join(f'<{k}>{v}]</{k}>' for k, v in c.arguments.items())}</c>" for c in calls
            )
        )
    with pytest.raises(Underivable, match="a parameter has no delimiters"):
        derive(
            lambda calls: "".join(f"<c>{c.name} {' '.join(map(' '.join, c.arguments.items()))}</c>" for c in calls)
        )


def test_a_template_that_loses_a_part_of_a_call_is_refused_by_the_difference(tmp_path: Path) -> None:
    row = replace(table.FAMILY["qwen2_5"], name="lossy")
    lossy = table.FAMILY["qwen2_5"].template.replace(
        "tool_call.arguments | tojson", "{'word': tool_call.arguments.word} | tojson"
    )
    assert lossy != table.FAMILY["qwen2_5"].template
    renderer = TemplateRenderer.from_directory(
        table.write_model(tmp_path, row, lossy), RenderSettings(on_unstable=OnUnstable.FORK)
    )
    with pytest.raises(ParserMismatch, match="cannot be derived"):
        derived_parser(renderer)
