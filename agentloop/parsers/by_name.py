"""Sampled turns to tool calls: one file a model family, one function to pick it."""

from __future__ import annotations

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import Parser
from agentloop.parsers.hermes import HermesParser
from agentloop.parsers.qwen3_xml import Qwen3XmlParser

_PARSERS: dict[str, Parser] = {
    "hermes": HermesParser(),
    "qwen3_coder": Qwen3XmlParser(),
    "qwen3_xml": Qwen3XmlParser(),
}

PARSER_NAMES = tuple(_PARSERS)


def get_parser(name: str) -> Parser:
    """The parser called `name`; shared, without state. Raises InvalidRequest naming those there are."""
    parser = _PARSERS.get(name)
    if parser is None:
        raise InvalidRequest(f"no parser {name[:64]!r}: there are {', '.join(PARSER_NAMES)}", param="parser")
    return parser
