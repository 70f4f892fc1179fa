"""Reward functions: the built-in ones, loading by name or import path, and running one safely.

A reward function receives the task (with its `reference`) and the complete conversation and returns a number or a
`Score`. `score` runs it and returns a validated score or a one-line error, so that a failed reward never loses a
trajectory.
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
"""A function of the task and the messages of the main conversation, called as `function(task, messages)`.

Further arguments are passed to parameters with these names:

- `trajectory`: the record before this score, with the paths and the scores of the loop and the tools
- `tools`: the trajectory's tool sessions by tool name, still open
- `environment`: the trajectory's `Environment`, still open
- `models`: the service's other models (`agentloop/rollout/models.py`)

Synchronous functions run in a separate thread. Asynchronous functions run on the worker's event loop; only there
can a session's coroutines be awaited.
"""

_GIVEN = ("trajectory", "tools", "models", "environment")
_QUOTES_AND_SPACE = " \t\r\n\"'`\u201c\u201d\u2018\u2019"
_ANSWER_IS = re.compile(r"answer is\s*:?", re.IGNORECASE)


def exact_match(task: RolloutTask, messages: Sequence[Message]) -> float:
    """Return 1.0 if the final answer equals the reference as text, else 0.0.

    The final answer is the text after the last "answer is" of the last assistant message, or the complete message
    if it has none, stripped of spaces, quotes and trailing periods. Raises RewardError for a task without a
    reference.
    """
    expected = _reference(task)
    answer = _ANSWER_IS.split(_last_answer(messages))[-1]
    answer = answer.lstrip(_QUOTES_AND_SPACE).rstrip(_QUOTES_AND_SPACE + ".")
    return 1.0 if answer == expected else 0.0


def contains_reference(task: RolloutTask, messages: Sequence[Message]) -> float:
    """Return 1.0 if the last assistant message contains the reference as a complete word or number, else 0.0.

    Raises RewardError for a task without a reference.
    """
    pattern = rf"(?<![\w.\-]){re.escape(_reference(task))}(?!\w|\.\d)"
    return 1.0 if re.search(pattern, _last_answer(messages)) else 0.0


def _reference(task: RolloutTask) -> str:
    if task.reference is None:
        raise RewardError(
            f"task {task.task_id!r} has no reference, which this reward compares the answer with: set it, or "
            "use another reward"
        )
    return str(task.reference)


def _last_answer(messages: Sequence[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "assistant"), "")


SHIPPED_REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "contains_reference": contains_reference,
}


def load_reward(name_or_path: str) -> RewardFunction:
    """Return the built-in or registered reward with this name, or the one at this import path.

    Raises InvalidRequest with param "reward".
    """
    if name_or_path in SHIPPED_REWARDS:
        return SHIPPED_REWARDS[name_or_path]
    function = parts.find(parts.REWARDS, name_or_path, param="reward", shipped=SHIPPED_REWARDS)
    if not callable(function):
        raise InvalidRequest(
            f"reward {name_or_path!r} is not a function but a {type(function).__name__}", param="reward"
        )
    return cast(RewardFunction, function)


class Weighted:
    """A reward function that is the weighted sum of several; each part's reward is recorded as a component.

    Define it in a module, `reward = Weighted(answer=(1.0, "exact_match"), style=(0.2, Judge("judge", RUBRIC)))`,
    and set the task's `reward` to its import path.
    """

    def __init__(self, **parts: tuple[float, str | Judge | RewardFunction]) -> None:
        """Each part is a weight and a reward: a name, an import path, a function or a judge.

        Raises InvalidRequest if a reward cannot be loaded.
        """
        self.has_judge = any(isinstance(reward, Judge) for _, reward in parts.values())
        self._parts = {name: (weight, function_of(reward)) for name, (weight, reward) in parts.items()}
        extra = [name for name in _GIVEN if any(takes(function, name) for _, function in self._parts.values())]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # `takes` reads the signature: declare exactly the parameters that some part has.
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind) for name in ("task", "messages", *extra)]
        )

    async def __call__(self, task: RolloutTask, messages: Sequence[Message], **given: object) -> Score:
        """Run the parts concurrently. Raises a part's error, and RewardError if a part returns no reward."""

        async def run(function: RewardFunction) -> Score:
            return score_of(await call_user_code(function, task, messages, **_taken(function, given)))

        scores = await asyncio.gather(*(run(function) for _, function in self._parts.values()))
        combined, total = Score(), 0.0
        for (name, (weight, _)), score in zip(self._parts.items(), scores, strict=True):
            if score.reward is None:
                raise RewardError(f"part {name!r} has no reward")
            total += weight * score.reward
            own = {name: score.reward, **{f"{name}.{inner}": value for inner, value in score.components.items()}}
            metrics = {f"{name}.{inner}": value for inner, value in score.metrics.items()}
            combined = combined.joined(replace(score, reward=None, components=own, metrics=metrics))
        return replace(combined, reward=total)


def function_of(reward: str | Judge | RewardFunction) -> RewardFunction:
    """Return a task's reward as a function. Raises InvalidRequest with param "reward"."""
    if isinstance(reward, Judge):
        judge = reward

        async def judged(task: RolloutTask, messages: Sequence[Message], models: ModelsPort) -> float:
            return await judge_score(judge, models, task, messages)

        return judged
    return load_reward(reward) if isinstance(reward, str) else reward


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
    """Run a reward function. Returns its `resolved` score, or None and a one-line error.

    The function fails if it raises, exceeds `timeout_s` or returns no valid score for this trajectory. Raises only
    CancelledError. A synchronous function that times out is abandoned in its thread: it occupies no other call's
    slot and does not delay the end of the process.
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
        # Keep a late evaluation until it ends, so that its exception is retrieved.
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
    except BaseException as error:  # user code may raise SystemExit, which would stop the event loop
        return None, error_line(error)


def _taken(function: RewardFunction, given: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that the function has parameters for."""
    return {name: value for name, value in given.items() if takes(function, name)}


def takes(function: RewardFunction, name: str) -> bool:
    """Return True if the function has a parameter with this name; False if it has no signature."""
    try:
        return name in inspect.signature(function).parameters
    except Exception:  # some built-ins have no signature, and __signature__ may be user code
        return False
