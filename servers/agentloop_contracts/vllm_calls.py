"""Calls of vLLM's dialect: `POST /inference/v1/generate`, and the route that releases the slot of related calls.

A call whose path or key names a session is recorded in that session. Other calls are not recorded; calls with the
same `X-Session-ID` header run on the same replica while that replica is available and has capacity.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from agentloop.chat.fields import read_body
from agentloop.errors import UnsupportedParameter
from agentloop_contracts import vllm_tokens
from agentloop_contracts.vllm_tokens import TokensBody
from agentloop_servers.endpoint.calls import (
    MAX_AFFINITY_CHARS,
    affinity_key,
    affinity_of,
    answer_call,
    bounded,
    call_adapter,
    finish_if_final,
    json_of_replies,
    key_of_affinity,
    score_calls,
)
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import Keys, authenticate, caller_of
from agentloop_servers.http.guard import json_body
from agentloop_servers.http.openapi import OBJECT, add_route, errors
from agentloop_servers.http.responses import json_response, unless_client_leaves, unread_response

Tokens = Annotated[TokensBody, Depends(json_body(TokensBody, read_body))]
AffinityName = Annotated[str, Query(min_length=1, max_length=MAX_AFFINITY_CHARS)]


class VllmCalls:
    """The calls of vLLM's dialect in one process."""

    def __init__(self, endpoint: Endpoint, token_calls: TokenCalls) -> None:
        self._endpoint = endpoint
        self._token_calls = token_calls

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes, which accept user keys and session keys."""
        is_authenticated = Depends(authenticate(keys, self._endpoint.sessions.keys.opened_by))
        router = APIRouter(dependencies=[is_authenticated], responses={**errors(), **OBJECT}, tags=["vllm"])
        for prefix in ("", "/sessions/{session_id}"):
            add_route(router, "POST", f"{prefix}/inference/v1/generate", self.generate, TokensBody)
        add_route(router, "POST", "/finish_session", self.finish_affinity)
        return router

    async def generate(self, request: Request, body: Tokens) -> Response:
        """Sample from token ids, like vLLM's route; return token ids with logprobs and weight version spans."""
        endpoint, caller = self._endpoint, caller_of(request)
        call = vllm_tokens.to_call(body, endpoint.chat_model)
        score_call = vllm_tokens.prompt_call(body, endpoint.chat_model)
        render = partial(
            vllm_tokens.render_tokens,
            body=body,
            request_id=body.request_id or uuid.uuid4().hex,
            created_at=int(endpoint.unix_time()),
            model=body.model or endpoint.model_name,
        )
        if "session_id" in request.path_params or caller.session_id is not None:
            if score_call is not None:
                raise UnsupportedParameter(
                    "prompt scores cannot be recorded in a session: remove prompt_logprobs, or the session",
                    param="sampling_params.prompt_logprobs",
                )
            return await answer_call(
                request, endpoint, call, None, lambda result: render([node.reply for node in result.choices], None)
            )
        if body.model is not None:
            await call_adapter(request, endpoint, body.model)
        affinity = affinity_of(request, endpoint, affinity_key(request))
        scores = await score_calls(request, endpoint, self._token_calls, [score_call], affinity, param="token_ids")
        score = scores[0] if scores else None
        with endpoint.hold_call_place(caller.owner):
            sampling = self._token_calls.sample(bounded(request, call), affinity, caller.owner)
            replies = await unless_client_leaves(request, sampling)
        if replies is None:
            return unread_response()
        finish_if_final(request, self._token_calls, affinity)
        return await json_of_replies(replies, lambda: render(replies, score))

    async def finish_affinity(self, request: Request, session_id: AffinityName) -> Response:
        """Release the slot of the calls with this session in their header, like SkyRL's routers.

        Recorded sessions are not affected: they have their own route to finish.
        """
        affinity = affinity_of(request, self._endpoint, key_of_affinity(request, session_id))
        return json_response({"finished": affinity is not None and self._token_calls.finish(affinity)})
