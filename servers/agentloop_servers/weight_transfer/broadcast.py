"""One broadcast attempt of a sender: every tensor is loaded, cast into a pack buffer, summed, and sent.

Two buffers are filled in turn, so that one is packed while the other travels.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from agentloop.engine import TensorInfo
from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.layout import Layout, Place, view
from agentloop_servers.weight_transfer.protocol import Peer
from agentloop_servers.weight_transfer.transports.base import Buffer, SendTransport
from agentloop_servers.weight_transfer.transports.cuda_ipc import DeviceMemory
from agentloop_servers.weight_transfer.transports.shared_memory import create_pair, unlink
from agentloop_servers.weight_transfer.verify import bucket_checksum, to_host

NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor to send. `load` returns the whole tensor, on any device and in any dtype; the sender casts.

    Every attempt calls the loads of all items exactly once, in order, even one that has failed meanwhile: where a
    load is a collective of the trainer's ranks, the others wait in it.
    """

    info: TensorInfo
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SentBuckets:
    """One checksum a bucket, of what was packed, and the time from the first byte to the last."""

    checksums: list[int]
    transfer_ms: float


@dataclass(frozen=True, slots=True)
class Route:
    """The workers that one transport serves in an attempt."""

    transport: SendTransport
    peers: tuple[Peer, ...]


class PackBuffers:
    """The sender's two buffers. They are kept while size and workers stay the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: tuple[Buffer, ...] = ()
        self._memories: tuple[DeviceMemory, ...] = ()
        self._made_for: tuple[int, frozenset[int]] | None = None

    def get(self, num_bytes: int, connections: frozenset[int]) -> tuple[Buffer, ...]:
        """Return two buffers for an attempt. Raises WeightUpdateFailed if there is no room.

        Host buffers have lost their names once `connections` have them open; other connections need new ones.
        """
        is_host = self._device.type == "cpu"
        made_for = (num_bytes, connections if is_host else frozenset())
        if made_for != self._made_for:
            self.free()
            if is_host:
                self._buffers = create_pair(num_bytes)
            else:
                self._allocate(num_bytes)
            self._made_for = made_for
        return self._buffers

    def free(self) -> None:
        """Give the memory back; no transport uses it. Idempotent."""
        if self._device.type == "cpu":
            unlink(self._buffers)
        memories, self._memories = self._memories, ()
        self._buffers, self._made_for = (), None
        for memory in memories:
            memory.free()

    def _allocate(self, num_bytes: int) -> None:
        for _ in range(NUM_BUFFERS):
            memory = DeviceMemory.allocate(num_bytes, self._device)
            self._memories += (memory,)
            self._buffers += (Buffer(memory.tensor, memory.handle()),)


def send_buckets(
    items: Sequence[Outgoing],
    layout: Layout,
    buffers: Sequence[Buffer],
    routes: Sequence[Route],
    check: Callable[[], None],
    give_up: Callable[[Exception], None],
) -> SentBuckets:
    """Pack and send everything.

    Raises TransportBroken from `check` or a transport, WeightUpdateFailed for a load that is not what was offered,
    or what a load raises. `give_up` is called as soon as that is known, and only then are the remaining loads
    called.
    """
    loads = iter(items)
    transports = [route.transport for route in routes]
    sums: list[torch.Tensor] = []
    try:
        for route in routes:
            route.transport.begin(route.peers, layout, buffers)
        started_at = time.monotonic()
        for bucket in range(len(layout.bucket_sizes)):
            buffer = bucket % NUM_BUFFERS
            if bucket >= NUM_BUFFERS:
                for transport in transports:
                    transport.wait_free(buffer)
            for place in layout.in_bucket(bucket):
                check()
                _pack(next(loads), place, buffers[buffer].data)
            check()
            sums.append(bucket_checksum(buffers[buffer].data[: layout.bucket_sizes[bucket]]))
            for transport in transports:
                transport.send(bucket, buffer)
        for transport in transports:
            transport.finish()
        return SentBuckets(to_host(sums), (time.monotonic() - started_at) * 1000)
    except Exception as error:
        give_up(error)
        _load_rest(loads)
        raise


def _load_rest(loads: Iterator[Outgoing]) -> None:
    """Take part in the collectives that are left; the result is not used, and the first error was reported."""
    for item in loads:
        with contextlib.suppress(Exception):
            item.load()


def _pack(item: Outgoing, place: Place, data: torch.Tensor) -> None:
    tensor = item.load()
    if tuple(tensor.shape) != place.shape:  # `copy_` would broadcast
        raise WeightUpdateFailed(
            f"tensor {place.name} has shape {tuple(tensor.shape)}, not {place.shape} as offered"
        )
    view(data, place).copy_(tensor.detach())
