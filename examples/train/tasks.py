"""Questions for the shipped policy as tasks: endless ones to train on, and held-out ones never among them.

A family is one of the shipped policy's, or an environment by its import path, whose first tasks are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count
from random import Random

from agentloop.errors import InvalidRequest
from agentloop.rollout.environment import load_environment, tasks_of
from agentloop.types import Limits, Message, RolloutTask, ToolCall
from examples.tiny_policy.tasks import Problem, problems

LIMITS = Limits(max_turns=8, max_tokens_per_turn=64)  # an exploring policy may not stop; good turns have 40 at most
FAMILIES = ("one_call", "two_calls", "three_calls", "recovery", "strings", "mixed")


def training_tasks(seed: int, family: str | None = None, num_held_out: int = 0) -> Iterator[RolloutTask]:
    """Return an endless stream of training tasks, of one family or of all; the same for the same seed.

    An environment's are those after its first `num_held_out`, shuffled anew in each epoch.
    """
    if family is not None and ":" in family:
        yield from _epochs(tasks_of(family)[num_held_out:], Random(seed))
    for number, problem in zip(count(), _of_family(problems(seed, held_out=False), family), strict=False):
        yield _task(problem, f"train-{seed}-{number:06d}")


def held_out_tasks(num_tasks: int, family: str | None = None, seed: int = 1) -> list[RolloutTask]:
    """Return distinct held-out tasks, of one family or of all."""
    if family is not None and ":" in family:
        return tasks_of(family)[:num_tasks]
    found: dict[str, Problem] = {}
    for problem in _of_family(problems(seed, held_out=True), family):
        found.setdefault(problem.question, problem)
        if len(found) == num_tasks:
            break
    return [_task(problem, f"{problem.family}-{number:03d}") for number, problem in enumerate(found.values())]


def _epochs(tasks: list[RolloutTask], rng: Random) -> Iterator[RolloutTask]:
    if not tasks:
        raise ValueError("all of the environment's tasks are held out: it needs more, or a lower --held-out")
    for epoch in count():
        for task in rng.sample(tasks, len(tasks)):
            yield replace(task, task_id=f"{task.task_id}-{epoch}")


_SHOWN_SEED, _HELD_OUT_SEED, _FIRST_SEED = 0, 1, 2


def environment_tasks(
    environment: str, num_held_out: int, seed: int = 0, *, num_shown: int = 0, max_tokens: int | None = None
) -> tuple[list[RolloutTask], Iterator[RolloutTask]]:
    """Return held-out tasks of an environment, and an endless stream of others to train on.

    Generated tasks come from different seeds, other task sets are split; no question is in both. With `num_shown`,
    each prompt begins with so many further tasks and their answers, for a model that does not follow the format.
    """
    shown = tasks_of(environment, seed=_SHOWN_SEED, count=num_shown) if num_shown else []
    examples = tuple(chain.from_iterable(_solved(task) for task in shown))

    def prepared(task: RolloutTask, task_id: str) -> RolloutTask:
        num_system = sum(message.role == "system" for message in task.messages)
        messages = (*task.messages[:num_system], *examples, *task.messages[num_system:])
        tokens = task.limits.max_tokens_per_turn if max_tokens is None else max_tokens
        return replace(
            task, task_id=task_id, messages=messages, limits=replace(task.limits, max_tokens_per_turn=tokens)
        )

    kept = {_question(task) for task in shown}
    offered = tasks_of(environment, seed=_HELD_OUT_SEED, count=num_held_out + num_shown)
    held_out = [task for task in offered if _question(task) not in kept][:num_held_out]
    kept |= {_question(task) for task in held_out}

    def training() -> Iterator[RolloutTask]:
        for epoch in count():
            tasks = tasks_of(environment, seed=_FIRST_SEED + 1000 * seed + epoch)
            others = [task for task in tasks if _question(task) not in kept]
            if not others:
                raise InvalidRequest(
                    f"all {len(tasks)} tasks of {environment} are held out: choose a lower --held-out"
                )
            yield from (prepared(task, f"{task.task_id}-{epoch}") for task in others)

    return [prepared(task, task.task_id) for task in held_out], training()


def _question(task: RolloutTask) -> tuple[str, ...]:
    return tuple(message.content for message in task.messages)


def _solved(task: RolloutTask) -> Iterator[Message]:
    """Return the messages of a task with its published answer: one turn, of text or of tool calls."""
    turns = load_environment(task.environment or "").kind.gold(task) or ()
    if len(turns) != 1:
        raise InvalidRequest(f"{task.task_id} has no published answer of one turn: use --shots 0")
    answer = turns[0]
    yield from (message for message in task.messages if message.role != "system")
    if isinstance(answer, str):
        yield Message("assistant", answer)
    else:
        calls = [answer] if isinstance(answer, ToolCall) else answer
        numbered = (replace(call, id=f"{task.task_id}-{number}") for number, call in enumerate(calls))
        yield Message("assistant", tool_calls=tuple(numbered))


def _of_family(stream: Iterator[Problem], family: str | None) -> Iterator[Problem]:
    return (problem for problem in stream if family is None or problem.family == family)


def _task(problem: Problem, task_id: str) -> RolloutTask:
    return RolloutTask(
        task_id=task_id,
        messages=(Message("user", problem.question),),
        tools=problem.tools,
        reward="exact_match",
        reference=problem.answer,
        limits=LIMITS,
    )
