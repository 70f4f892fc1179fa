"""asyncio's missing parts: change signals, tasks that outlive their callers, named locks, user code in tasks and
threads, and a garbage collector that lets the event loop run."""

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
    """A signal that wakes all tasks that wait now for a change of shared state.

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


@asynccontextmanager
async def awake_timeout(seconds: float, num_looks: int = 20) -> AsyncIterator[None]:
    """Bound a block as `asyncio.timeout` does, by the time in which this event loop turns.

    A loop that stands still, for want of a core or behind a long callback, gets what has arrived meanwhile only
    after the timers that came due: these must not end the block.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look(num_left: int) -> None:
        nonlocal timer
        if num_left == 0:
            scope.reschedule(loop.time())
        else:
            timer = loop.call_later(seconds / num_looks, look, num_left - 1)  # a standstill counts as one step

    async with asyncio.timeout(None) as scope:
        look(num_looks)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


async def is_set_by(event: asyncio.Event, deadline_at: float) -> bool:
    """Wait for an event. False: the loop time `deadline_at` came first."""
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
    """Await `work`, which is bounded, to its end, also if the caller is cancelled; the cancellation follows then.

    A cancelled caller does not hear of a failure of `work`: it has to look at the state. Where such a caller shall
    leave at once, use `OwnedTasks.run`.
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


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all. If some fail, the others are cancelled, and the first failure is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from failures
    return [task.result() for task in tasks]


class OwnedTasks:
    """Tasks that outlive their callers, held until they end; `close` waits for all of them."""

    def __init__(self, name: str) -> None:
        """`name` is that of the tasks, in the log too."""
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin `work`. A failure that is not awaited is logged."""
        task = asyncio.create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. A cancelled caller leaves at once, and `work` goes on."""
        return await asyncio.shield(self.start(work))

    async def close(self, *, cancels: bool = False) -> None:
        """Wait until all tasks have ended, new ones too; or cancel them."""
        while self._tasks:
            for task in self._tasks if cancels else ():
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("task_failed", task=self._name, error=repr(task.exception()))


class UserTasks:
    """Tasks that run user code: cancelled, given a grace, and abandoned if they ignore it.

    An abandoned task is held until it ends, so that it is neither lost nor unseen.
    """

    def __init__(self, kind: str) -> None:
        """`kind` says in the log what they run."""
        self._kind = kind
        self._abandoned: set[asyncio.Task[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """Abandoned tasks that still run."""
        return len(self._abandoned)

    async def stop(self, tasks: Iterable[asyncio.Task[Any]], grace_s: float, **about: str) -> None:
        """Cancel tasks, give them the grace, and abandon what still runs. `about` goes into the log."""
        tasks = [task for task in tasks if not task.done()]
        for task in tasks:
            if not task.cancelling():  # a second cancellation would cut short the code's own cleanup
                task.cancel()
            self.keep(task)  # before the wait: a cancellation of ours must not orphan them
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
            self.abandon(tasks, **about)

    async def stop_kept(self, grace_s: float) -> None:
        """Stop the abandoned tasks as `stop` does."""
        await self.stop(list(self._abandoned), grace_s, during="close")

    def abandon(self, tasks: Iterable[asyncio.Task[Any]], **about: str) -> None:
        """Cancel running tasks once more, and wait for them no longer."""
        for task in tasks:
            if not task.done():
                task.cancel()
                self.keep(task)
                _log.warning(
                    "user_code_abandoned",
                    kind=self._kind,
                    code=task.get_name(),
                    hint="it ignores its cancellation",
                    num_abandoned=self.num_abandoned,
                    **about,
                )

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that is awaited no more until it ends."""
        if task not in self._abandoned and not task.done():
            self._abandoned.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("user_code_failed_late", code=task.get_name(), error=error_line(error))


def is_being_cancelled(error: BaseException) -> bool:
    """Tell if an error is a cancellation of the running task, not one that user code raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def to_its_end(method: Method) -> Method:
    """Make a method run to its end, also if its caller is cancelled. Its object's `tasks` own the calls."""

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
    """Return the number of abandoned threads that still run."""
    for thread in list(_abandoned_threads):
        if not thread.is_alive():
            _abandoned_threads.discard(thread)
    return len(_abandoned_threads)


def in_daemon_thread(function: Callable[..., Any], *arguments: object, **named: object) -> asyncio.Future[Any]:
    """Run user code in a daemon thread of its own; its future may be abandoned, the thread cannot be killed.

    A hanging thread would fill a shared pool, and hold the process's exit up. Errors arrive as `ordinary` ones.
    Raises Overloaded once MAX_ABANDONED_THREADS abandoned threads run.
    """
    if _abandoned_threads and num_abandoned_threads() >= MAX_ABANDONED_THREADS:
        raise Overloaded(f"{MAX_ABANDONED_THREADS} calls that overran still run in threads of this process")
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

    thread = threading.Thread(target=work, name=getattr(function, "__name__", "user code"), daemon=True)
    outcome.add_done_callback(lambda ended: _abandoned_threads.add(thread) if ended.cancelled() else None)
    thread.start()
    return outcome


async def call_user_code(function: Callable[..., Any], *arguments: object, **named: object) -> Any:
    """Await an async function of a user; run a synchronous one `in_daemon_thread`, and await what it returns."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    value = await in_daemon_thread(function, *arguments, **named)
    return await value if inspect.isawaitable(value) else value


def ordinary(raised: BaseException) -> Exception:
    """Return user code's error as one that an event loop can take.

    An exit, a cancellation or a StopIteration would act on the loop: they become AgentLoopError.
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
    """An event loop in a daemon thread of its own, for code that may block it or keeps tasks."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on that thread, after all that was handed over before."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there any more
            self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on that thread; cancelling the future cancels it. Raises RuntimeError after `stop`."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def stop(self) -> None:
        """Cancel what runs, and end the thread, without waiting for it. Idempotent."""
        self.call(self._stopping.set)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its exit cancels what still runs
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopping.wait()


class LoopWatch:
    """A watch over an event loop: it measures standstills, and logs what blocks the loop.

    A thread looks if the loop still turns; the loop cannot say it itself. Start it on the loop.
    """

    def __init__(self, blocked_s: float = BLOCKED_S) -> None:
        self.longest_s = 0.0  # by which the loop was late, since this was set to 0
        self.blocked: tuple[str, float] | None = None
        """FILE:LINE that blocked the loop last, "" if the host was short of CPU; and when, by time.monotonic()."""
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
        told_at = 0.0
        while not self._is_closed.wait(self._blocked_s / 4) and not self._loop.is_closed():
            turned_at = self._turned_at
            still_s = time.monotonic() - turned_at
            if still_s >= self._blocked_s and told_at != turned_at:
                told_at, place = turned_at, self._place(still_s)
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
        """Return the innermost line of user code on the loop's thread; "" if the thread waits for a CPU.

        Without user code the innermost line is at fault only if the thread was computing all the time.
        """
        stack, frame = list[FrameType](), sys._current_frames().get(self._thread_id)
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        guilty = next(filter(_is_user_code, stack), None)
        used_s = self._cpu_s() - self._turned_cpu_s
        if guilty is None and used_s >= still_s / 2:
            guilty = stack[0]
        return "" if guilty is None else f"{guilty.f_code.co_filename}:{guilty.f_lineno} in {guilty.f_code.co_name}"


_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
_SWITCH_INTERVAL_S = 0.0001


def _is_user_code(frame: FrameType) -> bool:
    """Return True for code that is neither agentloop's nor of an installed package."""
    name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
    is_ours = name == "__main__" or name.startswith("agentloop")  # the core and its parts
    return not is_ours and not file.startswith(("<", *_LIBRARIES))


def tune_interpreter() -> None:
    """Set up the interpreter for a busy event loop. Call it once, at the end of start-up."""
    # A full collection visits every object: modules, templates and tokenizers alone cost 0.2 to 0.6 s in which the
    # event loop does nothing else, several times a second under load.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    # sqlite3 releases the GIL at each statement, and next to a busy event loop a thread gets it back only after one
    # switch interval: at Python's 5 ms, a transaction of 300 statements takes more than a second.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
