"""Turns that are tool calls and nothing else, as xgrammar's structural tags.

The text such a tag allows is a subset of what the parser of the same name reads. Its format:
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentloop.errors import InvalidRequest
from agentloop.types import JSON, Constraint, ConstraintKind

MAX_WHITESPACE_CHARS = 1
"""In a row, between the parts of arguments, as templates write them: a policy could fill its turn with more."""

INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
"""What the parsers read of an integer whose schema sets no bound of its own."""

NO_PARAMETERS: Mapping[str, JSON] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text around the arguments of one tool's call, and how xgrammar calls their notation."""

    begin: str
    end: str
    style: str


def constraint_of_calls(
    tools: Sequence[Mapping[str, JSON]],
    syntax: Callable[[str], CallSyntax],
    *,
    forced: str | None,
    is_parallel: bool,
) -> Constraint:
    """See `Parser.call_constraint`. Calls are separated by a line break, as templates write them."""
    functions = [tool.get("function", tool) for tool in tools]
    callable_ones = [function for function in functions if forced is None or function.get("name") == forced]
    if not callable_ones:
        wanted = "at least one tool" if forced is None else f"a tool named {forced[:64]!r}"
        raise InvalidRequest(f"this tool_choice needs {wanted} among the tools", param="tool_choice")
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(function, syntax(str(function.get("name")))) for function in callable_ones],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    tag = {"type": "structural_tag", "format": calls}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))


def _tag(function: Mapping[str, JSON], syntax: CallSyntax) -> dict[str, JSON]:
    arguments = {
        "type": "json_schema",
        "json_schema": _bounded(function.get("parameters") or NO_PARAMETERS),
        "style": syntax.style,
        "max_whitespace_cnt": MAX_WHITESPACE_CHARS,
    }
    return {"type": "tag", "begin": syntax.begin, "content": arguments, "end": syntax.end}


def _bounded(schema: JSON) -> JSON:
    """The schema with a bound on each unbounded integer in it. Recursion is bounded: bodies limit nesting."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _bounded_below(key, value) for key, value in schema.items()}
    if found.get("type") == "integer" and not _BOUNDS & found.keys():
        found |= INT64
    return found


def _bounded_below(key: str, value: JSON) -> JSON:
    if key in _SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: _bounded(schema) for name, schema in value.items()}
    if key in _SCHEMA_LISTS and isinstance(value, list | tuple):
        return [_bounded(schema) for schema in value]
    return _bounded(value) if key in _SCHEMAS else value


_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const", "multipleOf"}
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties", "unevaluatedProperties", "propertyNames"}
