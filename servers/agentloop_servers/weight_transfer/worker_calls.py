"""The values that cross `collective_rpc` between an engine's process and its vLLM workers, as codec bytes.

They need no torch: the engine's process imports them. Several workers' reports become one here: the times of the
slowest, the memory of the worker that holds least, and everything that was compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentloop.engine import CommitReport, HeldIn, PushSource, StageReport, TensorInfo


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """A folder of safetensors files whose headers were read, and the tensors in it."""

    directory: str
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class StagingSetup:
    """The settings of a worker's stager. `loaded`: what vLLM has loaded by itself; None: dummy weights."""

    loaded: CheckedFolder | None
    policy: str  # "auto", "device", "host" or "none"; see `staging.py`
    timeout_s: float  # of one transfer


@dataclass(frozen=True, slots=True)
class StageOrder:
    """One update to receive, from a push or from a folder. `number` names it until its commit."""

    number: int
    push: PushSource | None = None
    folder: CheckedFolder | None = None


class StageState(StrEnum):
    """Progress of a stage in one worker."""

    RECEIVING = "receiving"
    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The answer to a poll: `report` once the update is held, `error` once it failed."""

    state: StageState
    error: str = ""
    report: StageReport | None = None


def merge_stage_reports(reports: Sequence[StageReport]) -> StageReport:
    """Report for a whole engine: the slowest worker's time, and the place of the one that holds least."""
    order = [HeldIn.NOWHERE, HeldIn.FILES, HeldIn.HOST, HeldIn.DEVICE]
    return StageReport(
        held_in=min((report.held_in for report in reports), key=order.index),
        transport="+".join(sorted({report.transport for report in reports})),
        num_bytes=max(report.num_bytes for report in reports),
        transfer_ms=max(report.transfer_ms for report in reports),
    )


def merge_commit_reports(reports: Sequence[CommitReport]) -> CommitReport:
    """Report for a whole engine: the slowest worker's times, and the sum of what was compared."""
    return CommitReport(
        swap_ms=max(report.swap_ms for report in reports),
        verify_ms=max(report.verify_ms for report in reports),
        num_verified=sum(report.num_verified for report in reports),
        num_unverified=sum(report.num_unverified for report in reports),
        transfer_ms=max(report.transfer_ms for report in reports),
    )
