"""One broadcast attempt of a sender: loads every tensor, casts it into a pack buffer, sums and sends it.

Two buffers alternate, so that one is packed while the other is sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from agentloop.engine.interface import TensorInfo
from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.layout import Layout, Place, view
from agentloop_servers.weight_transfer.protocol import Peer
from agentloop_servers.weight_transfer.transports.base import Buffer, SendTransport
from agentloop_servers.weight_transfer.transports.cuda_ipc import DeviceMemory
from agentloop_servers.weight_transfer.transports.shared_memory import HostBuffers, unlink
from agentloop_servers.weight_transfer.verify import bucket_checksum, to_host

NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor to send. `load` returns the complete tensor, on any device and in any dtype; the sender casts it.

    Every attempt calls each `load` exactly once, in order, also after a failure: a load may be a collective of the
    trainer's ranks, and the other ranks wait in it.
    """

    info: TensorInfo
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SentBuckets:
    """The result of an attempt: one checksum per bucket, and the time from the first byte to the last."""

    checksums: list[int]
    transfer_ms: float


class PackBuffers:
    """The sender's two pack buffers, kept while the size and the workers stay the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = HostBuffers()
        self._memories: list[DeviceMemory] = []

    def get(self, num_bytes: int, connections: frozenset[int]) -> tuple[Buffer, ...]:
        """Return both buffers for the workers of these connections.

        Raises WeightUpdateFailed if memory is short.
        """
        if self._device.type == "cpu":
            return self._host.get(num_bytes, connections)
        if any(memory.tensor.numel() != num_bytes for memory in self._memories):
            self.free()
        while len(self._memories) < NUM_BUFFERS:
            self._memories.append(DeviceMemory.allocate(num_bytes, self._device))
        return tuple(Buffer(memory.tensor, memory.handle()) for memory in self._memories)

    def free(self) -> None:
        """Free the memory. No transport may use it. Idempotent."""
        self._host.free()
        while self._memories:
            self._memories.pop().free()


def send_buckets(
    items: Sequence[Outgoing],
    layout: Layout,
    buffers: Sequence[Buffer],
    peers: Mapping[SendTransport, Sequence[Peer]],
    check: Callable[[], None],
    give_up: Callable[[Exception], None],
) -> SentBuckets:
    """Pack all tensors into buckets, and send them to the `peers` of each transport.

    Raises TransportBroken from `check` or a transport, WeightUpdateFailed for a tensor with another shape than
    offered, or a load's error. Then `give_up` is called first, and the remaining loads afterwards.
    """
    loads = iter(items)
    sums: list[torch.Tensor] = []
    try:
        for transport in peers:
            transport.begin(peers[transport], layout, buffers)
        if buffers[0].data.device.type == "cpu":
            unlink(buffers)  # all readers have mapped them, so the files' names are no longer needed
        started_at = time.monotonic()
        for bucket in range(len(layout.bucket_sizes)):
            buffer = bucket % NUM_BUFFERS
            if bucket >= NUM_BUFFERS:
                for transport in peers:
                    transport.wait_free(buffer)
            end = 0
            for place in layout.in_bucket(bucket):
                check()
                # Zero the gaps: otherwise data of an earlier bucket would change the checksum of equal tensors.
                buffers[buffer].data[end : place.offset].zero_()
                _pack(next(loads), place, buffers[buffer].data)
                end = place.offset + place.num_bytes
            buffers[buffer].data[end : layout.bucket_sizes[bucket]].zero_()
            check()
            sums.append(bucket_checksum(buffers[buffer].data[: layout.bucket_sizes[bucket]]))
            for transport in peers:
                transport.send(bucket, buffer)
        for transport in peers:
            transport.finish()
        return SentBuckets(to_host(sums), (time.monotonic() - started_at) * 1000)
    except Exception as error:
        give_up(error)
        _load_rest(loads)
        raise


def _load_rest(loads: Iterator[Outgoing]) -> None:
    """Call the remaining loads, which may be collectives. Results and errors are dropped."""
    for item in loads:
        with contextlib.suppress(Exception):
            item.load()


def _pack(item: Outgoing, place: Place, data: torch.Tensor) -> None:
    tensor = item.load()
    if tuple(tensor.shape) != place.shape:  # `copy_` would broadcast silently
        raise WeightUpdateFailed(
            f"tensor {place.name} has shape {tuple(tensor.shape)}, but was offered with {place.shape}"
        )
    view(data, place).copy_(tensor.detach())
