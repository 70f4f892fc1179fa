"""Constraints are tried before an engine receives them: accepted, refused with a reason, undecided, and cached."""

from __future__ import annotations

import asyncio
import json
import math
import time
from concurrent.futures import Future

import pytest

from agentloop.errors import InvalidRequest, ServiceUnavailable
from agentloop.parsers.base import ReasoningDelimiters
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.grammar import after_reasoning
from agentloop.types import Constraint, ConstraintKind
from agentloop_servers.engines.common.constraints import MAX_CHECKS, MAX_CPU_S, ConstraintCheck, ConstraintChecks


def schema(value: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern)


GOOD = {
    "object": schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    "any object": Constraint(ConstraintKind.JSON_OBJECT),
    "recursive": schema(
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        }
    ),
    "long strings": schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "many properties": schema({"type": "object", "properties": {f"p{index}": {} for index in range(500)}}),
    "formats": schema({"type": "array", "items": {"type": "string", "format": "date-time"}}),
    "slug": regex("[a-z0-9]+(-[a-z0-9]+)*"),
    "nothing": regex(""),
    "tag": Constraint(
        ConstraintKind.STRUCTURAL_TAG,
        '{"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}',
    ),
}
SLOW = "ambiguous|takes more than"  # the host determines which error comes first
BAD = {
    "no JSON": (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "JSON|line 1"),
    "a schema's end within": (Constraint(ConstraintKind.JSON_SCHEMA, '{}}, "x": {"a": 1'), "Extra data"),
    "a type that is none": (schema({"type": "nonsense"}), 'Unsupported type "nonsense"'),
    "false": (schema(False), "cannot accept any value"),
    "itself": (schema({"$ref": "#"}), "is in a cycle"),
    "a circle": (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "is in a cycle"),
    "nothing": (schema({"properties": {"a": {"$ref": "#/$defs/b"}}}), r"'#/\$defs/b' has no target"),
    "not enforceable": (schema({"type": "integer", "multipleOf": 3}), "cannot be enforced"),
    "too deep": (Constraint(ConstraintKind.JSON_SCHEMA, '{"not": ' * 100 + "{}" + "}" * 100), "nested too deeply"),
    "counted properties": (
        schema({"properties": {f"p{index}": {} for index in range(500)}, "minProperties": 250}),
        "at most 64 properties",
    ),
    "many patterns": (schema({"anyOf": [{"pattern": f"a{index}"} for index in range(65)]}), "the limit is 64"),
    "slow pattern": (schema({"properties": {"a": {"type": "string", "pattern": "((a?){100}){100}"}}}), SLOW),
    "no regex": (regex("(("), "not closed"),
    "lookahead": (regex("(?=a)b"), "Lookahead"),
    "slow regex": (regex("((a{1,100}){1,100}){1,100}"), SLOW),
    "many stars": (regex("(a*)*" * 50), SLOW),
    "no tag": (Constraint(ConstraintKind.STRUCTURAL_TAG, "[]"), "."),
}


@pytest.mark.parametrize("what", GOOD)
async def test_a_good_constraint_passes_and_is_remembered(what: str) -> None:
    checks = ConstraintChecks(patience_s=math.inf)
    await checks.check(GOOD[what])
    started_s = time.process_time()
    for _ in range(100):
        await checks.check(GOOD[what])
    assert time.process_time() - started_s < 1


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_constraint_is_refused_with_its_reason(what: str) -> None:
    constraint, reason = BAD[what]
    checks = ConstraintChecks(patience_s=math.inf)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await checks.check(constraint)
    assert caught.value.param == "constraint"
    await checks.check(GOOD["slug"])


async def test_the_loop_goes_on_during_a_trial() -> None:
    heavy = schema(
        {"properties": {f"p{index}": {"type": "string", "pattern": "^[a-z]{3,40}$"} for index in range(700)}}
    )
    trial = asyncio.ensure_future(ConstraintChecks(patience_s=math.inf).check(heavy))
    num_turns = 0
    while not trial.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    await asyncio.wait([trial])
    trial.exception()
    assert num_turns > 5


def forced(parser: str, value: dict[str, object]) -> Constraint:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": value}}}]
    return get_parser(parser).call_constraint(tools, forced="f", is_parallel=False)


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"minimum": 3, "type": "integer"}, {"maximum": 5, "type": "integer"}]}, "allOf"),
        ({"type": "integer", "not": {"const": 3}}, "not"),
    ],
)
async def test_a_keyword_that_is_not_enforced_is_refused_by_name_everywhere(
    value: dict[str, object], keyword: str
) -> None:
    """Alone, inside another schema, with tools, after reasoning, and in forced calls of two kinds of formats."""
    nested = schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": value}})
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "json_schema"}] * 2}}
    tag["format"]["elements"][1] = {"type": "json_schema", "json_schema": value}  # type: ignore[index]
    next_to_tools = Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))
    for constraint in (schema(value), nested, next_to_tools, after_reasoning(schema(value), ReasoningDelimiters())):
        with pytest.raises(InvalidRequest, match=keyword):
            await ConstraintChecks(patience_s=math.inf).check(constraint)
    for parser in ("hermes", "qwen3_xml", "glm45", "lfm2", "harmony"):
        with pytest.raises(InvalidRequest, match=keyword):
            forced(parser, value)


class FakeTrial(ConstraintCheck):
    """A trial that has used some CPU time and has no verdict yet."""

    def __init__(self, used_cpu_s: float) -> None:
        self.verdict = Future()
        self.used_cpu_s = used_cpu_s

    def cpu_s(self) -> float:
        return self.used_cpu_s


async def test_the_verdict_depends_on_cpu_time_alone() -> None:
    started: list[FakeTrial] = []

    def start(constraint: Constraint) -> ConstraintCheck:
        started.append(FakeTrial(MAX_CPU_S + 0.1 if constraint.text == "slow" else MAX_CPU_S - 0.1))
        return started[-1]

    checks = ConstraintChecks(start, patience_s=0)
    with pytest.raises(InvalidRequest, match="CPU time"):
        await checks.check(regex("slow"))
    for index in range(MAX_CHECKS - 2):  # none of them blocks the next one
        with pytest.raises(ServiceUnavailable, match="retry the request") as starved:
            await checks.check(regex(f"starved {index}"))
        assert (starved.value.http_status, starved.value.retryable) == (503, True)
    started[1].verdict.set_result("")
    await checks.check(regex("starved 0"))  # the same trial, which has ended since
    assert len(started) == MAX_CHECKS - 1
    for constraint in (regex("starved 6"), regex("starved 7")):
        with pytest.raises(ServiceUnavailable):
            await checks.check(constraint)
    with pytest.raises(ServiceUnavailable, match="which is the limit"):
        await checks.check(regex("one more"))
