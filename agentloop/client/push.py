"""The port to what pushes this process's tensors; torch is behind it, so that a client installs without.

`agentloop_servers/weight_transfer/trainer.py` is what stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from agentloop.api.coordinator import ServiceStatus, UpdateReport
from agentloop.engine import PushSource
from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve
from agentloop.types import KVPolicy

PUSHER = "agentloop_servers.weight_transfer.trainer:TensorPusher"
TRANSPORTS = ("auto", "nccl", "ipc", "shm")

NamedTensors: TypeAlias = Mapping[str, object] | Iterable[tuple[str, object]]
Weights: TypeAlias = str | Path | NamedTensors
"""A directory, or named tensors: `model.named_parameters()`, `model.state_dict()`."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """The options under which tensors become version `version`. `dtype` None means what the fleet computes in."""

    version: int
    kv_policy: KVPolicy | None = None
    transport: str = "auto"
    dtype: str | None = None
    timeout_s: float = 900.0
    all_ranks: bool = True  # under torch.distributed every rank takes part
    force: bool = False  # the version need not grow, and noise is served
    late_grace_s: float = 10.0  # a receiver that is not there by then, after the others, is left out

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise InvalidRequest(f"a transport is one of {', '.join(TRANSPORTS)}", param="transport")
        if not self.timeout_s > 0:
            raise InvalidRequest("a timeout is positive", param="timeout_s")
        if not self.late_grace_s > 0:
            raise InvalidRequest("a grace is positive", param="late_grace_s")


class PushTarget(Protocol):
    """The service, as a pusher needs it."""

    @property
    def url(self) -> str:
        """The service's URL: the pusher listens where that host can reach it."""

    async def announce(self, source: PushSource, options: PushOptions) -> UpdateReport:
        """Have the fleet take the weights from `source`. Raises what the service raises."""

    async def status(self) -> ServiceStatus:
        """Return the service's state at this moment."""


class Pusher(Protocol):
    """A sender of this process's tensors to every replica. Keeps its connections between updates; close it."""

    async def push(self, weights: NamedTensors, options: PushOptions) -> UpdateReport:
        """Make one update. The tensors must not change until it returns."""

    async def close(self) -> None:
        """Let go of the connections. Idempotent."""


def precision_gap(status: ServiceStatus, dtype: str) -> str | None:
    """Say that engines compute in another type than the trainer; None: they are alike, or none says its own.

    `dtype` is a name as torch has it: "bfloat16", "torch.float32".
    """
    own = dtype.removeprefix("torch.")
    others = {replica.weight_dtype for replica in status.replicas} - {None, own}
    if not others:
        return None
    return (
        f"the trainer's weights are {own}, engines compute in {', '.join(sorted(map(str, others)))}: logprobs "
        "differ on equal weights, which clips and weighs tokens as if the policy had moved"
    )


def open_pusher(target: PushTarget, listen_host: str | None) -> Pusher:
    """Make the shipped pusher. Raises InvalidRequest where torch is missing."""
    make = cast(Callable[[PushTarget, str | None], Pusher], resolve(PUSHER, param="weights"))
    return make(target, listen_host)
