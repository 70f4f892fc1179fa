"""The calls from an engine's process to the processes that hold its weights: methods, and values as codec bytes.

They need no torch: the engine's process imports them. Several workers' reports become one here: the times of the
slowest, the memory of the worker that holds least, and everything that was compared.

vLLM carries calls by `collective_rpc`. SGLang's own remote calls take flat scalars and answer with a text only, so
a call and its answers travel there as the text of a `SchedulerCall` and of `SchedulerAnswers`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from agentloop.engine.interface import CommitReport, HeldIn, PushSource, StageReport, TensorInfo
from agentloop.errors import EngineError
from agentloop.values import codec

T = TypeVar("T")

CALL = "agentloop_call"
"""The method by which a worker runs a `WorkerMethod`: see `StagingCalls`.

SGLang's scheduler takes a `SchedulerCall` by this name, its only parameter being `call`.
"""


class WorkerMethod(StrEnum):
    """The methods that an engine's process calls in its workers: each value is the name of a method there."""

    PREPARE = "weights_prepare"  # this and the next six: of `StagingCalls`
    STAGE = "weights_stage"
    POLL = "weights_poll"
    DROP = "weights_drop"
    COMMIT = "weights_commit"
    OFFER = "weights_offer"
    RELEASE = "weights_release"
    FOLLOW = "weights_follow"  # this and the next: of it too, about a trainer's groups
    POLL_GROUP = "weights_poll_group"
    EXTEND_SCHEDULER = "scheduler_extend"  # this and the next five: of SGLang's `SchedulerExtension`
    PAUSE_REQUESTS = "requests_pause"
    RESUME_REQUESTS = "requests_resume"
    END_REQUESTS = "requests_end"
    RELEASE_MEMORY = "memory_release"
    RESUME_MEMORY = "memory_resume"
    EXTEND_RUNNER = "extend_runner"  # this and the next three: of vLLM's `WeightWorker`
    LOAD_ADAPTER = "adapter_load"
    REMOVE_ADAPTER = "adapter_remove"
    VERIFY_ADAPTER = "weights_verify_adapter"


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """A call of a `WorkerMethod` in every rank of SGLang's scheduler, between two steps."""

    call_id: int
    method: str
    arguments: tuple[Any, ...] = ()  # strings, bytes, numbers and None


@dataclass(frozen=True, slots=True)
class SchedulerAnswers:
    """The answers of all tensor-parallel ranks to one call, in the order of ranks.

    `errors`: a sentence for each rank that failed, empty for the others; a failed rank's answer is None.
    """

    call_id: int
    answers: tuple[bytes | int | None, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The number of tokens that each request of a paused scheduler has sampled, by id.

    `unbegun`: the requests that hold no KV and have sampled nothing.
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
    """The settings of a worker's stager. `loaded`: the folder that the engine has loaded; None: dummy weights."""

    loaded: CheckedFolder | None
    policy: str  # "auto", "device", "host" or "none"; see `staging.py`
    timeout_s: float  # of one transfer


@dataclass(frozen=True, slots=True)
class StageOrder:
    """An order to receive one update, from one source. `number` identifies it until its commit.

    Without a source parts of a trainer's group follow, of the tensors `transfer` as far as they are known.
    """

    number: int
    push: PushSource | None = None
    folder: CheckedFolder | None = None
    transfer: tuple[TensorInfo, ...] = ()
    is_tied: bool = False  # the model ties its output head to the embeddings

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The update's tensors."""
        source = self.push or self.folder
        return self.transfer if source is None else source.tensors


class StageState(StrEnum):
    """The states of a stage in one worker."""

    RECEIVING = "receiving"
    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The answer to a poll, with a `report` in state HELD and an `error` in state FAILED."""

    state: StageState
    error: str = ""
    report: StageReport | None = None
    num_parts: int = 0  # of a transfer, that have come


def merge_stage_reports(reports: Sequence[StageReport]) -> StageReport:
    """Merge the workers' reports: the slowest one's time, and the place of the one that holds least."""
    order = [HeldIn.NOWHERE, HeldIn.FILES, HeldIn.HOST, HeldIn.DEVICE]
    return StageReport(
        held_in=min((report.held_in for report in reports), key=order.index),
        transport="+".join(sorted({report.transport for report in reports})),
        num_bytes=max(report.num_bytes for report in reports),
        transfer_ms=max(report.transfer_ms for report in reports),
        digest=reports[0].digest,  # of the source, which is the same for all ranks
    )


def merge_commit_reports(reports: Sequence[CommitReport]) -> CommitReport:
    """Merge the workers' reports: the slowest one's times, and the sums of comparisons."""
    return CommitReport(
        swap_ms=max(report.swap_ms for report in reports),
        verify_ms=max(report.verify_ms for report in reports),
        num_verified=sum(report.num_verified for report in reports),
        num_unverified=sum(report.num_unverified for report in reports),
        transfer_ms=max(report.transfer_ms for report in reports),
    )


def answers_of(answers: Sequence[T], errors: Sequence[str]) -> list[T]:
    """Return the answers of all ranks, in the order of ranks. Raises EngineError for the first rank that failed."""
    for rank, error in enumerate(errors):
        if error:
            raise EngineError(f"rank {rank}: {error}")
    return list(answers)


def to_text(value: SchedulerCall | SchedulerAnswers) -> str:
    """Encode a value as the text that SGLang carries."""
    return base64.b64encode(codec.encode(value)).decode("ascii")


def from_text(text: str, kind: type[T]) -> T:
    """Invert `to_text`. Raises InvalidRequest."""
    return codec.decode(base64.b64decode(text.encode("ascii", "replace")), kind)
