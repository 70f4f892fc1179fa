"""The app on a port of its process's own: agents on this host, and the endpoint's other processes, reach it without
Serve's proxy, which costs milliseconds a call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from agentloop.errors import ServiceUnavailable
from agentloop_servers.endpoint.bounded_http import BoundedHttp
from agentloop_servers.private_http import listening_socket

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3
KEEP_ALIVE_S = 75  # longer than clients keep an unused connection: they, not we, close it between two requests
BACKLOG = 2048


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
            http=partial(BoundedHttp, headers_timeout_s=self._headers_timeout_s),  # type: ignore[arg-type]
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
