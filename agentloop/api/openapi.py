"""JSON responses and their OpenAPI schemas, both derived from the dataclasses.

A response is the result of `codec.to_builtins`, with two exceptions: a rollout's status includes `is_done`; a
generation includes its first and last weight version, but not `load`, `unavailable_s`, `engine_s` and `decode_s`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from agentloop.api.coordinator import Page, RolloutStatus, ServiceStatus, UpdateReport
from agentloop.api.facts import FactsPage, NotableRecord, RecordPage
from agentloop.api.findings import Finding
from agentloop.api.flight import FlightPage
from agentloop.api.history import HistoryPage
from agentloop.types import Generation
from agentloop.values import codec

SCHEMA_PREFIX = "#/components/schemas/"

_UNSAID = ("load", "unavailable_s", "engine_s", "decode_s", "aux")  # omitted fields of a generation
_ENDS = ("weight_version_start", "weight_version_end")  # added fields of a generation

_ANSWERS = (  # msgspec adds the schemas of the dataclasses in their fields
    Finding,
    FlightPage,
    Generation,
    FactsPage,
    HistoryPage,
    NotableRecord,
    Page,
    RecordPage,
    ServiceStatus,
    UpdateReport,
)


def rollout_status(status: RolloutStatus) -> dict[str, Any]:
    """Return the JSON value of a rollout's status."""
    return {**codec.to_builtins(status), "is_done": status.is_done}


def generation_answer(generation: Generation) -> dict[str, Any]:
    """Return the JSON value of a generation."""
    answer: dict[str, Any] = codec.to_builtins(replace(generation, aux=None))
    for name in _UNSAID:
        del answer[name]
    spans = generation.weight_versions
    ends = (spans[0].version, spans[-1].version) if spans else (None, None)
    return answer | dict(zip(_ENDS, ends, strict=True))


@cache
def answer_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a dataclass or a list of it, with references to `answer_schemas`."""
    (schema,), _ = _schemas((kind,))
    return schema


def answer_schemas() -> dict[str, Any]:
    """Return the schemas of all responses and their parts, by the name of the dataclass."""
    _, schemas = _schemas(_ANSWERS)
    schemas["RolloutStatus"]["properties"]["is_done"] = {"type": "boolean"}
    for name in _UNSAID:
        del schemas["Generation"]["properties"][name]
    for name in _ENDS:
        schemas["Generation"]["properties"][name] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    for schema in schemas.values():
        if "properties" in schema:
            schema["required"] = list(schema["properties"])  # fields with their default value are written too
    return schemas


def _schemas(kinds: tuple[Any, ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    return msgspec.json.schema_components(kinds, schema_hook=_array, ref_template=f"{SCHEMA_PREFIX}{{name}}")


def _array(kind: Any) -> dict[str, Any]:
    # msgspec does not pass the element type: numbers, or booleans in a mask.
    if kind is not np.ndarray:
        raise NotImplementedError
    return {"type": "array", "items": {"type": ["number", "boolean"]}}
