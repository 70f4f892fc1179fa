"""`validate`: checks an environment on its own tasks with scripted policies.

The order of the episodes of a task matters: first the policy does nothing, then it solves the task twice, then it
does nothing again, so that state that outlives a trajectory is detected. Finally the task is solved with its state
moved to a new object after each call.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentloop.errors import ToolError, error_line
from agentloop.rollout.environment import Environment, LoadedEnvironment, OpenEnvironment, ScriptedTurn
from agentloop.rollout.tool import EndEpisode, Tool, ToolSpec
from agentloop.testing.episode import loaded_of, play
from agentloop.testing.stand_in import message_of
from agentloop.types import FAILURES, JSON, Message, RolloutTask, Trajectory
from agentloop.values import codec

T = TypeVar("T")

UNTOUCHED: Sequence[ScriptedTurn] = ("I cannot help with that.",)
_MAX_SHOWN = 160
_NUM_LOOKS = 20
_NO_MATTER = {"title", "description", "default", "examples"}
_BY_TYPE = {"string": "a", "integer": 0, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None}
_ODD: tuple[JSON, ...] = ("", "\x00\u202e😀", "'; --", "a" * 100_000, -1, 10**30, 1e308, True, None, [], [[]], {})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of an environment. `check` is the name of the violated rule."""

    check: str
    task_id: str  # empty: the fault is not specific to a task
    problem: str

    def __str__(self) -> str:
        subject = f"{self.check}, task {self.task_id}" if self.task_id else self.check
        return f"{subject}: {self.problem}"


async def validate(
    environment: type[Environment] | str,
    *,
    max_tasks: int = 20,
    tools: Sequence[Tool] = (),
    call_timeout_s: float = 2.0,
) -> list[Fault]:
    """Check an environment on its first `max_tasks` tasks. Returns the faults; an empty list if none is found.

    `tools` are the service's tools that the tasks use. A tool call with odd arguments has `call_timeout_s` to
    return.
    """
    bench = _Bench(loaded_of(environment), tools, call_timeout_s)
    bench.check_tools()
    tasks = bench.checked_tasks()[:max_tasks]
    solved = [(task, record) for task in tasks if (record := await bench.check_task(task)) is not None]
    again = await asyncio.gather(*(bench.solve(task) for task, _ in solved))
    for (task, alone), concurrent in zip(solved, again, strict=True):
        bench.same("side by side", task, alone, concurrent, "concurrent trajectories share state")
    if tasks:
        await bench.check_odd_arguments(tasks[0])
    return list(dict.fromkeys(bench.faults))


@dataclass(frozen=True, eq=False)  # hashable by identity: its lists are not hashable
class _WatchedEnvironment(LoadedEnvironment):
    """An environment that records the objects and close errors of one episode.

    With `is_carried`, the state moves to a new object after each call.
    """

    is_carried: bool = False
    objects: list[weakref.ref[Environment]] = field(default_factory=list)
    close_faults: list[str] = field(default_factory=list)

    def open_session(self, trajectory_id: str, seed: int) -> _WatchedSession:
        return _WatchedSession(self, trajectory_id, seed)

    def make(self, trajectory_id: str, seed: int) -> Environment:
        environment = LoadedEnvironment.open_session(self, trajectory_id, seed).environment
        self.objects.append(weakref.ref(environment))
        return environment


class _WatchedSession(OpenEnvironment):
    def __init__(self, loaded: _WatchedEnvironment, trajectory_id: str, seed: int) -> None:
        super().__init__(loaded.make(trajectory_id, seed), loaded.methods)
        self._loaded = loaded
        self._place = trajectory_id, seed
        # Until closed.
        loaded.close_faults.append(f"close() did not finish within {loaded.kind.close_timeout_s:g} s")

    async def call_tool(self, name: str, arguments: Mapping[str, JSON]) -> str:
        answer = await super().call_tool(name, arguments)
        await self._carry()
        return answer

    async def react(self, messages: Sequence[Message]) -> str | None:
        reply = await super().react(messages)
        await self._carry()
        return reply

    async def close(self) -> None:
        faults = self._loaded.close_faults
        try:
            await super().close()
            faults.clear()
        except Exception as error:
            faults[:] = [error_line(error)]

    async def _carry(self) -> None:
        """Replace the object by a new one with the restored state."""
        if self._loaded.is_carried:
            with suppress(ToolError):  # a state without a snapshot is allowed
                state, earlier = await self.snapshot(), self.environment
                await OpenEnvironment(earlier, self._loaded.methods).close()
                self.environment = self._loaded.make(*self._place)
                await self.open(earlier.task)
                await self.restore(state)


@dataclass(slots=True)
class _Bench:
    loaded: LoadedEnvironment
    tools: Sequence[Tool]
    call_timeout_s: float
    faults: list[Fault] = field(default_factory=list)

    def say(self, check: str, problem: str, task_id: str = "") -> None:
        """Record a fault."""
        self.faults.append(Fault(check, task_id, problem))

    def checked_tasks(self) -> list[RolloutTask]:
        """Return the tasks with distinct ids."""
        first, second = (self._of_class("tasks", self.loaded.kind.tasks) for _ in range(2))
        if not first:
            self.say("tasks", "tasks() returned no task")
        if codec.encode(first) != codec.encode(second):
            self.say("tasks", "two calls of tasks() returned different tasks")
        ids = Counter(task.task_id for task in first)
        for duplicate in sorted(task_id for task_id, num in ids.items() if num > 1):
            self.say("tasks", "several tasks have this id", duplicate)
        return list({task.task_id: task for task in first}.values())

    def check_tools(self) -> None:
        """Check that tools have a description and that their parameters have specific types."""
        for spec in self._specs():
            if not spec.description:
                self.say("tool docs", f"{spec.name} has no docstring, which is its description for the policy")
            for name, schema in spec.parameters.get("properties", {}).items():
                if _takes_anything(schema):
                    self.say("tool schema", f"{spec.name} accepts any value as {name}: {schema}")

    async def check_task(self, task: RolloutTask) -> Trajectory | None:
        """Play a task. Returns the record of its gold solution, or None if it has none."""
        untouched = await self._play(task, UNTOUCHED)
        gold = self._of_class("gold", lambda: self.loaded.kind.gold(task) or (), task.task_id)
        if not gold:
            return None
        solved = await self._play(task, gold)
        again, left = await self._play(task, gold), await self._play(task, UNTOUCHED)
        self.same(
            "repeatable", task, solved, again, "randomness other than self.seed, or a leak between trajectories"
        )
        self.same("leak", task, untouched, left, "state of another trajectory is visible")
        acts = any(message_of(turn).tool_calls for turn in gold)
        if acts and (untouched.reward or 0.0) > 0:
            self.say("untouched", f"a policy that does nothing gets the reward {untouched.reward:g}", task.task_id)
        if solved.reward is None or solved.reward <= max(0.0, acts * (untouched.reward or 0.0)):
            nothing = "" if untouched.reward is None else f", and doing nothing gets {untouched.reward:g}"
            self.say("gold", f"the gold solution gets the reward {solved.reward}{nothing}", task.task_id)
        answers = [message.content for message in solved.messages if message.role == "tool"]
        if errors := [answer for answer in answers if answer.startswith("Error: ")]:
            self.say("gold", f"a call of the gold solution fails: {_short(errors[0])}", task.task_id)
        carried = await self._play(task, gold, is_carried=True)
        self.same("snapshot", task, solved, carried, "the restored state differs")
        return solved

    async def solve(self, task: RolloutTask) -> Trajectory:
        """Play the gold solution."""
        return await self._play(task, self.loaded.kind.gold(task) or ())

    def same(self, check: str, task: RolloutTask, one: Trajectory, other: Trajectory, why: str) -> None:
        """Record a fault if two records have different messages, scores or ends."""
        for mine, theirs in zip(_course(one), _course(other), strict=False):
            if mine != theirs:
                pairs = enumerate(zip(str(mine), str(theirs), strict=False))
                at = next((index for index, (one_char, other_char) in pairs if one_char != other_char), 0) - 40
                self.say(check, f"{why}: {_short(mine, at)} became {_short(theirs, at)}", task.task_id)
                return

    async def check_odd_arguments(self, task: RolloutTask) -> None:
        """Call each tool with unusual arguments. It must return or raise ToolError in time."""
        kind = self.loaded.kind
        for spec in self._specs():
            session = self.loaded.open_session("odd arguments", 0)
            with suppress(Exception):  # faults of `open` and `close` are already recorded
                async with asyncio.timeout(kind.open_timeout_s):
                    await session.open(task)
                for arguments in _odd_arguments(spec):
                    if (problem := await self._problem(session, spec.name, arguments)) is not None:
                        self.say("odd arguments", f"{spec.name}({_short(arguments)}) {problem}")
                        break
                async with asyncio.timeout(kind.close_timeout_s):
                    await session.close()

    async def _problem(self, session: OpenEnvironment, name: str, arguments: Mapping[str, JSON]) -> str | None:
        try:
            async with asyncio.timeout(self.call_timeout_s):
                await session.call_tool(name, arguments)
        except (ToolError, EndEpisode):
            return None
        except TimeoutError:
            return f"did not return within {self.call_timeout_s:g} s"
        except Exception as error:
            return f"raised {error_line(error)}; raise ToolError for an error message to the policy"
        return None

    async def _play(
        self, task: RolloutTask, turns: Sequence[ScriptedTurn], *, is_carried: bool = False
    ) -> Trajectory:
        watched = _WatchedEnvironment(self.loaded.kind, self.loaded.path, is_carried=is_carried)
        record = await play(watched, task, turns, tools=self.tools)
        if record.stop_reason in FAILURES:
            self.say("runs", record.error or record.stop_reason, task.task_id)
        if record.reward_error is not None:
            self.say("score", record.reward_error, task.task_id)
        for problem in watched.close_faults:
            self.say("close", problem, task.task_id)
        if not is_carried and await _is_held(watched.objects):
            self.say("left over", "the environment object is still referenced after its end", task.task_id)
        return record

    def _of_class(self, check: str, ask: Callable[[], Iterable[T]], task_id: str = "") -> list[T]:
        try:
            return list(ask())
        except Exception as error:
            self.say(check, f"{check}() raised {error_line(error)}", task_id)
            return []

    def _specs(self) -> list[ToolSpec]:
        return [tool.spec for tool in self.loaded.methods.values()]


async def _is_held(objects: Sequence[weakref.ref[Environment]]) -> bool:
    """Return True if an object is still referenced. Waits, because the thread of its last method may be ending."""
    for attempt in range(_NUM_LOOKS):
        if all(reference() is None for reference in objects):
            return False
        if attempt in (0, _NUM_LOOKS - 1):  # collect cycles; only twice, because this is slow in a large process
            gc.collect()
        await asyncio.sleep(0.02)
    return any(reference() is not None for reference in objects)


def _course(record: Trajectory) -> list[Any]:
    texts = [(message.role, message.content) for message in record.messages if not message.tool_calls]
    return [*texts, record.stop_reason, record.reward, dict(record.components), record.end_reason]


def _takes_anything(schema: Mapping[str, JSON]) -> bool:
    rules = {name: value for name, value in schema.items() if name not in _NO_MATTER}
    return not rules or rules in ({"type": "object"}, {"type": "object", "additionalProperties": True})


def _odd_arguments(spec: ToolSpec) -> Iterable[dict[str, JSON]]:
    properties: Mapping[str, JSON] = spec.parameters.get("properties", {})
    usual = {
        name: schema.get("enum", [_BY_TYPE.get(schema.get("type"), "a")])[0] for name, schema in properties.items()
    }
    yield from ({}, {"no_such_argument": 1}, usual)
    yield from ({**usual, name: odd} for name in properties for odd in _ODD)


def _short(value: object, at: int = 0) -> str:
    """Return the text of a value; of a long one, an excerpt from index `at`."""
    text = str(value)
    at = max(0, at) if len(text) > _MAX_SHOWN else 0
    return f"{'...' if at else ''}{text[at : at + _MAX_SHOWN]}{'...' if len(text) > at + _MAX_SHOWN else ''}"
