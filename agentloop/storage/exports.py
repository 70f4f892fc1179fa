"""The request that every export format of `agentloop export` receives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from agentloop.errors import InvalidRequest
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import folder_of


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A request to export a run's records."""

    store: Path | Home
    out: Path | None = None  # file or folder; None: the format's default name in the run directory
    rollout_id: str | None = None  # None: all rollouts
    mask_constrained: bool = False  # exclude tokens constrained by a grammar, a bias or `min_tokens` from the mask
    endpoint: str = ""  # the server, for formats that are sent
    content: bool = False  # include messages in formats that omit them by default
    prompt_ids: bool = True  # include the prompt of each turn in formats that repeat it

    def target(self, ending: str) -> Path:
        """Return the file or folder to write."""
        return self.out or folder_of(self.store) / f"trajectories.{ending}"


Exporter: TypeAlias = Callable[[ExportRequest], str]
"""Writes or sends an export and returns a one-line description of it. Raises AgentLoopError."""


@contextmanager
def complete_output(out: Path) -> Iterator[Path]:
    """Yield a path for a file or folder, which gets the name `out` at the end of the block if it was written.

    Raises InvalidRequest if `out` is a folder that is not empty.
    """
    if out.is_dir() and any(out.iterdir()):
        raise InvalidRequest(f"the folder {out} is not empty: remove it, or choose another one", param="out")
    unfinished = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield unfinished
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
