"""The OpenAI-compatible endpoint: sessions on disk, their routes, and their shards."""

from __future__ import annotations

from agentloop_servers.endpoint import routes_dialects, routes_openai, routes_sessions, routes_vllm
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.registry import SessionLimits, Sessions
from agentloop_servers.endpoint.shards import OWNER_WAIT_S, NotOwner, ShardRouter, take_shard_lock
from agentloop_servers.endpoint.tenants import Tenants
from agentloop_servers.endpoint.token_calls import TokenCalls

__all__ = [
    "OWNER_WAIT_S",
    "DirectServer",
    "Endpoint",
    "EndpointLimits",
    "NotOwner",
    "SessionLimits",
    "Sessions",
    "ShardRouter",
    "Tenants",
    "TokenCalls",
    "routes_dialects",
    "routes_openai",
    "routes_sessions",
    "routes_vllm",
    "take_shard_lock",
]
