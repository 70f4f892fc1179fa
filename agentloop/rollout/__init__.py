"""A worker's rollouts: agent loops, tools, rewards, and the worker that runs many of them."""

from __future__ import annotations

from agentloop.rollout.context import AssistantTurn, LoopContext
from agentloop.rollout.loops import AgentLoop, load_loop
from agentloop.rollout.rewards import RewardFunction, exact_match, load_reward, score
from agentloop.rollout.single_turn import SingleTurn
from agentloop.rollout.tool import ToolSpec, arguments_model, parameters_schema, tool, validated
from agentloop.rollout.tool_loop import ToolLoop
from agentloop.rollout.toolbox import Toolbox, load_tools
from agentloop.rollout.worker import Worker, WorkerConfig

__all__ = [
    "AgentLoop",
    "AssistantTurn",
    "LoopContext",
    "RewardFunction",
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
