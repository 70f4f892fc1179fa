"""The accumulator of sampled tokens: ids, logprobs, alternatives and spans stay aligned for any input."""

import pytest

from agentloop.engine.interface import Delta
from agentloop.errors import InvariantBroken
from agentloop.types import (
    FinishReason,
    Load,
    WeightVersionSpan,
    append_span,
    clip_spans,
    shifted_spans,
    tiling_problem,
)
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode


def spans(*triples):
    return tuple(WeightVersionSpan(*triple) for triple in triples)


def appended(versions, *, has_tops=False):
    sampled = SampledTokens()
    for index, version in enumerate(versions):
        sampled.append(index, -float(index), version, ((index, -0.5),) if has_tops else None)
    return sampled


def test_token_by_token_makes_one_span_a_version():
    sampled = appended([3, 3, 4, 4, 4])
    assert sampled.weight_versions == spans((3, 0, 2), (4, 2, 5))
    assert len(sampled) == 5


def test_a_slice_has_offsets_of_its_own():
    piece = appended([3, 3, 4, 4, 4], has_tops=True).since(1, 4)
    assert piece == Delta(
        (1, 2, 3),
        (-1.0, -2.0, -3.0),
        spans((3, 0, 1), (4, 1, 3)),
        (((1, -0.5),), ((2, -0.5),), ((3, -0.5),)),
    )


@pytest.mark.parametrize("at", range(6))
def test_pieces_concatenate_to_the_whole(at):
    whole, again = appended([3, 3, 4, 4, 4], has_tops=True), SampledTokens()
    again.add(whole.since(0, at))
    again.add(whole.since(at))
    assert again.since(0) == whole.since(0)


@pytest.mark.parametrize("at", range(6))
def test_a_cut_leaves_what_was_before_it(at):
    whole, cut = appended([3, 3, 4, 4, 4], has_tops=True), appended([3, 3, 4, 4, 4], has_tops=True)
    cut.cut(at)
    assert cut.since(0) == whole.since(0, at)


def test_a_cut_goes_on_under_any_version():
    sampled = appended([3, 3, 4])
    sampled.cut(2)
    sampled.append(9, -1.0, 3)
    assert sampled.weight_versions == spans((3, 0, 3))


def test_an_older_version_after_a_newer_one_is_a_span_of_its_own():
    assert appended([3, 4, 3]).weight_versions == spans((3, 0, 1), (4, 1, 2), (3, 2, 3))


def test_versions_may_be_told_later():
    sampled = SampledTokens()
    sampled.extend([1, 2, 3], [-1.0, -2.0, -3.0])
    with pytest.raises(InvariantBroken):
        sampled.since(0)
    sampled.set_spans(spans((7, 0, 2), (8, 2, 3)))
    assert sampled.since(1) == Delta((2, 3), (-2.0, -3.0), spans((7, 0, 1), (8, 1, 2)))


def test_a_generation_has_all_of_it():
    generation = appended([3, 4]).generation(
        "r", FinishReason.LENGTH, cached_tokens=5, replica_id="replica-0", load=Load(num_running=2)
    )
    assert generation.token_ids == (0, 1)
    assert generation.logprobs == (0.0, -1.0)
    assert generation.weight_versions == spans((3, 0, 1), (4, 1, 2))
    assert (generation.request_id, generation.finish_reason) == ("r", FinishReason.LENGTH)
    assert (generation.cached_tokens, generation.replica_id, generation.load.num_running) == (5, "replica-0", 2)


@pytest.mark.parametrize(
    "piece",
    [
        Delta((1, 2), (-1.0,), spans((0, 0, 2))),
        Delta((1, 2), (-1.0, -1.0), spans((0, 0, 1))),
        Delta((1, 2), (-1.0, -1.0), spans((0, 1, 2))),
        Delta((1, 2), (-1.0, -1.0), spans((0, 0, 2)), (((1, -1.0),),)),
        Delta((1, 2), (-1.0, -1.0), spans((0, 0, 2)), (), (-1.0, -1.0)),
        Delta((1, 2), (-1.0, -1.0), spans((0, 0, 2)), (), (-1.0, -1.0), LogprobsMode.BOTH),
        Delta((1, 2), (-1.0, -1.0), spans((0, 0, 2)), (), (), LogprobsMode.RAW),
    ],
)
def test_what_is_not_aligned_is_not_added(piece):
    sampled = appended([3])
    with pytest.raises(InvariantBroken):
        sampled.add(piece)
    assert sampled.since(0) == appended([3]).since(0)


def test_span_arithmetic():
    joined = list(spans((1, 0, 2)))
    for span in spans((1, 2, 4), (1, 5, 6), (2, 6, 7)):
        append_span(joined, span)
    assert joined == list(spans((1, 0, 4), (1, 5, 6), (2, 6, 7)))
    assert shifted_spans(joined, 3) == list(spans((1, 3, 7), (1, 8, 9), (2, 9, 10)))
    assert clip_spans(joined, 3, 7) == spans((1, 0, 1), (1, 2, 3), (2, 3, 4))
    assert tiling_problem(spans((1, 0, 2), (1, 2, 3)), 3) is None
    assert tiling_problem((), 0) is None
    assert "cover 2 of 3" in tiling_problem(spans((1, 0, 2)), 3)
    assert "do not tile" in tiling_problem(spans((1, 0, 2), (2, 3, 4)), 4)


def test_raw_logprobs_grow_with_their_tokens():
    engines = SampledTokens(LogprobsMode.BOTH)
    for token_id in range(3):
        engines.append(token_id, -1.0, 3, raw_logprob=-2.0 - token_id)
    callers = SampledTokens()
    callers.add(engines.since(0, 2))
    callers.add(engines.since(2))
    callers.cut(2)
    whole = callers.generation("r", FinishReason.LENGTH)
    assert (whole.raw_logprobs, whole.logprobs_mode) == ((-2.0, -3.0), LogprobsMode.BOTH)
    with pytest.raises(InvariantBroken):
        engines.extend([7], [-1.0])
