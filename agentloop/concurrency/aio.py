"""asyncio utilities: change signals, tasks that outlive their callers, keyed locks, user code in tasks and threads,
detection of a blocked event loop, and interpreter settings for a busy event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import gc
import inspect
import os
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, TypeVar, cast

import structlog

from agentloop.errors import AgentLoopError, Overloaded, error_line, first_cause

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

_log = structlog.stdlib.get_logger(__name__)


class ChangeSignal:
    """Wakes all tasks that currently wait for a change of shared state.

    Notifications are not stored: check the state and then wait, without an await in between. Every wait has a
    deadline.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, deadline_at: float) -> bool:
        """Wait for the next `notify`. Return False if the loop time `deadline_at` is reached first."""
        return await is_set_by(self._event, deadline_at)


@asynccontextmanager
async def awake_timeout(seconds: float, num_looks: int = 20) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, but count only the time during which this event loop runs."""
    # A loop that stalls, for lack of CPU or because of a long callback, runs expired timers before it processes the
    # input that has arrived during the stall. A plain timeout would then cancel a block whose input is available.
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look(num_left: int) -> None:
        nonlocal timer
        if num_left == 0:
            scope.reschedule(loop.time())
        else:
            timer = loop.call_later(seconds / num_looks, look, num_left - 1)  # a stall counts as one step

    async with asyncio.timeout(None) as scope:
        look(num_looks)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


async def is_set_by(event: asyncio.Event, deadline_at: float) -> bool:
    """Wait for an event. Return False if the loop time `deadline_at` is reached first."""
    try:
        async with asyncio.timeout_at(deadline_at):
            await event.wait()
    except TimeoutError:
        return False
    return True


def deadline_after(wait_s: float) -> float:
    """Return the loop time `wait_s` from now."""
    return asyncio.get_running_loop().time() + max(wait_s, 0.0)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if the caller is cancelled; CancelledError is raised afterwards.

    `work` must have its own timeout. If the caller is cancelled, an error of `work` is only logged, so the caller
    must check the state. To return immediately on cancellation, use `OwnedTasks.run`.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # the first cancellation is raised below
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("failed_after_cancellation", error=repr(error))
        raise


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines concurrently and return their results. On a failure, cancel the others and raise the
    first."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from failures
    return [task.result() for task in tasks]


class OwnedTasks:
    """Owns tasks that can outlive their callers; `close` waits for all of them."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the tasks, also in the log."""
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work` as a task. Its failure is logged."""
        task = asyncio.create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the caller is cancelled, it returns immediately and `work` continues."""
        return await asyncio.shield(self.start(work))

    async def close(self, *, cancels: bool = False) -> None:
        """Wait until all tasks have ended, including tasks started during the wait; with `cancels`, cancel them."""
        while self._tasks:
            for task in self._tasks if cancels else ():
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("task_failed", task=self._name, error=repr(task.exception()))


class UserTasks:
    """Tasks that run user code. They are cancelled, get a grace period, and are abandoned if they ignore it.

    References to abandoned tasks are kept until they end, so that they are not garbage collected and can be
    counted.
    """

    def __init__(self, kind: str) -> None:
        """`kind` describes the tasks' code in the log."""
        self._kind = kind
        self._abandoned: set[asyncio.Task[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """The number of abandoned tasks that are still running."""
        return len(self._abandoned)

    async def stop(self, tasks: Iterable[asyncio.Task[Any]], grace_s: float, **about: str) -> None:
        """Cancel tasks, wait `grace_s`, and abandon tasks that are still running. `about` is added to the log
        line."""
        tasks = [task for task in tasks if not task.done()]
        for task in tasks:
            if not task.cancelling():  # a second cancellation would cut short the code's own cleanup
                task.cancel()
            self.keep(task)  # before the wait, so that a cancellation of this task does not orphan them
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
            self.abandon(tasks, **about)

    async def stop_kept(self, grace_s: float) -> None:
        """Stop the abandoned tasks again, like `stop`."""
        await self.stop(list(self._abandoned), grace_s, during="close")

    def abandon(self, tasks: Iterable[asyncio.Task[Any]], **about: str) -> None:
        """Cancel running tasks again, and stop waiting for them."""
        for task in tasks:
            if not task.done():
                task.cancel()
                self.keep(task)
                _log.warning(
                    "user_code_abandoned",
                    kind=self._kind,
                    code=task.get_name(),
                    hint="it does not end after a cancellation",
                    num_abandoned=self.num_abandoned,
                    **about,
                )

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a task that is no longer awaited, until it ends."""
        if task not in self._abandoned and not task.done():
            self._abandoned.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("user_code_failed_late", code=task.get_name(), error=error_line(error))


def is_being_cancelled(error: BaseException) -> bool:
    """Return True if an error is a cancellation of the running task, not a CancelledError raised by user code."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def to_its_end(method: Method) -> Method:
    """Decorate a method to run to its end even if its caller is cancelled. The object's `tasks` own the calls."""

    @functools.wraps(method)
    async def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await self.tasks.run(method(self, *args, **kwargs))

    return cast(Method, run)


class KeyedLocks:
    """Locks by key. A lock exists only while a task holds it or waits for it."""

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


MAX_ABANDONED_THREADS = 128
_abandoned_threads: set[threading.Thread] = set()


def num_abandoned_threads() -> int:
    """Return the number of abandoned threads that are still running."""
    for thread in list(_abandoned_threads):
        if not thread.is_alive():
            _abandoned_threads.discard(thread)
    return len(_abandoned_threads)


def in_daemon_thread(function: Callable[..., Any], *arguments: object, **named: object) -> asyncio.Future[Any]:
    """Run user code in a new daemon thread. Cancelling the future abandons the thread, which cannot be killed.

    Errors are converted by `ordinary`. Raises Overloaded if MAX_ABANDONED_THREADS abandoned threads are running.
    """
    # Not in a shared pool: hanging threads would fill it, and delay the exit of the process.
    if _abandoned_threads and num_abandoned_threads() >= MAX_ABANDONED_THREADS:
        raise Overloaded(
            f"{MAX_ABANDONED_THREADS} synchronous calls of user code are still running in this process after their"
            " timeouts: make the code return, or restart the process"
        )
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function, *arguments, **named)
        except (
            BaseException
        ) as raised:  # passed to the loop, where SystemExit or CancelledError must have no effect
            error = ordinary(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for the result
            loop.call_soon_threadsafe(settle, outcome, value, error)

    thread = threading.Thread(target=work, name=getattr(function, "__name__", "user code"), daemon=True)
    outcome.add_done_callback(lambda ended: _abandoned_threads.add(thread) if ended.cancelled() else None)
    thread.start()
    return outcome


async def call_user_code(function: Callable[..., Any], *arguments: object, **named: object) -> Any:
    """Await a user's async function, or run a synchronous one `in_daemon_thread`; await an awaitable result."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    value = await in_daemon_thread(function, *arguments, **named)
    return await value if inspect.isawaitable(value) else value


def ordinary(raised: BaseException) -> Exception:
    """Return an error of user code in a form that is safe in an event loop.

    SystemExit, CancelledError and StopIteration would affect the loop, so they are converted to AgentLoopError.
    """
    is_ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
    return cast(Exception, raised) if is_ordinary else AgentLoopError(f"raised {type(raised).__name__}")


def settle(outcome: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    """Set a future's result or error, unless it was abandoned."""
    if outcome.done():
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(error)


BLOCKED_S = 1.0


class LoopThread:
    """An event loop in a separate daemon thread, for code that may block the loop or leave tasks behind."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on that thread, in the order of the calls. Does nothing after `stop`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on that thread; cancelling the future cancels it. Raises RuntimeError after `stop`."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def stop(self) -> None:
        """Cancel all tasks and end the thread, without waiting for it. Idempotent."""
        self.call(self._stopping.set)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its exit cancels the remaining tasks
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopping.wait()


class LoopWatch:
    """Measures stalls of an event loop, and logs the code that blocks it. Construct it on the loop.

    A thread checks the loop, because a blocked loop cannot check itself.
    """

    def __init__(self, blocked_s: float = BLOCKED_S) -> None:
        self.longest_s = 0.0  # the longest delay of the loop since this was set to 0
        self.blocked: tuple[str, float] | None = None
        """FILE:LINE of the last code that blocked the loop ("" if the host lacked CPU), and the
        time.monotonic()."""
        self._blocked_s = blocked_s
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._turned_cpu_s = self._cpu_s()
        self._turned_at = time.monotonic()
        self._is_closed = threading.Event()
        self._loop.call_later(blocked_s / 4, self._turn)
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._is_closed.set()

    def _turn(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._turned_at - self._blocked_s / 4)
        self._turned_at, self._turned_cpu_s = now, self._cpu_s()
        if not self._is_closed.is_set():
            self._loop.call_later(self._blocked_s / 4, self._turn)

    def _look(self) -> None:
        reported_at = 0.0
        while not self._is_closed.wait(self._blocked_s / 4) and not self._loop.is_closed():
            turned_at = self._turned_at
            still_s = time.monotonic() - turned_at
            if still_s >= self._blocked_s and reported_at != turned_at:
                reported_at, place = turned_at, self._place(still_s)
                self.blocked = place, time.monotonic()
                if place:
                    _log.warning("event_loop_blocked", still_s=round(still_s, 1), by=self._culprit(), at=place)
                else:
                    load, num_cpus = round(os.getloadavg()[0], 1), os.cpu_count()
                    _log.warning("host_short_of_cpu", still_s=round(still_s, 1), load=load, cpus=num_cpus)

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._cpu_clock)

    def _culprit(self) -> str:
        task = asyncio.current_task(self._loop)
        return "no task" if task is None else task.get_name()

    def _place(self, still_s: float) -> str:
        """Return the innermost line of user code on the loop's thread; "" if the thread waits for a CPU."""
        stack, frame = list[FrameType](), sys._current_frames().get(self._thread_id)
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        guilty = next(filter(_is_user_code, stack), None)
        # Without user code on the stack, blame the innermost line only if the thread was computing during the
        # stall.
        used_s = self._cpu_s() - self._turned_cpu_s
        if guilty is None and used_s >= still_s / 2:
            guilty = stack[0]
        return "" if guilty is None else f"{guilty.f_code.co_filename}:{guilty.f_lineno} in {guilty.f_code.co_name}"


_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
_SWITCH_INTERVAL_S = 0.0001


def _is_user_code(frame: FrameType) -> bool:
    """Return True for code that belongs neither to agentloop nor to an installed package."""
    name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
    is_ours = name == "__main__" or name.startswith("agentloop")  # the core and its optional packages
    return not is_ours and not file.startswith(("<", *_LIBRARIES))


def tune_interpreter() -> None:
    """Configure the interpreter for a busy event loop. Call it once, at the end of start-up."""
    # A full garbage collection visits every object. Modules, templates and tokenizers alone would block the event
    # loop for 0.2 to 0.6 s, several times a second under load.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    # sqlite3 releases the GIL at each statement, and a thread next to a busy event loop reacquires it only after
    # one switch interval. With Python's default of 5 ms, a transaction of 300 statements takes more than a second.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
