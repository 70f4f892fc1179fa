"""A tool with a session per task, which records the events of its life."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.errors import InvalidRequest, ToolError, ToolLost
from agentloop.rollout.tool import ToolSession, ToolSpec
from agentloop.types import JSON, Message, RolloutTask, StopReason, Trajectory


class Garden:
    """A tool whose calls plant a word in their trajectory's bed; `tool_setup` may have planted words already.

    Words with effects: "hang", "error", "lost". A setup can have effects too: {"open": "hang" | "raise" |
    "refuse"}.
    """

    def __init__(self, name: str = "garden", **caps: Any) -> None:
        given = {"timeout_s": 60.0, "open_timeout_s": 60.0, **caps}
        self.spec = ToolSpec(name, "Plant a word.", {"type": "object"}, **given)
        self.beds: list[Bed] = []
        self.is_hanging = asyncio.Event()

    def open_session(self, trajectory_id: str, seed: int) -> Bed:
        self.beds.append(Bed(self))
        return self.beds[-1]

    async def close(self) -> None:
        """Do nothing: sessions share no resources."""


class Bed:
    """A session; `life` lists its calls in order."""

    def __init__(self, garden: Garden) -> None:
        self.garden = garden
        self.words: list[str] = []
        self.life: list[str] = []

    async def open(self, task: RolloutTask) -> None:
        self.life.append("open")
        setup = task.tool_setup.get(self.garden.spec.name) or {}
        self.words += setup.get("words", [])
        match setup.get("open"):
            case "hang":
                await self._hang()
            case "raise":
                raise OSError("no soil")
            case "refuse":
                raise InvalidRequest("such words do not grow")

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        word = str(arguments["word"])
        self.life.append(word)
        if word == "hang":
            await self._hang()
        if word == "error":
            raise ToolError("it does not grow")
        if word == "lost":
            raise ToolLost("the bed was flooded")
        self.words.append(word)
        return " ".join(self.words)

    async def close(self) -> None:
        self.life.append("close")

    async def _hang(self) -> None:
        self.garden.is_hanging.set()
        await asyncio.Event().wait()


class KeptGarden(Garden):
    """A garden whose beds can be moved to another worker."""

    def open_session(self, trajectory_id: str, seed: int) -> KeptBed:
        self.beds.append(bed := KeptBed(self))
        return bed


class KeptBed(Bed):
    """A bed whose state is its words; a state with "salt" cannot be restored."""

    async def snapshot(self) -> bytes:
        return " ".join(self.words).encode()

    async def restore(self, state: bytes) -> None:
        self.life.append("restore")
        self.words = state.decode().split()
        if "salt" in self.words:
            raise ValueError("nothing grows here")


async def number_of_words(
    task: RolloutTask, messages: Sequence[Message], tools: Mapping[str, ToolSession]
) -> float:
    """A reward that reads and uses the environment in its final state."""
    bed = tools["garden"]
    assert isinstance(bed, Bed)
    assert "close" not in bed.life
    await bed.call({"word": "looked"})
    return float(len(bed.words))


def ending(record: Trajectory) -> tuple[StopReason, str | None, float | None]:
    """Return the fields of a record that describe its end."""
    return record.stop_reason, record.error, record.reward
