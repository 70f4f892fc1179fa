"""The app on a port of its process's own: agents on this host, and the endpoint's other processes, reach it without
Serve's proxy, which costs milliseconds a call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentloop.errors import ServiceUnavailable
from agentloop_servers.tcp import BACKLOG, listening_socket

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3
KEEP_ALIVE_S = 75  # longer than clients keep an unused connection: they, not we, close it between two requests
HEADERS_BYTES = 64 << 10


class DirectServer:
    """Serves one app on the running loop, from `start` to `close`."""

    def __init__(self, app: ASGIApp, host: str, headers_timeout_s: float = 30.0) -> None:
        self._app = app
        self._host = host
        self._headers_timeout_s = headers_timeout_s
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> str:
        """Listen on `port`, or on one that the system chooses if that is taken; returns the base URL.

        Raises ServiceUnavailable.
        """
        listener = self._listener(port)
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",  # whoever serves the app first runs it
            backlog=BACKLOG,
            http=partial(_BoundedHttp, headers_timeout_s=self._headers_timeout_s),  # type: ignore[arg-type]
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        self._server = server = _Server(config)
        self._serving = asyncio.create_task(server.serve(sockets=[listener]), name="direct server")
        is_up = asyncio.create_task(server.is_up.wait())
        try:
            waited_for = (is_up, self._serving)
            await asyncio.wait(waited_for, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_up.cancel()
        if not server.started:
            raise ServiceUnavailable("the endpoint's own port did not open")
        return f"http://{_in_url(self._host)}:{port}"

    def check_health(self) -> None:
        """Raises ServiceUnavailable if it has stopped by itself."""
        if self._serving is not None and self._serving.done():
            raise ServiceUnavailable("the endpoint's own port is closed") from self._serving.exception()

    async def close(self) -> None:
        """Stop listening; what is in flight has a few seconds. Idempotent."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
            self._server = self._serving = None

    def _listener(self, port: int) -> socket.socket:
        try:
            return listening_socket(self._host, port, BACKLOG)
        except OSError:
            if port == 0:
                raise
            return listening_socket(self._host, 0, BACKLOG)


class _BoundedHttp(HttpToolsProtocol):
    """One connection of uvicorn, with a bound on what it does not bound itself: a request's headers.

    It is closed where the headers of a request, the first one too, do not come in time, or are larger than
    `HEADERS_BYTES`. Bodies are the guard's matter (`http/guard.py`).
    """

    def __init__(self, *args: Any, headers_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timeout_s = headers_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._num_bytes: int | None = 0  # of the headers so far; None between headers and the next request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # What one read brings is bounded by the event loop, so that is the most there is beyond the bound.
        if self._num_bytes is not None:
            self._num_bytes += len(data)
            if self._num_bytes > HEADERS_BYTES and not self.transport.is_closing():
                self.send_400_response(f"Headers of more than {HEADERS_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._num_bytes is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._end_waiting()
        super().on_headers_complete()

    def _await_headers(self) -> None:
        self._num_bytes = 0
        self._deadline = self.loop.call_later(self._headers_timeout_s, self.transport.close)

    def _end_waiting(self) -> None:
        self._num_bytes = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
