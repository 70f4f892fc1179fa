"""The interface to the pusher of this process's tensors, which is loaded on first use because it needs torch.

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
"""A directory, or named tensors such as `model.named_parameters()` or `model.state_dict()`."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """The options of one push."""

    version: int
    kv_policy: KVPolicy | None = None
    transport: str = "auto"
    dtype: str | None = None  # None: the dtype in which the fleet computes
    timeout_s: float = 900.0
    all_ranks: bool = True  # all ranks of torch.distributed call the push
    force: bool = False  # accept a version that is not greater, and weights that fail the canary check
    late_grace_s: float = 10.0  # wait for a missing receiver, counted from the last arrival; then leave it out

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise InvalidRequest(
                f"unknown transport {self.transport!r}: expected one of {', '.join(TRANSPORTS)}", param="transport"
            )
        if not self.timeout_s > 0:
            raise InvalidRequest(f"timeout_s must be positive, not {self.timeout_s:g}", param="timeout_s")
        if not self.late_grace_s > 0:
            raise InvalidRequest(f"late_grace_s must be positive, not {self.late_grace_s:g}", param="late_grace_s")


class PushTarget(Protocol):
    """The part of the service's client that a pusher uses."""

    @property
    def url(self) -> str:
        """The service's URL. Unless `listen_host` is set, the pusher listens on the address that reaches this URL.

        If the service is on loopback, it is the address that reaches a remote replica.
        """

    async def update_from(self, push: PushSource, options: PushOptions) -> UpdateReport:
        """Update the fleet with the weights of `push`. Raises the service's errors."""

    async def status(self) -> ServiceStatus:
        """Return the current status of the service."""


class Pusher(Protocol):
    """Sends this process's tensors to all replicas. Its connections stay open until `close`."""

    async def push(self, weights: NamedTensors, options: PushOptions) -> UpdateReport:
        """Update the fleet's weights. The tensors must not change until this returns."""

    async def close(self) -> None:
        """Close the connections. Idempotent."""


def precision_gap(status: ServiceStatus, dtype: str) -> str | None:
    """Return a sentence if the trainer's dtype differs from the engines' dtypes; None if it does not.

    `dtype` is torch's name, such as "bfloat16" or "torch.float32". Engines that report no dtype are ignored.
    """
    own = dtype.removeprefix("torch.")
    others = {replica.weight_dtype for replica in status.replicas} - {None, own}
    if not others:
        return None
    return (
        f"the trainer's weights are {own}, but engines compute in {', '.join(sorted(map(str, others)))}: logprobs "
        "differ even with equal weights, so importance ratios and clipping treat tokens as off-policy"
    )


def open_pusher(target: PushTarget, listen_host: str | None) -> Pusher:
    """Create the pusher. Raises InvalidRequest if torch is not installed."""
    make = cast(Callable[[PushTarget, str | None], Pusher], resolve(PUSHER, param="weights"))
    return make(target, listen_host)
