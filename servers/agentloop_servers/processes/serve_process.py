"""Lifecycle of a Serve process: its log, its shutdown on SIGTERM, and its exit if a start hangs.

Ray's SIGTERM handler is Python code, which runs only in the main thread; that thread is blocked in Ray's own loop,
so the process would not exit. `faulthandler` has a handler in C that can be installed from any thread. It
immediately writes a traceback to a descriptor, and a thread that reads the descriptor thereby detects the signal.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import structlog

from agentloop.concurrency.aio import OwnedTasks
from agentloop.errors import error_line
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop.observability.metrics import MetricSample, MetricsReport, MetricsTally
from agentloop_servers.config.service import made_run_dir
from agentloop_servers.metrics import MetricsReporter

SIGTERM_GRACE_S = 20.0  # an engine takes up to 15 s to exit
_LOCK_GRACE_S = 1.0
_STDERR = 2

_log = structlog.stdlib.get_logger(__name__)


class Closing(AsyncExitStack):
    """The parts of a process, closed in reverse order. If Serve and SIGTERM both close it, the second call
    waits."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = MetricsTally()  # counters of this process
        self._lock = asyncio.Lock()

    def count_problem(self, event: str, level: str) -> None:
        """Count a log line by event and level."""
        self.tally.count("log_events_total", event, level)

    def report(
        self,
        process: str,
        report: Callable[[MetricsReport], Awaitable[None]],
        tally: MetricsTally | None = None,
        gauges: Callable[[], Sequence[MetricSample]] = tuple,
        engine: Callable[[], str] = str,
    ) -> None:
        """Report the metrics of this process, with the label value `process`, until it is closed.

        `tally` replaces the process's counters and takes over their values.
        """
        if tally is not None:
            tally.add(self.tally.take())
            self.tally = tally
        self.push_async_callback(MetricsReporter(process, self.tally, report, gauges, engine).close)

    async def aclose(self) -> None:
        async with self._lock:
            await super().aclose()


def begin_process(run_dir: Path) -> Closing:
    """Create the run directory on this node if it is missing, write this process's log there, and handle SIGTERM.

    Returns the stack of parts that SIGTERM closes before the process exits.
    """
    closing = Closing()
    made_run_dir(run_dir)
    configure_logging(run_dir / LOG_NAME, on_problem=closing.count_problem)
    end_on_sigterm(closing.aclose, SIGTERM_GRACE_S)
    return closing


@contextmanager
def ends_unless_done(timeout_s: float, work: str) -> Iterator[None]:
    """Exit the process immediately if the block takes longer than `timeout_s`. `work` names the block in the log.

    For code that can hang in any thread and has no other timeout: Serve waits for a start forever.
    """
    timer = threading.Timer(timeout_s, _give_up, (timeout_s, work))
    timer.daemon = True
    timer.start()
    # C code that hangs while it holds the GIL also blocks the timer's thread: `faulthandler` exits without the GIL.
    faulthandler.dump_traceback_later(timeout_s + _LOCK_GRACE_S, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _give_up(timeout_s: float, work: str) -> None:
    _log.error("process_ends", because=f"{work} takes longer than {timeout_s:g} s")
    faulthandler.dump_traceback(file=_STDERR)  # shows where it hangs
    os._exit(1)


def end_on_sigterm(close: Callable[[], Awaitable[None]], grace_s: float) -> None:
    """Install a SIGTERM handler that runs `close` in the running event loop, and then exits the process.

    The process exits after at most `grace_s`, even if the event loop is blocked. Call it once per process, from any
    thread. A process that user code forks does not inherit the handler: SIGTERM ends it immediately.
    """
    loop, tasks, is_closed = asyncio.get_running_loop(), OwnedTasks("sigterm"), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # the signal handler must not block on a full buffer

    async def end() -> None:
        _log.info("sigterm")
        try:
            await close()
        except Exception as error:
            _log.error("not_closed", error=error_line(error))
        finally:
            is_closed.set()

    def wait() -> None:
        reader.recv(1)
        loop.call_soon_threadsafe(lambda: tasks.start(end()))
        os._exit(0 if is_closed.wait(grace_s) else 1)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    faulthandler.register(signal.SIGTERM, file=writer.detach(), all_threads=False)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=_begin_child,
    )


def on_sighup(act: Callable[[], None]) -> None:
    """Install a SIGHUP handler that calls `act` in the running event loop. Call it once per process, from any
    thread."""
    loop = asyncio.get_running_loop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def wait() -> None:
        # faulthandler's text for one signal can arrive in several reads, so `act` must be idempotent.
        while reader.recv(1 << 16):
            loop.call_soon_threadsafe(act)

    threading.Thread(target=wait, name="sighup", daemon=True).start()
    faulthandler.register(signal.SIGHUP, file=writer.detach(), all_threads=False)


def _begin_child() -> None:
    faulthandler.unregister(signal.SIGTERM)
    # Ray's handler raises an exception, which would be swallowed here.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
