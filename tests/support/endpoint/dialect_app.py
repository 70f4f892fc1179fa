"""The whole endpoint on a real socket, for tests with real clients; its simulated engine follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentloop.generation.turn_reader import TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.sessions.prompts import SessionParts
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import KVPolicy, Trajectory
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.registry import Sessions
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import serving
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.recording import RecordingEngine
from tests.support.engine.scripted import RENDERER, SPEC, ids, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator

MODEL = "tiny"


@dataclass(frozen=True)
class DialectService:
    """A running service; `url` has no `/v1`."""

    url: str
    sessions: Sessions
    engine: RecordingEngine
    endpoint: Endpoint

    async def trajectory(self, session_id: str) -> Trajectory:
        return (await self.sessions.find(session_id, ("",))).trajectory()


@asynccontextmanager
async def dialect_service(
    tmp_path: Path,
    *replies: str,
    keys: Keys = Keys(),  # noqa: B008 - frozen
    max_context_tokens: int = 8192,
    renderer: TemplateRenderer = RENDERER,
    reply_to: Callable[[str], str] | None = None,
) -> AsyncIterator[DialectService]:
    """Run a service that answers the n-th turn of any conversation with the n-th reply.

    `renderer` has the shipped policy's tokenizer. `reply_to` returns the reply to a prompt's text instead.
    """
    spec = replace(SPEC, max_context_tokens=max_context_tokens)
    scripted = scripted_engine(*replies, spec=spec)
    if reply_to is not None:
        policy = ScriptedPolicy(lambda prompt_ids: ids(reply_to(renderer.decode(prompt_ids))))
        scripted = SimulatedEngine(spec, policy=policy)
    await scripted.start()
    engine = RecordingEngine(scripted)
    coordinator = FakeCoordinator()
    parser = get_parser("hermes")

    reader = TurnReader(renderer, parser)
    parts = SessionParts(renderer, reader, parser, KVPolicy.KEEP, max_context_tokens, renderer.vocab_size)
    sessions = Sessions(
        tmp_path / "sessions.sqlite",
        parts=parts,
        coordinator=coordinator,
        connect=lambda url: engine,
        secret="s" * 32,
    )
    await sessions.start()
    endpoint = Endpoint(sessions, renderer, parser, MODEL, max_context_tokens)
    app = create_app(coordinator, lambda url: engine, keys, endpoint=endpoint)
    try:
        async with serving(app) as url:
            yield DialectService(url, sessions, engine, endpoint)
    finally:
        await sessions.close()
        await scripted.close()
