"""The engine contract for sampling beyond temperature: alternatives, biases, penalties, constraints."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from agentloop.engine.interface import Delta
from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.types import Constraint, ConstraintKind, FinishReason, KVPolicy, PauseMode, ToolCallStatus
from agentloop.values.capabilities import CONSTRAINTS, Feature
from tests.contract.cases import EngineCase
from tests.contract.driving import TIMEOUT_S, Reading, generated
from tests.support.families.derived import NAMES, derived_chat

NUM_TOP = 5
FORCED = 100.0
SCHEMA = {
    "type": "object",
    "properties": {"is_ok": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}, "$ref": {"$ref": "#/$defs/unit"}},
    "required": ["is_ok", "level", "$ref"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["metre", "second"]}},
}
NUM_NUMBERS = 60
LONG = Constraint(ConstraintKind.REGEX, f"([1-9][0-9],){{{NUM_NUMBERS}}}")
BAD = {
    "no JSON": (ConstraintKind.JSON_SCHEMA, '{"type": '),
    "more than JSON": (ConstraintKind.JSON_SCHEMA, '{}}, "x": {"a": 1'),
    "no schema": (ConstraintKind.JSON_SCHEMA, '{"type": "nonsense"}'),
    "not enforceable": (ConstraintKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
    "nothing fits": (ConstraintKind.JSON_SCHEMA, '{"$ref": "#"}'),
    "too deep": (ConstraintKind.JSON_SCHEMA, '{"not": ' * 100 + "{}" + "}" * 100),
    "too long": (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": ["x" * 100_000]})),
    "slow to compile": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{index}": {} for index in range(500)}, "minProperties": 250}),
    ),
    "no regex": (ConstraintKind.REGEX, "(("),
    "slow regex": (ConstraintKind.REGEX, "(((a?){100}){100}){100}"),
    "slow pattern": (
        ConstraintKind.JSON_SCHEMA,
        '{"type": "string", "pattern": "((a*)*)*((b{1,90}){1,90}){1,90}"}',
    ),
    "no tag": (ConstraintKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "nonsense"}}'),
}


def constrained(schema: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.fixture
def constrainable(case: EngineCase) -> EngineCase:
    if not case.engine.info.features >= CONSTRAINTS:
        pytest.skip("this engine cannot constrain")
    return case


# Alternatives, biases, penalties


async def test_alternatives_come_with_each_token_streamed_or_not(case: EngineCase) -> None:
    case.require(Feature.SEED)
    prompt = case.prompt()
    wanted = {"temperature": 1.0, "seed": 7, "num_top_logprobs": NUM_TOP}
    whole = await generated(case, case.request(prompt, 24, **wanted))
    reading = Reading(case, case.request(prompt, 24, **wanted))
    streamed = await reading.end()
    assert sum((delta.top_logprobs for delta in reading.deltas), ()) == streamed.top_logprobs
    assert streamed.token_ids == whole.token_ids
    for token_id, logprob, top in zip(whole.token_ids, whole.logprobs, whole.top_logprobs, strict=True):
        assert sum(math.exp(value) for _, value in top) <= 1 + 1e-4
        likely = dict(top)
        assert len(likely) == len(top)
        if token_id in likely:
            assert logprob == pytest.approx(likely[token_id], abs=1e-5)
        else:
            assert len(top) == NUM_TOP
            assert logprob <= top[-1][1] + 1e-5


async def test_a_plain_request_brings_no_alternatives(case: EngineCase) -> None:
    assert (await generated(case, case.request(case.prompt(), 4))).top_logprobs == ()


async def test_a_bias_forbids_and_forces(case: EngineCase) -> None:
    case.require(Feature.LOGIT_BIAS)
    prompt = case.prompt()
    plain = await generated(case, case.request(prompt, 1))
    best = plain.token_ids[0]
    without = await generated(case, case.request(prompt, 12, logit_bias=((best, -100.0),)))
    assert best not in without.token_ids
    other = (best + 1) % case.engine.info.vocab_size
    forced = await generated(case, case.request(prompt, 6, temperature=1.0, logit_bias=((other, FORCED),)))
    assert forced.token_ids == (other,) * 6
    assert all(logprob > -1e-3 for logprob in forced.logprobs)


async def test_penalties_turn_to_what_was_not_said(case: EngineCase) -> None:
    case.require(Feature.LOGIT_BIAS)
    prompt, bias = case.prompt(), ((5, FORCED), (6, FORCED - 1))
    plain = await generated(case, case.request(prompt, 8, logit_bias=bias))
    often = await generated(case, case.request(prompt, 8, logit_bias=bias, frequency_penalty=2.0))
    once = await generated(case, case.request(prompt, 8, logit_bias=bias, presence_penalty=2.0))
    is_first_best = plain.token_ids == (5,) * 8
    assert is_first_best or set(plain.token_ids) == {6}  # the model decides which of them leads
    assert set(often.token_ids) == {5, 6}
    assert once.token_ids[:2] in ((5, 6), (6, 5)) or not is_first_best
    prompt_only = await generated(case, case.request((5,) * 40, 1, logit_bias=bias, frequency_penalty=2.0))
    assert prompt_only.token_ids[0] in (5, 6)


async def test_min_p_cuts_by_the_likeliest_one(case: EngineCase) -> None:
    case.require(Feature.MIN_P, Feature.LOGIT_BIAS)
    wanted = {"temperature": 1.0, "seed": 3, "num_top_logprobs": NUM_TOP}
    whole = await generated(case, case.request(case.prompt(1), 24, min_p=0.3, **wanted))
    for logprob, top in zip(whole.logprobs, whole.top_logprobs, strict=True):
        assert min(logprob, top[-1][1]) >= top[0][1] + math.log(0.3) - 1e-4
        if len(top) < NUM_TOP:
            assert sum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-3)
    forced = {"logit_bias": ((5, FORCED),), **wanted}
    free = await generated(case, case.request(case.prompt(1), 2, **forced))
    cut = await generated(case, case.request(case.prompt(1), 2, min_p=0.3, **forced))
    assert all(len(top) > 1 for top in free.top_logprobs)
    assert [len(top) for top in cut.top_logprobs] == [1, 1]


async def test_a_repetition_penalty_counts_the_prompt_too(case: EngineCase) -> None:
    case.require(Feature.LOGIT_BIAS)
    bias, prompt = ((5, 60.0), (6, 55.0)), (*(i for i in case.prompt() if i not in (5, 6)), 5)
    plain = await generated(case, case.request(prompt, 2, logit_bias=bias))
    assert plain.token_ids == (5, 5)
    penalised = await generated(case, case.request(prompt, 2, logit_bias=bias, repetition_penalty=2.0))
    assert penalised.token_ids == (6, 5)


async def test_the_stop_token_is_banned_until_min_tokens_have_come(case: EngineCase) -> None:
    case.require(Feature.LOGIT_BIAS)
    wanted = {"logit_bias": ((case.stop_id, FORCED),), "stop_token_ids": (case.stop_id,)}
    request = case.request(case.prompt(), 8, min_tokens=3, num_top_logprobs=NUM_TOP, **wanted)
    answer = await generated(case, request)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids.index(case.stop_id) == 3
    assert all(case.stop_id not in dict(top) for top in answer.top_logprobs[:3])


async def test_only_a_stop_token_of_the_request_ends_it(case: EngineCase) -> None:
    case.require(Feature.LOGIT_BIAS)
    forced = ((case.stop_id, FORCED),)
    for ignores in (False, True):
        wanted = {"logit_bias": forced, "ignore_eos": ignores, "min_tokens": 2}
        answer = await generated(case, case.request(case.prompt(), 4, **wanted))
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.token_ids == (case.stop_id,) * 4


async def test_at_temperature_0_logprobs_are_those_at_1_without_truncation(case: EngineCase) -> None:
    case.require(Feature.MIN_P)
    prompt, adjusted = case.prompt(), {"num_top_logprobs": NUM_TOP, "repetition_penalty": 1.2}
    greedy = await generated(case, case.request(prompt, 1, **adjusted))
    cut = await generated(case, case.request(prompt, 1, top_p=0.1, top_k=1, min_p=1.0, **adjusted))
    warm = await generated(case, case.request(prompt, 1, temperature=1.0, seed=1, **adjusted))
    assert greedy.token_ids[0] == greedy.top_logprobs[0][0][0]
    assert greedy.logprobs[0] < -1e-3
    for other in (cut, warm):
        assert dict(other.top_logprobs[0]) == pytest.approx(dict(greedy.top_logprobs[0]), abs=1e-3)
    assert cut.logprobs == pytest.approx(greedy.logprobs, abs=1e-3)


# Constraints


async def test_an_engine_that_cannot_constrain_refuses(case: EngineCase) -> None:
    if case.engine.info.features >= CONSTRAINTS:
        pytest.skip("this engine can constrain")
    request = case.request(case.prompt(), 8, constraint=constrained(SCHEMA), stop_token_ids=(case.stop_id,))
    with pytest.raises(InvalidRequest) as caught:
        await case.engine.generate(request)
    assert caught.value.param == "constraint"


async def test_a_constraint_is_kept_to_its_end(constrainable: EngineCase) -> None:
    constrainable.require(Feature.LOGIT_BIAS)
    case = constrainable
    assert case.text_of is not None
    # JSON allows whitespace of any length, which a small policy may sample up to the limit.
    spaces = [one for one in range(case.engine.info.vocab_size) if case.text_of((one,)).isspace()]
    for seed in range(6):
        wanted = {"temperature": 1.0, "seed": seed, "stop_token_ids": (case.stop_id,), "num_top_logprobs": NUM_TOP}
        wanted["logit_bias"] = tuple((one, -FORCED) for one in spaces)
        request = case.request(case.prompt(), 400, constraint=constrained(SCHEMA), **wanted)
        answer = await generated(case, request)
        assert answer.finish_reason is FinishReason.STOP
        value = json.loads(case.text_of(answer.token_ids[:-1]))
        assert value.keys() == {"is_ok", "level", "$ref"}
        assert value["level"] in (1, 2, 3)
        # Logprobs are under the constraint: the only allowed token is certain, and all allowed tokens sum to 1.
        assert any(len(top) == 1 for top in answer.top_logprobs)
        for logprob, top in zip(answer.logprobs, answer.top_logprobs, strict=True):
            if len(top) < NUM_TOP:
                assert sum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-3)
            if len(top) == 1:
                assert logprob == pytest.approx(0, abs=1e-4)


async def test_any_object_and_a_regex_constrain(constrainable: EngineCase) -> None:
    case = constrainable
    assert case.text_of is not None
    wanted = {"temperature": 1.0, "seed": 1, "stop_token_ids": (case.stop_id,)}
    regex = Constraint(ConstraintKind.REGEX, "(yes|no), [0-9]{3}")
    answer = await generated(case, case.request(case.prompt(), 20, constraint=regex, **wanted))
    assert answer.finish_reason is FinishReason.STOP
    assert case.text_of(answer.token_ids[:-1]).partition(", ")[0] in ("yes", "no")
    anything = Constraint(ConstraintKind.JSON_OBJECT)
    begun = await generated(case, case.request(case.prompt(), 20, constraint=anything, **wanted))
    assert case.text_of(begun.token_ids).lstrip().startswith("{")


async def test_a_constraint_ends_at_the_requests_own_stop_token_only(constrainable: EngineCase) -> None:
    constrainable.require(Feature.LOGIT_BIAS)
    case = constrainable
    own = (case.stop_id + 1) % case.engine.info.vocab_size
    regex = Constraint(ConstraintKind.REGEX, "(yes|no)")
    answer = await generated(case, case.request(case.prompt(), 20, constraint=regex, stop_token_ids=(own,)))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] == own


async def test_a_seed_repeats_a_constrained_turn(constrainable: EngineCase) -> None:
    constrainable.require(Feature.SEED)
    case, prompt = constrainable, constrainable.prompt()
    wanted = {"temperature": 1.0, "seed": 11, "stop_token_ids": (case.stop_id,), "constraint": constrained(SCHEMA)}
    first = await generated(case, case.request(prompt, 200, **wanted))
    second = await generated(case, case.request(prompt, 200, **wanted))
    assert (first.token_ids, first.finish_reason) == (second.token_ids, second.finish_reason)


@pytest.mark.parametrize("kv_policy", [KVPolicy.KEEP, KVPolicy.RECOMPUTE])
async def test_a_constraint_outlives_a_commit(constrainable: EngineCase, kv_policy: KVPolicy) -> None:
    case = constrainable
    assert case.text_of is not None
    wanted = {"temperature": 1.0, "seed": 3, "stop_token_ids": (case.stop_id,), "num_top_logprobs": 2}
    reading = Reading(case, case.request(case.prompt(), 900, constraint=LONG, **wanted))
    update = case.next_update()
    await case.engine.stage(update)
    await reading.middle()
    await case.engine.pause(PauseMode.KEEP, kv_policy)
    await case.engine.commit(update.version)
    await case.engine.resume()
    answer = await reading.end()
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.weight_versions) == 2
    assert case.text_of(answer.token_ids[:-1]).count(",") == NUM_NUMBERS
    assert all(isinstance(delta, Delta) and delta.top_logprobs for delta in reading.deltas)


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_constraint_is_refused_soon_and_harms_nobody(constrainable: EngineCase, what: str) -> None:
    case = constrainable
    kind, text = BAD[what]
    beside = Reading(case, case.request(case.prompt(), case.long_tokens))
    request = case.request(
        case.prompt(), 40, temperature=1.0, stop_token_ids=(case.stop_id,), constraint=Constraint(kind, text)
    )
    with pytest.raises(InvalidRequest) as caught:
        await asyncio.wait_for(case.engine.generate(request), TIMEOUT_S / 2)
    assert caught.value.param == "constraint"
    assert len((await beside.end()).token_ids) == case.long_tokens


async def test_a_constraint_needs_a_way_to_end(constrainable: EngineCase) -> None:
    case, constraint = constrainable, constrained(SCHEMA)
    with pytest.raises(InvalidRequest) as no_stop:
        await case.engine.generate(case.request(case.prompt(), 8, constraint=constraint))
    with pytest.raises(InvalidRequest) as least:
        await case.engine.generate(
            case.request(case.prompt(), 8, constraint=constraint, stop_token_ids=(case.stop_id,), min_tokens=2)
        )
    assert (no_stop.value.param, least.value.param) == ("stop_token_ids", "min_tokens")


TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "when": {"$ref": "#/$defs/day"},
                    "is_quick": {"type": "boolean"},
                    "note": {"type": "string", "maxLength": 12},
                },
                "required": ["when", "is_quick", "note"],
                "$defs": {
                    "day": {
                        "type": "object",
                        "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
                    }
                },
            },
        },
    },
]


@pytest.mark.parametrize("parser_name", ["hermes", "qwen3_xml", *NAMES])
@pytest.mark.parametrize("forced", [None, "book"])
async def test_forced_calls_can_be_read(constrainable: EngineCase, parser_name: str, forced: str | None) -> None:
    case, parser = constrainable, derived_chat(parser_name)[1] if parser_name in NAMES else get_parser(parser_name)
    assert case.text_of is not None
    constraint = parser.call_constraint(TOOLS, forced=forced, is_parallel=False)
    wanted = {"temperature": 1.0, "stop_token_ids": (case.stop_id,), "constraint": constraint}
    requests = [case.request(case.prompt(seed), 400, seed=seed, **wanted) for seed in range(6)]
    answers = await asyncio.gather(*(generated(case, request) for request in requests))
    ended = [answer for answer in answers if answer.finish_reason is FinishReason.STOP]
    assert len(ended) > len(answers) / 2  # a string may be long at temperature 1
    for answer in ended:
        text = case.text_of(answer.token_ids[:-1])
        turn = parser.parse(DecodedText(text, tuple(range(1, len(text) + 1))), TOOLS, 0)
        assert [call.status for call in turn.calls] == [ToolCallStatus.OK]
        assert turn.content == ""
        assert turn.calls[0].name == "book" or forced is None
