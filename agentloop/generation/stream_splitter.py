"""Splits the text of a turn into the increments that a streaming client gets.

Invariant: the increments concatenate to the message that `TurnReader.read` returns for the whole text. Text is
released when no continuation can change it: reasoning and content up to a possible mark, and closed, well-formed
calls in their order. From the first other call on, the rest is released at the end, from the message. The time is
linear: a call's region is parsed a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from agentloop.errors import InvariantBroken
from agentloop.generation.turn_reader import (
    MAX_BLANKS,
    CallDelta,
    Reading,
    TurnPiece,
    TurnReader,
    arguments_text,
    by_character,
)
from agentloop.parsers.base import MAX_CALLS, ParsedTurn
from agentloop.types import Message, ToolCall, ToolCallStatus

_MAX_PARSES = 6  # per region: a string may contain the closing mark


class _Phase(Enum):
    START = "start"  # the turn may begin with reasoning
    REASONING = "thought"
    HEAD = "head"  # content may begin with a mark that counts only there
    CONTENT = "content"
    CALL = "call"  # after an opening mark
    CALL_END = "call end"  # after a closed call: the section of calls may end
    WAITING = "waiting"  # the rest is certain only at the end


class TurnSplitter:
    """Reads the text of a turn from left to right, for a streaming client."""

    def __init__(
        self, reader: TurnReader, reading: Reading, choice_index: int = 0, *, gives_calls: bool = True
    ) -> None:
        """Without `gives_calls`, `finish` releases the calls and all text after the first mark of a call."""
        self._gives_calls = gives_calls
        self._choice_index = choice_index
        self._reader = reader
        self._reading = reading
        self._delimiters = reader.delimiters
        headers = self._delimiters.headers if reading.reads_calls or reading.reads_reasoning else ()
        self._in_content = MarkSet((*(self._delimiters.openings if reading.reads_calls else ()), *headers))
        self._in_thought = MarkSet((self._delimiters.reasoning.close,))
        self._phase = _Phase.START if reading.reads_reasoning else _Phase.HEAD
        if reading.reads_reasoning and reading.is_thinking:
            self._phase = _Phase.REASONING
        self._held = ""  # text that may be the beginning of a mark
        self._thought = _Strip(start=True, end=True)
        self._is_stripped = reading.reads_calls or bool(headers)
        # The text between two calls or headers.
        self._segment = _Strip(start=self._is_stripped, end=self._is_stripped)
        self._region: list[str] = []  # from an opening mark on
        self._num_parses = 0
        self._num_calls = 0
        self._has_content = False
        self._separator = ""  # the parser joins the texts between calls with it
        self._reasoning: list[str] = []  # released, and not yet taken
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._given_reasoning: list[str] = []
        self._given_content: list[str] = []

    @property
    def is_waiting(self) -> bool:
        """True if only `finish` releases further text."""
        return self._phase is _Phase.WAITING

    def add(self, text: str) -> TurnPiece:
        """Add text. Returns the released piece, without tokens."""
        rest: str | None = text
        while rest:
            match self._phase:
                case _Phase.START:
                    rest = self._read_start(rest)
                case _Phase.REASONING:
                    rest = self._read_reasoning(rest)
                case _Phase.HEAD:
                    rest = self._read_head(rest)
                case _Phase.CONTENT:
                    rest = self._read_content(rest)
                case _Phase.CALL:
                    rest = self._read_call(rest)
                case _Phase.CALL_END:
                    rest = self._read_call_end(rest)
                case _Phase.WAITING:
                    rest = None
        return self._take()

    def finish(self, message: Message) -> TurnPiece:
        """Return the rest of `message`, the whole turn, after the released pieces; without tokens."""
        reasoning, content = "".join(self._given_reasoning), "".join(self._given_content)
        if not (message.reasoning.startswith(reasoning) and message.content.startswith(content)):
            raise InvariantBroken("the message of the turn differs from its streamed text")
        if len(message.tool_calls) < self._num_calls:
            raise InvariantBroken("a streamed tool call is not in the message of the turn")
        self._reasoning.append(message.reasoning[len(reasoning) :])
        self._content.append(message.content[len(content) :])
        for index, call in enumerate(message.tool_calls[self._num_calls :], self._num_calls):
            self._give_call(index, call)
        return self._take()

    def _take(self) -> TurnPiece:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        taken = TurnPiece(self._choice_index, content, reasoning, tuple(self._calls))
        self._given_reasoning.append(taken.reasoning)
        self._given_content.append(taken.content)
        self._reasoning, self._content, self._calls = [], [], []
        return taken

    # Each method reads `text` in its phase, and returns the rest for the next phase.

    def _read_start(self, text: str) -> str | None:
        text, opening = self._held + text, self._delimiters.reasoning.open
        bare = text.lstrip()
        may_be = len(text) - len(bare) <= MAX_BLANKS and opening.startswith(bare[: len(opening)])
        self._held = text if may_be and len(bare) < len(opening) else ""
        if self._held:
            return None
        self._phase = _Phase.REASONING if may_be else _Phase.HEAD
        return bare.removeprefix(opening) if may_be else text

    def _read_reasoning(self, text: str) -> str | None:
        before, mark, after = self._until_mark(text, self._in_thought)
        self._reasoning.append(self._thought.add(before))
        if mark is None:
            return None
        self._phase = _Phase.HEAD
        self._segment = _Strip(start=True, end=self._is_stripped)
        return after

    def _read_head(self, text: str) -> str | None:
        """Search for the marks of calls that count only at the start of the content."""
        if not self._reading.reads_calls:
            self._phase = _Phase.CONTENT
            return text
        leading, bare = self._delimiters.leading, (self._held + text).lstrip()  # leading blanks are not content
        # A header may have a leading mark's first characters.
        marks = (*leading, *self._delimiters.headers) if leading else ()
        found = max((mark for mark in marks if bare.startswith(mark)), key=len, default="")
        may_be = bool(bare) and any(len(mark) > len(bare) and mark.startswith(bare) for mark in marks)
        self._held = bare if may_be else ""
        if marks and (may_be or not bare):
            return None
        self._phase = _Phase.WAITING if found in leading else _Phase.CONTENT
        return bare

    def _read_content(self, text: str) -> str | None:
        before, mark, after = self._until_mark(text, self._in_content)
        self._give_content(before)
        if mark is None:
            return None
        if mark in self._delimiters.headers:
            self._end_segment()
            return after
        is_readable = self._gives_calls and self._delimiters.closing is not None and self._num_calls < MAX_CALLS
        self._phase = _Phase.CALL if is_readable else _Phase.WAITING
        self._region, self._num_parses = [], 0
        return mark + after

    def _read_call(self, text: str) -> str | None:
        closing = self._delimiters.closing or ""
        window = self._held + text
        self._region.append(text)
        self._held = window[-len(closing) + 1 :]
        if closing not in window:
            return None
        region = "".join(self._region)
        end, is_settled = self._give_calls(region, closing)
        rest = region[end:]
        if is_settled:
            self._held = ""
            has_end = not self._delimiters.trailing or region.endswith(self._delimiters.trailing, 0, end)
            self._phase = _Phase.CONTENT if has_end else _Phase.CALL_END
            return rest
        self._num_parses = self._num_parses + 1 if end == 0 else 1
        self._region = [rest]
        if self._num_parses >= _MAX_PARSES or self._num_calls >= MAX_CALLS:
            self._phase, self._held, self._region = _Phase.WAITING, "", []
        return None

    def _read_call_end(self, text: str) -> str | None:
        """Drop the mark that ends a section of calls, and the blanks before content."""
        text, trailing = (self._held + text).lstrip(), self._delimiters.trailing
        self._held = text if len(text) < len(trailing) and trailing.startswith(text) else ""
        if self._held or not text:
            return None
        self._phase = _Phase.CONTENT
        return text.removeprefix(trailing)

    def _give_calls(self, region: str, closing: str) -> tuple[int, bool]:
        """Release the closed calls at the region's start and the content between them.

        Returns the start of the first uncertain call and False, or the end of the last call and True.
        """
        parsed = self._parse(region)
        position = 0
        for call in parsed.calls:
            self._give_content(region[position : call.token_start])
            written = region[call.token_start : call.token_end].removesuffix(self._delimiters.trailing)
            is_closed = written.rstrip().endswith(closing)
            if call.status is not ToolCallStatus.OK or not is_closed or self._num_calls >= MAX_CALLS:
                return call.token_start, False
            self._give_call(self._num_calls, call)
            self._num_calls += 1
            self._end_segment()
            position = call.token_end
        return position, bool(parsed.calls)

    def _parse(self, region: str) -> ParsedTurn:
        """Parse the region alone. Its calls have character offsets."""
        return self._reader.parse(by_character(region), self._reading)

    def _give_content(self, text: str) -> None:
        if given := self._segment.add(text):
            self._content.append(self._separator + given)
            self._has_content, self._separator = True, ""

    def _end_segment(self) -> None:
        """Begin a new line of content, once there is any."""
        self._segment, self._separator = _Strip(start=True, end=True), "\n" if self._has_content else ""

    def _give_call(self, index: int, call: ToolCall) -> None:
        call_id = f"call_{self._reading.turn_index}_{index}"  # as `Parser.parse` numbers them
        self._calls += [CallDelta(index, call_id, call.name), CallDelta(index, arguments=arguments_text(call))]

    def _until_mark(self, text: str, marks: MarkSet) -> tuple[str, str | None, str]:
        """Return the text before the first mark, the mark, and the rest; the possible start of a mark is held
        back."""
        before, mark, after = marks.split(self._held + text)
        self._held = "" if mark is not None else after
        return before, mark, after


class MarkSet:
    """Delimiters that are searched for together."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._delimiters = marks
        self._firsts = {mark[:1] for mark in marks}
        self._longest = max(map(len, marks), default=1) - 1  # characters of an incomplete mark, at most

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Return the text before the first mark, the mark and the rest; the longest mark at a position counts.

        Without a mark the rest is the text at the end that may become one.
        """
        found = [(place, -len(mark), mark) for mark in self._delimiters if (place := text.find(mark)) >= 0]
        place, _, mark = min(found, default=(len(text), 0, ""))
        held = self._cut_mark(text, place)
        if held is not None:
            return text[:held], None, text[held:]
        return (text[:place], mark, text[place + len(mark) :]) if found else (text, None, "")

    def _cut_mark(self, text: str, place: int) -> int | None:
        """Return the start, up to `place`, of a mark that the end of the text may cut, or None."""
        for start in range(max(len(text) - self._longest, 0), min(place + 1, len(text))):
            if text[start] in self._firsts:
                end = text[start:]
                if any(len(mark) > len(end) and mark.startswith(end) for mark in self._delimiters):
                    return start
        return None


class _Strip:
    """Strips blanks at the ends of a text: releases a blank when text follows it."""

    def __init__(self, *, start: bool, end: bool) -> None:
        self._strips_start = start
        self._strips_end = end
        self._blanks: list[str] = []

    def add(self, text: str) -> str:
        if self._strips_start:
            text = text.lstrip()
            self._strips_start = not text
        if not self._strips_end:
            return text
        bare = text.rstrip()
        if not bare:
            self._blanks.append(text)
            return ""
        given = "".join(self._blanks) + bare
        self._blanks = [text[len(bare) :]]
        return given
