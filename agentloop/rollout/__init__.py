"""A worker's rollouts: agent loops, tools, rewards, and the worker that runs many of them."""

from __future__ import annotations

from agentloop.rollout.context import LoopContext
from agentloop.rollout.loops import AgentLoop, SingleTurn, ToolLoop, load_loop
from agentloop.rollout.rewards import RewardFunction, exact_match, load_reward, score
from agentloop.rollout.tool import ScoringSession, ToolSpec, arguments_model, parameters_schema, tool, validated
from agentloop.rollout.toolbox import Toolbox, load_tools
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.worker import Worker

__all__ = [
    "AgentLoop",
    "LoopContext",
    "RewardFunction",
    "ScoringSession",
    "SingleTurn",
    "ToolLoop",
    "ToolSpec",
    "Toolbox",
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
    "validated",
]
