"""The client of private ports: a connection pool per process. Every failure is raised as one of our errors."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast
from weakref import WeakValueDictionary

import aiohttp
import orjson
from aiohappyeyeballs import AddrInfoType
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from agentloop.concurrency.aio import awake_timeout
from agentloop.errors import AgentLoopError, from_wire
from agentloop_servers.net.tcp import keep_alive
from agentloop_servers.private_http.server import Misdirected
from agentloop_servers.private_http.trust import Trust, prove

CONNECT_TIMEOUT_S = 5.0
KEPT_IDLE_S = 300.0  # seconds; shorter than the servers' limit, but tools run for minutes before all turns return
# Connections to one server that may open at a time; other requests wait for one of them or for a free one
MAX_OPENING = 64
# Larger bodies are sent in chunks, because aiohttp writes bytes at once and warns about it
LARGE_BODY_BYTES = 1 << 20
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NOT_SENT = ("accept", "accept-encoding", "content-type", "user-agent")


class PrivateHttp:
    """The connections of one process to private ports."""

    def __init__(
        self,
        trust: Trust,
        *,
        lost: type[AgentLoopError],
        late: type[AgentLoopError],
        unreachable: type[AgentLoopError] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`lost` is raised if a peer hangs up or sends nothing, `late` if its response takes too long.

        `unreachable` (default: `lost`) is raised if the connection failed, so that the request was not received.
        """
        self._trust = trust
        self._raised = _Raised(lost, late, lost if unreachable is None else unreachable)
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    def open(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        silence_s: float | None = None,
    ) -> OpenAnswer:
        """Send a request; enter the result to get its response. Call on the event loop that uses it.

        A peer that sends nothing for `silence_s` counts as lost.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=Connector(self._trust, self._connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_NOT_SENT,
                auto_decompress=False,
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_read=silence_s)
        data = io.BytesIO(body) if body is not None and len(body) > LARGE_BODY_BYTES else body
        request = self._session.request(method, url, data=data, headers=headers, timeout=timeout)
        return OpenAnswer(request, url, self._raised)

    async def close(self) -> None:
        """Close the pool. Idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


@dataclass(frozen=True, slots=True)
class _Raised:
    """The error types for transport failures."""

    lost: type[AgentLoopError]
    late: type[AgentLoopError]
    unreachable: type[AgentLoopError]


class OpenAnswer:
    """A request as a context manager. Transport failures are raised as our errors."""

    def __init__(self, context: aiohttp.client._RequestContextManager, url: str, raised: _Raised) -> None:
        self._context = context
        self._url = url
        self._raised = raised

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            answer = await self._context.__aenter__()
            if answer.status == 200:
                return answer
            body = await answer.read()
            await self._context.__aexit__(None, None, None)
        except Exception as error:
            raise self._ours(error) from error
        envelope = _envelope(body)
        if envelope is None:
            foreign = aiohttp.ClientError(f"unexpected HTTP {answer.status}, not from an agentloop server")
            raise self._raised.lost(f"{self._url}: {foreign}") from foreign
        refusal = from_wire(envelope, answer.status)
        if isinstance(refusal, Misdirected):
            raise self._raised.unreachable(f"{self._url}: {refusal}") from refusal
        raise refusal

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._context.__aexit__(kind, error, None)
        if isinstance(error, aiohttp.ClientError | TimeoutError | asyncio.IncompleteReadError):
            raise self._ours(error) from error

    def _ours(self, error: Exception) -> Exception:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return self._raised.unreachable(f"{self._url}: could not connect within the timeout")
        if isinstance(error, aiohttp.SocketTimeoutError):
            return self._raised.lost(f"{self._url}: the peer stopped sending data")
        if isinstance(error, TimeoutError):
            return self._raised.late(f"{self._url}: no response within the timeout")
        if isinstance(error, aiohttp.ClientError | asyncio.IncompleteReadError | OSError):
            is_unsent = isinstance(error, aiohttp.ClientConnectorError)
            kind = self._raised.unreachable if is_unsent else self._raised.lost
            return kind(f"{self._url}: {type(error).__name__}: {error}")
        return error


def _envelope(body: bytes) -> Any:
    """Return the error object in a response; None if the response is not from one of our servers."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("error"), dict) else None


class Connector(aiohttp.TCPConnector):
    """A connection pool without a total limit: its user limits the requests in flight.

    Few connections open at a time, so that a burst does not cause a flood of handshakes; a free connection is used
    first. Time while this process is blocked does not count for the connect timeout. With `trust`, each server is
    authenticated.
    """

    def __init__(self, trust: Trust | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        certificates = None if trust is None else trust.certificates
        tls = True if certificates is None else certificates.client()
        super().__init__(limit=0, keepalive_timeout=KEPT_IDLE_S, socket_factory=_client_socket, ssl=tls)
        self._trust = trust
        self._connect_timeout_s = connect_timeout_s
        # Server -> limit of opening connections
        self._opening: WeakValueDictionary[object, asyncio.Semaphore] = WeakValueDictionary()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return a free connection, or wait to open a new one."""
        gate = self._opening.get(req.connection_key)
        if gate is None:
            self._opening[req.connection_key] = gate = asyncio.Semaphore(MAX_OPENING)
        async with gate:
            return await super().connect(req, traces, timeout)

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with awake_timeout(self._connect_timeout_s):
            protocol = await super()._create_connection(req, traces, timeout)
            if self._trust is not None:
                await self._prove(self._trust, protocol, req)
            return protocol

    @staticmethod
    async def _prove(trust: Trust, protocol: ResponseHandler, request: aiohttp.ClientRequest) -> None:
        # Uvloop's transport does not inherit from asyncio.Transport
        transport = cast(asyncio.Transport, protocol.transport)
        try:
            await prove(transport, trust, request.url.raw_authority)
        except BaseException as error:
            transport.abort()
            if isinstance(error, OSError):  # nothing of the request was sent
                raise aiohttp.ClientConnectorError(request.connection_key, error) from error
            raise
        transport.set_protocol(protocol)


def _client_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    keep_alive(made)
    return made
