"""The chat endpoint as agents see it, in one process: the real app on its direct server, over a simulated engine.

Only the coordinator is a fake: it grants every lease, and stores the results that sessions submit.

    async with chat_service(tmp_path) as service:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="any")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.turn_reader import TurnReader
from agentloop.images import IMAGES_FOLDER, ImageFiles
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.sessions.prompts import CallLimits, SessionParts
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel, TokenPolicy
from agentloop.types import KVPolicy
from agentloop.values.capabilities import PRIORITY_POLICY
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.registry import SessionLimits, Sessions
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.connections import ConnectionLimits
from agentloop_servers.http.guard import HttpLimits
from agentloop_servers.ingress.admin import ModeRules
from agentloop_servers.ingress.app import create_app
from tests.support.engine.seeing import SeeingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator

POLICY = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v0"
MODEL = "tiny"
SHORT_CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
}
"""The path and the body, without its model, of a short call in each dialect."""
RENDERER = TemplateRenderer.from_directory(POLICY)
PARSER = get_parser("hermes")
SPEC = SimulatedSpec(
    vocab_size=RENDERER.vocab_size, max_context_tokens=4096, num_blocks=64_000, max_running=512, can_constrain=True
)
SECRET = "in-process"
MAX_ERROR_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Bounds:
    """All limits of a service under test."""

    endpoint: EndpointLimits = field(default_factory=EndpointLimits)
    http: HttpLimits = field(default_factory=HttpLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    calls: CallLimits = field(default_factory=CallLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


@dataclass(frozen=True, slots=True)
class ChatService:
    """The parts of the service that a test may inspect."""

    url: str
    engine: SimulatedEngine
    coordinator: FakeCoordinator
    sessions: Sessions
    http: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def call(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
        """Return status, JSON body and headers of an answer, after the checks that apply to every answer."""
        async with self.http.request(method, self.url + path, **kwargs) as answer:
            data = await answer.read()
            check_answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, data)
            return answer.status, orjson.loads(data), answer.headers


def check_answer(status: int, headers: dict[str, str], data: bytes) -> None:
    """Check that an answer has a request id, and that a refusal is an error envelope of at most a few kilobytes."""
    assert headers.get("x-request-id"), headers
    if status >= 400:
        assert len(data) <= MAX_ERROR_BYTES
        assert headers["content-type"] == "application/json"
        body = orjson.loads(data)
        if body.get("type") == "error":  # Anthropic's envelope
            assert set(body["error"]) >= {"type", "message"}
        else:
            assert set(body) - {"success", "message"} == {"error"}  # SGLang's control verbs have these two keys
            assert set(body["error"]) - {"details", "retryable"} == {"message", "type", "param", "code"}
            assert isinstance(body["error"]["code"], str)


@asynccontextmanager
async def chat_service(
    run_dir: Path,
    *,
    keys: Keys = Keys(),  # noqa: B008 - frozen
    bounds: Bounds = Bounds(),
    spec: SimulatedSpec = SPEC,
    decode_s: float = 0.0,
    policy: TokenPolicy | None = None,
    renderer: TemplateRenderer = RENDERER,
    seeing: SeeingEngine | None = None,
    weight_roots: Iterable[Path] = (),
    rules: ModeRules = ModeRules(),  # noqa: B008 - frozen
) -> AsyncIterator[ChatService]:
    """Start the service. `decode_s` is the time per token; without a `policy`, tokens are hashed from ids.

    `seeing` is an engine that accepts images, of `renderer`'s model.
    """
    async with AsyncExitStack() as closing:
        engine = seeing or SimulatedEngine(replace(spec, latency=LatencyModel(decode_s=decode_s)), policy=policy)
        await engine.start()
        closing.push_async_callback(engine.close)
        coordinator = FakeCoordinator()

        parts = SessionParts(
            renderer=renderer,
            reader=TurnReader(renderer, PARSER),
            parser=PARSER,
            kv_policy=KVPolicy.KEEP,
            max_context_tokens=spec.max_context_tokens,
            vocab_size=spec.vocab_size,
            can_constrain=spec.can_constrain,
            max_logprobs=spec.max_logprobs,
            limits=bounds.calls,
            placer=ImagePlacer(takes_images=seeing is not None),
            keep_image_files=ImageFiles(run_dir / IMAGES_FOLDER).keep,
        )
        sessions = Sessions(
            run_dir / "sessions.sqlite",
            parts=parts,
            coordinator=coordinator,
            connect=lambda url: engine,
            secret=SECRET,
            limits=bounds.sessions,
        )
        await sessions.start()
        closing.push_async_callback(sessions.close)
        endpoint = Endpoint(
            sessions=sessions,
            renderer=renderer,
            parser=PARSER,
            takes_images=seeing is not None,
            has_priority=spec.scheduling_policy == PRIORITY_POLICY,
            has_routed_experts=spec.routed_experts,
            max_logprobs=spec.max_logprobs,
            model_name=MODEL,
            max_model_len=spec.max_context_tokens,
            limits=bounds.endpoint,
        )
        app = create_app(
            coordinator,
            lambda url: engine,
            keys,
            bounds.http,
            weight_roots=weight_roots,
            rules=rules,
            endpoint=endpoint,
        )
        server = DirectServer(app, "127.0.0.1", bounds.connections)
        closing.push_async_callback(server.close)
        url = await server.start()
        http = await closing.enter_async_context(aiohttp.ClientSession())
        yield ChatService(url, engine, coordinator, sessions, http)
