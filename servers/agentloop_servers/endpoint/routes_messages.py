"""`POST /v1/messages` and its `count_tokens`, Anthropic's dialect, also under `/sessions/{session_id}`.

Every answer of these routes, errors too, is as Anthropic's clients read it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from agentloop.api import ErrorBody
from agentloop.chat import (
    STREAMED,
    CountTokensBody,
    MessagesBody,
    anthropic,
    read_body,
)
from agentloop.errors import AgentLoopError
from agentloop_servers.endpoint.call_handler import Exchange, as_call, typed_events
from agentloop_servers.endpoint.carriers import SECURED, admit, names_session, session_of
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http import Keys, body_schema, json_body, speaks, sse

_PREFIXES = ("/v1", "/sessions/{session_id}/v1")
_ANSWER: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}, **STREAMED}}

Asked = Annotated[MessagesBody, Depends(json_body(MessagesBody, read_body))]
Counted = Annotated[CountTokensBody, Depends(json_body(CountTokensBody, read_body))]


class AnthropicError(BaseModel):
    """What went wrong; `code` and `param` are those of the other dialects."""

    type: str
    message: str
    code: str
    param: str | None


class AnthropicErrorBody(BaseModel):
    """The body of an error answer. What the guard refuses before it knows the route (a bad host, a declared length
    beyond the bound) is in the other dialects' form."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None


class TokenCount(BaseModel):
    """The answer of `count_tokens`."""

    input_tokens: int


def routes(endpoint: Endpoint, keys: Keys, errors: Mapping[int | str, dict[str, Any]]) -> APIRouter:
    """The routes of the dialect; `errors` names the status codes of its failures."""
    router = APIRouter(
        dependencies=[Depends(_speak), Depends(admit(keys, endpoint.sessions))],
        responses={status: {"model": AnthropicErrorBody | ErrorBody} for status in errors},
        tags=["messages"],
    )

    async def create_message(request: Request, body: Asked) -> Response:
        """One turn of the policy as a message, or with `stream` as its events."""
        endpoint.check_model(body.model)
        reading = partial(anthropic.chat_call, body, endpoint.parser, endpoint.limits.timeout_s)
        chat = await as_call(reading, len(body.messages))
        exchange = await Exchange.open(request, endpoint, body.named_session)
        writer = anthropic.MessageWriter(body, uuid.uuid4().hex)
        if not body.stream:
            return await exchange.answer(chat, writer.whole)

        def error_event(error: AgentLoopError) -> bytes:
            return sse(anthropic.error_body(error, _request_id(request)), "error")

        return exchange.stream(chat, typed_events(writer.events), error_event)

    async def count_tokens(request: Request, body: Counted) -> Response:
        """How many tokens the prompt has: in a named session as its history has them, else rendered whole."""
        endpoint.check_model(body.model)
        messages, tools = anthropic.prompt(body)
        if names_session(request):
            session = await session_of(request, endpoint, None)
            num_tokens = len((await session.preview(messages, tools)).ids)
        else:
            num_tokens = len(await asyncio.to_thread(endpoint.renderer.render, messages, tools))
        return Response(orjson.dumps({"input_tokens": num_tokens}), media_type="application/json")

    for prefix in _PREFIXES:
        router.add_api_route(
            f"{prefix}/messages",
            create_message,
            methods=["POST"],
            response_model=None,
            responses={200: _ANSWER},
            openapi_extra={**body_schema(MessagesBody), **SECURED},
        )
        router.add_api_route(
            f"{prefix}/messages/count_tokens",
            count_tokens,
            methods=["POST"],
            response_model=TokenCount,
            openapi_extra={**body_schema(CountTokensBody), **SECURED},
        )
    return router


async def _speak(request: Request) -> None:
    """Route dependency, the first: errors are written, and requests named, as Anthropic's clients read them."""
    await speaks(partial(anthropic.error_body, request_id=_request_id(request)), "request-id")(request)


def _request_id(request: Request) -> str:
    request_id: str = request.scope["state"]["request_id"]
    return request_id
