"""Constraints tried before an engine gets them: what passes, what is refused and how soon, what is remembered."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from agentloop.errors import InvalidRequest
from agentloop.types import Constraint, ConstraintKind
from agentloop_servers.engines.common.constraints import DEADLINE_S, ConstraintTrials


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
SLOW = "ambiguous|takes more than"  # which of the two is found first depends on the host
BAD = {
    "no JSON": (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "JSON|line 1"),
    "a schema's end within": (Constraint(ConstraintKind.JSON_SCHEMA, '{}}, "x": {"a": 1'), "Extra data"),
    "a type that is none": (schema({"type": "nonsense"}), 'Unsupported type "nonsense"'),
    "false": (schema(False), "cannot accept any value"),
    "itself": (schema({"$ref": "#"}), "no text fits"),
    "a circle": (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text fits"),
    "not enforceable": (schema({"type": "integer", "multipleOf": 3}), "cannot be enforced"),
    "too deep": (Constraint(ConstraintKind.JSON_SCHEMA, '{"not": ' * 100 + "{}" + "}" * 100), "nested too deeply"),
    "counted properties": (
        schema({"properties": {f"p{index}": {} for index in range(500)}, "minProperties": 250}),
        "at most 64 properties",
    ),
    "many patterns": (schema({"anyOf": [{"pattern": f"a{index}"} for index in range(65)]}), "64 patterns"),
    "slow pattern": (schema({"properties": {"a": {"type": "string", "pattern": "((a?){100}){100}"}}}), SLOW),
    "no regex": (regex("(("), "not closed"),
    "lookahead": (regex("(?=a)b"), "Lookahead"),
    "slow regex": (regex("((a{1,100}){1,100}){1,100}"), SLOW),
    "many stars": (regex("(a*)*" * 50), SLOW),
    "no tag": (Constraint(ConstraintKind.STRUCTURAL_TAG, "[]"), "."),
}


@pytest.fixture(scope="module", autouse=True)
async def imported() -> None:
    """The first trial imports xgrammar, which takes longer than a trial may."""
    for _ in range(20):
        try:
            await ConstraintTrials().check(regex("a"))
        except InvalidRequest:
            continue
        return
    raise AssertionError("no trial ended in time")


@pytest.mark.parametrize("what", GOOD)
async def test_a_good_constraint_passes_and_is_remembered(what: str) -> None:
    trials = ConstraintTrials()
    await trials.check(GOOD[what])
    started_s = time.process_time()
    for _ in range(100):
        await trials.check(GOOD[what])
    assert time.process_time() - started_s < 1


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_constraint_is_refused_with_its_reason(what: str) -> None:
    constraint, reason = BAD[what]
    trials, started_s = ConstraintTrials(), time.monotonic()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await trials.check(constraint)
    assert caught.value.param == "constraint"
    assert time.monotonic() - started_s < 2 * DEADLINE_S
    await trials.check(GOOD["slug"])


async def test_the_loop_goes_on_during_a_trial() -> None:
    heavy = schema({"properties": {f"p{index}": {"pattern": "^[a-z]{3,40}$"} for index in range(700)}})
    trial = asyncio.ensure_future(ConstraintTrials().check(heavy))
    num_turns = 0
    while not trial.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    await asyncio.wait([trial])
    trial.exception()
    assert num_turns > 5
