"""The coordinator: fleet, balancer, rollout queue and weight updates in one event loop."""

from __future__ import annotations

from agentloop_servers.coordinator.client import COMMAND_TIMEOUT_S, CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.room import RoomConfig
from agentloop_servers.coordinator.server import CoordinatorServer

__all__ = [
    "COMMAND_TIMEOUT_S",
    "Coordinator",
    "CoordinatorClient",
    "CoordinatorConfig",
    "CoordinatorServer",
    "RoomConfig",
]
