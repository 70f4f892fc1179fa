"""The one way through a turn that our own parsers share: from left to right, from mark to mark."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from agentloop.parsers.arguments import Tools
from agentloop.parsers.base import DecodedText, Marks, ParsedTurn, TurnBuilder
from agentloop.types import Constraint


class MarkedParser(ABC):
    """Base of the parsers of formats. `marks` and `opening` agree."""

    marks: Marks
    opening: re.Pattern[str]  # finds the mark of the next call
    counted: str = ""  # its number is that of the calls that are too many; by default the first of their marks
    writes_one = False  # a turn of calls has one, whatever is asked for

    @abstractmethod
    def read_call(self, builder: TurnBuilder, found: re.Match[str], tools: Tools) -> int:
        """Add the call or calls that begin with a mark. Returns the end of the last one."""

    def read_leading(self, builder: TurnBuilder, tools: Tools) -> int:
        """Add the calls without a mark at the turn's beginning. Returns the end of the last one."""
        return 0

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        builder = TurnBuilder(decoded, turn_index)
        text, position = decoded.text, self.read_leading(builder, tools)
        while (found := self.opening.search(text, position)) is not None:
            builder.add_content(text[position : found.start()])
            if builder.is_full:
                builder.add_rest(found.start(), self.counted or found[0])
                return builder.finish()
            position = self.read_call(builder, found, tools)
        builder.add_content(text[position:])
        return builder.finish()

    @abstractmethod
    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """See `Parser.call_constraint`."""
