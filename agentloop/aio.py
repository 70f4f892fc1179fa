"""User code that may block, away from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, cast

from agentloop.errors import AgentLoopError


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
