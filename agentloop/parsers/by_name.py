"""Parsers by their name: our own, and users' by import path."""

from __future__ import annotations

from typing import Any, cast

from agentloop.errors import InvalidRequest
from agentloop.parsers.arguments import JsonArguments, Literals, ObjectKeys, TextParameters
from agentloop.parsers.base import DecodedText, Marks, ParsedTurn, Parser, ThoughtMarks
from agentloop.parsers.call_format import ID, CallFormat, FormatParser
from agentloop.parsers.harmony import HarmonyParser
from agentloop.plugins import resolve

_QWEN_END = "</function>\n</tool_call>"
_QWEN = CallFormat(
    "<tool_call>\n<function=",
    _QWEN_END,
    TextParameters("<parameter=", (">\n",), "\n</parameter>\n", tail=_QWEN_END),
    middle=">\n",
)
_GLM = TextParameters("<arg_key>", ("</arg_key>\n<arg_value>",), "</arg_value>\n", "</tool_call>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL, _DEEPSEEK_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_MISTRAL_THOUGHTS = ThoughtMarks("[THINK]", "[/THINK]")

FORMATS: dict[str, tuple[CallFormat, ...]] = {
    "hermes": (CallFormat("<tool_call>\n", "\n</tool_call>", ObjectKeys()),),
    "glm45": (CallFormat("<tool_call>", "</tool_call>", _GLM, middle="\n"),),
    "deepseek_v3": (
        CallFormat(
            f"{_DEEPSEEK_CALL}function{_SEP}",
            f"\n```{_DEEPSEEK_END}",
            JsonArguments(),
            middle="\n```json\n",
            section=_DEEPSEEK,
        ),
    ),
    "deepseek_v31": (
        CallFormat(_DEEPSEEK_CALL, _DEEPSEEK_END, JsonArguments(), middle=_SEP, section=_DEEPSEEK, separator=""),
    ),
    "kimi_k2": (
        CallFormat(
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            JsonArguments(),
            middle="<|tool_call_argument_begin|>",
            section=_KIMI,
            separator="",
            is_numbered=True,
        ),
    ),
    "qwen3_xml": (_QWEN,),
    "qwen3_coder": (_QWEN,),
    "llama3_json": (
        CallFormat(
            "",
            "",
            ObjectKeys(arguments=("parameters", "arguments")),
            section=("<|python_tag|>", ""),
            separator="; ",
            is_bare=True,
        ),
    ),
    "mistral": (
        CallFormat("[TOOL_CALLS]", "", JsonArguments(), middle=f"[CALL_ID]{ID}[ARGS]", separator=""),
        CallFormat("", "", ObjectKeys(id="id"), section=("[TOOL_CALLS] [", "]"), separator=", "),
    ),
    "lfm2": (
        CallFormat(
            "",
            ")",
            Literals(),
            middle="(",
            section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            separator=", ",
        ),
    ),
    "granite": (CallFormat("", "", ObjectKeys(), section=("<|tool_call|>[", "]"), separator=", "),),
}
"""The formats that are data, from the models' chat templates; ids and further forms from Kimi-K2's guide to tool
calls, mistral-common, and llama-models."""


def _parser(name: str) -> FormatParser:
    return FormatParser(_MISTRAL_THOUGHTS if name == "mistral" else ThoughtMarks(), *FORMATS[name])


_PARSERS: dict[str, Parser] = {**{name: _parser(name) for name in FORMATS}, "harmony": HarmonyParser()}

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
