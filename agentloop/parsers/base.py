"""The parser protocol and its value types. A parser is a pure function of the sampled turn.

Invariants: text that a policy wrote is never executed, never raises and never disappears. Text with a call's
delimiters is a call, with status MALFORMED if it cannot be parsed; all other text is content. Parsing takes time
linear in the text.
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
"""Maximum number of parsed calls per turn. All further calls become one MALFORMED call."""

MAX_NAME_CHARS = 256

Tools: TypeAlias = Sequence[Mapping[str, JSON]]
"""Tool definitions in the OpenAI function format, or only their `function` objects."""


@dataclass(frozen=True, slots=True)
class DecodedText:
    """Token ids as text. `ends[i]` is the number of characters that the first i+1 ids fully produced."""

    text: str
    ends: tuple[int, ...]

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the token range that covers the characters `[start, end)`."""
        first = bisect_right(self.ends, start)
        last = min(bisect_left(self.ends, end) + 1, len(self.ends))
        return first, max(first, last)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A parsed turn: its text outside calls, stripped, and its calls in the order in which they were written."""

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""  # reasoning after the initial one, in formats that allow reasoning between other text
    closing: str = ""  # the text to append if the turn ends after its last call: end of the call and its section


@dataclass(frozen=True, slots=True)
class ReasoningDelimiters:
    """The delimiters of the reasoning at the beginning of a turn. The prompt may end with `open`."""

    open: str = "<think>"
    close: str = "</think>"

    def around(self, reasoning: str) -> str:
        """Return the reasoning with its delimiters and whitespace, as the family's templates write it."""
        if self == ReasoningDelimiters():
            return f"{self.open}\n{reasoning}\n{self.close}\n\n"
        return f"{self.open}{reasoning}{self.close}"


THOUGHT_MARKS = (
    ReasoningDelimiters("[THINK]", "[/THINK]"),
    ReasoningDelimiters("<seed:think>", "</seed:think>"),
    ReasoningDelimiters("<mm:think>", "</mm:think>"),
    ReasoningDelimiters("<|channel>thought", "<channel|>"),
    ReasoningDelimiters("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningDelimiters("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningDelimiters("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ReasoningDelimiters(),
)
"""The reasoning delimiters of the model families. The first pair in a template is used; the default is last."""


@dataclass(frozen=True, slots=True)
class Delimiters:
    """The delimiters of one family's turns, used to parse a turn while it is sampled.

    Text before the first delimiter of a call is content. After `closing`, later text no longer changes a
    well-formed call. All fields are consistent with the parser's `parse`.
    """

    # Delimiters that begin a call, the regular one first; "" if any text may begin a call.
    openings: tuple[str, ...]
    closing: str | None = None  # the delimiter that ends a call; None: calls are only certain at the turn's end
    leading: tuple[str, ...] = ()  # delimiters that begin a call only at the start of the content, after whitespace
    # The end of a section of calls, which belongs to the call before it (whitespace between them).
    trailing: str = ""
    headers: tuple[str, ...] = ()  # delimiters in content that are removed; the texts around them become two lines
    reasoning: ReasoningDelimiters = ReasoningDelimiters()


def segments(text: str, headers: Sequence[str]) -> list[str]:
    """Return the stripped, non-empty texts between headers."""
    pattern = "|".join(re.escape(header) for header in sorted(headers, key=len, reverse=True))
    parts = re.split(pattern, text) if pattern else [text]
    return [part for part in map(str.strip, parts) if part]


class Parser(Protocol):
    """The turn syntax of one model family. Parsing is deterministic."""

    @property
    def delimiters(self) -> Delimiters:
        """The delimiters used to parse a turn while it is sampled."""

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        """Return content and calls of a turn without its reasoning and its stop token. Never raises.

        Call ids are `call_{turn_index}_{i}`.
        """

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """Return the constraint that allows only calls of `tools`: exactly one, or one or more if `is_parallel`.

        `forced` is the only tool that may be called. Arguments must match their schemas, with or without `strict`.
        Raises InvalidRequest if the format cannot express this.
        """


class NoCallsParser:
    """The parser of models whose calls cannot be parsed and which are shown no tools: the answer is content."""

    def __init__(self, thoughts: ReasoningDelimiters, headers: tuple[str, ...] = ()) -> None:
        self.delimiters = Delimiters((), reasoning=thoughts, headers=headers)

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        return ParsedTurn("\n".join(segments(decoded.text, self.delimiters.headers)), ())

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        raise InvalidRequest(
            "tools are not supported: no parser is configured for this model (see chat.parser)", param="tools"
        )


@dataclass(eq=False)
class MalformedCall(Exception):
    """Raised if a call cannot be parsed."""

    error: str  # one line, shown to the policy
    name: str = ""  # the tool's name, if it can be parsed
    partial: str = ""  # the parsed prefix of the arguments as JSON
    at: int = 0  # the minimum end position of the call


class TurnBuilder:
    """Collects a turn's content and calls from left to right, assigns call ids and maps calls to token ranges."""

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
        """True if no further call may be added; use `add_rest` for the remaining text."""
        return len(self._calls) >= MAX_CALLS

    def add_content(self, text: str) -> None:
        self._content += segments(text, self._headers)

    def add_reasoning(self, text: str) -> None:
        if stripped := text.strip():
            self._reasoning.append(stripped)

    def add_call(
        self, start: int, end: int, name: str, arguments: Mapping[str, JSON], call_id: str = "", note: str = ""
    ) -> None:
        """Add a call with the id that the policy wrote; `note` is the deviation that a lenient parser accepted."""
        error = f"read leniently: {note}" if note else None
        self._add(start, end, ToolCall("", name, arguments, error=error, written_id=call_id))

    def add_malformed(self, start: int, end: int, malformed: MalformedCall, *, is_cut: bool = False) -> None:
        """Add a malformed call. `is_cut`: the call extends to the end of the turn and may be incomplete."""
        name, status = malformed.name[:MAX_NAME_CHARS], ToolCallStatus.MALFORMED
        text, partial = self.text[start:end], malformed.partial if is_cut and name else None
        call = ToolCall("", name, {}, status, malformed.error, text=text, partial_arguments=partial)
        self._add(start, end, call)

    def add_rest(self, start: int, num_calls: int) -> None:
        """Add all text from `start` as one malformed call. This bounds the cost of endless repetition."""
        error = f"{max(1, num_calls)} tool calls after the first {MAX_CALLS} were not parsed"
        self.add_malformed(start, len(self.text), MalformedCall(error))

    def read(
        self,
        opening: re.Pattern[str],
        read_call: Callable[[TurnBuilder, re.Match[str]], int],
        counted: str,
        position: int = 0,
    ) -> ParsedTurn:
        """Parse the turn from `position`. `read_call` adds the calls at a match of `opening` and returns their end.

        Occurrences of `counted` determine the number of calls above `MAX_CALLS`.
        """
        while (match := opening.search(self.text, position)) is not None:
            self.add_content(self.text[position : match.start()])
            if self.is_full:
                self.add_rest(match.start(), self.text.count(counted, match.start()))
                return self.finish()
            position = read_call(self, match)
        self.add_content(self.text[position:])
        return self.finish()

    def finish(self) -> ParsedTurn:
        return ParsedTurn("\n".join(self._content), tuple(self._calls), "\n".join(self._reasoning), self.closing)

    def _add(self, start: int, end: int, call: ToolCall) -> None:
        first, last = self._decoded.token_span(start, end)
        call_id = f"call_{self._turn_index}_{len(self._calls)}"
        self._calls.append(replace(call, id=call_id, token_start=first, token_end=last))
