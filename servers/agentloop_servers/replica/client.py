"""The client of a replica's private HTTP port, for tokens and control.

A call through a Serve handle costs ten times as much, so tokens and weight updates use this port. Every pause,
resume, stage, commit, sleep and wake has a fencing token: the replica refuses one that arrives late or twice
(`FencingGuard`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import aiohttp
import orjson

from agentloop.engine.interface import (
    ALL_MEMORY,
    Adapter,
    CommitReport,
    Delta,
    EngineInfo,
    MemoryTag,
    OnProgress,
    Progress,
    PushSource,
    StageReport,
    TrainerOrder,
    WeightUpdate,
)
from agentloop.errors import DeadlineExceeded, EngineLost, EngineUnreachable, InvariantBroken, from_wire
from agentloop.images import Image, ImageTokens
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode, SamplingParams
from agentloop.values.codec import decode, encode
from agentloop_servers.private_http.client import NO_HEADERS, PrivateHttp
from agentloop_servers.private_http.fencing import Fenced, NumberedCommands
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.replica.protocol import (
    ERROR_FRAME,
    FRAME,
    FRAME_KINDS,
    FRAMES,
    PROBE_ID,
    ControlAnswer,
    EngineState,
    PauseOrder,
    request_body,
)

T = TypeVar("T")

CONTROL_TIMEOUT_S = 600.0
ORDER_TIMEOUT_S = 7200.0
"""The timeout of an order; its caller has a shorter one for each step (`fleet/replica_steps.py`)."""
PROBE_TIMEOUT_S = 10.0
GRACE_S = 10.0  # in addition to a request's own timeout, which the replica enforces
SILENCE_S = 15.0  # several Progress frames are missing, so the replica, its host or the network failed


class RemoteEngine:
    """The engine of a DataPlaneServer, as a TokenEngine and an EngineControl.

    Its properties have the values of the last control response.
    """

    def __init__(self, url: str, http: PrivateHttp, commands: NumberedCommands) -> None:
        self.url = url
        self._http = http
        self._commands = commands
        self._state: EngineState | None = None

    @property
    def state(self) -> EngineState:
        """The engine's state in the last control response. Raises InvariantBroken before the first one."""
        if self._state is None:
            raise InvariantBroken(f"no control call was made to {self.url} yet: call start() first")
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

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        return self.state.asleep

    def load(self) -> Load:
        return self.state.load

    async def start(self) -> None:
        """Read the engine's state; its replica has already started it."""
        await self._control("/state", ControlAnswer[None])

    async def close(self) -> None:
        """No effect: EngineClients owns the connections, and the replica owns the engine."""

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        return await self._control("/image_tokens", ControlAnswer[tuple[ImageTokens, ...]], tuple(images))

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """See `TokenEngine.generate`. Raises EngineLost if the replica sends nothing for `SILENCE_S`."""
        async with self._http.open(
            "POST", self.url + "/generate", request_body(request), silence_s=SILENCE_S
        ) as answer:
            if answer.content_type != FRAMES:
                return decode(await answer.read(), Generation)
            found = None
            async with aclosing(self._pieces(answer, request, on_progress)) as pieces:
                # Read to the end: a connection is reused only if its response was read completely.
                async for piece in pieces:
                    found = piece if isinstance(piece, Generation) else found
        if found is None:
            raise EngineLost(f"{self.url} ended its response without a Generation frame")
        return found

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        """See `TokenEngine.stream`. Raises EngineLost if the replica sends nothing for `SILENCE_S`."""
        async with (
            self._http.open("POST", self.url + "/stream", request_body(request), silence_s=SILENCE_S) as answer,
            aclosing(self._pieces(answer, request, on_progress)) as pieces,
        ):
            async for piece in pieces:
                yield piece

    async def _pieces(
        self, answer: aiohttp.ClientResponse, request: GenerateRequest, on_progress: OnProgress | None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Read a request's frames and pass Progress frames to `on_progress`.

        Raises DeadlineExceeded if the request runs longer than its timeout and unavailable time.
        """
        loop = asyncio.get_running_loop()
        late_at = loop.time() + request.timeout_s + GRACE_S
        async with aclosing(self._frames(answer)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Delta | Generation):
                    yield piece
                    continue
                if on_progress is not None:
                    on_progress(piece)
                if loop.time() > late_at + piece.unavailable_s:
                    raise DeadlineExceeded(
                        f"{self.url}: request {request.request_id} did not end within its timeout"
                    )

    async def abort(self, request_id: str) -> None:
        await self._control("/abort", ControlAnswer[None], request_id)

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        await self._order("/pause", ControlAnswer[None], PauseOrder(mode, kv_policy))

    async def resume(self) -> float:
        return await self._order("/resume", ControlAnswer[float])

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        await self._control("/drain_pinned", ControlAnswer[None], (version, grace_s))

    async def follow_trainer(self, order: TrainerOrder) -> None:
        await self._control("/follow_trainer", ControlAnswer[None], order, timeout_s=ORDER_TIMEOUT_S)

    async def stage(self, update: WeightUpdate) -> StageReport:
        return await self._order("/stage", ControlAnswer[StageReport], update)

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        return await self._order("/commit", ControlAnswer[CommitReport], (version, resumes))

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        return await self._order("/load_adapter", ControlAnswer[StageReport], adapter)

    async def unload_adapter(self, name: str) -> None:
        await self._order("/unload_adapter", ControlAnswer[None], name)

    async def offer(self) -> PushSource | None:
        return await self._control("/offer", ControlAnswer[PushSource | None])

    async def sleep(self, level: int) -> None:
        await self._order("/sleep", ControlAnswer[None], level)

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        await self._order("/wake", ControlAnswer[None], tags)

    async def check_health(self) -> None:
        await self._control("/health", ControlAnswer[None])

    async def _order(self, path: str, kind: type[ControlAnswer[T]], value: object = None) -> T:
        """Make a control call that the replica refuses if a newer one arrived before."""
        try:
            return await self._control(path, kind, value, self._commands.next_headers(), ORDER_TIMEOUT_S)
        # The replica may have seen a higher epoch of a lost counter; then a new epoch lets this order pass.
        except Fenced:
            if not await self._commands.outrun(await self._control("/fence", ControlAnswer[int])):
                raise
        return await self._control(path, kind, value, self._commands.next_headers(), ORDER_TIMEOUT_S)

    async def _control(
        self,
        path: str,
        kind: type[ControlAnswer[T]],
        value: object = None,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> T:
        body = None if value is None else encode(value)
        answer = decode(await self._call(path, body, timeout_s, headers), kind)
        self._state = answer.state
        return answer.value

    async def _call(
        self, path: str, body: bytes | None, timeout_s: float, headers: Mapping[str, str] = NO_HEADERS
    ) -> bytes:
        async with self._http.open("POST", self.url + path, body, timeout_s, headers) as answer:
            return await answer.read()

    async def _frames(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[Delta | Generation | Progress, None]:
        data = b""
        async for part in answer.content.iter_any():
            data, start = data + part if data else part, 0
            while len(data) >= start + FRAME.size:
                kind, length = FRAME.unpack_from(data, start)
                body, end = start + FRAME.size, start + FRAME.size + length
                if len(data) < end:
                    break
                start = end
                if kind == ERROR_FRAME:
                    raise from_wire(orjson.loads(data[body:end]), 500)
                yield decode(data[body:end], FRAME_KINDS[kind])
            data = data[start:]
        if data:
            raise EngineLost(f"{self.url} closed a stream within a frame")


class EngineClients:
    """The remote engines of one process by URL, with one connection pool and one command counter."""

    def __init__(
        self, trust: Trust, epoch: int = 0, raise_epoch: Callable[[int], Awaitable[int]] | None = None
    ) -> None:
        """`epoch` and `raise_epoch` are those of `NumberedCommands`.

        Only the coordinator passes them, because only it sends commands such as pause and commit.
        """
        self._http = PrivateHttp(trust, lost=EngineLost, late=DeadlineExceeded, unreachable=EngineUnreachable)
        self._commands = NumberedCommands(epoch, raise_epoch)
        self._engines: dict[str, RemoteEngine] = {}

    def connect(self, url: str) -> RemoteEngine:
        """Return the engine at `url`. Sends nothing yet."""
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = RemoteEngine(url, self._http, self._commands)
        return engine

    async def probe(self, url: str) -> None:
        """Sample one token on the engine at `url`. Raises the error if that fails."""
        name, sampling = f"{PROBE_ID}{uuid.uuid4().hex}", SamplingParams(max_tokens=1)
        await self.connect(url).generate(GenerateRequest(name, (0,), sampling, PROBE_TIMEOUT_S))

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._engines.clear()
        await self._http.close()
