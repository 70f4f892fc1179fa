"""Formats that are only marks: calls that stand between two of them, alone or in a section with marks of its own.

Linear: a region ends at its first closing mark; at most `MAX_CLOSE_TAGS` further ones are tried (the mark may stand
inside a value), so each character is read a bounded number of times, if the body's reader takes linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from agentloop.parsers.base import MalformedCall, Marks, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, TurnSyntax
from agentloop.parsers.marked import MarkedParser, Tools
from agentloop.types import JSON

MAX_CLOSE_TAGS = 4

ReadBody: TypeAlias = Callable[[str, Tools], tuple[str, dict[str, JSON]]]
"""Name and arguments of the text between two marks. Raises MalformedCall."""

ReadId: TypeAlias = Callable[[str], str]
"""The id within a text that can be read as a call; empty if it has none."""

WriteCall: TypeAlias = Callable[[str], CallSyntax | None]
"""See `MarkedParser.syntax`: what is between the two marks."""


class TaggedParser(MarkedParser):
    """The parser of one format. A missing closing mark is forgiven if the text before the next call can be read."""

    def __init__(
        self,
        tags: tuple[str, str],
        read_body: ReadBody,
        write_call: WriteCall,
        *,
        section: tuple[str, str] = ("", ""),
        separator: str = "\n",
        read_id: ReadId = lambda body: "",
        shows_end: bool = True,
    ) -> None:
        """`separator` stands between calls. `shows_end`: a call without its closing mark tells if it is whole."""
        self._open, self._close = tags
        self._section_close = section[1]
        self._read_body, self._read_id, self._write_call = read_body, read_id, write_call
        self._shows_end = shows_end
        self.counted = self._open
        self.turn = TurnSyntax(section[0], separator, section[1])
        self.marks = Marks((section[0], tags[0]) if section[0] else (tags[0],), tags[1], trailing=section[1])
        one, outer = map(re.escape, (tags[0], section[0]))
        self.opening = re.compile(rf"(?:{outer}\s*+)?({one})|{outer}" if outer else f"({one})")
        self._after = re.compile(rf"\s*+{re.escape(section[1])}")

    def syntax(self, name: str) -> CallSyntax | None:
        found = self._write_call(name)
        if found is None:
            return None
        return replace(found, begin=self._open + found.begin, end=found.end + self._close)

    def read_call(self, builder: TurnBuilder, found: re.Match[str], tools: Tools) -> int:
        if found[1] is None:
            return self._section(builder, found.start(), found.end())
        return self._region(builder, found.start(), found.end(), tools)

    def _end_of_call(self, text: str, end: int) -> int:
        """Return where a call that ends there ends with its section's closing mark, if that follows."""
        found = self._after.match(text, end) if self._section_close else None
        return end if found is None else found.end()

    def _section(self, builder: TurnBuilder, start: int, body_start: int) -> int:
        """Report a section that does not begin with a call, up to the next mark; return where that is."""
        text = builder.text
        following = self.opening.search(text, body_start)
        until = following.start() if following is not None else len(text)
        close = text.find(self._section_close, body_start, until)
        end = close + len(self._section_close) if close >= 0 else until
        builder.add_malformed(start, end, MalformedCall(f"a section of tool calls without {self._open}"))
        return end

    def _region(self, builder: TurnBuilder, start: int, body_start: int, tools: Tools) -> int:
        """Add what `[start, first closing mark]` holds; return where it ends."""
        text, closing = builder.text, self._close
        close = first_close = text.find(closing, body_start)
        for _ in range(1 + MAX_CLOSE_TAGS):
            if close < 0 and not self._shows_end:
                break
            until = close if close >= 0 else len(text)
            try:
                name, arguments = self._read_body(text[body_start:until], tools)
            except MalformedCall:
                if close < 0 or (close := text.find(closing, close + len(closing))) < 0:
                    break
            else:
                end = self._end_of_call(text, until + len(closing)) if close >= 0 else until
                builder.add_call(start, end, name, arguments, self._read_id(text[body_start:until]))
                return end
        if first_close < 0:
            return self._pieces(builder, start, body_start, len(text), len(text), tools)
        end = self._end_of_call(text, first_close + len(closing))
        return self._pieces(builder, start, body_start, first_close, end, tools)

    def _pieces(
        self, builder: TurnBuilder, start: int, body_start: int, body_end: int, end: int, tools: Tools
    ) -> int:
        """The region is not one call: each opening mark in it starts one. Returns where the last ends."""
        is_closed = body_end < end
        while True:
            following = self.opening.search(builder.text, body_start, body_end)
            until, piece_end = (following.start(), following.start()) if following is not None else (body_end, end)
            is_cut = following is None and not is_closed
            body = builder.text[body_start:until]
            try:
                name, arguments = self._read_body(body, tools)
                if is_cut and not self._shows_end:
                    raise self._without_end(body, name, arguments)
            except MalformedCall as malformed:
                builder.add_malformed(start, piece_end, malformed, is_cut=is_cut)
            else:
                builder.add_call(start, piece_end, name, arguments, self._read_id(body))
            if following is None:
                return end
            start, body_start = following.span()
            if builder.is_full:
                builder.add_rest(start, self._open)
                return len(builder.text)

    def _without_end(self, body: str, name: str, arguments: dict[str, JSON]) -> MalformedCall:
        """Return the error of a call whose name or arguments may go on."""
        written = json.dumps(arguments, ensure_ascii=False)[:-1]
        error = f"the tool call has no {self._close}"
        return MalformedCall(error, name if body.lstrip() != name else "", written)
