"""A record's description of a turn's sampling, and its constrained tokens."""

import hashlib
from dataclasses import replace

import pytest

from agentloop.values import codec
from agentloop.values.sampling import (
    MAX_RECORDED_CONSTRAINT_CHARS,
    Constraint,
    ConstraintKind,
    LogprobsMode,
    SamplingParams,
    TurnSampling,
    shared,
    turn_sampling,
)

PARAMS = SamplingParams(
    max_tokens=64,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_tokens=2,
    seed=3,
    stop_token_ids=(2,),
    frequency_penalty=0.5,
    presence_penalty=-1.0,
    logit_bias=((3, -100.0), (4, 2.5)),
    num_top_logprobs=5,
    min_p=0.25,
    repetition_penalty=1.5,
)


def test_a_record_has_what_shaped_the_distribution_and_nothing_of_one_turn_alone() -> None:
    told = turn_sampling(PARAMS, LogprobsMode.BOTH)
    for name in TurnSampling.__dataclass_fields__:
        if not name.startswith("constraint"):
            assert getattr(told, name) == getattr(PARAMS, name, LogprobsMode.BOTH)
    assert (told.constraint_kind, told.constraint_text, told.constraint_digest) == (None, "", "")
    assert codec.decode(codec.encode(told), TurnSampling) == told


def test_turns_of_one_sampling_share_its_value() -> None:
    first = turn_sampling(PARAMS, LogprobsMode.SAMPLED)
    again = turn_sampling(replace(PARAMS, seed=4, max_tokens=5), LogprobsMode.SAMPLED)
    assert again is first
    assert turn_sampling(PARAMS, LogprobsMode.RAW) is not first
    assert shared(codec.decode(codec.encode(first), TurnSampling)) is first


@pytest.mark.parametrize("num_chars", [0, MAX_RECORDED_CONSTRAINT_CHARS, MAX_RECORDED_CONSTRAINT_CHARS + 1])
def test_a_long_constraint_is_told_by_its_digest(num_chars: int) -> None:
    text = "\ud800" * num_chars
    constraint = Constraint(ConstraintKind.REGEX, text)
    told = turn_sampling(replace(PARAMS, constraint=constraint), LogprobsMode.SAMPLED)
    assert told.constraint_kind is ConstraintKind.REGEX
    assert told.constraint_text == (text if num_chars <= MAX_RECORDED_CONSTRAINT_CHARS else "")
    assert told.constraint_digest == hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@pytest.mark.parametrize(
    ("sampling", "num_constrained"),
    [
        (TurnSampling(), 0),
        (TurnSampling(temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.1), 0),
        (TurnSampling(frequency_penalty=1.0, presence_penalty=1.0, stop_token_ids=(2,)), 0),
        (TurnSampling(constraint_kind=ConstraintKind.JSON_OBJECT), 6),
        (TurnSampling(logit_bias=((5, 0.0),)), 0),
        (TurnSampling(logit_bias=((5, 0.0), (6, -100.0))), 6),
        (TurnSampling(min_tokens=4), 0),
        (TurnSampling(min_tokens=4, stop_token_ids=(2,)), 4),
        (TurnSampling(min_tokens=9, stop_token_ids=(2,)), 6),
    ],
)
def test_what_bends_a_distribution_from_outside_constrains_its_tokens(
    sampling: TurnSampling, num_constrained: int
) -> None:
    assert sampling.num_constrained(6) == num_constrained
