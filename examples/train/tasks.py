"""Questions for the shipped policy as tasks: endless ones to train on, and held-out ones never among them.

A family is one of the shipped policy's, or an environment by its import path, whose first tasks are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random

from agentloop.rollout.environment import tasks_of
from agentloop.types import Limits, Message, RolloutTask
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
