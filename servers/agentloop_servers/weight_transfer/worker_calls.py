"""The calls from an engine's process to its workers: method names, and values encoded by the codec. Needs no
torch.

vLLM transmits calls with `collective_rpc`. SGLang's remote calls have flat scalars as arguments and return only a
text, so a call and its results are encoded there as the text of a `SchedulerCall` and of `SchedulerAnswers`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from agentloop.engine.interface import CommitReport, PushSource, StageReport, StagingDevice, TensorInfo
from agentloop.errors import EngineError
from agentloop.values import codec

T = TypeVar("T")

CALL = "agentloop_call"
"""The method with which a worker runs a `WorkerMethod`; see `StagingCalls`.

SGLang's scheduler accepts a `SchedulerCall` under this name, with the single parameter `call`.
"""


class WorkerMethod(StrEnum):
    """The methods that an engine's process calls in its workers; each value is the method's name there."""

    PREPARE = "weights_prepare"  # this and the next six are methods of `StagingCalls`
    STAGE = "weights_stage"
    POLL = "weights_poll"
    DROP = "weights_drop"
    COMMIT = "weights_commit"
    OFFER = "weights_offer"
    RELEASE = "weights_release"
    FOLLOW = "weights_follow"  # this and the next are methods of `StagingCalls` for a trainer's groups
    POLL_GROUP = "weights_poll_group"
    EXTEND_SCHEDULER = "scheduler_extend"  # this and the next five are methods of SGLang's `SchedulerExtension`
    PAUSE_REQUESTS = "requests_pause"
    RESUME_REQUESTS = "requests_resume"
    END_REQUESTS = "requests_end"
    RELEASE_MEMORY = "memory_release"
    RESUME_MEMORY = "memory_resume"
    EXTEND_RUNNER = "extend_runner"  # this and the next three are methods of vLLM's `WeightWorker`
    LOAD_ADAPTER = "adapter_load"
    REMOVE_ADAPTER = "adapter_remove"
    VERIFY_ADAPTER = "weights_verify_adapter"


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """A call of a `WorkerMethod` on every rank of SGLang's scheduler, between two steps."""

    call_id: int
    method: str
    arguments: tuple[Any, ...] = ()  # strings, bytes, numbers and None


@dataclass(frozen=True, slots=True)
class SchedulerAnswers:
    """The results of one call on all tensor-parallel ranks, in rank order.

    `errors` has a message for each failed rank and "" for the others; the result of a failed rank is None.
    """

    call_id: int
    answers: tuple[bytes | int | None, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The number of sampled tokens of each request in a paused scheduler, by request id.

    `unbegun` are the requests without KV and sampled tokens.
    """

    num_output_ids: Mapping[str, int]
    unbegun: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """A folder of safetensors files with checked headers, and the tensors in it."""

    directory: str
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class StagingSetup:
    """The settings of a worker's stager.

    `loaded` is the folder that the engine has loaded; None for dummy weights.
    """

    loaded: CheckedFolder | None
    policy: str  # "auto", "device", "host" or "none"; see `staging.py`
    timeout_s: float  # timeout of a transfer


@dataclass(frozen=True, slots=True)
class StageOrder:
    """An order to receive one update from one source. `number` identifies it until its commit.

    Without `push` and `folder` it receives the parts of a trainer's group, with the tensors `transfer` as far as
    known.
    """

    number: int
    push: PushSource | None = None
    folder: CheckedFolder | None = None
    transfer: tuple[TensorInfo, ...] = ()
    is_tied: bool = False  # the model shares its output head with the embeddings

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
    """The response to a poll, with `report` in state HELD and `error` in state FAILED."""

    state: StageState
    error: str = ""
    report: StageReport | None = None
    num_parts: int = 0  # received parts of a transfer


def merge_stage_reports(reports: Sequence[StageReport]) -> StageReport:
    """Merge the workers' reports: the time of the slowest, and the staging device of the worker with the least
    memory."""
    order = [StagingDevice.NOWHERE, StagingDevice.FILES, StagingDevice.HOST, StagingDevice.DEVICE]
    return StageReport(
        staging_device=min((report.staging_device for report in reports), key=order.index),
        transport="+".join(sorted({report.transport for report in reports})),
        num_bytes=max(report.num_bytes for report in reports),
        transfer_ms=max(report.transfer_ms for report in reports),
        digest=reports[0].digest,  # the digest of the source, equal for all ranks
    )


def merge_commit_reports(reports: Sequence[CommitReport]) -> CommitReport:
    """Merge the workers' reports: the times of the slowest, and the sums of comparisons."""
    return CommitReport(
        swap_ms=max(report.swap_ms for report in reports),
        verify_ms=max(report.verify_ms for report in reports),
        num_verified=sum(report.num_verified for report in reports),
        num_unverified=sum(report.num_unverified for report in reports),
        transfer_ms=max(report.transfer_ms for report in reports),
    )


def answers_of(answers: Sequence[T], errors: Sequence[str]) -> list[T]:
    """Return the results of all ranks in rank order. Raises EngineError for the first failed rank."""
    for rank, error in enumerate(errors):
        if error:
            raise EngineError(f"worker rank {rank} failed: {error}")
    return list(answers)


def to_text(value: SchedulerCall | SchedulerAnswers) -> str:
    """Encode a value as text for SGLang."""
    return base64.b64encode(codec.encode(value)).decode("ascii")


def from_text(text: str, kind: type[T]) -> T:
    """Decode the text of `to_text`. Raises InvalidRequest."""
    return codec.decode(base64.b64decode(text.encode("ascii", "replace")), kind)
