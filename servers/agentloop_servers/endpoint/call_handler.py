"""One model call over HTTP, the same for every dialect: its session, its identity, its deadline and its answer.

A dialect's route checks its body, makes a `ChatCall`, opens a `CallHandler`, and says how a result looks. A client
that leaves cancels the call on both ways out, and the answer returns only when what was cancelled has ended. The
session keeps the call's deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Self, TypeAlias, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.errors import AgentLoopError
from agentloop.generation.turn_piece import TurnPiece
from agentloop.sessions.session import Session
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import names_session, session_name
from agentloop_servers.http.guard import envelope_of, error_response
from agentloop_servers.http.responses import in_time, json_response, unless_client_leaves, unread_response
from agentloop_servers.http.sse import EventStream, sse

E = TypeVar("E")

Events: TypeAlias = Callable[[AsyncIterator[TurnPiece | ChatResult]], AsyncGenerator[E, None]]
"""The type of functions that turn the pieces of an answer into the events of a dialect."""

LONG_CONVERSATION = 512
"""Messages of a body that is turned into a call in a thread."""

RETRY_COUNT_HEADER = "x-stainless-retry-count"
IDEMPOTENCY_HEADER = "idempotency-key"
READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
TURN_HEADER = "x-turn-id"

LONG_ANSWER_TOKENS = 2048
"""Longer answers are written in a thread: with logprobs they are megabytes."""

_DIGEST_BYTES = 16
_MAX_RETRY_COUNT = 1000


class CallHandler:
    """One HTTP chat request. `open` makes one, once the body is known to be good."""

    def __init__(self, request: Request, endpoint: Endpoint, session: Session, key: CallKey) -> None:
        self.request = request
        self.endpoint = endpoint
        self.session = session
        self.key = key

    @classmethod
    async def open(cls, request: Request, endpoint: Endpoint, body_session_id: str | None) -> Self:
        """Find the call's session. Raises InvalidRequest (names that disagree), SessionNotFound, Gone."""
        session = await session_of(request, endpoint, body_session_id)
        return cls(request, endpoint, session, await call_key(request))

    async def answer(self, chat: ChatCall, render: Callable[[ChatResult], Any]) -> Response:
        """Answer the whole as JSON; `render` gives what `orjson` takes. Cancels the call if the client leaves."""
        with self.endpoint.admitted(self.session.record.owner):
            result = await unless_client_leaves(
                self.request, self.session.call(bounded(self.request, chat), self.key)
            )
        if result is None:
            return unread_response()
        turn = {TURN_HEADER: result.choices[0].node_id}
        if sum(len(node.reply.token_ids) for node in result.choices) > LONG_ANSWER_TOKENS:
            content = await asyncio.to_thread(_written, result, render)
        else:
            content = _written(result, render)
        return json_response(content, headers=turn)

    def stream(
        self,
        chat: ChatCall,
        events: Callable[[AsyncIterator[TurnPiece | ChatResult]], AsyncIterator[bytes]],
        error_event: Callable[[AgentLoopError], bytes],
    ) -> Response:
        """Answer with server-sent events, with keep-alive comments.

        `events` turns pieces into events, its end mark included. A failure before the first event is an ordinary
        error answer; later it is `error_event`, which has the end mark too.
        """
        scope, limits = self.request.scope, self.endpoint.limits
        return EventStream(
            self._events(chat, events),
            error_event,
            lambda error: error_response(error, envelope=envelope_of(scope)),
            keep_alive_s=limits.keep_alive_s,
            send_timeout_s=limits.send_timeout_s,
        )

    async def _events(
        self,
        chat: ChatCall,
        events: Callable[[AsyncIterator[TurnPiece | ChatResult]], AsyncIterator[bytes]],
    ) -> AsyncGenerator[bytes, None]:
        with self.endpoint.admitted(self.session.record.owner):
            # A reader of a stream hears from us all the time: its read timeout says nothing of the whole.
            pieces = self.session.stream(chat, self.key)
            async with aclosing(pieces):
                written = events(pieces)
                async with aclosing(written):  # type: ignore[type-var] # an async generator
                    async for event in written:
                        yield event


def bounded(request: Request, chat: ChatCall) -> ChatCall:
    """Return the call, ending no later than the client stops waiting for it."""
    hint_s = _read_timeout_s(request)
    return chat if hint_s is None or hint_s >= chat.timeout_s else replace(chat, timeout_s=hint_s)


def _written(result: ChatResult, render: Callable[[ChatResult], Any]) -> bytes:
    return orjson.dumps(render(result))


async def session_of(request: Request, endpoint: Endpoint, body_session_id: str | None) -> Session:
    """Return the session that a request means; from here on its answer has `x-session-id`.

    Raises InvalidRequest for names that disagree, SessionNotFound, Gone, and NotOwner.
    """
    name, sessions = session_name(request, body_session_id), endpoint.sessions
    found: Session | None = None
    if name.session_id is not None:
        endpoint.check_own(name.session_id)
        found = sessions.resident(name.session_id, name.reaches)
    if found is None:
        if name.must_exist:
            assert name.session_id is not None
            finding = sessions.find(name.session_id, name.reaches)
        else:
            assert name.reaches is not None
            finding = sessions.find_or_create(name.session_id, name.reaches)
        found = await in_time(finding, endpoint.limits.registry_timeout_s, "the session could not be had in time")
    request.scope["state"]["session_id"] = found.shown_id
    return found


async def as_call(reading: Callable[[], ChatCall], num_messages: int) -> ChatCall:
    """Return the call that a body means; a long conversation is read in a thread."""
    return await asyncio.to_thread(reading) if num_messages > LONG_CONVERSATION else reading()


def typed_events(write: Events[dict[str, Any]]) -> Events[bytes]:
    """Return the events of a dialect that names each by its `type`, as they are sent."""

    async def events(pieces: AsyncIterator[TurnPiece | ChatResult]) -> AsyncGenerator[bytes, None]:
        async with aclosing(write(pieces)) as found:
            async for event in found:
                yield sse(event, event["type"])

    return events


def check_model(request: Request, endpoint: Endpoint, name: str, body_session_id: str | None = None) -> None:
    """Check that a model is served. In a session every name means its policy: agents have names of their own.

    Raises ModelNotFound.
    """
    if body_session_id is None and not names_session(request):
        endpoint.check_model(name)


async def call_key(request: Request) -> CallKey:
    """Return the identity of this request: its path, its body and the client's count of tries.

    One with an `Idempotency-Key` is a retry of any with the same key and body, whatever its count.
    """
    digest = blake2b(request.scope["path"].encode(), digest_size=_DIGEST_BYTES)
    digest.update(b"\0")
    digest.update(await request.body())
    text = request.headers.get(RETRY_COUNT_HEADER, "")
    count = int(text[:6]) if text.isascii() and text.isdecimal() else 0
    if (idempotency_key := request.headers.get(IDEMPOTENCY_HEADER)) is not None:
        digest.update(b"\0" + idempotency_key.encode())
        count = max(count, 1)
    return CallKey(digest.digest(), min(count, _MAX_RETRY_COUNT))


def _read_timeout_s(request: Request) -> float | None:
    """Return how long the OpenAI and Anthropic clients wait for an answer, where they say it."""
    text = request.headers.get(READ_TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None  # a hint; httpx writes "None" for no timeout
    return value if math.isfinite(value) and value > 0 else None
