"""The fleet of engine replicas: registry, weight updates, and bringing replicas to the desired state."""

from __future__ import annotations

from agentloop.fleet.desired_state import FleetWeights, StandingOrders
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, FleetConfig, ReplicaRecord, ReplicaState
from agentloop.fleet.replica_sync import Connect, ReplicaSync
from agentloop.fleet.starts import StartConfig, Starts
from agentloop.fleet.weight_update import WeightConfig

__all__ = [
    "Connect",
    "Fleet",
    "FleetConfig",
    "FleetWeights",
    "LateReplicas",
    "ReplicaRecord",
    "ReplicaState",
    "ReplicaSync",
    "StandingOrders",
    "StartConfig",
    "Starts",
    "WeightConfig",
]
