"""Questions for the shipped policy as tasks: endless ones to train on, and held-out ones never among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from agentloop.types import Limits, Message, RolloutTask
from examples.tiny_policy.tasks import Problem, problems

LIMITS = Limits(max_turns=8, max_tokens_per_turn=64)  # an exploring policy may not stop; good turns have 40 at most
FAMILIES = ("one_call", "two_calls", "three_calls", "recovery", "strings", "mixed")


def training_tasks(seed: int, family: str | None = None) -> Iterator[RolloutTask]:
    """Return an endless stream of training tasks, of one family or of all; the same for the same seed."""
    for number, problem in zip(count(), _of_family(problems(seed, held_out=False), family), strict=False):
        yield _task(problem, f"train-{seed}-{number:06d}")


def held_out_tasks(num_tasks: int, family: str | None = None, seed: int = 1) -> list[RolloutTask]:
    """Return distinct held-out tasks, of one family or of all."""
    found: dict[str, Problem] = {}
    for problem in _of_family(problems(seed, held_out=True), family):
        found.setdefault(problem.question, problem)
        if len(found) == num_tasks:
            break
    return [_task(problem, f"{problem.family}-{number:03d}") for number, problem in enumerate(found.values())]


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
