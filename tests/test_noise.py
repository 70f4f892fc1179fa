"""How noise is told from a model, by the answer to a fixed prompt and by what is sampled."""

import math

import pytest

from agentloop.engine import EngineInfo
from agentloop.noise import NoiseWatch, is_telling, look_request, noise_problem
from agentloop.types import Constraint, FinishReason, Generation, SamplingParams, WeightVersionSpan

VOCAB = 1000
UNIFORM = -math.log(VOCAB)


def answer(logprob: float, *tops: float) -> Generation:
    alternatives = (tuple(enumerate(tops)),)
    return Generation(
        "r", (1,), (logprob,), (WeightVersionSpan(1, 0, 1),), FinishReason.LENGTH, 0, top_logprobs=alternatives
    )


@pytest.mark.parametrize(
    ("logprob", "tops", "problem"),
    [
        (UNIFORM, [UNIFORM], "all equal"),
        (UNIFORM - 1e-6, [UNIFORM + 1e-6], "all equal"),
        (math.nan, [], "not finite"),
        (math.nan, [math.nan], "not finite"),
        (-math.inf, [UNIFORM], "not finite"),
        (UNIFORM, [UNIFORM + 0.01], None),  # a model that was never trained
        (-9.0, [-0.1], None),
        (0.0, [0.0], None),
    ],
)
def test_the_answer_to_a_fixed_prompt(logprob, tops, problem):
    found = noise_problem(answer(logprob, *tops), VOCAB)
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize("vocab_size", [2, VOCAB])
def test_the_fixed_prompt_fits_any_model_and_names_differ(vocab_size):
    info = EngineInfo("x", 64, vocab_size, 16, 1 << 10, 4)
    first, second = look_request(info), look_request(info)
    assert first.token_ids == second.token_ids
    assert max(first.token_ids) < vocab_size
    assert first.request_id != second.request_id


@pytest.mark.parametrize(
    ("sampling", "logprob", "tells"),
    [
        (SamplingParams(1), -0.5, True),
        (SamplingParams(1, temperature=0.0), -0.5, True),
        (SamplingParams(1), UNIFORM, False),
        (SamplingParams(1), math.nan, False),
        (SamplingParams(1, top_p=0.6), UNIFORM - math.log(0.6), False),
        (SamplingParams(1, top_k=1), 0.0, False),
        (SamplingParams(1, top_p=0.1), -0.5, False),
        (SamplingParams(1, logit_bias=((3, 50.0),)), 0.0, False),
        (SamplingParams(1, constraint=Constraint("regex", "a")), 0.0, False),
    ],
)
def test_what_others_sampled_tells_only_where_they_could_choose(sampling, logprob, tells):
    assert is_telling(sampling, logprob, VOCAB) is tells


def test_noise_is_what_stays():
    watch = NoiseWatch()
    for _ in range(100):
        watch.see(answer(UNIFORM), VOCAB)
        watch.see(answer(-1.0), VOCAB)
    assert not watch.is_noise
    for number in range(16):
        assert not watch.is_noise, number
        watch.see(answer(UNIFORM), VOCAB)
    assert watch.is_noise
    watch.see(answer(-1.0), VOCAB)
    assert not watch.is_noise
