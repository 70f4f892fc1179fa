"""Scheduling: the rollout queue, the staleness budget, and the balancer."""

from __future__ import annotations

from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.rollout_queue import (
    COORDINATOR,
    AssignedSample,
    PendingRecord,
    RolloutQueue,
    assignment_id,
    group_key,
)
from agentloop.scheduling.staleness_budget import FleetVersions

__all__ = [
    "COORDINATOR",
    "AssignedSample",
    "Balancer",
    "BalancerConfig",
    "FleetVersions",
    "PendingRecord",
    "RolloutQueue",
    "assignment_id",
    "group_key",
]
