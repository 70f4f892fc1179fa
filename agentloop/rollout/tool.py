"""The Tool protocol, the `@tool` decorator for functions, and the loading of tools by name.

All trajectories of a worker share a `Tool`. Each trajectory has its own session (`open_session`). It is created at
the first call, or before the loop starts if it has `open`, and is closed exactly once when the trajectory ends.
The toolbox (`toolbox.py`) applies deadlines, size limits and concurrency limits. A tool reports a failure as
`ToolError`, whose message the policy reads as the result. `ToolLost` ends the trajectory.
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
    """Ends the episode when a tool, an environment's `react` or a loop raises it: the trajectory is `completed`.

    `reward`, if given, replaces the scores of tools and environments. `reason` is recorded as `end_reason` and is
    the result of the call that raised it.
    """

    def __init__(self, reward: float | Score | None = None, reason: str = "") -> None:
        super().__init__(reward, reason)
        self.reward, self.reason = reward, reason


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for the policy and the limits that the toolbox applies."""

    name: str
    description: str
    parameters: Mapping[str, JSON]  # a JSON schema of type object
    timeout_s: float = 10.0
    max_output_bytes: int = 65_536
    max_concurrency: int = 64
    score_timeout_s: float | None = None  # for the session's `score`; None: its sessions do not score
    has_state: bool = True  # a session's results depend on its earlier calls; see SnapshotSession
    open_timeout_s: float | None = None  # for the session's `open`; None: its sessions have no `open`
    close_timeout_s: float | None = None  # for the session's `close`; None: the toolbox's default
    environment: str = ""  # the environment whose session answers the calls; empty: the tool's own session
    is_listed: bool = True  # False: not in the prompt; the environment describes the tool to the policy later

    def definition(self) -> dict[str, JSON]:
        """Return the tool in the OpenAI function format, which chat templates receive."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSession(Protocol):
    """One trajectory's session of a tool. It may keep state between calls."""

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        """Return the result of a call. Raise ToolError with a message for the policy, or ToolLost."""

    async def close(self) -> None:
        """Release resources.

        Called exactly once, also after a failed `open`, a timeout or a cancellation, but not if the process is
        killed.
        """


@runtime_checkable
class OpeningSession(ToolSession, Protocol):
    """A session that is prepared before the loop starts, for example with files, a process or a container.

    Its tool must set `open_timeout_s`. A session that replaces another one after a timeout is opened too.
    """

    async def open(self, task: RolloutTask) -> None:
        """Prepare for a task. Called once, before any other method.

        `task.tool_setup[NAME]` is the task's setup for the tool NAME. Raise InvalidRequest for an unsuitable task:
        the trajectory ends as `invalid_task`. Any other error or a timeout ends it as `tool_failed`, without a
        reward, because the policy is not at fault.
        """


@runtime_checkable
class ScoringSession(ToolSession, Protocol):
    """A session that scores its trajectory, after the loop has ended and before the session is closed.

    Its tool must set `score_timeout_s`. `score` is called once per trajectory, even if the policy never called the
    tool (the session is then opened first). After a timeout, the replacement session scores.
    """

    async def score(self, task: RolloutTask) -> float | Score:
        """Return the reward or a `Score`. An exception is recorded in `reward_error`."""


@runtime_checkable
class SnapshotSession(ToolSession, Protocol):
    """A session whose state can be restored in another process, where the trajectory resumes if its worker is lost.

    A snapshot must contain the complete state, because the earlier session no longer exists. The trajectory
    restarts from its first turn with new sessions if a session cannot be restored, or if it called a tool with
    `has_state` whose session is not a SnapshotSession. Both methods must finish within the tool's `timeout_s`.
    """

    async def snapshot(self) -> bytes:
        """Return the current state, at most MAX_SNAPSHOT_BYTES. Called after the tool calls of each turn."""

    async def restore(self, state: bytes) -> None:
        """Restore the state of an earlier session. Called once, after `open` and before any call."""


class Tool(Protocol):
    """A tool: one object per process, shared by all trajectories."""

    @property
    def spec(self) -> ToolSpec:
        """The tool's name, schema and limits. Constant."""

    def open_session(self, trajectory_id: str, seed: int) -> ToolSession:
        """Return a new session for one trajectory. Use `seed` for all randomness."""

    async def close(self) -> None:
        """Release the resources of the tool itself. Idempotent."""


@runtime_checkable
class ToolSet(Protocol):
    """Several tools from one source, such as an MCP server. It is configured like a single tool."""

    def tools(self) -> Sequence[Tool]:
        """Return the tools in the source's order. Called once per process, when tools are loaded."""


class FunctionTool:
    """A tool that calls a stateless function, or a method of an environment.

    Synchronous functions run in a separate thread. A timeout abandons the thread but cannot stop it, so code that
    may run for long should run in its own process.
    """

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
        """Return a bound method if the function is a method, so that the environment's own code can call it."""
        return self if instance is None or not self._is_method else MethodType(self._function, instance)

    def within(self, environment: str) -> FunctionTool:
        """Return a copy of the tool that belongs to an environment and uses its state."""
        spec = replace(self._spec, environment=environment, has_state=True)
        return FunctionTool(self._function, spec, self._arguments)

    def open_session(self, trajectory_id: str, seed: int) -> FunctionTool:
        return self  # stateless, so all trajectories share one session

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        return await self.call_on((), arguments)

    async def call_on(self, instance: tuple[object, ...], arguments: Mapping[str, JSON]) -> str:
        """Call the function, or the method of `instance`, and return the result as text.

        Raises ToolError for invalid arguments and if too many earlier synchronous calls still run.
        """
        values = validated(self._arguments, arguments)
        try:
            answer = await call_user_code(self._function, *instance, **values)
        except Overloaded as error:
            raise ToolError("too many earlier tool calls are still running") from error
        return answer if isinstance(answer, str) else orjson.dumps(answer).decode()

    async def close(self) -> None:
        return None


def validated(model: type[BaseModel], arguments: Mapping[str, JSON]) -> dict[str, Any]:
    """Validate and convert arguments with a pydantic model.

    Raises ToolError with one line that lists at most three problems.
    """
    try:
        parsed = model.model_validate(dict(arguments))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:3]]
        raise ToolError(f"invalid arguments: {'; '.join(problems)}") from error
    return {name: getattr(parsed, name) for name in type(parsed).model_fields}


def arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a pydantic model of the function's parameters. Raises InvalidRequest for one without a type hint."""
    fields: dict[str, Any] = {}
    for position, (name, parameter) in enumerate(inspect.signature(function, eval_str=True).parameters.items()):
        if position == 0 and name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidRequest(
                f"tool {function.__name__}: parameter {name} has no JSON schema because it is *args, **kwargs or "
                "positional-only: use named parameters",
                param=name,
            )
        if parameter.annotation is parameter.empty:
            raise InvalidRequest(f"tool {function.__name__}: parameter {name} needs a type hint", param=name)
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (parameter.annotation, default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def parameters_schema(model: type[BaseModel]) -> dict[str, JSON]:
    """Return the model's JSON schema without pydantic's titles, which would only use prompt tokens."""
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
    """Make a tool from a function or an `Environment` method: `@tool` or `@tool(timeout_s=2)`.

    The type hints give the schema and the docstring gives the description. Describe a parameter with
    `Annotated[int, Field(description=...)]`.
    """

    def make(target: Callable[..., Any]) -> FunctionTool:
        model = arguments_model(target)
        spec = ToolSpec(
            name=name or target.__name__,
            description=inspect.cleandoc(target.__doc__ or ""),
            parameters=parameters_schema(model),
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            max_concurrency=max_concurrency,
            has_state=False,
        )
        return FunctionTool(target, spec, model)

    return make if function is None else make(function)


def load_tools(names: Sequence[str], configured: Mapping[str, str]) -> list[Tool]:
    """Load tools by name. `configured` maps names to registered names or import paths.

    A name that is not in `configured` is itself a registered name or an import path. Raises InvalidRequest with
    param "tools".
    """
    return [tool for name in names for tool in tools_at(configured.get(name, name))]


def tools_at(path: str) -> list[Tool]:
    """Load the tools at a registered name or import path.

    It is a Tool, a ToolSet, or a function without arguments that returns one of them. Raises InvalidRequest with
    param "tools".
    """
    source = parts.find(parts.TOOLS, path, param="tools")
    refusal = (
        f"{path!r} is neither a tool (see @tool), a ToolSet, nor a function without arguments that returns one"
    )
    if not _is_tool(source) and callable(source):
        source = made(source, refusal, param="tools")
    if _is_tool(source):
        return [cast(Tool, source)]
    if isinstance(source, type) or not isinstance(source, ToolSet):
        raise InvalidRequest(refusal, param="tools")
    tools = made(source.tools, f"{path!r}.tools() failed", param="tools")
    if not all(_is_tool(tool) for tool in tools):
        raise InvalidRequest(f"{path!r}.tools() returned an object that is not a Tool", param="tools")
    return list(tools)


def _is_tool(candidate: object) -> bool:
    has_spec = not isinstance(candidate, type) and isinstance(getattr(candidate, "spec", None), ToolSpec)
    return has_spec and all(callable(getattr(candidate, method, None)) for method in ("open_session", "close"))
