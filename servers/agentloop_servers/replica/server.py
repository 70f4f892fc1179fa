"""The data plane's server: one engine behind its replica's private HTTP port.

Every request carries the run's secret; control orders are numbered, and late ones are refused (`Fence`). A client
that hangs up aborts its request in the engine.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import replace

import orjson
import structlog
from aiohttp import web

from agentloop.codec import decode, encode
from agentloop.engine import Engine, MemoryTag, WeightUpdate
from agentloop.errors import AgentLoopError, InvalidRequest, Unauthorized
from agentloop.types import GenerateRequest, Generation
from agentloop_servers.replica.protocol import (
    EPOCH_HEADER,
    ORDER_HEADER,
    SECRET_HEADER,
    CommitAnswer,
    EngineState,
    Fence,
    Lane,
    OfferAnswer,
    OrderNumber,
    PauseOrder,
    StageAnswer,
    error_frame,
    frame,
)

MAX_BODY_BYTES = 64 * 2**20


class DataPlaneServer:
    """Serves one engine on 127.0.0.1 (or the given host). `url` is known after `start`."""

    def __init__(self, engine: Engine, replica_id: str, secret: str, host: str = "127.0.0.1") -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._secret = secret
        self._host = host
        self._fence = Fence()
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
                web.post("/sleep", self._sleep),
                web.post("/wake", self._wake),
                web.post("/offer", self._offer),
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
                await answer.write(frame(self._stamped(piece) if isinstance(piece, Generation) else piece))
        except AgentLoopError as error:
            if not answer.prepared:
                raise
            body = orjson.dumps(error.to_wire())
            await answer.write(error_frame(body))
        await answer.write_eof()
        return answer

    async def _kv_events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.content_type = "application/octet-stream"
        await answer.prepare(request)
        async for event in self._engine.kv_events():
            await answer.write(frame(event))
        await answer.write_eof()
        return answer

    async def _abort(self, request: web.Request) -> web.Response:
        await self._engine.abort(decode(await request.read(), str))
        return _answer(self._engine_state())

    async def _pause(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), PauseOrder)
        self._admit(Lane.FREEZE, request)
        await self._engine.pause(order.mode, order.kv_policy)
        return _answer(self._engine_state())

    async def _resume(self, request: web.Request) -> web.Response:
        self._admit(Lane.FREEZE, request)
        await self._engine.resume()
        return _answer(self._engine_state())

    async def _stage(self, request: web.Request) -> web.Response:
        update = decode(await request.read(), WeightUpdate)
        self._admit(Lane.STAGE, request)
        report = await self._engine.stage(update)
        return _answer(StageAnswer(report, self._engine_state()))

    async def _commit(self, request: web.Request) -> web.Response:
        version = decode(await request.read(), int)
        self._admit(Lane.FREEZE, request)
        report = await self._engine.commit(version)
        return _answer(CommitAnswer(report, self._engine_state()))

    async def _sleep(self, request: web.Request) -> web.Response:
        level = decode(await request.read(), int)
        self._admit(Lane.FREEZE, request)
        await self._engine.sleep(level)
        return _answer(self._engine_state())

    async def _wake(self, request: web.Request) -> web.Response:
        tags = decode(await request.read(), frozenset[MemoryTag])
        self._admit(Lane.FREEZE, request)
        await self._engine.wake(tags)
        return _answer(self._engine_state())

    async def _offer(self, request: web.Request) -> web.Response:
        return _answer(OfferAnswer(await self._engine.offer(), self._engine_state()))

    def _admit(self, lane: Lane, request: web.Request) -> None:
        """Right before the engine acts, without an await in between. Raises InvalidRequest or Conflict."""
        try:
            order = OrderNumber(int(request.headers[EPOCH_HEADER]), int(request.headers[ORDER_HEADER]))
        except (KeyError, ValueError) as error:
            raise InvalidRequest(f"{request.path} is an order, and orders are numbered") from error
        self._fence.admit(lane, order)

    async def _state(self, request: web.Request) -> web.Response:
        return _answer(self._engine_state())

    async def _health(self, request: web.Request) -> web.Response:
        await self._engine.check_health()
        return _answer(self._engine_state())

    def _engine_state(self) -> EngineState:
        engine = self._engine
        return EngineState(
            engine.info, engine.weight_version, engine.is_paused, engine.is_usable, engine.asleep, engine.load()
        )


def _answer(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/msgpack")


def _error_answer(error: AgentLoopError) -> web.Response:
    return web.Response(
        body=orjson.dumps(error.to_wire()), status=error.http_status, content_type="application/json"
    )
