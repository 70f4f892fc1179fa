"""The event stream as an ASGI response: headers, silence, failures and disconnected clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from agentloop.errors import AgentLoopError, EngineLost, Overloaded
from agentloop_servers.http.guard import error_response
from agentloop_servers.http.sse import DONE, KEEP_ALIVE, EventStream, sse

SCOPE = {"type": "http", "path": "/", "state": {}}


class Connection:
    """The server's side of one request: the sent messages, and a client that stays until `leave` is set."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()
        self.accept = asyncio.Event()
        self.accept.set()

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.accept.wait()
        self.sent.append(dict(message))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def status(self) -> int:
        assert [message["type"] for message in self.sent].count("http.response.start") == 1
        return int(self.sent[0]["status"])


class Source:
    """An event source that records whether it was closed."""

    def __init__(self, *steps: bytes | Exception | Callable[[], Awaitable[None]]) -> None:
        self._steps = steps
        self.is_closed = False

    async def events(self) -> AsyncIterator[bytes]:
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await step()
        finally:
            self.is_closed = True


def response(source: Source, keep_alive_s: float = 60.0, send_timeout_s: float = 60.0) -> EventStream:
    def error_event(error: AgentLoopError) -> bytes:
        return sse(error.to_wire()) + DONE

    return EventStream(
        source.events(), error_event, error_response, keep_alive_s=keep_alive_s, send_timeout_s=send_timeout_s
    )


async def never() -> None:
    await asyncio.Event().wait()


async def run(stream: EventStream, connection: Connection) -> None:
    async with asyncio.timeout(60):
        await stream(SCOPE, connection.receive, connection.send)


def test_an_event_is_json_with_an_optional_name() -> None:
    assert sse({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
    assert sse(b"{}", "ping") == b"event: ping\ndata: {}\n\n"


async def test_events_in_order_behind_their_headers() -> None:
    connection, source = Connection(), Source(b"a", b"b")
    await run(response(source), connection)
    assert (connection.status, connection.body) == (200, b"ab")
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert [message.get("more_body") for message in connection.sent[1:]] == [True, True, False]
    assert source.is_closed


async def test_silence_is_filled_with_comments_headers_first() -> None:
    connection = Connection()

    async def until_two_comments() -> None:
        while connection.body.count(KEEP_ALIVE) < 2:
            await asyncio.sleep(0.001)

    await run(response(Source(until_two_comments, b"a"), keep_alive_s=0.01), connection)
    assert connection.status == 200
    assert connection.body.startswith(KEEP_ALIVE * 2)
    assert connection.body.endswith(b"a")


async def test_a_failure_before_the_first_event_is_an_ordinary_answer() -> None:
    connection, source = Connection(), Source(Overloaded("full"))
    await run(response(source), connection)
    assert connection.status == 429
    assert b"overloaded" in connection.body
    assert source.is_closed


async def test_a_failure_after_it_is_an_event_and_an_end() -> None:
    connection = Connection()
    await run(response(Source(b"a", EngineLost("gone"))), connection)
    assert connection.status == 200
    assert connection.body.startswith(b'adata: {"error":')
    assert b'"engine_lost"' in connection.body
    assert connection.body.endswith(DONE)
    assert connection.sent[-1]["more_body"] is False


async def test_a_bug_tells_a_client_nothing_but_that_there_was_one() -> None:
    connection = Connection()
    await run(response(Source(b"a", ValueError("/secret/path"))), connection)
    assert b"secret" not in connection.body
    assert b"internal_error" in connection.body


async def test_a_client_that_leaves_closes_the_source() -> None:
    connection, source = Connection(), Source(b"a", never)
    running = asyncio.create_task(run(response(source), connection))
    while not connection.body:
        await asyncio.sleep(0.001)
    connection.leave.set()
    await running
    assert source.is_closed


async def test_a_client_that_does_not_read_is_dropped() -> None:
    connection, source = Connection(), Source(b"a", never)
    connection.accept.clear()
    with pytest.raises(ClientDisconnect):
        await run(response(source, send_timeout_s=0.05), connection)
    assert source.is_closed


async def test_cancelling_the_response_closes_the_source() -> None:
    connection, source = Connection(), Source(b"a", never)
    running = asyncio.create_task(run(response(source), connection))
    while not connection.body:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert source.is_closed
