"""The response schemas of the OpenAPI document match the responses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from agentloop.api.coordinator import Page, ReplicaStatus, ReplicaUpdate, RolloutStatus, ServiceStatus, UpdateReport
from agentloop.api.openapi import answer_schema, answer_schemas, generation_answer, rollout_status
from agentloop.types import FinishReason, Generation, KVPolicy, Load, Trajectory, WeightVersionSpan
from agentloop.values import codec
from tests.support.records.samples import make_trajectory

STATUS = RolloutStatus("r", 2, 1, 1, 0)
REPORT = UpdateReport(1, 0, KVPolicy.KEEP, (ReplicaUpdate("r", 1.0, 2.0),), 3.0)
GENERATION = Generation("id", (5,), (-0.5,), (WeightVersionSpan(0, 0, 1),), FinishReason.STOP, 3, "replica-0")
LINE = ReplicaStatus("r", "ready", "vllm", 0, Load(), 1, 0.5)
KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def unlike(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """Return the paths at which a value has fields or value types that the schema does not have."""
    if "$ref" in schema:
        return unlike(value, schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return min((unlike(value, one, schemas) for one in schema["anyOf"]), key=len)
    if isinstance(value, dict) and "properties" in schema:
        if set(value) != set(schema["properties"]) or set(value) != set(schema["required"]):
            return [f"{schema['title']}: {sorted(value)}"]
        places = schema["properties"]
        return [f"{name}.{fault}" for name, one in value.items() for fault in unlike(one, places[name], schemas)]
    if isinstance(value, list) and "prefixItems" not in schema:
        return [fault for one in value for fault in unlike(one, schema.get("items", {}), schemas)]
    named = schema.get("type", [])
    allowed = tuple(KINDS[kind] for kind in ([named] if isinstance(named, str) else named))
    return [] if not allowed or isinstance(value, allowed) else [f"{value!r}: {named}"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Page, {**codec.to_builtins(Page((make_trajectory(),), 1, STATUS)), "status": rollout_status(STATUS)}),
        (
            ServiceStatus,
            {
                **codec.to_builtins(ServiceStatus(True, False, 0, (LINE,), 1, (), (REPORT,))),
                "rollouts": [rollout_status(STATUS)],
            },
        ),
        (UpdateReport, codec.to_builtins(REPORT)),
        (Generation, generation_answer(GENERATION)),
        (list[Trajectory], codec.to_builtins([make_trajectory()])),
    ],
)
def test_answers_have_the_documented_shape(kind: Any, value: Any) -> None:
    written = orjson.loads(orjson.dumps(value))
    assert unlike(written, answer_schema(kind), answer_schemas()) == []
    broken = {**written[0], "unknown": 1} if isinstance(written, list) else {**written, "unknown": 1}
    assert unlike([broken] if isinstance(written, list) else broken, answer_schema(kind), answer_schemas())


def test_a_generation_is_read_again() -> None:
    assert codec.from_builtins(orjson.loads(orjson.dumps(generation_answer(GENERATION))), Generation) == GENERATION
