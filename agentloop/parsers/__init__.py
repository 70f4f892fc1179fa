"""Sampled turns to tool calls: one file a model family, one function to pick it."""

from __future__ import annotations

from agentloop.parsers.base import MAX_CALLS, DecodedText, ParsedTurn, Parser
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.grammar import loads
from agentloop.parsers.hermes import HermesParser

__all__ = ["MAX_CALLS", "DecodedText", "HermesParser", "ParsedTurn", "Parser", "get_parser", "loads"]
