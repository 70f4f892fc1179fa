"""The OpenAPI document is correct: schemathesis sends valid and invalid requests to every route.

It runs all of its checks on the answers. Deterministic: a fixed seed, few examples. Two things are changed in the
document before it is used: bounds that only megabytes reach are dropped (the bad-input table has those), and model
names become the service's, because a 404 to every body would hide later errors. Streams are requested too: their
first byte decides.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from schemathesis.schemas import BaseSchema

from agentloop_servers.endpoint.endpoint import DEFAULT_MODEL
from agentloop_servers.http.auth import Keys
from tests.support.endpoint.chat_service import SPEC, chat_service

LARGE = {"maxItems": 256, "maxLength": 2048, "maxProperties": 256}
REFUSALS = [400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 431]
CONFIG = {
    "seed": 7,
    "generation": {"max-examples": 3, "deterministic": True, "database": "none"},
    "headers": {"Authorization": "Bearer admin-1"},
    "checks": {
        "negative_data_rejection": {"expected-statuses": REFUSALS},
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 504]},  # a timeout_s near zero
    },
}
WHOLE = {"stateful": {"enabled": False}}
FUZZED = {**WHOLE, "coverage": {"enabled": False}}
"""Without the phase that takes nine of ten calls, and finds by rule what the other finds by chance."""
CHAINS = {
    **{phase: {"enabled": False} for phase in ("examples", "coverage", "fuzzing")},
    "stateful": {"enabled": True, "max-steps": 6, "generation": {"max-examples": 10}},
}
"""Calls that are made with what the ones before answered: the ids of sessions and rollouts above all."""
RULES = {
    "a rule between fields": r"(give|send) either|needs |requires |above the maximum|larger than the maximum|"
    r"differ|two sessions|exactly one|must be|without tools|(unknown|there is no) (tool|turn)|two tools|holds no |"
    r"is empty|twice|different sessions|exclude each other|cannot be combined|is greater than|kept for sessions|"
    r"not in 'tools'|cannot have a block|something else to score|not the client's to set|is reserved|"
    r"the arguments (have at most|exceed)|give a rid|rid must have|an update is a|for \d+ names|"
    r"expected world_size|is below min_version",
    "what no schema says of an image or of a 32-bit float": r"data URL|an image (is|must be) a|"
    r"takes no images|does not accept images|is not finite|finite 32-bit",
    "the model's bounds": r"leaves no room|outside \[0|context|the limit is engine",
    "what is not implemented": r"not supported|images are not fetched|only text is answered|"
    r"one prompt|can(not)? be continued|not edited|engine cannot|broadcast is not taken|does not support|"
    r"requires scores of the prompt|cannot be (recorded|streamed)|completely",
    "free JSON that no codec holds": r"nested (deeper|too deeply)|(beyond|into) 64 bits|not JSON of 64-bit|"
    r"lone surrogate",
    "no schema for a compiler": r"\$ref|(a|the) schema (has|is nested)|a pattern (has|contains)",
    "not of this service": r"weight roots|unknown (tool|loop|reward)",
}
"""Why what the document allows may yet be refused, by the text of the refusal: a schema cannot say these."""


class Fault(NamedTuple):
    operation: str
    check: str
    detail: str


def without_large_bounds(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_large_bounds(item)
            for key, item in value.items()
            if not (key in LARGE and isinstance(item, int) and item > LARGE[key])
        }
    return [without_large_bounds(item) for item in value] if isinstance(value, list) else value


def loaded(document: dict[str, Any], url: str, phases: dict[str, Any]) -> BaseSchema:
    config = SchemathesisConfig.from_dict({**CONFIG, "base-url": url, "phases": phases})
    schema = schemathesis.openapi.from_dict(without_large_bounds(document), config=config)

    @schema.hook
    def map_body(context: Any, body: Any) -> Any:
        if isinstance(body, dict) and isinstance(body.get("model"), str) and 1 <= len(body["model"]) <= 256:
            body["model"] = DEFAULT_MODEL
        return body

    return schema


def faults_of(schema: BaseSchema, num_checked: dict[str, int]) -> Iterator[Fault]:
    """Yield all faults that schemathesis finds; counts the checked answers by operation."""
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            error = event.value if isinstance(event, events.NonFatalError) else event.exception
            yield Fault(getattr(event, "label", ""), "run", repr(error))
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case_id, checks in event.recorder.checks.items():
            label = event.recorder.label
            num_checked[label] = num_checked.get(label, 0) + 1
            answer = event.recorder.interactions[case_id].response
            said = answer.content.decode(errors="replace") if answer is not None else ""
            for one in checks:
                if one.failure_info is None:
                    continue
                if one.name == "positive_data_acceptance" and any(re.search(rule, said) for rule in RULES.values()):
                    continue
                case = event.recorder.cases[case_id].value
                asked = f"{case.method} {case.formatted_path} {str(case.body)[:300]}"
                yield Fault(label, one.name, f"{one.failure_info.failure.message[:400]}\n{asked}\n{said[:300]}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # schemathesis itself raises warnings
@pytest.mark.parametrize(
    ("phases", "num_each"), [(FUZZED, 2), pytest.param(WHOLE, 40, marks=pytest.mark.long)], ids=["fuzzed", "whole"]
)
async def test_the_document_is_true(tmp_path: Path, phases: dict[str, Any], num_each: int) -> None:
    spec = replace(SPEC, max_context_tokens=128)
    async with chat_service(tmp_path, keys=Keys.of(["user-1"], "admin-1"), spec=spec) as service:
        _, document, _ = await service.call("GET", "/openapi.json")
        schema = loaded(document, service.url, phases)
        num_checked: dict[str, int] = {}
        faults = await asyncio.to_thread(lambda: list(faults_of(schema, num_checked)))
        assert not faults, "\n\n".join(f"{one.check}: {one.operation}\n{one.detail}" for one in faults)
        operations = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
        assert set(num_checked) == operations
        assert sum(num_checked.values()) > num_each * len(operations)
        assert (service.engine.load().num_running, service.engine.load().num_waiting) == (0, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
async def test_the_document_is_true_of_calls_that_follow_from_each_other(tmp_path: Path) -> None:
    spec = replace(SPEC, max_context_tokens=128)
    async with chat_service(tmp_path, keys=Keys.of(["user-1"], "admin-1"), spec=spec) as service:
        _, document, _ = await service.call("GET", "/openapi.json")
        schema = loaded(document, service.url, CHAINS)
        num_checked: dict[str, int] = {}
        faults = await asyncio.to_thread(lambda: list(faults_of(schema, num_checked)))
        assert not faults, "\n\n".join(f"{one.check}: {one.operation}\n{one.detail}" for one in faults)
        assert sum(num_checked.values()) > 20
        assert (service.engine.load().num_running, service.engine.load().num_waiting) == (0, 0)
