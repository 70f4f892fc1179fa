"""Detection of broken weights: by the answer to a fixed prompt, and by sampled logprobs that stay uniform."""

import math

import pytest

from agentloop.engine.canary import (
    CANARY_PREFIX,
    UniformLogprobWatch,
    canary_deadline_s,
    canary_request,
    find_weight_fault,
)
from agentloop.engine.interface import EngineInfo
from agentloop.errors import InvalidRequest
from agentloop.scheduling.rollout_queue import RolloutQueue
from agentloop.types import FinishReason, Generation, WeightVersionSpan

VOCAB = 1000
UNIFORM = -math.log(VOCAB)


def answer(logprob: float, *tops: float) -> Generation:
    alternatives = (tuple(enumerate(tops)),)
    return Generation(
        "r", (1,), (logprob,), (WeightVersionSpan(1, 0, 1),), FinishReason.LENGTH, 0, top_logprobs=alternatives
    )


@pytest.mark.parametrize(
    ("logprob", "tops", "fault"),
    [
        (UNIFORM, [UNIFORM], "all equal"),
        (UNIFORM - 1e-6, [UNIFORM + 1e-6], "all equal"),
        (math.nan, [], "not finite"),
        (math.nan, [math.nan], "not finite"),
        (-math.inf, [UNIFORM], "not finite"),
        (UNIFORM, [UNIFORM + 0.01], None),  # an untrained model
        (-9.0, [-0.1], None),
        (0.0, [0.0], None),
    ],
)
def test_the_answer_to_a_fixed_prompt(logprob, tops, fault):
    found = find_weight_fault(answer(logprob, *tops), VOCAB)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize("vocab_size", [2, VOCAB])
def test_the_fixed_prompt_fits_any_model_and_names_differ(vocab_size):
    info = EngineInfo("x", 64, vocab_size, 16, 1 << 10, 4)
    first, second = canary_request(info), canary_request(info)
    assert first.token_ids == second.token_ids
    assert max(first.token_ids) < vocab_size
    assert first.request_id != second.request_id
    for request in (first, second):  # the id of a user's rollout has no slash, so no other request runs first
        assert request.request_id.startswith(CANARY_PREFIX)
        with pytest.raises(InvalidRequest, match="must not be empty or contain"):
            RolloutQueue().reserve(request.request_id, [])


@pytest.mark.parametrize(("slow_step_s", "deadline_s"), [(0.0, 10.0), (1.0, 10.0), (3.0, 24.0), (60.0, 50.0)])
def test_the_deadline_of_the_check_follows_the_slowest_recent_step(slow_step_s, deadline_s):
    assert canary_deadline_s(slow_step_s) == deadline_s


def test_only_uniform_logprobs_in_a_row_are_reported():
    watch = UniformLogprobWatch()
    for _ in range(100):
        watch.see(answer(UNIFORM), VOCAB)
        watch.see(answer(-1.0), VOCAB)
    assert not watch.is_uniform
    for number in range(16):
        assert not watch.is_uniform, number
        watch.see(answer(UNIFORM), VOCAB)
    assert watch.is_uniform
    watch.see(answer(-1.0), VOCAB)
    assert not watch.is_uniform
