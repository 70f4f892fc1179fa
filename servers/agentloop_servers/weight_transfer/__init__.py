"""Weights from a trainer to every engine worker, beside the served ones. What is exported here needs no torch."""

from __future__ import annotations

from agentloop_servers.weight_transfer.checkpoint import ServedForm, inspect_checkpoint, read_through
from agentloop_servers.weight_transfer.lora import ADAPTER_ID, check_adapter, write_zero_adapter
from agentloop_servers.weight_transfer.worker_calls import (
    SCHEDULER_METHOD,
    CheckedFolder,
    RequestCounts,
    SchedulerAnswers,
    SchedulerCall,
    StageOrder,
    StageProgress,
    StageState,
    StagingSetup,
    merge_commit_reports,
    merge_stage_reports,
)

__all__ = [
    "ADAPTER_ID",
    "SCHEDULER_METHOD",
    "CheckedFolder",
    "RequestCounts",
    "SchedulerAnswers",
    "SchedulerCall",
    "ServedForm",
    "StageOrder",
    "StageProgress",
    "StageState",
    "StagingSetup",
    "check_adapter",
    "inspect_checkpoint",
    "merge_commit_reports",
    "merge_stage_reports",
    "read_through",
    "write_zero_adapter",
]
