"""One model call over HTTP, the same for all dialects: its session, identity, deadline and response.

A route validates its body, makes a `ChatCall` and renders the result. If the client disconnects, the call is
cancelled, streamed or not, and the handler returns only after the cancelled work has ended. The session enforces
the deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import orjson
from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentloop.api.owners import own_id, shown_id
from agentloop.api.requests import VersionDemandBody, check_body
from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.chat.scores import check_num_scores
from agentloop.concurrency.aio import side_by_side
from agentloop.errors import AgentLoopError, Gone, InvalidRequest, ModelNotFound, SessionNotFound
from agentloop.generation.turn_reader import TurnPiece
from agentloop.sessions.session import Session
from agentloop.trajectory.node import PARENT_KIND_HEADER, PARENT_TURN_HEADER, Declaration, Reply
from agentloop.types import Generation, PathKind
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import SESSION_HEADER, caller_of, names_session, session_name
from agentloop_servers.http.guard import AFFINITY_SOURCE, envelope_of, error_response, traceparent_of
from agentloop_servers.http.responses import in_time, json_response, unless_client_leaves, unread_response
from agentloop_servers.http.sse import DONE, EventStream, sse

Events: TypeAlias = Callable[[TurnPiece | ChatResult], Iterator[dict[str, Any]]]
"""Converts the next item of a streamed result into events of a dialect."""

LONG_CONVERSATION = 512
"""Bodies with more messages are converted into a call in a thread."""

RETRY_COUNT_HEADER = "x-stainless-retry-count"
IDEMPOTENCY_HEADER = "idempotency-key"
READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
TURN_HEADER = "x-turn-id"
QUEUE_HEADER = "x-queue-seconds"
VERSION_HEADER = "x-weight-version"

CODEX_WINDOW_HEADER = "x-codex-window-id"
AGENT_HEADERS: Final = (
    ("x-claude-code-agent-id", "x-claude-code-parent-agent-id", True),
    (CODEX_WINDOW_HEADER, "x-codex-parent-thread-id", False),
    ("x-dynamo-session-id", "x-dynamo-parent-session-id", False),
)
"""For each client the headers of the calling agent's id and of its parent's id, and True if the main agent's calls
have neither: then an agent without a named parent was started by the main agent."""

AFFINITY_HEADERS: Final = (
    SESSION_HEADER,
    "x-smg-routing-key",
    "x-multi-turn-session-id",
    "x-session-affinity",
    "x-dynamo-session-id",
)
"""Headers that name calls that belong together: those of vLLM, SGLang's gateway, Fireworks (two) and Dynamo. The
first one in this table counts, and after all of them the field `prompt_cache_key` of OpenAI's bodies."""

AFFINITY_FIELD = "prompt_cache_key"
FINAL_HEADER = "x-dynamo-session-final"

MAX_AGENT_CHARS = 256
MAX_AFFINITY_CHARS = 256

LONG_ANSWER_TOKENS = 2048
"""Longer responses are serialized in a thread: with logprobs they have megabytes."""

_DIGEST_BYTES = 16
_MAX_RETRY_COUNT = 1000


async def answer_call(
    request: Request, endpoint: Endpoint, chat_call: ChatCall, name: str | None, render: Callable[[ChatResult], Any]
) -> Response:
    """Run a call and return its response as JSON, which `render` builds. `name` is the session in the body.

    Raises the errors of `find_or_create_session` and of the call.
    """
    return await answer_calls(request, endpoint, [chat_call], name, lambda results: render(results[0]))


async def answer_calls(
    request: Request,
    endpoint: Endpoint,
    chat_calls: Sequence[ChatCall],
    name: str | None,
    render: Callable[[Sequence[ChatResult]], Any],
) -> Response:
    """Run calls concurrently, each as `answer_call` does. If there are several, each has its own session."""
    (key, session_id), owner = await call_key(request, endpoint, name), caller_of(request).owner
    calls = [bounded(request, call) for call in chat_calls]
    try:
        async with AsyncExitStack() as places:
            accept = places.enter_context(endpoint.noting_refusal(owner, session_id, key))
            # Take the slots first: a refused call must not leave a session behind.
            for _ in calls:
                places.enter_context(endpoint.hold_call_place(owner))
            sessions = [await places.enter_async_context(_session_of_call(request, endpoint, name)) for _ in calls]
            works = [session.call(call, key, accept) for session, call in zip(sessions, calls, strict=True)]
            results = await unless_client_leaves(request, side_by_side(works))
            if results is None:
                raise ClientDisconnect
    except ClientDisconnect:
        return unread_response()
    replies = [node.reply for result in results for node in result.choices]
    headers = {TURN_HEADER: results[0].choices[0].node_id}
    return await json_of_replies(replies, lambda: render(results), headers)


async def json_of_replies(
    replies: Sequence[Reply | Generation], render: Callable[[], Any], headers: dict[str, str] | None = None
) -> Response:
    """Return `render`'s response for the replies as JSON; long ones are serialized in a thread.

    A header has the longest time that one of the replies waited for a replica with free capacity.
    """
    waits_us = [one.times.queue_us for one in replies if isinstance(one, Reply) and one.times is not None]
    headers = dict(headers or {}) | {QUEUE_HEADER: f"{max(waits_us, default=0) / 1e6:.3f}"}
    if sum(len(reply.token_ids) for reply in replies) > LONG_ANSWER_TOKENS:
        return json_response(await asyncio.to_thread(lambda: orjson.dumps(render())), headers=headers)
    return json_response(render(), headers=headers)


async def stream_call(
    request: Request,
    endpoint: Endpoint,
    chat_call: ChatCall,
    name: str | None,
    write: Events,
    error_event: Callable[[AgentLoopError], bytes],
    *,
    are_named: bool,
    begin: Callable[[str, str], None] | None = None,
) -> Response:
    """Stream a call as server-sent events with keep-alives. `begin` is passed to `Session.stream`.

    If `are_named`, each event has its type as its name; otherwise the stream ends with `[DONE]`. A failure before
    the first event is an ordinary error response; a later one is written by `error_event`, including any end mark.
    """
    call = demanding(request, chat_call)
    (key, session_id), owner = await call_key(request, endpoint, name), caller_of(request).owner

    async def sent() -> AsyncGenerator[bytes, None]:
        # A stream sends keep-alives, so the client's read timeout does not bound the whole answer.
        ready = b""
        with endpoint.noting_refusal(owner, session_id, key) as accept, endpoint.hold_call_place(owner):

            def accepted(shown_id: str, call_id: str) -> None:
                accept(shown_id, call_id)
                if begin is not None:
                    begin(shown_id, call_id)

            async with (
                _session_of_call(request, endpoint, name) as session,
                aclosing(session.stream(call, key, accepted)) as pieces,
            ):
                async for piece in pieces:
                    ready += b"".join(sse(event, event["type"] if are_named else None) for event in write(piece))
                    if isinstance(piece, ChatResult):
                        yield ready if are_named else ready + DONE
                    elif (
                        ready and piece.finish is None
                    ):  # the result follows a last piece at once, so both are sent together
                        yield ready
                        ready = b""

    return event_stream(request, endpoint, sent(), error_event)


def event_stream(
    request: Request,
    endpoint: Endpoint,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[AgentLoopError], bytes],
) -> EventStream:
    """Return the response that streams these events, with the endpoint's limits."""
    return EventStream(
        events,
        error_event,
        lambda error: error_response(error, envelope=envelope_of(request.scope)),
        keep_alive_s=endpoint.limits.keep_alive_s,
        send_timeout_s=endpoint.limits.send_timeout_s,
    )


def demanding(request: Request, chat_call: ChatCall) -> ChatCall:
    """Return the call with its caller's trace, the adapter that it names, and the demanded weight versions.

    The header `X-Weight-Version: min_version=7, wait_s=3` has the fields of the body's `weight_version`, for
    clients whose bodies are fixed. The body's field takes precedence. Raises InvalidRequest.
    """
    text = request.headers.get(VERSION_HEADER)
    chat_call = replace(
        chat_call,
        traceparent=traceparent_of(request),
        affinity=affinity_key(request, chat_call.affinity),
        adapter=adapter_of(request),
        declaration=_declaration_of(request.headers),
    )
    if text is None or chat_call.sampling.weight_version is not None:
        return chat_call
    try:
        pairs = dict(pair.split("=", 1) for pair in text.replace(" ", "").split(","))
        fields = {name: float(value) if name == "wait_s" else int(value) for name, value in pairs.items()}
    except ValueError as error:
        raise InvalidRequest(
            f"{text[:64]!r} is not of the form `min_version=N` or `exact_version=N`", param=VERSION_HEADER
        ) from error
    demand = check_body(fields, VersionDemandBody).to_demand()
    return replace(chat_call, sampling=replace(chat_call.sampling, weight_version=demand))


def _declaration_of(headers: Headers) -> Declaration | None:
    """Return the place in the lineage that a call's headers declare. Raises InvalidRequest for a longer id."""
    parent_turn = headers.get(PARENT_TURN_HEADER, "")
    agent, parent_agent, parent_header = "", None, ""
    for agent_header, header, has_unnamed_main in AGENT_HEADERS:
        if agent := headers.get(agent_header, ""):
            if agent_header == CODEX_WINDOW_HEADER:
                agent = agent.rpartition(":")[0] or agent  # "{thread}:{number of compactions}"
            parent_agent, parent_header = headers.get(header, "" if has_unnamed_main else None), header
            break
    if not agent and not parent_turn:
        return None
    ids = ((PARENT_TURN_HEADER, parent_turn), (agent_header, agent), (parent_header, parent_agent or ""))
    for header, value in ids:
        if len(value) > MAX_AGENT_CHARS:
            raise InvalidRequest(f"an id of {len(value)} characters is longer than {MAX_AGENT_CHARS}", param=header)
    kind = headers.get(PARENT_KIND_HEADER)
    if kind not in (None, PathKind.COMPACTS, PathKind.DELEGATES):
        raise InvalidRequest(f"{kind[:64]!r}: expected compacts or delegates", param=PARENT_KIND_HEADER)
    return Declaration(parent_turn, agent, parent_agent, None if kind is None else PathKind(kind), parent_header)


def affinity_key(request: Request, in_body: str = "") -> str:
    """Return a key that all calls of one caller with the same affinity name share; empty without a name.

    `in_body` is the name in the body. If several names differ, the response names the one that counts. If the URL
    or the key names the session, its lease counts and the names are ignored. Raises InvalidRequest for a header
    with two values, or with a value that has not 1 to `MAX_AFFINITY_CHARS` characters.
    """
    if "session_id" in request.path_params or caller_of(request).session_id is not None:
        return ""
    names: dict[str, str] = {}
    for header in AFFINITY_HEADERS:
        for value in {*request.headers.getlist(header)}:
            if header in names or not 1 <= len(value) <= MAX_AFFINITY_CHARS:
                raise InvalidRequest(f"expected one name of 1 to {MAX_AFFINITY_CHARS} characters", param=header)
            names[header] = value
    if in_body:
        names[AFFINITY_FIELD] = in_body
    if not names:
        return ""
    source, name = next(iter(names.items()))
    if len({*names.values()}) > 1:
        request.scope["state"][AFFINITY_SOURCE] = source
    return key_of_affinity(request, name)


def key_of_affinity(request: Request, name: str) -> str:
    """Return the key of one affinity name of the caller."""
    return blake2b(f"{caller_of(request).owner}\0{name}".encode(), digest_size=16).hexdigest()


def affinity_of(request: Request, endpoint: Endpoint, key: str) -> str | None:
    """Return the name of the lease that unrecorded calls with an affinity key share; None without a key.

    Raises HeldElsewhere if another process has the affinity.
    """
    if not key:
        return None
    affinity = own_id(caller_of(request).owner, f"tokens-{key}")
    endpoint.check_is_here(affinity)
    return affinity


def finish_if_final(request: Request, token_calls: TokenCalls, affinity: str | None) -> None:
    """Release the lease of an affinity whose client says that this was its last call (Dynamo's header)."""
    if affinity is not None and request.headers.get(FINAL_HEADER, "").lower() in ("true", "1"):
        token_calls.finish(affinity)


def bounded(request: Request, chat_call: ChatCall) -> ChatCall:
    """Return the call of `demanding`; the client's read timeout replaces its timeout if that is longer."""
    hint_s = _read_timeout_s(request)
    timeout_s = chat_call.timeout_s if hint_s is None else min(hint_s, chat_call.timeout_s)
    return replace(demanding(request, chat_call), timeout_s=timeout_s)


async def find_or_create_session(request: Request, endpoint: Endpoint, body_session_id: str | None) -> Session:
    """Find the session that a request names, or create one durably. The response then has `x-session-id`.

    Raises InvalidRequest if the names in path, header and body disagree, SessionNotFound, Gone, and HeldElsewhere:
    `ingress/app.py` then forwards the request to the process that holds the session.
    """
    session_id, must_exist = session_name(request, body_session_id)
    sessions, caller = endpoint.sessions, caller_of(request)
    user_names = caller.user_names
    found: Session | None = None
    if session_id is not None:
        endpoint.check_is_here(session_id)
        found = sessions.resident(session_id, user_names)
    if found is None:
        if session_id is not None and must_exist:
            finding = sessions.find(session_id, user_names, is_admin=caller.is_admin)
        else:
            assert user_names is not None  # session keys name their session, so here the caller is a user
            finding = sessions.find_or_create(session_id, user_names, traceparent_of(request), adapter_of(request))
        found = await in_time(
            finding, endpoint.limits.registry_timeout_s, "the session was not found or created in time; retry"
        )
    request.scope["state"]["session_id"] = found.shown_id
    return found


@asynccontextmanager
async def _session_of_call(request: Request, endpoint: Endpoint, name: str | None) -> AsyncGenerator[Session, None]:
    """Find or create the session of a call. A session created only for this call is deleted if the call fails."""
    session = await find_or_create_session(request, endpoint, name)
    try:
        yield session
    except AgentLoopError:
        if session.record.is_one_off and not session.num_turns:
            await endpoint.sessions.delete(session.session_id, None)
        raise


async def find_referenced_session(
    request: Request, endpoint: Endpoint, body_session_id: str | None, referenced_id: str
) -> Session | None:
    """Find the caller's session that an id of an earlier response names.

    Returns None if the session is gone, or if the request names another one. Raises the errors of
    `find_or_create_session`.
    """
    named, _ = session_name(request, body_session_id)
    if named is not None and shown_id(named) != referenced_id:
        return None
    session_id, user_names = named or referenced_id, caller_of(request).user_names
    try:
        endpoint.check_is_here(session_id)
        finding = endpoint.sessions.find(session_id, user_names)
        return await in_time(
            finding, endpoint.limits.registry_timeout_s, "the session was not found in time; retry"
        )
    except (SessionNotFound, Gone):
        return None


async def score_calls(
    request: Request,
    endpoint: Endpoint,
    token_calls: TokenCalls,
    asked: Sequence[ChatCall | None],
    affinity: str | None = None,
    *,
    param: str,
) -> list[Generation] | None:
    """Return the scores of the prompts, computed concurrently, without the calls that are None.

    Returns None if the client has disconnected.
    """
    owner, calls = caller_of(request).owner, [bounded(request, call) for call in asked if call is not None]
    check_num_scores(calls, param)
    score = partial(token_calls.score, affinity=affinity, owner=owner, prompt_param=param)
    with ExitStack() as places:
        for _ in calls:
            places.enter_context(endpoint.hold_call_place(owner))
        return await unless_client_leaves(request, side_by_side(list(map(score, calls))))


async def off_loop_if_long(to_call: Callable[[], ChatCall], num_messages: int) -> ChatCall:
    """Convert a body into a call, in a thread if it has more than `LONG_CONVERSATION` messages."""
    return await asyncio.to_thread(to_call) if num_messages > LONG_CONVERSATION else to_call()


async def check_model(request: Request, endpoint: Endpoint, name: str, body_session_id: str | None = None) -> None:
    """Check that a model is served. In an existing session every name is accepted, except another served model's.

    Agents often have fixed model names, so a session ignores them. A session that a body or a header creates uses
    the adapter that its first call names. Raises the errors of `Endpoint.check_model`.
    """
    is_named = body_session_id is not None or names_session(request)
    if name in endpoint.others or not is_named:
        await call_adapter(request, endpoint, name)
    elif endpoint.by_name is not None and session_name(request, body_session_id)[1] is False:
        with suppress(ModelNotFound):
            await call_adapter(request, endpoint, name)


async def call_adapter(request: Request, endpoint: Endpoint, name: str) -> None:
    """Sample a request's calls with the adapter that it names. Raises the errors of `Endpoint.check_model`."""
    request.scope["state"]["adapter"] = await endpoint.adapter_of(name, caller_of(request).names)


def adapter_of(request: Request) -> str:
    adapter: str = request.scope["state"].get("adapter", "")
    return adapter


async def call_key(request: Request, endpoint: Endpoint, body_session_id: str | None) -> tuple[CallKey, str | None]:
    """Return the identity of this request, and the id of its session as the owner knows it.

    The identity is the path, the body and the client's retry count; a count that is not a number is 0. A request
    with an `Idempotency-Key` is a retry of any request with the same key and body, and its retry count is ignored.
    Raises HeldElsewhere, and InvalidRequest if names disagree.
    """
    named, _ = session_name(request, body_session_id)
    if named is not None:
        endpoint.check_is_here(named)
    session_id = None if named is None else shown_id(named)
    digest = blake2b(request.scope["path"].encode(), digest_size=_DIGEST_BYTES)
    digest.update(b"\0")
    digest.update(await request.body())
    digest.update(b"\0" + request.headers.get(VERSION_HEADER, "").encode())
    text = request.headers.get(RETRY_COUNT_HEADER, "")
    count = int(text[:6]) if text.isascii() and text.isdecimal() else 0
    if (idempotency_key := request.headers.get(IDEMPOTENCY_HEADER)) is not None:
        digest.update(b"\0" + idempotency_key.encode())
        return CallKey(digest.digest(), min(max(count, 1), _MAX_RETRY_COUNT)), session_id
    num_refused = endpoint.num_refused(caller_of(request).owner, session_id, digest.digest())
    return CallKey(digest.digest(), min(count, _MAX_RETRY_COUNT), False, num_refused), session_id


def _read_timeout_s(request: Request) -> float | None:
    """Return the read timeout that the OpenAI and Anthropic clients send; None without one."""
    text = request.headers.get(READ_TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None  # the header is only a hint; httpx writes "None" for no timeout
    return value if math.isfinite(value) and value > 0 else None
