"""The replica: one engine behind its private HTTP port, and its membership in the fleet.

A `Replica` asks the coordinator before it allocates memory, then registers and sends heartbeats; it registers
again with a restarted coordinator. The coordinator decides on pauses, updates and leases. The replica itself
detects a hung engine, which has requests but takes no step (`StallWatch`): the requests fail, the replica leaves
the fleet, and its failed health check makes Serve restart the process. Control orders are fenced (`FencingGuard`),
and a client that disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson
import structlog
from aiohttp import web

from agentloop import parts
from agentloop.api.coordinator import ReplicaPort, ReplicaRegistration, ReplicaReport
from agentloop.engine.canary import UniformLogprobWatch
from agentloop.engine.interface import (
    Adapter,
    CommitReport,
    Engine,
    MemoryTag,
    Progress,
    PullVersion,
    StageReport,
    TrainerOrder,
    WeightUpdate,
)
from agentloop.errors import AgentLoopError, EngineLost, EnginePaused, InvalidRequest
from agentloop.images import Image
from agentloop.observability.metrics import MetricSample
from agentloop.types import FinishReason, GenerateRequest, Generation, Load
from agentloop.values.capabilities import Feature
from agentloop.values.codec import decode
from agentloop_servers.cluster.host import software_of_process
from agentloop_servers.private_http.fencing import CommandKind, FencingGuard
from agentloop_servers.private_http.server import PrivateServer, answer, token_of
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.replica.protocol import (
    FRAMES,
    PROBE_ID,
    ControlAnswer,
    EngineState,
    PauseOrder,
    error_frame,
    frame,
    request_of,
)

LOAD_AGE_S = 0.05  # maximum age of the load in a response

PULL = "store-pull"  # its name among the weight sources of `agentloop.parts`
Located = Callable[[WeightUpdate], Awaitable[WeightUpdate]]
"""Makes an update's published version available as a local folder; returns other updates unchanged."""

WORKER_PATHS = frozenset({"/generate", "/stream", "/abort", "/image_tokens"})


@dataclass(frozen=True, slots=True)
class _ControlCall:
    """A control route: its function, the type of its body, and its fencing kind if it is an order."""

    ask: Callable[..., Awaitable[object]]
    body: Any = None  # the body's type; None: no body
    kind: CommandKind | None = None


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The timeouts and limits of a replica, and its engine pool."""

    heartbeat_interval_s: float = 1.0
    # Without a step while requests run; a long prefill takes many steps, each of a bounded chunk
    stall_timeout_s: float = 60.0
    first_step_timeout_s: float = 300.0  # the same before the engine's first step, when it may compile for minutes
    max_pause_s: float = 600.0  # pause duration after which new requests are refused instead of held
    entry: str = ""  # the name of its engine pool
    node_id: str = ""  # Ray's id of its node
    withheld: frozenset[Feature] = frozenset()  # engine features that the service does not use


class StallWatch:
    """Detects an engine that has requests and takes no step. Synchronous; callers pass the time."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._num_steps = 0
        self._moved_at: float | None = None
        self._observed_at: float | None = None

    def observe(self, load: Load, now: float, *, is_frozen: bool) -> float | None:
        """Return the seconds without a step if they exceed the limit, otherwise None.

        Call it every `heartbeat_interval_s`. After a late call the count starts again, because this process was
        blocked.
        """
        was_still = (
            self._observed_at is not None and now - self._observed_at > 3 * self._config.heartbeat_interval_s + 1
        )
        self._observed_at = now
        is_idle = is_frozen or load.num_running + load.num_waiting == 0
        if self._moved_at is None or is_idle or was_still or load.num_steps != self._num_steps:
            self._moved_at, self._num_steps = now, load.num_steps
            return None
        config = self._config
        bound_s = config.stall_timeout_s if self._num_steps > 0 else config.first_step_timeout_s
        return now - self._moved_at if now - self._moved_at >= bound_s else None


class DataPlaneServer(PrivateServer):
    """The HTTP server of one engine, on 127.0.0.1 or the given host. `url` is set by `start`."""

    num_answered: int  # generations that callers received
    num_prompt_tokens: int  # prompt tokens of all finished generations
    num_cached_tokens: int  # the cached part of these
    refuses_paused: bool  # the engine is paused for so long that new requests are refused

    def __init__(
        self,
        engine: Engine,
        replica_id: str,
        trust: Trust,
        host: str = "127.0.0.1",
        located: Located | None = None,
    ) -> None:
        self._engine = engine
        self._located = located
        self._replica_id = replica_id
        self._fencing = FencingGuard()
        self.num_answered = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.refuses_paused = False
        self.uniform = UniformLogprobWatch()
        self._load = Load()
        self._load_at: float | None = None
        routes = [
            web.post("/generate", self._generate),
            web.post("/stream", self._stream),
            *(web.post(path, self._handler(call)) for path, call in self._control_calls().items()),
        ]
        super().__init__(replica_id, routes, trust, host, worker_paths=WORKER_PATHS)

    def _control_calls(self) -> dict[str, _ControlCall]:
        engine = self._engine

        async def pause(order: PauseOrder) -> None:
            await engine.pause(order.mode, order.kv_policy)

        async def commit(order: tuple[int, bool]) -> CommitReport:
            version, resumes = order
            return await engine.commit(version, resumes=resumes)

        async def stage(update: WeightUpdate) -> StageReport:
            if update.published is None or self._located is None:
                return await engine.stage(update)
            return replace(await engine.stage(await self._located(update)), transport="published")

        async def follow_trainer(order: TrainerOrder) -> None:
            if isinstance(order, PullVersion):
                pull = parts.load(parts.WEIGHT_SOURCES, PULL, param="store")
                await cast(Callable[[PullVersion], Awaitable[None]], pull)(order)
            else:
                await engine.follow_trainer(order)

        async def drain_pinned(asked: tuple[int, float]) -> None:
            await engine.drain_pinned(*asked)

        return {
            "/state": _ControlCall(_nothing),
            "/fence": _ControlCall(self._newest_epoch),
            "/health": _ControlCall(engine.check_health),
            "/abort": _ControlCall(engine.abort, str),
            "/offer": _ControlCall(engine.offer),
            "/image_tokens": _ControlCall(engine.image_tokens, tuple[Image, ...]),
            "/drain_pinned": _ControlCall(drain_pinned, tuple[int, float]),
            "/follow_trainer": _ControlCall(follow_trainer, TrainerOrder),
            "/stage": _ControlCall(stage, WeightUpdate, CommandKind.STAGE),
            "/load_adapter": _ControlCall(engine.load_adapter, Adapter, CommandKind.STAGE),
            "/unload_adapter": _ControlCall(engine.unload_adapter, str, CommandKind.STAGE),
            "/pause": _ControlCall(pause, PauseOrder, CommandKind.FREEZE),
            "/resume": _ControlCall(engine.resume, None, CommandKind.FREEZE),
            "/commit": _ControlCall(commit, tuple[int, bool], CommandKind.FREEZE),
            "/sleep": _ControlCall(engine.sleep, int, CommandKind.FREEZE),
            "/wake": _ControlCall(engine.wake, frozenset[MemoryTag], CommandKind.FREEZE),
        }

    def _handler(self, call: _ControlCall) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = () if call.body is None else (decode(await request.read(), call.body),)
            if call.kind is not None:  # directly before the engine acts, without an await in between
                self._fencing.admit(call.kind, token_of(request))
            value = await call.ask(*body)
            return answer(ControlAnswer(value, self._engine_state()))

        return handle

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wanted = request_of(await request.read())
        self._check_pause()
        async with _FrameAnswer(request) as frames:
            try:
                generation = self._stamped(wanted, await self._engine.generate(wanted, frames.tell))
            except AgentLoopError as error:
                if not frames.is_begun:
                    raise
                return await frames.end(error_frame(orjson.dumps(error.to_wire())))
            return await frames.end(frame(generation)) if frames.is_begun else answer(generation)

    def _check_pause(self) -> None:
        if self.refuses_paused:
            raise EnginePaused(
                "the engine is paused for longer than max_pause_s, so new requests are refused: retry later"
            )

    def _stamped(self, wanted: GenerateRequest, generation: Generation) -> Generation:
        self.num_prompt_tokens += len(wanted.token_ids)
        self.num_cached_tokens += generation.cached_tokens
        is_probe = generation.request_id.startswith(PROBE_ID)
        self.num_answered += not is_probe and generation.finish_reason is not FinishReason.ABORT
        if wanted.sampling.score_from is None:  # scored tokens may be as unlikely as uniform ones
            self.uniform.see(generation, self._engine.info.vocab_size)
        load = self._recent_load()
        engine, quantization = self._engine.info.name, self._engine.info.quantization
        return replace(generation, replica_id=self._replica_id, engine=engine, quantization=quantization, load=load)

    def _recent_load(self) -> Load:
        """Return the engine's load, at most `LOAD_AGE_S` old, because the engine sums it over all requests."""
        now, engine = asyncio.get_running_loop().time(), self._engine
        is_old = self._load_at is None or now - self._load_at > LOAD_AGE_S
        if is_old or self._load.weight_version != engine.weight_version:
            self._load, self._load_at = engine.load(), now
        return self._load

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        wanted = request_of(await request.read())
        self._check_pause()
        async with _FrameAnswer(request) as frames:
            last = b""
            try:
                # Close the generator at once: if the caller has left, the engine must not sample until garbage
                # collection.
                async with aclosing(self._engine.stream(wanted, frames.tell)) as pieces:  # type: ignore[type-var] # engines write generators
                    async for piece in pieces:
                        if isinstance(piece, Generation):  # the last piece
                            last = frame(self._stamped(wanted, piece))
                        else:
                            await frames.write(frame(piece))
            except AgentLoopError as error:
                if not frames.is_begun:  # an error before the first token is an ordinary error response
                    raise
                last = error_frame(orjson.dumps(error.to_wire()))
            return await frames.end(last)

    async def _newest_epoch(self) -> int:
        return self._fencing.newest_epoch

    def _engine_state(self) -> EngineState:
        engine = self._engine
        return EngineState(
            engine.info, engine.weight_version, engine.is_paused, engine.is_usable, engine.asleep, engine.load()
        )


class _FrameAnswer:
    """A response in frames. Status and headers go out with the first frame, so an earlier error can be a response.

    Use it as a context manager around the request: leaving it ends the progress reports.
    """

    def __init__(self, request: web.Request) -> None:
        self.is_begun = False
        self._request = request
        self._stream = web.StreamResponse()
        self._stream.content_type = FRAMES
        self._writing = asyncio.Lock()
        # Pending reports; bounded by the request's tokens and one report without tokens
        self._told: list[bytes] = []
        self._telling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _FrameAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling is not None and not self._telling.done():
            self._telling.cancel()
            await asyncio.wait([self._telling])

    def tell(self, progress: Progress) -> None:
        """Send a report in the background. A report without tokens is dropped while another one is pending."""
        if self._told and not progress.tokens.token_ids:
            return
        self.is_begun = True
        self._told.append(frame(progress))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._write_told(), name="progress")

    async def write(self, data: bytes) -> None:
        """Send encoded frames."""
        self.is_begun = True
        async with self._writing:
            if not self._stream.prepared:
                await self._stream.prepare(self._request)
            await self._stream.write(data)

    async def end(self, data: bytes) -> web.StreamResponse:
        """Send pending reports, then the last frames and the end of the response in one write."""
        if self._telling is not None:
            await asyncio.wait([self._telling])
        if not self._stream.prepared:
            await self._stream.prepare(self._request)
        await self._stream.write_eof(data)
        return self._stream

    async def _write_told(self) -> None:
        with contextlib.suppress(ConnectionError):  # the caller has left, and the request's handler is cancelled
            while self._told:
                data, self._told = b"".join(self._told), []
                await self.write(data)


async def _nothing() -> None:
    """Do nothing: the response has the engine's state."""


class Replica:
    """Owns one engine from start to end, and its membership in the fleet."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        coordinator: ReplicaPort,
        trust: Trust,
        host: str,
        *,
        config: ReplicaConfig = ReplicaConfig(),
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
        located: Located | None = None,
    ) -> None:
        """The engine starts within the context `starting()`, which limits it.

        `located` resolves published versions.
        """
        self.replica_id = replica_id
        self._engine = engine
        self._coordinator = coordinator
        self._config = config
        self._starting = starting
        self._server = DataPlaneServer(engine, replica_id, trust, host, located)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_known = False  # the coordinator knows this replica
        self._hung: str | None = None
        self._was_noise = False  # the last report had broken weights
        self._log = structlog.get_logger("replica").bind(replica=replica_id)

    @property
    def url(self) -> str:
        return self._server.url

    def gauges(self) -> tuple[MetricSample, ...]:
        """Return this process's metrics of its engine."""
        name, server = self.replica_id, self._server
        return (
            MetricSample("replica_prompt_tokens_total", (name,), server.num_prompt_tokens),
            MetricSample("replica_cached_prompt_tokens_total", (name,), server.num_cached_tokens),
        )

    async def start(self) -> None:
        """Wait for the permission to allocate memory, load the engine, open the port, and join the fleet.

        Raises InvalidRequest if the replica's software differs from the service's.
        """
        while True:
            if await self._may_start():
                break
            await asyncio.sleep(self._config.heartbeat_interval_s)
        asking = asyncio.create_task(self._keep_asking(), name=f"start-{self.replica_id}")
        try:
            with self._starting():
                await self._engine.start()
            await self._server.start()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        self._tasks = [
            asyncio.create_task(self._heartbeat_for_ever(), name=f"heartbeat-{self.replica_id}"),
            asyncio.create_task(self._watch(), name=f"watch-{self.replica_id}"),
        ]
        self._log.info("replica_started", url=self.url, version=self._engine.weight_version)

    async def check_health(self) -> None:
        """Raise EngineLost if the engine is dead or hung, or a task has ended. Serve then restarts the process."""
        if self._hung is not None:
            raise EngineLost(self._hung)
        await self._engine.check_health()
        for task in self._tasks:
            if task.done():
                raise EngineLost(
                    f"replica {self.replica_id} is unhealthy, because its task {task.get_name()} has ended"
                )

    async def close(self) -> None:
        """Leave the fleet and release everything. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave("it shut down")
        await self._server.close()
        await self._engine.close()

    # Calls to the coordinator

    async def _may_start(self) -> bool:
        try:
            return await self._coordinator.starting(self.replica_id, software_of_process())
        except InvalidRequest:
            raise
        except AgentLoopError as error:
            self._log.warning("start_not_allowed", code=error.code, error=str(error))
            return False

    async def _keep_asking(self) -> None:
        """Repeat the start request while the engine loads, so that the coordinator keeps it."""
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            await self._may_start()

    async def _heartbeat_for_ever(self) -> None:
        while True:
            try:
                if self._is_known:
                    self._is_known = await self._coordinator.heartbeat(self.replica_id, self._report())
                if not self._is_known:
                    await self._coordinator.register(self._registration())
                    self._is_known = True
            except AgentLoopError as error:
                self._log.warning("heartbeat_failed", code=error.code, error=str(error))
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def _leave(self, reason: str) -> None:
        """Deregister. If that fails, the coordinator detects the missing heartbeats."""
        try:
            await asyncio.wait_for(self._coordinator.deregister(self.replica_id, reason), timeout=2.0)
        except (AgentLoopError, TimeoutError) as error:
            self._log.debug("deregister_failed", error=str(error))

    def _registration(self) -> ReplicaRegistration:
        engine, config = self._engine, self._config
        info = replace(engine.info, features=engine.info.features - config.withheld)
        return ReplicaRegistration(
            self.replica_id,
            self.url,
            info,
            engine.weight_version,
            engine.is_paused,
            engine.asleep,
            config.entry,
            config.node_id,
            engine.weight_digest,
        )

    def _report(self) -> ReplicaReport:
        engine, num_answered, is_noise = self._engine, self._server.num_answered, self._server.uniform.is_uniform
        if is_noise and not self._was_noise:
            self._log.warning("samples_noise", version=engine.weight_version)
        self._was_noise = is_noise
        return ReplicaReport(
            engine.load(),
            engine.is_usable,
            engine.is_paused,
            engine.asleep,
            num_answered,
            is_noise,
            self._server.gate.refused.total(),
        )

    # Detection of a hung engine

    async def _watch(self) -> None:
        """Detect a hung engine, and a pause that lasts too long."""
        loop, engine, config = asyncio.get_running_loop(), self._engine, self._config
        stall, paused_at = StallWatch(config), None
        while self._hung is None:
            await asyncio.sleep(config.heartbeat_interval_s)
            now, is_frozen = loop.time(), engine.is_paused or bool(engine.asleep)
            paused_at = (now if paused_at is None else paused_at) if is_frozen else None
            self._server.refuses_paused = paused_at is not None and now - paused_at >= config.max_pause_s
            stalled_s = stall.observe(engine.load(), now, is_frozen=is_frozen)
            if stalled_s is not None:
                await self._end_hung(stalled_s)
        await asyncio.Event().wait()  # until `close`: an ended watch would fail the health check with another error

    async def _end_hung(self, stalled_s: float) -> None:
        """Fail the requests of a hung engine, and leave the fleet."""
        load = self._engine.load()
        self._hung = f"the engine is hung: no step for {stalled_s:.0f} s with {load.num_running} requests running"
        self._log.error("engine_hangs", stalled_s=round(stalled_s, 1), num_running=load.num_running)
        heartbeats = self._tasks[0]
        heartbeats.cancel()
        await asyncio.wait([heartbeats])
        await self._leave(self._hung)
        try:
            await self._engine.close()
        except Exception as error:  # its process may not react any more; Serve ends this process
            self._log.error("engine_not_closed", error=repr(error))
