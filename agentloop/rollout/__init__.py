"""Rollouts of a worker: agent loops, tools, rewards, and the worker that runs many trajectories at once."""

from __future__ import annotations

from agentloop.rollout.budget import LimitReached
from agentloop.rollout.context import LoopContext
from agentloop.rollout.environment import Environment, ScriptedTurn, call, tasks_of
from agentloop.rollout.loops import AgentLoop, ResumableLoop, SingleTurn, ToolLoop
from agentloop.rollout.rewards import RewardFunction, Weighted, exact_match
from agentloop.rollout.tool import (
    EndEpisode,
    OpeningSession,
    ScoringSession,
    SnapshotSession,
    Tool,
    ToolSession,
    ToolSet,
    ToolSpec,
    tool,
)
from agentloop.rollout.toolbox import Toolbox

__all__ = [
    "AgentLoop",
    "EndEpisode",
    "Environment",
    "LimitReached",
    "LoopContext",
    "OpeningSession",
    "ResumableLoop",
    "RewardFunction",
    "ScoringSession",
    "ScriptedTurn",
    "SingleTurn",
    "SnapshotSession",
    "Tool",
    "ToolLoop",
    "ToolSession",
    "ToolSet",
    "ToolSpec",
    "Toolbox",
    "Weighted",
    "call",
    "exact_match",
    "tasks_of",
    "tool",
]
