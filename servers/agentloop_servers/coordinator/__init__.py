"""The coordinator: fleet, balancer, rollout queue and weight updates in one event loop."""

from __future__ import annotations

from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.coordinator.config import CoordinatorConfig
from agentloop_servers.coordinator.coordinator import Coordinator

__all__ = ["Coordinator", "CoordinatorClient", "CoordinatorConfig"]
