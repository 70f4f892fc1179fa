"""The replica: one engine behind its private HTTP port, and its place in the fleet.

Control orders are numbered, and late ones are refused (`FencingGuard`). A client that hangs up aborts its request
in the engine.

A `Replica` registers with the coordinator and heartbeats its load; a coordinator that does not know it (a restart)
hears its introduction again. It decides nothing: pauses, updates and leases are the coordinator's.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import orjson
import structlog
from aiohttp import web

from agentloop.api import ReplicaPort, ReplicaRegistration
from agentloop.codec import decode
from agentloop.engine import Engine, MemoryTag, WeightUpdate
from agentloop.errors import AgentLoopError, EngineLost
from agentloop.types import GenerateRequest, Generation
from agentloop_servers.private_http import CommandKind, FencingGuard, PrivateServer, answer, token_of
from agentloop_servers.replica.protocol import (
    CommitAnswer,
    EngineState,
    OfferAnswer,
    PauseOrder,
    StageAnswer,
    error_frame,
    frame,
)


class DataPlaneServer(PrivateServer):
    """Serves one engine on 127.0.0.1 (or the given host). `url` is known after `start`."""

    def __init__(self, engine: Engine, replica_id: str, secret: str, host: str = "127.0.0.1") -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._fencing = FencingGuard()
        routes = [
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
        super().__init__(replica_id, routes, secret, host)

    async def _generate(self, request: web.Request) -> web.Response:
        generation = await self._engine.generate(decode(await request.read(), GenerateRequest))
        return answer(self._stamped(generation))

    def _stamped(self, generation: Generation) -> Generation:
        return replace(generation, replica_id=self._replica_id, load=self._engine.load())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        wanted = decode(await request.read(), GenerateRequest)
        stream = web.StreamResponse()
        stream.content_type = "application/octet-stream"
        try:
            # Closed here and now: a caller that left must not be sampled for until the generator is collected.
            async with aclosing(self._engine.stream(wanted)) as pieces:  # type: ignore[type-var] # engines write generators
                async for piece in pieces:
                    if not stream.prepared:  # only now, so that an error before the first token is a plain answer
                        await stream.prepare(request)
                    await stream.write(frame(self._stamped(piece) if isinstance(piece, Generation) else piece))
        except AgentLoopError as error:
            if not stream.prepared:
                raise
            body = orjson.dumps(error.to_wire())
            await stream.write(error_frame(body))
        await stream.write_eof()
        return stream

    async def _kv_events(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        stream.content_type = "application/octet-stream"
        await stream.prepare(request)
        async with aclosing(self._engine.kv_events()) as events:  # type: ignore[type-var] # engines write generators
            async for event in events:
                await stream.write(frame(event))
        await stream.write_eof()
        return stream

    async def _abort(self, request: web.Request) -> web.Response:
        await self._engine.abort(decode(await request.read(), str))
        return answer(self._engine_state())

    async def _pause(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), PauseOrder)
        self._admit(CommandKind.FREEZE, request)
        await self._engine.pause(order.mode, order.kv_policy)
        return answer(self._engine_state())

    async def _resume(self, request: web.Request) -> web.Response:
        self._admit(CommandKind.FREEZE, request)
        await self._engine.resume()
        return answer(self._engine_state())

    async def _stage(self, request: web.Request) -> web.Response:
        update = decode(await request.read(), WeightUpdate)
        self._admit(CommandKind.STAGE, request)
        report = await self._engine.stage(update)
        return answer(StageAnswer(report, self._engine_state()))

    async def _commit(self, request: web.Request) -> web.Response:
        version = decode(await request.read(), int)
        self._admit(CommandKind.FREEZE, request)
        report = await self._engine.commit(version)
        return answer(CommitAnswer(report, self._engine_state()))

    async def _sleep(self, request: web.Request) -> web.Response:
        level = decode(await request.read(), int)
        self._admit(CommandKind.FREEZE, request)
        await self._engine.sleep(level)
        return answer(self._engine_state())

    async def _wake(self, request: web.Request) -> web.Response:
        tags = decode(await request.read(), frozenset[MemoryTag])
        self._admit(CommandKind.FREEZE, request)
        await self._engine.wake(tags)
        return answer(self._engine_state())

    async def _offer(self, request: web.Request) -> web.Response:
        return answer(OfferAnswer(await self._engine.offer(), self._engine_state()))

    def _admit(self, kind: CommandKind, request: web.Request) -> None:
        """Right before the engine acts, without an await in between. Raises InvalidRequest or Conflict."""
        self._fencing.admit(kind, token_of(request))

    async def _state(self, request: web.Request) -> web.Response:
        return answer(self._engine_state())

    async def _health(self, request: web.Request) -> web.Response:
        await self._engine.check_health()
        return answer(self._engine_state())

    def _engine_state(self) -> EngineState:
        engine = self._engine
        return EngineState(
            engine.info, engine.weight_version, engine.is_paused, engine.is_usable, engine.asleep, engine.load()
        )


HEARTBEAT_S = 1.0


class Replica:
    """Owns an engine from start to close."""

    def __init__(self, replica_id: str, engine: Engine, coordinator: ReplicaPort, secret: str, host: str) -> None:
        self.replica_id = replica_id
        self._engine = engine
        self._coordinator = coordinator
        self._server = DataPlaneServer(engine, replica_id, secret, host)
        self._heartbeats: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("replica").bind(replica=replica_id)

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        """Load the engine, open the port, join the fleet."""
        await self._engine.start()
        await self._server.start()
        self._heartbeats = asyncio.create_task(self._heartbeat_for_ever(), name=f"heartbeat-{self.replica_id}")
        self._log.info("replica_started", url=self.url, version=self._engine.weight_version)

    async def check_health(self) -> None:
        """Raises EngineLost if the engine or the heartbeat is dead; Serve then restarts this replica."""
        await self._engine.check_health()
        if self._heartbeats is not None and self._heartbeats.done():
            raise EngineLost(f"replica {self.replica_id} stopped its heartbeat")

    async def close(self) -> None:
        """Leave the fleet and free everything. Idempotent."""
        if self._heartbeats is not None:
            heartbeats, self._heartbeats = self._heartbeats, None
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
            try:
                await asyncio.wait_for(self._coordinator.deregister(self.replica_id), timeout=2.0)
            except (AgentLoopError, TimeoutError) as error:
                self._log.debug("deregister_failed", error=str(error))  # its missing heartbeats say it too
        await self._server.close()
        await self._engine.close()

    async def _heartbeat_for_ever(self) -> None:
        is_known = False
        while True:
            try:
                if is_known:
                    load, is_usable = self._engine.load(), self._engine.is_usable
                    is_known = await self._coordinator.heartbeat(self.replica_id, load, is_usable)
                if not is_known:
                    await self._coordinator.register(
                        ReplicaRegistration(
                            self.replica_id, self.url, self._engine.info, self._engine.weight_version
                        )
                    )
                    is_known = True
            except AgentLoopError as error:
                self._log.warning("heartbeat_failed", code=error.code, error=str(error))
            await asyncio.sleep(HEARTBEAT_S)
