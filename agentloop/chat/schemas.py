"""Bounds on the JSON Schemas that a client sends: what a grammar compiler may be given at all.

Whether an engine can compile a schema is the engine's answer. These checks are linear and refuse what no compiler
should see: too large, too deep, references that lead elsewhere, nowhere, or round in a circle that reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import AfterValidator

from agentloop.parsers.json_schema import check_references
from agentloop.types import JSON

MAX_SCHEMA_BYTES = 1 << 18
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARS = 512


def check_schema(schema: Mapping[str, JSON]) -> None:
    """Check a client's JSON Schema against bounds, before a grammar compiler gets it.

    Raises ValueError, with the reason, for a schema that is too large or too deep, has too long a pattern, or has a
    `$ref` without a target, in a circle or in too long a chain. An engine may still be unable to compile it.
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
        check_references(schema)


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    check_schema(schema)
    return schema


Schema = AfterValidator(_checked)
"""Annotates a field that holds a JSON Schema."""
