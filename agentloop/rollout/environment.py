"""`Environment`: tasks, tools over one state, a user, an end and a score, in one class of an author's.

Ownership: one object belongs to one trajectory. It is made, opened, asked, scored and closed by the trajectory's
`ToolScope`, whose deadlines and results are those of tools. A task names the class by its registered name or import
path. Synchronous methods run in threads, one at a time; loops and rewards get the object itself.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import NoneType
from typing import Any, ClassVar, TypeAlias

import orjson

from agentloop import parts
from agentloop.concurrency.aio import call_user_code
from agentloop.errors import InvalidRequest, ToolError
from agentloop.plugins import made
from agentloop.rollout.models import ModelsPort, NoModels, OtherModel
from agentloop.rollout.tool import FunctionTool, ToolSpec
from agentloop.score import Score
from agentloop.types import JSON, Message, RolloutTask, ToolCall

MAX_LIFE_S = 1800.0
"""The most that an environment may take to open, to score and to close, together."""

ScriptedTurn: TypeAlias = str | ToolCall | Sequence[ToolCall]
"""A turn of a scripted policy: what it says, or calls."""

_HEAP_TYPE = 1 << 9  # the flag of classes that Python code defines


def call(tool: str, **arguments: JSON) -> ToolCall:
    """Return a call, as a turn of `Environment.gold`."""
    return ToolCall("", tool, arguments)


class Environment:
    """One episode of a task. Write a subclass; its methods by `@tool` are what the policy may call.

    Any method but `tasks` and `gold` may be `async`. State is what `open` puts on `self`.
    """

    open_timeout_s: ClassVar[float] = 60.0
    react_timeout_s: ClassVar[float] = 60.0
    score_timeout_s: ClassVar[float] = 60.0
    close_timeout_s: ClassVar[float] = 10.0
    task: RolloutTask
    seed: int  # of the trajectory: the only source of randomness

    @classmethod
    def tasks(cls) -> Iterable[RolloutTask]:
        """Return its tasks, for `agentloop try`, `validate` and `rollout`, and `tasks_of`."""
        return ()

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn] | None:
        """Return the turns of a policy that solves the task; None: not known."""
        return None

    async def open(self, task: RolloutTask) -> None:
        """Build the state. Raises InvalidRequest for a task that it cannot be built for."""

    async def react(self, messages: Sequence[Message]) -> str | None:
        """Return what the user says to an answer without a call; None, or EndEpisode: the episode ends."""
        return None

    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> float | Score:
        """Return the score at the end. An EndEpisode with a reward is in its place."""
        return Score()

    async def snapshot(self) -> bytes:
        """Return the state. The default is all attributes and slots of `self`.

        Raises ToolError for a state that JSON does not preserve: after a lost worker the trajectory starts again.
        """
        if hidden := next((base for base in type(self).__mro__[:-1] if not base.__flags__ & _HEAP_TYPE), None):
            raise ToolError(f"{type(self).__name__} is also a {hidden.__name__}, whose content has no snapshot")
        given = vars(self).get("_given") or _Given()
        if given.setup != _setup_of(given.values.get("task")):
            raise ToolError("the task of the environment was changed in place: copy what you change")
        ours = [name for name, value in vars(self).items() if name == "_given" or given.is_its(name, value)]
        own = {name: value for name, value in vars(self).items() if name not in ours}
        values = {"attributes": own, "slots": _slots_of(self)}
        odd = [name for part in values.values() for name, value in part.items() if not _is_plain(value, set())]
        if odd or not _is_plain(values, set()):
            raise ToolError(f"{odd[:3] or 'an object held twice'} is no plain JSON: it has no snapshot of its own")
        return orjson.dumps({"version": self._version(), "ours": ours, **values})

    async def restore(self, state: bytes) -> None:
        """Take over a state, in an object that was opened for the same task: the attributes are those of the state.

        Raises ToolError, before it changes anything, for a state of another version of the class.
        """
        sent = orjson.loads(state)
        if sent["version"] != self._version():
            names = {*sent["ours"], *sent["attributes"], *sent["slots"]} ^ {*vars(self), *_slots_of(self)}
            field = f"field {min(names)!r}" if names else "its code"
            raise ToolError(f"the snapshot is of another version of {type(self).__qualname__}: {field} differs")
        kept = {name: vars(self)[name] for name in sent["ours"]}
        vars(self).clear()
        vars(self).update(kept | sent["attributes"])
        for name in _slots_of(self).keys() - sent["slots"].keys():
            object.__delattr__(self, name)
        for name, value in sent["slots"].items():
            object.__setattr__(self, name, value)

    async def close(self) -> None:
        """Free what it holds. Called once, on every path."""

    def model(self, name: str) -> OtherModel:
        """Return another model of the service."""
        return OtherModel(name, self._models, self._trajectory_id)

    async def model_user(
        self, name: str, persona: str, messages: Sequence[Message], *, end: str = "###STOP###"
    ) -> str | None:
        """Return what a model says in the user's place; None once it says `end`. It does not see the tools."""
        roles = {"user": "assistant", "assistant": "user"}
        seen = [Message(roles[one.role], one.content) for one in messages if one.role in roles and one.content]
        said = await self.model(name).chat([Message("system", persona), *seen])
        return None if end in said else said

    def _version(self) -> str:
        return _version_of(type(self))  # type: ignore[arg-type] # mypy takes the hash of its objects

    def _begin(self, trajectory_id: str, seed: int, models: ModelsPort) -> None:
        self._trajectory_id, self.seed, self._models = trajectory_id, seed, models
        self._given = _Given({"_trajectory_id": trajectory_id, "seed": seed, "_models": models})


@dataclass(frozen=True, slots=True)
class _Given:
    """The attributes that the service has set: a new object has them too, unless the author replaced them."""

    values: Mapping[str, Any] = field(default_factory=dict)
    setup: int = 0  # `_setup_of` the task

    def is_its(self, name: str, value: object) -> bool:
        return name in self.values and value is self.values[name]


def _setup_of(task: RolloutTask | None) -> int:
    """Return a hash of the parts of a task that an author can change in place; 0 without a task."""
    return 0 if task is None else hash(repr((task.reference, task.tool_setup, task.template_kwargs)))


def _slots_of(environment: Environment) -> dict[str, Any]:
    """Return the values of the slots of all its classes, by their mangled names."""
    state = object.__getstate__(environment)
    return state[1] if isinstance(state, tuple) else {}


@cache
def _version_of(kind: type[Environment]) -> str:
    """Return a digest of the source of a class and of its bases, without `Environment`."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        if base is Environment:
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # a class without a file
            source = repr(sorted(vars(base)))
        digest.update(f"{base.__qualname__} {source}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class LoadedEnvironment:
    """A class of an author's as the toolbox holds it: a Tool whose session answers all of its `methods`."""

    kind: type[Environment]
    path: str
    models: ModelsPort = field(default_factory=NoModels)

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
        """The methods by `@tool`, by their names: a base class's first."""
        return _methods_of(self.kind, self.path)  # type: ignore[arg-type] # mypy takes the hash of its objects

    def open_session(self, trajectory_id: str, seed: int) -> OpenEnvironment:
        environment = self.kind()
        environment._begin(trajectory_id, seed, self.models)
        return OpenEnvironment(environment, self.methods)

    async def close(self) -> None:
        """Nothing is shared between trajectories."""


@cache
def _methods_of(kind: type[Environment], path: str) -> Mapping[str, FunctionTool]:
    """Make the tools of a class: once, not for each trajectory."""
    named: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        named |= vars(base)
    found = (one.within(path) for one in named.values() if isinstance(one, FunctionTool))
    return {one.spec.name: one for one in found}


class OpenEnvironment:
    """One trajectory's environment as a session. Its caller sees to it that calls come one at a time."""

    def __init__(self, environment: Environment, methods: Mapping[str, FunctionTool]) -> None:
        self.environment = environment
        self._methods = methods

    async def open(self, task: RolloutTask) -> None:
        self.environment.task = task
        self.environment._given = _Given({**self.environment._given.values, "task": task}, _setup_of(task))
        await call_user_code(self.environment.open, task)

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        raise ToolError("an environment is called by its tools")

    async def call_tool(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Return the answer of one of the methods. Raises as `call`, and EndEpisode."""
        return await self._methods[name].call_on((self.environment,), arguments)

    async def react(self, messages: Sequence[Message]) -> str | None:
        """Return what the user says. Raises EndEpisode."""
        said: str | None = await call_user_code(self.environment.react, messages)
        return said

    async def score_of(self, task: RolloutTask, messages: Sequence[Message]) -> float | Score:
        """Return the score of a conversation."""
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
    """Return the environment of a registered name or import path.

    Raises InvalidRequest with param "environment".
    """
    kind = parts.find(parts.ENVIRONMENTS, path, param="environment")
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise InvalidRequest(f"{path!r} is no Environment, a class", param="environment")
    life_s = kind.open_timeout_s + kind.score_timeout_s + kind.close_timeout_s
    if not 0 < life_s <= MAX_LIFE_S:
        raise InvalidRequest(
            f"{path}: its timeouts are {life_s:g} s, of at most {MAX_LIFE_S:g}", param="environment"
        )
    return LoadedEnvironment(kind, path)


def tasks_of(path: str) -> list[RolloutTask]:
    """Return the tasks of an environment, each of which names it. Raises InvalidRequest."""
    loaded = load_environment(path)
    tasks = made(lambda: list(loaded.kind.tasks()), f"{path} has no tasks", param="environment")
    return [replace(task, environment=path) for task in tasks]


def _is_plain(value: object, seen: set[int]) -> bool:
    """Tell if JSON gives a value back as it is, which nothing else of the state holds too."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) not in (dict, list):
        return type(value) in (str, int, bool, NoneType)
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(one, seen) for key, one in value.items())
    assert isinstance(value, list)
    return all(_is_plain(one, seen) for one in value)
