"""The main conversation of a trajectory: the paths that belong to it, and the paths that count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentloop.errors import NotFound
from agentloop.types import (
    FinishReason,
    Message,
    SplitReason,
    StopReason,
    TokenPath,
    Trajectory,
    Turn,
    WeightVersionSpan,
)
from tests.support.records.samples import make_trajectory


def path(
    num_turns: int,
    reason: SplitReason | None = None,
    parent: int | None = None,
    *,
    num_sampled: int = 2,
    num_shared_turns: int = 0,
    name: str = "",
    num_echoed_turns: int = 0,
) -> TokenPath:
    """Return a path of one prompt token and turns of `num_sampled` tokens each, the first ones shared.

    Its prompt repeats `num_echoed_turns` of another path in its messages.
    """
    num_tokens = num_turns * num_sampled
    bounds = [(at, at + num_sampled) for at in range(0, num_tokens, num_sampled)]
    return TokenPath(
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(num_tokens, np.int32),
        response_mask=np.arange(num_tokens) >= num_shared_turns * num_sampled,
        logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=(WeightVersionSpan(0, 0, num_tokens),),
        turns=tuple(Turn(1 + start, start, end, FinishReason.STOP, "a", 0) for start, end in bounds),
        split_reason=reason,
        parent=parent,
        num_shared=1 + num_shared_turns * num_sampled if num_shared_turns else 0,
        messages=(*[Message("assistant", "")] * (num_echoed_turns + num_turns), Message("user", name)),
    )


def trajectory(*paths: TokenPath) -> Trajectory:
    return Trajectory("t", "g", 0, paths, StopReason.COMPLETED, True)


NEW, AMBIGUOUS = SplitReason.NEW_CONVERSATION, SplitReason.AMBIGUOUS


@pytest.mark.parametrize(
    "reason", [reason for reason in SplitReason if reason not in (NEW, AMBIGUOUS)], ids=lambda reason: reason.value
)
def test_a_path_that_was_split_from_another_belongs_to_its_conversation(reason: SplitReason) -> None:
    record = trajectory(path(1), path(1, reason, 0, name="latest", num_echoed_turns=1), path(2, NEW))
    assert record.main_conversation == (0, 1)
    assert record.path is record.paths[1]
    assert record.messages[-1] == Message("user", "latest")


@pytest.mark.parametrize("reason", [SplitReason.SYSTEM_CHANGED, SplitReason.TOOLS_CHANGED])
def test_under_another_system_message_or_tools_only_an_echoed_turn_goes_on(reason: SplitReason) -> None:
    record = trajectory(path(1), path(1, reason, 0, name="title"))
    assert record.main_conversation == (0,)


@pytest.mark.parametrize("reason", [NEW, AMBIGUOUS])
def test_another_conversation_is_another_one(reason: SplitReason) -> None:
    record = trajectory(path(2), path(1, reason, 0 if reason is AMBIGUOUS else None, num_sampled=50))
    assert record.main_conversation == (0,)


def test_a_parent_may_come_later() -> None:
    record = trajectory(path(1, SplitReason.HISTORY_EDIT, 2), path(2, NEW), path(2))
    assert record.main_conversation == (0, 2)


def test_shared_turns_count_once() -> None:
    branches = [path(3, SplitReason.BRANCH, 0, num_shared_turns=2) for _ in range(2)]
    assert [len(one.own_turns) for one in branches] == [1, 1]
    assert [one.num_own_sampled_tokens for one in branches] == [2, 2]
    assert trajectory(path(3), *branches, path(6, NEW)).main_conversation == (3,)
    assert trajectory(path(3), *branches, path(5, NEW)).main_conversation == (0, 1, 2)


def test_equal_turns_go_by_tokens_and_then_by_who_began() -> None:
    assert trajectory(path(1, NEW), path(1, num_sampled=3)).main_conversation == (1,)
    assert trajectory(path(1, NEW, num_sampled=3), path(1)).main_conversation == (0,)
    assert trajectory(path(1, NEW), path(1)).main_conversation == (1,)
    assert trajectory(path(2), path(1, NEW), path(1, NEW)).main_conversation == (0,)


def test_the_conversation_of_the_task_is_the_main_one_whatever_else_was_longer() -> None:
    task = (Message("system", "Be brief."), Message("user", "How many?"))
    agents = (Message("system", "You are an agent."), Message("user", " How many?\n"), Message("assistant", "42"))
    main = replace(path(1, NEW), messages=agents)
    longer = replace(path(5), messages=(Message("user", "Name this: How many?"), *[Message("assistant", "")] * 5))
    for paths, place in (((main, longer), 0), ((longer, main), 1)):
        record = replace(trajectory(*paths), task_messages=task)
        assert record.main_conversation == (place,)
        assert record.messages == agents
    assert trajectory(longer, main).main_conversation == (0,)
    assert replace(trajectory(main, main), task_messages=task).main_conversation == (0,)
    assert replace(trajectory(longer, path(2, NEW)), task_messages=task).main_conversation == (0,)


def test_an_older_worker_named_no_parent_of_a_template_split() -> None:
    record = trajectory(path(1), path(1, SplitReason.TEMPLATE), path(1, SplitReason.TEMPLATE))
    assert record.main_conversation == (0, 1, 2)


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
