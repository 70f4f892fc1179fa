"""The JSON of our answers, and its schemas for the OpenAPI page, both made from the dataclasses themselves.

An answer is what `codec.to_builtins` writes, with the two differences that stand here: a rollout's status tells
`is_done` too, and a generation its first and last weight version, and not the engine's load and stand-still.
"""

from __future__ import annotations

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

_UNSAID = ("load", "standstill_s", "engine_s", "decode_s")  # of a generation
_ENDS = ("weight_version_start", "weight_version_end")  # of its tokens

_ANSWERS = (  # and what they are made of
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
    """Return a rollout's status as plain JSON."""
    return {**codec.to_builtins(status), "is_done": status.is_done}


def generation_answer(generation: Generation) -> dict[str, Any]:
    """Return a generation as plain JSON."""
    answer: dict[str, Any] = codec.to_builtins(generation)
    for name in _UNSAID:
        del answer[name]
    spans = generation.weight_versions
    ends = (spans[0].version, spans[-1].version) if spans else (None, None)
    return answer | dict(zip(_ENDS, ends, strict=True))


@cache
def answer_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of one of our dataclasses, or of a list of them; it refers to `answer_schemas`."""
    (schema,), _ = _schemas((kind,))
    return schema


def answer_schemas() -> dict[str, Any]:
    """Return the schema of every answer by the name of its dataclass."""
    _, schemas = _schemas(_ANSWERS)
    schemas["RolloutStatus"]["properties"]["is_done"] = {"type": "boolean"}
    for name in _UNSAID:
        del schemas["Generation"]["properties"][name]
    for name in _ENDS:
        schemas["Generation"]["properties"][name] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    for schema in schemas.values():
        if "properties" in schema:
            schema["required"] = list(schema["properties"])  # a field with a default is written too
    return schemas


def _schemas(kinds: tuple[Any, ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    return msgspec.json.schema_components(kinds, schema_hook=_array, ref_template=f"{SCHEMA_PREFIX}{{name}}")


def _array(kind: Any) -> dict[str, Any]:
    """Return the schema of an array; its element type is not told here: numbers, or booleans in a mask."""
    if kind is not np.ndarray:
        raise NotImplementedError
    return {"type": "array", "items": {"type": ["number", "boolean"]}}
