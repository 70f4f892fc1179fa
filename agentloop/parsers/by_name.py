"""Lookup of parsers: built-in ones by name, users' by import path, and the choice of one from a chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from agentloop.errors import InvalidRequest
from agentloop.parsers.arguments import ID, JsonArguments, Literals, ObjectKeys, TextParameters
from agentloop.parsers.base import DecodedText, Delimiters, ParsedTurn, Parser, ReasoningDelimiters
from agentloop.parsers.call_format import CallFormat, FormatParser
from agentloop.parsers.harmony import HarmonyParser
from agentloop.plugins import resolve

_QWEN_BEGIN, _QWEN_END = "<tool_call>\n<function=", "</function>\n</tool_call>"
_QWEN = TextParameters("<parameter=", (">\n",), "\n</parameter>\n", _QWEN_BEGIN, _QWEN_END)
_GLM = TextParameters("<arg_key>", ("</arg_key>\n<arg_value>",), "</arg_value>\n", "<tool_call>", "</tool_call>")
_V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_V3_CALL, _V3_END, _V3_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_LLAMA = ObjectKeys(arguments=("parameters", "arguments"))
_JSON, _CALLS = JsonArguments(), "[TOOL_CALLS]"

FORMATS: dict[str, tuple[CallFormat, ...]] = {
    "hermes": (CallFormat("<tool_call>\n", "\n</tool_call>", ObjectKeys()),),
    "glm45": (CallFormat("<tool_call>", "</tool_call>", _GLM, "\n"),),
    "deepseek_v3": (
        CallFormat(f"{_V3_CALL}function{_V3_SEP}", f"\n```{_V3_END}", _JSON, "\n```json\n", section=_V3),
    ),
    "deepseek_v31": (CallFormat(_V3_CALL, _V3_END, _JSON, _V3_SEP, _V3, ""),),
    "kimi_k2": (
        CallFormat("<|tool_call_begin|>", "<|tool_call_end|>", _JSON, _KIMI_ARGUMENTS, _KIMI, "", is_numbered=True),
    ),
    "qwen3_xml": (CallFormat(_QWEN_BEGIN, _QWEN_END, _QWEN, ">\n"),),
    "llama3_json": (CallFormat("", "", _LLAMA, section=("<|python_tag|>", ""), separator="; ", is_bare=True),),
    "mistral": (
        CallFormat(_CALLS, "", _JSON, f"[CALL_ID]{ID}[ARGS]", separator=""),
        CallFormat("", "", ObjectKeys(id="id"), section=(f"{_CALLS} [", "]"), separator=", "),
    ),
    "lfm2": (CallFormat("", ")", Literals(), "(", ("<|tool_call_start|>[", "]<|tool_call_end|>"), ", "),),
    "granite": (CallFormat("", "", ObjectKeys(), section=("<|tool_call|>[", "]"), separator=", "),),
}
FORMATS["qwen3_coder"] = FORMATS["qwen3_xml"]
"""The call formats of `FormatParser`, taken from the models' chat templates. Ids and alternative forms are from
Kimi-K2's tool-call guide, mistral-common and llama-models."""


_THOUGHTS = {"mistral": ReasoningDelimiters("[THINK]", "[/THINK]")}
_PARSERS: dict[str, Parser] = {
    name: FormatParser(_THOUGHTS.get(name, ReasoningDelimiters()), *forms) for name, forms in FORMATS.items()
} | {"harmony": HarmonyParser()}
PARSER_NAMES = tuple(_PARSERS)


def get_parser(name: str) -> Parser:
    """Return the built-in parser `name`, or the parser at the import path `package.module:Parser`.

    The path may name a parser, or a class or function that returns one without arguments. Raises InvalidRequest
    with param "parser".
    """
    if (parser := _PARSERS.get(name)) is not None:
        return parser
    if ":" in name:
        return _imported(name)
    raise InvalidRequest(
        f"unknown parser {name[:64]!r}: expected one of {', '.join(PARSER_NAMES)}, or an import path such as "
        "'my_package.parsers:MyParser'",
        param="parser",
    )


def _imported(path: str) -> Parser:
    target = resolve(path, param="parser")
    is_instance = not isinstance(target, type) and hasattr(target, "parse")
    try:
        parser: Any = target() if callable(target) and not is_instance else target
        is_parser = (
            isinstance(parser.delimiters, Delimiters)
            and callable(parser.call_constraint)
            and isinstance(parser.parse(DecodedText("", ()), [], 0), ParsedTurn)
        )
    except Exception as error:  # user code may raise anything
        raise InvalidRequest(
            f"the parser at {path} failed on an empty turn: {type(error).__name__}: {error}", param="parser"
        ) from error
    if not is_parser:
        raise InvalidRequest(f"{path} is not a parser: it must implement agentloop.parsers.Parser", param="parser")
    return cast(Parser, parser)


# Parser names with the substrings of a template that writes this family's calls. The first match is used.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("harmony", ("<|channel|>", "<|message|>", "functions")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_list_start|>", "<|im_start|>")),
    ("lfm2", ("List of tools: [", "keep_past_thinking")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ', "tool_calls")),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("hermes", ("<tool_call>", "tool_calls")),
)


def choose_parser(template_source: str, literals: Collection[str]) -> tuple[str | None, str]:
    """Choose a parser from a template's source. Returns its name, or None, and a one-line reason.

    The reason lists the matched delimiters that are in `literals`, the tokenizer's added tokens.
    """
    if "tool" not in template_source:
        return None, "the chat template does not support tools"
    for name, signs in _SIGNS:
        if all(sign in template_source for sign in signs):
            tokens = [sign for sign in signs if sign in literals]
            suffix = f", and {', '.join(tokens)} in the tokenizer" if tokens else ""
            return name, f"the chat template writes {' '.join(signs)}{suffix}"
    return None, f"none of the parsers {', '.join(PARSER_NAMES)} matches the chat template's call format"
