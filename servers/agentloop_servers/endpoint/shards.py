"""The endpoint's processes as shards: one of them holds a session, and the others pass its requests on to it.

Ownership: each process holds one shard, by a lock, and the table of the processes' private URLs. The coordinator
keeps the table, and every process says its own URL again and again, so a restarted coordinator or process is known
a moment later. A session's data is in its holder's file. The holder follows from the id: one that the service made
names it, and a client's own falls to one of the run's processes, whose number never changes on one host. Over
several hosts it falls into a slot, whose holder the coordinator's table names (`coordinator/endpoint_places.py`).
Where sessions are in a database, the table also names the heirs of lost processes.

A request is passed on once: a holder never passes it further. The holder's answer goes back byte for byte. A client
that leaves, or reads nothing, ends the exchange with the holder, which then sees its own client leave.
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
"""The age up to which a process's table is sure to be right: well below the silence after which slots move."""

HOLDER_WAIT_S = 5.0  # for a holder that is being started again; the client's own retries come on top
SEND_TIMEOUT_S = 30.0  # how long a client may leave what was sent unread
READ_TIMEOUT_S = (
    MAX_TIMEOUT_S + 60.0
)  # the holder keeps each call's own deadline, and Serve ends a holder that hangs
MAX_PASSED_ON = 4096  # requests at once; the next one gets 429

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
    """Lock a free shard of these, the one at `first` if it is free; returns its number and the lock.

    Only the lock's holder writes the shard's sessions. Serve's rank of a process cannot say the shard: while a hung
    process is replaced, the new one's rank may be `num_shards`. The lock's text is the port of the shard's last
    process: the next one listens there, so URLs that agents hold still work. Raises ServiceUnavailable if no shard
    becomes free in time.
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
    """The endpoint's processes for one of them. `start` it once its own URL is known."""

    def __init__(
        self,
        coordinator: FrontPort,
        rank: int = 0,
        num_processes: int | None = 1,
        holder_wait_s: float = HOLDER_WAIT_S,
        trust: Trust | None = None,
    ) -> None:
        """`rank` is the process's number; `num_processes` those of one host, and None over several. With `trust`
        the others have to know it before a client's keys are sent to them."""
        if num_processes is not None and not 0 <= rank < num_processes:
            raise InvalidRequest(f"there is no process {rank} of {num_processes}", param="rank")
        self._coordinator = coordinator
        self.rank = self._rank = rank
        self.on_gained: Callable[[Collection[int]], Awaitable[None]] | None = None  # before requests come for these
        self._num_processes = num_processes
        self._holder_wait_s = holder_wait_s
        self._trust = trust
        self._table = EndpointTable({}, tuple(range(num_processes or 0)))
        self._joined_at: float | None = None  # when the call began that brought the table
        self._announcing: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._num_passed_on = 0

    @property
    def places(self) -> frozenset[int]:
        """The places whose sessions are this process's."""
        return self._places_in(self._table)

    def place_of(self, session_id: str) -> int:
        """Return where a session belongs: the number of the process that made its id, or its slot as -1 - slot."""
        made = _MADE_ID.fullmatch(shown_id(session_id))
        return -1 - _slot(session_id, len(self._table.holders)) if made is None else int(made[1], 16)

    def _places_in(self, table: EndpointTable) -> frozenset[int]:
        numbers = {number for number in (self._rank, *table.heirs) if table.heirs.get(number, number) == self._rank}
        return frozenset(numbers | {-1 - slot for slot, number in enumerate(table.holders) if number == self._rank})

    def new_id(self) -> str:
        """Return the id of a new session of this process."""
        return f"s-{self._rank:x}-{uuid.uuid4().hex[:20]}"

    def check_is_here(self, session_id: str) -> None:
        """Raises HeldElsewhere if the session is another process's, SessionLost if it went with its host, and
        ServiceUnavailable while clients' own ids have no holders yet."""
        rank = self._holder_rank(session_id)
        if rank in self._table.lost:
            raise self.lost(session_id)
        if rank != self._rank:
            raise HeldElsewhere(rank)

    def check_may_record(self, session_id: str) -> None:
        """Raises SessionLost if the session's id is another process's by now, and ServiceUnavailable while that is
        not known: a process that the coordinator has not heard of for a while may have lost its slots."""
        if self._num_processes is not None:
            return
        if self._joined_at is None or time.monotonic() - self._joined_at > FRESH_S:
            raise ServiceUnavailable("the coordinator is not reached: it is not known whose session this is")
        if self._holder_rank(session_id) != self._rank:
            raise self.lost(session_id)

    def is_inherited(self, session_id: str) -> bool:
        """Tell if an id's earlier holder was lost: what is unknown of it may have been there."""
        holders = self._table.holders
        return not _MADE_ID.fullmatch(shown_id(session_id)) and bool(
            self._table.inherited and _slot(session_id, len(holders)) in self._table.inherited
        )

    @staticmethod
    def lost(session_id: str) -> SessionLost:
        """Return the error for a session that went with its host."""
        return SessionLost(
            f"the host of session {shown_id(session_id)!r} is lost, and its record", param="session_id"
        )

    def check_health(self) -> None:
        """Raises what ended the announcements, if something did."""
        if self._announcing is not None and self._announcing.done():
            self._announcing.result()

    async def start(self, url: str, public_url: str = "") -> None:
        """Announce this process's private `url` to the coordinator, again and again until `close`; over several
        hosts, also the public one of its host."""
        if self._num_processes == 1:
            return  # nobody asks
        self._http = aiohttp.ClientSession(
            connector=Connector(self._trust),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S),
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
        )
        self._announcing = asyncio.create_task(self._announce_for_ever(url, public_url), name="endpoint shards")

    async def close(self) -> None:
        """End the announcements, and close the connections to other processes. Idempotent."""
        if self._announcing is not None:
            announcing, self._announcing = self._announcing, None
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()

    async def forward(self, request: Request, rank: int) -> Response:
        """Return the holder's answer, byte for byte, streams too; 503 if it is absent, 429 if too many wait."""
        return _PassedOn(self, request, rank, await request.body())

    async def ask_others(self, request: Request) -> list[bytes]:
        """Return the other processes' answers to a request about all of them; none if the request was passed on.

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
                    raise ServiceUnavailable("a process of the endpoint does not answer")
                found.append(await answer.read())
        return found

    async def pass_on(self, request: Request, rank: int, body: bytes, send: Send) -> None:
        """Send the holder's answer; an error answer if the holder cannot be asked. Raises ServiceUnavailable for an
        answer that is cut short, and ClientDisconnect for a client that does not read."""
        self._num_passed_on += 1
        try:
            try:
                if HOP_HEADER in request.headers:
                    raise ServiceUnavailable("the endpoint's processes do not agree who has this session")
                if self._num_passed_on > MAX_PASSED_ON:
                    raise Overloaded(f"{MAX_PASSED_ON} calls are being passed on")
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
                    pass  # nothing was sent
                except (aiohttp.ClientError, OSError) as error:
                    raise ServiceUnavailable(f"endpoint process {rank} does not answer") from error
            if loop.time() >= deadline_at:
                raise ServiceUnavailable(f"endpoint process {rank} is not there now")
            await asyncio.sleep(_RETRY_S)

    def _holder_rank(self, session_id: str) -> int:
        made, holders = _MADE_ID.fullmatch(shown_id(session_id)), self._table.holders
        if made is not None:
            rank = int(made[1], 16)
            if self._num_processes is not None and rank >= self._num_processes:
                raise SessionNotFound(f"there is no session {shown_id(session_id)!r}", param="session_id")
            return self._table.heirs.get(rank, rank)
        if not holders:
            raise ServiceUnavailable("the endpoint's processes do not know each other yet")
        return holders[_slot(session_id, len(holders))]

    async def _announce_for_ever(self, url: str, public_url: str) -> None:
        while True:
            began_at = time.monotonic()
            try:
                table = await self._coordinator.join_endpoint(self._rank, url, public_url)
            except AgentLoopError as error:
                _log.warning("endpoint_not_announced", rank=self._rank, code=error.code)
            else:
                # A coordinator that has just started does not know all of them yet: what is known stays.
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
    """An answer that another process gives."""

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
        raise ServiceUnavailable(f"endpoint process {rank} was lost within its answer") from error
    await send_in_time(send, {"type": "http.response.body", "body": b"", "more_body": False}, SEND_TIMEOUT_S)


def _forwarded(request: Request) -> list[tuple[str, str]]:
    """Its headers, repeated ones too, under one request id in both processes' logs."""
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in request.headers.raw
        if name not in _NOT_FORWARDED
    ]
    return [*pairs, ("x-request-id", request.scope["state"]["request_id"]), (HOP_HEADER, "1")]


def _at(url: str, request: Request) -> URL:
    """The request's target at another process, spelled as it was."""
    target: str = request.scope["raw_path"].decode("latin-1")
    query = request.scope["query_string"].decode("latin-1")
    return URL(f"{url}{target}?{query}" if query else f"{url}{target}", encoded=True)
