"""`Environment`: one class with the tasks, the tools and their shared state, the simulated user and the score.

Each trajectory has its own instance. The trajectory's `ToolScope` creates, opens, calls, scores and closes it and
treats its methods like tools: the same deadlines, the same errors. A task selects the class by its registered name
or import path. Synchronous methods run in threads, one at a time. Loops and rewards receive the instance itself.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from random import Random
from types import NoneType
from typing import Any, ClassVar, TypeAlias

import orjson

from agentloop import parts
from agentloop.concurrency.aio import call_user_code
from agentloop.errors import InvalidRequest, InvariantBroken, ToolError
from agentloop.plugins import made
from agentloop.rollout.models import ModelsPort, NoModels, OtherModel
from agentloop.rollout.tool import FunctionTool, Tool, ToolSession, ToolSpec
from agentloop.score import Score
from agentloop.types import JSON, Message, RolloutTask, ToolCall

MAX_LIFE_S = 1800.0
"""The longest sum of an environment's timeouts to open, score and close."""

ScriptedTurn: TypeAlias = str | ToolCall | Sequence[ToolCall]
"""A turn of a scripted policy: a text, a tool call, or several tool calls."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes that are defined in Python


def call(tool: str, **arguments: JSON) -> ToolCall:
    """Return a tool call, to use as a turn of `Environment.gold`."""
    return ToolCall("", tool, arguments)


class Environment:
    """One episode of a task. Subclasses define the tools of the policy as methods decorated with `@tool`.

    A class whose tools differ from task to task describes them in `task_tools` and implements `call_tool`. A class
    with several task sets lists their names in `variants`; `NAME:VARIANT` then selects a subclass with `variant`.
    All methods except `tasks` and `gold` may be `async`. `open` sets the state as attributes of `self`.
    """

    open_timeout_s: ClassVar[float] = 60.0
    react_timeout_s: ClassVar[float] = 60.0
    score_timeout_s: ClassVar[float] = 60.0
    close_timeout_s: ClassVar[float] = 10.0
    variant: ClassVar[str] = ""
    task: RolloutTask
    seed: int  # the trajectory's seed: use it for all randomness

    @classmethod
    def tasks(cls) -> Iterable[RolloutTask]:
        """Return the environment's tasks, for `agentloop try`, `validate` and `rollout`, and `tasks_of`."""
        return ()

    @classmethod
    def variants(cls) -> Collection[str]:
        """Return the names of the task sets, if there are several."""
        return ()

    @classmethod
    def choose_tasks(cls, seed: int | None, count: int | None) -> Iterable[RolloutTask]:
        """Return `count` tasks (None: all), in an order that depends on `seed` (None: the order of `tasks`).

        An environment that generates tasks uses `seed` and `count` for their generation.
        """
        tasks = list(cls.tasks())
        if seed is not None:
            Random(seed).shuffle(tasks)
        return tasks[:count]

    @classmethod
    def task_tools(cls, task: RolloutTask) -> Sequence[ToolSpec]:
        """Return the tools of one task, in addition to the methods decorated with `@tool`."""
        return ()

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn] | None:
        """Return the turns of a policy that solves the task; None if they are unknown."""
        return None

    async def open(self, task: RolloutTask) -> None:
        """Build the state. Raise InvalidRequest for a task that the environment does not support."""

    async def call_tool(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Return the result of a call of one of `task_tools`. Raise ToolError with a message for the policy."""
        raise ToolError(f"{type(self).__name__} does not implement call_tool(), which task_tools() requires")

    async def react(self, messages: Sequence[Message]) -> str | None:
        """Return the user's reply to a turn without tool calls.

        Return None or raise EndEpisode to end the episode.
        """
        return None

    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> float | Score:
        """Return the score at the end of the episode. Not called if an EndEpisode has a reward."""
        return Score()

    async def snapshot(self) -> bytes:
        """Return the state as bytes. The default implementation saves all attributes and slots of `self` as JSON.

        Raises ToolError for a state that JSON cannot represent. If the worker is lost, the trajectory then restarts
        from its first turn.
        """
        # A base class in C, such as dict, has content outside attributes and slots.
        if hidden := next((base for base in type(self).__mro__[:-1] if not base.__flags__ & _HEAP_TYPE), None):
            raise ToolError(
                f"cannot snapshot {type(self).__name__}: it inherits from {hidden.__name__}, whose content is not "
                "in attributes or slots; implement snapshot() and restore()"
            )
        initial = vars(self).get("_given") or _Given()
        # `restore` uses the task of the new assignment, so that a change made in place would be lost.
        if initial.setup != _setup_of(initial.values.get("task")):
            raise ToolError("cannot snapshot: the environment's task was modified in place; modify a copy of it")
        ours = [name for name, value in vars(self).items() if name == "_given" or initial.is_its(name, value)]
        own = {name: value for name, value in vars(self).items() if name not in ours}
        values = {"attributes": own, "slots": _slots_of(self)}
        odd = [name for part in values.values() for name, value in part.items() if not _is_plain(value, set())]
        if odd or not _is_plain(values, set()):
            raise ToolError(
                f"cannot snapshot: {odd[:3] or 'an object that is referenced twice'} cannot be stored as JSON; "
                "implement snapshot() and restore()"
            )
        return orjson.dumps({"version": self._version(), "ours": ours, **values})

    async def restore(self, state: bytes) -> None:
        """Replace the state of an instance that was opened for the same task by the state of a snapshot.

        Raises ToolError, and changes nothing, if the snapshot is from a different version of the class.
        """
        saved = orjson.loads(state)
        if saved["version"] != self._version():
            names = {*saved["ours"], *saved["attributes"], *saved["slots"]} ^ {*vars(self), *_slots_of(self)}
            field = f"field {min(names)!r}" if names else "its code"
            raise ToolError(
                f"the snapshot is from another version of {type(self).__qualname__}: {field} differs; use the code"
                " that took the snapshot, or start the trajectory again"
            )
        initial = {name: vars(self)[name] for name in saved["ours"]}
        vars(self).clear()
        vars(self).update(initial | saved["attributes"])
        for name in _slots_of(self).keys() - saved["slots"].keys():
            object.__delattr__(self, name)
        for name, value in saved["slots"].items():
            object.__setattr__(self, name, value)

    async def close(self) -> None:
        """Release resources. Called exactly once, also after an error or a cancellation."""

    def model(self, name: str) -> OtherModel:
        """Return another model of the service, such as a user simulator or a judge."""
        return OtherModel(name, self._models, self._trajectory_id)

    async def model_user(
        self, name: str, persona: str, messages: Sequence[Message], *, end: str = "###STOP###"
    ) -> str | None:
        """Return the reply of a model that plays the user described by `persona`; None if it contains `end`.

        The model receives the texts of the user and the assistant, but no system message, tool call or tool result.
        """
        # The model writes the user's turns: to its template it is the assistant.
        roles = {"user": "assistant", "assistant": "user"}
        seen = [Message(roles[each.role], each.content) for each in messages if each.role in roles and each.content]
        reply = await self.model(name).chat([Message("system", persona), *seen])
        return None if end in reply else reply

    def _version(self) -> str:
        return _version_of(type(self))  # type: ignore[arg-type] # mypy takes the hash of its objects

    def _begin(self, trajectory_id: str, seed: int, models: ModelsPort) -> None:
        self._trajectory_id, self.seed, self._models = trajectory_id, seed, models
        self._given = _Given({"_trajectory_id": trajectory_id, "seed": seed, "_models": models})


@dataclass(frozen=True, slots=True)
class _Given:
    """The attributes set by the service. A new instance has them too, so a snapshot omits those still unchanged."""

    values: Mapping[str, Any] = field(default_factory=dict)
    setup: int = 0  # `_setup_of(task)` at the time of `open`

    def is_its(self, name: str, value: object) -> bool:
        return name in self.values and value is self.values[name]


def _setup_of(task: RolloutTask | None) -> int:
    """Return a hash of the mutable parts of a task; 0 without a task."""
    return 0 if task is None else hash(repr((task.reference, task.tool_setup, task.template_kwargs)))


def _slots_of(environment: Environment) -> dict[str, Any]:
    """Return the slot values of all classes of the instance by mangled name."""
    state = object.__getstate__(environment)
    return state[1] if isinstance(state, tuple) else {}


@cache
def _version_of(kind: type[Environment]) -> str:
    """Return a digest of the source code of a class and its bases, except `Environment`."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        if base is Environment:
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # a class without a source file, such as one from a REPL or a built-in
            source = repr(sorted(vars(base)))
        digest.update(f"{base.__qualname__} {source}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment class as a Tool of the toolbox. Its session answers the calls of all `methods`."""

    kind: type[Environment]
    path: str
    models: ModelsPort = field(default_factory=NoModels)
    task: RolloutTask | None = field(default=None, compare=False)  # its `task_tools` are among `tools()`

    @cached_property
    def spec(self) -> ToolSpec:
        kind = self.kind
        return ToolSpec(
            self.path,
            "",
            {},
            open_timeout_s=kind.open_timeout_s,
            score_timeout_s=kind.score_timeout_s,
            close_timeout_s=kind.close_timeout_s,
        )

    @property
    def methods(self) -> Mapping[str, FunctionTool]:
        """The methods decorated with `@tool`, by tool name; those of base classes first."""
        return _methods_of(self.kind, self.path)  # type: ignore[arg-type] # mypy takes the hash of its objects

    def tools(self) -> Mapping[str, Tool]:
        """Return all tools of the policy: `methods`, then those of the task. Raises InvalidRequest."""
        task = self.task
        if task is None:
            return self.methods
        specs = made(lambda: self.kind.task_tools(task), f"{self.path}.task_tools() failed", param="environment")
        own = {spec.name: TaskTool(replace(spec, environment=self.path, has_state=True)) for spec in specs}
        return {**self.methods, **own}

    def open_session(self, trajectory_id: str, seed: int) -> OpenEnvironment:
        environment = self.kind()
        environment._begin(trajectory_id, seed, self.models)
        return OpenEnvironment(environment, self.methods)

    async def close(self) -> None:
        """Do nothing: trajectories share no resources."""


@dataclass(frozen=True, slots=True)
class TaskTool:
    """A tool of `Environment.task_tools`. The environment's session answers its calls."""

    spec: ToolSpec

    def open_session(self, trajectory_id: str, seed: int) -> ToolSession:
        raise InvariantBroken(f"the tool {self.spec.name!r} of an environment uses the session of the environment")

    async def close(self) -> None:
        """Do nothing: the tool has no resources."""


@cache
def _methods_of(kind: type[Environment], path: str) -> Mapping[str, FunctionTool]:
    # Cached: the tools of a class are created once, not for each trajectory.
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        members |= vars(base)
    tools = (member.within(path) for member in members.values() if isinstance(member, FunctionTool))
    return {tool.spec.name: tool for tool in tools}


class OpenEnvironment:
    """The ToolSession of one trajectory's environment. The caller must serialize the calls."""

    def __init__(self, environment: Environment, methods: Mapping[str, FunctionTool]) -> None:
        self.environment = environment
        self._methods = methods

    async def open(self, task: RolloutTask) -> None:
        self.environment.task = task
        self.environment._given = _Given({**self.environment._given.values, "task": task}, _setup_of(task))
        await call_user_code(self.environment.open, task)

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        raise ToolError("an environment cannot be called itself: call one of its tools")

    async def call_tool(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Call the tool `name` and return its result. Raises ToolError, ToolLost and EndEpisode."""
        if name in self._methods:
            return await self._methods[name].call_on((self.environment,), arguments)
        result: str = await call_user_code(self.environment.call_tool, name, arguments)
        return result

    async def react(self, messages: Sequence[Message]) -> str | None:
        """Return the user's reply, or None. Raises EndEpisode."""
        reply: str | None = await call_user_code(self.environment.react, messages)
        return reply

    async def score_of(self, task: RolloutTask, messages: Sequence[Message]) -> float | Score:
        """Return the environment's score of a conversation."""
        score: float | Score = await call_user_code(self.environment.score, task, messages)
        return score

    async def snapshot(self) -> bytes:
        state: bytes = await call_user_code(self.environment.snapshot)
        return state

    async def restore(self, state: bytes) -> None:
        await call_user_code(self.environment.restore, state)

    async def close(self) -> None:
        await call_user_code(self.environment.close)


def load_environment(path: str) -> LoadedEnvironment:
    """Load the environment class with this registered name, `NAME:VARIANT` or import path.

    Raises InvalidRequest with param "environment".
    """
    name, variant = parts.split_variant(parts.ENVIRONMENTS, path)
    kind = parts.find(parts.ENVIRONMENTS, name or path, param="environment")
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise InvalidRequest(f"{path!r} is not a subclass of agentloop.rollout.Environment", param="environment")
    life_s = kind.open_timeout_s + kind.score_timeout_s + kind.close_timeout_s
    if not 0 < life_s <= MAX_LIFE_S:
        raise InvalidRequest(
            f"{path}: open_timeout_s + score_timeout_s + close_timeout_s is {life_s:g} s, but must be positive and "
            f"at most {MAX_LIFE_S:g} s",
            param="environment",
        )
    chosen = _variant_of(kind, name or path, variant if name else "")  # type: ignore[arg-type] # mypy: as above
    return LoadedEnvironment(chosen, path)


@cache
def _variant_of(kind: type[Environment], name: str, variant: str) -> type[Environment]:
    """Return the subclass for a variant; the class itself if it has no variants. Raises InvalidRequest."""
    variants = made(lambda: sorted(kind.variants()), f"{name}.variants() failed", param="environment")
    if variant in variants or not (variant or variants):
        return type(kind.__name__, (kind,), {"variant": variant}) if variant else kind
    if not variants:
        raise InvalidRequest(f"environment {name!r} has no variants: remove ':{variant}'", param="environment")
    near = get_close_matches(variant, variants, n=3, cutoff=0.5)
    listed = f"did you mean {' or '.join(near)}?" if near else f"expected {', '.join(variants)}"
    problem = f"has no variant {variant!r}" if variant else f"needs a variant, as in {name}:{variants[0]}"
    raise InvalidRequest(f"environment {name!r} {problem}; {listed}", param="environment")


def tasks_of(path: str, *, seed: int | None = None, count: int | None = None) -> list[RolloutTask]:
    """Return the tasks of an environment, with their `environment` set to `path`. Raises InvalidRequest.

    With a `seed` they are shuffled, or generated from it. `count` limits their number.
    """
    kind = load_environment(path).kind
    tasks = made(lambda: list(kind.choose_tasks(seed, count)), f"{path}.tasks() failed", param="environment")
    return [replace(task, environment=path) for task in tasks]


def _is_plain(value: object, seen: set[int]) -> bool:
    """Return True if JSON round-trips the value exactly and no object in it is in `seen` (referenced twice)."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) not in (dict, list):
        return type(value) in (str, int, bool, NoneType)
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item, seen) for key, item in value.items())
    assert isinstance(value, list)
    return all(_is_plain(item, seen) for item in value)
