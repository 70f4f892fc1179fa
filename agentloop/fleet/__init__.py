"""The fleet of engine replicas: registry, weight updates, and bringing replicas to the desired state."""

from __future__ import annotations

from agentloop.fleet.engines import Connect, WeightConfig
from agentloop.fleet.registry import Fleet, FleetConfig, Replica, ReplicaState
from agentloop.fleet.weight_update import WeightController

__all__ = ["Connect", "Fleet", "FleetConfig", "Replica", "ReplicaState", "WeightConfig", "WeightController"]
