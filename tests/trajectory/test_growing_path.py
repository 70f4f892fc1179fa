"""GrowingPath: alignment, forks, turns cut by an abort, and the messages of each path."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.errors import InvariantBroken
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import FinishReason, Generation, Message, TokenPath, Turn, WeightVersionSpan
from agentloop.values.codec import encode
from tests.support.records.turns import make_reply


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
    growing = GrowingPath()
    growing.start([1, 2, 3])
    growing.add_turn(make_reply(generation([10, 11], spans=[(0, 0, 1), (1, 1, 2)])))
    growing.add_observed([20, 21, 22])
    growing.add_turn(make_reply(generation([12], spans=[(1, 0, 1)], cached=4)))
    (path,) = growing.paths()
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
        Turn(3, 0, 2, FinishReason.STOP, "a", 0, "0"),
        Turn(8, 5, 6, FinishReason.STOP, "a", 4, "1"),
    )
    assert path.prompt_ids.dtype == np.int32
    assert path.logprobs.dtype == np.float32


def test_the_next_prompt_is_exactly_the_path_so_far():
    growing = GrowingPath()
    growing.start([1])
    assert growing.num_known_tokens == 0
    growing.add_turn(make_reply(generation([2])))
    assert growing.num_known_tokens == 2
    growing.add_observed([3])
    assert growing.context_ids == (1, 2, 3)
    assert (growing.num_context_tokens, growing.num_known_tokens) == (3, 2)
    growing.extend_to([9, 9])
    assert growing.num_known_tokens == 0, "a fork at a new root extends no turn"


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
    growing = GrowingPath()
    growing.start([0])
    with pytest.raises(InvariantBroken):
        growing.add_turn(make_reply(broken))


def test_an_aborted_turn_goes_on_as_one_turn():
    growing = GrowingPath()
    growing.start([1])
    cut = generation([2, 3], finish=FinishReason.ABORT)
    growing.add_turn(make_reply(cut, generation([4], spans=[(1, 0, 1)])))
    (path,) = growing.paths()
    assert path.turns == (Turn(1, 0, 3, FinishReason.STOP, "a", 0, "0"),)
    assert path.weight_versions == (WeightVersionSpan(0, 0, 2), WeightVersionSpan(1, 2, 3))


def test_an_aborted_turn_without_tokens_goes_on():
    growing = GrowingPath()
    growing.start([1])
    growing.add_turn(make_reply(generation([], spans=[], finish=FinishReason.ABORT), generation([4])))
    (path,) = growing.paths()
    assert path.turns == (Turn(1, 0, 1, FinishReason.STOP, "a", 0, "0"),)


def test_a_prompt_that_extends_the_path_is_observed():
    growing = GrowingPath()
    growing.start([1])
    growing.add_turn(make_reply(generation([2])))
    growing.extend_to([1, 2, 3])
    (path,) = growing.paths()
    assert path.response_ids.tolist() == [2, 3]


def test_a_prompt_that_rewrites_history_forks_with_its_reason():
    growing = GrowingPath()
    growing.start([1])
    growing.add_turn(make_reply(generation([2])))
    growing.extend_to([1, 9, 3])
    growing.add_turn(make_reply(generation([4])))
    first, second = growing.paths()
    assert (first.split_reason, second.split_reason) == (None, "template")
    assert (second.parent, second.num_shared) == (0, 0)
    assert second.split_detail == "tokens[1]: [1, 2] was there, [1, 9, 3] came"
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
    growing = GrowingPath()
    growing.start([1])
    growing.add_turn(make_reply(generation([10, 11, 12], spans=[(0, 0, 2), (1, 2, 3)])))
    growing.add_observed([20])
    growing.add_turn(make_reply(generation([13], spans=[(2, 0, 1)])))
    (before,) = growing.paths()
    getattr(growing, verb)(version)
    getattr(growing, verb)(version)  # repeated: nothing is counted twice
    (path,) = growing.paths()
    assert path.response_mask.tolist() == mask
    assert path.num_masked_tokens == 4 - sum(mask)
    assert path.logprobs.tolist() == before.logprobs.tolist() == [-0.5, -0.5, -0.5, 0.0, -0.5]
    assert path.response_ids.tolist() == before.response_ids.tolist()
    assert (path.weight_versions, path.turns) == (before.weight_versions, before.turns)
    assert path.trained_versions == {span.version for span in path.weight_versions if mask[span.start]}
    assert growing.versions == {0, 1, 2}


def test_masking_reaches_every_path():
    growing = GrowingPath()
    growing.start([1])
    growing.add_turn(make_reply(generation([2])))
    growing.extend_to([1, 9, 3])
    growing.add_turn(make_reply(generation([4], spans=[(1, 0, 1)])))
    growing.mask_older_than(1)
    assert [path.response_mask.tolist() for path in growing.paths()] == [[False], [True]]


def test_nothing_grows_before_a_start():
    with pytest.raises(InvariantBroken):
        GrowingPath().add_observed([1])


def test_a_path_has_the_messages_up_to_where_it_ended():
    task, late = (Message("system", "be brief"), Message("user", "x")), Message("user", "late")
    growing = GrowingPath(task)
    growing.start([1])
    growing.add_turn(make_reply(generation([2]), message=Message("assistant", "a")))
    growing.observe(Message("tool", "b"))
    assert growing.pending == (Message("tool", "b"),)
    growing.extend_to([1, 9, 3])
    assert growing.pending == ()
    growing.add_turn(make_reply(generation([4]), message=Message("assistant", "c")))
    growing.observe(late)
    first, second = growing.paths()
    assert first.messages == (*task, Message("assistant", "a"))
    assert second.messages == growing.messages
    assert growing.messages == (*first.messages, Message("tool", "b"), Message("assistant", "c"), late)


def test_a_prompt_without_a_turn_is_a_path_without_a_response():
    growing = GrowingPath((Message("user", "x"),))
    growing.start([1, 2])
    (path,) = growing.paths()
    assert (path.prompt_ids.tolist(), path.response_ids.tolist(), path.turns) == ([1, 2], [], ())
    growing.extend_to([5, 6])
    growing.add_turn(make_reply(generation([7])))
    (path,) = growing.paths()
    assert (path.prompt_ids.tolist(), path.response_ids.tolist(), path.split_reason) == ([5, 6], [7], None)


def test_what_nothing_was_sampled_after_is_observed():
    growing = GrowingPath()
    growing.start([1])
    growing.add_turn(make_reply(generation([2])))
    growing.add_observed([3, 4])
    (path,) = growing.paths()
    assert (path.response_ids.tolist(), path.response_mask.tolist()) == ([2, 3, 4], [True, False, False])
    assert len(path.turns) == 1


PIECE = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=3)  # versions and their numbers of ids
TURN = st.tuples(
    st.sampled_from(["observe", "extend", "fork"]), st.integers(0, 4), st.lists(PIECE, min_size=1, max_size=3)
)


def pieces_of(runs, number: int) -> list[Generation]:
    found = []
    for index, piece in enumerate(runs):
        ends = np.cumsum([0, *[length for _, length in piece]]).tolist()
        spans = [(version, *part) for (version, _), part in zip(piece, pairwise(ends), strict=True)]
        finish = FinishReason.STOP if index == len(runs) - 1 else FinishReason.ABORT
        ids = range(100, 100 + ends[-1])
        found.append(generation(ids, spans=spans, finish=finish, cached=10 * number + index))
    return found


def check(path: TokenPath) -> None:
    sampled = np.zeros(len(path.response_ids), np.bool_)
    for turn in path.turns:
        sampled[turn.start : turn.end] = True
        assert turn.prompt_len == len(path.prompt_ids) + turn.start
        assert turn.finish_reason is FinishReason.STOP
        assert turn.cached_tokens % 10 == 0, "the first generation's"
    assert path.response_mask.tolist() == sampled.tolist()
    assert (path.logprobs != 0).tolist() == sampled.tolist()
    covered = np.zeros(len(path.response_ids), np.int64)
    for span in path.weight_versions:
        covered[span.start : span.end] += 1
    assert (covered == sampled).all()
    joined = [a.version == b.version and a.end == b.start for a, b in pairwise(path.weight_versions)]
    assert not any(joined)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(TURN, min_size=1, max_size=8))
def test_everything_aligns_however_a_rollout_goes(turns):
    task = [Message("user", "task")]
    growing = GrowingPath(task)
    growing.start([1, 2])
    num_forks, nodes = 0, []
    for number, (how, num_observed, runs) in enumerate(turns):
        ids = list(range(200, 200 + num_observed))
        if number:
            growing.observe(Message("user", f"before turn {number}"))
        if number and how == "observe":
            growing.add_observed(ids)
        elif number:
            prompt = [*growing.context_ids, *ids]
            num_forks += how == "fork"
            growing.extend_to([1000 + number, *prompt[1:]] if how == "fork" else prompt)
        growing.add_turn(make_reply(*pieces_of(runs, number)))
        nodes.append(growing.last_turn)
        # A path restored from the turns so far continues like this one: the remaining turns check it.
        same = GrowingPath.restored(nodes)
        assert encode(same.paths()) == encode(growing.paths())
        assert same.versions == growing.versions
        assert (same.messages, same.context_ids, same.last_turn_id) == (
            growing.messages,
            growing.context_ids,
            growing.last_turn_id,
        )
        growing = same
    paths = growing.paths()
    assert len(paths) == 1 + num_forks
    assert [path.parent for path in paths] == [None, *range(num_forks)]
    assert sum(len(path.turns) for path in paths) == len(turns)
    assert growing.context_ids == (*paths[-1].prompt_ids.tolist(), *paths[-1].response_ids.tolist())
    for path in paths:
        check(path)
