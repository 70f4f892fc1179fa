"""User coroutines on an event loop of their own, in a thread of its own.

Users' agents may block the loop they run on, and may keep clients and locks that belong to one loop: so all of them
share one, and it is never ours. A loop with an agent on it that ignored its cancellation is given up: what runs
there goes on until it ends or its own deadline comes, and newcomers get a new loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable

import structlog

from agentloop.errors import AgentLoopError

_SLOW_START_S = 1.0  # a loop that begins a job so late was blocked meanwhile

_log = structlog.stdlib.get_logger(__name__)


class AgentThread:
    """Runs user coroutines, each under its caller's cancellation. Close it at the end."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._lane: _Lane | None = None
        self._given_up: list[_Lane] = []  # at most one for each job that ignored its cancellation

    async def run(self, function: Callable[..., Awaitable[object]], *arguments: object) -> object:
        """What `await function(*arguments)` gives over there.

        A cancellation is passed on and waited for, but no longer than the grace. What is no ordinary exception
        arrives as AgentLoopError.
        """
        if self._lane is None:
            self._lane = _Lane()
        lane = self._lane
        job = _Job(function, arguments)
        lane.call(job.start)
        try:
            return await asyncio.shield(job.outcome)
        except asyncio.CancelledError:
            lane.call(job.cancel)
            await asyncio.wait({job.outcome}, timeout=self._grace_s)
            if not job.outcome.done() and self._lane is lane:
                _log.warning("agent_ignores_cancellation", agent=getattr(function, "__name__", "agent"))
                self._given_up.append(lane)
                self._lane = None
            raise

    def close(self) -> None:
        """Cancel what still runs there, and let the threads end; does not wait for them. Idempotent."""
        for lane in (self._lane, *self._given_up):
            if lane is not None:
                lane.stop()
        self._lane = None
        self._given_up.clear()


class _Lane:
    """One event loop and its daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        threading.Thread(target=self._serve, name="agents", daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Have it called over there, after what was handed over before."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there any more
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self.call(self._stopping.set)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its exit cancels what still runs
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopping.wait()


class _Job:
    """One call. `outcome` belongs to the loop that made the job; the rest happens on the lane."""

    def __init__(self, function: Callable[..., Awaitable[object]], arguments: tuple[object, ...]) -> None:
        self._home = asyncio.get_running_loop()
        self.outcome: asyncio.Future[object] = self._home.create_future()
        self._function = function
        self._arguments = arguments
        self._queued_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        delay_s = time.monotonic() - self._queued_at
        if delay_s > _SLOW_START_S:
            hint = "an async agent blocks its event loop; write it as a plain def to give each run its own thread"
            _log.warning("agent_started_late", delay_s=round(delay_s, 1), hint=hint)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        value, error = None, None
        try:
            value = await self._function(*self._arguments)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # carried home, where an exit or a cancellation must not act
            error = AgentLoopError(f"raised {type(raised).__name__}")
        with contextlib.suppress(RuntimeError):  # home is closed: nobody waits for this any more
            self._home.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: object, error: Exception | None) -> None:
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(value)
        elif isinstance(error, StopIteration):  # a future takes none
            self.outcome.set_exception(AgentLoopError("raised StopIteration"))
        else:
            self.outcome.set_exception(error)
