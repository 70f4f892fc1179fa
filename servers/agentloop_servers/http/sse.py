"""Server-sent events: their serialization, and the response that streams them.

The headers are sent with the first event or keep-alive, so a failure before it is an ordinary error response. A
later failure is an error event, never a silent end. If the client disconnects, or does not read for
`send_timeout_s`, the source is closed, and the response returns after it has ended. No events are queued here: the
server's write buffer bounds the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentloop.errors import AgentLoopError
from agentloop_servers.http.responses import client_left, send_in_time

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

_log = structlog.stdlib.get_logger(__name__)


def sse(data: Any, event: str | None = None) -> bytes:
    """Return one event with `data` as JSON (bytes are finished JSON), named `event` in dialects that name
    events."""
    text = data if isinstance(data, bytes) else orjson.dumps(data)
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return b"".join((head, b"data: ", text, b"\n\n"))


class EventStream(Response):
    """A response that streams the events of `source`, and a comment after each `keep_alive_s` without an event.

    `error_event` serializes a failure after the headers; `refuse` makes the response for a failure before them.
    `source` is always closed. `cut_by` in the request's state is "client" or "failure" if the stream ended early.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncIterator[bytes],
        error_event: Callable[[AgentLoopError], bytes],
        refuse: Callable[[AgentLoopError], Response],
        *,
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._error_event = error_event
        self._refuse = refuse
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.raw_headers, self._send_timeout_s)
        producing = asyncio.create_task(self._produce(writer, scope, receive, send))
        silence = asyncio.create_task(self._fill_silence(writer))
        leaving = asyncio.create_task(client_left(receive))
        tasks = (producing, silence, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not writer.is_finished:
                scope["state"]["cut_by"] = "client"
            for task in tasks:
                if task.done():
                    task.result()
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _produce(self, writer: _Writer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source) as source:  # type: ignore[type-var] # an async generator
                async for event in source:
                    await writer.write(event)
        except ClientDisconnect:
            raise
        except Exception as error:
            known = error if isinstance(error, AgentLoopError) else AgentLoopError("internal error")
            if known is not error:
                _log.exception("stream_failed", path=scope["path"])
            if not writer.is_started:
                writer.is_finished = True  # a keep-alive comment would start the response
                await self._refuse(known)(scope, receive, send)
                return
            scope["state"]["cut_by"] = "failure"
            await writer.write(self._error_event(known))
        await writer.finish()

    async def _fill_silence(self, writer: _Writer) -> None:
        loop = asyncio.get_running_loop()
        while not writer.is_finished:
            remaining_s = writer.last_at + self._keep_alive_s - loop.time()
            if remaining_s > 0:
                await asyncio.sleep(remaining_s)
            else:
                await writer.write(KEEP_ALIVE)
        await asyncio.Event().wait()  # the response ends with `_produce`, not with this task


class _Writer:
    """Serializes the writes of two tasks, and sends the headers before the first."""

    def __init__(self, send: Send, raw_headers: list[tuple[bytes, bytes]], send_timeout_s: float) -> None:
        self.is_started = False
        self.is_finished = False
        self.last_at = asyncio.get_running_loop().time()
        self._send = send
        self._raw_headers = raw_headers
        self._send_timeout_s = send_timeout_s
        self._lock = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        async with self._lock:
            if not self.is_finished:
                await self._send_in_time(data, more_body=True)

    async def finish(self) -> None:
        async with self._lock:
            self.is_finished = True
            await self._send_in_time(b"", more_body=False)

    async def _send_in_time(self, data: bytes, *, more_body: bool) -> None:
        """Raise ClientDisconnect if the client does not read in time."""
        if not self.is_started:
            self.is_started = True
            start = {"type": "http.response.start", "status": 200, "headers": self._raw_headers}
            await send_in_time(self._send, start, self._send_timeout_s)
        body = {"type": "http.response.body", "body": data, "more_body": more_body}
        await send_in_time(self._send, body, self._send_timeout_s)
        self.last_at = asyncio.get_running_loop().time()
