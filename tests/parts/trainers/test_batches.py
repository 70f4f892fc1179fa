"""Rows of a group: every trained token once, with its version and logprob, and the group's baseline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentloop.simulation.policy import routed_experts
from agentloop.types import (
    FinishReason,
    Lineage,
    PathKind,
    StopReason,
    TokenPath,
    Trajectory,
    Turn,
    WeightVersionSpan,
)
from agentloop_trainers.batches import NO_VERSION, count_group, group_rows
from tests.support.records.samples import make_path as make_recorded_path
from tests.support.records.samples import with_aux


def make_path(num_prompt: int, mask: str, versions: str, **fields: object) -> TokenPath:
    """Return a path whose response is `mask`: `x` trained, `m` sampled and masked, `.` observed."""
    spans: list[WeightVersionSpan] = []
    for at, (kind, version) in enumerate(zip(mask, versions, strict=True)):
        if kind != ".":
            if spans and spans[-1].end == at and spans[-1].version == int(version):
                spans[-1] = replace(spans[-1], end=at + 1)
            else:
                spans.append(WeightVersionSpan(int(version), at, at + 1))
    num = len(mask)
    return TokenPath(
        prompt_ids=np.arange(num_prompt, dtype=np.int32),
        response_ids=np.arange(100, 100 + num, dtype=np.int32),
        response_mask=np.array([kind == "x" for kind in mask]),
        logprobs=np.array([0.0 if kind == "." else -0.5 - at for at, kind in enumerate(mask)], np.float32),
        weight_versions=tuple(spans),
        turns=(Turn(num_prompt, 0, num, FinishReason.STOP, "r", 0),),
        **fields,  # type: ignore[arg-type]
    )


def make_trajectory(sample_index: int, reward: float | None, *paths: TokenPath, **fields: object) -> Trajectory:
    return Trajectory(
        "task",
        "group",
        sample_index,
        paths,
        StopReason.COMPLETED,
        reward is not None,
        reward=reward,
        **fields,  # type: ignore[arg-type]
    )


def test_a_row_has_the_experts_and_the_masks_of_its_path() -> None:
    path = with_aux(make_recorded_path())
    (row,) = group_rows([make_trajectory(0, 1.0, path)])
    assert row.routed_experts is not None
    assert row.sampling_mask is not None
    assert np.array_equal(row.routed_experts, routed_experts(row.input_ids.tolist(), 0, 17).table)
    ids, ends = row.sampling_mask
    assert ends.tolist() == [0] * 10 + [2, 4, 6, 6, 6, 8, 10, 12]
    for place in np.flatnonzero(row.mask):
        assert row.input_ids[place] in ids[ends[place - 1] : ends[place]]
    (plain,) = group_rows([make_trajectory(0, 1.0, make_recorded_path())])
    assert plain.routed_experts is plain.sampling_mask is None


def test_a_row_is_prompt_and_response_with_each_token_s_version() -> None:
    (row,) = group_rows([make_trajectory(0, 1.0, make_path(2, "xx.mx", "34044"))])
    assert row.input_ids.tolist() == [0, 1, 100, 101, 102, 103, 104]
    assert row.mask.tolist() == [False, False, True, True, False, False, True]
    assert row.versions.tolist() == [NO_VERSION, NO_VERSION, 3, 4, NO_VERSION, 4, 4]
    assert row.logprobs.tolist() == [0, 0, -0.5, -1.5, 0, -3.5, -4.5]
    assert (row.num_prompt, row.oldest_version, row.newest_version) == (2, 3, 4)
    assert {len(row.input_ids), len(row.mask), len(row.logprobs), len(row.versions)} == {7}


def test_the_oldest_version_is_that_of_trained_tokens_alone_and_zero_is_one() -> None:
    (row,) = group_rows([make_trajectory(0, 1.0, make_path(1, "mxx", "015"))])
    assert row.oldest_version == 1
    (row,) = group_rows([make_trajectory(0, 1.0, make_path(1, "xx", "05"))])
    assert row.oldest_version == 0


def test_the_baseline_is_the_group_s_mean_and_the_deviation_an_option() -> None:
    group = [make_trajectory(at, reward, make_path(1, "x", "0")) for at, reward in enumerate([1.0, 0.0, 0.0, 0.0])]
    assert [row.advantage for row in group_rows(group)] == pytest.approx([0.75, -0.25, -0.25, -0.25])
    divided = [row.advantage for row in group_rows(group, divides_by_std=True)]
    assert divided == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / np.std([1, 0, 0, 0]), rel=1e-4)
    equal = [make_trajectory(at, 1.0, make_path(1, "x", "0")) for at in range(2)]
    assert [row.advantage for row in group_rows(equal, divides_by_std=True)] == [0.0, 0.0]


def test_a_failure_of_the_service_is_in_no_baseline_and_no_row() -> None:
    good = [make_trajectory(at, reward, make_path(1, "x", "0")) for at, reward in enumerate([1.0, 0.0])]
    lost = replace(make_trajectory(2, None, make_path(1, "xxx", "000")), stop_reason=StopReason.ENGINE_FAILED)
    rows = group_rows([*good, lost])
    assert [(row.sample_index, row.advantage) for row in rows] == [(0, 0.5), (1, -0.5)]
    stale = replace(
        make_trajectory(3, None, make_path(1, "x", "0")), stop_reason=StopReason.STALE, is_complete=False
    )
    assert group_rows([lost, stale]) == []
    counts = count_group([*good, lost], rows)
    assert (counts.num_trajectories, counts.num_scored, counts.num_succeeded) == (3, 2, 1)
    assert (counts.num_sampled_tokens, counts.num_wasted_tokens) == (5, 3)
    assert (counts.reward_sum, counts.reward_std) == (1.0, 0.5)


def test_a_fork_is_several_rows_of_one_advantage_that_train_each_token_once() -> None:
    first = make_path(1, "xx", "00")
    fork = make_path(1, "mmxx", "0011", lineage=Lineage(PathKind.CONTINUES, 0), parent=0, num_shared=3)
    rows = group_rows([make_trajectory(0, 1.0, first, fork), make_trajectory(1, 0.0, make_path(1, "x", "1"))])
    assert [(row.sample_index, row.place, row.advantage) for row in rows] == [
        (0, 0, 0.5),
        (0, 1, 0.5),
        (1, 0, -0.5),
    ]
    assert sum(int(row.mask.sum()) for row in rows) == 5


def test_each_agent_has_its_own_baseline() -> None:
    main, pro = make_path(1, "x", "0"), make_path(1, "xx", "00", agent="pro")
    one = replace(make_trajectory(0, 1.0, main, pro), agent_rewards={"pro": 0.25})
    other = replace(make_trajectory(1, 0.0, main, pro), agent_rewards={"pro": 0.75})
    rows = group_rows([one, other])
    assert [(row.sample_index, row.place, row.advantage) for row in rows] == [
        (0, 0, 0.5),
        (1, 0, -0.5),
        (0, 1, -0.25),
        (1, 1, 0.25),
    ]
    assert count_group([one, other], rows).num_scored == 2
    assert [row.place for row in group_rows([replace(one, reward=None)])] == [1]
    without = replace(make_trajectory(2, 1.0, main, pro), agent_rewards={})
    assert [row.reward for row in group_rows([without])] == [1.0, 1.0]


def test_weights_count_tokens_or_trajectories_equally() -> None:
    first = make_path(1, "xx", "00")
    fork = make_path(1, "mmxxxx", "001111", lineage=Lineage(PathKind.COMPACTS, 0))
    group = [make_trajectory(0, 1.0, first, fork), make_trajectory(1, 0.0, make_path(1, "xx", "11"))]
    by_token, by_trajectory = group_rows(group), group_rows(group, weights="per_trajectory")
    assert [row.weight for row in by_token] == pytest.approx([1 / 8] * 3)
    assert [row.weight for row in by_trajectory] == pytest.approx([1 / 12, 1 / 12, 1 / 4])
    for rows in (by_token, by_trajectory):
        assert sum(row.weight * int(row.mask.sum()) for row in rows) == pytest.approx(1.0)


def test_paths_for_the_record_only_unscored_ones_and_empty_masks_are_left_out() -> None:
    side = make_path(1, "xx", "00", lineage=Lineage(PathKind.UNRELATED))
    aside = make_path(1, "x", "0", is_trainable=False)
    main = make_path(1, "xxx", "000")
    trajectory = make_trajectory(0, 1.0, main, side)
    assert [row.place for row in group_rows([trajectory])] == [0]
    scored = replace(trajectory, paths=(main, replace(side, reward=0.25)))
    assert [(row.place, row.reward) for row in group_rows([scored])] == [(0, 1.0), (1, 0.25)]
    assert group_rows([make_trajectory(0, 1.0, aside), make_trajectory(1, 0.0, make_path(1, "mm", "00"))]) == []


def test_mixed_versions_and_staleness_are_counted_over_scored_trajectories() -> None:
    mixed = make_trajectory(0, 1.0, make_path(1, "xx", "01"), staleness=3, num_stale_attempts=2)
    masked = make_trajectory(1, 0.0, make_path(1, "mx", "01"), staleness=0)
    counts = count_group([mixed, masked], group_rows([mixed, masked]))
    assert (counts.num_mixed, counts.staleness_sum, counts.staleness_max) == (1, 3, 3)
    assert (counts.num_stale_attempts, counts.num_truncated) == (2, 0)
