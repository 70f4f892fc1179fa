"""The server of a private port: HTTP routes for authenticated processes of the run (`trust.py`).

A worker's key opens only the paths for workers. A URL has the server's name, so a call for another server that
used the port before is refused. Bodies are bounded, errors are returned with their code, and a client that
disconnects cancels its handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import aiohttp
import orjson
import structlog
from aiohttp import web

from agentloop.errors import AgentLoopError, Forbidden, InvalidRequest, ServiceUnavailable
from agentloop.values.codec import MSGPACK, encode
from agentloop_servers.net.tcp import BACKLOG, listening_socket, url_of
from agentloop_servers.private_http.fencing import EPOCH_HEADER, ORDER_HEADER, Fenced, FencingToken
from agentloop_servers.private_http.trust import Gate, Trust

MAX_BODY_BYTES = 64 * 2**20


class Misdirected(ServiceUnavailable):
    """A call that reached the wrong server, because the port has a new owner. Nothing was done."""

    code, http_status = "misdirected", 421


class PrivateServer:
    """An HTTP server on one address of its host. `url` is set by `start`."""

    def __init__(
        self,
        name: str,
        routes: Iterable[web.RouteDef],
        trust: Trust,
        host: str = "127.0.0.1",
        max_body_bytes: int = MAX_BODY_BYTES,
        stop_timeout_s: float = 60.0,
        worker_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`name` is the first part of each path. A worker's key opens only `worker_paths`.

        `close` gives calls `stop_timeout_s` to finish.
        """
        self._name = name
        self._routes = tuple(routes)
        self._trust = trust
        self.gate = Gate([trust, trust.of_workers])
        self._worker_paths = worker_paths
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._stop_timeout_s = stop_timeout_s
        self._listening: asyncio.Server | None = None
        self._runners: dict[Trust, web.AppRunner] = {}  # one per kind of credentials
        self.url = ""
        self._log = structlog.get_logger("private_http").bind(server=name)

    async def start(self) -> None:
        """Listen on a port that the operating system chooses."""
        for trust in (self._trust, self._trust.of_workers):
            app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guard])
            for route in self._routes:
                is_open = trust == self._trust or route.path in self._worker_paths
                handler = route.handler if is_open else _refuse_worker
                app.router.add_route(route.method, f"/{self._name}{route.path}", handler)
            self._runners[trust] = runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, shutdown_timeout=self._stop_timeout_s
            )
            await runner.setup()
        listener = listening_socket(self._host)
        host, port = listener.getsockname()[:2]
        url = url_of(host, port, self._trust.scheme)
        self.gate.address, self.url = url.partition("//")[2], f"{url}/{self._name}"
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: self.gate.arrival(self._serve),
            sock=listener,
            backlog=BACKLOG,
            ssl=self._trust.server_tls(self._host),
        )

    def _serve(self, trust: Trust) -> asyncio.Protocol:
        server = self._runners[trust].server
        assert server is not None
        return server()

    async def close(self) -> None:
        """Stop listening, wait for calls in flight, and cancel those that take too long. Idempotent."""
        if self._listening is not None:
            self._listening.close()
            self.gate.close()
            await asyncio.gather(*(runner.cleanup() for runner in self._runners.values()))
            self._listening, self._runners = None, {}

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Return each error as a response with its code."""
        try:
            return await handler(request)
        except AgentLoopError as error:
            self.gate.refused[error.http_status] += isinstance(error, Fenced)
            return _error_answer(error)
        except web.HTTPRequestEntityTooLarge as error:
            return _error_answer(
                InvalidRequest(f"the body is larger than {self._max_body_bytes} bytes: {error.text}")
            )
        except web.HTTPException:
            if request.path.startswith(f"/{self._name}/"):
                raise
            self.gate.refused[Misdirected.http_status] += 1
            return _error_answer(
                Misdirected(f"this server is {self._name}, not the one in the URL: look the address up again")
            )
        except aiohttp.ClientConnectionResetError:  # named after clients, but server responses raise it too
            return _error_answer(AgentLoopError(f"the caller disconnected from {request.path}"))
        except Exception as error:
            self._log.exception("private_call_failed", path=request.path)
            return _error_answer(
                AgentLoopError(f"internal error ({type(error).__name__}) in {self._name}: see its log")
            )


async def _refuse_worker(request: web.Request) -> web.StreamResponse:
    raise Forbidden(f"workers are not allowed to call {request.path}")


def token_of(request: web.Request) -> FencingToken:
    """Return the fencing token in a command's headers. Raises InvalidRequest if it is missing."""
    try:
        return FencingToken(int(request.headers[EPOCH_HEADER]), int(request.headers[ORDER_HEADER]))
    except (KeyError, ValueError) as error:
        raise InvalidRequest(
            f"{request.path} needs the headers {EPOCH_HEADER} and {ORDER_HEADER} with integers"
        ) from error


async def body_of(request: web.Request) -> bytearray:
    """Return a request's body, copied only once.

    `request.read` copies it three times, half of a large call's CPU time.
    """
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
    return body


def answer(value: object) -> web.Response:
    """Return a response with the MessagePack bytes of a value."""
    return web.Response(body=encode(value), content_type=MSGPACK)


def _error_answer(error: AgentLoopError) -> web.Response:
    return web.Response(
        body=orjson.dumps(error.to_wire()), status=error.http_status, content_type="application/json"
    )
