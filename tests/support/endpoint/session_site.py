"""A registry of sessions over a real file, in virtual time; replicas answer with the length of their prompt."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.concurrency.clock import Clock, VirtualClock
from agentloop.engine.interface import Delta, OnProgress
from agentloop.errors import AgentLoopError
from agentloop.generation.turn_reader import TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.sessions.prompts import SessionParts
from agentloop.sessions.session import Session
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    KVPolicy,
    Message,
    SamplingParams,
    WeightVersionSpan,
)
from agentloop_servers.endpoint.registry import SessionLimits, Sessions
from agentloop_servers.endpoint.session_store import SessionStore
from tests.support.engine.scripted import RENDERER, ids
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.service import Inline
from tests.support.records.turns import in_store

EPOCH_S = 1e9
NOBODY = ("",)  # the names of a caller without a key
LIMITS = SessionLimits(max_sessions=8, idle_s=60.0, ttl_s=1000.0, one_off_ttl_s=100.0)


@dataclass
class Talker:
    """Every replica: it answers with the length of the prompt. While `gate` is clear, answers are held back."""

    num_calls: int = 0
    errors: list[AgentLoopError] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def connect(self, url: str) -> Talker:
        return self

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        self.num_calls += 1
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        said = (*ids(f"{len(request.token_ids)} tokens"), RENDERER.stop_token_ids[0])
        spans = (WeightVersionSpan(3, 0, len(said)),)
        logprobs = (-0.5,) * len(said)
        return Generation(request.request_id, said, logprobs, spans, FinishReason.STOP, replica_id="talker")

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        generation = await self.generate(request)
        yield Delta(generation.token_ids, generation.logprobs, generation.weight_versions)
        yield generation


class SessionSite:
    """A registry that can be restarted over its file."""

    def __init__(
        self, clock: Clock, path: Path, limits: SessionLimits = LIMITS, *, is_virtual: bool = True
    ) -> None:
        self.clock, self.path, self.limits = clock, path, limits
        self.coordinator, self.talker = FakeCoordinator(), Talker()
        self.executor = Inline if is_virtual else lambda: None
        self.wall_jump_s = 0.0
        self.talker.gate.set()

    async def start(self) -> Sessions:
        parser = get_parser("hermes")
        parts = SessionParts(
            RENDERER,
            TurnReader(RENDERER, parser),
            parser,
            KVPolicy.KEEP,
            max_context_tokens=100_000,
            vocab_size=RENDERER.vocab_size,
            clock=self.clock,
            unix_time=lambda: EPOCH_S + self.wall_jump_s + self.clock.now(),
        )
        self.sessions = Sessions(
            self.path / "sessions.sqlite",
            parts=parts,
            coordinator=self.coordinator,  # type: ignore[arg-type] # the part that sessions use
            connect=self.talker.connect,  # type: ignore[arg-type]
            secret="run secret",
            limits=self.limits,
            executor=self.executor(),
        )
        await self.sessions.start()
        return self.sessions

    async def stop(self) -> None:
        self.sessions.check_health()
        await self.sessions.close()
        await self.sessions.close()

    async def restart(self) -> Sessions:
        await self.stop()
        return await self.start()

    @property
    def store(self) -> SessionStore:
        return self.sessions.store

    async def in_store(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Run a function in the store's file."""
        return await in_store(self.store, work)

    async def disk(self, num_pages: int) -> None:
        """Limit the store to so many pages."""
        await self.in_store(lambda db: db.execute(f"PRAGMA max_page_count = {num_pages}").fetchone())

    @property
    def recorded(self) -> list[tuple[str, str, bool]]:
        """Return the run's records of the default rollout."""
        records = self.coordinator.finished.get("sessions", [])
        return [(one.group_id, one.stop_reason.value, one.is_complete) for one in records]


Test = Callable[[SessionSite, Sessions], Coroutine[Any, Any, None]]


def virtually(limits: SessionLimits = LIMITS) -> Callable[[Test], Callable[[Path], None]]:
    """Run a test over a started registry in virtual time; at the end no lease may remain."""

    def decorate(test: Test) -> Callable[[Path], None]:
        @wraps(test)
        def run(tmp_path: Path) -> None:
            clock = VirtualClock()

            async def main() -> None:
                site = SessionSite(clock, tmp_path, limits)
                try:
                    await test(site, await site.start())
                finally:
                    site.talker.gate.set()
                    await site.stop()
                assert site.coordinator.leases == {}

            clock.run(main())

        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate


def chat(*messages: Message) -> ChatCall:
    return ChatCall(messages, SamplingParams(1), max_tokens=50)


async def say(session: Session, *messages: Message, retry_count: int = 0) -> ChatResult:
    digest = hashlib.sha256(repr(messages).encode()).digest()
    return await session.call(chat(*messages), CallKey(digest, retry_count))


async def talk(session: Session, num_turns: int) -> tuple[Message, ...]:
    history: tuple[Message, ...] = ()
    for index in range(num_turns):
        history = (*history, Message("user", f"question {index}"))
        result = await say(session, *history)
        history = (*history, result.choices[0].reply.message)
    return history
