"""The OpenAI-compatible endpoint: sessions on disk, their routes, and their shards."""

from __future__ import annotations

from agentloop_servers.endpoint import routes_dialects, routes_openai, routes_sessions
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.registry import SessionLimits, Sessions
from agentloop_servers.endpoint.shards import OWNER_WAIT_S, NotOwner, ShardRouter, take_shard_lock

__all__ = [
    "OWNER_WAIT_S",
    "DirectServer",
    "Endpoint",
    "EndpointLimits",
    "NotOwner",
    "SessionLimits",
    "Sessions",
    "ShardRouter",
    "routes_dialects",
    "routes_openai",
    "routes_sessions",
    "take_shard_lock",
]
