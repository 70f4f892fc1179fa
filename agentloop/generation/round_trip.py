"""The round-trip test of a model's chat format: its parser must read the turns that its renderer writes.

A conversation with reasoning, a tool call and an answer is rendered. The assistant's turns are cut out of it as the
model would have sampled them, and parsed. A parser of another model family would take a call for the final answer
or for a malformed call, and the run would train on the result. The test takes milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import TypeAlias

from agentloop.errors import AgentLoopError, ParserMismatch, TemplateError
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.arguments import delimiters_of
from agentloop.parsers.base import THOUGHT_MARKS, DecodedText, NoCallsParser, Parser, ReasoningDelimiters
from agentloop.parsers.by_name import FORMATS, PARSER_NAMES, get_parser
from agentloop.parsers.call_format import FormatParser
from agentloop.parsers.derive import NAMES, PROBES, Underivable, derive
from agentloop.rendering.port import Renderer
from agentloop.rendering.prompt_text import reasoning_delimiters
from agentloop.rendering.template_check import CLOSED, OPENED, QUESTION, TOOL_NAME, TOOLS
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus

_ARGUMENTS: Mapping[str, JSON] = {"word": "rook", "limit": 3}
# Some templates insist on nine letters and digits; some models write the name as a part of the id.
_CALL_IDS = ("call00000", f"functions.{TOOL_NAME}:0")
_ASKED = Message("user", QUESTION)
_CALLING = Message("assistant", "I look the word up.", reasoning="A rook may be two things.")
_ANSWER = Message("assistant", "A bird, and a piece.", reasoning="Both of them are meant.")
_MARK_BEGUN = re.compile(r"[<\[][^<>\[\]\s]*$")  # a mark without its end
_LAST_MARK = re.compile(r"(?:(?:<[^<>\s]+>\w+)?<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
_CLOSED = re.compile(rf"\s*(?:{OPENED})?\s*(?:{CLOSED})")
_MARKED = re.compile(r"\S*[>\]]")  # a mark around content
_INK = re.compile(r"\S")
_MAX_TURN_CHARS = 600
DERIVED = "derived"
_TYPES = ("string", "integer", "boolean", "array", "object")
_PROBE_TOOLS: tuple[Mapping[str, JSON], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Search for the word.",
            "parameters": {
                "type": "object",
                "properties": {
                    **{key: {"type": "string"} for key in PROBES[0].arguments},
                    **{kind: {"type": kind} for kind in _TYPES},
                },
            },
        },
    }
    for name in NAMES
)
_PROVING = (
    ToolCall("prb4x0004", NAMES[1], {"string": 'né "q"\n{x} 日本', "integer": -3, "boolean": True}),
    ToolCall("prb4x0005", NAMES[0], {}),
    ToolCall("prb4x0006", NAMES[0], {"array": [1, "a", {"b": [None, False]}], "object": {"é": {"c": "</x>"}}}),
    ToolCall("prb4x0007", NAMES[0], {"string": "3"}),
)


@dataclass(frozen=True, slots=True)
class RoundTripTest:
    """The results of a passed test. `call_text` is empty if the model's turns have no calls."""

    reasoning: bool  # reasoning was written and parsed
    opens_reasoning: bool  # the prompt begins the reasoning
    call_text: str = ""  # the turn with a call, as the model would sample it


@dataclass(frozen=True, slots=True)
class _RenderedTurn:
    """An assistant turn as the model would sample it, its message, and the text before it."""

    text: str
    written: Message
    before: str


_Turns: TypeAlias = tuple[tuple[_RenderedTurn, ...], _RenderedTurn]
"""The calling turn in every form that the renderer has, none if it shows no tools; and an answer."""


def round_trip_test(renderer: Renderer, parser: Parser, parser_name: str) -> RoundTripTest:
    """Parse a rendered call, reasoning and answer.

    Raises ParserMismatch, which names the parser, the text, and the built-in parsers that read it, and
    TemplateError if nothing can be rendered.
    """
    reader, turns = TurnReader(renderer, parser), _turns(renderer)
    read = _in_one_form(reader, turns)
    for turn in read:
        if (problem := _problem(reader, turn)) is not None:
            raise ParserMismatch(_mismatch(renderer, turns, parser_name, turn, problem), param="parser")
    return RoundTripTest(
        reasoning=any(turn.written.reasoning for turn in read),
        opens_reasoning=reader.is_thinking(renderer.render([_ASKED], ())),
        call_text=read[0].text if len(read) > 1 else "",
    )


def without_calls(renderer: Renderer) -> tuple[NoCallsParser, RoundTripTest]:
    """Return a parser of reasoning without calls, by the renderer's marks, and the results.

    Raises TemplateError if nothing can be rendered.
    """
    thoughts, headers, shows_reasoning = _delimiters_of(renderer)
    parser = NoCallsParser(thoughts, headers)
    opens = TurnReader(renderer, parser).is_thinking(renderer.render([_ASKED], ()))
    return parser, RoundTripTest(reasoning=shows_reasoning, opens_reasoning=opens)


def _delimiters_of(renderer: Renderer) -> tuple[ReasoningDelimiters, tuple[str, ...], bool]:
    """Return the marks around an answer's reasoning and its content, and True if reasoning is rendered."""
    (_, turn), facts = _turns(renderer), renderer.facts
    thought, content = turn.written.reasoning, turn.written.content
    plain = _cut(renderer, [_ASKED], replace(_ANSWER, reasoning=""), [], ())
    header, _, footer = (part.strip() for part in plain.text.partition(content))
    header = _CLOSED.sub("", header).strip()
    before, _, behind = turn.text.partition(content)[0].partition(thought) if thought else ("", "", "")
    if not before.strip() and (opened := _LAST_MARK.search(turn.before)) is not None:
        before = opened[0]
    before, behind = before.strip(), behind.strip()
    header = header if not thought or (behind.endswith(header) and behind != header) else ""
    headers = tuple(mark for mark in (header, *delimiters_of(footer)) if _MARKED.fullmatch(mark))
    behind = behind.removesuffix(header).strip() if header in headers else behind
    known = (
        marks for marks in THOUGHT_MARKS if turn.before.rstrip().endswith(marks.open) and marks.close in behind
    )
    found = ReasoningDelimiters(before, behind) if before and behind else next(known, None) if thought else None
    return found or reasoning_delimiters(facts.template_source, facts.literals), headers, found is not None


def derived_parser(renderer: Renderer) -> tuple[str, FormatParser]:
    """Derive a parser from the renderer's turns and test it. Returns it with its name, a built-in one if it is
    equal.

    Raises ParserMismatch with the difference.
    """
    marks, headers, _ = _delimiters_of(renderer)
    plain = TurnReader(renderer, NoCallsParser(marks, headers))

    def cut(calls: Sequence[ToolCall], content: str = "") -> _RenderedTurn:
        replies = [Message("tool", "a bird", tool_call_id=call.id, name=call.name) for call in calls]
        written = Message("assistant", content, tuple(calls))
        return _cut(renderer, [_ASKED], written, replies, _PROBE_TOOLS)

    def write(calls: Sequence[ToolCall]) -> str:
        return _read(plain, cut(calls), ()).content.strip()

    try:
        parser = FormatParser(marks, derive(write), headers=headers)
        reader = TurnReader(renderer, parser)
        for calls in (*((call,) for call in _PROVING), _PROVING[:2]):
            for content in ("", _CALLING.content):
                try:
                    turn = cut(calls, content)
                except AgentLoopError:
                    continue  # the template never renders such a turn
                is_shown = all(call.name in turn.text for call in calls)
                if (content and parser.form.is_bare) or not (is_shown or (len(calls) == 1 and not content)):
                    continue  # the template renders one call per turn, or calls only without text
                if (problem := _problem(reader, turn, _PROBE_TOOLS)) is not None:
                    raise Underivable(
                        f"the parser derived from the template misreads {turn.text[:_MAX_TURN_CHARS]!r}: it gives "
                        f"{problem}"
                    )
    except (Underivable, TemplateError) as error:
        raise ParserMismatch(f"its calls cannot be derived: {error}", param="parser") from error
    known = (name for name, forms in FORMATS.items() if forms == (parser.form,) and marks == ReasoningDelimiters())
    return next(known, DERIVED), parser


def parsers_that_fit(renderer: Renderer) -> tuple[str, ...]:
    """Return the names of the built-in parsers that pass the test with this renderer."""
    return _fitting(renderer, _turns(renderer))


def _fitting(renderer: Renderer, turns: _Turns) -> tuple[str, ...]:
    readers = {name: TurnReader(renderer, get_parser(name)) for name in PARSER_NAMES}
    return tuple(
        name
        for name, reader in readers.items()
        if all(_problem(reader, turn) is None for turn in _in_one_form(reader, turns))
    )


def _in_one_form(reader: TurnReader, turns: _Turns) -> list[_RenderedTurn]:
    """Return the first form of the calling turn that is parsed, or else the first form, and the answer."""
    calling, answer = turns
    read = (turn for turn in calling if _problem(reader, turn) is None)
    return [*filter(None, [next(read, calling[0] if calling else None)]), answer]


def _turns(renderer: Renderer) -> _Turns:
    answer, thought = _cut(renderer, [_ASKED], _ANSWER, [], ()), _CALLING.reasoning
    source, before = renderer.facts.template_source, answer.before.rstrip()
    written = [marks.open for marks in THOUGHT_MARKS if marks.open in answer.text]
    if source and any(mark not in source or before.endswith(mark) for mark in written):
        # The template renders no reasoning, so the renderer wrote it into the content: not the model's format.
        answer, thought = _cut(renderer, [_ASKED], replace(_ANSWER, reasoning=""), [_ASKED], ()), ""
    shows_calls = renderer.facts.supports_tools and renderer.facts.shows_calls
    return _calling_turns(renderer, thought) if shows_calls else (), answer


def _calling_turns(renderer: Renderer, thought: str) -> tuple[_RenderedTurn, ...]:
    """Cut out the calling turn, in the forms that the template accepts. Raises TemplateError if it accepts none.

    The forms differ in the call's id, and in text next to the call, which gpt-oss has only without reasoning.
    """
    failure: AgentLoopError | None = None
    turns = []
    for call_id, content in product(_CALL_IDS, (_CALLING.content, "")):
        call = ToolCall(call_id, TOOL_NAME, _ARGUMENTS)
        reply = Message("tool", "a bird", tool_call_id=call_id, name=TOOL_NAME)
        written = replace(_CALLING, content=content, reasoning=thought, tool_calls=(call,))
        try:
            turns.append(_cut(renderer, [_ASKED], written, [reply], TOOLS))
        except AgentLoopError as error:
            failure = error
    if not turns and failure is not None:
        raise failure
    return tuple(turns)


def _cut(
    renderer: Renderer,
    before: Sequence[Message],
    written: Message,
    after: Sequence[Message],
    tools: Sequence[Mapping[str, JSON]],
) -> _RenderedTurn:
    """Cut a turn out of the rendering of a conversation: the text from its prompt to its stop token."""
    prompt = renderer.decode(renderer.render(before, tools))
    whole = renderer.decode(renderer.render([*before, written, *after], tools))
    if not whole.startswith(prompt) and written.reasoning:
        # The prompt closes empty reasoning, or reasoning is rendered elsewhere only: this turn has none.
        written = replace(written, reasoning="")
        whole = renderer.decode(renderer.render([*before, written, *after], tools))
    num_shared, start = _alike(prompt, whole)
    if num_shared < len(prompt) and (begun := _MARK_BEGUN.search(whole[:start])) is not None:
        num_shared, start = num_shared - len(begun[0]), begun.start()  # marks with equal first characters
    text = whole[start : _end_of_turn(renderer, prompt, whole, start)]
    shown = prompt[:num_shared]
    if num_shared < len(prompt) and (closed := _CLOSED.match(text)) is not None:
        shown, text = shown + closed[0], text[closed.end() :]  # the prompt closes the reasoning differently
    if written.reasoning not in text:  # the template renders no reasoning
        written = replace(written, reasoning="")
    if written.tool_calls and written.content not in text:  # some templates drop text next to a call
        written = replace(written, content="")
    return _RenderedTurn(text, written, shown)


def _end_of_turn(renderer: Renderer, prompt: str, whole: str, start: int) -> int:
    """Return the position of the turn's stop token, or of the next generation prompt."""
    found = [whole.find(stop, start) for stop in renderer.facts.stop_tokens]
    num_generation_prompt = _num_common(prompt[::-1], whole[::-1])
    return min((end for end in found if end >= 0), default=len(whole) - num_generation_prompt)


def _alike(prompt: str, whole: str) -> tuple[int, int]:
    """Return the positions up to which a prompt and a rendering are equal from the question on, except blanks."""
    at, there = (max(text.find(QUESTION), 0) for text in (prompt, whole))
    pairs = zip(_INK.finditer(prompt, at), _INK.finditer(whole, there), strict=False)
    for one, other in takewhile(lambda pair: pair[0][0] == pair[1][0], pairs):
        at, there = one.end(), other.end()
    num_blanks = _num_common(prompt[at:], whole[there:])
    return at + num_blanks, there + num_blanks


def _num_common(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _read(reader: TurnReader, turn: _RenderedTurn, tools: Sequence[Mapping[str, JSON]]) -> Message:
    decoded = DecodedText(turn.text, tuple(range(1, len(turn.text) + 1)))
    is_thinking = turn.before.rstrip().endswith(reader.delimiters.reasoning.open)
    reading = Reading(tools, 0, reads_calls=bool(tools), reads_reasoning=True, is_thinking=is_thinking)
    return reader.read(decoded, reading)[0]


def _problem(reader: TurnReader, turn: _RenderedTurn, tools: Sequence[Mapping[str, JSON]] = TOOLS) -> str | None:
    """Return the difference between the parsed and the written turn; None if they are equal."""
    written = turn.written
    read = _read(reader, turn, tools if written.tool_calls else ())
    calls = [(call.name, dict(call.arguments)) for call in written.tool_calls]
    if any(call.status is ToolCallStatus.MALFORMED for call in read.tool_calls):
        return f"a malformed call: {next(call.error for call in read.tool_calls if call.error)}"
    if [(call.name, dict(call.arguments)) for call in read.tool_calls] != calls:
        parsed = ", ".join(f"{call.name}({dict(call.arguments)})" for call in read.tool_calls) or "no call"
        return f"{parsed} instead of {', '.join(f'{name}({arguments})' for name, arguments in calls)}"
    if read.reasoning.strip() != written.reasoning:
        return f"the reasoning {read.reasoning!r} instead of {written.reasoning!r}"
    if read.content.strip() != written.content:
        return f"the content {read.content!r} instead of {written.content!r}"
    return None


def _mismatch(renderer: Renderer, turns: _Turns, parser_name: str, turn: _RenderedTurn, problem: str) -> str:
    fitting = ", ".join(_fitting(renderer, turns)) or "none of the built-in ones"
    return (
        f"parser {parser_name!r} does not read this model's turns: the chat format writes "
        f"{turn.text[:_MAX_TURN_CHARS]!r}, and the parser returns {problem}; parsers that read it: {fitting}"
    )
