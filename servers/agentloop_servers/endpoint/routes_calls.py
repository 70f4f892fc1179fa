"""The routes of model calls, tokens and scores, in one table for all dialects.

Most routes exist at the root and under `/sessions/{session_id}`. They keep only caches: `calls.py` runs calls and
`agentloop/chat/` reads and writes the dialects. Anthropic's routes return errors in Anthropic's form.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from starlette.responses import Response

from agentloop.api.coordinator import seen_adapters
from agentloop.api.requests import TokenScoreBody
from agentloop.chat import anthropic, openai_completions, responses
from agentloop.chat import openai as openai_chat
from agentloop.chat.anthropic_bodies import CountTokensBody, MessagesBody
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, shown_images
from agentloop.chat.choices import ChoiceWriter, TokenTexts
from agentloop.chat.fields import read_body
from agentloop.chat.openai_bodies import CallBase, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.chat.sampling import template_kwargs
from agentloop.chat.scores import score_call, scores_of
from agentloop.errors import AgentLoopError, InvalidRequest, UnsupportedParameter
from agentloop.rendering.renderer import off_loop
from agentloop.types import SamplingParams, TokenScores
from agentloop.values import codec
from agentloop_servers.endpoint.calls import (
    adapter_of,
    answer_call,
    answer_calls,
    call_adapter,
    check_model,
    find_or_create_session,
    find_referenced_session,
    json_of_replies,
    off_loop_if_long,
    score_calls,
    stream_call,
)
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import Keys, authenticate, caller_of, names_session, require_user
from agentloop_servers.http.guard import json_body, read_json_body, speaks
from agentloop_servers.http.openapi import ERROR_SCHEMA, STREAMED, add_route, answered, errors
from agentloop_servers.http.responses import json_response, long_response, unread_response
from agentloop_servers.http.sse import DONE, sse

AskedCompletion = Annotated[CompletionBody, Depends(json_body(CompletionBody, read_body))]
Tokenize = Annotated[TokenizeBody, Depends(json_body(TokenizeBody, read_body))]
Detokenize = Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody, read_body))]
AskedResponse = Annotated[ResponsesBody, Depends(json_body(ResponsesBody, read_body))]
AskedMessage = Annotated[MessagesBody, Depends(json_body(MessagesBody, read_body))]
Counted = Annotated[CountTokensBody, Depends(json_body(CountTokensBody, read_body))]
Scored = Annotated[TokenScoreBody, Depends(json_body(TokenScoreBody))]

_ANTHROPIC_HEADER = "anthropic-version"

_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": STREAMED}}
_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_STREAMED_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": {**_JSON, **STREAMED}}}

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


@dataclass(frozen=True, slots=True)
class Models:
    """The response to `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


@dataclass(frozen=True, slots=True)
class Preview:
    """The prompt of a call that is not sampled, and how its history matches the session's."""

    prompt_token_ids: list[int]
    prompt: str
    parent_turn_id: str | None
    split_reason: str | None
    split_detail: str | None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The text of token ids, including control tokens."""

    prompt: str


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The response of `count_tokens`."""

    input_tokens: int


def router(endpoint: Endpoint, keys: Keys, token_calls: TokenCalls) -> APIRouter:
    """Return the routes, open to user keys and session keys."""
    routes = CallRoutes(endpoint, token_calls, keys)
    is_authenticated, own = (
        Depends(authenticate(keys, endpoint.sessions.keys.opened_by)),
        [Depends(routes.check_session)],
    )
    tags = {
        "openai": APIRouter(dependencies=[is_authenticated], responses=errors(), tags=["openai"]),
        "responses": APIRouter(
            dependencies=[is_authenticated], responses={**errors(), **_STREAMED_ANSWER}, tags=["responses"]
        ),
        "messages": APIRouter(
            dependencies=[Depends(_speak), is_authenticated], responses=errors(_MESSAGES_ERROR), tags=["messages"]
        ),
        "models": APIRouter(
            dependencies=[Depends(_speak_if_asked), is_authenticated],
            responses=errors(_MESSAGES_ERROR),
            tags=["openai"],
        ),
        "scores": APIRouter(dependencies=[is_authenticated], responses=errors(), tags=["scores"]),
    }
    calls: list[tuple[str, str, Any, type[Any], Any, dict[int | str, dict[str, Any]] | None]] = [
        ("openai", "/v1/chat/completions", routes.chat, ChatBody, ChatCompletion, _STREAMED),
        ("openai", "/v1/completions", routes.complete, CompletionBody, Completion, _STREAMED),
        ("openai", "/v1/chat/completions/render", routes.render, ChatBody, Preview, None),
        ("responses", "/v1/responses", routes.create_response, ResponsesBody, None, None),
        ("messages", "/v1/messages", routes.create_message, MessagesBody, None, _STREAMED_ANSWER),
        ("messages", "/v1/messages/count_tokens", routes.count_tokens, CountTokensBody, TokenCount, None),
    ]
    # These routes use no session, but a session in the path must still be the caller's.
    others: list[tuple[str, str, Any, type[Any] | None, Any]] = [
        ("POST", "/v1/tokenize", routes.tokenize, TokenizeBody, Tokenized),
        ("POST", "/v1/detokenize", routes.detokenize, DetokenizeBody, Detokenized),
        ("POST", "/tokenize", routes.tokenize, TokenizeBody, Tokenized),
        ("POST", "/detokenize", routes.detokenize, DetokenizeBody, Detokenized),
    ]
    models: list[tuple[str, Any, Any]] = [
        ("/v1/models", routes.models, Models | dict[str, Any]),
        ("/v1/models/{model:path}", routes.model, Model | dict[str, Any]),
    ]
    for prefix in ("", "/sessions/{session_id}"):
        for tag, path, handler, body, kind, shown in calls:
            add_route(tags[tag], "POST", f"{prefix}{path}", handler, body, kind, shown)
        for method, path, handler, taken, kind in others:
            needed = own if prefix else None
            add_route(tags["openai"], method, f"{prefix}{path}", handler, taken, kind, dependencies=needed)
        for path, handler, shown in models:
            add_route(
                tags["models"], "GET", f"{prefix}{path}", handler, None, shown, dependencies=own if prefix else None
            )
    add_route(tags["scores"], "POST", "/score", routes.score, TokenScoreBody, responses=answered(list[TokenScores]))
    whole = APIRouter()
    for part in tags.values():
        whole.include_router(part)
    return whole


class CallRoutes:
    """The handlers of one endpoint."""

    def __init__(self, endpoint: Endpoint, token_calls: TokenCalls, keys: Keys) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._token_calls = token_calls
        self._texts = TokenTexts(endpoint.renderer)
        self._read_chat = partial(
            openai_chat.read_chat, cache=BodyCache(shown_names=endpoint.renderer.facts.shown_names)
        )

    async def check_session(self, request: Request) -> None:
        """Raise the errors of `find_or_create_session` if the session in the path is not the caller's."""
        await find_or_create_session(request, self._endpoint, None)

    # OpenAI's chat and completions

    async def chat(self, request: Request) -> Response:
        """Sample one reply, or `n`, to a conversation; optionally streamed as server-sent events.

        In addition to OpenAI's fields the response has `session` (turn ids, how the history was matched, the
        positions of tool calls in the tokens), `weight_versions` of each choice, and on request `prompt_token_ids`
        and `token_ids`.
        """
        asked = await read_json_body(request, self._read_chat)
        call = await self._to_call(request, asked)
        writer = openai_chat.ChatWriter(asked.body, self._texts, int(self._endpoint.unix_time()))
        return await self._choices(request, call, asked.body, writer)

    async def complete(self, request: Request, body: AskedCompletion) -> Response:
        """Continue a raw prompt, or each of a list of prompts, each in its own session."""
        endpoint = self._endpoint
        await check_model(request, endpoint, body.model, body.named_session)
        if body.is_batch and names_session(request):
            raise UnsupportedParameter("a request in a session must have one prompt, not a list", param="prompt")
        reading = partial(openai_completions.prompts_of, body, endpoint.renderer)
        prompts = await off_loop(body.num_chars, reading)
        write = partial(openai_completions.CompletionWriter, body, self._texts, int(endpoint.unix_time()))
        if body.echo:
            return await self._echo(request, body, prompts, write())
        calls = [openai_completions.to_call(body, ids, endpoint.chat_model) for ids in prompts]
        if not body.is_batch:
            return await self._choices(request, calls[0], body, write())
        return await answer_calls(
            request,
            endpoint,
            calls,
            None,
            lambda results: openai_completions.joined([write().whole(one) for one in results]),
        )

    async def _echo(
        self,
        request: Request,
        body: CompletionBody,
        prompts: Sequence[tuple[int, ...]],
        writer: openai_completions.CompletionWriter,
    ) -> Response:
        if names_session(request) or body.named_session is not None:
            raise UnsupportedParameter(
                "'echo' is not available in a session, which could not record it", param="echo"
            )
        model, decode, now = self._endpoint.chat_model, self._endpoint.renderer.decode, self._endpoint.unix_time()
        asked = [openai_completions.echo_call(body, ids, model) for ids in prompts]
        found = await score_calls(request, self._endpoint, self._token_calls, asked, param="prompt")
        if found is None:
            return unread_response()
        scores = iter(found)
        pairs = [(ids, None if call is None else next(scores)) for ids, call in zip(prompts, asked, strict=True)]

        def render() -> Any:
            answers = [writer.echoed(ids, decode(ids), score, int(now)) for ids, score in pairs]
            return openai_completions.joined(answers) if body.is_batch else answers[0]

        return await json_of_replies(found, render)

    # Scores

    async def score(self, request: Request, body: Scored) -> Response:
        """Score the tokens of the given sequences with the served weights, each sequence with one version; samples
        nothing."""
        require_user(request)
        if body.model is not None:
            await call_adapter(request, self._endpoint, body.model)
        model, demand = replace(self._endpoint.chat_model, timeout_s=body.timeout_s), body.weight_version
        asked = [
            score_call(tuple(one.token_ids), one.start, body.top_k, model, demand, param="prompts")
            for one in body.prompts
        ]
        found = await score_calls(request, self._endpoint, self._token_calls, asked, param="prompts")
        if found is None:
            return unread_response()
        scores = list(map(scores_of, found))
        return await long_response(request, lambda: codec.encode(scores), lambda: scores)

    async def render(self, request: Request) -> Response:
        """The prompt that a chat completion would be sampled from. Nothing is sampled or recorded.

        In a named session the response also says how the history matches the session's.
        """
        asked = await read_json_body(request, self._read_chat)
        call, body = await self._to_call(request, asked), asked.body
        endpoint = self._endpoint
        if names_session(request) or body.named_session is not None:
            session = await find_or_create_session(request, endpoint, body.named_session)
            preview = await session.preview(call)
            ids, parent, split = list(preview.ids), preview.parent_id, preview.split
        else:
            if call.images:
                raise UnsupportedParameter(
                    "a prompt with images can be rendered only in a session", param="messages"
                )
            shown = call.messages, call.tools, call.template_kwargs
            ids = await asyncio.to_thread(partial(endpoint.renderer.render, *shown, is_open=call.continues))
            parent, split = None, None
        text = await asyncio.to_thread(endpoint.renderer.decode, ids)
        reason, detail = (None, None) if split is None else (split.reason.value, split.detail)
        return json_response(Preview(ids, text, parent, reason, detail))

    async def _to_call(self, request: Request, asked: openai_chat.ChatRequest) -> ChatCall:
        endpoint = self._endpoint
        await check_model(request, endpoint, asked.body.model, asked.body.named_session)
        return await off_loop_if_long(partial(openai_chat.to_call, asked, endpoint.chat_model), len(asked.messages))

    async def _choices(self, request: Request, call: ChatCall, body: CallBase, writer: ChoiceWriter) -> Response:
        endpoint, name = self._endpoint, body.named_session
        if not body.stream:
            return await answer_call(request, endpoint, call, name, writer.whole)
        return await stream_call(request, endpoint, call, name, writer.chunks, error_event, are_named=False)

    # OpenAI's responses, and Anthropic's messages

    async def create_response(self, request: Request, body: AskedResponse) -> Response:
        """One turn of the policy as a response object, or with `stream` as its events."""
        endpoint, name = self._endpoint, body.named_session
        await check_model(request, endpoint, body.model, name)
        turns = None
        if (referenced := responses.referenced_session(body)) is not None:
            session_id, param, given = referenced
            session = await find_referenced_session(request, endpoint, name, session_id)
            if session is None:
                raise responses.not_found(given, param)
            turns = session.conversation_to
            if not names_session(request):
                name = session_id  # by default the earlier response's id names the session
        num_items = 1 if isinstance(body.input, str) else len(body.input)
        call = await off_loop_if_long(partial(responses.to_call, body, endpoint.chat_model, turns), num_items)
        writer = responses.ResponseWriter(body, self._texts, int(endpoint.unix_time()))
        if not body.stream:
            return await answer_call(request, endpoint, call, name, writer.whole)

        def failed(error: AgentLoopError) -> bytes:
            return sse(writer.error_event(error), "error")

        return await stream_call(
            request, endpoint, call, name, writer.events, failed, are_named=True, begin=writer.begin
        )

    async def create_message(self, request: Request, body: AskedMessage) -> Response:
        """One turn of the policy as a message, or with `stream` as its events."""
        endpoint, name = self._endpoint, body.named_session
        await check_model(request, endpoint, body.model, name)
        call = await off_loop_if_long(partial(anthropic.to_call, body, endpoint.chat_model), len(body.messages))
        writer = anthropic.MessageWriter(body, uuid.uuid4().hex)
        if not body.stream:
            return await answer_call(request, endpoint, call, name, writer.whole)

        def failed(error: AgentLoopError) -> bytes:
            return sse(anthropic.error_body(error, _request_id(request)), "error")

        return await stream_call(request, endpoint, call, name, writer.events, failed, are_named=True)

    async def count_tokens(self, request: Request, body: Counted) -> Response:
        """Count the prompt's tokens. In a named session the prompt extends the session's history."""
        await check_model(request, self._endpoint, body.model)
        messages, tools, images = anthropic.prompt(body)
        shown = shown_images(images, self._endpoint.chat_model, "messages")
        arguments = anthropic.template_arguments(body, self._endpoint.chat_model)
        if names_session(request):
            session = await find_or_create_session(request, self._endpoint, None)
            counted = ChatCall(messages, SamplingParams(1), tools=tools, template_kwargs=arguments, images=shown)
            num_tokens = len((await session.preview(counted)).ids)
        else:
            if shown:
                raise UnsupportedParameter("tokens of images can be counted only in a session", param="messages")
            render = self._endpoint.renderer.render
            num_tokens = len(await asyncio.to_thread(render, messages, tools, arguments))
        return json_response(TokenCount(num_tokens))

    # Models and tokens

    async def models(self, request: Request) -> Response:
        """The served models: the policy with its adapters, and models next to the policy.

        With the header `anthropic-version` the response is one page in Anthropic's form.
        """
        shown = []
        for endpoint in (self._endpoint, *self._endpoint.others.values()):
            version = await endpoint.weight_version()
            shown += [_shown_model(endpoint, name, version) for name in (endpoint.model_name, *endpoint.adapters)]
            shown += [
                _shown_model(endpoint, one.name, one.version, endpoint.model_name)
                for one in seen_adapters(await endpoint.served_adapters(), self._keys.sees_as(caller_of(request)))
            ]
        if _ANTHROPIC_HEADER in request.headers:
            return json_response(anthropic.models_page(shown))
        return json_response({"object": "list", "data": shown})

    async def model(self, request: Request, model: str) -> Response:
        """The model, by its name or as `default`; in a session by any name."""
        endpoint = self._endpoint
        await check_model(request, endpoint, model)
        if adapter := adapter_of(request):
            version = next((one.version for one in await endpoint.served_adapters() if one.name == adapter), None)
            shown = _shown_model(endpoint, model, version, endpoint.model_name)
        else:
            shown = _shown_model(endpoint, model, await endpoint.weight_version())
        return json_response(anthropic.model_info(shown) if _ANTHROPIC_HEADER in request.headers else shown)

    async def tokenize(self, request: Request, body: Tokenize) -> Response:
        """The token ids of a text, or of a conversation rendered by the chat template."""
        endpoint = self._endpoint
        if body.model is not None:
            await check_model(request, endpoint, body.model)
        ids = await asyncio.to_thread(self._ids_of, body)
        strings = [self._texts.of(token_id)[0] for token_id in ids] if body.return_token_strs else None
        return json_response(Tokenized(len(ids), endpoint.max_model_len, ids, strings))

    async def detokenize(self, request: Request, body: Detokenize) -> Response:
        """The text of token ids, including control tokens."""
        if body.model is not None:
            await check_model(request, self._endpoint, body.model)
        renderer = self._endpoint.renderer
        if max(body.tokens, default=0) >= renderer.vocab_size:
            raise InvalidRequest(
                f"token id {max(body.tokens)} is outside [0, {renderer.vocab_size})", param="tokens"
            )
        text = await asyncio.to_thread(renderer.decode, body.tokens)
        return json_response(Detokenized(text))

    def _ids_of(self, body: TokenizeBody) -> list[int]:
        renderer = self._endpoint.renderer
        if body.prompt is not None:
            return renderer.ids(body.prompt)
        messages, tools = openai_chat.conversation_of(body.messages or (), body.tools)
        return renderer.render(messages, tools, template_kwargs(body, self._endpoint.chat_model.template_arguments))


def _shown_model(
    endpoint: Endpoint, name: str, weight_version: int | None, parent: str | None = None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": endpoint.created_at,
        "owned_by": "agentloop",
        "max_model_len": endpoint.max_model_len,
        "weight_version": weight_version,
        **({} if parent is None else {"parent": parent}),
    }


def error_event(error: AgentLoopError) -> bytes:
    """Return an error in the middle of a stream as an event, with the end mark."""
    return sse(error.to_wire()) + DONE


async def _speak(request: Request) -> None:
    """First route dependency: errors and request ids are written in Anthropic's form."""
    await speaks(partial(anthropic.error_body, request_id=_request_id(request)), "request-id")(request)


async def _speak_if_asked(request: Request) -> None:
    """First route dependency: like `_speak` if the client sends `anthropic-version`."""
    if _ANTHROPIC_HEADER in request.headers:
        await _speak(request)


def _request_id(request: Request) -> str:
    request_id: str = request.scope["state"]["request_id"]
    return request_id
