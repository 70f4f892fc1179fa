"""The task family `recovery` as an environment: each call that the calculator refuses halves the reward.

make learn ARGS="--environment examples.train.refusals:Refusals"
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated

from pydantic import Field

from agentloop.errors import ToolError
from agentloop.rollout import Environment, ScriptedTurn, call, tool
from agentloop.rollout.rewards import exact_match
from agentloop.score import Score
from agentloop.types import Message, RolloutTask
from agentloop_tools.calculator import evaluate
from examples.train.tasks import held_out_tasks, training_tasks


class Refusals(Environment):
    """Its tool is described as the shipped calculator is: the shipped policy knows no other."""

    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for task in (*held_out_tasks(48, "recovery"), *islice(training_tasks(0, "recovery"), 1440)):
            yield replace(task, tools=(), reward=None)

    def open(self, task: RolloutTask) -> None:
        self.shown, self.num_refused = "", 0

    @tool
    def calculator(
        self,
        expression: Annotated[str, Field(description="An arithmetic expression, such as 12 * (3 + 4)")],
    ) -> str:
        """Evaluate an arithmetic expression."""
        try:
            self.shown = evaluate(expression)
        except ToolError:
            self.num_refused += 1
            raise
        return self.shown

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> Score:
        is_right = exact_match(task, messages) * (self.shown == task.reference)
        return Score(is_right * 0.5**self.num_refused, {"right": is_right}, {"refused": self.num_refused})

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn]:
        return [call("calculator", expression=task.reference), f"The answer is {task.reference}."]
