"""JSON that a policy wrote, held to what the rest of the service can carry.

Beyond the grammar: no duplicate keys, no NaN or infinities, integers of 64 bits (what MessagePack and the store
can hold), at most `MAX_DEPTH` levels, no lone surrogates.
"""

from __future__ import annotations

import json
import re

import orjson

from agentloop.types import JSON

MAX_DEPTH = 64

# Only run over text that is valid JSON, where every quote has its pair: elsewhere it could be quadratic.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')


def loads(text: str) -> JSON:
    """The value `text` holds. Raises ValueError with a reason in one line; takes linear time."""
    try:
        # Rejects bad syntax, NaN, lone surrogates and deep nesting without recursion.
        value: JSON = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(_one_line(error)) from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(text)
    if orjson.dumps(value) == text.encode():  # as orjson writes it: no key was lost, and no integer became a float
        return value
    return json.loads(text, object_pairs_hook=_unique, parse_int=_int64)


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRUCTURE.finditer(text):
        opening, closing = match.groups()
        depth += (opening is not None) - (closing is not None)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError("an integer of more than 64 bits")
    return value


def _one_line(error: orjson.JSONDecodeError) -> str:
    return f"{error.msg} (line {error.lineno}, column {error.colno})"
