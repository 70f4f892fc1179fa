"""Parsers by their name: our own, and users' by import path."""

from __future__ import annotations

from typing import Any, cast

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText, Marks, ParsedTurn, Parser, ThoughtMarks
from agentloop.parsers.formats import FORMATS
from agentloop.parsers.harmony import HarmonyParser
from agentloop.parsers.llama3_json import Llama3JsonParser
from agentloop.parsers.mistral import MistralParser
from agentloop.parsers.qwen3_xml import Qwen3XmlParser
from agentloop.plugins import resolve

_PARSERS: dict[str, Parser] = {
    **FORMATS,
    "qwen3_coder": Qwen3XmlParser(),
    "qwen3_xml": Qwen3XmlParser(),
    "llama3_json": Llama3JsonParser(),
    "mistral": MistralParser(),
    "harmony": HarmonyParser(),
    "granite": MistralParser("<|tool_call|>", ThoughtMarks()),
}

PARSER_NAMES = tuple(_PARSERS)


def get_parser(name: str) -> Parser:
    """Return our own parser called `name`, or a user's at the import path `package.module:Parser`.

    At the path stands a parser, or a class or function that makes one without arguments. Raises InvalidRequest with
    param "parser".
    """
    if (parser := _PARSERS.get(name)) is not None:
        return parser
    if ":" in name:
        return _imported(name)
    raise InvalidRequest(f"no parser {name[:64]!r}: there are {', '.join(PARSER_NAMES)}", param="parser")


def _imported(path: str) -> Parser:
    found = resolve(path, param="parser")
    try:
        parser: Any = found() if callable(found) and not _is_instance(found) else found
        is_parser = (
            isinstance(parser.marks, Marks)
            and callable(parser.call_constraint)
            and isinstance(parser.parse(DecodedText("", ()), [], 0), ParsedTurn)
        )
    except Exception as error:  # a user's code, which may raise anything
        raise InvalidRequest(f"{path} makes no parser: {type(error).__name__}: {error}", param="parser") from error
    if not is_parser:
        raise InvalidRequest(f"{path} is no parser: it must be an agentloop.parsers.Parser", param="parser")
    return cast(Parser, parser)


def _is_instance(found: object) -> bool:
    return not isinstance(found, type) and hasattr(found, "parse")
