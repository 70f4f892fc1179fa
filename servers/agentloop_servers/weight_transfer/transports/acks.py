"""The messages of lanes whose buckets lie in memory that both sides see: "bucket ready" and "bucket consumed".

`shm` and `ipc` share this file. The first message of a pass names the sender's two buffers, and the receiver
answers that it has mapped them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.transports.base import Buffer, LaneBroken, Wire

S = TypeVar("S", bound=msgspec.Struct)


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to map the buffers, each `num_bytes` long."""

    exports: list[bytes]
    num_bytes: int


class Mapped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver has mapped them, or could not: `error` says why."""

    error: str | None = None


class BucketReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bucket: int
    buffer: int


class BucketConsumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bucket: int


def post(wire: Wire, message: msgspec.Struct) -> None:
    """Send a message. Raises LaneBroken."""
    wire.post(msgspec.msgpack.encode(message))


def take(wire: Wire, kind: type[S]) -> S:
    """The next message, which must be of this kind. Raises LaneBroken."""
    try:
        return msgspec.msgpack.decode(wire.take(), type=kind)
    except msgspec.MsgspecError as error:
        raise LaneBroken(f"the peer sent something else than {kind.__name__}") from error


class AckedPeers:
    """The sender's side: tells peers that a buffer is ready, and waits until all of them have consumed it."""

    def __init__(self, peers: Sequence[Wire], buffers: Sequence[Buffer]) -> None:
        """Have the peers map the buffers. Raises LaneBroken if one cannot."""
        self._peers = peers
        self._last = [-1] * len(buffers)  # the bucket that was sent last from each buffer
        self._consumed = [-1] * len(peers)
        setup = Setup(exports=[buffer.export for buffer in buffers], num_bytes=buffers[0].data.numel())
        for peer in peers:
            post(peer, setup)
        for peer in peers:
            error = take(peer, Mapped).error
            if error is not None:
                raise LaneBroken(f"a worker cannot map the buffers: {error}")

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


def ready_buckets(wire: Wire, layout: Layout, num_buffers: int) -> Iterator[BucketReady]:
    """The receiver's side: every bucket of the layout in order, as it gets ready. Raises LaneBroken."""
    for bucket in range(len(layout.bucket_sizes)):
        ready = take(wire, BucketReady)
        if ready.bucket != bucket or not 0 <= ready.buffer < num_buffers:
            raise LaneBroken(f"bucket {ready.bucket} came instead of {bucket}")
        yield ready
