"""Scheduling: the rollout queue, the staleness budget, and the balancer."""

from __future__ import annotations

from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.lease_table import Demand
from agentloop.scheduling.report_desk import ReportDesk
from agentloop.scheduling.rollout_queue import (
    COORDINATOR,
    PendingRecord,
    RolloutQueue,
)
from agentloop.scheduling.samples import Sample, assignment_id, group_key
from agentloop.scheduling.staleness_budget import FleetVersions

__all__ = [
    "COORDINATOR",
    "Balancer",
    "BalancerConfig",
    "Demand",
    "FleetVersions",
    "PendingRecord",
    "ReportDesk",
    "RolloutQueue",
    "Sample",
    "assignment_id",
    "group_key",
]
