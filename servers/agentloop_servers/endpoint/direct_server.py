"""The server of one ingress process: its app on the public port, which all processes share, and on a private port.

Agents on this host and the endpoint's other processes use the private port, all others the public port. On several
hosts a gate restricts the private port to the other processes. Every connection has bounds (`http/connections.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from agentloop.concurrency.aio import deadline_after, is_set_by
from agentloop.errors import ServiceUnavailable
from agentloop_servers.http.connections import BoundedHttp, ConnectionLimits, Connections
from agentloop_servers.net.tcp import BACKLOG, listening_socket, url_of
from agentloop_servers.private_http.trust import Gate, Trust

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3


class DirectServer:
    """The server of one app on the running loop, from `start` to `close`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
        tls: tuple[str, str] | None = None,
        trust: Trust | None = None,
    ) -> None:
        """`tls` has the files of the public port's certificate chain and key; `trust` secures the private port."""
        self._app = app
        self._host = host
        self._tls = tls
        self._trust = trust
        self._connections = Connections(limits)
        self._servers: list[_Server] = []
        self._serving: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self, port: int = 0, public: socket.socket | None = None) -> str:
        """Listen on `port`, or on a port that the system chooses if `port` is in use; returns the base URL.

        `public` is a socket that already listens; it is served too and closed by the server. Raises
        ServiceUnavailable.
        """
        listener = self._listener(port)
        port = listener.getsockname()[1]
        # Uvicorn logs a warning for every malformed request from outside.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._watching = asyncio.create_task(self._connections.watch(), name="http connections")
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl_certfile": self._tls[0], "ssl_keyfile": self._tls[1]}
        url, http = url_of(self._host, port), partial(BoundedHttp, table=self._connections)
        if self._trust is not None:
            url, gate = url_of(self._host, port, self._trust.scheme), Gate([self._trust])
            gate.address = url.partition("//")[2]
            own = partial(_gated, gate, http)
            await self._start_server([listener], own, self._trust.server_tls(self._host), lifespan="on")
        elif public is None or secured:
            await self._start_server([listener], http, lifespan="on")
        else:
            await self._start_server([listener, public], http, lifespan="on")
            public = None
        if public is not None:
            await self._start_server([public], http, lifespan="off", **secured)
        return url

    async def _start_server(
        self,
        sockets: list[socket.socket],
        http: Callable[..., asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        config = uvicorn.Config(
            self._serve,
            log_config=None,
            access_log=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=math.ceil(self._connections.limits.idle_timeout_s),
            backlog=BACKLOG,
            interface="asgi3",  # uvicorn would take a bound method for an ASGI 2 app
            http=http,  # type: ignore[arg-type]
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            **options,
        )
        if tls is not None:
            config.load()
            config.ssl = tls
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=sockets), name="http server")
        self._servers.append(server)
        self._serving.append(serving)
        is_up = asyncio.create_task(server.is_up.wait())
        try:
            waited_for = (is_up, serving)
            await asyncio.wait(waited_for, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_up.cancel()
        if not server.started:
            raise ServiceUnavailable("the endpoint's private port did not open: see the log for the reason")

    def check_health(self) -> None:
        """Raise ServiceUnavailable if the server has stopped without `close`."""
        for task in (*self._serving, *filter(None, [self._watching])):
            if task.done():
                raise ServiceUnavailable("the endpoint's private port has stopped listening") from task.exception()

    async def close(self) -> None:
        """Stop listening; open requests have `STOP_TIMEOUT_S` to finish. Idempotent."""
        for server in self._servers:
            server.stop()
        if self._serving:
            serving, self._serving = self._serving, []
            await asyncio.wait(serving)
            self._servers = []
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app. Its guard answers requests that still run some time after `close`."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["server_ends"] = self._ends
        await self._app(scope, receive, send)

    def _ends(self) -> bool:
        return any(server.should_exit for server in self._servers)

    def _listener(self, port: int) -> socket.socket:
        try:
            return listening_socket(self._host, port, BACKLOG)
        except OSError:
            if port == 0:
                raise
            return listening_socket(self._host, 0, BACKLOG)


def _gated(gate: Gate, http: Callable[..., asyncio.Protocol], **options: Any) -> asyncio.Protocol:
    return gate.arrival(lambda _: http(**options))


class _Server(uvicorn.Server):
    """Keeps the process's signal handlers and sets an event once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._is_stopped = asyncio.Event()

    def stop(self) -> None:
        """Start to shut down. Idempotent."""
        self.should_exit = True
        self._is_stopped.set()

    async def main_loop(self) -> None:
        # uvicorn's own loop runs ten times a second, and each tenth time renews the `Date` header.
        while not await self.on_tick(0):
            await is_set_by(self._is_stopped, deadline_after(1.0))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
