"""Trajectories in processes of their own, so that user code can harm nobody but its own trajectory."""

from __future__ import annotations

from agentloop_servers.isolation.frames import Setup
from agentloop_servers.isolation.processes import IsolatedRuns, IsolationConfig

__all__ = ["IsolatedRuns", "IsolationConfig", "Setup"]
