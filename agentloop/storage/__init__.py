"""Durable trajectories, and what is read from them."""

from __future__ import annotations

from agentloop.storage.summary import StaleSummary, Summary, summarize, version_key
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryStore

__all__ = ["STORE_NAME", "StaleSummary", "Summary", "TrajectoryStore", "summarize", "version_key"]
