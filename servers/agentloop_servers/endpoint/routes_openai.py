"""The OpenAI routes: chat completions, completions, models, tokens, and a look at how a prompt would be rendered.

All stand at the root and under `/sessions/{session_id}`. They hold no state: a call's life is in `call_handler.py`,
what a body means in `agentloop/chat/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from starlette.responses import Response

from agentloop.chat import openai as openai_chat
from agentloop.chat import openai_completions
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, ChatResult
from agentloop.chat.choices import ChoiceWriter
from agentloop.chat.fields import read_body
from agentloop.chat.logprobs import TokenTexts
from agentloop.chat.openai_bodies import CallBase, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from agentloop.chat.sampling import template_kwargs
from agentloop.errors import AgentLoopError, InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_piece import TurnPiece
from agentloop.rendering.renderer import off_loop
from agentloop_servers.endpoint.call_handler import CallHandler, as_call, check_model, session_of
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys, admit, names_session
from agentloop_servers.http.guard import json_body, read_json_body
from agentloop_servers.http.openapi import STREAMED, add_route, errors
from agentloop_servers.http.responses import json_response
from agentloop_servers.http.sse import DONE, sse

PREFIXES = ("", "/sessions/{session_id}")

AskedCompletion = Annotated[CompletionBody, Depends(json_body(CompletionBody, read_body))]
Tokenize = Annotated[TokenizeBody, Depends(json_body(TokenizeBody, read_body))]
Detokenize = Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody, read_body))]

BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


@dataclass(frozen=True, slots=True)
class Models:
    """The answer to `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


@dataclass(frozen=True, slots=True)
class Preview:
    """The prompt of a call that was not made, and how its history was matched with the session's."""

    prompt_token_ids: list[int]
    prompt: str
    parent_turn_id: str | None
    split_reason: str | None
    split_detail: str | None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The text of ids, control tokens included."""

    prompt: str


def router(endpoint: Endpoint, keys: Keys) -> APIRouter:
    """Return the routes, open to user keys and to the keys of sessions."""
    routes = OpenAiRoutes(endpoint)
    guard = [Depends(admit(keys, endpoint.sessions.keys.opened_by))]
    router = APIRouter(dependencies=guard, responses=errors(), tags=["openai"])
    for prefix in PREFIXES:
        router.include_router(_routes_under(prefix, routes))
    return router


def _routes_under(prefix: str, routes: OpenAiRoutes) -> APIRouter:
    router = APIRouter(prefix=prefix)
    # A session in the path must be the caller's: also for routes that need none, and do not look for it.
    own = [Depends(routes.check_session)] if prefix else []
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": STREAMED}}
    posts: list[tuple[str, Any, type[Any], type[Any], dict[int | str, dict[str, Any]]]] = [
        ("/v1/chat/completions", routes.chat, ChatBody, ChatCompletion, streamed),
        ("/v1/completions", routes.complete, CompletionBody, Completion, streamed),
        ("/v1/chat/completions/render", routes.render, ChatBody, Preview, {}),
        ("/v1/tokenize", routes.tokenize, TokenizeBody, Tokenized, {}),
        ("/v1/detokenize", routes.detokenize, DetokenizeBody, Detokenized, {}),
        ("/tokenize", routes.tokenize, TokenizeBody, Tokenized, {}),
        ("/detokenize", routes.detokenize, DetokenizeBody, Detokenized, {}),
    ]
    for path, route, body, answer, responses in posts:
        needed = own if answer in (Tokenized, Detokenized) else None
        add_route(router, "POST", path, route, body, answer, responses, needed)
    add_route(router, "GET", "/v1/models", routes.models, answer=Models, dependencies=own)
    add_route(router, "GET", "/v1/models/{model:path}", routes.model, answer=Model, dependencies=own)
    return router


class OpenAiRoutes:
    """The handlers of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._texts = TokenTexts(endpoint.renderer)
        self._read_chat = partial(
            openai_chat.read_chat, cache=BodyCache(shown_names=endpoint.renderer.facts.shown_names)
        )

    async def check_session(self, request: Request) -> None:
        """Raises what `session_of` raises for a session that is not the caller's."""
        await session_of(request, self._endpoint, None)

    async def chat(self, request: Request) -> Response:
        """One answer, or `n`, to a conversation; streamed as server-sent events if asked.

        Beside OpenAI's fields: `session` (turn ids, how the history was matched, where tool calls are among the
        tokens), `weight_versions` of each choice, and if asked for `prompt_token_ids` and `token_ids`.
        """
        asked = await read_json_body(request, self._read_chat)
        call, body = await self._chat_call(request, asked), asked.body
        handler = await CallHandler.open(request, self._endpoint, body.named_session)
        writer = openai_chat.ChatWriter(body, self._texts, int(self._endpoint.unix_time()))
        return await _answer(handler, call, body, writer)

    async def complete(self, request: Request, body: AskedCompletion) -> Response:
        """Continue a raw prompt."""
        endpoint = self._endpoint
        check_model(request, endpoint, body.model, body.named_session)
        reading = partial(openai_completions.prompt_ids_of, body, endpoint.renderer)
        prompt_ids = await off_loop(len(body.prompt), reading)
        call = openai_completions.to_call(body, prompt_ids, endpoint.served)
        handler = await CallHandler.open(request, endpoint, body.named_session)
        writer = openai_completions.CompletionWriter(body, self._texts, int(endpoint.unix_time()))
        return await _answer(handler, call, body, writer)

    async def models(self) -> Response:
        """The one model that is served, under its name and those of adapters that were loaded into it."""
        names = (self._endpoint.model_name, *self._endpoint.adapters)
        version = await self._endpoint.weight_version()
        return json_response({"object": "list", "data": [self._model(name, version) for name in names]})

    async def model(self, request: Request, model: str) -> Response:
        """The model, by its name or as `default`; in a session by any name."""
        check_model(request, self._endpoint, model)
        return json_response(self._model(model, await self._endpoint.weight_version()))

    async def render(self, request: Request) -> Response:
        """The prompt that a chat completion would be sampled from; nothing is sampled or recorded.

        In a named session also how the history is matched with what the session has.
        """
        asked = await read_json_body(request, self._read_chat)
        call, body = await self._chat_call(request, asked), asked.body
        endpoint = self._endpoint
        if names_session(request) or body.named_session is not None:
            session = await session_of(request, endpoint, body.named_session)
            preview = await session.preview(call)
            ids, parent, split = list(preview.ids), preview.parent_id, preview.split
        else:
            if call.images:
                raise UnsupportedParameter("a prompt with images is shown in a session only", param="messages")
            shown = call.messages, call.tools, call.template_kwargs
            ids = await asyncio.to_thread(partial(endpoint.renderer.render, *shown, is_open=call.continues))
            parent, split = None, None
        text = await asyncio.to_thread(endpoint.renderer.decode, ids)
        reason, detail = (None, None) if split is None else (split.reason.value, split.detail)
        return json_response(Preview(ids, text, parent, reason, detail))

    async def tokenize(self, request: Request, body: Tokenize) -> Response:
        """The ids of a text, or of a conversation as the chat template renders it."""
        endpoint = self._endpoint
        if body.model is not None:
            check_model(request, endpoint, body.model)
        ids = await asyncio.to_thread(self._ids_of, body)
        strings = [self._texts.of(token_id)[0] for token_id in ids] if body.return_token_strs else None
        return json_response(Tokenized(len(ids), endpoint.max_model_len, ids, strings))

    async def detokenize(self, request: Request, body: Detokenize) -> Response:
        """The text of ids, control tokens included."""
        if body.model is not None:
            check_model(request, self._endpoint, body.model)
        renderer = self._endpoint.renderer
        if max(body.tokens, default=0) >= renderer.vocab_size:
            raise InvalidRequest(f"a token id is outside [0, {renderer.vocab_size})", param="tokens")
        text = await asyncio.to_thread(renderer.decode, body.tokens)
        return json_response(Detokenized(text))

    async def _chat_call(self, request: Request, asked: openai_chat.ChatRequest) -> ChatCall:
        endpoint = self._endpoint
        check_model(request, endpoint, asked.body.model, asked.body.named_session)
        return await as_call(partial(openai_chat.to_call, asked, endpoint.served), len(asked.messages))

    def _ids_of(self, body: TokenizeBody) -> list[int]:
        renderer = self._endpoint.renderer
        if body.prompt is not None:
            return renderer.ids(body.prompt)
        messages, tools = openai_chat.conversation_of(body.messages or (), body.tools)
        return renderer.render(messages, tools, template_kwargs(body, self._endpoint.served.template_arguments))

    def _model(self, name: str, weight_version: int | None) -> dict[str, Any]:
        endpoint = self._endpoint
        return {
            "id": name,
            "object": "model",
            "created": endpoint.created_at,
            "owned_by": "agentloop",
            "max_model_len": endpoint.max_model_len,
            "weight_version": weight_version,
        }


async def _answer(handler: CallHandler, call: ChatCall, body: CallBase, writer: ChoiceWriter) -> Response:
    if not body.stream:
        return await handler.answer(call, writer.whole)

    async def events(pieces: AsyncIterator[TurnPiece | ChatResult]) -> AsyncIterator[bytes]:
        async for chunk in writer.chunks(pieces):
            yield sse(chunk)
        yield DONE

    return handler.stream(call, events, error_event)


def error_event(error: AgentLoopError) -> bytes:
    """A failure in the middle of a stream: the envelope as an event, and the end mark."""
    return sse(error.to_wire()) + DONE
