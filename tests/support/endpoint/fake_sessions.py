"""The session routes on a real socket, over a script instead of a model, for clients of agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from aiohttp import web

from agentloop.api.coordinator import Page, ReplicaUpdate, RolloutStatus, UpdateReport
from agentloop.api.requests import check_body
from agentloop.api.sessions import FinishBody, NewSessionBody, RewardBody, encode_trajectories
from agentloop.errors import AgentLoopError, Forbidden, NotFound, SessionFinished, SessionNotFound
from agentloop.score import Score, ended, scored
from agentloop.types import KVPolicy, Message, StopReason, Trajectory
from agentloop.values import codec
from tests.support.records.samples import make_path, make_trajectory

Script = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Maps a chat's messages to the next assistant message."""


def says_five(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": "The answer is 5."}


def uses_a_calculator(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": f"The answer is {messages[-1]['content']}."}
    function = {"name": "calculator", "arguments": '{"expression": "2 + 3"}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@dataclass
class ServedSession:
    facts: NewSessionBody
    messages: tuple[Message, ...] = ()
    num_calls: int = 0
    score: Score = field(default_factory=Score)
    record: Trajectory | None = None


@dataclass
class FakeSessions:
    """The service's state; tests set its switches."""

    script: Script = says_five
    direct_url: str | None = None
    lost_answers: int = 0  # number of next requests whose answers are lost after they took effect
    refused: set[str] = field(default_factory=set)  # task ids whose sessions cannot be opened
    revoked: set[str] = field(default_factory=set)
    is_down: bool = False
    may_answer: asyncio.Event | None = None  # answers to new sessions wait for this event
    call_s: float = 0.0  # duration of a chat call
    url: str = ""
    sessions: dict[str, ServedSession] = field(default_factory=dict)
    records: list[Trajectory] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    num_open_calls: int = 0
    most_open_calls: int = 0

    @property
    def num_open(self) -> int:
        return sum(session.record is None for session in self.sessions.values())

    def record_of(self, task_id: str, sample_index: int = 0) -> Trajectory:
        [found] = [one for one in self.records if (one.task_id, one.sample_index) == (task_id, sample_index)]
        return found

    async def create(self, request: web.Request) -> web.Response:
        body = check_body(orjson.loads(await request.read()), NewSessionBody)
        if body.task_id in self.refused:
            raise NotFound("no such place")
        session_id = body.session_id or f"made-{len(self.sessions)}"
        self.sessions.setdefault(session_id, ServedSession(body))
        answer = {"session_id": session_id, "api_key": f"sk-{session_id}", "control_key": f"ck-{session_id}"}
        answer["direct_url"] = self.direct_url
        if self.may_answer is not None:
            await self.may_answer.wait()
        return _json({**answer, "base_url": f"{self.url}/sessions/{session_id}/v1"})

    async def chat(self, request: web.Request) -> web.Response:
        session = self._find(request)
        if request.headers["authorization"] != f"Bearer sk-{request.match_info['id']}":
            return web.Response(status=401)
        if session.record is not None:
            raise SessionFinished("it is over")
        body = orjson.loads(await request.read())
        self.num_open_calls += 1
        self.most_open_calls = max(self.most_open_calls, self.num_open_calls)
        await asyncio.sleep(self.call_s)
        self.num_open_calls -= 1
        reply = self.script(body["messages"])
        session.num_calls += 1
        both = (*body["messages"], reply)
        session.messages = tuple(Message(one["role"], one.get("content") or "") for one in both)
        finish = "tool_calls" if reply.get("tool_calls") else "stop"
        choice = {"index": 0, "message": reply, "finish_reason": finish, "logprobs": None}
        completion = {"id": f"call-{session.num_calls}", "object": "chat.completion", "created": 1}
        return _json({**completion, "model": body["model"], "choices": [choice]})

    async def status(self, request: web.Request) -> web.Response:
        session = self._find(request)
        state = "open" if session.record is None else "finished"
        facts = {**session.facts.model_dump(), "session_id": request.match_info["id"], "state": state}
        counts = {"num_turns": session.num_calls, "num_open_calls": 0, "num_bytes": 0, "is_complete": True}
        outcome = {"created_at": 1.0, "reward": session.score.reward, "stop_reason": None, "error": ""}
        return _json({**facts, **counts, **outcome, "group_id": session.facts.group_id or "", "task_id": ""})

    async def set_reward(self, request: web.Request) -> web.Response:
        session = self._controlled(request)
        said = check_body(orjson.loads(await request.read()), RewardBody).to_score()
        session.score = session.score.updated(said)
        return await self.status(request)

    async def trajectories(self, request: web.Request) -> web.Response:
        session = self._find(request)
        return web.Response(body=encode_trajectories([session.record or self._trajectory(session, FinishBody())]))

    async def revoke(self, request: web.Request) -> web.Response:
        self._controlled(request)
        self.revoked.add(request.match_info["id"])
        return await self.status(request)

    async def finish(self, request: web.Request) -> web.Response:
        session = self._controlled(request)
        if session.record is None:
            body = check_body(orjson.loads(await request.read()), FinishBody)
            session.record = self._trajectory(session, body)
            self.records.append(session.record)
        return web.Response(body=encode_trajectories([session.record]))

    async def read(self, request: web.Request) -> web.Response:
        rollout_id, after = request.match_info["id"], int(request.query["after"])
        found = [one for one in self.records if one.rollout_id == rollout_id]
        if not found:
            raise NotFound("nobody submitted it")
        status = RolloutStatus(rollout_id, len(found), len(found), 0, 0)
        return web.Response(body=codec.encode(Page(tuple(found[after:]), len(found), status)))

    async def update(self, request: web.Request) -> web.Response:
        self.updates.append(orjson.loads(await request.read()))
        replica = ReplicaUpdate("replica-1", 1.0, 20.0)
        report = UpdateReport(self.updates[-1]["version"], 0, KVPolicy.RECOMPUTE, (replica,), 30.0)
        return _json(codec.to_builtins(report))

    def _controlled(self, request: web.Request) -> ServedSession:
        if request.headers.get("authorization") != f"Bearer ck-{request.match_info['id']}":
            raise Forbidden("this needs the control key")
        return self._find(request)

    def _find(self, request: web.Request) -> ServedSession:
        if request.match_info["id"] not in self.sessions:
            raise SessionNotFound("no such session")
        return self.sessions[request.match_info["id"]]

    def _trajectory(self, session: ServedSession, body: FinishBody) -> Trajectory:
        facts = session.facts
        path = replace(make_path(), messages=session.messages)
        record = replace(
            make_trajectory(facts.group_id or str(facts.session_id), facts.sample_index, paths=(path,)),
            rollout_id=facts.rollout_id,
            task_id=facts.task_id or "",
            reward=None,
            reward_error=body.reward_error or None,
            error=body.error or None,
            stop_reason=body.reason,
            is_complete=not body.error and body.reason is StopReason.COMPLETED,
        )
        return scored(ended(record), session.score.updated(body.to_score()))

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if self.is_down:
                assert request.transport is not None
                request.transport.close()
                return web.Response(status=503)
            answer: web.StreamResponse = await handler(request)
        except AgentLoopError as error:
            headers = {"x-should-retry": "false"} if error.http_status == 409 else {}
            return web.json_response(error.to_wire(), status=error.http_status, headers=headers)
        if self.lost_answers > 0:
            self.lost_answers -= 1
            assert request.transport is not None
            request.transport.close()
        return answer


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


@asynccontextmanager
async def session_service(fake: FakeSessions) -> AsyncIterator[str]:
    """Serve the routes; yields the base URL."""
    app = web.Application(middlewares=[fake.middleware])
    session = "/sessions/{id}"
    app.router.add_post("/sessions", fake.create)
    app.router.add_get(session, fake.status)
    app.router.add_post(f"{session}/v1/chat/completions", fake.chat)
    app.router.add_post(f"{session}/reward", fake.set_reward)
    app.router.add_get(f"{session}/trajectories", fake.trajectories)
    app.router.add_post(f"{session}/finish", fake.finish)
    app.router.add_post(f"{session}/revoke", fake.revoke)
    app.router.add_get("/rollouts/{id}/trajectories", fake.read)
    app.router.add_post("/admin/weights", fake.update)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        fake.url = f"http://{host}:{port}"
        yield fake.url
    finally:
        await runner.cleanup()
