"""`POST /v1/responses`, OpenAI's second dialect, also under `/sessions/{session_id}`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from agentloop.chat import STREAMED, ResponsesBody, read_body, responses
from agentloop.errors import AgentLoopError
from agentloop_servers.endpoint.call_handler import Exchange, as_call, typed_events
from agentloop_servers.endpoint.carriers import SECURED, admit
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http import Keys, body_schema, json_body, sse

_PATHS = ("/v1/responses", "/sessions/{session_id}/v1/responses")
_ANSWER: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}, **STREAMED}}

Asked = Annotated[ResponsesBody, Depends(json_body(ResponsesBody, read_body))]


def routes(endpoint: Endpoint, keys: Keys, errors: Mapping[int | str, dict[str, Any]]) -> APIRouter:
    """The routes of the dialect; `errors` describe its failures in the OpenAPI document."""
    router = APIRouter(
        dependencies=[Depends(admit(keys, endpoint.sessions))],
        responses={**errors, 200: _ANSWER},
        tags=["responses"],
    )

    async def create_response(request: Request, body: Asked) -> Response:
        """One turn of the policy as a response object, or with `stream` as its events."""
        endpoint.check_model(body.model)
        num_items = 1 if isinstance(body.input, str) else len(body.input)
        chat = await as_call(
            partial(responses.chat_call, body, endpoint.parser, endpoint.limits.timeout_s), num_items
        )
        exchange = await Exchange.open(request, endpoint, body.named_session)
        writer = responses.ResponseWriter(body, uuid.uuid4().hex, int(endpoint.unix_time()))
        if not body.stream:
            return await exchange.answer(chat, writer.whole)

        def error_event(error: AgentLoopError) -> bytes:
            return sse(writer.error_event(error), "error")

        return exchange.stream(chat, typed_events(writer.events), error_event)

    for path in _PATHS:
        router.add_api_route(
            path,
            create_response,
            methods=["POST"],
            response_model=None,
            openapi_extra={**body_schema(ResponsesBody), **SECURED},
        )
    return router
