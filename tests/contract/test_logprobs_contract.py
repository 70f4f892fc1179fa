"""The engine contract for logprobs: the distribution that they describe, recomputed from a record."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from agentloop.parsers.by_name import get_parser
from agentloop.types import Constraint, ConstraintKind, FloatArray, GenerateRequest, Generation, KVPolicy
from agentloop.values.capabilities import Feature, features_asked
from agentloop.values.sampling import LogprobsMode, turn_sampling
from tests.contract.cases import EngineCase
from tests.contract.driving import Reading, commit_next, generated
from tests.contract.reference import log_softmax, sampled_logprobs

STRICT = 1e-3
"""The largest difference of a logprob from the recomputed one if the engine's arithmetic is equally exact:
float32 rounding over sums in another order is a tenth of it."""
APART = 0.02  # two different distributions differ by more at some token
NUM_TOKENS = 24
MAX_ERRORS = 5.0  # standard errors of a sum over samples
NUM_SLACKS = 17  # so that two neighboring cuts are closer than the bound
NUM_ROUNDINGS = 2  # the engine and the rounded model round in different orders
BOOK = [
    {"type": "function", "function": {"name": "book", "parameters": {"properties": {"n": {"type": "integer"}}}}}
]

SETTINGS: dict[str, dict[str, Any]] = {
    "T 0": {"temperature": 0.0},
    "T 0.5": {"temperature": 0.5},
    "T 1": {},
    "T 2": {"temperature": 2.0},
    "T 0, truncated": {"temperature": 0.0, "top_p": 0.3, "top_k": 2, "min_p": 0.5},
    "T 0, penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "all cuts": {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": -1.5, "temperature": 0.7},
    "repetition": {"repetition_penalty": 1.4, "temperature": 0.5},
    "all penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 0.8, "top_k": 40},
    "bias": {"logit_bias": (*((token_id, 4.0) for token_id in range(7, 60)), (5, 9.0), (6, -100.0))},
    "min_tokens": {"min_tokens": 10, "temperature": 0.5},
}


def ask(case: EngineCase, prompt: tuple[int, ...], wanted: dict[str, Any]) -> GenerateRequest:
    sampling = {"temperature": 1.0, "seed": 3, "stop_token_ids": (case.stop_id,), **wanted}
    return case.request(prompt, NUM_TOKENS, **sampling)


async def one(case: EngineCase, prompt: tuple[int, ...], wanted: dict[str, Any]) -> Generation:
    return await generated(case, ask(case, prompt, wanted))


async def test_raw_logprobs_come_beside_those_of_the_distribution(case: EngineCase) -> None:
    """At temperature 1 with no other setting, both are equal; a bias changes only the sampled logprobs."""
    assert case.engine.info.logprobs_mode is LogprobsMode.BOTH
    prompt = case.prompt()
    plain = await one(case, prompt, {"num_top_logprobs": 3})
    assert plain.logprobs_mode is LogprobsMode.BOTH
    assert plain.raw_logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    if Feature.LOGIT_BIAS in case.engine.info.features:
        forced = await one(case, prompt, {"logit_bias": ((5, 100.0),)})
        assert set(forced.token_ids) == {5}
        assert max(forced.raw_logprobs) < -0.1
        assert min(forced.logprobs) > -1e-3
    cool = await one(case, prompt, {"temperature": 0.5, "top_k": 1})
    # In bfloat16 several ids may tie for the first place, and share its probability.
    shares = [-math.log(count) for count in range(1, 2 if case.logit_error < STRICT else 4)]
    assert all(min(abs(logprob - share) for share in shares) < 1e-5 for logprob in cool.logprobs)
    assert min(cool.raw_logprobs) < -0.05  # a trained policy may be certain of most of its likeliest tokens


async def test_pieces_have_their_raw_logprobs(case: EngineCase) -> None:
    for num_tops in (0, 4):
        reading = Reading(case, case.request(case.prompt(), 48, temperature=0.5, num_top_logprobs=num_tops))
        whole = await reading.end()
        assert tuple(p for delta in reading.deltas for p in delta.raw_logprobs) == whole.raw_logprobs
        assert all(delta.logprobs_mode is LogprobsMode.BOTH for delta in reading.deltas)
        assert all(math.isfinite(logprob) for logprob in whole.raw_logprobs)


@pytest.fixture
def recomputable(case: EngineCase) -> EngineCase:
    if case.logits_of is None:
        pytest.skip("no independent model")
    return case


def check(case: EngineCase, request: GenerateRequest, answer: Generation, what: str) -> float:
    """Check an answer's sampled and raw logprobs against its record; return the largest difference between them."""
    assert case.logits_of is not None
    prompt, ids, constraint = request.token_ids, answer.token_ids, request.sampling.constraint
    told = turn_sampling(request.sampling, answer.logprobs_mode)
    logits = case.logits_of(case.checkpoint, prompt + ids)[len(prompt) - 1 : -1]
    errors = case.logit_error * np.abs(logits).max(axis=1)
    if case.rounded_logits_of is not None:
        rounded = case.rounded_logits_of(case.checkpoint, prompt + ids)[len(prompt) - 1 : -1]
        errors = np.maximum(errors, NUM_ROUNDINGS * np.abs(rounded - logits).max(axis=1))
    allowed = np.ones_like(logits, dtype=np.bool_)
    if constraint is not None:
        assert case.allowed_by is not None
        allowed = case.allowed_by(constraint, ids, told.stop_token_ids)
    stretch = max(told.repetition_penalty, 1 / told.repetition_penalty) / (told.temperature or 1.0)
    within = bound(errors, stretch)
    found = np.array(
        [
            [
                sampled_logprobs(logits[at], told, prompt, ids[:at], allowed[at], slack=slack)[token_id]
                for slack in slacks(float(within[at] - STRICT))
            ]
            for at, token_id in enumerate(ids)
        ]
    )
    # A token may be excluded by the higher cuts; the cuts that keep it bound its logprob.
    low = np.where(np.isfinite(found), found, np.inf).min(axis=1)
    high = found.max(axis=1)
    sampled = np.where(np.isfinite(found[:, 0]), found[:, 0], high)
    raw = [log_softmax(logits[at])[token_id] for at, token_id in enumerate(ids)]
    logprobs = np.array(answer.logprobs)
    is_off = (logprobs <= low - within) | (logprobs >= high + within)
    off = [(logprobs[at], low[at], high[at], within[at]) for at in np.flatnonzero(is_off)]
    assert not off, f"{what}: recorded, lowest, highest, bound: {off}"
    assert (np.abs(np.array(answer.raw_logprobs) - raw) < bound(errors, 1.0)).all(), what
    return float(np.abs(sampled - raw).max())


def slacks(error: float) -> tuple[float, ...]:
    """Return the possible shifts of the cuts in nats: zero first, then evenly from the lowest to the highest.

    An error of the logits can put a token near a cut on different sides in two arithmetics, and the kept tokens are
    then divided by a different sum; for a token that is barely kept, it is the sum of the tightest cut that keeps
    it. Both a token and the token that it is compared with may be off.
    """
    return 0.0, *np.linspace(-2 * error, 2 * error, NUM_SLACKS)


def bound(errors: FloatArray, stretch: float) -> FloatArray:
    """Return the largest allowed difference of each logprob from the recomputed one, given the engine's precision.

    The error of a logprob is that of its row's logits, `errors`: the normalizer averages over the others. `stretch`
    is the factor by which sampling multiplies logits. For a CPU in float32 the bound is `STRICT`; for a GPU, whose
    float32 is TF32 in places, it is 0.06 for logits of 20 at temperature 1.
    """
    result: FloatArray = STRICT + stretch * errors
    return result


async def test_logprobs_are_those_of_the_record_recomputed(recomputable: EngineCase) -> None:
    """All settings run concurrently: requests in one batch must not change each other's distribution."""
    case = recomputable
    # the other checkpoint is so certain that different settings may look equal
    if case.checkpoint != case.checkpoints[0]:
        await commit_next(case, KVPolicy.RECOMPUTE)
    requests = {name: ask(case, case.prompt(), given) for name, given in SETTINGS.items()}
    can = case.engine.info.can.features
    requests = {name: one for name, one in requests.items() if not features_asked(one.sampling) & ~can}
    answers = await asyncio.gather(*(generated(case, request) for request in requests.values()))
    apart = {}
    for (name, request), answer in zip(requests.items(), answers, strict=True):
        apart[name] = check(case, request, answer, name)
    assert {name for name in apart if apart[name] < APART} == {"T 0", "T 1", "T 0, truncated"} & apart.keys()


async def test_repetition_is_as_likely_as_the_model_says(recomputable: EngineCase) -> None:
    """An engine that drafts repetitions must not sample them more often, nor record them as likelier.

    The guess at each position is a function of the ids before it: the id that followed the latest occurrence of the
    same id. So the sum of its hits minus their probabilities is within chance.
    """
    case = recomputable
    assert case.logits_of is not None
    if case.checkpoint != case.checkpoints[0]:
        await commit_next(case, KVPolicy.RECOMPUTE)
    prompts = [case.prompt(num_tokens=16) * 5 for _ in range(24)]
    requests = [case.request(prompt, 64, temperature=1.0, seed=at) for at, prompt in enumerate(prompts)]
    surplus = variance = 0.0
    for request, answer in zip(
        requests, await asyncio.gather(*(generated(case, r) for r in requests)), strict=True
    ):
        check(case, request, answer, "repetition")
        ids, start = request.token_ids + answer.token_ids, len(request.token_ids)
        probabilities = np.exp([log_softmax(row) for row in case.logits_of(case.checkpoint, ids)[start - 1 : -1]])
        for at, row in enumerate(probabilities, start):
            before = max((i for i in range(at - 1) if ids[i] == ids[at - 1]), default=at - 2)
            chance = float(row[ids[before + 1]])
            surplus += (ids[at] == ids[before + 1]) - chance
            variance += chance * (1 - chance)
    assert variance > 9, "the guesses are too certain or too wild to tell"
    assert abs(surplus) < MAX_ERRORS * math.sqrt(variance)


@pytest.mark.parametrize("what", ["regex", "forced call"])
async def test_logprobs_of_constrained_tokens_recomputed(recomputable: EngineCase, what: str) -> None:
    case = recomputable
    constraint = Constraint(ConstraintKind.REGEX, "(yes|no|maybe), [0-9]{3}")
    if what == "forced call":
        constraint = get_parser("hermes").call_constraint(BOOK, forced="book", is_parallel=False)
    for given in ({"temperature": 0.0}, {}, {"temperature": 0.5, "frequency_penalty": 0.3}, {"top_k": 3}):
        request = ask(case, case.prompt(), {"constraint": constraint, **given})
        assert check(case, request, await generated(case, request), f"{what} {given}") > 1
