"""A reward that searches for a key wherever user code can look without a debugger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agentloop.types import Message, RolloutTask


def reward(task: RolloutTask, messages: Sequence[Message]) -> float:
    """Return the number of environments and command lines that contain the task's reference, which is reversed."""
    key = (task.reference or "")[::-1].encode()
    found = [key.decode() in os.environ.values()]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            for name in ("environ", "cmdline"):
                try:
                    found.append(key in (folder / name).read_bytes())
                except OSError:
                    continue  # the process has ended or belongs to another user
    return float(sum(found))
