"""Strict JSON parsing, and structural tags that constrain turns to tool calls.

`loads` rejects JSON that the rest of the service cannot carry: duplicate keys, NaN and infinities, integers above
64 bits (the limit of MessagePack and the store), more than `MAX_JSON_DEPTH` levels, lone surrogates. The text that
a structural tag allows is a subset of the text that the parser of the same format accepts. Reference:
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import orjson

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import ReasoningDelimiters, Tools
from agentloop.parsers.json_schema import bundled, unenforced
from agentloop.types import JSON, Constraint, ConstraintKind

MAX_JSON_WHITESPACE_CHARS = 8
"""Consecutive whitespace characters in constrained JSON: enough to indent it."""

MAX_CALL_WHITESPACE_CHARS = 1
"""Consecutive whitespace characters in constrained arguments. With more, a policy could fill its turn with them."""

NO_PARAMETERS: Mapping[str, JSON] = {"type": "object", "properties": {}, "additionalProperties": False}

MAX_JSON_DEPTH = 64

JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)
"""Matches strings and brackets in linear time. An unterminated string extends to the end of the text."""


def calls_of(
    tools: Tools,
    tag: Callable[[Mapping[str, JSON]], JSON],
    section: tuple[str, str] = ("", ""),
    separator: str = "\n",
    *,
    forced: str | None,
    is_parallel: bool,
) -> JSON:
    """Return the structural tag specified by `Parser.call_constraint`. `tag` returns the tag of one tool's call."""
    functions = [tool.get("function", tool) for tool in tools]
    allowed = [function for function in functions if forced is None or function.get("name") == forced]
    if not allowed:
        wanted = "at least one tool" if forced is None else f"a tool named {forced[:64]!r}"
        raise InvalidRequest(f"this tool_choice requires {wanted} in 'tools'", param="tool_choice")
    for function in allowed:
        if problem := unenforced(function.get("parameters") or NO_PARAMETERS):
            name = str(function.get("name"))[:64]
            raise InvalidRequest(
                f"a call of {name!r} cannot be forced: in its parameters, {problem}", param="tools"
            )
    calls: dict[str, JSON] = {
        "type": "tags_with_separator",
        "tags": [tag(function) for function in allowed],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    begin, end = section
    if end:
        return tagged(begin, calls, end)
    return sequence(literal(begin), calls) if begin else calls


def tagged(begin: str, content: JSON, end: str) -> dict[str, JSON]:
    """Return the structural tag of content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: JSON) -> dict[str, JSON]:
    """Return the structural tag of `elements` in order."""
    return {"type": "sequence", "elements": list(elements)}


def literal(text: str) -> dict[str, JSON]:
    """Return the structural tag of a constant text."""
    return {"type": "const_string", "value": text}


def matching(pattern: str) -> dict[str, JSON]:
    """Return the structural tag of texts that fully match a regular expression."""
    return {"type": "regex", "pattern": pattern}


def either(*elements: JSON) -> dict[str, JSON]:
    """Return the structural tag of any one of `elements`."""
    return {"type": "or", "elements": list(elements)}


def after_reasoning(constraint: Constraint, thoughts: ReasoningDelimiters) -> Constraint:
    """Return the constraint with the rest of open reasoning and its closing delimiter allowed before it."""
    thought = tagged("", {"type": "any_text"}, thoughts.close)
    return constraint_of(sequence(thought, matching("[ \\n]{0,2}"), format_of(constraint)))


def constraint_of(*forms: JSON) -> Constraint:
    """Return the constraint that allows any one of these structural tags."""
    tag = {"type": "structural_tag", "format": forms[0] if len(forms) == 1 else either(*forms)}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))


def format_of(constraint: Constraint) -> JSON:
    """Return the constraint as an element of a structural tag."""
    match constraint.kind:
        case ConstraintKind.STRUCTURAL_TAG:
            try:
                return json.loads(constraint.text)["format"]
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidRequest(
                    "the structural tag must be a JSON object with the key 'format'", param="constraint"
                ) from error
        case ConstraintKind.REGEX:
            return matching(constraint.text)
        case ConstraintKind.JSON_OBJECT:
            return _json_of({"type": "object"}, MAX_JSON_WHITESPACE_CHARS)
        case ConstraintKind.JSON_SCHEMA:
            return _json_of(json.loads(constraint.text), MAX_JSON_WHITESPACE_CHARS)


def call_json(schema: JSON, root: JSON = None) -> dict[str, JSON]:
    """Return the structural tag of a JSON value inside a call. `root` is the schema that contains `schema`."""
    return _json_of(schema, MAX_CALL_WHITESPACE_CHARS, root)


def _json_of(schema: JSON, max_whitespace_chars: int, root: JSON = None) -> dict[str, JSON]:
    whole = bundled(schema, schema if root is None else root)
    return {"type": "json_schema", "json_schema": whole, "max_whitespace_cnt": max_whitespace_chars}


def loads(text: str) -> JSON:
    """Parse JSON in linear time. Raises ValueError with a one-line reason."""
    try:
        # Rejects bad syntax, NaN, lone surrogates and deep nesting without recursion.
        value: JSON = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (line {error.lineno}, column {error.colno})") from error
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        _check_depth(text)
    # orjson drops duplicate keys and converts large integers to floats: an equal dump proves that it did neither.
    if orjson.dumps(value) == text.encode():
        return value
    return json.loads(text, object_pairs_hook=_unique, parse_int=_int64)


def _check_depth(text: str) -> None:
    depth = 0
    for match in JSON_TOKEN.finditer(text):
        opening, closing = match.groups()
        depth += (opening is not None) - (closing is not None)
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return members


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError("an integer of more than 64 bits")
    return value
