"""The choice of a worker's transport, and the base of the shared-memory transports (`shm`, `ipc`).

Both sides of these map the same buffers. The first message of an attempt names the sender's two buffers and the
receiver responds that it has mapped them; then follow BucketReady and BucketConsumed messages.
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
from agentloop_servers.weight_transfer.protocol import Hello, Peer, TransportBroken
from agentloop_servers.weight_transfer.transports.base import Buffer

CPU = "cpu"
S = TypeVar("S", bound=msgspec.Struct)


class TransportKind(StrEnum):
    """The transports from a sender to a worker. `AUTO` chooses one per worker."""

    AUTO = "auto"
    NCCL = "nccl"  # another CUDA device, on any host
    IPC = "ipc"  # another process on the same CUDA device
    SHM = "shm"  # shared memory on the same host
    TCP = "tcp"  # sockets, between hosts


class Unreachable(Exception):
    """No transport reaches a worker, or not the requested one. `str()` is one line."""


def host_name() -> str:
    """Return a name for this host's boot and container. Processes with the same /dev/shm have the same name."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{socket.gethostname()}"


def device_name(device: torch.device) -> str:
    """Return "cpu", or the CUDA device's uuid."""
    if device.type != "cuda":
        return CPU
    return str(torch.cuda.get_device_properties(device).uuid)


def choose(asked: TransportKind, sender_device: str, sender_host: str, hello: Hello) -> TransportKind:
    """Choose the transport from a sender to the worker of a Hello. Raises Unreachable."""
    is_same_host = sender_host == hello.host
    if CPU in (sender_device, hello.device):
        needed = TransportKind.SHM if is_same_host else TransportKind.TCP
    elif sender_device == hello.device:
        needed = TransportKind.IPC if is_same_host else TransportKind.TCP
    else:
        needed = TransportKind.NCCL
    chosen = needed if asked is TransportKind.AUTO else asked
    worker = f"worker {hello.rank} (on {hello.device})"
    if chosen is TransportKind.SHM and not is_same_host:
        raise Unreachable(
            f"{worker} is on another host or in another container, so the transport shm cannot reach it"
        )
    # Sockets and host memory work between any two processes.
    if chosen not in (needed, TransportKind.SHM, TransportKind.TCP):
        raise Unreachable(f"{worker} needs the transport {needed}, but {chosen} was requested")
    return chosen


class MapBuffers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender's buffers to map, each `num_bytes` long."""

    exports: list[bytes]
    num_bytes: int


class BuffersMapped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's response to MapBuffers. `error` is the reason if it could not map them."""

    error: str | None = None


class BucketReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer has a bucket."""

    bucket: int
    buffer: int


class BucketConsumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket's buffer may be written again."""

    bucket: int


def post(peer: Peer, message: msgspec.Struct) -> None:
    """Send a message. Raises TransportBroken."""
    peer.post(msgspec.msgpack.encode(message))


def take(peer: Peer, kind: type[S]) -> S:
    """Return the next message, which must be of this type. Raises TransportBroken."""
    try:
        return msgspec.msgpack.decode(peer.take(), type=kind)
    except msgspec.MsgspecError as error:
        raise TransportBroken(f"the peer sent another message than the expected {kind.__name__}") from error


class AckedSendTransport:
    """Base of sending sides whose buffers the peers map: announces buckets and waits for their consumption."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peers: Sequence[Peer] | None = None  # None: no attempt is running
        self._last: list[int] = []  # the last bucket sent from each buffer
        self._consumed: list[int] = []  # the last bucket consumed by each peer

    def wait_free(self, buffer: int) -> None:
        """Wait until all peers have consumed this buffer's last bucket. Raises TransportBroken."""
        for position, peer in enumerate(self._peers or ()):
            while self._consumed[position] < self._last[buffer]:
                self._consumed[position] = take(peer, BucketConsumed).bucket

    def finish(self) -> None:
        """Wait until all peers have consumed everything. Raises TransportBroken."""
        for buffer in range(len(self._last)):
            self.wait_free(buffer)
        self._peers = None

    def abort(self) -> None:
        """No effect: all waits are for a peer, and its `check` ends them after an abort."""

    def close(self) -> None:
        """Remove the peers."""
        self._peers = None

    def map(self, peers: Sequence[Peer], request: MapBuffers) -> dict[Peer, str]:
        """Request the peers to map buffers. Removes those that cannot, and returns their reasons."""
        for peer in peers:
            post(peer, request)
        refused = {peer: error for peer in peers if (error := take(peer, BuffersMapped).error) is not None}
        self._peers = [peer for peer in peers if peer not in refused]
        self._last, self._consumed = [-1] * len(request.exports), [-1] * len(self._peers)
        return refused

    def _map_all(self, peers: Sequence[Peer], buffers: Sequence[Buffer]) -> None:
        """Request the peers to map this process's buffers. Raises TransportBroken if one cannot."""
        refused = self.map(peers, MapBuffers([buffer.export for buffer in buffers], buffers[0].data.numel()))
        if refused:
            raise TransportBroken(
                f"a worker cannot map the sender's weight buffers: {next(iter(refused.values()))}; use another "
                "transport if this repeats"
            )

    def announce(self, bucket: int, buffer: int) -> None:
        """Announce a bucket in a buffer to all peers. Raises TransportBroken."""
        if self._peers is None:
            raise TransportBroken("the attempt was cancelled")
        self._last[buffer] = bucket
        for peer in self._peers:
            post(peer, BucketReady(bucket, buffer))


class MappedReceiveTransport:
    """Base of receiving sides that map the sender's buffers: reads announced buckets and acknowledges them."""

    def __init__(self, device: torch.device, *, is_copied: bool = False) -> None:
        """`is_copied` means that buckets are in host memory and are copied to the device first."""
        self._device = device
        self._is_copied = is_copied
        self._attempt: tuple[Peer, Layout] | None = None
        self._mapped: list[torch.Tensor] = []

    def begin(self, peer: Peer, layout: Layout) -> None:
        """Map the buffers. A failure is reported to the sender, and raises TransportBroken."""
        setup = take(peer, MapBuffers)
        try:
            if setup.num_bytes < layout.largest_bucket or not setup.exports:
                raise TransportBroken("the buffers are smaller than a bucket")
            self._mapped = self._map(setup)
        except (OSError, TransportBroken) as error:
            self.finish()
            post(peer, BuffersMapped(error=str(error)))
            raise TransportBroken(f"the sender's memory cannot be mapped: {error}") from error
        self._attempt = peer, layout
        post(peer, BuffersMapped())

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket of the layout in order. Raises TransportBroken."""
        if self._attempt is None:
            raise TransportBroken("the attempt was cancelled")
        peer, layout = self._attempt
        bounce = None
        if self._is_copied:
            bounce = torch.empty(layout.largest_bucket, dtype=torch.uint8, device=self._device)
        try:
            for bucket, size in enumerate(layout.bucket_sizes):
                ready = take(peer, BucketReady)
                if ready.bucket != bucket or not 0 <= ready.buffer < len(self._mapped):
                    raise TransportBroken(
                        f"received bucket {ready.bucket} of buffer {ready.buffer}, expected bucket {bucket}"
                    )
                data = self._mapped[ready.buffer][:size]
                if bounce is not None:  # ordered after the consumer's work on the current stream
                    data = bounce[:size].copy_(data)
                    post(peer, BucketConsumed(bucket))
                yield bucket, data
                if bounce is None:
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()
                    post(peer, BucketConsumed(bucket))
        finally:
            self.finish()

    def finish(self) -> None:
        """Release the attempt. Idempotent."""
        self._attempt, self._mapped = None, []

    def abort(self) -> None:
        """No effect: a wait here is for the peer, and the attempt's owner has ended that."""

    def close(self) -> None:
        """Release everything."""
        self.finish()

    def _map(self, setup: MapBuffers) -> list[torch.Tensor]:
        """Map the buffers as bytes. Raises TransportBroken, OSError."""
        raise NotImplementedError
