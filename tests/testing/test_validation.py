"""`validate`: a correct environment has no faults, and each common fault is found."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from agentloop.errors import ToolError
from agentloop.rollout import Environment, ScriptedTurn, call, tool
from agentloop.testing import validate
from agentloop.types import Message, RolloutTask


class Safe(Environment):
    """Task: learn a safe's code from a note, and open the safe with it."""

    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for code in ("12", "34"):
            yield RolloutTask(f"safe-{code}", (Message("user", "Open the safe."),), reference=code)

    def open(self, task: RolloutTask) -> None:
        self.tried: list[str] = []

    @tool
    def read_note(self) -> str:
        """Read the note."""
        return self.task.reference

    @tool
    def enter(self, code: str) -> str:
        """Enter a code into the safe."""
        if len(code) > 100:
            raise ToolError("that is too long")
        self.tried.append(code)
        return f"{len(self.tried)} tried"

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        return float(task.reference in self.tried)

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn]:
        return [call("read_note"), call("enter", code=task.reference), "It is open."]


_drawer: list[str] = []
_cache: dict[str, Any] = {}


class Leaks(Safe):
    def open(self, task: RolloutTask) -> None:
        self.tried = _drawer


class LeaksBetweenThoseAtOnce(Safe):
    shared: ClassVar[dict[str, list[str]]] = {}

    async def open(self, task: RolloutTask) -> None:
        self.shared["tried"] = []
        await asyncio.sleep(0.01)
        self.tried = self.shared["tried"]


class IsHeld(Safe):
    def open(self, task: RolloutTask) -> None:
        super().open(task)
        _cache[f"{task.task_id} {id(self)}"] = self


class RewardsNothing(Safe):
    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        return 0.1 + super().score(task, messages)


class IsChance(Safe):
    @tool
    def read_note(self) -> str:
        """Read the note."""
        return f"{self.task.reference} {random.random()}"


class HasOtherTasks(Safe):
    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        for task in super().tasks():
            yield RolloutTask(f"{task.task_id}-{random.random()}", task.messages, reference=task.reference)


class Raises(Safe):
    @tool
    def enter(self, code: str) -> str:
        """Enter a code into the safe."""
        self.tried.append(code)
        return f"digit {int(code)}"


class NeverReturns(Safe):
    @tool
    def enter(self, code: str) -> str:
        """Enter a code into the safe."""
        while not code.isdecimal():
            time.sleep(1.0)
        self.tried.append(code)
        return "tried"


class GoldDoesNotScore(Safe):
    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn]:
        return [call("enter", code="56"), "It is open."]


class TakesAnything(Safe):
    @tool
    def enter(self, code: Any) -> str:
        """Enter a code into the safe."""
        self.tried.append(str(code))
        return "tried"


class HasNoDocs(Safe):
    @tool
    def enter(self, code: str) -> str:
        self.tried.append(code)
        return "tried"


class RestoresAnother(Safe):
    async def restore(self, state: bytes) -> None:
        """Restore nothing, as if there had been no state."""


class NamesOneTwice(Safe):
    @classmethod
    def tasks(cls) -> Iterator[RolloutTask]:
        yield from super().tasks()
        yield from super().tasks()


class CannotClose(Safe):
    def close(self) -> None:
        raise OSError("the door is stuck")


class NeverCloses(Safe):
    close_timeout_s = 0.05

    async def close(self) -> None:
        await asyncio.sleep(3600)


class CannotScore(Safe):
    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float:
        raise KeyError("tried")


class CannotOpen(Safe):
    def open(self, task: RolloutTask) -> None:
        raise OSError("no safe here")


FAULTS: dict[type[Environment], tuple[str, str]] = {
    Leaks: ("leak", "state of another trajectory is visible: 0.0 became 1.0"),
    LeaksBetweenThoseAtOnce: ("side by side", "1 tried') became ('tool', '2 tried"),
    IsHeld: ("left over", "is still referenced"),
    RewardsNothing: ("untouched", "a policy that does nothing gets the reward 0.1"),
    IsChance: ("repeatable", "randomness other than self.seed"),
    HasOtherTasks: ("tasks", "two calls of tasks() returned different tasks"),
    Raises: ("odd arguments", "raised ValueError"),
    NeverReturns: ("odd arguments", "enter({'code': 'a'}) did not return within 0.2 s"),
    GoldDoesNotScore: ("gold", "the gold solution gets the reward 0.0"),
    TakesAnything: ("tool schema", "enter accepts any value as code"),
    HasNoDocs: ("tool docs", "enter has no docstring"),
    RestoresAnother: ("snapshot", "the restored state differs"),
    NamesOneTwice: ("tasks", "several tasks have this id"),
    CannotClose: ("close", "OSError: the door is stuck"),
    NeverCloses: ("close", "did not finish within 0.05 s"),
    CannotScore: ("score", "KeyError"),
    CannotOpen: ("runs", "cannot be opened: OSError: no safe here"),
}


async def test_one_without_a_fault_has_none():
    assert await validate(Safe) == []
    assert await validate(f"{__name__}:Safe") == []


@pytest.mark.parametrize("environment", FAULTS, ids=lambda one: one.__name__)
async def test_a_fault_is_found(environment: type[Environment]):
    check, problem = FAULTS[environment]
    try:
        faults = await validate(environment, call_timeout_s=0.2)
    finally:
        _drawer.clear()
        _cache.clear()
    assert [fault for fault in faults if fault.check == check and problem in fault.problem], list(map(str, faults))
