"""Weights from a trainer to every engine worker, beside the served ones."""

from __future__ import annotations

from agentloop_servers.weight_transfer.checkpoint import ServedForm, inspect_checkpoint, read_through
from agentloop_servers.weight_transfer.lora import check_adapter, write_zero_adapter

__all__ = ["ServedForm", "check_adapter", "inspect_checkpoint", "read_through", "write_zero_adapter"]
