"""The sampling half of Tinker's API, for its client `tinker` 0.38.

A sample is a future: `asample` starts an unrecorded call and returns its id, and `retrieve_future` waits for the
result, which is protobuf. Ids contain everything else: a sampling session's id has the model, and the process that
made it, which other processes forward to. So a restart loses only samples in flight, and the client repeats them
(410). Training verbs are rejected. `docs/guides/tinker.md` lists the differences.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Path, Request
from pydantic import FailFast, Field
from starlette.responses import Response

from agentloop.api.requests import (
    MAX_PROMPT_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Body,
    Json,
    TokenId,
    VersionDemandBody,
)
from agentloop.chat.call import ChatCall
from agentloop.chat.fields import Ignored, Model, Refused, Stop, checked, read_body, refused
from agentloop.chat.openai import sampling_of, stops_of
from agentloop.chat.openai_bodies import MAX_CHOICES, ChoiceFields
from agentloop.chat.sampling import MaxTokens, SamplingFields
from agentloop.chat.scores import check_num_scores, score_call
from agentloop.concurrency.aio import side_by_side
from agentloop.errors import AgentLoopError, Gone, InvalidRequest, NotFound
from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, Generation, TopLogprobs
from agentloop.values.checks import MAX_TOP_LOGPROBS
from agentloop_contracts.vllm_control import refuse
from agentloop_servers.endpoint.calls import call_adapter, demanding
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import Keys, authenticate, caller_of, require_user
from agentloop_servers.http.guard import json_body, speaks
from agentloop_servers.http.openapi import OBJECT, add_route, errors
from agentloop_servers.http.responses import json_response, unless_client_leaves, unread_response

TINKER_PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"
RETRIEVE_S = 30.0  # the client's own timeout is 45 s
KEEP_S = 300.0  # for a client whose connection broke while it read a result
MAX_FUTURES = 16_384
MISSING = -99999.0
"""The logprob of an empty place in a matrix of top logprobs."""

_TRAIN = "this service only samples; train with your own trainer, and push its weights (docs/guides/trainers.md)"
_TRAINING = (
    *("create_model", "forward", "forward_backward", "optim_step", "unload_model", "create_custom_loss"),
    *("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "copy_weights"),
    *("get_info", "weights_info"),
)
REFUSED = {f"{TINKER_PREFIX}/{verb}": _TRAIN for verb in _TRAINING}
"""The routes that are rejected, and the alternative."""

_MODEL_PATH = re.compile(r"tinker://([A-Za-z0-9][A-Za-z0-9._/-]{0,255}?)(?:/versions/([0-9]{1,18}))?")
_ID = re.compile(r"(s-[0-9a-f]{1,6}-[0-9a-f]{20})~([A-Za-z0-9_=-]{0,1000})")

TokenIds = Annotated[list[TokenId], FailFast(), Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
OurId = Annotated[str, Field(max_length=1024)]


class StillSampling(AgentLoopError):
    """The future has no result yet: the client asks again at once."""

    code, http_status = "still_sampling", 408


class TextChunkBody(Body):
    """A part of a prompt. Only token ids are supported."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: TokenIds


class ModelInputBody(Body):
    """A prompt."""

    chunks: Annotated[list[TextChunkBody], Field(min_length=1, max_length=4096)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of all chunks."""
        return tuple(token_id for chunk in self.chunks for token_id in chunk.tokens)


class SamplingParamsBody(SamplingFields):
    """Tinker's `SamplingParams`. An empty list of stops samples beyond the end of the text."""

    max_tokens: MaxTokens | None = None
    stop: (
        Stop
        | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
        | Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
        | None
    ) = None

    def to_choices(self, num_samples: int) -> ChoiceFields:
        """Convert the body to the fields of the other dialects."""
        fields = self.model_dump(exclude_none=True, exclude={"stop"})
        if self.stop == []:
            fields["ignore_eos"] = True
        elif isinstance(self.stop, list) and isinstance(self.stop[0], int):
            fields["stop_token_ids"] = self.stop
        else:
            fields["stop"] = self.stop
        return checked({**fields, "n": num_samples}, ChoiceFields)


class SampleBody(Body):
    """The body of `POST /api/v1/asample`. `seq_id` makes a repeated request return the future of the first."""

    sampling_session_id: OurId
    seq_id: Annotated[int, Field(ge=0, lt=1 << 63)]
    num_samples: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    prompt: ModelInputBody
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: NumTop = 0
    topk_sample_logprobs: NumTop = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    prompt_alt_tokens_k: Annotated[Json, refused(unless=0)] = 0
    target_prompt_logprobs: Refused = None
    record_stability_info: Refused = None
    base_model: Annotated[Json, refused(hint=": create a sampling session")] = None
    model_path: Annotated[Json, refused(hint=": create a sampling session")] = None
    type: Ignored = None


class CreateSamplerBody(Body):
    """The body of `POST /api/v1/create_sampling_session`."""

    base_model: Model | None = None
    model_path: Annotated[str, Field(max_length=512)] | None = None
    session_id: Ignored = None
    sampling_session_seq_id: Ignored = None
    type: Ignored = None


class RetrieveBody(Body):
    """The body of `POST /api/v1/retrieve_future`."""

    request_id: OurId
    allow_metadata_only: Ignored = None


class CancelFutureBody(Body):
    """The body of `POST /api/v1/cancel_future`."""

    request_id: OurId


Sample = Annotated[SampleBody, Depends(json_body(SampleBody, read_body))]
CreateSampler = Annotated[CreateSamplerBody, Depends(json_body(CreateSamplerBody, read_body))]
Retrieve = Annotated[RetrieveBody, Depends(json_body(RetrieveBody, read_body))]
CancelFuture = Annotated[CancelFutureBody, Depends(json_body(CancelFutureBody, read_body))]
InPath = Annotated[str, Path(max_length=1024)]


@dataclass(slots=True)
class _Future:
    """A sample of one owner."""

    owner: str
    task: asyncio.Task[bytes]
    place: ExitStack  # the slot of its call
    ended_at: float | None = None  # the loop's time

    def end(self, task: asyncio.Task[bytes]) -> None:
        """Free the slot. The task's error is marked as retrieved, because the client may never ask for it."""
        self.place.close()
        self.ended_at = asyncio.get_running_loop().time()
        if not task.cancelled():
            task.exception()


class TinkerRoutes:
    """Tinker's routes in one process, and the samples in flight that clients of this process started."""

    def __init__(self, endpoint: Endpoint, token_calls: TokenCalls) -> None:
        self._endpoint = endpoint
        self._token_calls = token_calls
        self._futures: dict[str, _Future] = {}  # oldest first

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes, which accept user keys. Samples in flight end with the process."""
        is_authenticated = Depends(authenticate(keys, self._endpoint.sessions.keys.opened_by))
        router = APIRouter(
            dependencies=[Depends(speaks(_error)), is_authenticated, Depends(require_user)],
            responses={**errors(), **OBJECT},
            tags=["tinker"],
            lifespan=self._lifespan,
        )
        table: list[tuple[str, str, Any, type[Body] | None]] = [
            ("POST", "/client/config", self.client_config, None),
            ("POST", "/client/dynamic_config", self.dynamic_config, None),
            ("GET", "/get_server_capabilities", self.capabilities, None),
            ("POST", "/create_session", self.create_session, None),
            ("POST", "/session_heartbeat", self.accept, None),
            ("POST", "/sessions/{session_id}/finish", self.accept, None),
            ("POST", "/telemetry", self.accept, None),
            ("POST", "/create_sampling_session", self.create_sampler, CreateSamplerBody),
            ("GET", "/samplers/{sampler_id}", self.sampler, None),
            ("POST", "/asample", self.sample, SampleBody),
            ("POST", "/retrieve_future", self.retrieve, RetrieveBody),
            ("POST", "/cancel_future", self.cancel, CancelFutureBody),
        ]
        for method, path, handler, body in table:
            add_route(router, method, f"{TINKER_PREFIX}{path}", handler, body)
        refuse(router, REFUSED)
        return router

    async def client_config(self) -> Response:
        """Return the client's flags: keys are sent as they are, and each sample is retrieved by itself."""
        return json_response({"pjwt_auth_enabled": False, "sample_use_retrieve_futures": False})

    async def dynamic_config(self) -> Response:
        """Return the client's flags that it reads again: an abandoned sample is cancelled here, too."""
        return json_response({"sample_cancel_enabled": True})

    async def capabilities(self) -> Response:
        """Return the served model."""
        model = {"model_name": self._endpoint.model_name, "max_context_length": self._endpoint.max_model_len}
        return json_response({"supported_models": [{**model, "trainable": False, "sampleable": True}]})

    async def create_session(self) -> Response:
        """Return the id of a client's session, of which nothing is stored."""
        return json_response({"type": "create_session", "session_id": f"session-{uuid.uuid4().hex}"})

    async def accept(self) -> Response:
        """Accept a heartbeat, the end of a session, or telemetry, without an effect."""
        return json_response({"status": "accepted"})

    async def create_sampler(self, request: Request, body: CreateSampler) -> Response:
        """Return the id of a sampler of a model or adapter, or of exactly one of its weight versions."""
        if (body.base_model is None) == (body.model_path is None):
            raise InvalidRequest("give either `base_model` or `model_path`", param="base_model")
        name = body.base_model or body.model_path or ""
        await self._model_of(request, name, param="base_model" if body.model_path is None else "model_path")
        shards = self._endpoint.shards
        made = f"s-0-{uuid.uuid4().hex[:20]}" if shards is None else shards.new_id()
        sampler_id = f"{made}~{urlsafe_b64encode(name.encode()).decode()}"
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def sampler(self, sampler_id: InPath) -> Response:
        """Return the model of a sampler."""
        _, name = self._sampler_of(sampler_id)
        path = {"model_path": name} if name.startswith("tinker://") else {}
        return json_response({"sampler_id": sampler_id, "base_model": self._endpoint.model_name, **path})

    async def sample(self, request: Request, body: Sample) -> Response:
        """Start to sample, and return the future's id and those of its sequences."""
        made, name = self._sampler_of(body.sampling_session_id)
        request_id, owner = f"{made}~{body.seq_id}", caller_of(request).owner
        call, score = self._calls(body, await self._model_of(request, name, param="sampling_session_id"))
        if request_id not in self._futures:
            call, score = demanding(request, call), None if score is None else demanding(request, score)
            self._sweep()
            place = ExitStack()
            place.enter_context(self._endpoint.hold_call_place(owner))
            task = asyncio.create_task(self._sampled(body, call, score, owner), name="tinker sample")
            self._futures[request_id] = _Future(owner, task, place)
            task.add_done_callback(self._futures[request_id].end)
        ids = [f"{request_id}~{index}" for index in range(body.num_samples)]
        return json_response({"request_id": request_id, "sample_sequence_ids": ids})

    async def retrieve(self, request: Request, body: Retrieve) -> Response:
        """Wait for a future's result. A failed call's error is a result, too."""
        future = self._future(request, body.request_id)
        if await unless_client_leaves(request, asyncio.wait({future.task}, timeout=RETRIEVE_S)) is None:
            return unread_response()
        if not future.task.done():
            raise StillSampling(f"{body.request_id} is still sampling: retrieve it again")
        try:
            return Response(future.task.result(), media_type=PROTOBUF)
        except AgentLoopError as error:
            category = "user" if error.http_status < 500 else "server"
            return json_response({"error": f"{error.code}: {error.message}", "category": category})
        except asyncio.CancelledError:
            return json_response({"error": "cancelled: the sample was cancelled", "category": "user"})

    async def cancel(self, request: Request, body: CancelFuture) -> Response:
        """End a sample, whose tokens are dropped. Idempotent."""
        self._future(request, body.request_id).task.cancel()
        return json_response({})

    async def _model_of(self, request: Request, name: str, *, param: str) -> VersionDemandBody | None:
        """Check the model that a sampler names; returns its demanded version. Raises InvalidRequest and
        ModelNotFound."""
        version = None
        if name.startswith("tinker://"):
            if (match := _MODEL_PATH.fullmatch(name)) is None:
                raise InvalidRequest(
                    f"{name[:200]!r} must be tinker://NAME or tinker://NAME/versions/N, with the name of a served"
                    " model or adapter and one of its weight versions",
                    param=param,
                )
            name, version = match[1], match[2]
        if name in self._endpoint.others:
            raise InvalidRequest(f"model {name!r} has its own base URL: append /models/{name}", param=param)
        await call_adapter(request, self._endpoint, name)
        return None if version is None else VersionDemandBody(exact_version=int(version))

    def _calls(self, body: SampleBody, demand: VersionDemandBody | None) -> tuple[ChatCall, ChatCall | None]:
        """Return the sampling call, and the call that scores the prompt. Raises InvalidRequest naming a field."""
        model, ids = self._endpoint.chat_model, body.prompt.token_ids
        try:
            params = body.sampling_params.to_choices(body.num_samples)
            sampling = sampling_of(params, params.max_tokens, model.vocab_size, body.topk_sample_logprobs)
        except InvalidRequest as error:
            raise type(error)(error.message, param=f"sampling_params.{error.param}") from error
        if demand is not None:
            sampling = replace(sampling, weight_version=demand.to_demand())
        call = ChatCall(
            messages=(),
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=params.max_tokens,
            num_choices=body.num_samples,
            stop=stops_of(params),
            timeout_s=model.timeout_s,
        )
        if not (body.prompt_logprobs or body.topk_prompt_logprobs):
            return call, None
        start, param = max(1, len(ids) - (body.prompt_logprobs_last_n or len(ids))), "prompt_logprobs"
        names = {"param": param, "top_param": "topk_prompt_logprobs"}
        score = score_call(ids, start, body.topk_prompt_logprobs, model, demand, **names)
        if score is not None:
            check_num_scores([score], param)
        return call, score

    async def _sampled(self, body: SampleBody, call: ChatCall, score: ChatCall | None, owner: str) -> bytes:
        """Sample, score, and return the client's `SampleResponse`."""
        works: list[Coroutine[Any, Any, Any]] = [self._token_calls.sample(call, None, owner, prompt_param="prompt")]
        if score is not None:
            works.append(self._token_calls.score(score, None, owner, prompt_param="prompt"))
        replies, *scores = await side_by_side(works)
        return await asyncio.to_thread(_sample_response, body, replies, scores[0] if scores else None)

    def _sampler_of(self, sampler_id: str) -> tuple[str, str]:
        """Return the first part of a sampler's id, and the name that it was created with."""
        made, encoded = self._parts_of(sampler_id, "sampling_session_id")
        try:
            return made, urlsafe_b64decode(encoded).decode()
        except ValueError as error:
            raise NotFound(f"{sampler_id[:100]!r} is damaged", param="sampling_session_id") from error

    def _parts_of(self, our_id: str, param: str) -> tuple[str, str]:
        """Return the parts of an id. Raises NotFound, and HeldElsewhere if another process made it."""
        if (match := _ID.fullmatch(our_id)) is None:
            raise NotFound(f"{our_id[:100]!r} is not an id of this service", param=param)
        self._endpoint.check_is_here(match[1])
        return match[1], match[2]

    def _future(self, request: Request, request_id: str) -> _Future:
        self._parts_of(request_id, "request_id")
        future = self._futures.get(request_id)
        if future is None or future.owner != caller_of(request).owner:
            raise Gone(f"{request_id} has no result here: it is too old, or the service restarted; sample again")
        return future

    def _sweep(self) -> None:
        """Forget old results, and beyond `MAX_FUTURES` the oldest ones."""
        now = asyncio.get_running_loop().time()
        ended = [(name, one.ended_at) for name, one in self._futures.items() if one.ended_at is not None]
        num_spare = len(self._futures) - MAX_FUTURES + 1
        for place, (name, ended_at) in enumerate(ended):
            if place < num_spare or ended_at < now - KEEP_S:
                del self._futures[name]

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        yield
        tasks = [one.task for one in self._futures.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error(error: AgentLoopError) -> dict[str, Any]:
    wire = error.to_wire()
    return {**wire, "queue_state": "active"} if isinstance(error, StillSampling) else wire


# The protobuf messages SampleResponse, SampledSequence and TopkLogprobs, as the client's generated module has them


def _sample_response(body: SampleBody, replies: Sequence[Reply], score: Generation | None) -> bytes:
    parts = [_sequence(reply, body.topk_sample_logprobs) for reply in replies]
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        values, num_prompt = np.full(len(body.prompt.token_ids), np.nan, "<f4"), len(body.prompt.token_ids)
        if score is not None:
            values[num_prompt - len(score.logprobs) :] = score.logprobs
        rows = () if score is None else score.top_logprobs
        parts += [_bytes(2, values.tobytes()), _topk(3, rows, body.topk_prompt_logprobs, num_prompt)]
    return b"".join([*parts, _number(4, replies[0].cached_tokens)])


def _sequence(reply: Reply, num_top: int) -> bytes:
    token_ids, logprobs = reply.token_ids.astype("<i4").tobytes(), reply.logprobs.astype("<f4").tobytes()
    stop_reason = _number(1, reply.finish_reason is not FinishReason.STOP)  # 0: stop, 1: length
    top = _topk(4, reply.top_logprobs, num_top, len(reply.token_ids))
    return _bytes(1, stop_reason + _bytes(2, token_ids) + _bytes(3, logprobs) + top)


def _topk(field: int, rows: TopLogprobs, num_top: int, length: int) -> bytes:
    """Return a matrix of `length` rows, of which the last are `rows`; empty without `num_top`."""
    if not num_top:
        return b""
    token_ids, logprobs = np.zeros((length, num_top), "<i4"), np.full((length, num_top), MISSING, "<f4")
    for at, row in enumerate(rows, length - len(rows)):
        for place, pair in enumerate(row[:num_top]):
            token_ids[at, place], logprobs[at, place] = pair
    matrices = _bytes(1, token_ids.tobytes()) + _bytes(2, logprobs.tobytes())
    return _bytes(field, matrices + _number(3, num_top) + _number(4, length))


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
