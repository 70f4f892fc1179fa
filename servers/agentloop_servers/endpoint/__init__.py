"""The OpenAI-compatible endpoint: sessions on disk, their routes, and their shards."""

from __future__ import annotations

from agentloop_servers.endpoint import routes_dialects, routes_openai, routes_sessions
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.endpoint.endpoint import Endpoint, EndpointLimits
from agentloop_servers.endpoint.peers import OWNER_WAIT_S, Elsewhere, Peers
from agentloop_servers.endpoint.registry import Sessions
from agentloop_servers.endpoint.seats import take_seat
from agentloop_servers.endpoint.session_values import SessionLimits

__all__ = [
    "OWNER_WAIT_S",
    "DirectServer",
    "Elsewhere",
    "Endpoint",
    "EndpointLimits",
    "Peers",
    "SessionLimits",
    "Sessions",
    "routes_dialects",
    "routes_openai",
    "routes_sessions",
    "take_seat",
]
