"""The way from the service to a trainer: rows of finished groups, and adapters to trainers people use.

`batches` is what every adapter needs; `trl` and `verl` are the adapters, imported by name because each needs its
trainer installed. Nothing here samples or keeps weights: that is the service's.
"""

from __future__ import annotations

from agentloop.trainers.batches import GroupCounts, TrainingRow, count_group, group_rows, is_scored

__all__ = ["GroupCounts", "TrainingRow", "count_group", "group_rows", "is_scored"]
