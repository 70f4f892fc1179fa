"""Bounds on the JSON Schemas that a client sends: what a grammar compiler may be given at all.

Whether an engine can compile a schema is the engine's answer. These checks are linear and refuse what no compiler
should see: too large, too deep, references that lead elsewhere, nowhere, or round in a circle that reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import orjson
from pydantic import AfterValidator

from agentloop.types import JSON

MAX_SCHEMA_BYTES = 1 << 18
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARS = 512

_SAME_PLACE = ("allOf", "anyOf", "oneOf")


def check_schema(schema: Mapping[str, JSON]) -> None:
    """Check a client's JSON Schema against bounds, before a grammar compiler gets it.

    Raises ValueError, with the reason, for one that is too large or too deep, has too long a pattern, or has a
    `$ref` without a target or in a circle. An engine may still be unable to compile it.
    """
    try:
        num_bytes = len(orjson.dumps(schema))
    except TypeError as error:
        raise ValueError(f"the schema is not JSON of 64-bit integers: {error}") from error
    if num_bytes > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema has at most {MAX_SCHEMA_BYTES} bytes")
    has_references = False
    level, depth = [schema], 0
    while level:
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"a schema is nested at most {MAX_SCHEMA_DEPTH} deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                has_references = has_references or "$ref" in value
                pattern = value.get("pattern")
                if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_CHARS:
                    raise ValueError(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
                below.extend(item for item in value.values() if isinstance(item, dict | list))
            else:
                below.extend(item for item in value if isinstance(item, dict | list))
        level, depth = below, depth + 1
    if has_references:
        _check_references(schema)


def _check_references(schema: Mapping[str, JSON]) -> None:
    """Every reference has a target, and following references reads something before it comes round again."""
    below = {id(one): {id(target) for target in _same_place(one, schema)} for one in _objects(schema)}
    try:
        TopologicalSorter(below).prepare()
    except CycleError:
        raise ValueError("a $ref leads back to itself and describes nothing") from None


def _objects(schema: JSON) -> Iterator[Mapping[str, JSON]]:
    rest = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield value
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)


def _same_place(value: Mapping[str, JSON], root: Mapping[str, JSON]) -> Iterator[Any]:
    """The schemas that describe the same JSON value as this one does."""
    reference = value.get("$ref")
    if isinstance(reference, str):
        yield _target(reference, root)
    for name in _SAME_PLACE:
        members = value.get(name)
        if isinstance(members, list):
            yield from (member for member in members if isinstance(member, dict))


def _target(reference: str, root: Mapping[str, JSON]) -> Mapping[str, JSON]:
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError("a $ref must point into the same schema: #/...")
    found: Any = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"there is no {reference[:200]!r} in the schema")
    return found


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    check_schema(schema)
    return schema


Schema = AfterValidator(_checked)
"""Annotates a field that holds a JSON Schema."""
