"""The way from the service to a trainer: rows of finished groups, and adapters to trainers people use.

Every adapter uses `batches`; `agentloop.values.mismatch` compares recorded logprobs with the trainer's own.
`trl` and `verl` are the adapters, imported by name because each needs its trainer installed. Nothing here samples
or keeps weights: the service does.
"""

from __future__ import annotations

from agentloop.values.mismatch import CLIP_RANGE, MAX_K3, PERCENTILES, Mismatch, MismatchMonitor, mismatch
from agentloop_trainers.batches import GroupCounts, TrainingRow, count_group, group_rows, is_scored
from agentloop_trainers.teacher import teacher_logprobs

__all__ = [
    "CLIP_RANGE",
    "MAX_K3",
    "PERCENTILES",
    "GroupCounts",
    "Mismatch",
    "MismatchMonitor",
    "TrainingRow",
    "count_group",
    "group_rows",
    "is_scored",
    "mismatch",
    "teacher_logprobs",
]
