"""Values and port of the parsers. A parser is a pure function of the sampled turn.

Invariants: what a policy writes is never executed, never raises and never vanishes. Text marked as a call is a
call, MALFORMED where it cannot be read; all other text is content. Every parser takes time linear in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from agentloop.errors import InvalidRequest
from agentloop.types import JSON, Constraint, ToolCall, ToolCallStatus

MAX_CALLS = 256
"""Calls of one turn that are read. All that follow become one MALFORMED call, whose error tells their number."""

MAX_NAME_CHARS = 256

Tools: TypeAlias = Sequence[Mapping[str, JSON]]
"""Definitions of tools in the OpenAI function format, or the functions alone."""


@dataclass(frozen=True, slots=True)
class DecodedText:
    """Token ids as text. `ends[i]` is the number of characters that the first i+1 ids fully produced."""

    text: str
    ends: tuple[int, ...]

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the tokens `[start, end)` of the characters `[start, end)`, at least one where there is any."""
        first = bisect_right(self.ends, start)
        last = min(bisect_left(self.ends, end) + 1, len(self.ends))
        return first, max(first, last)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn: its text outside calls, stripped, and its calls in the order they were written.

    `reasoning` holds the reasoning after the first one, of formats that allow it between other text. `closing` is
    the text that is missing after the last call if the turn ends there: the end of the call, or of its section.
    """

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks around the thought at a turn's beginning. The prompt may end with `open`."""

    open: str = "<think>"
    close: str = "</think>"

    def around(self, thought: str) -> str:
        """Return the thought as its family's templates write it before an answer."""
        if self == ThoughtMarks():
            return f"{self.open}\n{thought}\n{self.close}\n\n"
        return f"{self.open}{thought}{self.close}"


THOUGHT_MARKS = (
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<mm:think>", "</mm:think>"),
    ThoughtMarks("<|channel>thought", "<channel|>"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    ThoughtMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ThoughtMarks(),
)
"""The marks that families have for thoughts; those of most of them last."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one family's turns, by which a turn is read before its end.

    Text before the first mark of a call is content. A well-formed call behind `closing` stays as it is, whatever
    follows. All fields agree with the parser's `parse`.
    """

    openings: tuple[str, ...]  # marks of a call, first that of a well-written one; "" if any text may be one
    closing: str | None = None  # the mark that ends a call; None: calls are certain at the turn's end only
    leading: tuple[str, ...] = ()  # marks of a call at the beginning of the content only, behind blanks
    trailing: str = ""  # belongs to the call before it, blanks between: the end of a section of calls
    headers: tuple[str, ...] = ()  # stand around content and are none; what is before and behind is two lines
    thoughts: ThoughtMarks = ThoughtMarks()


def segments(text: str, headers: Sequence[str]) -> list[str]:
    """Return the text between headers, stripped, without the empty parts."""
    pattern = "|".join(re.escape(header) for header in sorted(headers, key=len, reverse=True))
    parts = re.split(pattern, text) if pattern else [text]
    return [part for part in map(str.strip, parts) if part]


class Parser(Protocol):
    """The turn syntax of one model family. Equal texts have equal results."""

    @property
    def marks(self) -> Marks:
        """The marks by which a turn is read while it is sampled."""

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        """Return content and calls of a turn behind its thought, without its stop token. Never raises on any text.

        Call ids are `call_{turn_index}_{i}`.
        """

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """Return the constraint to calls of `tools` and nothing else: one or more, exactly one unless
        `is_parallel`. `forced` is the only tool that may be called. Arguments fit their schemas, `strict` or not.
        Raises InvalidRequest if no such turn can be written."""


class NoCallsParser:
    """The parser of models without readable calls, which are shown no tools: text behind the thought is content."""

    def __init__(self, thoughts: ThoughtMarks, headers: tuple[str, ...] = ()) -> None:
        self.marks = Marks((), thoughts=thoughts, headers=headers)

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        return ParsedTurn("\n".join(segments(decoded.text, self.marks.headers)), ())

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        raise InvalidRequest("this service reads no tool calls: its model has no parser", param="tools")


@dataclass(eq=False)
class MalformedCall(Exception):
    """The reason why a call cannot be read."""

    error: str  # in one line, for the policy
    name: str = ""  # the tool's, if it can be read
    partial: str = ""  # JSON of the arguments, as far as they can be read
    at: int = 0  # the call goes up to there at least


class TurnBuilder:
    """The collector of a turn from left to right; it numbers the calls and finds their tokens."""

    def __init__(self, decoded: DecodedText, turn_index: int, headers: Sequence[str] = ()) -> None:
        self.text = decoded.text
        self._headers = headers
        self._decoded = decoded
        self._turn_index = turn_index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self.closing = ""  # as in `ParsedTurn`

    @property
    def is_full(self) -> bool:
        """True once no further call is read: `add_rest` takes the remainder."""
        return len(self._calls) >= MAX_CALLS

    def add_content(self, text: str) -> None:
        self._content += segments(text, self._headers)

    def add_reasoning(self, text: str) -> None:
        if stripped := text.strip():
            self._reasoning.append(stripped)

    def add_call(
        self, start: int, end: int, name: str, arguments: Mapping[str, JSON], call_id: str = "", note: str = ""
    ) -> None:
        """Add a call with the id that was written; `note` is what a lenient parser forgave."""
        error = f"read leniently: {note}" if note else None
        self._add(start, end, ToolCall("", name, arguments, error=error, written_id=call_id))

    def add_malformed(self, start: int, end: int, malformed: MalformedCall, *, is_cut: bool = False) -> None:
        """Add a malformed call. `is_cut`: the turn's end alone ended it."""
        name, status = malformed.name[:MAX_NAME_CHARS], ToolCallStatus.MALFORMED
        text, partial = self.text[start:end], malformed.partial if is_cut and name else None
        call = ToolCall("", name, {}, status, malformed.error, text=text, partial_arguments=partial)
        self._add(start, end, call)

    def add_rest(self, start: int, num_calls: int) -> None:
        """Add all calls from `start` on as one, which bounds what a policy that repeats without end can cost."""
        error = f"{max(1, num_calls)} tool calls after the first {MAX_CALLS} were not read"
        self.add_malformed(start, len(self.text), MalformedCall(error))

    def read(
        self,
        opening: re.Pattern[str],
        read_call: Callable[[TurnBuilder, re.Match[str]], int],
        counted: str,
        position: int = 0,
    ) -> ParsedTurn:
        """Read the turn from `position` on. `read_call` adds the calls behind a mark and returns where they end.

        Calls that are too many are numbered by `counted`.
        """
        while (found := opening.search(self.text, position)) is not None:
            self.add_content(self.text[position : found.start()])
            if self.is_full:
                self.add_rest(found.start(), self.text.count(counted, found.start()))
                return self.finish()
            position = read_call(self, found)
        self.add_content(self.text[position:])
        return self.finish()

    def finish(self) -> ParsedTurn:
        return ParsedTurn("\n".join(self._content), tuple(self._calls), "\n".join(self._reasoning), self.closing)

    def _add(self, start: int, end: int, call: ToolCall) -> None:
        first, last = self._decoded.token_span(start, end)
        call_id = f"call_{self._turn_index}_{len(self._calls)}"
        self._calls.append(replace(call, id=call_id, token_start=first, token_end=last))
