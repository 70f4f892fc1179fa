"""Calls as GLM-4.5 and its successors write them: a name, then `<arg_key>` and `<arg_value>` in turn, in tags.

`<tool_call>NAME`, line break, `<arg_key>x</arg_key>`, line break, `<arg_value>value</arg_value>`, line break, ...,
`</tool_call>`, as in the models' chat templates. Values are not escaped: a value runs to the first `</arg_value>`.
They get their type from the tool's schema: strings stand as they are, everything else as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText, MalformedCall, ParsedTurn
from agentloop.parsers.grammar import CallSyntax, constraint_of_calls
from agentloop.parsers.tagged import Tags
from agentloop.parsers.typed_text import TextArguments, parameter_schemas
from agentloop.types import JSON, Constraint

_TAGS = Tags("<tool_call>", "</tool_call>", shows_end=False)
_FUNCTION_NAME = re.compile(r"""\s*+([^<>{}"'\s][^<>{}"'\n]{0,255})""")  # no other family's call begins so
_ARG_KEY = re.compile(r"\s*+<arg_key>([^<>\n]{1,256})</arg_key>\s*+<arg_value>")
_VALUE_CLOSE = "</arg_value>"


class Glm45Parser:
    """Keys and values between tags of their own. A missing last tag is not forgiven: nothing else ends a call."""

    marks = _TAGS.marks

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`."""
        schemas = parameter_schemas(tools)
        return _TAGS.read(decoded, turn_index, lambda body: _read_body(body, schemas))

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        return constraint_of_calls(tools, _syntax, forced=forced, is_parallel=is_parallel)


def _read_body(body: str, schemas: Mapping[str, Mapping[str, Mapping[str, JSON]]]) -> tuple[str, dict[str, JSON]]:
    found = _FUNCTION_NAME.match(body)
    if found is None or not (name := found[1].strip()):
        raise MalformedCall("the tool call does not begin with a function's name")
    arguments, position = TextArguments(name, schemas.get(name, {})), found.end()
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


def _syntax(name: str) -> CallSyntax:
    if _FUNCTION_NAME.fullmatch(name) is None or name != name.strip():
        raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
    return CallSyntax(f"{_TAGS.open}{name}\n", _TAGS.close, style="glm_xml")
