"""The endpoint's HTTP side over a registry whose sessions answer as a test configures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from fastapi import FastAPI

from agentloop.api.owners import own_id, possible_ids, shown_id
from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.errors import AgentLoopError, Conflict, Gone, SessionFinished, SessionNotFound
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnPiece, TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.score import Score
from agentloop.sessions.calls import SessionEnd, SessionRecord, SessionState
from agentloop.sessions.prompts import Prompt, SessionParts
from agentloop.trajectory.node import Node, Reply
from agentloop.types import FinishReason, KVPolicy, Message, Trajectory, WeightVersionSpan
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.registry import NewSession
from agentloop_servers.http.auth import Keys, SessionKeys
from agentloop_servers.http.guard import HttpLimits
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.records.samples import make_trajectory

MODEL = "examples/tiny_policy/v0"


class FakeSession:
    """Answers every call with the registry's `text`, one character per piece, after `before(piece number)`."""

    def __init__(self, registry: FakeRegistry, record: SessionRecord) -> None:
        self.registry = registry
        self.record = record
        self.session_id = record.session_id
        self.shown_id = shown_id(record.session_id)
        self.num_turns = 0
        self.num_open_calls = 0
        self.num_bytes = 0
        self.is_complete = True
        self.policy_failure = None

    async def call(
        self, chat: ChatCall, key: CallKey, begin: Callable[[str, str], None] | None = None
    ) -> ChatResult:
        self._enter(chat, key)
        try:
            await self.registry.before(0)
            return self._result(chat)
        except asyncio.CancelledError:
            self.registry.cancelled.set()
            raise
        finally:
            self.num_open_calls -= 1

    async def stream(
        self, chat: ChatCall, key: CallKey, begin: Callable[[str, str], None] | None = None
    ) -> AsyncIterator[TurnPiece | ChatResult]:
        self._enter(chat, key)
        try:
            for index, char in enumerate(self.registry.text):
                await self.registry.before(index)
                yield TurnPiece(0, char)
            yield self._result(chat)
        except (asyncio.CancelledError, GeneratorExit):
            self.registry.cancelled.set()
            raise
        finally:
            self.num_open_calls -= 1

    async def preview(self, chat: ChatCall) -> Prompt:
        ids = tuple(self.registry.renderer.render(chat.messages, chat.tools, chat.template_kwargs))
        return Prompt(ids, None, chat.messages, np.array(ids, np.int32), b"", None)

    def trajectory(self) -> Trajectory:
        return make_trajectory(self.record.session_id)

    async def set_score(self, score: Score) -> None:
        self.record = replace(self.record, score=score)

    async def revoke(self) -> None:
        self.record = replace(self.record, is_revoked=True)

    def _enter(self, chat: ChatCall, key: CallKey) -> None:
        if self.record.state is SessionState.FINISHED:
            raise SessionFinished("it is over")
        self.registry.calls.append((self.record.session_id, chat, key))
        self.num_open_calls += 1

    def _result(self, chat: ChatCall) -> ChatResult:
        ids = np.arange(4, dtype=np.int32)
        spans = (WeightVersionSpan(7, 0, 4),)
        message = Message("assistant", self.registry.text)
        reply = Reply(message, ids, np.full(4, -0.5, np.float32), spans, FinishReason.STOP, True)
        node = Node("n1", "c1", 0, None, chat.messages, np.array([1, 2], np.int32), reply)
        return ChatResult("c1", 1_700_000_000, self.record.session_id, (1, 2), (node,))


class FakeRegistry:
    """A fake of `Sessions`, in memory."""

    def __init__(self) -> None:
        self.renderer = TemplateRenderer.from_directory(MODEL)
        self.parts = SessionParts(
            renderer=self.renderer,
            reader=TurnReader(self.renderer, get_parser("hermes")),
            parser=get_parser("hermes"),
            kv_policy=KVPolicy.KEEP,
            max_context_tokens=512,
            vocab_size=self.renderer.vocab_size,
        )
        self.keys = SessionKeys("secret")
        self.reporter = LeaseReporter("fake", None)
        self.reset()

    def reset(self) -> None:
        """Clear all state, and the `before` hook."""
        self.text = "Hello"
        self.sessions: dict[str, FakeSession] = {}
        self.expired: set[str] = set()
        self.calls: list[tuple[str, ChatCall, CallKey]] = []
        self.cancelled = asyncio.Event()
        self.before: Callable[[int], Awaitable[None]] = _nothing

    async def create(
        self, wanted: NewSession, names: Sequence[str], *, has_control_key: bool = True
    ) -> FakeSession:
        owner = names[0]
        session_id = own_id(owner, wanted.session_id or f"s-{len(self.sessions)}")
        if session_id in self.sessions:
            raise Conflict("it exists", param="session_id")
        record = SessionRecord(session_id, 0.0, wanted.ttl_s or 1.0, owner, rollout_id=wanted.rollout_id)
        record = replace(record, has_control_key=has_control_key)
        self.sessions[session_id] = FakeSession(self, record)
        return self.sessions[session_id]

    def resident(self, session_id: str, user_names: Sequence[str] | None) -> FakeSession | None:
        return None  # every session is owned by another process, and must be awaited

    async def find(
        self, session_id: str, user_names: Sequence[str] | None, *, is_admin: bool = False
    ) -> FakeSession:
        for name, owner in possible_ids(session_id, user_names):
            found = self.sessions.get(name)
            if found is not None and owner in (None, found.record.owner):
                if name in self.expired:
                    raise Gone("it has expired", param="session_id")
                return found
        raise SessionNotFound("there is none", param="session_id")

    async def find_or_create(
        self, session_id: str | None, names: Sequence[str], traceparent: str = "", adapter: str = ""
    ) -> FakeSession:
        if session_id is None or own_id(names[0], session_id) not in self.sessions:
            return await self.create(NewSession(session_id, adapter=adapter), names, has_control_key=False)
        return await self.find(session_id, names)

    async def of_user(self, names: Sequence[str], after: str, limit: int) -> list[SessionRecord]:
        found = [one.record for one in self.sessions.values() if one.record.owner in names]
        return sorted(found, key=lambda record: record.session_id)[:limit]

    async def finish(self, session_id: str, user_names: Sequence[str] | None, end: SessionEnd) -> Trajectory:
        found = await self.find(session_id, user_names)
        reason = found.record.stop_reason or end.stop_reason
        found.record = replace(
            found.record,
            state=SessionState.FINISHED,
            stop_reason=reason,
            error=end.error,
            score=end.score,
            reward_error=end.reward_error,
        )
        return found.trajectory()

    async def delete(self, session_id: str, user_names: Sequence[str] | None) -> None:
        del self.sessions[session_id]


async def _nothing(index: int) -> None:
    pass


def raising(error: AgentLoopError, at: int) -> Callable[[int], Awaitable[None]]:
    """Return a `before` hook that fails at piece `at`."""

    async def before(index: int) -> None:
        if index == at:
            raise error

    return before


def endpoint_app(
    registry: FakeRegistry, keys: Keys | None = None, limits: EndpointLimits | None = None
) -> tuple[FastAPI, Endpoint]:
    """Return the whole app, including the endpoint."""
    endpoint = Endpoint(
        sessions=registry,
        renderer=registry.renderer,
        parser=get_parser("hermes"),
        model_name="tiny",
        max_model_len=512,
        limits=limits or EndpointLimits(),
    )
    guard = HttpLimits(max_body_bytes=800_000, body_timeout_s=5.0)
    app = create_app(FakeCoordinator(), ReversingEngine().connect, keys or Keys.of(), guard, endpoint=endpoint)
    return app, endpoint


@asynccontextmanager
async def serving_endpoint(
    registry: FakeRegistry, keys: Keys | None = None, limits: EndpointLimits | None = None
) -> AsyncIterator[str]:
    """Serve the app; yields the base URL."""
    app, _ = endpoint_app(registry, keys, limits)
    async with serving(app) as url:
        yield url
