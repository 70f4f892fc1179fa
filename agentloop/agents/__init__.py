"""Rollouts by unmodified agents: the runner, which gives each sample a session, and the agent's program."""

from __future__ import annotations

from agentloop.agents.program import AgentProgram
from agentloop.agents.runner import AgentLimits, AgentRecord, run_agents

__all__ = ["AgentLimits", "AgentProgram", "AgentRecord", "run_agents"]
