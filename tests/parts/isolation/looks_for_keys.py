"""A reward that looks for a key wherever code of its user can look without a debugger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agentloop.types import Message, RolloutTask


def reward(task: RolloutTask, messages: Sequence[Message]) -> float:
    """Return how many processes show the task's reference, which stands there backwards."""
    key = (task.reference or "")[::-1].encode()
    found = [key.decode() in os.environ.values()]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            for name in ("environ", "cmdline"):
                try:
                    found.append(key in (folder / name).read_bytes())
                except OSError:
                    continue  # it has ended, or is another user's
    return float(sum(found))
