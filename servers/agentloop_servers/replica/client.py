"""The data plane's client: an engine behind its replica's private HTTP port, as an Engine again.

A call through a Serve handle costs ten times as much, so tokens and weight-update verbs both come this way. The
engine is asked for its final output unless a caller streams. Every pause, resume, stage, commit, sleep and wake
carries an order number: one that arrives late, or twice, is refused over there (`dataplane_wire.Fence`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import aiohttp
import orjson

from agentloop.codec import decode, encode
from agentloop.engine import (
    ALL_MEMORY,
    CommitReport,
    Delta,
    EngineInfo,
    KVEvent,
    MemoryTag,
    PushSource,
    StageReport,
    WeightUpdate,
)
from agentloop.errors import DeadlineExceeded, EngineLost, InvariantBroken, from_wire
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop_servers.replica.protocol import (
    EPOCH_HEADER,
    ERROR_FRAME,
    FRAME,
    FRAME_KINDS,
    ORDER_HEADER,
    SECRET_HEADER,
    CommitAnswer,
    EngineState,
    OfferAnswer,
    OrderNumber,
    PauseOrder,
    StageAnswer,
)

T = TypeVar("T")

CONTROL_TIMEOUT_S = 600.0  # a stage or commit of large weights; the caller's own deadline is shorter
CONNECT_TIMEOUT_S = 5.0
GRACE_S = 10.0  # beyond a request's own timeout, in which the replica reports it itself
_NOT_SENT = ("accept", "accept-encoding", "content-type", "user-agent")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RemoteEngine:
    """An engine behind a DataPlaneServer, as an Engine. Properties show the state at the last control answer."""

    def __init__(
        self, url: str, secret: str, session: aiohttp.ClientSession, next_order: Callable[[], OrderNumber]
    ) -> None:
        self.url = url
        self._headers = {SECRET_HEADER: secret}
        self._session = session
        self._next_order = next_order
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

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        return self.state.asleep

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
        await self._order("/pause", PauseOrder(mode, kv_policy))

    async def resume(self) -> None:
        await self._order("/resume")

    async def stage(self, update: WeightUpdate) -> StageReport:
        answer = await self._ask("POST", "/stage", StageAnswer, update, self._numbered())
        self._state = answer.state
        return answer.report

    async def commit(self, version: int) -> CommitReport:
        answer = await self._ask("POST", "/commit", CommitAnswer, version, self._numbered())
        self._state = answer.state
        return answer.report

    async def offer(self) -> PushSource | None:
        answer = await self._ask("POST", "/offer", OfferAnswer)
        self._state = answer.state
        return answer.source

    async def sleep(self, level: int) -> None:
        await self._order("/sleep", level)

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        await self._order("/wake", tags)

    async def check_health(self) -> None:
        await self._control("GET", "/health")

    async def _order(self, path: str, value: object = None) -> None:
        """A control call that is refused if a newer one was there before it."""
        self._state = await self._ask("POST", path, EngineState, value, self._numbered())

    async def _control(self, method: str, path: str, value: object = None) -> None:
        self._state = await self._ask(method, path, EngineState, value)

    def _numbered(self) -> dict[str, str]:
        order = self._next_order()
        return {EPOCH_HEADER: str(order.epoch), ORDER_HEADER: str(order.number)}

    async def _ask(
        self, method: str, path: str, kind: type[T], value: object = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> T:
        body = None if value is None else encode(value)
        return decode(await self._call(method, path, body, CONTROL_TIMEOUT_S, headers), kind)

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> bytes:
        async with self._open(method, path, body, timeout_s, headers) as answer:
            return await answer.read()

    def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> _Opened:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {**self._headers, **headers}
        request = self._session.request(method, self.url + path, data=body, headers=headers, timeout=timeout)
        return _Opened(request, f"{self.url}{path}")

    async def _frames(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> AsyncIterator[Delta | Generation | KVEvent]:
        async with self._open(method, path, body, timeout_s) as answer:
            while True:
                try:
                    kind, length = FRAME.unpack(await answer.content.readexactly(FRAME.size))
                except asyncio.IncompleteReadError as error:
                    if error.partial:
                        raise EngineLost(f"{self.url} cut a stream within a frame") from error
                    return
                data = await answer.content.readexactly(length)
                if kind == ERROR_FRAME:
                    raise from_wire(orjson.loads(data), 500)
                yield decode(data, FRAME_KINDS[kind])


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
    """The remote engines of one process, one a URL, over one connection pool, and the numbers of its orders."""

    def __init__(self, secret: str, epoch: int | None = None) -> None:
        """`epoch` is higher than that of any process before whose orders this one takes over; by default it is
        the time."""
        self._secret = secret
        self._epoch = time.time_ns() if epoch is None else epoch
        self._num_orders = 0
        self._session: aiohttp.ClientSession | None = None
        self._engines: dict[str, RemoteEngine] = {}

    def connect(self, url: str) -> RemoteEngine:
        """The engine at `url`; nothing is sent yet. Call on the event loop that will use it."""
        if self._session is None:
            # limit=0: a worker's capacity bounds what is in flight, not the pool.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_NOT_SENT,
                auto_decompress=False,
            )
        engine = self._engines.get(url)
        if engine is None:
            engine = RemoteEngine(url, self._secret, self._session, self._next_order)
            self._engines[url] = engine
        return engine

    async def close(self) -> None:
        """Close the pool. Idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            self._engines.clear()
            await session.close()

    def _next_order(self) -> OrderNumber:
        self._num_orders += 1
        return OrderNumber(self._epoch, self._num_orders)
