"""An engine replica and its private port: server, client and wire."""

from __future__ import annotations

from agentloop_servers.replica.client import ORDER_TIMEOUT_S, EngineClients
from agentloop_servers.replica.server import Replica, ReplicaConfig

__all__ = ["ORDER_TIMEOUT_S", "EngineClients", "Replica", "ReplicaConfig"]
