"""One process of Serve's: its log, its end on SIGTERM, and that of a start that hangs.

Ray's handler of SIGTERM is Python, which runs in the main thread alone, and that one waits within Ray's own loop: a
process that is told to end would go on. `faulthandler` has a handler in C that may be set from any thread: it tells
a descriptor at once where the main thread is, and a thread that reads it knows of the signal.
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

SIGTERM_GRACE_S = 20.0  # an engine takes up to 15 to end
_LOCK_GRACE_S = 1.0
_STDERR = 2

_log = structlog.stdlib.get_logger(__name__)


class Closing(AsyncExitStack):
    """The parts of a process, the newest closed first. Serve and SIGTERM may both ask: the second waits."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = MetricsTally()  # of the process
        self._lock = asyncio.Lock()

    def count_problem(self, event: str, level: str) -> None:
        """Count a line of the log."""
        self.tally.count("log_events_total", event, level)

    def report(
        self,
        process: str,
        report: Callable[[MetricsReport], Awaitable[None]],
        tally: MetricsTally | None = None,
        gauges: Callable[[], Sequence[MetricSample]] = tuple,
        engine: Callable[[], str] = str,
    ) -> None:
        """Report the metrics of this process, `process` in labels, until it is closed; `tally` is its own one."""
        if tally is not None:
            tally.add(self.tally.take())
            self.tally = tally
        self.push_async_callback(MetricsReporter(process, self.tally, report, gauges, engine).close)

    async def aclose(self) -> None:
        async with self._lock:
            await super().aclose()


def begin_process(run_dir: Path) -> Closing:
    """Write this process's log into the run directory, which a node has from here on.

    Returns what SIGTERM closes before the process ends.
    """
    closing = Closing()
    made_run_dir(run_dir)
    configure_logging(run_dir / LOG_NAME, on_problem=closing.count_problem)
    end_on_sigterm(closing.aclose, SIGTERM_GRACE_S)
    return closing


@contextmanager
def ends_unless_done(timeout_s: float, work: str) -> Iterator[None]:
    """End the process, at once, if the block takes longer than `timeout_s`; `work` is its name in the log.

    For what may hang in any thread, and that nobody else bounds: Serve waits for a start for ever. What hangs with
    Python's lock in hand, in C, keeps this from the log: `faulthandler` ends it then, on stderr.
    """
    timer = threading.Timer(timeout_s, _give_up, (timeout_s, work))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(timeout_s + _LOCK_GRACE_S, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _give_up(timeout_s: float, work: str) -> None:
    _log.error("process_ends", because=f"{work} takes longer than {timeout_s:g} s")
    faulthandler.dump_traceback(file=_STDERR)  # where it hangs
    os._exit(1)


def end_on_sigterm(close: Callable[[], Awaitable[None]], grace_s: float) -> None:
    """Have SIGTERM run `close` in the running event loop, and end the process then, after `grace_s` at the latest.

    Call it once in a process, from any thread. A loop that is blocked does not keep the process. A process that
    user code forks does not inherit it: told to end, it ends at once, and not this one.
    """
    loop, tasks, is_closed = asyncio.get_running_loop(), OwnedTasks("sigterm"), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # the handler gives up rather than wait

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
    """Have SIGHUP call `act` in the running event loop. Call it once in a process, from any thread."""
    loop = asyncio.get_running_loop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def wait() -> None:
        while reader.recv(1 << 16):  # what faulthandler writes of one signal may come in parts: `act` is idempotent
            loop.call_soon_threadsafe(act)

    threading.Thread(target=wait, name="sighup", daemon=True).start()
    faulthandler.register(signal.SIGHUP, file=writer.detach(), all_threads=False)


def _begin_child() -> None:
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's would raise, which is swallowed here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
