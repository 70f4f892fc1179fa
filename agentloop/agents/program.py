"""A user's agent as something to run: an async function, a plain one, or a command; never on our event loop.

All three get the same: a task, and the base URL and key of a session. None of them needs to know of agentloop.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, cast

import orjson

from agentloop import codec
from agentloop.agents.loop_thread import AgentThread
from agentloop.agents.subprocess import run_command
from agentloop.aio import in_daemon_thread
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.plugins import resolve
from agentloop.types import RolloutTask

GRACE_S = 5.0
MAX_ENVIRONMENT_BYTES = 120_000  # of one variable; the kernel takes 128 KiB

_MARK = re.compile(r"\{(prompt|task_id|base_url)\}")


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """What one run of an agent is given. `base_url` ends with /v1; the model to name is "default"."""

    task: RolloutTask
    base_url: str
    api_key: str

    @property
    def session_url(self) -> str:
        """The session itself: its chat routes are under /v1, and an agent may POST a reward to /reward."""
        return self.base_url.removesuffix("/v1")


class Runner(Protocol):
    """One way to run user code. A cancellation ends the run within a grace, whatever the code does."""

    async def run(self, place: AgentPlace) -> object:
        """What the code returned; raises what it raised."""

    def close(self) -> None:
        """Let go of threads. Idempotent."""


class AgentProgram:
    """A user's agent, for any number of runs at once. Close it at the end, or use it as a context manager."""

    def __init__(self, name: str, runner: Runner) -> None:
        self.name = name
        self._runner = runner

    @classmethod
    def load(cls, path: str, *, grace_s: float = GRACE_S) -> AgentProgram:
        """The function `run(task, base_url, api_key)` that `my_module:run` names; it returns a reward or None.

        If it is `async def`, its runs share one event loop in one thread; a plain `def` has a thread for each run.
        Raises InvalidRequest with param "agent".
        """
        found = resolve(path, param="agent")
        if not callable(found):
            raise InvalidRequest(f"{path!r} is not a function", param="agent")
        return cls.of(cast(Callable[..., Any], found), name=path, grace_s=grace_s)

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str | None = None, grace_s: float = GRACE_S) -> AgentProgram:
        """The function itself; else as `load`. Raises InvalidRequest if it does not take three arguments."""
        name = name or str(getattr(function, "__name__", type(function).__name__))
        try:
            inspect.signature(function).bind(None, "", "")
        except (TypeError, ValueError) as error:
            wanted = f"{name} must be callable as run(task, base_url, api_key): {error}"
            raise InvalidRequest(wanted, param="agent") from error
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return cls(name, _OnOneLoop(function, grace_s) if is_async else _InThreads(function))

    @classmethod
    def command(
        cls, template: str, *, grace_s: float = GRACE_S, withheld: frozenset[str] = frozenset()
    ) -> AgentProgram:
        """A command line, run once for each sample; `withheld` are environment variables that it must not see.

        It is split as a shell would, but run without one. {prompt} (the task's last message), {task_id} and
        {base_url} are filled in; see `environment` for what it finds there. It fails by its exit status. Raises
        InvalidRequest with param "agent_command".
        """
        try:
            arguments = tuple(shlex.split(template))
        except ValueError as error:
            raise InvalidRequest(f"{template!r}: {error}", param="agent_command") from error
        if not arguments or shutil.which(arguments[0]) is None:
            raise InvalidRequest(f"no such command: {template!r}", param="agent_command")
        return cls(template, _Command(arguments, grace_s, withheld))

    async def run(self, place: AgentPlace) -> float | None:
        """One run; the reward that it returned. Raises what the agent raised, and AgentLoopError for what else."""
        return _checked(await self._runner.run(place))

    def close(self) -> None:
        """Let go of threads; does not wait for what ignores its cancellation. Idempotent."""
        self._runner.close()

    def __enter__(self) -> AgentProgram:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def environment(place: AgentPlace, withheld: frozenset[str] = frozenset()) -> Mapping[str, str]:
    """This process's environment and the session's: OPENAI_BASE_URL and _API_KEY, the same for ANTHROPIC, the
    session's own URL as AGENTLOOP_SESSION_URL, and the task as JSON in AGENTLOOP_TASK, without its reference.

    Raises InvalidRequest for a task that an environment cannot hold.
    """
    document = codec.to_builtins(place.task)
    del document["reference"]  # the policy may read the environment of its agent
    task = orjson.dumps(document).decode()
    if len(task.encode()) > MAX_ENVIRONMENT_BYTES:
        raise InvalidRequest(f"the task is longer than the {MAX_ENVIRONMENT_BYTES} bytes that a variable holds")
    inherited = {name: value for name, value in os.environ.items() if name not in withheld}
    return inherited | {
        "OPENAI_BASE_URL": place.base_url,
        "OPENAI_API_KEY": place.api_key,
        "ANTHROPIC_BASE_URL": place.session_url,
        "ANTHROPIC_API_KEY": place.api_key,
        "AGENTLOOP_SESSION_URL": place.session_url,
        "AGENTLOOP_TASK": task,
    }


class _OnOneLoop:
    def __init__(self, function: Callable[..., Awaitable[object]], grace_s: float) -> None:
        self._function = function
        self._thread = AgentThread(grace_s)

    async def run(self, place: AgentPlace) -> object:
        return await self._thread.run(self._function, place.task, place.base_url, place.api_key)

    def close(self) -> None:
        self._thread.close()


class _InThreads:
    """A run that overruns is abandoned in its thread: its session is over, so its further calls are refused."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    async def run(self, place: AgentPlace) -> object:
        return await in_daemon_thread(self._function, place.task, place.base_url, place.api_key)

    def close(self) -> None:
        return None  # daemon threads end with the process


class _Command:
    def __init__(self, arguments: tuple[str, ...], grace_s: float, withheld: frozenset[str]) -> None:
        self._arguments = arguments
        self._grace_s = grace_s
        self._withheld = withheld

    async def run(self, place: AgentPlace) -> object:
        arguments = [_filled(argument, place) for argument in self._arguments]
        ending = await run_command(arguments, environment(place, self._withheld), grace_s=self._grace_s)
        if ending.status != 0:
            raise AgentLoopError(ending.describe())
        return None

    def close(self) -> None:
        return None


def _filled(argument: str, place: AgentPlace) -> str:
    """One pass, so that a prompt which holds such a mark itself stays as it is."""
    values = {"prompt": place.task.messages[-1].content, "task_id": place.task.task_id, "base_url": place.base_url}
    return _MARK.sub(lambda mark: values[mark[1]], argument)


def _checked(value: object) -> float | None:
    if value is None:
        return None
    if inspect.iscoroutine(value):
        value.close()  # a plain def gave it: nobody would ever await it
    if not isinstance(value, Real):
        raise AgentLoopError(f"the agent returned a {type(value).__name__}; a reward is a number, or None")
    reward = float(value)
    if not math.isfinite(reward):
        raise AgentLoopError(f"the agent returned {reward}; a reward is finite")
    return reward
