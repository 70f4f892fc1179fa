"""The routes of sessions: create, list, read, reward, finish, delete, and token calls within a session.

An agent's key allows only calls. Rewards and finishing require the session's control key or its owner's key. Only
users create and list sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from agentloop.api.coordinator import as_its_users
from agentloop.api.owners import shown_id
from agentloop.api.requests import ID_PATTERN, MAX_PAGE, GenerateBody
from agentloop.api.sessions import (
    DeletedAnswer,
    FinishBody,
    NewSessionAnswer,
    NewSessionBody,
    RewardBody,
    SessionAnswer,
    SessionLine,
    SessionsAnswer,
    encode_trajectories,
)
from agentloop.chat.call import ChatCall, ChatResult, version_range
from agentloop.sessions.calls import SessionEnd, SessionRecord, SessionState
from agentloop.sessions.session import Session
from agentloop.types import Credit, Generation, Message, Trajectory
from agentloop.values import codec
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.endpoint.calls import answer_call
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.registry import NewSession
from agentloop_servers.http.auth import (
    Keys,
    authenticate,
    caller_of,
    require_control,
    require_user,
    session_in_path,
)
from agentloop_servers.http.guard import json_body, traceparent_of
from agentloop_servers.http.openapi import add_route, answered, errors
from agentloop_servers.http.responses import (
    in_time,
    json_response,
    long_response,
    unless_client_leaves,
    unread_response,
)
from agentloop_servers.net.tcp import url_of

T = TypeVar("T")

New = Annotated[NewSessionBody, Depends(json_body(NewSessionBody))]
Reward = Annotated[RewardBody, Depends(json_body(RewardBody))]
Finish = Annotated[FinishBody, Depends(json_body(FinishBody))]
AfterId = Annotated[str, Query(pattern=f"^$|{ID_PATTERN}")]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Generate = Annotated[GenerateBody, Depends(json_body(GenerateBody))]


def router(endpoint: Endpoint, keys: Keys) -> APIRouter:
    """Return the routes. A session's control key opens all routes of its session, the agent's key only token
    calls."""
    routes, opened_by = SessionRoutes(endpoint), endpoint.sessions.keys.opened_by
    router = APIRouter(responses=errors(), tags=["sessions"])
    one, generation, records = "/sessions/{session_id}", answered(Generation), answered(list[Trajectory])
    table: list[tuple[str, str, Any, type[Any] | None, type[Any] | None, dict[int | str, dict[str, Any]]]] = [
        ("POST", "/sessions", routes.create, NewSessionBody, NewSessionAnswer, {}),
        ("GET", "/sessions", routes.sessions, None, SessionsAnswer, {}),
        ("GET", one, routes.session, None, SessionAnswer, {}),
        ("DELETE", one, routes.delete, None, DeletedAnswer, {}),
        ("GET", f"{one}/trajectories", routes.trajectories, None, None, records),
        ("POST", f"{one}/reward", routes.reward, RewardBody, SessionAnswer, {}),
        ("POST", f"{one}/finish", routes.finish, FinishBody, None, records),
        ("POST", f"{one}/revoke", routes.revoke, None, SessionAnswer, {}),
        ("POST", f"{one}/generate", routes.generate, GenerateBody, None, generation),
        ("POST", f"{one}/v1/generate", routes.generate, GenerateBody, None, generation),
    ]
    for method, path, route, body, answer, responses in table:
        guard = Depends(authenticate(keys, opened_by, takes_agents=route == routes.generate))
        add_route(router, method, path, route, body, answer, responses, [guard])
    return router


class SessionRoutes:
    """The handlers of the `/sessions` routes, over one process's `Endpoint`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def create(self, request: Request, body: New) -> Response:
        """Create a session durably. With an id chosen by the caller the request can be repeated."""
        endpoint, caller = self._endpoint, require_user(request)
        if body.session_id is not None:
            endpoint.check_is_here(body.session_id)
        wanted = NewSession(
            session_id=body.session_id,
            ttl_s=body.ttl_s,
            rollout_id=body.rollout_id,
            group_id=body.group_id or "",
            task_id=body.task_id or "",
            sample_index=body.sample_index,
            refuses_overflow=body.on_overflow == "error",
            gives_unread_calls=body.on_malformed_call == "tool_call",
            task_messages=tuple(Message(one.role, one.content) for one in body.task_messages),
            traceparent=traceparent_of(request),
            weight_version=None if body.weight_version is None else body.weight_version.to_demand(),
            adapter="" if body.adapter is None else await endpoint.adapter_of(body.adapter, caller.names),
            credit=Credit(body.credit),
        )
        session = await self._in_time(endpoint.sessions.create(wanted, caller.names))
        session_id, keys = session.shown_id, endpoint.sessions.keys
        request.scope["state"]["session_id"] = session_id
        path, (host, port) = f"{endpoint.path}/sessions/{session_id}/v1", request.scope["server"]
        created = NewSessionAnswer(
            session_id=session_id,
            base_url=f"{endpoint.public_url or url_of(host, port, request.url.scheme)}{path}",
            api_key=keys.agent_key(session.session_id),
            control_key=keys.control_key(session.session_id),
            direct_url=None if endpoint.direct_url is None else f"{endpoint.direct_url}{path}",
        )
        return json_response(created.model_dump())

    async def sessions(self, request: Request, after: AfterId = "", limit: PageSize = 100) -> Response:
        """The caller's open and finished sessions with ids after `after`, from all processes."""
        endpoint, caller = self._endpoint, require_user(request)
        records = await self._in_time(endpoint.sessions.of_user(caller.names, after, limit))
        lines = [_line(record) for record in records]
        if endpoint.shards is not None:
            for other in await self._in_time(endpoint.shards.ask_others(request)):
                lines += SessionsAnswer.model_validate_json(other).sessions
        lines.sort(key=lambda line: line.session_id)
        return json_response(SessionsAnswer(sessions=lines[:limit]).model_dump())

    async def session(self, request: Request) -> Response:
        """The session's properties and counts."""
        return json_response(_described(await self._found(request)))

    async def trajectories(self, request: Request) -> Response:
        """The session's record so far, incomplete while a call is open. JSON, or msgpack if accepted."""
        session = await self._found(request)
        return await _written(request, await asyncio.to_thread(session.trajectory))

    async def reward(self, request: Request, body: Reward) -> Response:
        """Set the reward or another part of the score. Later values replace earlier ones until the session is
        finished."""
        session = await self._controlled(request)
        await self._in_time(session.set_score(body.to_score()))
        return json_response(_described(session))

    async def revoke(self, request: Request) -> Response:
        """Refuse all further calls of the session, with any key. The owner can still reward and read it.
        Idempotent."""
        session = await self._controlled(request)
        await self._in_time(session.revoke())
        return json_response(_described(session))

    async def finish(self, request: Request, body: Finish) -> Response:
        """Finish the session. The record is durable when the response is sent; a repeat returns the same record."""
        session = await self._controlled(request)
        end = SessionEnd(body.reason, body.error, body.to_score(), body.reward_error, body.wait_s)
        finishing = self._endpoint.sessions.finish(session.session_id, None, end)
        trajectory = await unless_client_leaves(request, self._in_time(finishing, body.wait_s))
        if trajectory is None:
            return unread_response()
        return await _written(request, trajectory)

    async def delete(self, request: Request) -> Response:
        """Delete the session permanently, without a record."""
        session = await self._controlled(request)
        await self._in_time(self._endpoint.sessions.delete(session.session_id, None))
        return json_response(DeletedAnswer(session_id=session.shown_id).model_dump())

    async def generate(self, request: Request, body: Generate) -> Response:
        """Token ids in, token ids out, recorded as a turn of the session."""
        asked = body.to_request("")
        chat = ChatCall(
            messages=(),
            prompt_ids=asked.token_ids,
            sampling=asked.sampling,
            max_tokens=asked.sampling.max_tokens,
            timeout_s=asked.timeout_s,
        )
        return await answer_call(request, self._endpoint, chat, None, render_generation)

    async def _found(self, request: Request) -> Session:
        """Return the session in the path. Raises SessionNotFound if it is another user's."""
        session_id = session_in_path(request)
        self._endpoint.check_is_here(session_id)
        request.scope["state"]["session_id"] = shown_id(session_id)
        caller, sessions = caller_of(request), self._endpoint.sessions
        return await self._in_time(sessions.find(session_id, caller.user_names, is_admin=caller.is_admin))

    async def _controlled(self, request: Request) -> Session:
        """Return the session in the path if the caller may reward and finish it. Raises Forbidden."""
        session = await self._found(request)
        require_control(request, has_control_key=session.record.has_control_key)
        return session

    async def _in_time(self, work: Awaitable[T], extra_s: float = 0.0) -> T:
        timeout_s = self._endpoint.limits.registry_timeout_s + extra_s
        return await in_time(work, timeout_s, "the session's process did not answer in time; retry")


def render_generation(result: ChatResult) -> dict[str, Any]:
    """Return `generation_answer` of a turn that a session recorded."""
    reply = result.choices[0].reply
    sampling = reply.sampling
    return {
        "request_id": result.call_id,
        "token_ids": reply.token_ids.tolist(),
        "logprobs": reply.logprobs.tolist(),
        "weight_versions": [codec.to_builtins(span) for span in reply.weight_versions],
        **version_range([reply]),
        "finish_reason": reply.finish_reason.value,
        "cached_tokens": reply.cached_tokens,
        "replica_id": reply.replica_id,
        "engine": reply.engine,
        "quantization": reply.quantization,
        "top_logprobs": reply.top_logprobs,
        "raw_logprobs": [] if reply.raw_logprobs is None else reply.raw_logprobs.tolist(),
        "logprobs_mode": (LogprobsMode.SAMPLED if sampling is None else sampling.logprobs_mode).value,
    }


def _described(session: Session) -> dict[str, Any]:
    record = session.record
    answer = SessionAnswer(
        session_id=session.shown_id,
        state="finished" if record.state is SessionState.FINISHED else "open",
        created_at=record.created_at,
        ttl_s=record.ttl_s,
        rollout_id=shown_id(record.rollout_id),
        group_id=record.group_id or session.shown_id,
        task_id=record.task_id,
        sample_index=record.sample_index,
        reward=record.score.reward,
        components=dict(record.score.components),
        metrics=dict(record.score.metrics),
        stop_reason=None if record.stop_reason is None else record.stop_reason.value,
        policy_failure=None if session.policy_failure is None else session.policy_failure.value,
        error=record.error,
        num_turns=session.num_turns,
        num_open_calls=session.num_open_calls,
        num_bytes=session.num_bytes,
        is_complete=session.is_complete,
        is_revoked=record.is_revoked,
    )
    return answer.model_dump()


def _line(record: SessionRecord) -> SessionLine:
    return SessionLine(
        session_id=shown_id(record.session_id),
        state="finished" if record.state is SessionState.FINISHED else "open",
        created_at=record.created_at,
        rollout_id=shown_id(record.rollout_id),
    )


async def _written(request: Request, trajectory: Trajectory) -> Response:
    trajectory = as_its_users(trajectory)
    return await long_response(
        request, lambda: encode_trajectories([trajectory]), lambda: codec.to_builtins([trajectory.without_aux])
    )
