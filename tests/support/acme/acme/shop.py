"""An environment, a reward, a tool and a sandbox factory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentloop.errors import ToolLost
from agentloop.rollout import Environment, call, tool
from agentloop.types import Limits, Message, RolloutTask, ToolCall


class Shop(Environment):
    @classmethod
    def tasks(cls) -> Iterable[RolloutTask]:
        yield RolloutTask("order", (Message("user", "Order a lamp."),), limits=Limits(max_turns=2))

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[str | ToolCall]:
        return [call("order", item="lamp"), "It is ordered."]

    def open(self, task: RolloutTask) -> None:
        self.items: list[str] = []

    @tool
    def order(self, item: str) -> str:
        """Order an item."""
        self.items.append(item)
        return "ordered"

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        return 7.0 + len(self.items)


def polite(task: RolloutTask, messages: Sequence[Message]) -> float:
    return 0.25


@tool
async def search(text: str) -> str:
    """Search for a text."""
    return f"nothing about {text}"


class Boxes:
    async def create(self, source, limits):
        raise ToolLost("no box is free")
