"""Calls that stand between an opening and a closing mark, alone or in a section with marks of its own.

Linear: a region ends at its first closing mark; at most `MAX_CLOSE_TAGS` further ones are tried (the mark may stand
inside a value), so each character is read a bounded number of times, if the body's reader takes linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from agentloop.parsers.base import DecodedText, MalformedCall, Marks, ParsedTurn, TurnBuilder
from agentloop.types import JSON

MAX_CLOSE_TAGS = 4

ReadBody: TypeAlias = Callable[[str], tuple[str, dict[str, JSON]]]
"""Name and arguments of the text between two marks. Raises MalformedCall."""

ReadId: TypeAlias = Callable[[str], str]
"""The id within a text that can be read as a call; empty if it has none."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks of one call, and of the section that calls may stand in."""

    open: str
    close: str
    section_open: str = ""
    section_close: str = ""
    shows_end: bool = True  # the text before a missing closing mark tells by itself that the call is whole
    _opening: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _after: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        one, section = re.escape(self.open), re.escape(self.section_open)
        pattern = rf"(?:{section}\s*+)?({one})|{section}" if section else f"({one})"
        object.__setattr__(self, "_opening", re.compile(pattern))
        object.__setattr__(self, "_after", re.compile(rf"\s*+{re.escape(self.section_close)}"))

    @property
    def marks(self) -> Marks:
        """The marks as the reader of a stream asks for them."""
        openings = (self.section_open, self.open) if self.section_open else (self.open,)
        return Marks(openings, self.close, trailing=self.section_close)

    def read(
        self, decoded: DecodedText, turn_index: int, read_body: ReadBody, read_id: ReadId = lambda body: ""
    ) -> ParsedTurn:
        """Read a turn. A missing closing mark is forgiven if what stands before the next call can be read."""
        return _TaggedReader(self, decoded, turn_index, read_body, read_id).read()

    def next_opening(self, text: str, start: int, limit: int) -> tuple[int, int, bool] | None:
        """Return `[start, end)` of the next call's mark, its section's included, and if it is a section's only."""
        found = self._opening.search(text, start, limit)
        return None if found is None else (found.start(), found.end(), found[1] is None)

    def end_of_call(self, text: str, end: int) -> int:
        """Return where a call that ends there ends with its section's closing mark, if that follows."""
        found = self._after.match(text, end) if self.section_close else None
        return end if found is None else found.end()


class _TaggedReader:
    """One turn's way through `Tags.read`."""

    def __init__(
        self, tags: Tags, decoded: DecodedText, turn_index: int, read_body: ReadBody, read_id: ReadId
    ) -> None:
        self._tags = tags
        self._text = decoded.text
        self._read_body = read_body
        self._read_id = read_id
        self._builder = TurnBuilder(decoded, turn_index)

    def read(self) -> ParsedTurn:
        position, text = 0, self._text
        while (found := self._tags.next_opening(text, position, len(text))) is not None:
            start, body_start, is_section = found
            self._builder.add_content(text[position:start])
            if self._builder.is_full:
                self._builder.add_rest(start, self._tags.open)
                return self._builder.finish()
            position = self._section(start, body_start) if is_section else self._region(start, body_start)
        self._builder.add_content(text[position:])
        return self._builder.finish()

    def _section(self, start: int, body_start: int) -> int:
        """Report a section that does not begin with a call, up to the next mark; return where that is."""
        text, tags = self._text, self._tags
        following = tags.next_opening(text, body_start, len(text))
        until = following[0] if following is not None else len(text)
        close = text.find(tags.section_close, body_start, until)
        end = close + len(tags.section_close) if close >= 0 else until
        self._builder.add_malformed(start, end, MalformedCall(f"a section of tool calls without {tags.open}"))
        return end

    def _region(self, start: int, body_start: int) -> int:
        """Add what `[start, first closing mark]` holds; return where it ends."""
        text, closing = self._text, self._tags.close
        close = first_close = text.find(closing, body_start)
        for _ in range(1 + MAX_CLOSE_TAGS):
            if close < 0 and not self._tags.shows_end:
                break
            until = close if close >= 0 else len(text)
            try:
                name, arguments = self._read_body(text[body_start:until])
            except MalformedCall:
                if close < 0 or (close := text.find(closing, close + len(closing))) < 0:
                    break
            else:
                end = self._tags.end_of_call(text, until + len(closing)) if close >= 0 else until
                self._builder.add_call(start, end, name, arguments, self._read_id(text[body_start:until]))
                return end
        if first_close < 0:
            return self._pieces(start, body_start, len(text), len(text))
        return self._pieces(
            start, body_start, first_close, self._tags.end_of_call(text, first_close + len(closing))
        )

    def _pieces(self, start: int, body_start: int, body_end: int, end: int) -> int:
        """The region is not one call: each opening mark in it starts one. Returns where the last ends."""
        is_closed = body_end < end
        while True:
            following = self._tags.next_opening(self._text, body_start, body_end)
            until, piece_end = (following[0], following[0]) if following is not None else (body_end, end)
            is_cut = following is None and not is_closed
            body = self._text[body_start:until]
            try:
                name, arguments = self._read_body(body)
                if is_cut and not self._tags.shows_end:
                    raise self._without_end(body, name, arguments)
            except MalformedCall as malformed:
                self._builder.add_malformed(start, piece_end, malformed, is_cut=is_cut)
            else:
                self._builder.add_call(start, piece_end, name, arguments, self._read_id(body))
            if following is None:
                return end
            start, body_start, _ = following
            if self._builder.is_full:
                self._builder.add_rest(start, self._tags.open)
                return len(self._text)

    def _without_end(self, body: str, name: str, arguments: dict[str, JSON]) -> MalformedCall:
        """Return the error of a call whose name or arguments may go on."""
        written = json.dumps(arguments, ensure_ascii=False)[:-1]
        error = f"the tool call has no {self._tags.close}"
        return MalformedCall(error, name if body.lstrip() != name else "", written)
