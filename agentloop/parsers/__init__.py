"""Sampled turns to tool calls: one file a model family, one function to pick it."""

from __future__ import annotations

from agentloop.parsers.base import (
    MAX_CALLS,
    THOUGHT_MARKS,
    DecodedText,
    Marks,
    NoCallsParser,
    ParsedTurn,
    Parser,
    ThoughtMarks,
)
from agentloop.parsers.by_name import PARSER_NAMES, get_parser
from agentloop.parsers.choose import ChosenParser, choose_parser, parsers_that_read
from agentloop.parsers.grammar import MAX_JSON_WHITESPACE_CHARS, behind_thought, format_of, loads
from agentloop.parsers.hermes import HermesParser

__all__ = [
    "MAX_CALLS",
    "MAX_JSON_WHITESPACE_CHARS",
    "PARSER_NAMES",
    "THOUGHT_MARKS",
    "ChosenParser",
    "DecodedText",
    "HermesParser",
    "Marks",
    "NoCallsParser",
    "ParsedTurn",
    "Parser",
    "ThoughtMarks",
    "behind_thought",
    "choose_parser",
    "format_of",
    "get_parser",
    "loads",
    "parsers_that_read",
]
