"""Scores: validated as a whole, added to a record by turn and path names, and encoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentloop.errors import RewardError
from agentloop.score import PathScore, Score, ended, resolved, score_of, scored, scored_group
from agentloop.types import FinishReason, Lineage, PathKind, SplitReason, StopReason, Trajectory
from agentloop.values import codec
from tests.support.records.samples import make_path, make_trajectory

TOKENS = np.arange(8, dtype=np.float32)


def forked() -> Trajectory:
    """A main path of two turns, a branch that shares the first one, and a side conversation of one turn."""
    main = make_path()
    first, second = main.turns
    branch = replace(
        main,
        turns=(first, replace(second, turn_id="2")),
        split_reason=SplitReason.BRANCH,
        parent=0,
        num_shared=len(main.prompt_ids) + first.end,
        lineage=Lineage(PathKind.CONTINUES, 0),
    )
    side = replace(main, turns=(replace(first, turn_id="3"),), lineage=Lineage(PathKind.UNRELATED))
    return make_trajectory(paths=(main, branch, side), reward=None)


def test_a_score_enters_the_record_whole():
    score = Score(
        0.5,
        {"format": 1, "answer": 0.0},
        {"num_steps": np.float32(2)},
        main=PathScore(tokens=TOKENS),
        paths={0: PathScore(turns=(0.25, None)), "3": PathScore(reward=-1.0, is_trainable=False)},
        turn_rewards={"2": 2.0},
    )
    record = scored(forked(), score)
    assert (record.reward, record.components, record.metrics) == (
        0.5,
        {"format": 1.0, "answer": 0.0},
        {"num_steps": 2.0},
    )
    assert [[turn.reward for turn in path.turns] for path in record.paths] == [[0.25, None], [0.25, 2.0], [None]]
    # Main: its latest path.
    assert [path.token_rewards is not None for path in record.paths] == [False, True, False]
    assert [path.is_trainable for path in record.paths] == [True, True, False]
    assert [record.reward_of(place) for place in range(3)] == [0.5, 0.5, -1.0]
    again = codec.decode(codec.encode(record), Trajectory)
    np.testing.assert_array_equal(again.paths[1].token_rewards, TOKENS)
    assert again.paths[0].token_rewards is None
    assert (again.components, again.metrics) == (record.components, record.metrics)
    assert codec.to_builtins(record)["paths"][1]["token_rewards"] == TOKENS.tolist()


def test_nobody_s_side_conversation_has_the_reward_of_the_main_one():
    record = scored(forked(), Score(1.0))
    assert [record.reward_of(place) for place in range(3)] == [1.0, 1.0, None]


def test_a_resolved_score_travels_and_says_the_same():
    record = forked()
    score = Score(main=PathScore(reward=2.0, turns=(1.0, 3.0), tokens=TOKENS), paths={2: PathScore(reward=0.0)})
    there = codec.decode(codec.encode(resolved(score, record)), Score)
    assert set(there.paths) == {"2", "3"}
    assert there.turn_rewards == {"0": 1.0, "2": 3.0}
    here, sent = scored(record, score), scored(record, there)
    assert codec.encode(here) == codec.encode(sent)


def test_a_turn_takes_the_paths_away_that_own_it():
    record = scored(forked(), Score(untrainable_turns=("0",)))
    assert [path.is_trainable for path in record.paths] == [False, True, True]


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (Score(float("nan")), "the reward must be finite, not nan"),
        (Score("1"), "the reward must be a number, not str"),
        (Score(components={"a": float("inf")}), "the component 'a' must be finite, not inf"),
        (Score(metrics={"a": None}), "the metric 'a' must be a number, not NoneType"),
        (Score(metrics=[1.0]), "metrics must be a mapping from names to numbers, not list"),
        (Score(metrics={"": 1.0}), "the name of a metric must be a str of 1 to 128 characters"),
        (Score(components={f"c{i}": 0.0 for i in range(257)}), "the score has 257 components; the maximum is 256"),
        (Score(turn_rewards={"7": 1.0}), "unknown turn '7': the trajectory has 4 turns, see Turn.turn_id"),
        (Score(untrainable_turns=("7",)), "unknown turn '7': the trajectory has 4 turns, see Turn.turn_id"),
        (
            Score(paths={3: PathScore()}),
            "unknown path '3': expected an index below 3 or the id of a path's last turn",
        ),
        (
            Score(paths={"0": PathScore()}),
            "unknown path '0': expected an index below 3 or the id of a path's last turn",
        ),
        (Score(10**400), "the reward must be finite, not inf"),
        (Score(paths={0: 1.0}), "the score of path 0 must be a PathScore, not float"),
        (
            Score(main=PathScore(turns=(1.0,))),
            "path 1 has 2 turns, but its score has 1 turn rewards: give one per turn",
        ),
        (
            Score(main=PathScore(turns=(1.0, float("nan")))),
            "the reward of turn 1 of the main path must be finite, not nan",
        ),
        (
            Score(main=PathScore(tokens=TOKENS[1:])),
            "path 1 has 8 response tokens, but its score has 7 token rewards: give one per token",
        ),
        (
            Score(main=PathScore(tokens=TOKENS * np.nan)),
            "the token rewards of the main path must be a one-dimensional array of finite numbers",
        ),
        (Score(main=PathScore(tokens=["a"] * 8)), "the token rewards of the main path must be an array of numbers"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(score, problem):
    with pytest.raises(RewardError) as caught:
        scored(forked(), score)
    assert str(caught.value) == problem


def test_there_is_no_main_path_where_nothing_was_rendered():
    record = make_trajectory(paths=(), reward=None)
    assert scored(record, Score(1.0)).reward == 1.0
    with pytest.raises(RewardError, match="nothing was rendered"):
        scored(record, Score(main=PathScore(reward=1.0)))


def test_two_scores_of_one_trajectory():
    mine, theirs = Score(1.0, {"a": 1.0}, turn_rewards={"0": 1.0}), Score(None, {"b": 2.0}, {"m": 3.0})
    assert mine.joined(theirs) == Score(1.0, {"a": 1.0, "b": 2.0}, {"m": 3.0}, turn_rewards={"0": 1.0})
    assert mine.updated(Score(2.0, {"a": 0.0})) == Score(2.0, {"a": 0.0}, turn_rewards={"0": 1.0})
    with pytest.raises(RewardError, match="two scores set the component 'a'"):
        mine.joined(Score(components={"a": 2.0}))
    with pytest.raises(RewardError, match="two scores set a reward"):
        mine.joined(Score(0.0))
    assert Score().is_empty
    assert not mine.is_empty
    assert score_of(1) == Score(1.0)


@pytest.mark.parametrize(
    ("stop_reason", "finish_reason", "is_truncated"),
    [
        (StopReason.COMPLETED, FinishReason.STOP, False),
        (StopReason.COMPLETED, FinishReason.LENGTH, True),  # an agent that accepts a turn cut by its own limit
        (StopReason.MAX_TURNS, FinishReason.STOP, True),
        (StopReason.DEADLINE, FinishReason.STOP, True),
        (StopReason.MALFORMED_CALL, FinishReason.STOP, False),
    ],
)
def test_what_a_limit_cut_is_truncated(stop_reason, finish_reason, is_truncated):
    path = make_path()
    path = replace(path, turns=(path.turns[0], replace(path.turns[1], finish_reason=finish_reason)))
    record = replace(make_trajectory(paths=(path,), stop_reason=stop_reason), is_complete=True)
    assert ended(record).is_truncated is is_truncated
    assert ended(record).path.is_trainable


def test_what_is_not_complete_is_not_trainable():
    record = ended(make_trajectory(stop_reason=StopReason.LOOP_FAILED))
    assert not record.path.is_trainable
    assert not scored(record, Score(paths={0: PathScore(is_trainable=True)})).path.is_trainable


def test_a_group_is_scored_by_its_complete_records():
    short, long = forked(), forked()
    lost = replace(forked(), stop_reason=StopReason.ENGINE_FAILED, is_complete=False)
    group = [long, lost, short]
    ranked = scored_group(group, lambda whole: [float(place) for place in range(len(whole))])
    assert [one.reward for one in ranked] == [0.0, None, 1.0]
    assert [one.reward for one in group] == [None, None, None]
    assert scored_group([lost], lambda whole: [1.0] * 99)[0] is lost
    with pytest.raises(RewardError, match="1 scores for 2 complete"):
        scored_group(group, lambda whole: [1.0])
