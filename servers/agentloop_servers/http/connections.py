"""Limits on connections, which apply before a request is complete and its client is authenticated.

`BoundedHttp` is one uvicorn connection. Oversized headers are rejected while they arrive, at most one socket read
past the limit, and no byte is examined twice. A connection is closed if its request does not arrive in time or its
client does not read the response in time. The number of connections without a complete request is limited, in total
and per address; the oldest are closed first. A client without a key therefore cannot slow down other clients.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import uuid
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as UvicornConnection

from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop_servers.http.guard import HeadersTooLarge


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the connections of one process."""

    header_bytes: int = 64 << 10
    header_lines: int = 256
    headers_timeout_s: float = 10.0  # from the connection, or from the first byte of a later request
    body_timeout_s: float = (
        70.0  # from the headers to the last byte; the guard's timeout is shorter and answers 408
    )
    idle_timeout_s: float = 75.0  # longer than clients keep an unused connection, so that the client closes it
    send_timeout_s: float = 30.0  # for unread response bytes, plus one second per `send_rate` bytes
    send_rate: int = 32 << 10
    max_unfinished: int = 4096  # connections without a complete request
    max_unfinished_of_address: int = 2048
    max_idle: int = 8192  # connections between two requests
    check_interval_s: float = 1.0  # between two deadline checks


class HeadersTimeout(InvalidRequest):
    """The request headers did not arrive in time."""

    code, http_status = "headers_timeout", 408


class _RequestPart(Enum):
    """The part of a request that a connection is processing."""

    HEADERS = auto()  # for the first request, starting with the connection
    BODY = auto()
    ANSWER = auto()  # or idle between two requests


class Connections:
    """The open connections of one process. Closes the oldest connections when a limit is exceeded."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all: set[BoundedHttp] = set()
        # In order of arrival: the first connection has waited longest. `limits` bounds each dict.
        self._unfinished: dict[BoundedHttp, None] = {}
        self._of_address: dict[bytes, dict[BoundedHttp, None]] = {}
        self._idle: dict[BoundedHttp, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def began(self, one: BoundedHttp) -> None:
        """Count a connection as one without a complete request; close the oldest if there are too many."""
        limits = self.limits
        self._all.add(one)
        self._idle.pop(one, None)
        self._unfinished[one] = None
        same = self._of_address.setdefault(one.address, {})
        same[one] = None
        if len(same) > limits.max_unfinished_of_address:
            next(iter(same)).cut()
        elif len(self._unfinished) > limits.max_unfinished:
            next(iter(self._unfinished)).cut()

    def finished(self, one: BoundedHttp) -> None:
        """Stop counting a connection as unfinished: its request is complete, or the connection is closed."""
        if one in self._unfinished:
            del self._unfinished[one]
            same = self._of_address[one.address]
            del same[one]
            if not same:
                del self._of_address[one.address]

    def rests(self, one: BoundedHttp) -> None:
        """Count a connection as idle; close the longest idle one if there are too many."""
        if one in self._all and one not in self._unfinished:
            self._idle[one] = None
            if len(self._idle) > self.limits.max_idle:
                next(iter(self._idle)).cut()

    def lost(self, one: BoundedHttp) -> None:
        """Remove a closed connection. Idempotent."""
        self.finished(one)
        self._idle.pop(one, None)
        self._all.discard(one)

    async def watch(self) -> None:
        """Close connections whose deadline has passed, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.check_interval_s)
            now = loop.time()
            for one in tuple(self._all):
                one.look(now)


class BoundedHttp(UvicornConnection):
    """One uvicorn connection, with the limits that uvicorn itself does not have."""

    def __init__(self, *args: Any, table: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address = b""
        self._table = table
        self._limits = table.limits
        self._phase = _RequestPart.HEADERS
        self._deadline_at = math.inf
        self._num_bytes = 0  # since the request's first byte, or since the last byte of its body
        self._is_going_on = False  # the last read contained the start of a request or a part of a body
        self._unsent_deadline_at: float | None = None

    # Hooks of uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = _network(self.client[0]) if self.client is not None else b""
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._is_going_on = False
        super().data_received(data)
        if self._phase is _RequestPart.ANSWER:
            return
        # The event loop bounds the size of one read, so the limits are exceeded by at most one read.
        self._num_bytes = 0 if self._is_going_on else self._num_bytes + len(data)
        limits = self._limits
        num_lines = len(self.headers) if self._phase is _RequestPart.HEADERS and self.headers is not None else 0
        if self._num_bytes > limits.header_bytes or num_lines > limits.header_lines:
            self._refuse(
                HeadersTooLarge(
                    f"the request headers exceed the limit of {limits.header_lines} headers and"
                    f" {limits.header_bytes} bytes in total"
                )
            )

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(f"malformed HTTP request: {msg}"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_going_on = True
        if self._phase is not _RequestPart.HEADERS:
            self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Ignore trailers: they follow the body, after the request was accepted by its headers.
        if self._phase is _RequestPart.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = _RequestPart.BODY
        self._deadline_at = self.loop.time() + self._limits.body_timeout_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._is_going_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = _RequestPart.ANSWER
        self._deadline_at = math.inf
        self._table.finished(self)
        super().on_message_complete()
        if self.cycle.response_complete:
            self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _RequestPart.ANSWER and not self.pipeline:
            self._rest()

    def resume_writing(self) -> None:
        self._unsent_deadline_at = None  # the client has read something
        super().resume_writing()

    # Limits

    def look(self, now: float) -> None:
        """Close the connection if its deadline has passed, or if its client does not read."""
        if now >= self._deadline_at:
            if self.flow.read_paused:  # not the client's delay: we pause reading while the previous request runs
                self._deadline_at = now + self._limits.body_timeout_s
            elif self._phase is _RequestPart.HEADERS and self.headers is not None:
                self._refuse(
                    HeadersTimeout(f"the headers did not arrive within {self._limits.headers_timeout_s:g} s")
                )
            else:
                self.cut()
        num_unsent = self.transport.get_write_buffer_size()
        is_over = self.cycle is None or self.cycle.response_complete or self.transport.is_closing()
        if num_unsent == 0 or not (is_over or self.flow.write_paused):
            self._unsent_deadline_at = None
        elif self._unsent_deadline_at is None:
            self._unsent_deadline_at = now + self._limits.send_timeout_s + num_unsent / self._limits.send_rate
        elif now >= self._unsent_deadline_at:
            self.cut()

    def cut(self) -> None:
        """Close the connection immediately. Idempotent."""
        self._table.lost(self)
        self.transport.abort()

    def _rest(self) -> None:
        # uvicorn's own keep-alive timer stops at the next byte, so a client that sends one byte would stay forever.
        self._deadline_at = self.loop.time() + self._limits.idle_timeout_s
        self._table.rests(self)

    def _await_headers(self) -> None:
        self._phase = _RequestPart.HEADERS
        self._num_bytes = 0
        self._deadline_at = self.loop.time() + self._limits.headers_timeout_s
        self._table.began(self)

    def _refuse(self, error: AgentLoopError) -> None:
        """Send an error response and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cut()  # a response is being sent: the error would become part of its body
            return
        self._deadline_at = math.inf
        body = orjson.dumps(error.to_wire())
        status = HTTPStatus(error.http_status)
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {uuid.uuid4().hex}",
            "connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self.transport.close()


def _network(host: str) -> bytes:
    """Return the bytes that identify one client network: an IPv4 address, or the /64 prefix of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.encode()
    if address.version == 6 and address.ipv4_mapped is None:
        return address.packed[:8]
    return (address.ipv4_mapped or address).packed if address.version == 6 else address.packed
