"""The routes of two more dialects, each also under `/sessions/{session_id}`.

`POST /v1/responses` is OpenAI's second one. `POST /v1/messages` and its `count_tokens` are Anthropic's: what they
answer, errors too, is as Anthropic's clients read it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from agentloop.chat import anthropic, responses
from agentloop.chat.anthropic_bodies import CountTokensBody, MessagesBody
from agentloop.chat.call import ChatCall
from agentloop.chat.fields import read_body
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.errors import AgentLoopError
from agentloop.types import SamplingParams
from agentloop_servers.endpoint.call_handler import CallHandler, as_call, check_model, session_of, typed_events
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys, admit, names_session
from agentloop_servers.http.guard import json_body, speaks
from agentloop_servers.http.openapi import ERROR_SCHEMA, STREAMED, add_route, errors
from agentloop_servers.http.responses import json_response
from agentloop_servers.http.sse import sse

BODIES = (ResponsesBody, MessagesBody, CountTokensBody)

_PREFIXES = ("/v1", "/sessions/{session_id}/v1")
_ANSWER: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}, **STREAMED}}

# What the guard refuses before it knows the route (a bad host, a declared length beyond the bound) is in the other
# dialects' form.
_MESSAGES_ERROR: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "description": "What went wrong; `code` and `param` are those of the other dialects.",
            "properties": {
                "type": {"const": "error"},
                "error": {
                    "type": "object",
                    "properties": {
                        "type": {"type": "string"},
                        "message": {"type": "string"},
                        "code": {"type": "string"},
                        "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "details": {"type": "object", "description": "Of a refused `thread`, for the SDK."},
                    },
                    "required": ["type", "message", "code", "param"],
                },
                "request_id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["type", "error", "request_id"],
        },
        ERROR_SCHEMA,
    ]
}

AskedResponse = Annotated[ResponsesBody, Depends(json_body(ResponsesBody, read_body))]
AskedMessage = Annotated[MessagesBody, Depends(json_body(MessagesBody, read_body))]
Counted = Annotated[CountTokensBody, Depends(json_body(CountTokensBody, read_body))]


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The answer of `count_tokens`."""

    input_tokens: int


def router(endpoint: Endpoint, keys: Keys) -> APIRouter:
    """Return the routes, open to user keys and to the keys of sessions."""
    is_admitted = Depends(admit(keys, endpoint.sessions.keys.opened_by))
    routes = DialectRoutes(endpoint)
    openai = APIRouter(dependencies=[is_admitted], responses={**errors(), 200: _ANSWER}, tags=["responses"])
    messages = APIRouter(
        dependencies=[Depends(_speak), is_admitted], responses=errors(_MESSAGES_ERROR), tags=["messages"]
    )
    for prefix in _PREFIXES:
        add_route(openai, "POST", f"{prefix}/responses", routes.create_response, ResponsesBody)
        add_route(messages, "POST", f"{prefix}/messages", routes.create_message, MessagesBody, None, {200: _ANSWER})
        counting = f"{prefix}/messages/count_tokens"
        add_route(messages, "POST", counting, routes.count_tokens, CountTokensBody, TokenCount)
    both = APIRouter()
    both.include_router(openai)
    both.include_router(messages)
    return both


class DialectRoutes:
    """The handlers of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def create_response(self, request: Request, body: AskedResponse) -> Response:
        """One turn of the policy as a response object, or with `stream` as its events."""
        num_items = 1 if isinstance(body.input, str) else len(body.input)
        writer = responses.ResponseWriter(body, uuid.uuid4().hex, int(self._endpoint.unix_time()))
        return await self._turn(request, body, responses.chat_call, num_items, writer, writer.error_event)

    async def create_message(self, request: Request, body: AskedMessage) -> Response:
        """One turn of the policy as a message, or with `stream` as its events."""
        writer = anthropic.MessageWriter(body, uuid.uuid4().hex)
        error_body = partial(anthropic.error_body, request_id=_request_id(request))
        return await self._turn(request, body, anthropic.chat_call, len(body.messages), writer, error_body)

    async def count_tokens(self, request: Request, body: Counted) -> Response:
        """Count the prompt's tokens: in a named session as its history has them, else rendered whole."""
        check_model(request, self._endpoint, body.model)
        messages, tools = anthropic.prompt(body)
        arguments = anthropic.template_arguments(body, self._endpoint.served)
        if names_session(request):
            session = await session_of(request, self._endpoint, None)
            counted = ChatCall(messages, SamplingParams(1), tools=tools, template_kwargs=arguments)
            num_tokens = len((await session.preview(counted)).ids)
        else:
            render = self._endpoint.renderer.render
            num_tokens = len(await asyncio.to_thread(render, messages, tools, arguments))
        return json_response(TokenCount(num_tokens))

    async def _turn(
        self,
        request: Request,
        body: ResponsesBody | MessagesBody,
        chat_call: Callable[..., Any],
        num_messages: int,
        writer: responses.ResponseWriter | anthropic.MessageWriter,
        error_body: Callable[[AgentLoopError], dict[str, Any]],
    ) -> Response:
        endpoint = self._endpoint
        check_model(request, endpoint, body.model, body.named_session)
        reading = partial(chat_call, body, endpoint.served)
        chat = await as_call(reading, num_messages)
        handler = await CallHandler.open(request, endpoint, body.named_session)
        if not body.stream:
            return await handler.answer(chat, writer.whole)
        return handler.stream(chat, typed_events(writer.events), lambda error: sse(error_body(error), "error"))


async def _speak(request: Request) -> None:
    """Route dependency, the first: errors are written, and requests named, as Anthropic's clients read them."""
    await speaks(partial(anthropic.error_body, request_id=_request_id(request)), "request-id")(request)


def _request_id(request: Request) -> str:
    request_id: str = request.scope["state"]["request_id"]
    return request_id
