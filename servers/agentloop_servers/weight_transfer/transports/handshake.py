"""Agreement before bytes flow: the transport that reaches a worker, and for shared memory the messages on top.

`shm` and `ipc` buckets lie in memory that both sides see. The first message of an attempt names the sender's two
buffers, and the receiver answers that it has mapped them; then come "bucket ready" and "bucket consumed".
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.protocol import Hello
from agentloop_servers.weight_transfer.transports.base import Buffer, Peer, TransportBroken

CPU = "cpu"
S = TypeVar("S", bound=msgspec.Struct)


class TransportKind(StrEnum):
    """How a sender's bytes reach a worker; `AUTO` chooses for each."""

    AUTO = "auto"
    NCCL = "nccl"  # another CUDA device, on any host
    IPC = "ipc"  # another process on the same CUDA device
    SHM = "shm"  # memory of the host that both run on


class Unreachable(Exception):
    """No transport, or not the one asked for, serves this worker. `str()` is one clear line."""


def host_name() -> str:
    """Equal for processes that see one /dev/shm: one boot of one host, and one container on it."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{socket.gethostname()}"


def device_name(device: torch.device) -> str:
    """ "cpu", or the CUDA device's uuid."""
    if device.type != "cuda":
        return CPU
    return str(torch.cuda.get_device_properties(device).uuid)


def choose(asked: TransportKind, sender_device: str, sender_host: str, hello: Hello) -> TransportKind:
    """The transport from a sender to the worker that said `hello`. Raises Unreachable."""
    is_same_host = sender_host == hello.host
    is_between_gpus = CPU not in (sender_device, hello.device)
    if is_between_gpus:
        needed = TransportKind.IPC if sender_device == hello.device else TransportKind.NCCL
    else:
        needed = TransportKind.SHM
    chosen = needed if asked is TransportKind.AUTO else asked
    worker = f"worker {hello.rank} (on {hello.device})"
    # Memory of the host serves any two processes on it, GPUs or not.
    if chosen is not needed and chosen is not TransportKind.SHM:
        raise Unreachable(f"{worker} would need the transport {needed}, not {chosen}; or write a directory instead")
    if chosen in (TransportKind.SHM, TransportKind.IPC) and not is_same_host:
        raise Unreachable(
            f"{worker} is on another host or in another container than the sender (on {sender_device}), where "
            f"{chosen} does not reach; between hosts weights go from GPU to GPU (nccl): write a directory instead"
        )
    return chosen


class MapBuffers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to map the buffers, each `num_bytes` long."""

    exports: list[bytes]
    num_bytes: int


class BuffersMapped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver has mapped them, or could not: `error` says why."""

    error: str | None = None


class BucketReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bucket: int
    buffer: int


class BucketConsumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bucket: int


def post(wire: Peer, message: msgspec.Struct) -> None:
    """Send a message. Raises TransportBroken."""
    wire.post(msgspec.msgpack.encode(message))


def take(wire: Peer, kind: type[S]) -> S:
    """The next message, which must be of this kind. Raises TransportBroken."""
    try:
        return msgspec.msgpack.decode(wire.take(), type=kind)
    except msgspec.MsgspecError as error:
        raise TransportBroken(f"the peer sent something else than {kind.__name__}") from error


class AckedPeers:
    """The sender's side: tells peers that a buffer is ready, and waits until all of them have consumed it."""

    def __init__(self, peers: Sequence[Peer], buffers: Sequence[Buffer]) -> None:
        """Have the peers map the buffers. Raises TransportBroken if one cannot."""
        self._peers = peers
        self._last = [-1] * len(buffers)  # the bucket that was sent last from each buffer
        self._consumed = [-1] * len(peers)
        setup = MapBuffers(exports=[buffer.export for buffer in buffers], num_bytes=buffers[0].data.numel())
        for peer in peers:
            post(peer, setup)
        for peer in peers:
            error = take(peer, BuffersMapped).error
            if error is not None:
                raise TransportBroken(f"a worker cannot map the buffers: {error}")

    def ready(self, bucket: int, buffer: int) -> None:
        self._last[buffer] = bucket
        for peer in self._peers:
            post(peer, BucketReady(bucket, buffer))

    def wait_free(self, buffer: int) -> None:
        for position, peer in enumerate(self._peers):
            while self._consumed[position] < self._last[buffer]:
                self._consumed[position] = take(peer, BucketConsumed).bucket

    def wait_all(self) -> None:
        for buffer in range(len(self._last)):
            self.wait_free(buffer)


def ready_buckets(wire: Peer, layout: Layout, num_buffers: int) -> Iterator[BucketReady]:
    """The receiver's side: every bucket of the layout in order, as it gets ready. Raises TransportBroken."""
    for bucket in range(len(layout.bucket_sizes)):
        ready = take(wire, BucketReady)
        if ready.bucket != bucket or not 0 <= ready.buffer < num_buffers:
            raise TransportBroken(f"bucket {ready.bucket} came instead of {bucket}")
        yield ready
