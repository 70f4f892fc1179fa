"""Adapters between the service and trainers: rows of finished groups for training, and weight pushes.

All adapters use `batches`. `agentloop.values.mismatch` compares recorded logprobs with the trainer's. The modules
`trl` and `verl` are imported explicitly, because each needs its trainer installed. The service does all sampling.
"""

from __future__ import annotations

from agentloop.values.mismatch import CLIP_RANGE, MAX_K3, PERCENTILES, Mismatch, MismatchMonitor, mismatch
from agentloop_trainers.batches import GroupCounts, TrainingRow, count_group, group_rows, is_scored
from agentloop_trainers.teacher import teacher_logprobs, teacher_top_logprobs

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
    "teacher_top_logprobs",
]
