"""A shop: tasks, tools over one state, a customer, and a score, in one class.

agentloop try examples.14_shop:Shop --task 1
agentloop validate examples.14_shop:Shop
agentloop rollout --environment examples.14_shop:Shop --samples 4
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from agentloop.errors import ToolError
from agentloop.rollout import EndEpisode, Environment, ScriptedTurn, call, tool
from agentloop.types import Message, RolloutTask

RULES = "You serve a shop's customers. Orders change only while they are pending. Hand all else to a person."
ORDERS = {"W1": ["lamp", "pending", "1 Elm Street"], "W2": ["chair", "delivered", "1 Elm Street"]}
CASES = [  # what the customer says, the calls that solve it, and what they change
    (["Cancel my lamp, order W1.", "Yes, I am sure."], [call("cancel", order_id="W1")], {"W1": ["cancelled", 1]}),
    (
        ["Send order W1 to 5 Oak Road."],
        [call("move", order_id="W1", address="5 Oak Road")],
        {"W1": ["5 Oak Road", 2]},
    ),
    (["I sit badly, cancel W2."], [call("hand_over", why="delivered")], {}),
]


class Shop(Environment):
    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for number, (lines, _, changes) in enumerate(CASES):
            opening = (Message("system", RULES), Message("user", lines[0]))
            yield RolloutTask(f"shop-{number}", opening, reference={"lines": lines[1:], "changes": changes})

    def open(self, task: RolloutTask) -> None:
        self.orders = {order_id: list(order) for order_id, order in ORDERS.items()}
        self.lines = list(task.reference["lines"])

    @tool
    def look_up(self, order_id: str) -> list[str]:
        """Return an order's item, status and address."""
        if order_id not in self.orders:
            raise ToolError(f"there is no order {order_id!r}")
        return self.orders[order_id]

    @tool
    def cancel(self, order_id: str) -> str:
        """Cancel a pending order."""
        return self._change(order_id, 1, "cancelled")

    @tool
    def move(self, order_id: str, address: str) -> str:
        """Change the address of a pending order."""
        return self._change(order_id, 2, address)

    @tool
    def hand_over(self, why: Literal["delivered", "angry", "other"]) -> None:
        """Hand the customer over to a person, which ends the conversation."""
        raise EndEpisode(reward=float(not self.task.reference["changes"]), reason=f"handed over: {why}")

    def react(self, messages: Sequence[Message]) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        wanted = {order_id: list(order) for order_id, order in ORDERS.items()}
        for order_id, (value, place) in task.reference["changes"].items():
            wanted[order_id][place] = value
        return float(self.orders == wanted != ORDERS)

    def _change(self, order_id: str, place: int, value: str) -> str:
        if self.look_up(order_id)[1] != "pending":
            raise ToolError("the order is not pending any more")
        self.orders[order_id][place] = value
        return "done"

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn]:
        lines, calls, _ = CASES[int(task.task_id[-1])]
        return ["Are you sure?", *calls, "It is done."] if len(lines) > 1 else [*calls, "It is done."]
