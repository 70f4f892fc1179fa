"""The client SDK for trainers and agent runners. It needs neither Ray nor an engine."""

from __future__ import annotations

from agentloop.client.batches import Batch, BatchPosition, Carry
from agentloop.client.client import RolloutClient
from agentloop.client.push import NamedTensors, PushOptions, PushTarget, precision_gap
from agentloop.client.rollout import Rollout, load_tasks
from agentloop.client.session import AgentSession, SessionEnd, describe

__all__ = [
    "AgentSession",
    "Batch",
    "BatchPosition",
    "Carry",
    "NamedTensors",
    "PushOptions",
    "PushTarget",
    "Rollout",
    "RolloutClient",
    "SessionEnd",
    "describe",
    "load_tasks",
    "precision_gap",
]
