"""Your own tools: a function without state, and a class with state for each trajectory.

A service config names them, and tasks then use the names:

    workers:
      tools: {roll: "examples.03_own_tool:roll", notes: "examples.03_own_tool:Notes"}
"""

import random
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from agentloop.errors import ToolError
from agentloop.rollout import ToolSpec, tool
from agentloop.types import JSON


@tool(timeout_s=1)
async def roll(sides: Annotated[int, Field(ge=2, le=100, description="How many sides the die has")]) -> str:
    """Roll a die."""
    return str(random.randint(1, sides))


class Notes:
    """A tool that remembers, one notebook a trajectory."""

    spec = ToolSpec(
        name="notes",
        description="Write a note, or read them all by writing nothing.",
        parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    )

    def open_session(self, trajectory_id: str, seed: int) -> "Notebook":
        return Notebook()

    async def close(self) -> None:
        """Nothing is shared between trajectories."""


class Notebook:
    def __init__(self) -> None:
        self._lines: list[str] = []

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        text = arguments.get("text")
        if not isinstance(text, str):
            raise ToolError("text must be a string")
        self._lines += [text] if text else []
        return "\n".join(self._lines)

    async def close(self) -> None:
        self._lines.clear()
