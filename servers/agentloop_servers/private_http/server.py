"""The server of a private port: routes for the other processes of the run, which know its secret.

Workers run users' code, and know a key of their role alone: it opens the paths that a server has for workers, and
no other; nor can the secret, or a key that it signs, be made of it. A body is bounded; an error is answered with
its code. A client that hangs up cancels its handler.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable

import aiohttp
import orjson
import structlog
from aiohttp import web

from agentloop.codec import MSGPACK, encode
from agentloop.errors import AgentLoopError, Forbidden, InvalidRequest, ServiceUnavailable, Unauthorized
from agentloop_servers.private_http.fencing import EPOCH_HEADER, ORDER_HEADER, FencingToken
from agentloop_servers.tcp import BACKLOG, listening_socket, url_of

SECRET_HEADER = "x-agentloop-secret"
SERVER_HEADER = "x-agentloop-server"
MAX_BODY_BYTES = 64 * 2**20

_ROLE_KEY_PURPOSE = b"agentloop worker key\0"  # the run's secret has other uses, whose digests are no keys


def worker_key(secret: str) -> str:
    """Return the key of a run's workers: the HMAC-SHA256 of their role under the run's secret, in hex."""
    return hmac.digest(secret.encode(), _ROLE_KEY_PURPOSE, "sha256").hex()


class Misdirected(ServiceUnavailable):
    """A call that reached another server than it was meant for: its port has a new owner. Nothing was done."""

    code, http_status = "misdirected", 421


class PrivateServer:
    """A server of routes on one host's address. `url` is known after `start`."""

    def __init__(
        self,
        name: str,
        routes: Iterable[web.RouteDef],
        secret: str,
        host: str = "127.0.0.1",
        max_body_bytes: int = MAX_BODY_BYTES,
        stop_timeout_s: float = 60.0,
        worker_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`name` is what a caller may give as SERVER_HEADER, to be refused by any other server. At the end, calls
        have `stop_timeout_s` to be answered. A worker's key opens `worker_paths` alone."""
        self._name = name
        self._routes = tuple(routes)
        self._secret = secret.encode()
        self._worker_key = worker_key(secret).encode()
        self._worker_paths = worker_paths
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._stop_timeout_s = stop_timeout_s
        self._runner: web.AppRunner | None = None
        self.url = ""
        self._log = structlog.get_logger("private_http").bind(server=name)

    async def start(self) -> None:
        """Listen on a port that the system chooses."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guard])
        app.add_routes(self._routes)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=self._stop_timeout_s
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listening_socket(self._host), backlog=BACKLOG).start()
        host, port = self._runner.addresses[0][:2]
        self.url = url_of(host, port)

    async def close(self) -> None:
        """Stop listening, wait for what is in flight, and cut what takes too long. Idempotent."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the secret; make every error an answer with its code."""
        try:
            self._authorize(request)
            if request.headers.get(SERVER_HEADER, self._name) != self._name:
                raise Misdirected(f"this is {self._name}")
            return await handler(request)
        except AgentLoopError as error:
            return _error_answer(error)
        except web.HTTPRequestEntityTooLarge as error:
            return _error_answer(InvalidRequest(f"a body of more than {self._max_body_bytes} bytes: {error.text}"))
        except web.HTTPException:
            raise
        except aiohttp.ClientConnectionResetError:  # by its name a client's, and raised by servers' writers too
            return _error_answer(AgentLoopError(f"the caller left {request.path}"))  # nobody reads it
        except Exception as error:
            self._log.exception("private_call_failed", path=request.path)
            return _error_answer(AgentLoopError(f"{type(error).__name__} in {self._name}"))

    def _authorize(self, request: web.Request) -> None:
        """Raises Unauthorized without a key of the run, Forbidden with a worker's on a path that is not theirs."""
        given = request.headers.get(SECRET_HEADER, "").encode()
        if hmac.compare_digest(given, self._secret):
            return
        if not hmac.compare_digest(given, self._worker_key):
            raise Unauthorized("wrong or missing secret of the run")
        if request.path not in self._worker_paths:
            raise Forbidden(f"a worker's key does not open {request.path}")


def token_of(request: web.Request) -> FencingToken:
    """Return the fencing token in a command's headers. Raises InvalidRequest without one."""
    try:
        return FencingToken(int(request.headers[EPOCH_HEADER]), int(request.headers[ORDER_HEADER]))
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"{request.path} is an order, and orders are numbered") from error


async def body_of(request: web.Request) -> bytearray:
    """Return a request's body, copied once: `request.read` copies it three times, at half of a large call's CPU."""
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
    return body


def answer(value: object) -> web.Response:
    """Return an answer that holds the codec's bytes of a value."""
    return web.Response(body=encode(value), content_type=MSGPACK)


def _error_answer(error: AgentLoopError) -> web.Response:
    return web.Response(
        body=orjson.dumps(error.to_wire()), status=error.http_status, content_type="application/json"
    )
