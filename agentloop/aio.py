"""asyncio's missing parts: change signals, tasks that outlive their callers, named locks, user code in threads,
and a garbage collector that lets the event loop run."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import structlog

from agentloop.errors import AgentLoopError

P = ParamSpec("P")
T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


class ChangeSignal:
    """Wakes everybody who waits now for a change of shared state.

    Nothing is remembered: look at the state, and wait without an await in between. Every wait has a deadline.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, deadline_at: float) -> bool:
        """Wait for the next `notify`. False: the loop time `deadline_at` came first."""
        return await is_set_by(self._event, deadline_at)


async def is_set_by(event: asyncio.Event, deadline_at: float) -> bool:
    """Wait for an event. False: the loop time `deadline_at` came first."""
    try:
        async with asyncio.timeout_at(deadline_at):
            await event.wait()
    except TimeoutError:
        return False
    return True


def deadline_after(wait_s: float, bound_s: float) -> float:
    """Return the loop time `wait_s` from now, or `bound_s` if that is sooner."""
    return asyncio.get_running_loop().time() + min(max(wait_s, 0.0), bound_s)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if the caller is cancelled meanwhile; it is cancelled then. `work` is bounded.

    A cancelled caller does not hear whether `work` failed: it has to look at what `work` has done. Where such a
    caller shall leave at once, and `work` go on without it, use `OwnedTasks.run`.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # the first one is raised below
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("failed_after_cancellation", error=repr(error))
        raise


class OwnedTasks:
    """Tasks that go on without their callers, held until they end; `close` waits for all of them."""

    def __init__(self, name: str) -> None:
        """`name` is that of the tasks, in the log too."""
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin `work`. A failure that no caller waits for is logged."""
        task = asyncio.create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. A cancelled caller leaves at once, and `work` goes on."""
        return await asyncio.shield(self.start(work))

    async def close(self, *, cancels: bool = False) -> None:
        """Wait until all have ended, those too that begin meanwhile; or cancel them."""
        while self._tasks:
            for task in self._tasks if cancels else ():
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("task_failed", task=self._name, error=repr(task.exception()))


class HasTasks(Protocol):
    """An object whose methods may be `to_its_end`."""

    @property
    def tasks(self) -> OwnedTasks:
        """The owner of its calls."""


S = TypeVar("S", bound=HasTasks)


def to_its_end(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a method run on, once begun, whatever becomes of its caller."""

    @functools.wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.tasks.run(method(self, *args, **kwargs))

    return run


class KeyedLocks:
    """A lock an id, for as long as a task wants it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of `key`."""
        lock, num_users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks.pop(key)
            if num_users > 1:
                self._locks[key] = (lock, num_users - 1)


def in_daemon_thread(function: Callable[..., Any], *arguments: object, **named: object) -> asyncio.Future[Any]:
    """Run user code in a daemon thread of its own; the future may be abandoned, the thread cannot be killed.

    A shared pool would be filled, and the process's exit held up, by what hangs. Its errors
    arrive as `ordinary` ones.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function, *arguments, **named)
        except BaseException as raised:  # carried to the loop, where an exit or a cancellation must not act
            error = ordinary(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            loop.call_soon_threadsafe(settle, outcome, value, error)

    threading.Thread(target=work, name=getattr(function, "__name__", "user code"), daemon=True).start()
    return outcome


def ordinary(raised: BaseException) -> Exception:
    """Return what user code raised as an error that an event loop can take.

    An exit, a cancellation or a StopIteration would act there: they become AgentLoopError.
    """
    is_ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
    return cast(Exception, raised) if is_ordinary else AgentLoopError(f"raised {type(raised).__name__}")


def settle(outcome: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    """End a future, unless whoever waited for it has abandoned it."""
    if outcome.done():
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(error)


def freeze_gc() -> None:
    """Take what start-up allocated out of the garbage collector's sight, and collect less often.

    A full collection walks every object: modules, templates and tokenizers alone cost 0.2 to 0.6 s in which the
    event loop stands still, several times a second under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
