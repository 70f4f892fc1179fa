"""ASGI middleware between the network and the routes: request ids, limits, and the error format.

Pure ASGI, because BaseHTTPMiddleware hides disconnects. Every response has `x-request-id`, `x-session-id` if the
session is known, and `x-affinity-source` if the request has different affinity names. Every error response is
`{"error": {message, type, param, code}}`, or the error format of the route's dialect (`envelope`). At most
`max_body_bytes` of a body are in memory, and a body is read only after the route has checked the key. Authorization
is attached to the route itself and never depends on a path or on the Host header.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentloop.api.requests import invalid_request, parse_body
from agentloop.concurrency.strides import FairQueue, Strides
from agentloop.errors import (
    AgentLoopError,
    Forbidden,
    InvalidRequest,
    NotFound,
    ServiceUnavailable,
    WeightVersionNotServed,
)
from agentloop.observability.metrics import MetricsTally
from agentloop.parts import PARTS, ROUTES
from agentloop.values.checks import is_loopback
from agentloop_servers.http.bodies import LONG_BODY_BYTES, MIN_BYTES_PER_S, SLOW_GRACE_S, LongBodies

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

AFFINITY_SOURCE = "affinity_source"
"""The name, in a request's state, of the header or field with the affinity name that counts, if several differ."""

Envelope: TypeAlias = Callable[[AgentLoopError], Any]
"""Returns the body of an error response as a value that `orjson` serializes."""

_BEGUN_AT_ONCE = 4  # minimum number of requests that one iteration of the event loop admits
_BEGINNING_S = 0.001  # event loop time that the start of one request takes
_BEGINNING_SHARE = 0.5  # maximum share of the event loop's time for starting requests
_SHARED_FOR_S = 1.0  # a user counts as active for this long after its last request
_LIGHT_SHARE = 0.25  # a user with less than this fraction of an equal share of the open requests is light
_SHORT_ROUND_S = 0.0002  # a shorter iteration shows that the event loop was idle
_MAX_ADMISSION_GAP_S = 0.05  # maximum time between two admissions of waiting requests

_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,128}")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_HAS_PORT = re.compile(r":\d{1,5}\Z")
_FOR_THIS_MACHINE = (
    "this service has no keys, so it accepts requests from this machine only: call it as localhost or 127.0.0.1,"
    " not from another site's page, or configure a user key and an admin key (AGENTLOOP_KEY, AGENTLOOP_ADMIN_KEY)"
)
_WHITE_SPACE = " \t"  # optional white space around the value of a header
_HOST = re.compile(r"[A-Za-z0-9._\-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")

_log = structlog.stdlib.get_logger(__name__)


class BodyTooLarge(InvalidRequest):
    """The body exceeds the service's limit."""

    code, http_status = "body_too_large", 413


class HeadersTooLarge(InvalidRequest):
    """The headers exceed the service's limit."""

    code, http_status = "headers_too_large", 431


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time."""

    code, http_status = "body_timeout", 408


class UnsupportedMediaType(InvalidRequest):
    """The body is compressed."""

    code, http_status = "unsupported_media_type", 415


class NotLocal(Forbidden):
    """The service has no keys, and the request names another host or comes from another site's page."""

    code = "not_local"


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    code, http_status = "method_not_allowed", 405


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the public HTTP edge."""

    max_header_bytes: int = 64 << 10
    max_headers: int = 256
    max_body_bytes: int = 32 << 20
    max_bytes_of_bodies: int = 256 << 20  # total of the long bodies that are read and parsed at once
    body_timeout_s: float = 60.0
    max_direct_calls: int = 1024  # concurrent `POST /generate` calls; more are answered with 429
    coordinator_timeout_s: float = 60.0
    update_timeout_s: float = 900.0
    retry_after_s: int = 1  # sent as `retry-after` with 429 and 503; 1 to 60


# Bodies


def json_body(
    kind: type[B], parse: Callable[[bytes, type[B]], B] = parse_body
) -> Callable[[Request], Awaitable[B]]:
    """Make a route dependency that parses the body strictly as a `kind`. The guard limits its size and duration."""

    async def read(request: Request) -> B:
        return await read_json_body(request, lambda body: parse(body, kind))

    return read


async def read_json_body(request: Request, parse: Callable[[bytes], T]) -> T:
    """Parse a JSON body with `parse`, in a thread if it is long. Raises InvalidRequest."""
    content_type = request.headers.get("content-type", "").lower()
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.strip().removeprefix("charset=").strip('"')
    if media_type.strip() != "application/json" or charset not in ("", "utf-8"):
        raise InvalidRequest(
            f"the body must be application/json in UTF-8, but the content type is {content_type[:200]!r}",
            param="content-type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType(
            "compressed bodies are not supported: send the body without content-encoding", param="content-encoding"
        )
    body = await request.body()
    if len(body) <= LONG_BODY_BYTES:
        return parse(body)
    try:
        return await asyncio.to_thread(parse, body)
    finally:
        request.scope["state"]["release_body"]()


def traceparent_of(request: Request) -> str:
    """Return the W3C trace context (`traceparent`) of a request; "" if it is missing or invalid."""
    traceparent = request.headers.get("traceparent", "").strip()
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


# Errors


def add_error_handlers(app: FastAPI, limits: HttpLimits) -> None:
    """Register handlers that convert every failure of a route to the error format of the route."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, AgentLoopError)
        return error_response(error, limits.retry_after_s, envelope_of(request.scope))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [(tuple(problem["loc"])[1:], str(problem["msg"])) for problem in error.errors()]
        return error_response(invalid_request(problems), limits.retry_after_s, envelope_of(request.scope))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        absent = [part.package for part in PARTS if ROUTES in part.entries and not part.is_there]
        hint = f" Optional parts with more paths are not installed: {', '.join(absent)}." if absent else ""
        kinds: dict[int, AgentLoopError] = {
            404: NotFound(f"unknown path {request.url.path[:200]!r}; the model APIs are under /v1.{hint}"),
            405: MethodNotAllowed(f"the path {request.url.path[:200]!r} does not support {request.method}"),
        }
        known = kinds.get(error.status_code)
        if known is None:
            known = (
                InvalidRequest(str(error.detail)) if error.status_code < 500 else AgentLoopError("internal error")
            )
        response = error_response(known, limits.retry_after_s, envelope_of(request.scope))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            # Starlette's own header has only the methods of the first matching route.
            response.headers["allow"] = ", ".join(sorted(_methods_at(request)))
        return response

    app.add_exception_handler(AgentLoopError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _methods_at(request: Request) -> set[str]:
    """Return the HTTP methods that the path of a request supports."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in routes for method in getattr(route, "methods", None) or ()}


def error_response(
    error: AgentLoopError, retry_after_s: int = 1, envelope: Envelope = AgentLoopError.to_wire
) -> Response:
    """Return an error response in the format of `envelope`, with the headers that its status requires.

    The OpenAI and Anthropic clients retry a 409 and every 5xx unless `x-should-retry` is "false".
    """
    headers = {}
    if error.http_status in (429, 503, 507) or isinstance(error, WeightVersionNotServed):
        headers["retry-after"] = str(min(max(retry_after_s, 1), 60))
    if error.http_status in (409, 429) or error.http_status >= 500:
        headers["x-should-retry"] = "true" if error.retryable else "false"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(envelope(error)), error.http_status, headers, "application/json")


def speaks(envelope: Envelope, id_header: str | None = None) -> Callable[[Request], Awaitable[None]]:
    """Make a route dependency that sets the error format of the route. It must be the route's first dependency.

    Every response also has the request id in the header `id_header`.
    """

    async def declare(request: Request) -> None:
        request.scope["state"].update(envelope=envelope, id_header=id_header)

    return declare


def envelope_of(scope: Scope) -> Envelope:
    """Return the function that formats the errors of this request."""
    envelope: Envelope = scope.get("state", {}).get("envelope", AgentLoopError.to_wire)
    return envelope


# Middleware


class TickLimiter:
    """Limits the requests that start in one iteration of the event loop. Users take turns; each user's queue is
    FIFO.

    Reading a request and rendering its prompt blocks the event loop for about a millisecond. A thousand requests
    that start in one iteration would delay every stream and response by a second, so an iteration admits `width`
    requests, or as many as take `share` of the duration of the last iteration: with a half, iterations at most
    double.

    Every step of an admitted request waits for an iteration, so one user's burst that makes iterations long would
    delay another user's call at each of its steps. While a user has far fewer requests than the others
    (`_is_paced`), the others are admitted one at a time, whenever the event loop has nothing else to do. The event
    loop never idles while requests wait, so this does not reduce throughput.
    """

    def __init__(
        self,
        width: int,
        seconds_each: float = _BEGINNING_S,
        share: float = _BEGINNING_SHARE,
        strides: Strides | None = None,
    ) -> None:
        self._width = width
        self._per_second = share / seconds_each
        self._num_left = width  # requests that this iteration may still admit
        self._round_at: float | None = None  # start of this iteration; None if no next one is scheduled
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(strides)  # bounded by the connections
        self._num_open: Counter[str] = Counter()  # requests of known users
        self._seen: dict[str, float] = {}  # time of each known user's last request, in order of time
        self._num_pending = (
            0  # admissions due to queued requests, one for each light request that bypassed the queue
        )
        self._admitted_at = 0.0  # when a queued request was last admitted

    async def enter(self, user: str = "") -> None:
        """Wait for admission. Call `leave` when the request ends, also if this raises. The unknown user "" takes
        turns like any other, but other users are never paced for it."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if user:
            self._num_open[user] += 1
            self._seen.pop(user, None)
            self._seen[user] = now
            if self._is_paced(now) and self._is_light(user) and user not in self._waiting:
                self._num_pending += bool(self._waiting)
                return
        if self._round_at is None:
            self._round_at = now
            loop.call_soon(self._begin_round, loop)
        if self._num_left > 0 and not self._waiting:
            self._num_left -= 1
            return
        place = loop.create_future()
        self._waiting.push(user, place)
        await place

    def leave(self, user: str = "") -> None:
        """Count a finished request."""
        if user:
            self._num_open[user] -= 1
            if not self._num_open[user]:
                del self._num_open[user]

    def _is_paced(self, now: float) -> bool:
        """Return True if one of several recently active users has far fewer requests than the others."""
        while self._seen and now - next(iter(self._seen.values())) > _SHARED_FOR_S:
            del self._seen[next(iter(self._seen))]
        return len(self._seen) > 1 and any(map(self._is_light, self._seen))

    def _is_light(self, user: str) -> bool:
        return self._num_open[user] * len(self._seen) < _LIGHT_SHARE * self._num_open.total()

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        assert self._round_at is not None
        took_s, is_pending = now - self._round_at, self._num_pending > 0
        if not self._is_paced(now):
            width, self._num_pending = max(self._width, int(took_s * self._per_second)), 0
        else:
            # A short iteration shows that the loop was idle. Long iterations must not starve the queued requests:
            # one is admitted for each light request that bypassed the queue, and one every `_MAX_ADMISSION_GAP_S`.
            width = int(is_pending or took_s < _SHORT_ROUND_S or now - self._admitted_at > _MAX_ADMISSION_GAP_S)
            self._num_pending -= is_pending
        self._num_left = width
        while self._num_left > 0:
            place = self._waiting.pop(lambda place: not place.done())  # skip cancelled requests
            if place is None:
                break
            place.set_result(None)
            self._num_left -= 1
            self._admitted_at = now
        if not self._waiting and self._num_left == width:
            self._round_at, self._num_left, self._num_pending = None, self._width, 0
            return
        self._round_at = now
        loop.call_soon(self._begin_round, loop)


class HttpGuard:
    """The outermost layer of the app: request ids, limits, and a response for uncaught exceptions.

    A server that cancels running requests at shutdown sets `server_ends` in the request's state: a function that
    returns True during the shutdown.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        *,
        is_local_only: bool = False,
        user_of: Callable[[Headers], str] = lambda _: "",
        tally: MetricsTally | None = None,
        in_flight: dict[int, Scope] | None = None,
    ) -> None:
        """Schedule requests fairly by user. `user_of` returns the user of a request from its unverified headers.

        A service without keys sets `is_local_only`: requests must then name a loopback host, because a web page
        that uses DNS rebinding sends its own host name. `in_flight` contains the running requests.
        """
        self._app = app
        self._limits = limits
        self._is_local_only = is_local_only
        self._limiter = TickLimiter(_BEGUN_AT_ONCE)
        self._user_of = user_of
        self._tally = MetricsTally() if tally is None else tally
        self._in_flight = {} if in_flight is None else in_flight
        self._bodies = LongBodies(limits.max_bytes_of_bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_at = time.perf_counter()
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        user = self._user_of(headers)
        guarded = _GuardedRequest(_request_id(headers), self._limits, self._bodies, user, receive, send, state)
        state["request_id"] = guarded.request_id
        state["release_body"] = guarded.release_body
        with structlog.contextvars.bound_contextvars(request_id=guarded.request_id):
            refusal = self._refusal(headers)
            if refusal is not None:
                await error_response(refusal)(scope, receive, guarded.send)
                self._count(scope, guarded, begun_at)
                return
            if "content-length" in headers:
                guarded.length = int(headers["content-length"].strip(_WHITE_SPACE))
            self._in_flight[id(scope)] = scope
            try:
                await self._limiter.enter(user)
                await self._app(scope, guarded.receive, guarded.send)
            except ClientDisconnect:
                _log.debug("client_left", path=scope["path"])
            except asyncio.CancelledError:
                if not state.get("server_ends", bool)():
                    raise
                if not guarded.is_started:  # otherwise the server cuts the connection
                    ending = ServiceUnavailable("this endpoint process is shutting down; send the request again")
                    await error_response(ending, envelope=envelope_of(scope))(scope, receive, guarded.send)
            except Exception as error:
                _log.exception("request_failed", path=scope["path"], method=scope["method"])
                if guarded.is_started:
                    raise  # the server cuts the connection, which shows the client that the response is incomplete
                known = error if isinstance(error, AgentLoopError) else AgentLoopError("internal error")
                await error_response(known, envelope=envelope_of(scope))(scope, receive, guarded.send)
            finally:
                del self._in_flight[id(scope)]
                self._limiter.leave(user)
                guarded.release_body()
                self._count(scope, guarded, begun_at)

    def _count(self, scope: Scope, guarded: _GuardedRequest, begun_at: float) -> None:
        route = route_of(scope)
        method = scope["method"] if route != "none" else "any"  # an unauthenticated client can send any method name
        self._tally.count("http_requests_total", route, method, str(guarded.status))
        self._tally.observe("http_seconds", time.perf_counter() - begun_at, route)
        if (by := scope["state"].get("cut_by")) is not None:
            self._tally.count("streams_cut_total", by)

    def _refusal(self, headers: Headers) -> AgentLoopError | None:
        limits, raw = self._limits, headers.raw
        num_bytes = sum(len(name) + len(value) for name, value in raw)
        if len(raw) > limits.max_headers or num_bytes > limits.max_header_bytes:
            return HeadersTooLarge(
                f"{len(raw)} headers of {num_bytes} bytes: the limit is {limits.max_headers} headers"
                f" and {limits.max_header_bytes} bytes"
            )
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (hosts and _HOST.fullmatch(hosts[0]) is None):
            return InvalidRequest(f"malformed Host header: {', '.join(hosts)[:200]!r}", param="host")
        if self._is_local_only:
            origins = [origin.rpartition("://")[2] for origin in headers.getlist("origin")]
            if not all(map(_is_local, (*hosts, *origins))):
                return NotLocal(_FOR_THIS_MACHINE, param="origin" if all(map(_is_local, hosts)) else "host")
        length = headers.get("content-length", "0").strip(_WHITE_SPACE)
        if not length.isdecimal() or (int(length[:20]) > self._limits.max_body_bytes):
            return _too_large(self._limits.max_body_bytes)
        return None


class _GuardedRequest:
    """Wraps one request's receive, to limit its body, and its send, to add the id headers."""

    def __init__(
        self,
        request_id: str,
        limits: HttpLimits,
        bodies: LongBodies,
        user: str,
        receive: Receive,
        send: Send,
        state: dict[str, Any],
    ) -> None:
        self._state = state
        self._bodies = bodies
        self._user = user
        self.length: int | None = None  # body bytes, from `content-length`
        self._release: Callable[[], None] | None = None
        self._admitted_at = 0.0
        self.request_id = request_id
        self.is_started = False
        self.status = 499  # the client left before an answer
        self._limits = limits
        self._receive = receive
        self._send = send
        self._num_bytes = 0
        self._body_deadline_at: float | None = asyncio.get_running_loop().time() + limits.body_timeout_s

    async def receive(self) -> Message:
        if self._body_deadline_at is None:
            return await self._receive()
        expected = self._num_bytes if self.length is None else self.length
        if self._release is None and expected > LONG_BODY_BYTES:
            whole = self._limits.max_body_bytes if self.length is None else self.length
            self._release = await self._bodies.admit(whole, self._body_deadline_at, self._user)
            self._admitted_at = asyncio.get_running_loop().time()
        # The minimum rate applies to long bodies only: they reserve capacity that other requests wait for.
        slow_at = self._admitted_at + SLOW_GRACE_S + self._num_bytes / MIN_BYTES_PER_S
        deadline_at = self._body_deadline_at if self._release is None else min(self._body_deadline_at, slow_at)
        try:
            async with asyncio.timeout_at(deadline_at):
                message = await self._receive()
        except TimeoutError as error:
            reason = f"the body did not arrive within {self._limits.body_timeout_s:g} s"
            if deadline_at < self._body_deadline_at:
                reason = f"the body arrived at less than {MIN_BYTES_PER_S} bytes/s: {self._num_bytes} bytes so far"
            raise BodyTimeout(reason) from error
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._limits.max_body_bytes:
                raise _too_large(self._limits.max_body_bytes)
            if not message.get("more_body", False):
                self._body_deadline_at = None  # the body is complete: the only next message is a disconnect
        return message

    def release_body(self) -> None:
        """Release the reservation of a long body after it was parsed or abandoned. Idempotent."""
        if self._release is not None:
            self._release()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            for name in ("x-request-id", self._state.get("id_header")):
                if name is not None:
                    headers[name] = self.request_id
            if (session_id := self._state.get("session_id")) is not None:
                headers["x-session-id"] = session_id
            if (source := self._state.get(AFFINITY_SOURCE)) is not None:
                headers["x-affinity-source"] = source
        await self._send(message)


def route_of(scope: Scope) -> str:
    """Return the path template of a request's route, or "none" if no route has matched."""
    return getattr(scope.get("route"), "path", "none")


def _is_local(authority: str) -> bool:
    """Return True if `authority`, a host with or without a port, is a loopback host."""
    host = authority.rpartition(":")[0] if _HAS_PORT.search(authority) else authority
    return is_loopback(host.removeprefix("[").removesuffix("]").lower())


def _request_id(headers: Headers) -> str:
    offered = headers.get("x-request-id", "")
    return offered if _REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex


def _too_large(max_body_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds the limit of {max_body_bytes} bytes")
