"""The values that cross between an engine's process and the processes that hold its weights, as codec bytes.

They need no torch: the engine's process imports them. Several workers' reports become one here: the times of the
slowest, the memory of the worker that holds least, and everything that was compared.

vLLM carries them by `collective_rpc`. SGLang's own remote calls take flat scalars and answer with a text only, so
a call and its answers travel there as the text of a `SchedulerCall` and of `SchedulerAnswers`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from agentloop import codec
from agentloop.engine import CommitReport, HeldIn, PushSource, StageReport, TensorInfo

T = TypeVar("T")

SCHEDULER_METHOD = "agentloop_call"
"""The name under which SGLang's scheduler takes a `SchedulerCall`, its only parameter being `call`."""


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """A method of our scheduler (`sglang_worker.py`) to call in every rank, between two steps."""

    call_id: int
    method: str
    arguments: tuple[Any, ...] = ()  # strings, bytes, numbers and None


@dataclass(frozen=True, slots=True)
class SchedulerAnswers:
    """The answers to one call, of every tensor-parallel rank in order.

    `errors`: a sentence for each rank that failed, empty for the others; a failed rank's answer is None.
    """

    call_id: int
    answers: tuple[bytes | int | None, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The requests that a paused scheduler holds, by id: how many tokens each has sampled.

    `unbegun`: those of them that hold no KV and have sampled nothing.
    """

    num_output_ids: Mapping[str, int]
    unbegun: tuple[str, ...] = ()


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


def to_text(value: SchedulerCall | SchedulerAnswers) -> str:
    """Return the form that SGLang carries."""
    return base64.b64encode(codec.encode(value)).decode("ascii")


def from_text(text: str, kind: type[T]) -> T:
    """Invert `to_text`. Raises InvalidRequest."""
    return codec.decode(base64.b64decode(text.encode("ascii", "replace")), kind)
