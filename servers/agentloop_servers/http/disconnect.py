"""Noticing that an HTTP client is gone, and ending the work it asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None if the client left first; `work` is then cancelled and has ended."""
    # `work` runs in the caller's task, in a scope that is ended early: a task of its own would cost more.
    watching = asyncio.create_task(client_left(request.receive))
    scope = asyncio.timeout(None)
    try:
        async with scope:
            watching.add_done_callback(lambda _: _end(scope))
            return await work
    except TimeoutError:
        if not scope.expired():
            raise  # it is `work`'s own
        return None
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _end(scope: asyncio.Timeout) -> None:
    """End what runs in a scope, if something still does."""
    with suppress(RuntimeError):  # it has ended
        scope.reschedule(asyncio.get_running_loop().time())


async def client_left(receive: Receive) -> None:
    """Return once the client of a request, whose body has been read, is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
