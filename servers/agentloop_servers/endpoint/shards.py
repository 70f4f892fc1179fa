"""The endpoint's processes as shards: one process holds a session, and the others forward its requests to it.

Each process holds one shard, by a file lock. The coordinator keeps the table of the processes' private URLs; each
process announces its URL periodically, so that a restarted coordinator or process is known soon. The holder follows
from the session id: an id that the service generated contains its process's number. A client's id maps to one of
the processes on one host, or, on several hosts, to a slot whose holder the table names
(`coordinator/endpoint_places.py`). If sessions are in a database, the table also names lost processes' successors.

A request is forwarded at most once and the response is returned byte for byte. If the client disconnects or stops
reading, the connection to the holder is closed, and the holder cancels the call.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import structlog
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from agentloop.api.coordinator import EndpointTable, FrontPort
from agentloop.api.owners import shown_id
from agentloop.api.requests import MAX_TIMEOUT_S
from agentloop.errors import (
    AgentLoopError,
    InvalidRequest,
    Overloaded,
    ServiceUnavailable,
    SessionLost,
    SessionNotFound,
)
from agentloop_servers.http.guard import envelope_of, error_response
from agentloop_servers.http.responses import send_in_time, unless_client_leaves
from agentloop_servers.private_http.client import Connector
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.run.locks import FileLock, take_lock, taken_in_time

HOP_HEADER = "x-agentloop-hop"
ANNOUNCE_S = 2.0
FRESH_S = 10.0
"""Maximum age at which a table is certainly valid: well below the silence after which slots move."""

HOLDER_WAIT_S = 5.0  # a holder may be restarting; clients retry in addition
SEND_TIMEOUT_S = 30.0  # a client may leave sent data unread for so long
# The holder keeps each call's own deadline, and Serve ends a holder that hangs.
READ_TIMEOUT_S = MAX_TIMEOUT_S + 60.0
MAX_PASSED_ON = 4096  # concurrent requests; the next one gets 429

_RETRY_S = 0.2
_NOT_FORWARDED = frozenset(
    b"connection content-length expect keep-alive proxy-connection te trailer transfer-encoding upgrade "
    b"x-agentloop-hop x-request-id".split()
)
_NOT_ANSWERED = frozenset(b"connection date keep-alive server trailer transfer-encoding".split())
_MADE_ID = re.compile("s-([0-9a-f]{1,6})-[0-9a-f]{20}")
_NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")
LOCK_TIMEOUT_S = 60.0

_log = structlog.stdlib.get_logger(__name__)


async def take_shard_lock(
    run_dir: Path, numbers: Sequence[int], *, first: int = 0, timeout_s: float = LOCK_TIMEOUT_S
) -> tuple[int, FileLock]:
    """Lock one of the shards `numbers`, preferably the one at `first`; returns its number and the lock.

    Only the lock's holder writes the shard's sessions. Ray Serve's rank cannot be used as the number: while a hung
    process is replaced, the new one's rank may be `num_shards`. The lock file contains the port of the shard's last
    process; the next one listens there, so that URLs held by agents stay valid. Raises ServiceUnavailable if no
    shard becomes free in time.
    """

    def take() -> tuple[int, FileLock] | None:
        for offset in range(len(numbers)):
            number = numbers[(first + offset) % len(numbers)]
            lock = take_lock(run_dir / f"sessions-{number}.lock")
            if lock is not None:
                return number, lock
        return None

    shard = await taken_in_time(take, timeout_s)
    if shard is None:
        raise ServiceUnavailable(f"other processes hold all {len(numbers)} shards of {run_dir}")
    return shard


class HeldElsewhere(Exception):
    """The session is held by process `rank`."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the session is that of process {rank}")
        self.rank = rank


class ShardRouter:
    """Routes requests between the endpoint's processes. Call `start` once the process's own URL is known."""

    def __init__(
        self,
        coordinator: FrontPort,
        rank: int = 0,
        num_processes: int | None = 1,
        holder_wait_s: float = HOLDER_WAIT_S,
        trust: Trust | None = None,
    ) -> None:
        """`rank` is the process's number; `num_processes` is the count on one host and None on several hosts.

        With `trust`, other processes must authenticate before clients' keys are sent to them.
        """
        if num_processes is not None and not 0 <= rank < num_processes:
            raise InvalidRequest(f"there is no process {rank} of {num_processes}", param="rank")
        self._coordinator = coordinator
        self.rank = self._rank = rank
        self.on_gained: Callable[[Collection[int]], Awaitable[None]] | None = (
            None  # called before requests arrive for these places
        )
        self._num_processes = num_processes
        self._holder_wait_s = holder_wait_s
        self._trust = trust
        self._table = EndpointTable({}, tuple(range(num_processes or 0)))
        self._joined_at: float | None = None  # start time of the request that returned the table
        self._announcing: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._num_passed_on = 0

    @property
    def places(self) -> frozenset[int]:
        """The places whose sessions this process holds."""
        return self._places_in(self._table)

    def place_of(self, session_id: str) -> int:
        """Return a session's place: the number of the process that generated its id, or -1 - slot."""
        made = _MADE_ID.fullmatch(shown_id(session_id))
        return -1 - _slot(session_id, len(self._table.holders)) if made is None else int(made[1], 16)

    def _places_in(self, table: EndpointTable) -> frozenset[int]:
        numbers = {
            number
            for number in (self._rank, *table.failover_owners)
            if table.failover_owners.get(number, number) == self._rank
        }
        return frozenset(numbers | {-1 - slot for slot, number in enumerate(table.holders) if number == self._rank})

    def new_id(self) -> str:
        """Return the id of a new session of this process."""
        return f"s-{self._rank:x}-{uuid.uuid4().hex[:20]}"

    def check_is_here(self, session_id: str) -> None:
        """Check that this process holds the session.

        Raises HeldElsewhere if another process does, SessionLost if its host was lost, and ServiceUnavailable while
        slots have no holders yet.
        """
        rank = self._holder_rank(session_id)
        if rank in self._table.lost:
            raise self.lost(session_id)
        if rank != self._rank:
            raise HeldElsewhere(rank)

    def check_may_record(self, session_id: str) -> None:
        """Check that this process may record the session.

        Raises SessionLost if another process holds its id now, and ServiceUnavailable while that is unknown: slots
        of a process that the coordinator did not hear from may have moved.
        """
        if self._num_processes is not None:
            return
        if self._joined_at is None or time.monotonic() - self._joined_at > FRESH_S:
            raise ServiceUnavailable("the coordinator is not reachable, so the session's holder is unknown; retry")
        if self._holder_rank(session_id) != self._rank:
            raise self.lost(session_id)

    def is_inherited(self, session_id: str) -> bool:
        """Return True if the id's earlier holder was lost, so that an unknown session may have been there."""
        holders = self._table.holders
        return not _MADE_ID.fullmatch(shown_id(session_id)) and bool(
            self._table.inherited and _slot(session_id, len(holders)) in self._table.inherited
        )

    @staticmethod
    def lost(session_id: str) -> SessionLost:
        """Return the error for a session that was on a lost host."""
        return SessionLost(
            f"the host of session {shown_id(session_id)!r} was lost, together with its record", param="session_id"
        )

    def check_health(self) -> None:
        """Raise the error that ended the announcements, if they have ended."""
        if self._announcing is not None and self._announcing.done():
            self._announcing.result()

    async def start(self, url: str, public_url: str = "") -> None:
        """Announce this process's private `url` to the coordinator until `close`.

        On several hosts `public_url`, the public URL of its host, is announced too.
        """
        if self._num_processes == 1:
            return  # there are no other processes
        self._http = aiohttp.ClientSession(
            connector=Connector(self._trust),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S),
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
        )
        self._announcing = asyncio.create_task(self._announce_for_ever(url, public_url), name="endpoint shards")

    async def close(self) -> None:
        """Stop announcing and close the connections to other processes. Idempotent."""
        if self._announcing is not None:
            announcing, self._announcing = self._announcing, None
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()

    async def forward(self, request: Request, rank: int) -> Response:
        """Return the holder's response unchanged, also streamed; 503 if it is unavailable, 429 at
        `MAX_PASSED_ON`."""
        return _PassedOn(self, request, rank, await request.body())

    async def ask_others(self, request: Request) -> list[bytes]:
        """Return the other processes' responses to the request; empty if another process forwarded it.

        Raises ServiceUnavailable.
        """
        if HOP_HEADER in request.headers:
            return []
        known = range(self._num_processes) if self._num_processes is not None else self._table.urls
        others = [rank for rank in known if rank != self._rank and rank not in self._table.lost]
        body, found = await request.body(), []
        for answer in await asyncio.gather(*(self._asked(request, rank, body) for rank in others)):
            async with answer:
                if answer.status != 200:
                    raise ServiceUnavailable("a process of the endpoint failed to answer; retry")
                found.append(await answer.read())
        return found

    async def pass_on(self, request: Request, rank: int, body: bytes, send: Send) -> None:
        """Send the holder's response, or an error response if the holder cannot be reached.

        Raises ServiceUnavailable for a truncated response, and ClientDisconnect if the client does not read.
        """
        self._num_passed_on += 1
        try:
            try:
                if HOP_HEADER in request.headers:
                    raise ServiceUnavailable(
                        "the endpoint's processes disagree about which one holds this session; retry"
                    )
                if self._num_passed_on > MAX_PASSED_ON:
                    raise Overloaded(f"{MAX_PASSED_ON} requests are being forwarded, the maximum: retry later")
                answer = await self._asked(request, rank, body)
            except AgentLoopError as error:
                refusal = error_response(error, envelope=envelope_of(request.scope))
                await refusal(request.scope, request.receive, send)
                return
            try:
                await _send_answer(answer, rank, send)
            finally:
                answer.close()
        finally:
            self._num_passed_on -= 1

    async def _asked(self, request: Request, rank: int, body: bytes) -> aiohttp.ClientResponse:
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + self._holder_wait_s
        headers = _forwarded(request)
        while True:
            url = self._table.urls.get(rank)
            if url is not None and self._http is not None:
                try:
                    return await self._http.request(
                        request.method,
                        _at(url, request),
                        data=body or None,
                        headers=headers,
                        allow_redirects=False,
                    )
                except aiohttp.ClientConnectorError:
                    pass  # nothing was sent, so a retry is safe
                except (aiohttp.ClientError, OSError) as error:
                    raise ServiceUnavailable(f"endpoint process {rank} does not answer; retry") from error
            if loop.time() >= deadline_at:
                raise ServiceUnavailable(f"endpoint process {rank} is not available; retry")
            await asyncio.sleep(_RETRY_S)

    def _holder_rank(self, session_id: str) -> int:
        made, holders = _MADE_ID.fullmatch(shown_id(session_id)), self._table.holders
        if made is not None:
            rank = int(made[1], 16)
            if self._num_processes is not None and rank >= self._num_processes:
                raise SessionNotFound(f"there is no session {shown_id(session_id)!r}", param="session_id")
            return self._table.failover_owners.get(rank, rank)
        if not holders:
            raise ServiceUnavailable("the endpoint is starting and has no session holders yet; retry")
        return holders[_slot(session_id, len(holders))]

    async def _announce_for_ever(self, url: str, public_url: str) -> None:
        while True:
            began_at = time.monotonic()
            try:
                table = await self._coordinator.join_endpoint(self._rank, url, public_url)
            except AgentLoopError as error:
                _log.warning("endpoint_not_announced", rank=self._rank, code=error.code)
            else:
                # A restarted coordinator does not know all processes yet, so keep the known ones.
                table.urls.update({**self._table.urls, **table.urls})
                table = table if self._num_processes is None else replace(self._table, urls=table.urls)
                gained = self._places_in(table) - self.places
                try:
                    if gained and self.on_gained is not None:
                        await self.on_gained(gained)
                except AgentLoopError as error:
                    _log.warning("sessions_not_taken_in", rank=self._rank, code=error.code, error=str(error))
                else:
                    self._table, self._joined_at = table, began_at
            is_whole = self._num_processes in (None, len(self._table.urls)) and self._table.holders
            await asyncio.sleep(ANNOUNCE_S if is_whole else _RETRY_S)


class _PassedOn(Response):
    """The response of another process."""

    def __init__(self, router: ShardRouter, request: Request, rank: int, body: bytes) -> None:
        super().__init__()
        self._router = router
        self._request = request
        self._rank = rank
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_client_leaves(self._request, self._router.pass_on(self._request, self._rank, self._body, send))


def _slot(session_id: str, num_slots: int) -> int:
    return zlib.crc32(shown_id(session_id).encode()) % num_slots


async def _send_answer(answer: aiohttp.ClientResponse, rank: int, send: Send) -> None:
    headers = [(name, value) for name, value in answer.raw_headers if name.lower() not in _NOT_ANSWERED]
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    await send_in_time(send, start, SEND_TIMEOUT_S)
    try:
        async for piece in answer.content.iter_any():
            await send_in_time(
                send, {"type": "http.response.body", "body": piece, "more_body": True}, SEND_TIMEOUT_S
            )
    except (aiohttp.ClientError, OSError) as error:
        raise ServiceUnavailable(
            f"endpoint process {rank} was lost while sending its response: retry the call"
        ) from error
    await send_in_time(send, {"type": "http.response.body", "body": b"", "more_body": False}, SEND_TIMEOUT_S)


def _forwarded(request: Request) -> list[tuple[str, str]]:
    """Return the headers to forward, including repeated ones, with one request id for both processes' logs."""
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in request.headers.raw
        if name not in _NOT_FORWARDED
    ]
    return [*pairs, ("x-request-id", request.scope["state"]["request_id"]), (HOP_HEADER, "1")]


def _at(url: str, request: Request) -> URL:
    """Return the request's URL at another process, with the same spelling."""
    target: str = request.scope["raw_path"].decode("latin-1")
    query = request.scope["query_string"].decode("latin-1")
    return URL(f"{url}{target}?{query}" if query else f"{url}{target}", encoded=True)
