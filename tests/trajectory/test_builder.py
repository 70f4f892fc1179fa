"""TrajectoryBuilder: alignment, forks, and turns that an abort cut."""

import numpy as np
import pytest

from agentloop.errors import InvariantBroken
from agentloop.trajectory.builder import TrajectoryBuilder
from agentloop.types import FinishReason, Generation, Turn, WeightVersionSpan


def generation(ids, *, spans=None, finish=FinishReason.STOP, logprobs=None, cached=0) -> Generation:
    spans = [(0, 0, len(ids))] if spans is None else spans
    return Generation(
        request_id="r",
        token_ids=tuple(ids),
        logprobs=tuple(logprobs if logprobs is not None else [-0.5] * len(ids)),
        weight_versions=tuple(WeightVersionSpan(*span) for span in spans),
        finish_reason=finish,
        cached_tokens=cached,
        replica_id="a",
    )


def test_two_turns_align_everything():
    builder = TrajectoryBuilder()
    builder.start([1, 2, 3])
    builder.add_sampled(generation([10, 11], spans=[(0, 0, 1), (1, 1, 2)]))
    builder.add_observed([20, 21, 22])
    builder.add_sampled(generation([12], spans=[(1, 0, 1)], cached=4))
    (path,) = builder.finish()
    assert path.prompt_ids.tolist() == [1, 2, 3]
    assert path.response_ids.tolist() == [10, 11, 20, 21, 22, 12]
    assert path.response_mask.tolist() == [True, True, False, False, False, True]
    assert path.logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert path.weight_versions == (
        WeightVersionSpan(0, 0, 1),
        WeightVersionSpan(1, 1, 2),
        WeightVersionSpan(1, 5, 6),
    )
    assert path.turns == (
        Turn(3, 0, 2, FinishReason.STOP, "a", 0),
        Turn(8, 5, 6, FinishReason.STOP, "a", 4),
    )
    assert path.prompt_ids.dtype == np.int32
    assert path.logprobs.dtype == np.float32


def test_the_next_prompt_is_exactly_the_path_so_far():
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([2]))
    builder.add_observed([3])
    assert builder.context_ids == (1, 2, 3)
    assert builder.num_context_tokens == 3


@pytest.mark.parametrize(
    "broken",
    [
        generation([1, 2], logprobs=[-0.1]),
        generation([1, 2], spans=[(0, 0, 1)]),
        generation([1, 2], spans=[(0, 0, 1), (1, 0, 2)]),
        generation([1, 2], spans=[]),
        generation([1], spans=[(0, 0, 2)]),
    ],
    ids=["logprobs", "short spans", "overlapping spans", "no spans", "long span"],
)
def test_misaligned_data_is_a_crash(broken):
    builder = TrajectoryBuilder()
    builder.start([0])
    with pytest.raises(InvariantBroken):
        builder.add_sampled(broken)


def test_an_aborted_turn_goes_on_as_one_turn():
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([2, 3], finish=FinishReason.ABORT))
    builder.add_sampled(generation([4], spans=[(1, 0, 1)]), continues_turn=True)
    (path,) = builder.finish()
    assert path.turns == (Turn(1, 0, 3, FinishReason.STOP, "a", 0),)
    assert path.weight_versions == (WeightVersionSpan(0, 0, 2), WeightVersionSpan(1, 2, 3))


def test_an_aborted_turn_without_tokens_goes_on():
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([], spans=[], finish=FinishReason.ABORT))
    builder.add_sampled(generation([4]), continues_turn=True)
    (path,) = builder.finish()
    assert path.turns == (Turn(1, 0, 1, FinishReason.STOP, "a", 0),)


def test_a_prompt_that_extends_the_path_is_observed():
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([2]))
    builder.extend_to([1, 2, 3], "template")
    (path,) = builder.finish()
    assert path.response_ids.tolist() == [2, 3]


def test_a_prompt_that_rewrites_history_forks_with_its_reason():
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([2]))
    builder.extend_to([1, 9, 3], "template")
    builder.add_sampled(generation([4]))
    first, second = builder.finish()
    assert (first.split_reason, second.split_reason) == (None, "template")
    assert first.response_ids.tolist() == [2]
    assert second.prompt_ids.tolist() == [1, 9, 3]
    assert second.response_ids.tolist() == [4]


@pytest.mark.parametrize(
    ("verb", "version", "mask"),
    [
        ("mask_older_than", 1, [False, False, True, False, True]),
        ("mask_older_than", 0, [True, True, True, False, True]),
        ("mask_newer_than", 0, [True, True, False, False, False]),
        ("mask_newer_than", 2, [True, True, True, False, True]),
    ],
)
def test_masking_by_version_changes_the_mask_alone(verb, version, mask):
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([10, 11, 12], spans=[(0, 0, 2), (1, 2, 3)]))
    builder.add_observed([20])
    builder.add_sampled(generation([13], spans=[(2, 0, 1)]))
    (before,) = builder.finish()
    getattr(builder, verb)(version)
    getattr(builder, verb)(version)  # again: nothing is counted twice
    (path,) = builder.finish()
    assert path.response_mask.tolist() == mask
    assert builder.num_masked_tokens == 4 - sum(mask)
    assert path.logprobs.tolist() == before.logprobs.tolist() == [-0.5, -0.5, -0.5, 0.0, -0.5]
    assert path.response_ids.tolist() == before.response_ids.tolist()
    assert (path.weight_versions, path.turns) == (before.weight_versions, before.turns)
    assert path.trained_versions == {span.version for span in path.weight_versions if mask[span.start]}
    assert builder.oldest_version == 0


def test_masking_reaches_every_path():
    builder = TrajectoryBuilder()
    builder.start([1])
    builder.add_sampled(generation([2]))
    builder.extend_to([1, 9, 3], "template")
    builder.add_sampled(generation([4], spans=[(1, 0, 1)]))
    builder.mask_older_than(1)
    assert [path.response_mask.tolist() for path in builder.finish()] == [[False], [True]]


def test_nothing_grows_before_a_start():
    with pytest.raises(InvariantBroken):
        TrajectoryBuilder().add_observed([1])
