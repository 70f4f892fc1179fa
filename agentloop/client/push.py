"""The port to the pusher of this process's tensors; a client that pushes none needs no torch.

The pusher is `agentloop_servers/weight_transfer/trainer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from agentloop.api.coordinator import ServiceStatus, UpdateReport
from agentloop.engine.interface import PushSource
from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve
from agentloop.types import KVPolicy

PUSHER = "agentloop_servers.weight_transfer.trainer:TensorPusher"
TRANSPORTS = ("auto", "nccl", "ipc", "shm", "tcp")

NamedTensors: TypeAlias = Mapping[str, object] | Iterable[tuple[str, object]]
Weights: TypeAlias = str | Path | NamedTensors
"""A directory, or named tensors: `model.named_parameters()`, `model.state_dict()`."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """The options of one push, as version `version`. `dtype` None: the dtype that the fleet computes in."""

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
    """The service, as a pusher uses it."""

    @property
    def url(self) -> str:
        """The service's URL: the pusher listens on an address that this host can reach."""

    async def update_from(self, push: PushSource, options: PushOptions) -> UpdateReport:
        """Update the fleet with the weights that `push` sends. Raises what the service raises."""

    async def status(self) -> ServiceStatus:
        """Return the service's status at this moment."""


class Pusher(Protocol):
    """A sender of this process's tensors to every replica, with connections that last until `close`."""

    async def push(self, weights: NamedTensors, options: PushOptions) -> UpdateReport:
        """Update the fleet once. The tensors must not change until this returns."""

    async def close(self) -> None:
        """Close the connections. Idempotent."""


def precision_gap(status: ServiceStatus, dtype: str) -> str | None:
    """Describe a difference between the trainer's dtype and the engines'; None if none is known.

    `dtype` is torch's name: "bfloat16", "torch.float32".
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
    """Make the pusher of this distribution. Raises InvalidRequest if torch is missing."""
    make = cast(Callable[[PushTarget, str | None], Pusher], resolve(PUSHER, param="weights"))
    return make(target, listen_host)
