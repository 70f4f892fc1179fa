"""A worker's rollouts: agent loops, tools, rewards, and the worker that runs many of them."""

from __future__ import annotations

from agentloop.rollout.budget import LimitReached
from agentloop.rollout.context import LoopContext
from agentloop.rollout.loops import AgentLoop, ResumableLoop, SingleTurn, ToolLoop, load_loop
from agentloop.rollout.rewards import RewardFunction, exact_match, load_reward, score
from agentloop.rollout.tool import (
    OpeningSession,
    ScoringSession,
    SnapshotSession,
    Tool,
    ToolSession,
    ToolSet,
    ToolSpec,
    arguments_model,
    parameters_schema,
    tool,
    validated,
)
from agentloop.rollout.tool_loading import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import RunParts, TrajectoryRun, WorkerConfig, unmade_record
from agentloop.rollout.turn_journal import TURNS_FOLDER, TurnJournal
from agentloop.rollout.worker import Worker

__all__ = [
    "TURNS_FOLDER",
    "AgentLoop",
    "LimitReached",
    "LoopContext",
    "OpeningSession",
    "ResumableLoop",
    "RewardFunction",
    "RunParts",
    "ScoringSession",
    "SingleTurn",
    "SnapshotSession",
    "Tool",
    "ToolLoop",
    "ToolSession",
    "ToolSet",
    "ToolSpec",
    "Toolbox",
    "TrajectoryRun",
    "TurnJournal",
    "Worker",
    "WorkerConfig",
    "arguments_model",
    "exact_match",
    "load_loop",
    "load_reward",
    "load_tools",
    "parameters_schema",
    "score",
    "tool",
    "unmade_record",
    "validated",
]
