"""The chat endpoint of an ingress process: its sessions, and the objects that its chat calls share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentloop.api.coordinator import FrontPort
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.turn_reader import TurnReader
from agentloop.images import IMAGES_FOLDER, Image, ImageFiles
from agentloop.observability.metrics import MetricsTally
from agentloop.observability.trace_context import EngineTraces
from agentloop.sessions.prompts import SessionParts
from agentloop.storage.home import Home
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.chat_format.load import ChatFormat, load_chat_format
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.registry import SessionLimits, Sessions
from agentloop_servers.endpoint.shards import ShardRouter
from agentloop_servers.processes.engine_parts import can_constrain, has_priority, max_logprobs, takes_images
from agentloop_servers.processes.shared import engine_traces
from agentloop_servers.replica.client import EngineClients


def session_parts(
    config: ServiceConfig,
    chat: ChatFormat,
    tally: MetricsTally,
    traces: EngineTraces | None = None,
    keep_image_files: Callable[[tuple[Image, ...]], Awaitable[None]] | None = None,
) -> SessionParts:
    """Return the objects that all chat calls of a process share."""
    facts = model_sizes(config)
    return SessionParts(
        renderer=chat.renderer,
        reader=TurnReader(chat.renderer, chat.parser, chat.name),
        parser=chat.parser,
        kv_policy=config.kv_policy,
        max_logprobs=max_logprobs(config),
        default_top_k=config.default_top_k,
        max_context_tokens=facts.max_context_tokens,
        vocab_size=facts.vocab_size,
        can_constrain=can_constrain(config),
        tally=tally,
        placer=ImagePlacer(takes_images=takes_images(config)),
        keep_image_files=keep_image_files,
        traces=traces,
    )


def build_endpoint(
    config: ServiceConfig,
    where: Path | Home,
    run_dir: Path,
    secret: str,
    coordinator: FrontPort,
    clients: EngineClients,
    router: ShardRouter,
    tally: MetricsTally | None = None,
) -> tuple[Sessions, Endpoint]:
    """Return an ingress process's chat endpoint and its sessions, not started."""
    facts, settings = model_sizes(config), config.endpoint
    keeps_images = config.cluster is None and config.store is None
    keep = ImageFiles(run_dir / IMAGES_FOLDER).keep if keeps_images else coordinator.keep_images
    chat = load_chat_format(config.model_path(), config.chat)
    tally = MetricsTally() if tally is None else tally
    parts = session_parts(config, chat, tally, engine_traces(config, run_dir), keep)
    limits = SessionLimits(
        max_sessions=settings.max_sessions,
        max_resident_bytes=settings.max_resident_mib << 20,
        ttl_s=settings.session_ttl_s,
    )
    sessions = Sessions(
        where,
        parts=parts,
        coordinator=coordinator,
        connect=clients.connect,
        secret=secret,
        limits=limits,
        shards=router,
        min_free_bytes=config.min_free_mib << 20,
    )
    endpoint = Endpoint(
        sessions=sessions,
        renderer=parts.renderer,
        parser=parts.parser,
        model_name=config.served_name,
        max_model_len=facts.max_context_tokens,
        limits=EndpointLimits(settings.max_open_calls, settings.score_share),
        created_at=int(time.time()),
        shards=router,
        live_version=lambda: _live_version(coordinator),
        logprobs_mode=LogprobsMode(config.entries[0].logprobs_mode),  # equal in all engine pools
        takes_images=takes_images(config),
        has_priority=has_priority(config),
        has_routed_experts=config.entries[0].routed_experts,
        max_logprobs=max_logprobs(config),
        by_name=None if config.max_loras is None else coordinator.adapters,
    )
    return sessions, endpoint


async def _live_version(coordinator: FrontPort) -> int | None:
    return (await coordinator.status()).weight_version


def sessions_name(rank: int) -> str:
    """Return the name of the file with an ingress process's sessions in the run directory."""
    return f"sessions-{rank}.sqlite"
