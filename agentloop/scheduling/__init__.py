"""Scheduling: the rollout queue, the staleness budget, and the balancer."""

from __future__ import annotations

from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.dispatch_order import GroupOrder
from agentloop.scheduling.placement import Demand
from agentloop.scheduling.report_desk import ReportDesk
from agentloop.scheduling.rollout_queue import COORDINATOR, RolloutQueue
from agentloop.scheduling.samples import BeginOutcome, PendingRecord, Sample
from agentloop.scheduling.staleness_budget import FleetVersions
from agentloop.scheduling.step_times import FITS, StepTimes
from agentloop.scheduling.user_turns import UserTurns

__all__ = [
    "COORDINATOR",
    "FITS",
    "Balancer",
    "BalancerConfig",
    "BeginOutcome",
    "Demand",
    "FleetVersions",
    "GroupOrder",
    "PendingRecord",
    "ReportDesk",
    "RolloutQueue",
    "Sample",
    "StepTimes",
    "UserTurns",
]
