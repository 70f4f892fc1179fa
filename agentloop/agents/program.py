"""A user's agent as a program: an async function, a plain function, or a command. It never runs on our event loop.

Each run receives a task and the base URL and key of a session; the agent does not have to use agentloop.

- Async functions share one event loop in a separate thread, so they can share clients and locks.
- A plain function runs in a new thread for each run.
- A command runs in its own process group. When `run_command` returns or raises, no process of the group is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import IO, Any, Protocol, cast

import orjson
import structlog

from agentloop.api.requests import task_fields
from agentloop.concurrency.aio import LoopThread, in_daemon_thread, ordinary, settle
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.plugins import resolve
from agentloop.score import Score
from agentloop.types import RolloutTask

AGENT_GRACE_S = 5.0
MAX_ENVIRONMENT_BYTES = 120_000  # per variable; the kernel accepts 128 KiB
SLOW_START_S = 1.0  # a delay of a job's start that indicates a blocked event loop
TAIL_BYTES = 4096  # the end of a command's output that is kept for its error message
MAX_LINE_CHARS = 500

_MARK = re.compile(r"\{(prompt|task_id|base_url)\}")

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """The inputs of one run of an agent. `base_url` ends with /v1; the model's name is "default"."""

    task: RolloutTask
    base_url: str
    api_key: str
    control_key: str = ""

    @property
    def session_url(self) -> str:
        """The session's URL, with the chat routes under /v1. A command can POST a reward to /reward."""
        return self.base_url.removesuffix("/v1")


class Runner(Protocol):
    """Runs user code. A cancelled run ends within a grace period, even if the code ignores the cancellation."""

    async def run(self, place: AgentPlace) -> object:
        """Run the code. Returns its result or raises its error."""

    def close(self) -> None:
        """Release threads. Idempotent."""


class AgentProgram:
    """A user's agent, for any number of concurrent runs. Close it, or use it as a context manager."""

    def __init__(self, name: str, runner: Runner) -> None:
        self.name = name
        self._runner = runner

    @classmethod
    def load(cls, path: str, *, grace_s: float = AGENT_GRACE_S) -> AgentProgram:
        """Create a program from the function at an import path such as `my_module:run`.

        It is called as `run(task, base_url, api_key)` and returns a reward or None. The runs of an `async def`
        share one event loop in one thread; a plain `def` has a thread per run. Raises InvalidRequest with param
        "agent".
        """
        function = resolve(path, param="agent")
        if not callable(function):
            raise InvalidRequest(
                f"{path!r} is not a function but a {type(function).__name__}: name a function of the module",
                param="agent",
            )
        return cls.of(cast(Callable[..., Any], function), name=path, grace_s=grace_s)

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, name: str | None = None, grace_s: float = AGENT_GRACE_S
    ) -> AgentProgram:
        """Create a program from a function, like `load`.

        Raises InvalidRequest unless it accepts three arguments.
        """
        name = name or str(getattr(function, "__name__", type(function).__name__))
        try:
            inspect.signature(function).bind(None, "", "")
        except (TypeError, ValueError) as error:
            message = f"{name} must be callable as run(task, base_url, api_key): {error}"
            raise InvalidRequest(message, param="agent") from error
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return cls(name, _OnLoopThread(function, grace_s) if is_async else _InThreads(function))

    @classmethod
    def command(
        cls, template: str, *, grace_s: float = AGENT_GRACE_S, withheld: frozenset[str] = frozenset()
    ) -> AgentProgram:
        """Create a program from a command line, which is run once per sample.

        The line is split like in a shell, but run without one. {prompt} (the task's last message), {task_id} and
        {base_url} are replaced. `environment` describes the environment variables, without those in `withheld`. A
        nonzero exit status is a failure. Raises InvalidRequest with param "agent_command".
        """
        try:
            arguments = tuple(shlex.split(template))
        except ValueError as error:
            raise InvalidRequest(
                f"cannot parse the command {template!r}: {error}", param="agent_command"
            ) from error
        if not arguments or shutil.which(arguments[0]) is None:
            raise InvalidRequest(
                f"no such command: {template!r}: its program is not in PATH; install it, or write its full path",
                param="agent_command",
            )
        return cls(template, _Command(arguments, grace_s, withheld))

    async def run(self, place: AgentPlace) -> float | Score | None:
        """Run the agent once. Returns its reward or its `Score`, which is not validated.

        Raises the agent's exception, and AgentLoopError for any other failure.
        """
        return _checked(await self._runner.run(place))

    def close(self) -> None:
        """Release threads without waiting for runs that ignore their cancellation. Idempotent."""
        self._runner.close()

    def __enter__(self) -> AgentProgram:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def environment(place: AgentPlace, withheld: frozenset[str] = frozenset()) -> Mapping[str, str]:
    """Return the environment variables of an agent's command: this process's variables and those of the session.

    The session's variables are OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,
    AGENTLOOP_SESSION_URL and AGENTLOOP_SESSION_KEY (the control key), and AGENTLOOP_TASK, the task as JSON without
    `reference` and `tool_setup`. Raises InvalidRequest if the task is too long for a variable.
    """
    document = task_fields(place.task)
    del document["reference"], document["tool_setup"]  # the policy may be able to read its agent's environment
    task = orjson.dumps(document).decode()
    if len(task.encode()) > MAX_ENVIRONMENT_BYTES:
        raise InvalidRequest(
            f"task {place.task.task_id!r} has {len(task.encode())} bytes as JSON, which is longer than the maximum "
            f"of {MAX_ENVIRONMENT_BYTES} bytes for the variable AGENTLOOP_TASK; use an agent function instead"
        )
    inherited = {name: value for name, value in os.environ.items() if name not in withheld}
    return inherited | {
        "OPENAI_BASE_URL": place.base_url,
        "OPENAI_API_KEY": place.api_key,
        "ANTHROPIC_BASE_URL": place.session_url,
        "ANTHROPIC_API_KEY": place.api_key,
        "AGENTLOOP_SESSION_URL": place.session_url,
        "AGENTLOOP_SESSION_KEY": place.control_key,
        "AGENTLOOP_TASK": task,
    }


class _OnLoopThread:
    """Runs an async function on a separate event loop in a separate thread."""

    def __init__(self, function: Callable[..., Awaitable[object]], grace_s: float) -> None:
        self._function = function
        self._grace_s = grace_s
        self._thread: LoopThread | None = None
        self._given_up: list[LoopThread] = []  # a run that ignored its cancellation has at most one

    async def run(self, place: AgentPlace) -> object:
        if self._thread is None:
            self._thread = LoopThread("agents")
        thread = self._thread
        job = _Job(self._function, place)
        thread.call(job.start)
        try:
            return await asyncio.shield(job.outcome)
        except asyncio.CancelledError:
            thread.call(job.cancel)
            job.outcome.add_done_callback(asyncio.Future.exception)  # mark a late exception as retrieved
            await asyncio.wait({job.outcome}, timeout=self._grace_s)
            # Abandon the loop: its other runs continue there until they end, and new runs get a new loop.
            if not job.outcome.done() and self._thread is thread:
                _log.warning("agent_ignores_cancellation", agent=getattr(self._function, "__name__", "agent"))
                self._given_up.append(thread)
                self._thread = None
            raise

    def close(self) -> None:
        """Cancel running jobs and stop the threads, without waiting for them. Idempotent."""
        for thread in (self._thread, *self._given_up):
            if thread is not None:
                thread.stop()
        self._thread = None
        self._given_up.clear()


class _Job:
    """One run on a loop thread. `outcome` belongs to the event loop that created the job."""

    def __init__(self, function: Callable[..., Awaitable[object]], place: AgentPlace) -> None:
        self._home = asyncio.get_running_loop()
        self.outcome: asyncio.Future[object] = self._home.create_future()
        self._function = function
        self._place = place
        self._queued_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        delay_s = time.monotonic() - self._queued_at
        if delay_s > SLOW_START_S:
            hint = "an async agent blocks its event loop; write it as a plain def to give each run its own thread"
            _log.warning("agent_started_late", delay_s=round(delay_s, 1), hint=hint)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        value, error = None, None
        try:
            value = await self._function(self._place.task, self._place.base_url, self._place.api_key)
        except BaseException as raised:  # a SystemExit or CancelledError must not take effect in the caller's loop
            error = ordinary(raised)
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed, so the outcome is not awaited
            self._home.call_soon_threadsafe(settle, self.outcome, value, error)


class _InThreads:
    """Runs a plain function in threads.

    A cancelled run is abandoned in its thread. Its session is finished, so its further calls are refused.
    """

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
        exit_ = await run_command(arguments, environment(place, self._withheld), grace_s=self._grace_s)
        if exit_.status != 0:
            raise AgentLoopError(exit_.describe())
        return None

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CommandExit:
    """The result of a command. A negative `status` is the signal that killed it; the tails end its output."""

    status: int
    output_tail: str
    error_tail: str

    def describe(self) -> str:
        """Return one line with the status and the last line of the error output, or else of the standard output."""
        ending = f"exit status {self.status}" if self.status >= 0 else f"killed by signal {-self.status}"
        for tail in (self.error_tail, self.output_tail):
            lines = [line.strip() for line in tail.splitlines() if line.strip()]
            if lines:
                return f"{ending}: {lines[-1][-MAX_LINE_CHARS:]}"
        return ending


async def run_command(arguments: Sequence[str], environment: Mapping[str, str], *, grace_s: float) -> CommandExit:
    """Run a command without shell or input. Raises OSError if it cannot start.

    A cancellation sends SIGTERM and, after `grace_s`, kills the process group.
    """
    # Separate files: a program flushes its buffered output last, after the error message that explains its exit.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:  # finish the start: otherwise its child processes would keep running
            process = await starting
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
            raise
        finally:
            _signal_group(process.pid, signal.SIGKILL)  # also kills background processes of the command
            await process.wait()
        return CommandExit(status, _tail(output), _tail(errors))


def _filled(argument: str, place: AgentPlace) -> str:
    # A single pass: placeholders that occur in the prompt itself are not replaced.
    values = {"prompt": place.task.messages[-1].content, "task_id": place.task.task_id, "base_url": place.base_url}
    return _MARK.sub(lambda mark: values[mark[1]], argument)


def _checked(value: object) -> float | Score | None:
    if value is None or isinstance(value, Score):
        return value
    if inspect.iscoroutine(value):
        value.close()  # a plain def returned it, and it is never awaited
    if not isinstance(value, Real):
        raise AgentLoopError(
            f"the agent returned a {type(value).__name__}: the reward must be a number, a Score or None"
        )
    reward = float(value)
    if not math.isfinite(reward):
        raise AgentLoopError(f"the agent returned {reward}: the reward must be finite")
    return reward


def _signal_group(group_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group_id, number)


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL_BYTES))
    return output.read().decode(errors="replace")
