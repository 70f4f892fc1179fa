"""Grammars of tool calls: the JSON that is read of a policy, and turns that are calls and nothing else.

The JSON is held to what the rest of the service can carry. Beyond the grammar: no duplicate keys, no NaN or
infinities, integers of 64 bits (what MessagePack and the store can hold), at most `MAX_JSON_DEPTH` levels, no lone
surrogates.

Turns of calls alone are xgrammar's structural tags. The text such a tag allows is a subset of what the parser of
the same name reads. Its format: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import orjson

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import ThoughtMarks, Tools
from agentloop.parsers.json_schema import bundled, unenforced
from agentloop.types import JSON, Constraint, ConstraintKind

MAX_JSON_WHITESPACE_CHARS = 8
"""In a row, between the parts of constrained JSON: enough to indent it."""

MAX_CALL_WHITESPACE_CHARS = 1
"""In a row, between the parts of arguments, as templates write them: a policy could fill its turn with more."""

NO_PARAMETERS: Mapping[str, JSON] = {"type": "object", "properties": {}, "additionalProperties": False}

MAX_JSON_DEPTH = 64

JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)
"""Strings and brackets of any text, in linear time: a string without its end runs to the text's end."""


def calls_of(
    tools: Tools,
    tag: Callable[[Mapping[str, JSON]], JSON],
    section: tuple[str, str] = ("", ""),
    separator: str = "\n",
    *,
    forced: str | None,
    is_parallel: bool,
) -> JSON:
    """Return the structural tag that `Parser.call_constraint` describes, with the `tag` of each tool's call."""
    functions = [tool.get("function", tool) for tool in tools]
    callable_ones = [function for function in functions if forced is None or function.get("name") == forced]
    if not callable_ones:
        wanted = "at least one tool" if forced is None else f"a tool named {forced[:64]!r}"
        raise InvalidRequest(f"this tool_choice needs {wanted} among the tools", param="tool_choice")
    for function in callable_ones:
        if problem := unenforced(function.get("parameters") or NO_PARAMETERS):
            name = str(function.get("name"))[:64]
            raise InvalidRequest(f"a call of {name!r} cannot be forced: in its parameters {problem}", param="tools")
    calls: dict[str, JSON] = {
        "type": "tags_with_separator",
        "tags": [tag(function) for function in callable_ones],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    begin, end = section
    if end:
        return tagged(begin, calls, end)
    return sequence(literal(begin), calls) if begin else calls


def tagged(begin: str, content: JSON, end: str) -> dict[str, JSON]:
    """Return the structural tag of a content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: JSON) -> dict[str, JSON]:
    """Return the structural tag of several in a row."""
    return {"type": "sequence", "elements": list(elements)}


def literal(text: str) -> dict[str, JSON]:
    """Return the structural tag of a text and no other."""
    return {"type": "const_string", "value": text}


def matching(pattern: str) -> dict[str, JSON]:
    """Return the structural tag of texts that a regular expression matches whole."""
    return {"type": "regex", "pattern": pattern}


def either(*elements: JSON) -> dict[str, JSON]:
    """Return the structural tag of any one of several."""
    return {"type": "or", "elements": list(elements)}


def behind_thought(constraint: Constraint, thoughts: ThoughtMarks) -> Constraint:
    """Return the constraint with the end of an open thought, and a few blanks, allowed before it."""
    thought = tagged("", {"type": "any_text"}, thoughts.close)
    return constraint_of(sequence(thought, matching("[ \\n]{0,2}"), format_of(constraint)))


def constraint_of(*forms: JSON) -> Constraint:
    """Return the constraint to any one of these structural tags."""
    tag = {"type": "structural_tag", "format": forms[0] if len(forms) == 1 else either(*forms)}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))


def format_of(constraint: Constraint) -> JSON:
    """Return the constraint as a part of a structural tag."""
    match constraint.kind:
        case ConstraintKind.STRUCTURAL_TAG:
            try:
                return json.loads(constraint.text)["format"]
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidRequest(
                    "a structural tag must be a JSON object with 'format'", param="constraint"
                ) from error
        case ConstraintKind.REGEX:
            return matching(constraint.text)
        case ConstraintKind.JSON_OBJECT:
            return _json_of({"type": "object"}, MAX_JSON_WHITESPACE_CHARS)
        case ConstraintKind.JSON_SCHEMA:
            return _json_of(json.loads(constraint.text), MAX_JSON_WHITESPACE_CHARS)


def call_json(schema: JSON, root: JSON = None) -> dict[str, JSON]:
    """Return the structural tag of a JSON value within a call. `root`: the schema that `schema` is part of."""
    return _json_of(schema, MAX_CALL_WHITESPACE_CHARS, root)


def _json_of(schema: JSON, max_whitespace_chars: int, root: JSON = None) -> dict[str, JSON]:
    whole = bundled(schema, schema if root is None else root)
    return {"type": "json_schema", "json_schema": whole, "max_whitespace_cnt": max_whitespace_chars}


def loads(text: str) -> JSON:
    """Return the JSON value of a text, in linear time. Raises ValueError with a reason in one line."""
    try:
        # Rejects bad syntax, NaN, lone surrogates and deep nesting without recursion.
        value: JSON = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (line {error.lineno}, column {error.colno})") from error
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        _check_depth(text)
    if orjson.dumps(value) == text.encode():  # as orjson writes it: no key was lost, and no integer became a float
        return value
    return json.loads(text, object_pairs_hook=_unique, parse_int=_int64)


def _check_depth(text: str) -> None:
    depth = 0
    for found in JSON_TOKEN.finditer(text):
        opening, closing = found.groups()
        depth += (opening is not None) - (closing is not None)
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError("an integer of more than 64 bits")
    return value
