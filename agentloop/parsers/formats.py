"""The formats that are only marks, one row each; how their bodies are read stands below.

hermes: Hermes, Qwen2.5 and Qwen3, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
glm45: GLM-4.5 and its successors, in the same marks a name and line by line `<arg_key>x</arg_key>` and
`<arg_value>value</arg_value>`. Values are not escaped: one runs to the first `</arg_value>`, and gets its type from
the tool's schema: strings stand as they are, everything else as JSON. Nothing but the last mark ends a call.
deepseek_v3: DeepSeek-V3 and R1-0528, `function<｜tool▁sep｜>NAME`, a line break, and arguments in a fenced block
of JSON, whose fences may be missing. deepseek_v31: `NAME<｜tool▁sep｜>{...}`.
kimi_k2: `ID<|tool_call_argument_begin|>{...}`. The id is `functions.NAME:NUMBER`, with the call's number within the
conversation; one without a number is taken for the name (`docs/tool_call_guidance.md` of the model's repository).
All but the last are published in the models' chat templates.
"""

from __future__ import annotations

import json
import re

from agentloop.parsers.base import MalformedCall
from agentloop.parsers.grammar import CallSyntax
from agentloop.parsers.json_call import check_name, read_arguments, read_json_call
from agentloop.parsers.marked import Tools
from agentloop.parsers.tagged import TaggedParser
from agentloop.parsers.typed_text import TextArguments, parameter_schemas
from agentloop.types import JSON

_TAGS = ("<tool_call>", "</tool_call>")
_FUNCTION_NAME = re.compile(r"""\s*+([^<>{}"'\s][^<>{}"'\n]{0,255})""")  # no other family's call begins so
_ARG_KEY = re.compile(r"\s*+<arg_key>([^<>\n]{1,256})</arg_key>\s*+<arg_value>")
_VALUE_CLOSE = "</arg_value>"
_DEEPSEEK_TAGS = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_KIND = "function"
_FENCE = "```"
_KIMI_TAGS = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_NUMBER = re.compile(r":[0-9]+\Z")


def _read_json(body: str, tools: Tools) -> tuple[str, dict[str, JSON]]:
    return read_json_call(body, "arguments")


def _write_json(name: str) -> CallSyntax:
    return CallSyntax(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}\n")


def _read_keys_and_values(body: str, tools: Tools) -> tuple[str, dict[str, JSON]]:
    found = _FUNCTION_NAME.match(body)
    if found is None or not (name := found[1].strip()):
        raise MalformedCall("the tool call does not begin with a function's name")
    arguments, position = TextArguments(name, parameter_schemas(tools, name)), found.end()
    while (opening := _ARG_KEY.match(body, position)) is not None:
        key, start = opening[1].strip(), opening.end()
        end = body.find(_VALUE_CLOSE, start)
        if end < 0:
            raise arguments.malformed(f"parameter {key!r} has no {_VALUE_CLOSE}", (key, body[start:]))
        arguments.add(key, body[start:end])
        position = end + len(_VALUE_CLOSE)
    if body[position:].strip():
        raise arguments.malformed("the tool call has something else where <arg_key> must stand")
    return name, arguments.values


def _write_keys_and_values(name: str) -> CallSyntax | None:
    is_name = _FUNCTION_NAME.fullmatch(name) is not None and name == name.strip()
    return CallSyntax(f"{name}\n", "", style="glm_xml") if is_name else None


def _read_fenced(body: str, tools: Tools) -> tuple[str, dict[str, JSON]]:
    kind, separator, rest = body.partition(_SEPARATOR)
    if not separator or kind.strip() != _KIND:
        raise MalformedCall(f"the tool call does not begin with {_KIND}{_SEPARATOR}")
    written, line_break, block = rest.partition("\n")
    if not line_break:
        raise MalformedCall("the tool call has no line break behind its name")
    name = check_name(written.strip())
    block = block.lstrip().removeprefix(f"{_FENCE}json").removeprefix(_FENCE)
    if block.rstrip().endswith(_FENCE):
        block = block.rstrip().removesuffix(_FENCE)
    return name, read_arguments(block, name)


def _write_fenced(name: str) -> CallSyntax:
    return CallSyntax(f"{_KIND}{_SEPARATOR}{name}\n{_FENCE}json\n", f"\n{_FENCE}")


def _read_bare(body: str, tools: Tools) -> tuple[str, dict[str, JSON]]:
    written, separator, arguments = body.partition(_SEPARATOR)
    if not separator:
        raise MalformedCall(f"the tool call has no {_SEPARATOR} behind its name")
    name = check_name(written.strip())
    return name, read_arguments(arguments, name)


def _write_bare(name: str) -> CallSyntax:
    return CallSyntax(f"{name}{_SEPARATOR}", "")


def _read_numbered(body: str, tools: Tools) -> tuple[str, dict[str, JSON]]:
    call_id, mark, arguments = body.partition(_KIMI_ARGUMENTS)
    if not mark:
        raise MalformedCall(f"the tool call has no {_KIMI_ARGUMENTS} behind its id")
    name = check_name(_NUMBER.sub("", call_id.strip()).removeprefix("functions."))
    return name, read_arguments(arguments, name)


def _written_id(body: str) -> str:
    call_id = body.partition(_KIMI_ARGUMENTS)[0].strip()
    return call_id if _NUMBER.search(call_id) is not None else ""


def _write_numbered(name: str) -> CallSyntax:
    return CallSyntax(f"functions.{name}:", "", numbered=_KIMI_ARGUMENTS)


FORMATS = {
    "hermes": TaggedParser(_TAGS, _read_json, _write_json),
    "glm45": TaggedParser(_TAGS, _read_keys_and_values, _write_keys_and_values, shows_end=False),
    "deepseek_v3": TaggedParser(_DEEPSEEK_TAGS, _read_fenced, _write_fenced, section=_DEEPSEEK_SECTION),
    "deepseek_v31": TaggedParser(_DEEPSEEK_TAGS, _read_bare, _write_bare, section=_DEEPSEEK_SECTION, separator=""),
    "kimi_k2": TaggedParser(
        _KIMI_TAGS,
        _read_numbered,
        _write_numbered,
        section=_KIMI_SECTION,
        separator="",
        read_id=_written_id,
    ),
}
