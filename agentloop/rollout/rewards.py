"""Reward functions: the shipped ones, finding one by name, and running one safely.

A reward function sees the task (with its `reference`) and the whole conversation, and returns a number or a
`Score`. `score` turns whatever it does into a checked score or one line that says why there is none: a failed
reward never loses a trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

from agentloop import parts
from agentloop.concurrency.aio import UserTasks, call_user_code
from agentloop.errors import InvalidRequest, RewardError, error_line
from agentloop.rollout.models import ModelsPort, NoModels, judge_score
from agentloop.rollout.tool import ToolSession
from agentloop.score import Score, resolved, score_of
from agentloop.types import Judge, Message, RolloutTask, Trajectory

RewardFunction: TypeAlias = Callable[..., "float | Score | Awaitable[float | Score]"]
"""A function of the task and the main conversation's messages, called as `function(task, messages)`.

One with a parameter named `trajectory` gets the record too, as it will be but for the score: its paths, and what
the loop and the tools said of it. One with a parameter named `tools` gets the trajectory's tool sessions by name,
and one named `environment` its `Environment`, which are closed after it; one named `models` gets the service's
other models (`agentloop/rollout/models.py`).
Synchronous functions run in a thread of their own, asynchronous ones on the worker's loop, where alone a session's
coroutines may be awaited.
"""

_GIVEN = ("trajectory", "tools", "models", "environment")
_QUOTES_AND_SPACE = " \t\r\n\"'`\u201c\u201d\u2018\u2019"
_ANSWER_IS = re.compile(r"answer is\s*:?", re.IGNORECASE)


def exact_match(task: RolloutTask, messages: Sequence[Message]) -> float:
    """1.0 if the final answer is the reference, as text, else 0.0.

    The final answer is what follows the last "answer is" in the last assistant message, or else all of it, without
    surrounding space and quotes and without a trailing period. Raises RewardError for a task without a reference.
    """
    expected = _reference(task)
    answer = _ANSWER_IS.split(_last_answer(messages))[-1]
    answer = answer.lstrip(_QUOTES_AND_SPACE).rstrip(_QUOTES_AND_SPACE + ".")
    return 1.0 if answer == expected else 0.0


def contains_reference(task: RolloutTask, messages: Sequence[Message]) -> float:
    """1.0 if the last assistant message holds the reference as a whole word or number, else 0.0.

    Raises RewardError for a task without a reference.
    """
    pattern = rf"(?<![\w.\-]){re.escape(_reference(task))}(?!\w|\.\d)"
    return 1.0 if re.search(pattern, _last_answer(messages)) else 0.0


def _reference(task: RolloutTask) -> str:
    if task.reference is None:
        raise RewardError(f"task {task.task_id!r} has no reference")
    return str(task.reference)


def _last_answer(messages: Sequence[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "assistant"), "")


SHIPPED_REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "contains_reference": contains_reference,
}


def load_reward(name_or_path: str) -> RewardFunction:
    """Return a shipped or registered reward by name, or one by import path.

    Raises InvalidRequest with param "reward".
    """
    if name_or_path in SHIPPED_REWARDS:
        return SHIPPED_REWARDS[name_or_path]
    found = parts.find(parts.REWARDS, name_or_path, param="reward", shipped=SHIPPED_REWARDS)
    if not callable(found):
        raise InvalidRequest(f"{name_or_path!r} is not a function", param="reward")
    return cast(RewardFunction, found)


class Weighted:
    """A reward function made of several: the weighted sum of their rewards, each of which is a component.

    Tasks name its place: `reward = Weighted(answer=(1.0, "exact_match"), style=(0.2, Judge("judge", RUBRIC)))`.
    """

    def __init__(self, **parts: tuple[float, str | Judge | RewardFunction]) -> None:
        """A part is a weight and a reward: a name, an import path, a function or a judge. Raises InvalidRequest."""
        self.has_judge = any(isinstance(reward, Judge) for _, reward in parts.values())
        self._parts = {name: (weight, function_of(reward)) for name, (weight, reward) in parts.items()}
        told = [name for name in _GIVEN if any(takes(function, name) for _, function in self._parts.values())]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind) for name in ("task", "messages", *told)]
        )

    async def __call__(self, task: RolloutTask, messages: Sequence[Message], **given: object) -> Score:
        """Run the parts side by side. Raises what one of them raises, and RewardError for one without a reward."""

        async def run(function: RewardFunction) -> Score:
            return score_of(await call_user_code(function, task, messages, **_taken(function, given)))

        found = await asyncio.gather(*(run(function) for _, function in self._parts.values()))
        whole, total = Score(), 0.0
        for (name, (weight, _)), score in zip(self._parts.items(), found, strict=True):
            if score.reward is None:
                raise RewardError(f"part {name!r} has no reward")
            total += weight * score.reward
            own = {name: score.reward, **{f"{name}.{inner}": one for inner, one in score.components.items()}}
            metrics = {f"{name}.{inner}": one for inner, one in score.metrics.items()}
            whole = whole.joined(replace(score, reward=None, components=own, metrics=metrics))
        return replace(whole, reward=total)


def function_of(reward: str | Judge | RewardFunction) -> RewardFunction:
    """Return the function of a task's reward. Raises InvalidRequest with param "reward"."""
    if isinstance(reward, Judge):
        judge = reward

        async def judged(task: RolloutTask, messages: Sequence[Message], models: ModelsPort) -> float:
            return await judge_score(judge, models, task, messages)

        return judged
    return load_reward(reward) if isinstance(reward, str) else reward


# --- running one ------------------------------------------------------------------------------------------

_user_tasks = UserTasks("reward")


async def score(
    function: RewardFunction,
    task: RolloutTask,
    trajectory: Trajectory,
    timeout_s: float = 10.0,
    tools: Mapping[str, ToolSession] | None = None,
    models: ModelsPort = NoModels(),  # noqa: B008 - it has no state
    environment: object = None,
) -> tuple[Score | None, str | None]:
    """Run a reward function. Returns its score, `resolved`, or None and one line on what failed.

    It fails if it raises, takes too long, or returns no score of this trajectory. Raises nothing but a
    cancellation. A synchronous function that overruns is abandoned in its thread: it takes no other call's place
    and does not hold up the end of the process.
    """
    values = (trajectory, {} if tools is None else tools, models, environment)
    given = _taken(function, dict(zip(_GIVEN, values, strict=True)))
    evaluation = asyncio.create_task(_evaluate(function, task, trajectory, given), name=f"reward {task.task_id}")
    try:
        await asyncio.wait({evaluation}, timeout=timeout_s)
        if evaluation.done() and not evaluation.cancelled():
            return evaluation.result()
        return None, "cancelled itself" if evaluation.done() else f"timed out after {timeout_s:g} s"
    finally:
        if not evaluation.done():
            evaluation.cancel()
            _user_tasks.keep(evaluation)


async def _evaluate(
    function: RewardFunction, task: RolloutTask, trajectory: Trajectory, given: Mapping[str, object]
) -> tuple[Score | None, str | None]:
    try:
        value = await call_user_code(function, task, trajectory.messages, **given)
        return resolved(score_of(value), trajectory), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # user code raises anything, and an exit would stop the event loop
        return None, error_line(error)


def _taken(function: RewardFunction, given: Mapping[str, object]) -> dict[str, object]:
    """Return what the function has parameters for."""
    return {name: value for name, value in given.items() if takes(function, name)}


def takes(function: RewardFunction, name: str) -> bool:
    """Tell if a function has a parameter of that name; one without a signature, as some builtins, has none."""
    try:
        return name in inspect.signature(function).parameters
    except Exception:  # a signature may be user code too
        return False
