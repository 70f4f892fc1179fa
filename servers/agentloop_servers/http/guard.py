"""The guard between the network and the routes: request ids, bounds, and the one error envelope.

Pure ASGI, because BaseHTTPMiddleware hides disconnects. Invariants: every answer carries `x-request-id`, and where
a session is known `x-session-id`; every answer that is no success is `{"error": {message, type, param, code}}`, or
what the route's dialect has instead (`envelope`); no more than `max_body_bytes` of a body are ever held; a body is
read only after the route's key was checked; authorisation hangs on the route itself, never on a path or on the
Host header.
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

Envelope: TypeAlias = Callable[[AgentLoopError], Any]
"""Writes the body of an error answer, as something `orjson` takes."""

_BEGUN_AT_ONCE = 4  # requests that one round of the event loop begins at least
_BEGINNING_S = 0.001  # of the event loop, for the beginning of one
_BEGINNING_SHARE = 0.5  # of the event loop's time, for beginnings
_SHARED_FOR_S = 1.0  # after its last request, a user counts as one that calls
_LIGHT_SHARE = 0.25  # of an equal share of the open requests; a user with fewer is delayed by the others' crowds
_SHORT_ROUND_S = 0.0002  # of the event loop: it had little else to do
_MAX_ADMISSION_GAP_S = 0.05  # between two admissions of waiting requests

_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,128}")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_HAS_PORT = re.compile(r":\d{1,5}\Z")
_FOR_THIS_MACHINE = (
    "this service has no keys, so it is only for this machine: call it as localhost or 127.0.0.1, not from "
    "another site's page; or start it with a user key and an admin key (AGENTLOOP_KEY, AGENTLOOP_ADMIN_KEY)"
)
_WHITE_SPACE = " \t"  # that may stand around a header's value
_HOST = re.compile(r"[A-Za-z0-9._\-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")

_log = structlog.stdlib.get_logger(__name__)


class BodyTooLarge(InvalidRequest):
    """The body exceeds the service's bound."""

    code, http_status = "body_too_large", 413


class HeadersTooLarge(InvalidRequest):
    """The headers exceed the service's bound."""

    code, http_status = "headers_too_large", 431


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time."""

    code, http_status = "body_timeout", 408


class UnsupportedMediaType(InvalidRequest):
    """The body is compressed."""

    code, http_status = "unsupported_media_type", 415


class NotLocal(Forbidden):
    """A service without keys is for its own machine: the request names another host, or is another site's."""

    code = "not_local"


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    code, http_status = "method_not_allowed", 405


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Every bound of the public HTTP edge."""

    max_header_bytes: int = 64 << 10
    max_headers: int = 256
    max_body_bytes: int = 32 << 20
    max_bytes_of_bodies: int = 256 << 20  # of long bodies that are read and parsed at once; others wait their turn
    body_timeout_s: float = 60.0
    max_direct_calls: int = 1024  # concurrent `POST /generate`; the next one gets 429
    coordinator_timeout_s: float = 60.0
    update_timeout_s: float = 900.0
    retry_after_s: int = 1  # told with 429 and 503; 1 to 60


# --- bodies -----------------------------------------------------------------------------------------------


def json_body(
    kind: type[B], parse: Callable[[bytes, type[B]], B] = parse_body
) -> Callable[[Request], Awaitable[B]]:
    """Make a route dependency that reads the body as a `kind`, strictly. The guard bounds its size and time."""

    async def read(request: Request) -> B:
        return await read_json_body(request, lambda body: parse(body, kind))

    return read


async def read_json_body(request: Request, parse: Callable[[bytes], T]) -> T:
    """Parse a JSON body with `parse`; a long one in a thread. Raises InvalidRequest."""
    content_type = request.headers.get("content-type", "").lower()
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.strip().removeprefix("charset=").strip('"')
    if media_type.strip() != "application/json" or charset not in ("", "utf-8"):
        raise InvalidRequest("send application/json in UTF-8", param="content-type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not taken", param="content-encoding")
    body = await request.body()
    if len(body) <= LONG_BODY_BYTES:
        return parse(body)
    try:
        return await asyncio.to_thread(parse, body)
    finally:
        request.scope["state"]["release_body"]()


def traceparent_of(request: Request) -> str:
    """Return the W3C trace context that a request brings; empty without a valid one."""
    given = request.headers.get("traceparent", "").strip()
    return given if _TRACEPARENT.fullmatch(given) else ""


# --- errors -----------------------------------------------------------------------------------------------


def add_error_handlers(app: FastAPI, limits: HttpLimits) -> None:
    """Bring every failure of a route into the envelope."""

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
            404: NotFound(f"there is no path {request.url.path[:200]!r}; models are called under /v1.{hint}"),
            405: MethodNotAllowed(f"{request.method} is not possible here"),
        }
        known = kinds.get(error.status_code)
        if known is None:
            known = (
                InvalidRequest(str(error.detail)) if error.status_code < 500 else AgentLoopError("internal error")
            )
        response = error_response(known, limits.retry_after_s, envelope_of(request.scope))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(
                sorted(_methods_at(request))
            )  # Starlette tells those of one route
        return response

    app.add_exception_handler(AgentLoopError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _methods_at(request: Request) -> set[str]:
    """Return the methods that the path of a request takes."""
    found = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in found for method in getattr(route, "methods", None) or ()}


def error_response(
    error: AgentLoopError, retry_after_s: int = 1, envelope: Envelope = AgentLoopError.to_wire
) -> Response:
    """Return the envelope, with the headers that the status calls for.

    The OpenAI and Anthropic clients repeat a 409 and every 5xx unless `x-should-retry` says otherwise.
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
    """Make a route dependency, to stand first: `envelope` writes the errors of this route.

    Every answer has the request's id also under `id_header`.
    """

    async def declare(request: Request) -> None:
        request.scope["state"].update(envelope=envelope, id_header=id_header)

    return declare


def envelope_of(scope: Scope) -> Envelope:
    """Return the function that writes the errors of this request."""
    envelope: Envelope = scope.get("state", {}).get("envelope", AgentLoopError.to_wire)
    return envelope


# --- the middleware ---------------------------------------------------------------------------------------


class TickLimiter:
    """Admits requests in rounds of the event loop. Users take turns; the requests of one user are in order.

    Reading a request and making its prompt is a millisecond of work without a pause. A thousand requests that begin
    in one round would delay every stream and every answer by that long, so a round admits `width` requests, or as
    many as take their share of the time that the last round took: with a half, rounds get twice as long at most.

    Every step of an admitted request waits for a round, so a crowd of one user that makes rounds long would delay
    another user's call at each of its steps. While a user has far fewer requests than the others (`_is_paced`), the
    others are admitted one at a time, whenever the event loop has nothing else to do. It never idles while requests
    wait, so this costs no throughput.
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
        self._num_left = width  # in this round
        self._round_at: float | None = None  # when this one began; None: none is scheduled after it
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(strides)  # bounded by the connections
        self._num_open: Counter[str] = Counter()  # requests of known users
        self._seen: dict[str, float] = {}  # known users by their last request, the latest last
        self._num_owed = 0  # requests that others may begin, one for each that passed the queue
        self._admitted_at = 0.0  # when a round last admitted a request

    async def enter(self, user: str = "") -> None:
        """Wait for admission. Call `leave` at the request's end, also if this raises. "" is no known user: it takes
        turns like one, but nobody is held back for it."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if user:
            self._num_open[user] += 1
            self._seen.pop(user, None)
            self._seen[user] = now
            if self._is_paced(now) and self._is_light(user) and user not in self._waiting:
                self._num_owed += bool(self._waiting)
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
        """Count a request that ended."""
        if user:
            self._num_open[user] -= 1
            if not self._num_open[user]:
                del self._num_open[user]

    def _is_paced(self, now: float) -> bool:
        """Return True if one of several users that called lately has far fewer requests than the others."""
        while self._seen and now - next(iter(self._seen.values())) > _SHARED_FOR_S:
            del self._seen[next(iter(self._seen))]
        return len(self._seen) > 1 and any(map(self._is_light, self._seen))

    def _is_light(self, user: str) -> bool:
        return self._num_open[user] * len(self._seen) < _LIGHT_SHARE * self._num_open.total()

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        assert self._round_at is not None
        took_s, is_owed = now - self._round_at, self._num_owed > 0
        if not self._is_paced(now):
            width, self._num_owed = max(self._width, int(took_s * self._per_second)), 0
        else:
            # A short round shows that the loop had nothing else to do. Long rounds must not starve the crowd: it
            # has a turn for each turn of a light user, and one every `_MAX_ADMISSION_GAP_S`.
            width = int(is_owed or took_s < _SHORT_ROUND_S or now - self._admitted_at > _MAX_ADMISSION_GAP_S)
            self._num_owed -= is_owed
        self._num_left = width
        while self._num_left > 0:
            place = self._waiting.pop(lambda place: not place.done())  # a request may have been given up
            if place is None:
                break
            place.set_result(None)
            self._num_left -= 1
            self._admitted_at = now
        if not self._waiting and self._num_left == width:
            self._round_at, self._num_left, self._num_owed = None, self._width, 0
            return
        self._round_at = now
        loop.call_soon(self._begin_round, loop)


class HttpGuard:
    """The outermost layer of the app: ids, bounds, and an answer for what nothing else caught.

    A server that cancels what runs in its end puts `server_ends` into the state of a request, which tells that.
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
        """Requests begin in turns of their users, whom `user_of` finds in their headers, checked or not.

        With `is_local_only`, which a service without keys is, requests must name a loopback host: a web page whose
        name was made to lead here (DNS rebinding) names its own. `in_flight` holds the requests that run.
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
                if not guarded.is_started:  # else the server cuts it
                    ending = ServiceUnavailable("this process of the endpoint ends; ask again")
                    await error_response(ending, envelope=envelope_of(scope))(scope, receive, guarded.send)
            except Exception as error:
                _log.exception("request_failed", path=scope["path"], method=scope["method"])
                if guarded.is_started:
                    raise  # the server cuts the connection: the client sees that the answer is not whole
                known = error if isinstance(error, AgentLoopError) else AgentLoopError("internal error")
                await error_response(known, envelope=envelope_of(scope))(scope, receive, guarded.send)
            finally:
                del self._in_flight[id(scope)]
                self._limiter.leave(user)
                guarded.release_body()
                self._count(scope, guarded, begun_at)

    def _count(self, scope: Scope, guarded: _GuardedRequest, begun_at: float) -> None:
        route = route_of(scope)
        method = scope["method"] if route != "none" else "any"  # a stranger's may be any word
        self._tally.count("http_requests_total", route, method, str(guarded.status))
        self._tally.observe("http_seconds", time.perf_counter() - begun_at, route)
        if (by := scope["state"].get("cut_by")) is not None:
            self._tally.count("streams_cut_total", by)

    def _refusal(self, headers: Headers) -> AgentLoopError | None:
        limits, raw = self._limits, headers.raw
        num_bytes = sum(len(name) + len(value) for name, value in raw)
        if len(raw) > limits.max_headers or num_bytes > limits.max_header_bytes:
            return HeadersTooLarge(f"at most {limits.max_headers} headers of {limits.max_header_bytes} bytes")
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (hosts and _HOST.fullmatch(hosts[0]) is None):
            return InvalidRequest("malformed Host header", param="host")
        if self._is_local_only:
            origins = [origin.rpartition("://")[2] for origin in headers.getlist("origin")]
            if not all(map(_is_local, (*hosts, *origins))):
                return NotLocal(_FOR_THIS_MACHINE, param="origin" if all(map(_is_local, hosts)) else "host")
        length = headers.get("content-length", "0").strip(_WHITE_SPACE)
        if not length.isdecimal() or (int(length[:20]) > self._limits.max_body_bytes):
            return _too_large(self._limits.max_body_bytes)
        return None


class _GuardedRequest:
    """One request's receive and send, counting what comes in and stamping what goes out."""

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
        self.length: int | None = None  # of the body, where it is told
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
        # Only a long body holds room that others wait for.
        slow_at = self._admitted_at + SLOW_GRACE_S + self._num_bytes / MIN_BYTES_PER_S
        deadline_at = self._body_deadline_at if self._release is None else min(self._body_deadline_at, slow_at)
        try:
            async with asyncio.timeout_at(deadline_at):
                message = await self._receive()
        except TimeoutError as error:
            reason = f"the body took longer than {self._limits.body_timeout_s:g} s"
            if deadline_at < self._body_deadline_at:
                reason = f"the body arrived at less than {MIN_BYTES_PER_S} bytes/s: {self._num_bytes} bytes so far"
            raise BodyTimeout(reason) from error
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._limits.max_body_bytes:
                raise _too_large(self._limits.max_body_bytes)
            if not message.get("more_body", False):
                self._body_deadline_at = None  # what comes next is the client's leaving
        return message

    def release_body(self) -> None:
        """Leave the place of a long body to another: it has been parsed, or is given up. Idempotent."""
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
        await self._send(message)


def route_of(scope: Scope) -> str:
    """Return the route of a request, or "none" as long as none is found."""
    return getattr(scope.get("route"), "path", "none")


def _is_local(authority: str) -> bool:
    """Tell whether a host with or without a port, as Host and Origin have it, is a name of this very machine."""
    host = authority.rpartition(":")[0] if _HAS_PORT.search(authority) else authority
    return is_loopback(host.removeprefix("[").removesuffix("]").lower())


def _request_id(headers: Headers) -> str:
    offered = headers.get("x-request-id", "")
    return offered if _REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex


def _too_large(max_body_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds {max_body_bytes} bytes")
