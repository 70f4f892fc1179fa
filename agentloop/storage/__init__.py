"""Durable stores on SQLite: the trajectories of a run, and what is read from them."""

from __future__ import annotations

from agentloop.storage.disk_room import DiskRoom, is_full
from agentloop.storage.retention import RetentionPolicy, Unfinished
from agentloop.storage.sqlite import BatchWriter, RowChecker, Schema, Work, one_thread, open_database, packed
from agentloop.storage.summary import MIXED, LengthSummary, StaleSummary, Summary, summarize, version_key
from agentloop.storage.trajectory_store import (
    MAX_COMMIT_BATCH,
    STORE_NAME,
    TrajectoryReader,
    TrajectoryStore,
    encoded_groups,
    groups_digest,
)

__all__ = [
    "MAX_COMMIT_BATCH",
    "MIXED",
    "STORE_NAME",
    "BatchWriter",
    "DiskRoom",
    "LengthSummary",
    "RetentionPolicy",
    "RowChecker",
    "Schema",
    "StaleSummary",
    "Summary",
    "TrajectoryReader",
    "TrajectoryStore",
    "Unfinished",
    "Work",
    "encoded_groups",
    "groups_digest",
    "is_full",
    "one_thread",
    "open_database",
    "packed",
    "summarize",
    "version_key",
]
