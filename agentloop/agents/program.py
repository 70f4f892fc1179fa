"""A user's agent as something to run: an async function, a plain one, or a command; never on our event loop.

All three get the same: a task, and the base URL and key of a session. None of them needs to know of agentloop.
- Async functions share one event loop in one thread: they may block it, and may keep clients and locks that belong
  to one loop. A loop with an agent on it that ignored its cancellation is given up: what runs there goes on until
  it ends or its own deadline comes, and newcomers get a new loop.
- A plain function has a thread for each run.
- A command runs in a process group of its own. Invariant: when `run_command` leaves, on any path, no process of the
  group lives: first they are asked (SIGTERM), after the grace they are killed.
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
MAX_ENVIRONMENT_BYTES = 120_000  # of one variable; the kernel takes 128 KiB
SLOW_START_S = 1.0  # a loop that begins a job so late was blocked meanwhile
TAIL_BYTES = 4096  # of a command's output, for its error message
MAX_LINE_CHARS = 500

_MARK = re.compile(r"\{(prompt|task_id|base_url)\}")

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """The place of one run of an agent. `base_url` ends with /v1; the model's name is "default"."""

    task: RolloutTask
    base_url: str
    api_key: str
    control_key: str = ""

    @property
    def session_url(self) -> str:
        """The session's URL: its chat routes are under /v1, and a command may POST a reward to /reward."""
        return self.base_url.removesuffix("/v1")


class Runner(Protocol):
    """One way to run user code. A cancellation ends a run within a grace, whatever the code does."""

    async def run(self, place: AgentPlace) -> object:
        """Run the code. Returns its result, and raises its error."""

    def close(self) -> None:
        """Let go of threads. Idempotent."""


class AgentProgram:
    """A user's agent, for any number of runs at once. Close it at the end, or use it as a context manager."""

    def __init__(self, name: str, runner: Runner) -> None:
        self.name = name
        self._runner = runner

    @classmethod
    def load(cls, path: str, *, grace_s: float = AGENT_GRACE_S) -> AgentProgram:
        """Make a program of the function `run(task, base_url, api_key)` at `my_module:run`; it returns a reward or
        None. If it is `async def`, its runs share one event loop in one thread; a plain `def` has a thread for each
        run. Raises InvalidRequest with param "agent"."""
        found = resolve(path, param="agent")
        if not callable(found):
            raise InvalidRequest(f"{path!r} is not a function", param="agent")
        return cls.of(cast(Callable[..., Any], found), name=path, grace_s=grace_s)

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, name: str | None = None, grace_s: float = AGENT_GRACE_S
    ) -> AgentProgram:
        """Make a program of a function, as `load` does. Raises InvalidRequest unless it takes three arguments."""
        name = name or str(getattr(function, "__name__", type(function).__name__))
        try:
            inspect.signature(function).bind(None, "", "")
        except (TypeError, ValueError) as error:
            wanted = f"{name} must be callable as run(task, base_url, api_key): {error}"
            raise InvalidRequest(wanted, param="agent") from error
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return cls(name, _OnLoopThread(function, grace_s) if is_async else _InThreads(function))

    @classmethod
    def command(
        cls, template: str, *, grace_s: float = AGENT_GRACE_S, withheld: frozenset[str] = frozenset()
    ) -> AgentProgram:
        """Make a program of a command line, run once for each sample without the environment variables `withheld`.

        It is split as a shell would, but run without one. {prompt} (the task's last message), {task_id} and
        {base_url} are filled in; `environment` describes its environment. It fails by its exit status. Raises
        InvalidRequest with param "agent_command".
        """
        try:
            arguments = tuple(shlex.split(template))
        except ValueError as error:
            raise InvalidRequest(f"{template!r}: {error}", param="agent_command") from error
        if not arguments or shutil.which(arguments[0]) is None:
            raise InvalidRequest(f"no such command: {template!r}", param="agent_command")
        return cls(template, _Command(arguments, grace_s, withheld))

    async def run(self, place: AgentPlace) -> float | Score | None:
        """Run the agent once. Returns its reward, or a `Score` that is not checked.

        Raises the agent's error, and AgentLoopError for any other failure.
        """
        return _checked(await self._runner.run(place))

    def close(self) -> None:
        """Let go of threads, without waiting for runs that ignore their cancellation. Idempotent."""
        self._runner.close()

    def __enter__(self) -> AgentProgram:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def environment(place: AgentPlace, withheld: frozenset[str] = frozenset()) -> Mapping[str, str]:
    """Return this process's environment with the session's.

    It adds OPENAI_BASE_URL and _API_KEY, the same for ANTHROPIC, the session's own URL and control key as
    AGENTLOOP_SESSION_URL and _KEY, and the task as JSON in AGENTLOOP_TASK, without its reference and its
    `tool_setup`. Raises InvalidRequest for a task that an environment cannot hold.
    """
    document = task_fields(place.task)
    del document["reference"], document["tool_setup"]  # the policy may read the environment of its agent
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
        "AGENTLOOP_SESSION_KEY": place.control_key,
        "AGENTLOOP_TASK": task,
    }


class _OnLoopThread:
    """Runs an async function on an event loop of its own, in a thread of its own."""

    def __init__(self, function: Callable[..., Awaitable[object]], grace_s: float) -> None:
        self._function = function
        self._grace_s = grace_s
        self._thread: LoopThread | None = None
        self._given_up: list[LoopThread] = []  # at most one for each job that ignored its cancellation

    async def run(self, place: AgentPlace) -> object:
        """As `Runner.run`: a cancellation is passed on and waited for, but no longer than the grace."""
        if self._thread is None:
            self._thread = LoopThread("agents")
        thread = self._thread
        job = _Job(self._function, place)
        thread.call(job.start)
        try:
            return await asyncio.shield(job.outcome)
        except asyncio.CancelledError:
            thread.call(job.cancel)
            job.outcome.add_done_callback(asyncio.Future.exception)  # the cancellation says enough
            await asyncio.wait({job.outcome}, timeout=self._grace_s)
            if not job.outcome.done() and self._thread is thread:
                _log.warning("agent_ignores_cancellation", agent=getattr(self._function, "__name__", "agent"))
                self._given_up.append(thread)
                self._thread = None
            raise

    def close(self) -> None:
        """Cancel what still runs there, and let the threads end; does not wait for them. Idempotent."""
        for thread in (self._thread, *self._given_up):
            if thread is not None:
                thread.stop()
        self._thread = None
        self._given_up.clear()


class _Job:
    """One run on a loop thread. `outcome` belongs to the loop that made the job; the rest happens over there."""

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
        except BaseException as raised:  # carried home, where an exit or a cancellation must not act
            error = ordinary(raised)
        with contextlib.suppress(RuntimeError):  # home is closed: nobody waits for this any more
            self._home.call_soon_threadsafe(settle, self.outcome, value, error)


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


@dataclass(frozen=True, slots=True)
class CommandExit:
    """The end of a command: a negative `status` is the signal that killed it; the tails are of its output."""

    status: int
    output_tail: str
    error_tail: str

    def describe(self) -> str:
        """Return one line for people, with the last line of the error output, or else of the other."""
        ending = f"exit status {self.status}" if self.status >= 0 else f"killed by signal {-self.status}"
        for tail in (self.error_tail, self.output_tail):
            lines = [line.strip() for line in tail.splitlines() if line.strip()]
            if lines:
                return f"{ending}: {lines[-1][-MAX_LINE_CHARS:]}"
        return ending


async def run_command(arguments: Sequence[str], environment: Mapping[str, str], *, grace_s: float) -> CommandExit:
    """Run a command without shell or input. A cancellation ends it. Raises OSError if it cannot start."""
    # Two unnamed files: what a program has buffered of its output is written last, after the error that ended it.
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
        except asyncio.CancelledError:  # a start that is cut off would leave what the command has started by then
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
            _signal_group(process.pid, signal.SIGKILL)  # also what the command left behind
            await process.wait()
        return CommandExit(status, _tail(output), _tail(errors))


def _filled(argument: str, place: AgentPlace) -> str:
    """One pass, so that a prompt which holds such a mark itself stays as it is."""
    values = {"prompt": place.task.messages[-1].content, "task_id": place.task.task_id, "base_url": place.base_url}
    return _MARK.sub(lambda mark: values[mark[1]], argument)


def _checked(value: object) -> float | Score | None:
    if value is None or isinstance(value, Score):
        return value
    if inspect.iscoroutine(value):
        value.close()  # a plain def gave it: nobody would ever await it
    if not isinstance(value, Real):
        raise AgentLoopError(f"the agent returned a {type(value).__name__}; a reward is a number, a Score, or None")
    reward = float(value)
    if not math.isfinite(reward):
        raise AgentLoopError(f"the agent returned {reward}; a reward is finite")
    return reward


def _signal_group(group_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group_id, number)


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL_BYTES))
    return output.read().decode(errors="replace")
