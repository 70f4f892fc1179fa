"""The data plane: one engine behind its replica's private HTTP port, and the client that makes it an Engine again.

Bodies are MessagePack (`agentloop.codec`), never pickle; every request carries the run's secret. A call through a
Serve handle costs ten times as much, so tokens and weight-update verbs both come this way. The engine is asked for
its final output unless a caller streams; a stream is length-prefixed frames. A client that hangs up aborts its
request in the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp
import orjson
import structlog
from aiohttp import web

from agentloop.codec import decode, encode
from agentloop.engine import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Delta,
    Engine,
    EngineInfo,
    KVEvent,
    WeightUpdate,
)
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    EngineLost,
    InvariantBroken,
    Unauthorized,
    from_wire,
)
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode

T = TypeVar("T")

SECRET_HEADER = "x-agentloop-secret"
MAX_BODY_BYTES = 64 * 2**20
CONTROL_TIMEOUT_S = 600.0  # a stage or commit of large weights; the caller's own deadline is shorter
CONNECT_TIMEOUT_S = 5.0
GRACE_S = 10.0  # beyond a request's own timeout, in which the replica reports it itself

_FRAME = struct.Struct(">BI")  # kind, length
_FRAME_KINDS: dict[int, type] = {0: Delta, 1: Generation, 2: BlocksStored, 3: BlocksRemoved, 4: AllBlocksCleared}
_KIND_OF = {kind: number for number, kind in _FRAME_KINDS.items()}
_ERROR_FRAME = 255


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a control answer says of the engine."""

    info: EngineInfo
    weight_version: int | None
    is_paused: bool
    is_usable: bool
    load: Load


@dataclass(frozen=True, slots=True)
class PauseOrder:
    mode: PauseMode
    kv_policy: KVPolicy


class DataPlaneServer:
    """Serves one engine on 127.0.0.1 (or the given host). `url` is known after `start`."""

    def __init__(self, engine: Engine, replica_id: str, secret: str, host: str = "127.0.0.1") -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._secret = secret
        self._host = host
        self._runner: web.AppRunner | None = None
        self.url = ""
        self._log = structlog.get_logger("dataplane").bind(replica=replica_id)

    async def start(self) -> None:
        """Listen on a port the system chooses."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/stream", self._stream),
                web.post("/abort", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/stage", self._stage),
                web.post("/commit", self._commit),
                web.get("/state", self._state),
                web.get("/health", self._health),
                web.get("/kv_events", self._kv_events),
            ]
        )
        # handler_cancellation: a worker that hangs up cancels the handler, which aborts in the engine.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening and cut what is in flight. Idempotent."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the secret; make every error an answer with its code."""
        try:
            if not hmac.compare_digest(request.headers.get(SECRET_HEADER, "").encode(), self._secret.encode()):
                raise Unauthorized("wrong or missing data-plane secret")
            return await handler(request)
        except AgentLoopError as error:
            return _error_answer(error)
        except web.HTTPException:
            raise
        except Exception as error:
            self._log.exception("dataplane_failed", path=request.path)
            return _error_answer(AgentLoopError(f"{type(error).__name__} in the replica"))

    async def _generate(self, request: web.Request) -> web.Response:
        generation = await self._engine.generate(decode(await request.read(), GenerateRequest))
        return _answer(self._stamped(generation))

    def _stamped(self, generation: Generation) -> Generation:
        return replace(generation, replica_id=self._replica_id, load=self._engine.load())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        wanted = decode(await request.read(), GenerateRequest)
        answer = web.StreamResponse()
        answer.content_type = "application/octet-stream"
        pieces = self._engine.stream(wanted)
        try:
            async for piece in pieces:
                if not answer.prepared:  # only now, so that an error before the first token is a plain answer
                    await answer.prepare(request)
                await answer.write(_frame(self._stamped(piece) if isinstance(piece, Generation) else piece))
        except AgentLoopError as error:
            if not answer.prepared:
                raise
            body = orjson.dumps(error.to_wire())
            await answer.write(_FRAME.pack(_ERROR_FRAME, len(body)) + body)
        await answer.write_eof()
        return answer

    async def _kv_events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.content_type = "application/octet-stream"
        await answer.prepare(request)
        async for event in self._engine.kv_events():
            await answer.write(_frame(event))
        await answer.write_eof()
        return answer

    async def _abort(self, request: web.Request) -> web.Response:
        await self._engine.abort(decode(await request.read(), str))
        return _answer(self._engine_state())

    async def _pause(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), PauseOrder)
        await self._engine.pause(order.mode, order.kv_policy)
        return _answer(self._engine_state())

    async def _resume(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        return _answer(self._engine_state())

    async def _stage(self, request: web.Request) -> web.Response:
        await self._engine.stage(decode(await request.read(), WeightUpdate))
        return _answer(self._engine_state())

    async def _commit(self, request: web.Request) -> web.Response:
        await self._engine.commit(decode(await request.read(), int))
        return _answer(self._engine_state())

    async def _state(self, request: web.Request) -> web.Response:
        return _answer(self._engine_state())

    async def _health(self, request: web.Request) -> web.Response:
        await self._engine.check_health()
        return _answer(self._engine_state())

    def _engine_state(self) -> EngineState:
        engine = self._engine
        return EngineState(engine.info, engine.weight_version, engine.is_paused, engine.is_usable, engine.load())


def _answer(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/msgpack")


def _error_answer(error: AgentLoopError) -> web.Response:
    return web.Response(
        body=orjson.dumps(error.to_wire()), status=error.http_status, content_type="application/json"
    )


def _frame(piece: Delta | Generation | KVEvent) -> bytes:
    body = encode(piece)
    return _FRAME.pack(_KIND_OF[type(piece)], len(body)) + body


class RemoteEngine:
    """An engine behind a DataPlaneServer, as an Engine. Properties show the state at the last control answer."""

    def __init__(self, url: str, secret: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._headers = {SECRET_HEADER: secret}
        self._session = session
        self._state: EngineState | None = None

    @property
    def state(self) -> EngineState:
        """Raises InvariantBroken before the first control call."""
        if self._state is None:
            raise InvariantBroken(f"the state of {self.url} was never asked for")
        return self._state

    @property
    def info(self) -> EngineInfo:
        return self.state.info

    @property
    def weight_version(self) -> int | None:
        return self.state.weight_version

    @property
    def is_paused(self) -> bool:
        return self.state.is_paused

    @property
    def is_usable(self) -> bool:
        return self.state.is_usable

    def load(self) -> Load:
        return self.state.load

    async def start(self) -> None:
        """Learn the engine's state; it was started by its replica."""
        await self._control("GET", "/state")

    async def close(self) -> None:
        """Nothing to free: the session belongs to EngineClients, the engine to its replica."""

    async def generate(self, request: GenerateRequest) -> Generation:
        body = await self._call("POST", "/generate", encode(request), request.timeout_s + GRACE_S)
        return decode(body, Generation)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        async for piece in self._frames("POST", "/stream", encode(request), request.timeout_s + GRACE_S):
            if not isinstance(piece, Delta | Generation):
                raise InvariantBroken(f"a {type(piece).__name__} in a token stream")
            yield piece

    async def kv_events(self) -> AsyncIterator[KVEvent]:
        async for piece in self._frames("GET", "/kv_events", None, None):
            if isinstance(piece, Delta | Generation):
                raise InvariantBroken(f"a {type(piece).__name__} among KV events")
            yield piece

    async def abort(self, request_id: str) -> None:
        await self._control("POST", "/abort", request_id)

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        await self._control("POST", "/pause", PauseOrder(mode, kv_policy))

    async def resume(self) -> None:
        await self._control("POST", "/resume")

    async def stage(self, update: WeightUpdate) -> None:
        await self._control("POST", "/stage", update)

    async def commit(self, version: int) -> None:
        await self._control("POST", "/commit", version)

    async def check_health(self) -> None:
        await self._control("GET", "/health")

    async def _control(self, method: str, path: str, value: object = None) -> None:
        body = await self._call(method, path, None if value is None else encode(value), CONTROL_TIMEOUT_S)
        self._state = decode(body, EngineState)

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        async with self._open(method, path, body, timeout_s) as answer:
            return await answer.read()

    def _open(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> _Opened:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        return _Opened(
            self._session.request(method, self.url + path, data=body, headers=self._headers, timeout=timeout),
            f"{self.url}{path}",
        )

    async def _frames(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> AsyncIterator[Delta | Generation | KVEvent]:
        async with self._open(method, path, body, timeout_s) as answer:
            while True:
                try:
                    kind, length = _FRAME.unpack(await answer.content.readexactly(_FRAME.size))
                except asyncio.IncompleteReadError as error:
                    if error.partial:
                        raise EngineLost(f"{self.url} cut a stream within a frame") from error
                    return
                data = await answer.content.readexactly(length)
                if kind == _ERROR_FRAME:
                    raise from_wire(orjson.loads(data), 500)
                yield decode(data, _FRAME_KINDS[kind])


class _Opened:
    """A request as a context: its transport's failures become our errors, wherever in the body they happen."""

    def __init__(self, context: aiohttp.client._RequestContextManager, name: str) -> None:
        self._context = context
        self._name = name

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            answer = await self._context.__aenter__()
            if answer.status == 200:
                return answer
            body = await answer.read()
            await self._context.__aexit__(None, None, None)
        except Exception as error:
            raise self._ours(error) from error
        try:
            envelope = orjson.loads(body)
        except orjson.JSONDecodeError:
            envelope = None
        raise from_wire(envelope, answer.status)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._context.__aexit__(kind, error, None)
        if isinstance(error, aiohttp.ClientError | TimeoutError | asyncio.IncompleteReadError):
            raise self._ours(error) from error

    def _ours(self, error: Exception) -> Exception:
        if isinstance(error, aiohttp.ServerTimeoutError) and isinstance(error, aiohttp.ConnectionTimeoutError):
            return EngineLost(f"{self._name}: no connection within {CONNECT_TIMEOUT_S:g} s")
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"{self._name}: no answer in time")
        if isinstance(error, aiohttp.ClientError | asyncio.IncompleteReadError | OSError):
            return EngineLost(f"{self._name}: {type(error).__name__}: {error}")
        return error


class EngineClients:
    """The remote engines of one process, one a URL, over one connection pool."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None
        self._engines: dict[str, RemoteEngine] = {}

    def connect(self, url: str) -> RemoteEngine:
        """The engine at `url`; nothing is sent yet. Call on the event loop that will use it."""
        if self._session is None:
            # limit=0: a worker's capacity bounds what is in flight, not the pool.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = RemoteEngine(url, self._secret, self._session)
        return engine

    async def close(self) -> None:
        """Close the pool. Idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            self._engines.clear()
            await session.close()
