"""No calls: for models whose calls no parser reads, and that are therefore shown no tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText, Marks, ParsedTurn, ThoughtMarks
from agentloop.types import JSON, Constraint


class NoCallsParser:
    """All text behind the thought is content."""

    def __init__(self, thoughts: ThoughtMarks) -> None:
        self.marks = Marks((), thoughts=thoughts)

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`."""
        return ParsedTurn(decoded.text.strip(), ())

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        raise InvalidRequest("this service reads no tool calls: its model has no parser", param="tools")
