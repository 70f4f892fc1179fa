"""Rewards: the shipped functions, lookup by name, and isolation of failing reward functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentloop.errors import InvalidRequest, RewardError
from agentloop.rollout.models import ModelCall
from agentloop.rollout.rewards import Weighted, contains_reference, exact_match, load_reward, score, takes
from agentloop.score import PathScore, Score
from agentloop.types import Judge, Message, RolloutTask, Trajectory
from tests.support.records.samples import make_path, make_trajectory


def task(reference: object = "42") -> RolloutTask:
    return RolloutTask(task_id="t1", messages=(Message("user", "q"),), reference=reference)


def conversation(*answers: str) -> tuple[Message, ...]:
    return (Message("user", "The answer is 42."), *(Message("assistant", answer) for answer in answers))


def record() -> Trajectory:
    return make_trajectory(paths=(replace(make_path(), messages=conversation("42")),), reward=None)


@pytest.mark.parametrize(
    "text",
    [
        "42",
        " 42 \n",
        "42.",
        "The answer is 42.",
        "the ANSWER IS: 42",
        'The answer is "42".',
        "The answer is '42.'",
        "The answer is 41, no. The answer is 42",
    ],
)
@pytest.mark.parametrize("reference", ["42", 42])
def test_exact_match_accepts(text: str, reference: object) -> None:
    assert exact_match(task(reference), conversation(text)) == 1.0


@pytest.mark.parametrize(
    "text", ["", "420", "4 2", "The answer is 42 apples", "The answer is -42.", "42 is it", "42.0"]
)
def test_exact_match_rejects(text: str) -> None:
    assert exact_match(task(), conversation(text)) == 0.0


def test_exact_match_reads_the_last_assistant_message() -> None:
    assert exact_match(task(), conversation("42", "43")) == 0.0
    assert exact_match(task(), (*conversation("41", "42"), Message("tool", "43"))) == 1.0
    assert exact_match(task(), conversation()) == 0.0  # the user's own words do not count


def test_a_leading_point_belongs_to_the_answer() -> None:
    assert exact_match(task(".5"), conversation("The answer is .5.")) == 1.0
    assert exact_match(task("5"), conversation("The answer is .5.")) == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [("So 42 it is.", 1.0), ("It is 42.", 1.0), ("142", 0.0), ("42.5", 0.0), ("-42", 0.0), ("x42", 0.0), ("", 0.0)],
)
def test_contains_reference(text: str, reward: float) -> None:
    assert contains_reference(task(), conversation(text)) == reward


def test_a_reference_is_text_not_a_pattern() -> None:
    assert contains_reference(task("a+b(c"), conversation("it is a+b(c then")) == 1.0


@pytest.mark.parametrize("function", [exact_match, contains_reference])
def test_without_a_reference_there_is_no_reward(function: Any) -> None:
    with pytest.raises(RewardError, match="'t1' has no reference"):
        function(task(None), conversation("None"))


def test_load_reward() -> None:
    assert load_reward("exact_match") is exact_match
    assert load_reward("agentloop.rollout.rewards:contains_reference") is contains_reference
    for name, text in (
        ("no_such", "there are: contains_reference, exact_match, or an import path"),
        ("agentloop.rollout.rewards:no_such", "no attribute"),
        ("agentloop.rollout.rewards:SHIPPED_REWARDS", "is not a function"),
    ):
        with pytest.raises(InvalidRequest, match=text) as caught:
            load_reward(name)
        assert caught.value.param == "reward"


async def score_of(function: Any, timeout_s: float = 10.0) -> tuple[float | None, str | None]:
    found, problem = await score(function, task(), record(), timeout_s)
    return None if found is None else found.reward, problem


async def test_score_runs_sync_and_async_functions() -> None:
    threads: list[threading.Thread] = []

    def sync_reward(task: RolloutTask, messages: Sequence[Message]) -> float:
        threads.append(threading.current_thread())
        return exact_match(task, messages)

    async def async_reward(task: RolloutTask, messages: Sequence[Message]) -> float:
        threads.append(threading.current_thread())
        return 0.25

    assert await score_of(sync_reward) == (1.0, None)
    assert await score_of(async_reward) == (0.25, None)
    assert await score_of(lambda task, messages: async_reward(task, messages)) == (0.25, None)
    assert threads[0] is not threading.main_thread()
    assert threads[1:] == [threading.main_thread()] * 2


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (-2.5, -2.5), (0, 0.0)]
)
async def test_numbers_are_rewards(value: object, reward: float) -> None:
    assert await score_of(lambda task, messages: value) == (reward, None)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "RewardError: the reward must be a number or a Score, not NoneType"),
        ("1", "RewardError: the reward must be a number or a Score, not str"),
        (1j, "RewardError: the reward must be a number or a Score, not complex"),
        (float("nan"), "RewardError: the reward must be finite, not nan"),
        (float("-inf"), "RewardError: the reward must be finite, not -inf"),
        (10**400, "RewardError: the reward must be finite, not inf"),
    ],
)
async def test_other_values_are_failed_rewards(value: object, error: str) -> None:
    assert await score_of(lambda task, messages: value) == (None, error)


async def test_a_score_is_checked_against_the_trajectory() -> None:
    whole = Score(1.0, {"a": 0.5}, main=PathScore(turns=(0.0, 1.0)))
    found, problem = await score(lambda task, messages: whole, task(), record())
    assert (found, problem) == (
        Score(1.0, {"a": 0.5}, paths={"1": PathScore()}, turn_rewards={"0": 0, "1": 1}),
        None,
    )
    short = replace(whole, main=PathScore(turns=(0.0,)))
    assert await score_of(lambda task, messages: short) == (
        None,
        "RewardError: path 0 has 2 turns, but its score has 1 turn rewards: give one per turn",
    )


async def test_a_function_that_asks_for_the_trajectory_gets_it() -> None:
    def per_token(task: RolloutTask, messages: Sequence[Message], trajectory: Trajectory) -> Score:
        return Score(main=PathScore(tokens=np.where(trajectory.path.response_mask, 0.5, 0.0)))

    found, problem = await score(per_token, task(), record())
    assert problem is None
    assert found.paths["1"].tokens.tolist() == [0.5, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ValueError("bad\nsecond line"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (RewardError("no reference"), "RewardError: no reference"),
        (SystemExit(3), "AgentLoopError: raised SystemExit"),
        (KeyboardInterrupt(), "AgentLoopError: raised KeyboardInterrupt"),
        (StopIteration(), "AgentLoopError: raised StopIteration"),
        (asyncio.CancelledError(), "AgentLoopError: raised CancelledError"),
    ],
)
async def test_whatever_a_sync_function_raises_is_a_failed_reward(raised: BaseException, error: str) -> None:
    def function(task: RolloutTask, messages: Sequence[Message]) -> float:
        raise raised

    assert await score_of(function) == (None, error)


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "cancelled itself"),
    ],
)
async def test_whatever_an_async_function_raises_is_a_failed_reward(raised: BaseException, error: str) -> None:
    async def function(task: RolloutTask, messages: Sequence[Message]) -> float:
        raise raised

    assert await score_of(function) == (None, error)


async def test_slow_functions_time_out() -> None:
    release = threading.Event()

    def stuck(task: RolloutTask, messages: Sequence[Message]) -> float:
        release.wait(60)
        return 1.0

    async def slow(task: RolloutTask, messages: Sequence[Message]) -> float:
        await asyncio.sleep(60)
        return 1.0

    assert await score_of(stuck, timeout_s=0.05) == (None, "timed out after 0.05 s")
    assert await score_of(slow, timeout_s=0.05) == (None, "timed out after 0.05 s")
    release.set()  # the abandoned thread ends and no caller waits for it


async def test_an_async_function_that_ignores_cancellation_does_not_hold_score_up() -> None:
    released = asyncio.Event()

    async def stubborn(task: RolloutTask, messages: Sequence[Message]) -> float:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    async with asyncio.timeout(30):
        assert await score_of(stubborn, timeout_s=0.05) == (None, "timed out after 0.05 s")
    released.set()


async def test_cancellation_passes_through() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def slow(task: RolloutTask, messages: Sequence[Message]) -> float:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return 1.0

    scoring = asyncio.create_task(score_of(slow))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    await asyncio.wait_for(ended.wait(), 60)


class OneJudge:
    """The only model besides the policy. It answers yes."""

    async def chat(self, call: ModelCall) -> str:
        assert call.model == "judge"
        return "Yes."


async def test_several_rewards_are_one_weighted_sum_with_components() -> None:
    async def length(task: RolloutTask, messages: Sequence[Message], trajectory: Trajectory) -> Score:
        return Score(0.25, components={"words": 1.0}, metrics={"paths": float(len(trajectory.paths))})

    reward = Weighted(
        answer=(1.0, "exact_match"), style=(0.5, Judge("judge", "Is it polite?")), length=(-2.0, length)
    )
    assert reward.has_judge
    assert [name for name in ("trajectory", "tools", "models", "environment") if takes(reward, name)] == [
        "trajectory",
        "models",
    ]
    found, problem = await score(reward, task(), record(), models=OneJudge())
    assert (problem, found) == (
        None,
        Score(
            1.0 + 0.5 - 0.5,
            components={"answer": 1.0, "style": 1.0, "length": 0.25, "length.words": 1.0},
            metrics={"length.paths": 1.0},
        ),
    )


async def test_a_part_that_fails_or_has_no_reward_fails_the_whole() -> None:
    def silent(task: RolloutTask, messages: Sequence[Message]) -> Score:
        return Score(metrics={"seen": 1.0})

    found, problem = await score(Weighted(answer=(1.0, "exact_match"), other=(1.0, silent)), task(), record())
    assert (found, problem) == (None, "RewardError: part 'other' has no reward")
    found, problem = await score(Weighted(answer=(1.0, "exact_match")), task(None), record())
    assert found is None
    assert "has no reference" in (problem or "")
    with pytest.raises(InvalidRequest, match="no rewards are registered as 'no_such'"):
        Weighted(answer=(1.0, "no_such"))
