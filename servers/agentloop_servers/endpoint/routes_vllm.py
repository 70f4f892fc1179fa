"""vLLM's token route, `POST /inference/v1/generate`, at the root and under `/sessions/{session_id}`.

By the path or the key of a session a call is a turn of that session's record. Otherwise nothing is recorded, and
the header `X-Session-ID` is what it is for vLLM: calls that name the same one run on the same replica, as long as
it serves and has room.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from agentloop.api.owners import own_id
from agentloop.chat import vllm_tokens
from agentloop.chat.call import ChatResult
from agentloop.chat.fields import read_body
from agentloop.chat.vllm_tokens import TokensBody
from agentloop.errors import InvalidRequest
from agentloop.trajectory.node import Reply
from agentloop_servers.endpoint.call_handler import LONG_ANSWER_TOKENS, CallHandler, bounded
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import SESSION_HEADER, Keys, admit, caller_of
from agentloop_servers.http.guard import json_body
from agentloop_servers.http.openapi import add_route, errors
from agentloop_servers.http.responses import json_response, unless_client_leaves, unread_response

BODIES = (TokensBody,)
MAX_AFFINITY_CHARS = 256

_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}

Tokens = Annotated[TokensBody, Depends(json_body(TokensBody, read_body))]
AffinityName = Annotated[str, Query(min_length=1, max_length=MAX_AFFINITY_CHARS)]


def router(endpoint: Endpoint, keys: Keys, calls: TokenCalls) -> APIRouter:
    """Return the routes, open to user keys and to the keys of sessions."""
    routes = VllmRoutes(endpoint, calls)
    guard = [Depends(admit(keys, endpoint.sessions.keys.opened_by))]
    router = APIRouter(dependencies=guard, responses={**errors(), **_ANSWER}, tags=["vllm"])
    for prefix in ("", "/sessions/{session_id}"):
        add_route(router, "POST", f"{prefix}/inference/v1/generate", routes.generate, TokensBody)
    add_route(router, "POST", "/finish_session", routes.finish)
    return router


class VllmRoutes:
    """The handlers of one endpoint."""

    def __init__(self, endpoint: Endpoint, calls: TokenCalls) -> None:
        self._endpoint = endpoint
        self._calls = calls

    async def generate(self, request: Request, body: Tokens) -> Response:
        """Token ids in, token ids with logprobs and spans of weight versions out, as vLLM's route of this name."""
        endpoint = self._endpoint
        call = vllm_tokens.to_call(body, endpoint.served)
        render = partial(
            vllm_tokens.render_tokens,
            body=body,
            request_id=body.request_id or uuid.uuid4().hex,
            created_at=int(endpoint.unix_time()),
            model=body.model or endpoint.model_name,
        )
        if "session_id" in request.path_params or caller_of(request).session_id is not None:
            handler = await CallHandler.open(request, endpoint, None)
            return await handler.answer(call, lambda result: render(_replies(result)))
        if body.model is not None:
            endpoint.check_model(body.model)
        affinity = self._affinity(request, request.headers.getlist(SESSION_HEADER))
        with endpoint.admitted(caller_of(request).owner):
            sampling = self._calls.sample(bounded(request, call), affinity, caller_of(request).owner)
            replies = await unless_client_leaves(request, sampling)
        if replies is None:
            return unread_response()
        if sum(len(reply.token_ids) for reply in replies) > LONG_ANSWER_TOKENS:
            return json_response(await asyncio.to_thread(lambda: orjson.dumps(render(replies))))
        return json_response(render(replies))

    async def finish(self, request: Request, session_id: AffinityName) -> Response:
        """Give back the place of the calls that named this session in their header, as SkyRL's routers do.

        Nothing else ends by it: a recorded session is finished by its own route.
        """
        affinity = self._affinity(request, [session_id])
        return json_response({"finished": affinity is not None and self._calls.finish(affinity)})

    def _affinity(self, request: Request, names: Sequence[str]) -> str | None:
        """Return what calls of one caller that name one session share, in the process that holds it.

        Raises InvalidRequest, and NotOwner where that is another process.
        """
        if not names:
            return None
        if len(names) > 1 or not 1 <= len(names[0]) <= MAX_AFFINITY_CHARS:
            raise InvalidRequest(f"one name of 1 to {MAX_AFFINITY_CHARS} characters", param=SESSION_HEADER)
        owner = caller_of(request).owner
        digest = blake2b(f"{owner}\0{names[0]}".encode(), digest_size=16).hexdigest()
        affinity = own_id(owner, f"tokens-{digest}")
        self._endpoint.check_own(affinity)
        return affinity


def _replies(result: ChatResult) -> list[Reply]:
    return [node.reply for node in result.choices]
