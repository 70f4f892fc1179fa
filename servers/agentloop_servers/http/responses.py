"""Helpers for all routes: JSON and MessagePack responses, timeouts, and client disconnects."""

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
    """Return a JSON response with `value`, serialized by `orjson`. Bytes are sent unchanged, as finished JSON."""
    content = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(content, status, headers, "application/json")


async def long_response(request: Request, as_msgpack: Callable[[], bytes], as_json: Callable[[], Any]) -> Response:
    """Return a response that can contain millions of numbers: MessagePack if the client accepts it, otherwise JSON.

    JSON is serialized in a thread, because it can take long.
    """
    if MSGPACK in request.headers.get("accept", ""):
        return Response(as_msgpack(), media_type=MSGPACK)
    return json_response(await asyncio.to_thread(lambda: orjson.dumps(as_json())))


def unread_response() -> Response:
    """Return the response for a client that has disconnected; it is never sent."""
    return Response(status_code=499)


async def in_time(work: Awaitable[T], timeout_s: float, message: str) -> T:
    """Return the result of `work`. Raises DeadlineExceeded with `message` after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise DeadlineExceeded(message) from error


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work`, wait for it and return None."""
    # `work` runs in the caller's task, in a timeout scope that a disconnect expires: another task would cost more.
    watching = asyncio.create_task(client_left(request.receive))
    scope = asyncio.timeout(None)
    try:
        async with scope:
            watching.add_done_callback(lambda _: _end(scope))
            return await work
    except TimeoutError:
        if not scope.expired():
            raise  # `work` itself raised it
        return None
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _end(scope: asyncio.Timeout) -> None:
    """Make a timeout scope expire now, unless it has already exited."""
    with suppress(RuntimeError):  # the scope has exited
        scope.reschedule(asyncio.get_running_loop().time())


async def client_left(receive: Receive) -> None:
    """Wait until the client disconnects. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_in_time(send: Send, message: Message, timeout_s: float) -> None:
    """Send a part of a response. Raises ClientDisconnect if the client does not read it within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError as error:
        raise ClientDisconnect from error
