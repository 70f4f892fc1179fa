"""Calls of SGLang's dialect: `POST /generate`, and the routes that count and abort them.

Owns the table of this process's open calls. Like vLLM's token route, calls are not recorded and use leases; calls
with the same `X-SMG-Routing-Key` header share a lease. After an abort or an engine's pause, a call ends with the
tokens sampled so far, because trainers resume partial samples themselves; calls of other dialects continue.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from agentloop.api.requests import Body
from agentloop.chat.call import ChatCall
from agentloop.chat.choices import TokenTexts
from agentloop.chat.fields import Ignored, read_body
from agentloop.chat.scores import check_num_scores
from agentloop.concurrency.aio import side_by_side
from agentloop.errors import AgentLoopError, InvalidRequest, UnsupportedParameter
from agentloop.generation.leased_engine import AbortSwitch
from agentloop.generation.turn_reader import TurnPiece
from agentloop.rendering.renderer import off_loop
from agentloop.trajectory.node import Reply
from agentloop.types import Generation
from agentloop_contracts import sglang_bodies
from agentloop_contracts.sglang_bodies import MAX_RID_CHARS, SglangBody, SglangWriter, ShownChoice
from agentloop_servers.endpoint.calls import (
    affinity_key,
    affinity_of,
    bounded,
    call_adapter,
    event_stream,
    finish_if_final,
    json_of_replies,
)
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import Keys, caller_of
from agentloop_servers.http.guard import json_body, speaks
from agentloop_servers.http.openapi import OBJECT, add_route, errors
from agentloop_servers.http.responses import json_response, unless_client_leaves, unread_response
from agentloop_servers.http.sse import DONE, sse


@dataclass(frozen=True, slots=True, eq=False)
class _OpenCall:
    """A prompt that is being sampled, with an abort switch for each choice."""

    rid: str
    owner: str
    chat_call: ChatCall
    score_call: ChatCall | None
    place: int  # index in its batch
    switches: tuple[AbortSwitch, ...]

    @property
    def num_prompt(self) -> int:
        return len(self.chat_call.prompt_ids or ())

    def name(self, index: int) -> str:
        """Return the id of a choice."""
        return self.rid if len(self.switches) == 1 else f"{self.rid}_{index}"


class AbortBody(Body):
    """The body of `POST /abort_request`: the name of a request, or all requests of the caller."""

    rid: str | None = Field(default=None, max_length=MAX_RID_CHARS)
    abort_all: bool = False
    abort_message: Ignored = None

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not (self.rid or self.abort_all):
            raise InvalidRequest("the body names no request: give a rid, or set abort_all", param="rid")
        return self


Abort = Annotated[AbortBody, Depends(json_body(AbortBody, read_body))]


class SglangCalls:
    """The calls of SGLang's dialect in one process."""

    def __init__(self, endpoint: Endpoint, token_calls: TokenCalls) -> None:
        self._endpoint = endpoint
        self._token_calls = token_calls
        self._texts = TokenTexts(endpoint.renderer)
        self._open: set[_OpenCall] = set()

    async def generate(self, request: Request, body: SglangBody) -> Response:
        """Sample a prompt or a batch. With `stream`, each event has all tokens and text so far."""
        request.scope["state"]["envelope"] = sglang_bodies.error_body
        endpoint, caller = self._endpoint, caller_of(request)
        if caller.session_id is not None:
            raise UnsupportedParameter(
                "calls in SGLang's dialect cannot be recorded in a session: use a user key, not a session key",
                param="input_ids",
            )
        if body.lora_path is not None:
            await call_adapter(request, endpoint, body.lora_path)
        affinity = affinity_of(request, endpoint, affinity_key(request))
        num_chars = len(body.text) if isinstance(body.text, str) else sum(map(len, body.text or ()))
        prompts = await off_loop(num_chars, lambda: body.prompts(endpoint.renderer))
        calls = []
        for place, (rid, prompt) in enumerate(zip(body.rids(uuid.uuid4().hex), prompts, strict=True)):
            call = bounded(request, sglang_bodies.to_call(body, prompt, endpoint.chat_model))
            unbounded = sglang_bodies.prompt_call(body, prompt, endpoint.chat_model)
            score_call = None if unbounded is None else bounded(request, unbounded)
            switches = tuple(AbortSwitch() for _ in range(body.num_choices))
            calls.append(_OpenCall(rid, caller.owner, call, score_call, place, switches))
        check_num_scores([call.score_call for call in calls if call.score_call is not None], "logprob_start_len")
        writer = SglangWriter(body, endpoint.renderer, self._texts)
        if body.stream:
            end = partial(finish_if_final, request, self._token_calls, affinity)
            events = self._events(body, calls, affinity, writer, end)
            return event_stream(request, endpoint, events, _error_event)
        begun_at = asyncio.get_running_loop().time()
        with self._opened(calls):
            sampled = await unless_client_leaves(request, self._sample(body, calls, affinity))
        if sampled is None:
            return unread_response()
        finish_if_final(request, self._token_calls, affinity)
        latency_s = asyncio.get_running_loop().time() - begun_at
        served = await self._served([reply for score, reply in sampled if score is None])
        places = [(call, index) for call in calls for index in range(body.num_choices)]

        def render() -> Any:
            answers = []
            for (call, index), (score, reply) in zip(places, sampled, strict=True):
                answers.append(writer.whole(call.name(index), call.num_prompt, reply, served, latency_s))
                writer.add_scores(answers[-1], call.chat_call.prompt_ids or (), score)
            return answers if body.is_batch or len(answers) > 1 else answers[0]

        return await json_of_replies([part for pair in sampled for part in pair if part is not None], render)

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes other than `/generate`. A user key gives access to the user's own calls, an admin key
        to all."""
        router = APIRouter(
            dependencies=[Depends(keys.require_user), Depends(speaks(sglang_bodies.error_body))],
            responses={**errors(), **OBJECT},
            tags=["sglang"],
        )

        async def abort_request(request: Request, body: Abort) -> Response:
            """End running calls in every process; they return the tokens sampled so far."""
            rid = None if body.abort_all else body.rid
            return json_response({"num_aborted": await self.abort(request, keys.sees(request), rid)})

        async def loads(request: Request) -> Response:
            """Count the open calls of SGLang's dialect per process. Trainers abort until none is left."""
            return json_response({"loads": await self._loads(request, keys.sees(request))})

        async def workers(request: Request) -> Response:
            """List the workers in the format of SGLang's router: this service is the only one."""
            url = self._endpoint.public_url or str(request.base_url).rstrip("/")
            return json_response(
                {"workers": [{"id": url, "url": url, "worker_type": "regular", "is_healthy": True}]}
            )

        add_route(router, "POST", "/abort_request", abort_request, AbortBody)
        add_route(router, "GET", "/v1/loads", loads)
        add_route(router, "GET", "/workers", workers)
        return router

    async def abort(self, request: Request, names: Sequence[str] | None, rid: str | None) -> int:
        """End the open calls of these users (None: all users) with a request name (None: all), in every process.

        `rid` is the name of a body, of a prompt in its batch, or of a choice. Returns the number of choices ended
        in this process. Raises ServiceUnavailable if another process does not respond.
        """
        switches = [
            switch
            for name, switch in self._choices(names)
            if rid is None or name == rid or name.startswith(f"{rid}_")
        ]
        await asyncio.gather(*(switch.throw() for switch in switches))
        await self._ask_others(request)
        return len(switches)

    async def _loads(self, request: Request, names: Sequence[str] | None) -> list[dict[str, int]]:
        rank = 0 if self._endpoint.shards is None else self._endpoint.shards.rank
        num_open = len(self._choices(names))
        own = {"dp_rank": rank, "num_running_reqs": num_open, "num_waiting_reqs": 0, "num_total_reqs": num_open}
        return [own, *(load for other in await self._ask_others(request) for load in orjson.loads(other)["loads"])]

    async def _ask_others(self, request: Request) -> list[bytes]:
        shards = self._endpoint.shards
        return [] if shards is None else await shards.ask_others(request)

    def _choices(self, names: Sequence[str] | None) -> list[tuple[str, AbortSwitch]]:
        mine = [call for call in self._open if names is None or call.owner in names]
        return [(call.name(index), switch) for call in mine for index, switch in enumerate(call.switches)]

    async def _sample(
        self,
        body: SglangBody,
        calls: Sequence[_OpenCall],
        affinity: str | None,
        show: Callable[[_OpenCall, int, TurnPiece | Reply], None] | None = None,
    ) -> list[tuple[Generation | None, Reply]]:
        """Return each choice's reply, with the scores of its prompt if the body requests them."""

        async def sample(call: _OpenCall) -> list[tuple[Generation | None, Reply]]:
            param = "text" if body.input_ids is None else "input_ids"
            shared, score, switches = (affinity, call.owner), None, call.switches
            if call.score_call is not None:
                score = await self._token_calls.score(
                    call.score_call, *shared, prompt_param=param, switch=switches[0]
                )
            if body.sampling_params.max_tokens == 0:
                return [(score, sglang_bodies.unsampled(score))] * len(switches)
            replies = await self._token_calls.sample(
                call.chat_call,
                *shared,
                prompt_param=param,
                switches=switches,
                show=None if show is None else partial(show, call),
            )
            return [(score, reply) for reply in replies]

        return [answer for choices in await side_by_side(list(map(sample, calls))) for answer in choices]

    async def _served(self, replies: Sequence[Reply]) -> int | None:
        """Return the served version if a reply has no tokens, which would have a version; otherwise None."""
        return None if all(map(_has_tokens, replies)) else await self._endpoint.weight_version()

    @contextmanager
    def _opened(self, calls: Sequence[_OpenCall]) -> Iterator[None]:
        """Hold a call slot for each prompt, and register the prompt for aborts. Raises Overloaded."""
        with ExitStack() as places:
            for call in calls:
                places.enter_context(self._endpoint.hold_call_place(call.owner))
            self._open.update(calls)
            places.callback(self._open.difference_update, calls)
            yield

    async def _events(
        self,
        body: SglangBody,
        calls: Sequence[_OpenCall],
        affinity: str | None,
        writer: SglangWriter,
        end: Callable[[], None],
    ) -> AsyncGenerator[bytes, None]:
        """Yield a chunk for each choice with new tokens. A slow client gets fewer chunks with more tokens each.

        `end` is called after all tokens.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        begun_at, choices = loop.time(), dict[tuple[_OpenCall, int], ShownChoice]()
        fresh: dict[tuple[_OpenCall, int], Reply | None] = {}  # choices with new tokens, and the reply if finished

        def show(call: _OpenCall, index: int, item: TurnPiece | Reply) -> None:
            if isinstance(item, Reply):
                fresh[call, index] = item
            elif item.finish is None:  # the reply contains the last piece
                writer.add(choices.setdefault((call, index), writer.shown()), item)
                fresh[call, index] = None
            news.set()

        with self._opened(calls):
            sampling = loop.create_task(self._sample(body, calls, affinity, show))
            sampling.add_done_callback(lambda _: news.set())
            try:
                while fresh or not sampling.done():
                    await news.wait()
                    news.clear()
                    drained = dict(fresh)
                    fresh.clear()
                    for (call, index), reply in drained.items():
                        name, num_prompt = call.name(index), call.num_prompt
                        if reply is None:
                            chunk = writer.part(name, num_prompt, choices[call, index])
                        else:
                            served = await self._served([reply])
                            chunk = writer.whole(name, num_prompt, reply, served, loop.time() - begun_at)
                        if body.is_batch or body.num_choices > 1:
                            chunk["index"] = call.place * body.num_choices + index
                        yield sse(chunk)
                await sampling
                end()
            finally:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
        yield DONE


def _has_tokens(reply: Reply) -> bool:
    return len(reply.token_ids) > 0


def _error_event(error: AgentLoopError) -> bytes:
    return sse(sglang_bodies.error_body(error)) + DONE
