"""The Tool protocol, `@tool`, which makes a tool of a function, and the loading of tools by name.

All trajectories of a worker share a `Tool`. `open_session` returns the part of one trajectory. A session is created
at its first call, or before the loop begins if it has `open`, and is always closed once when the trajectory ends.
The toolbox (`toolbox.py`) applies deadlines, size limits and concurrency. A tool reports failure by `ToolError`,
which the policy reads as the result. `ToolLost` ends the trajectory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Protocol, cast, overload, runtime_checkable

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentloop import parts
from agentloop.concurrency.aio import call_user_code
from agentloop.errors import InvalidRequest, Overloaded, ToolError
from agentloop.plugins import made
from agentloop.score import Score
from agentloop.types import JSON, RolloutTask


class EndEpisode(Exception):
    """The end of an episode, raised by a tool or by an environment's `react`: the trajectory is `completed`.

    A `reward` is its score, in place of what environments would say. `reason` is in the record's `end_reason`, and
    the answer to the call that raised it.
    """

    def __init__(self, reward: float | Score | None = None, reason: str = "") -> None:
        super().__init__(reward, reason)
        self.reward, self.reason = reward, reason


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for the policy, and the limits that the toolbox holds it to."""

    name: str
    description: str
    parameters: Mapping[str, JSON]  # a JSON schema of type object
    timeout_s: float = 10.0
    max_output_bytes: int = 65_536
    max_concurrency: int = 64
    score_timeout_s: float | None = None  # of its session's `score`; None: its sessions do not score
    has_state: bool = True  # what a session answers depends on its earlier calls; see SnapshotSession
    open_timeout_s: float | None = None  # of its session's `open`; None: its sessions have none
    close_timeout_s: float | None = None  # of its session's `close`; None: the toolbox's
    environment: str = ""  # the one whose session answers it, and all of its tools; empty: its own session does

    def definition(self) -> dict[str, JSON]:
        """The tool in the OpenAI function format: the one canonical form that templates see."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSession(Protocol):
    """One trajectory's use of a tool; may hold state between calls."""

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        """Return the tool's answer. Raises ToolError with a message for the policy, or ToolLost."""

    async def close(self) -> None:
        """Free what the session holds. Called once, also after a failed `open`, a timeout or a cancellation. A
        process that is killed calls nothing."""


@runtime_checkable
class OpeningSession(ToolSession, Protocol):
    """A session that prepares itself for its task before the loop begins: files, a process, a container.

    Its tool has an `open_timeout_s`. A session that replaces another after a timeout is opened too.
    """

    async def open(self, task: RolloutTask) -> None:
        """Prepare for a task. Called once, first; `task.tool_setup` has what the task brings, under the tool's
        name. Raises InvalidRequest for a task that the session cannot be opened for, which ends as `invalid_task`.
        Any other error, and a timeout, ends the trajectory as `tool_failed`: no fault of the policy, so without a
        reward."""


@runtime_checkable
class ScoringSession(ToolSession, Protocol):
    """A session that scores its trajectory after the end and before it is closed: an environment.

    With a `score_timeout_s` of its tool it is asked once, also in a trajectory that never called it: it is opened
    for that. A session that replaced another after a timeout is asked in its place.
    """

    async def score(self, task: RolloutTask) -> float | Score:
        """Return a number, or a `Score`. What it raises is in the record's `reward_error`."""


@runtime_checkable
class SnapshotSession(ToolSession, Protocol):
    """A session whose state can be carried to another process, where its trajectory continues if its worker dies.

    The bytes are all of the state: the earlier session is closed, or its process is dead. A trajectory begins at
    the start, with newly opened sessions, if it called a tool that `has_state` and whose session is no
    SnapshotSession, or if a session cannot be restored. Both calls are held to the tool's `timeout_s`.
    """

    async def snapshot(self) -> bytes:
        """Return the state after the calls so far, at most MAX_SNAPSHOT_BYTES. Called after each turn's calls."""

    async def restore(self, state: bytes) -> None:
        """Take over the state of an earlier session. Called once, after `open` and before any call."""


class Tool(Protocol):
    """A tool as the service holds it: one object in each process."""

    @property
    def spec(self) -> ToolSpec:
        """Name, schema and caps. Constant."""

    def open_session(self, trajectory_id: str, seed: int) -> ToolSession:
        """Return the tool's part of one trajectory. `seed` makes randomness reproducible."""

    async def close(self) -> None:
        """Free what the tool itself holds. Idempotent."""


@runtime_checkable
class ToolSet(Protocol):
    """Tools of one source, such as a server that lists them. A configuration names it like a tool."""

    def tools(self) -> Sequence[Tool]:
        """Return the source's tools, in its order. Called once a process, while it loads its tools."""


class FunctionTool:
    """A tool made of one function without state. Synchronous functions run in a thread of their own, which a
    timeout abandons but cannot kill: what may run for long belongs in a tool with a process of its own."""

    def __init__(self, function: Callable[..., Any], spec: ToolSpec, arguments: type[BaseModel]) -> None:
        self._function = function
        self._spec = spec
        self._arguments = arguments
        self._is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        self.__doc__ = function.__doc__

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def __get__(self, instance: object | None, owner: type) -> Any:
        """Return the method itself where the function is one: an environment's own code calls it as such."""
        return self if instance is None or not self._is_method else MethodType(self._function, instance)

    def within(self, environment: str) -> FunctionTool:
        """Return the tool as one of an environment, whose state it shares."""
        spec = replace(self._spec, environment=environment, has_state=True)
        return FunctionTool(self._function, spec, self._arguments)

    def open_session(self, trajectory_id: str, seed: int) -> FunctionTool:
        return self  # stateless: every trajectory may share it

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        return await self.call_on((), arguments)

    async def call_on(self, instance: tuple[object, ...], arguments: Mapping[str, JSON]) -> str:
        """Return the answer of the function, or of an instance's method."""
        values = validated(self._arguments, arguments)
        try:
            answer = await call_user_code(self._function, *instance, **values)
        except Overloaded as error:
            raise ToolError("too many earlier calls of tools still run") from error
        return answer if isinstance(answer, str) else orjson.dumps(answer).decode()

    async def close(self) -> None:
        return None


def validated(model: type[BaseModel], arguments: Mapping[str, JSON]) -> dict[str, Any]:
    """Return the arguments as the model types them. Raises ToolError with at most three problems, in one line."""
    try:
        parsed = model.model_validate(dict(arguments))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:3]]
        raise ToolError(f"invalid arguments: {'; '.join(problems)}") from error
    return {name: getattr(parsed, name) for name in type(parsed).model_fields}


def arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model of a function's parameters. Raises InvalidRequest if one has no type hint."""
    fields: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(inspect.signature(function, eval_str=True).parameters.items()):
        if place == 0 and name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidRequest(f"tool {function.__name__}: *args and **kwargs have no schema", param=name)
        if parameter.annotation is parameter.empty:
            raise InvalidRequest(f"tool {function.__name__}: parameter {name} needs a type hint", param=name)
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (parameter.annotation, default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def parameters_schema(model: type[BaseModel]) -> dict[str, JSON]:
    """The model's JSON schema without pydantic's titles, which only cost tokens."""
    return cast("dict[str, JSON]", _without_titles(model.model_json_schema(), is_properties=False))


def _without_titles(node: JSON, *, is_properties: bool) -> JSON:
    if isinstance(node, dict):
        return {
            key: _without_titles(value, is_properties=key == "properties" and not is_properties)
            for key, value in node.items()
            if is_properties or key != "title"
        }
    return [_without_titles(item, is_properties=False) for item in node] if isinstance(node, list) else node


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout_s: float = 10.0,
    max_output_bytes: int = 65_536,
    max_concurrency: int = 64,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    timeout_s: float = 10.0,
    max_output_bytes: int = 65_536,
    max_concurrency: int = 64,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a function, or of an `Environment`'s method.

    Its schema is from the type hints, its description from the docstring.

    Parameters are described by `Annotated[int, Field(description=...)]`. Use as `@tool` or `@tool(timeout_s=2)`.
    """

    def make(made_of: Callable[..., Any]) -> FunctionTool:
        model = arguments_model(made_of)
        spec = ToolSpec(
            name=name or made_of.__name__,
            description=inspect.cleandoc(made_of.__doc__ or ""),
            parameters=parameters_schema(model),
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            max_concurrency=max_concurrency,
            has_state=False,
        )
        return FunctionTool(made_of, spec, model)

    return make if function is None else make(function)


def load_tools(names: Sequence[str], configured: Mapping[str, str]) -> list[Tool]:
    """Return the tools of these names, which `configured` maps to registered names or import paths.

    A name that it does not have is one of these itself. Raises InvalidRequest with param "tools".
    """
    return [tool for name in names for tool in tools_at(configured.get(name, name))]


def tools_at(path: str) -> list[Tool]:
    """Return the tools of a registered name or import path: a Tool, a ToolSet, or a maker of one without arguments.

    Raises InvalidRequest with param "tools".
    """
    found = parts.find(parts.TOOLS, path, param="tools")
    refusal = f"{path!r} is neither a tool (see @tool) nor makes one"
    if not _is_tool(found) and callable(found):
        found = made(found, refusal, param="tools")
    if _is_tool(found):
        return [cast(Tool, found)]
    if isinstance(found, type) or not isinstance(found, ToolSet):
        raise InvalidRequest(refusal, param="tools")
    tools = made(found.tools, f"{path!r} has no tools", param="tools")
    if not all(_is_tool(tool) for tool in tools):
        raise InvalidRequest(f"{path!r} has something among its tools that is none", param="tools")
    return list(tools)


def _is_tool(found: object) -> bool:
    has_spec = not isinstance(found, type) and isinstance(getattr(found, "spec", None), ToolSpec)
    return has_spec and all(callable(getattr(found, method, None)) for method in ("open_session", "close"))
