"""The replica: one engine behind its private HTTP port, and its place in the fleet.

Control orders are numbered, and late ones are refused (`FencingGuard`). A client that hangs up aborts its request
in the engine.

A `Replica` registers with the coordinator and heartbeats its load; a coordinator that does not know it (a restart)
hears its introduction again. It decides nothing: pauses, updates and leases are the coordinator's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import orjson
import structlog
from aiohttp import web

from agentloop.api import ReplicaPort, ReplicaRegistration, ReplicaReport
from agentloop.codec import decode
from agentloop.engine import Engine, MemoryTag, Progress, WeightUpdate
from agentloop.errors import AgentLoopError, EngineLost
from agentloop.images import Image
from agentloop.types import GenerateRequest, Generation
from agentloop_servers.private_http import CommandKind, FencingGuard, PrivateServer, answer, token_of
from agentloop_servers.replica.protocol import (
    FRAMES,
    ControlAnswer,
    EngineState,
    PauseOrder,
    error_frame,
    frame,
)


@dataclass(frozen=True, slots=True)
class _ControlCall:
    """A call of the engine's control: its body, and what it is counted with if it is an order."""

    ask: Callable[..., Awaitable[object]]
    body: Any = None  # the type; None: there is none
    kind: CommandKind | None = None


class DataPlaneServer(PrivateServer):
    """Serves one engine on 127.0.0.1 (or the given host). `url` is known after `start`."""

    def __init__(self, engine: Engine, replica_id: str, secret: str, host: str = "127.0.0.1") -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._fencing = FencingGuard()
        routes = [
            web.post("/generate", self._generate),
            web.post("/stream", self._stream),
            web.get("/kv_events", self._kv_events),
            *(web.post(path, self._handler(call)) for path, call in self._control_calls().items()),
        ]
        super().__init__(replica_id, routes, secret, host)

    def _control_calls(self) -> dict[str, _ControlCall]:
        engine = self._engine

        async def pause(order: PauseOrder) -> None:
            await engine.pause(order.mode, order.kv_policy)

        return {
            "/state": _ControlCall(_nothing),
            "/fence": _ControlCall(self._newest_epoch),
            "/health": _ControlCall(engine.check_health),
            "/abort": _ControlCall(engine.abort, str),
            "/offer": _ControlCall(engine.offer),
            "/image_tokens": _ControlCall(engine.image_tokens, tuple[Image, ...]),
            "/stage": _ControlCall(engine.stage, WeightUpdate, CommandKind.STAGE),
            "/pause": _ControlCall(pause, PauseOrder, CommandKind.FREEZE),
            "/resume": _ControlCall(engine.resume, None, CommandKind.FREEZE),
            "/commit": _ControlCall(engine.commit, int, CommandKind.FREEZE),
            "/sleep": _ControlCall(engine.sleep, int, CommandKind.FREEZE),
            "/wake": _ControlCall(engine.wake, frozenset[MemoryTag], CommandKind.FREEZE),
        }

    def _handler(self, call: _ControlCall) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = () if call.body is None else (decode(await request.read(), call.body),)
            if call.kind is not None:  # right before the engine acts, without an await in between
                self._fencing.admit(call.kind, token_of(request))
            value = await call.ask(*body)
            return answer(ControlAnswer(value, self._engine_state()))

        return handle

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wanted = decode(await request.read(), GenerateRequest)
        async with _FrameAnswer(request) as frames:
            try:
                generation = self._stamped(await self._engine.generate(wanted, frames.tell))
            except AgentLoopError as error:
                if not frames.is_begun:
                    raise
                return await frames.end(error_frame(orjson.dumps(error.to_wire())))
            return await frames.end(frame(generation)) if frames.is_begun else answer(generation)

    def _stamped(self, generation: Generation) -> Generation:
        return replace(generation, replica_id=self._replica_id, load=self._engine.load())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        wanted = decode(await request.read(), GenerateRequest)
        async with _FrameAnswer(request) as frames:
            last = b""
            try:
                # Closed here and now: a caller that left must not be sampled for until the generator is collected.
                async with aclosing(self._engine.stream(wanted, frames.tell)) as pieces:  # type: ignore[type-var] # engines write generators
                    async for piece in pieces:
                        await frames.write(frame(self._stamped(piece) if isinstance(piece, Generation) else piece))
            except AgentLoopError as error:
                if not frames.is_begun:  # an error before the first token is a plain answer
                    raise
                last = error_frame(orjson.dumps(error.to_wire()))
            return await frames.end(last)

    async def _kv_events(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        stream.content_type = FRAMES
        await stream.prepare(request)
        async with aclosing(self._engine.kv_events()) as events:  # type: ignore[type-var] # engines write generators
            async for event in events:
                await stream.write(frame(event))
        await stream.write_eof()
        return stream

    async def _newest_epoch(self) -> int:
        return self._fencing.newest_epoch

    def _engine_state(self) -> EngineState:
        engine = self._engine
        return EngineState(
            engine.info, engine.weight_version, engine.is_paused, engine.is_usable, engine.asleep, engine.load()
        )


class _FrameAnswer:
    """An answer of frames, which begins with the first of them. Leave its context when the request has ended."""

    def __init__(self, request: web.Request) -> None:
        self.is_begun = False
        self._request = request
        self._stream = web.StreamResponse()
        self._stream.content_type = FRAMES
        self._writing = asyncio.Lock()
        self._told: list[bytes] = []  # bounded by the request's own tokens, and one report without any
        self._telling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _FrameAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling is not None and not self._telling.done():
            self._telling.cancel()
            await asyncio.wait([self._telling])

    def tell(self, progress: Progress) -> None:
        """Write a report soon; one without tokens only if no other waits to be written."""
        if self._told and not progress.tokens.token_ids:
            return
        self.is_begun = True
        self._told.append(frame(progress))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._write_told(), name="progress")

    async def write(self, data: bytes) -> None:
        """Write frames."""
        self.is_begun = True
        async with self._writing:
            if not self._stream.prepared:
                await self._stream.prepare(self._request)
            await self._stream.write(data)

    async def end(self, data: bytes) -> web.StreamResponse:
        """Write the last frames, after all that was told."""
        if self._telling is not None:
            await asyncio.wait([self._telling])
        await self.write(data)
        await self._stream.write_eof()
        return self._stream

    async def _write_told(self) -> None:
        with contextlib.suppress(ConnectionError):  # the caller has left: the request's handler is cancelled
            while self._told:
                data, self._told = b"".join(self._told), []
                await self.write(data)


async def _nothing() -> None:
    """Ask nothing of the engine: the answer says its state."""


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
                    is_known = await self._coordinator.heartbeat(self.replica_id, self._report())
                if not is_known:
                    await self._coordinator.register(self._registration())
                    is_known = True
            except AgentLoopError as error:
                self._log.warning("heartbeat_failed", code=error.code, error=str(error))
            await asyncio.sleep(HEARTBEAT_S)

    def _registration(self) -> ReplicaRegistration:
        engine = self._engine
        return ReplicaRegistration(
            self.replica_id, self.url, engine.info, engine.weight_version, engine.is_paused, engine.asleep
        )

    def _report(self) -> ReplicaReport:
        engine = self._engine
        return ReplicaReport(engine.load(), engine.is_usable, engine.is_paused, engine.asleep)
