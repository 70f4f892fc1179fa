"""Values that a call writes as bare text, typed by their tool's schema: nothing is evaluated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentloop.parsers.base import MalformedCall
from agentloop.parsers.grammar import loads
from agentloop.types import JSON

MAX_PARAMETERS = 256


class TextArguments:
    """The arguments of one call, parameter by parameter. Raises MalformedCall for one that cannot be."""

    def __init__(self, name: str, schemas: Mapping[str, Mapping[str, JSON]]) -> None:
        self._name = name
        self._schemas = schemas
        self._values: dict[str, JSON] = {}

    @property
    def values(self) -> dict[str, JSON]:
        """The arguments so far."""
        return self._values

    def add(self, key: str, value: str) -> None:
        """Add a parameter as it was written."""
        if key in self._values:
            raise self.malformed(f"parameter {key!r} twice in one call")
        if len(self._values) == MAX_PARAMETERS:
            raise self.malformed(f"more than {MAX_PARAMETERS} parameters")
        try:
            self._values[key] = typed_value(value, self._schemas.get(key))
        except ValueError as error:
            raise self.malformed(f"parameter {key!r} does not have its schema's type: {error}") from error

    def malformed(self, error: str, cut: tuple[str, str] | None = None) -> MalformedCall:
        """Return the error of a call that cannot be read; `cut` is the key and text of an unended parameter."""
        written = json.dumps(self._values, ensure_ascii=False)[:-1]
        if cut is not None:
            key, value = cut
            is_text = "string" in _types(self._schemas.get(key, {"type": "string"}))
            shown = json.dumps(value, ensure_ascii=False)[:-1] if is_text else value.strip()
            written += f"{', ' if self._values else ''}{json.dumps(key, ensure_ascii=False)}: {shown}"
        return MalformedCall(error, self._name, written)


def parameter_schemas(tools: Sequence[Mapping[str, JSON]], name: str) -> dict[str, Mapping[str, JSON]]:
    """Return a tool's parameter schemas, its own `$defs` resolved; none of an unknown tool."""
    functions = [tool.get("function", tool) for tool in tools]
    parameters = next((one.get("parameters") or {} for one in functions if one.get("name") == name), {})
    definitions = parameters.get("$defs") or {}
    return {
        key: definitions.get(str(schema.get("$ref", "")).removeprefix("#/$defs/"), schema)
        for key, schema in (parameters.get("properties") or {}).items()
        if isinstance(schema, dict)
    }


def _types(schema: Mapping[str, JSON]) -> set[str]:
    """The JSON types a schema allows; empty if it does not say."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {str(name) for name in declared}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str) for value in values):
        return {"string"}
    branches = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return {name for branch in branches if isinstance(branch, dict) for name in _types(branch)}


def typed_value(value: str, schema: Mapping[str, JSON] | None) -> JSON:
    """Return the value as its schema types it; text where the schema is unknown. Raises ValueError."""
    types = _types(schema) if schema is not None else {"string"}
    bare = value.strip()
    if "null" in types and bare in ("null", "None"):
        return None
    if "string" in types:
        return value
    if "boolean" in types and bare in ("True", "False"):  # older templates print Python's spelling
        return bare == "True"
    try:
        return loads(bare)
    except ValueError:
        if types:
            raise
        return value  # any type is allowed, text too
