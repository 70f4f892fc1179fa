"""Answers as JSON and MessagePack, deadlines, and clients that leave: the same for every route."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Send

from agentloop.errors import DeadlineExceeded
from agentloop.values.codec import MSGPACK

T = TypeVar("T")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `value`, anything that `orjson` takes, as a JSON answer. Bytes are JSON already."""
    content = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(content, status, headers, "application/json")


async def long_response(request: Request, as_msgpack: Callable[[], bytes], as_json: Callable[[], Any]) -> Response:
    """Return an answer that may hold millions of numbers: MessagePack if the client accepts it, or else JSON.

    As text that is long work, done in a thread.
    """
    if MSGPACK in request.headers.get("accept", ""):
        return Response(as_msgpack(), media_type=MSGPACK)
    return json_response(await asyncio.to_thread(lambda: orjson.dumps(as_json())))


def unread_response() -> Response:
    """Return the answer to a client that has left."""
    return Response(status_code=499)


async def in_time(work: Awaitable[T], timeout_s: float, message: str) -> T:
    """Return the result of `work`. Raises DeadlineExceeded with `message` after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise DeadlineExceeded(message) from error


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None if the client left first; `work` is then cancelled and has ended."""
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
    """Wait until the client of a request, whose body has been read, is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_in_time(send: Send, message: Message, timeout_s: float) -> None:
    """Send a part of an answer. Raises ClientDisconnect if the client does not read in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError as error:
        raise ClientDisconnect from error
