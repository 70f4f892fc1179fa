"""`reasoning_gym:NAME`: the generators and verifiers of the package `reasoning-gym`.

A generator makes tasks from a seed, and some of them also depend on Python's hash seed. The task's `reference`
therefore has the complete entry, as the text of a Python literal, which also represents tuples and keys that are
numbers. The policy answers in one turn, between `<answer>` and `</answer>`.

Some verifiers evaluate the answer as Python. Their answers must be plain expressions (`is_plain_expression`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from math import isfinite
from typing import Any

from agentloop.errors import InvalidRequest
from agentloop.rollout import Environment, ScriptedTurn
from agentloop.types import Limits, Message, RolloutTask
from agentloop_environments.packages import import_package

NUM_TASKS = 100
"""The number of tasks, unless `count` says otherwise."""

MAX_GENERATED = 1_000_000
"""The tasks of one seed. A generator's task `i` of seed `s` is its task `i - 1` of seed `s + 1`."""

WITHOUT_TASKS = frozenset({"composite"})
"""A mixture of other generators, which has to be configured."""

EVALUATES = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""The generators whose verifiers call `eval` with the answer."""

PARSES = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""The generators whose verifiers call sympy's parser with the answer, which evaluates it too."""

MAX_ANSWER_CHARS = 10_000
MAX_EXPONENT = 100
FUNCTIONS = frozenset(
    {
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "ln",
        "sqrt",
    }
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub, ast.Pow, ast.Load)


class ReasoningGym(Environment):
    """A task of a generator. The reward is its verifier's, from 0 to 1."""

    @classmethod
    def variants(cls) -> Collection[str]:
        return sorted(_package().factory.DATASETS.keys() - WITHOUT_TASKS)

    @classmethod
    def tasks(cls) -> Iterable[RolloutTask]:
        return cls.choose_tasks(None, None)

    @classmethod
    def choose_tasks(cls, seed: int | None, count: int | None) -> Iterable[RolloutTask]:
        gym, num_tasks, seed = _package(), NUM_TASKS if count is None else min(count, MAX_GENERATED), seed or 0
        system = Message("system", gym.utils.SYSTEM_PROMPTS["default"])
        dataset = gym.create_dataset(cls.variant, seed=MAX_GENERATED * seed, size=max(1, num_tasks))
        for index in range(num_tasks):
            entry = _plain(dataset[index])
            yield RolloutTask(
                f"{cls.variant}/{seed}/{index}",
                (system, Message("user", entry["question"])),
                loop="single_turn",
                reference={"entry": repr(entry)},
                limits=Limits(max_turns=1),
            )

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn] | None:
        answer = _entry_of(task)["answer"]
        if answer is None or not is_safe(cls.variant, answer):
            return None  # such as an integral that the generator did not solve
        return [f"<answer>{answer}</answer>"]

    def open(self, task: RolloutTask) -> None:
        _entry_of(task)  # refuses other tasks

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        reply = next((one.content for one in reversed(messages) if one.role == "assistant"), "")
        answer = _package().utils.extract_answer(reply)
        if not answer or not is_safe(self.variant, answer):
            return 0.0
        return float(_verifier(self.variant).score_answer(answer, _entry_of(task)))


def is_safe(generator: str, answer: str) -> bool:
    """Return True if the generator's verifier may be called with this answer of the policy."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    if generator not in EVALUATES | PARSES:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # `eval` refuses it too. The parser does not: it accepts `9!`.
        return generator in EVALUATES
    return is_plain_expression(tree)


def is_plain_expression(tree: ast.Expression) -> bool:
    """Return True for literals, names, arithmetic and calls of FUNCTIONS, with powers that are quick to compute."""
    callees = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_plain = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        elif isinstance(node, ast.Name):
            # A name of Python's builtins, such as `open`, is harmless unless it is called.
            is_plain = not node.id.startswith("_") and (node.id not in FUNCTIONS or node in callees)
        elif isinstance(node, ast.BinOp):
            is_plain = not any(
                isinstance(one, ast.List | ast.Tuple) or _is_text(one) for one in (node.left, node.right)
            )
            is_plain = is_plain and (not isinstance(node.op, ast.Pow) or _is_quick(node))
        else:
            plain = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, *_OPERATORS)
            is_plain = isinstance(node, plain)
        if not is_plain:
            return False
    return True


def _is_quick(power: ast.BinOp) -> bool:
    """Return True if no operand is a power and the exponent has at most two numbers, each at most MAX_EXPONENT."""
    nested = [node for side in (power.left, power.right) for node in ast.walk(side)]
    numbers = [node.value for node in ast.walk(power.right) if isinstance(node, ast.Constant)]
    return (
        not any(isinstance(node, ast.Pow) for node in nested)
        and len(numbers) <= 2
        and all(isinstance(value, int | float) and abs(value) <= MAX_EXPONENT for value in numbers)
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _entry_of(task: RolloutTask) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = ast.literal_eval(task.reference["entry"])
        return entry
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise InvalidRequest(
            f"reference.entry of task {task.task_id!r} is not an entry of reasoning-gym: make the tasks with "
            "tasks_of('reasoning_gym:NAME')",
            param="reference",
        ) from error


def _plain(value: Any) -> Any:
    """Return a value that `repr` writes as a literal: numpy's numbers as Python's, other objects as text."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(item) for item in value)
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    return str(value)


@cache
def _verifier(generator: str) -> Any:
    return _package().create_dataset(generator, size=1)


def _package() -> Any:
    return import_package("reasoning_gym")
