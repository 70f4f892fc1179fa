"""The group of all ranks of a training job, for updates that they make together.

Rank 0 sends. The other ranks only load, so that its gathers of sharded tensors complete. Messages are MessagePack
in CPU tensors on a separate gloo group, which has timeouts with any backend of the job and needs no GPU. An update
is `check_equal_parts` on every rank; then rank 0 calls `begin_attempt` any number of times and `end` once, while
the others call `follow`. All methods block: call them from a thread, one at a time. After a failed message the
ranks may have different states, so the group is then permanently broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import orjson
import torch
import torch.distributed as dist

from agentloop.api.coordinator import UpdateReport
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest, WeightUpdateFailed, from_wire
from agentloop.values import codec

_AGAIN = -1  # means "an attempt starts"; other numbers are the size of the outcome that follows
_PART_BYTES = 1024
_MAX_PART_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's tensors in an update. `error` is the reason why it cannot take part."""

    version: int
    digest: int  # identifies the names, dtypes and shapes
    num_tensors: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The result of an update: a report, or an error in its wire form."""

    report: UpdateReport | None = None
    error: bytes | None = None  # JSON
    status: int = 0

    @classmethod
    def failed(cls, error: BaseException) -> UpdateOutcome:
        """Make the outcome of an error that the other ranks will raise."""
        if not isinstance(error, AgentLoopError):
            error = WeightUpdateFailed(f"rank 0: {type(error).__name__} {error}".rstrip())
        return cls(error=orjson.dumps(error.to_wire()), status=error.http_status)

    def result(self) -> UpdateReport:
        """Return the update's report, or raise its error."""
        if self.report is not None:
            return self.report
        raise from_wire(orjson.loads(self.error or b"null"), self.status)


def is_distributed() -> bool:
    """Return True if this process is one of several ranks of a torch.distributed job."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class TrainerGroup:
    """The group of all ranks of the default process group. All ranks create it at the same time."""

    def __init__(self, timeout_s: float) -> None:
        self._world = dist.group.WORLD
        self._timeout_s = timeout_s
        self._is_broken = False
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def is_sender(self) -> bool:
        """True on rank 0."""
        return bool(dist.get_rank() == 0)

    def can_wait(self, timeout_s: float) -> bool:
        """Return True if the group's timeout is long enough and it belongs to the current process group."""
        return dist.group.WORLD is self._world and timeout_s <= self._timeout_s

    def check_equal_parts(self, part: RankPart, timeout_s: float) -> None:
        """Compare the parts of all ranks.

        Every rank calls this; each raises InvalidRequest if two parts differ.
        """
        data = codec.encode(part)
        own = torch.zeros(_PART_BYTES, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        own[-2:] = torch.tensor(divmod(len(data), 256), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        self._wait(lambda: dist.all_gather(parts, own, group=self._group, async_op=True), timeout_s)
        decoded = [_part(one) for one in parts]
        for rank, one in enumerate(decoded):
            if one.error is not None:
                raise InvalidRequest(f"rank {rank}: {one.error}", param="weights")
        for rank, one in enumerate(decoded):
            if one != decoded[0]:
                raise InvalidRequest(
                    f"ranks 0 and {rank} differ: {_describe(decoded[0])} and {_describe(one)}; all ranks must "
                    "pass the "
                    "same tensors in the same order, sharded or complete",
                    param="weights",
                )

    def begin_attempt(self, timeout_s: float) -> None:
        """Request all other ranks, from rank 0, to load every tensor once."""
        self._say(torch.tensor([_AGAIN]), timeout_s)

    def end(self, outcome: UpdateOutcome, timeout_s: float) -> None:
        """Send the outcome of the update from rank 0 to all other ranks."""
        data = torch.frombuffer(bytearray(codec.encode(outcome)), dtype=torch.uint8)
        self._say(torch.tensor([len(data)]), timeout_s)
        self._say(data, timeout_s)

    def follow(self, load_all: Callable[[], None], timeout_s: float) -> UpdateReport:
        """Load all tensors at each `begin_attempt` of rank 0, until its `end`. Returns or raises the outcome."""
        give_up_at = time.monotonic() + timeout_s
        while (num_bytes := self._hear_number(give_up_at)) == _AGAIN:
            load_all()
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self._say(data, give_up_at - time.monotonic())
        return codec.decode(data.numpy().tobytes(), UpdateOutcome).result()

    def close(self) -> None:
        """Destroy the group, unless the job has already ended."""
        if dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group(self._group)

    def _hear_number(self, give_up_at: float) -> int:
        number = torch.zeros(1, dtype=torch.int64)
        self._say(number, give_up_at - time.monotonic())
        return int(number.item())

    def _say(self, data: torch.Tensor, timeout_s: float) -> None:
        """Broadcast `data` of rank 0 into `data` of all other ranks."""
        self._wait(lambda: dist.broadcast(data, 0, group=self._group, async_op=True), timeout_s)

    def _wait(self, start: Callable[[], dist.Work], timeout_s: float) -> None:
        if self._is_broken:
            raise WeightUpdateFailed("the ranks lost their connection in an earlier update: restart the job")
        give_up_at = time.monotonic() + timeout_s
        try:
            start().wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:  # c10d raises this for a timeout and for a lost peer
            self._is_broken = True
            if time.monotonic() >= give_up_at:
                raise DeadlineExceeded(
                    f"the other ranks did not call push within {timeout_s:.0f} s: call it on every rank, or "
                    "set all_ranks to false"
                ) from error
            raise WeightUpdateFailed(f"lost another rank of the training job: {error}") from error


def _part(data: torch.Tensor) -> RankPart:
    content = data.numpy().tobytes()
    return codec.decode(content[: content[-2] * 256 + content[-1]], RankPart)


def _describe(part: RankPart) -> str:
    return f"{part.num_tensors} tensors for version {part.version}"


def shortened(message: str) -> str:
    """Shorten an error message so that it fits into a `RankPart`."""
    return message[:_MAX_PART_ERROR_CHARS]
