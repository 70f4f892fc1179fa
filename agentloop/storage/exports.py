"""Exports of a run: the request that every format of `agentloop export` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import folder_of


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """An export of a run's records: of one rollout, or of all if `rollout_id` is None.

    `out` is a file or folder; None is the format's own name in the run directory. With `mask_constrained` the mask
    leaves out tokens that a grammar, a bias or `min_tokens` shaped. `endpoint` is the server of formats that are
    sent, and `content` adds messages to formats that leave them out.
    """

    store: Path | Home
    out: Path | None = None
    rollout_id: str | None = None
    mask_constrained: bool = False
    endpoint: str = ""
    content: bool = False

    def target(self, ending: str) -> Path:
        """Return the file or folder to write."""
        return self.out or folder_of(self.store) / f"trajectories.{ending}"


Exporter: TypeAlias = Callable[[ExportRequest], str]
"""Writes or sends an export, and returns one line that describes it. Raises AgentLoopError."""
