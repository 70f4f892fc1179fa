"""Checkpoints of a training run: everything that another process needs to continue it.

A checkpoint has the weights, the optimizer's state, the weights' version in the service, the finished steps, and
the read position after the last trained batch. It is one file, replaced atomically.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from agentloop.client import RolloutClient
from agentloop.values.mismatch import Mismatch
from examples.train.grpo import Step, Training


def save_checkpoint(file: Path, model: torch.nn.Module, training: Training) -> None:
    """Write a checkpoint. A process that is killed during the call leaves the previous one."""
    state = {
        "model": model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "version": training.version,
        "position": training.position,
        "steps": [asdict(step) for step in training.steps],
    }
    new = file.with_suffix(".new")
    with new.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def load_checkpoint(file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """Load a checkpoint into a model and its optimizer."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Training(optimizer, state["version"], [_step(one) for one in state["steps"]], state["position"])


async def serve_weights(client: RolloutClient, model: torch.nn.Module, training: Training) -> bool:
    """Make the service sample with a checkpoint's weights. Return True if they had to be pushed.

    The lost process may have pushed newer versions. Their numbers are not used again, because records have tokens
    of these versions.
    """
    status = await client.status()
    if status.weight_version == training.version:
        return False
    known = (training.version, status.weight_version, *(one.version for one in status.updates if not one.adapter))
    training.version = 1 + max(version for version in known if version is not None)
    await client.update_weights(model.named_parameters(), version=training.version)
    return True


def _step(fields: dict[str, Any]) -> Step:
    return Step(**{**fields, "mismatch": Mismatch(**fields["mismatch"])})
