"""The paths of a trajectory that its reward is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentloop.errors import NotFound
from agentloop.types import (
    Credit,
    FinishReason,
    Lineage,
    Message,
    PathKind,
    StopReason,
    TokenPath,
    Trajectory,
    Turn,
    WeightVersionSpan,
)
from tests.support.records.samples import make_trajectory


def path(num_turns: int, parent: int | None = None, *, num_shared_turns: int = 0) -> TokenPath:
    """Return a path of one prompt token and turns of two tokens each, the first ones shared."""
    num_tokens = num_turns * 2
    return TokenPath(
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(num_tokens, np.int32),
        response_mask=np.arange(num_tokens) >= num_shared_turns * 2,
        logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=(WeightVersionSpan(0, 0, num_tokens),),
        turns=tuple(Turn(1 + at, at, at + 2, FinishReason.STOP, "a", 0) for at in range(0, num_tokens, 2)),
        parent=parent,
        num_shared=1 + num_shared_turns * 2 if num_shared_turns else 0,
    )


def trajectory(*paths: TokenPath) -> Trajectory:
    return Trajectory("t", "g", 0, paths, StopReason.COMPLETED, True)


def test_the_reward_is_for_the_paths_that_the_credit_selects() -> None:
    kinds = (
        Lineage(PathKind.COMPACTS, 2),
        Lineage(PathKind.UNRELATED),
        None,
        Lineage(PathKind.DELEGATES, 0),
        Lineage(PathKind.COMPACTS, 3),  # a sub-agent compacts its own history
        Lineage(PathKind.RETRIES, 2),
        Lineage(PathKind.CONTINUES, 1),
    )
    record = replace(trajectory(*(replace(path(1), lineage=kind) for kind in kinds)), reward=1.0)
    assert record.main_conversation == (0, 2, 5)
    assert record.path is record.paths[0]  # it follows the compaction
    assert record.path_rewards == (1.0, None, 1.0, 1.0, 1.0, 1.0, None)
    assert record.num_uncredited_tokens == 4
    assert replace(record, credit=Credit.MAIN).path_rewards == (1.0, None, 1.0, None, None, 1.0, None)
    assert replace(record, credit=Credit.TRAJECTORY).path_rewards == (1.0,) * 7
    own = replace(record, paths=tuple(replace(one, reward=0.25) for one in record.paths))
    assert own.path_rewards == (0.25,) * 7
    assert record.reward_of(6) is None


def test_a_path_owns_the_turns_that_its_parent_does_not_have() -> None:
    branch = path(3, parent=0, num_shared_turns=2)
    assert len(branch.own_turns) == 1
    assert branch.num_own_sampled_tokens == 2


def test_without_a_path_the_messages_are_the_task_s() -> None:
    asked = (Message("user", "x"),)
    record = Trajectory("t", "g", 0, (), StopReason.PROMPT_TOO_LONG, False, task_messages=asked)
    assert (record.main_conversation, record.messages) == ((), asked)
    with pytest.raises(NotFound, match="prompt_too_long"):
        _ = record.path


def test_a_record_without_a_path_says_why() -> None:
    dropped = replace(make_trajectory(), paths=(), stop_reason=StopReason.STALE, error="dropped: too old")
    with pytest.raises(NotFound, match="sample 0 of group 'g-0' has no path: its stop reason is stale: dropped"):
        _ = dropped.path
