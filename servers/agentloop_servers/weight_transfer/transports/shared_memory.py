"""The `shm` transport: buckets are in files of /dev/shm that the sender and the workers of its host map.

The sender creates two files with random names, readable only by its user, and unlinks them once all workers have
opened them: then the memory is freed with the last process that maps it, even after a crash. On a sender without a
GPU the files are the pack buffers, so nothing is copied before a worker reads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Sequence

import torch

from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.protocol import Peer, TransportBroken
from agentloop_servers.weight_transfer.transports.base import Buffer
from agentloop_servers.weight_transfer.transports.handshake import (
    AckedSendTransport,
    MapBuffers,
    MappedReceiveTransport,
)

SHM_FOLDER = "/dev/shm"
SHM_PREFIX = "agentloop-"


def create_buffer(num_bytes: int) -> Buffer:
    """Create and map a file. `export` is its path. Raises WeightUpdateFailed if memory is short."""
    path = f"{SHM_FOLDER}/{SHM_PREFIX}{secrets.token_hex(16)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Without this, a write beyond the free memory would kill the process
        os.posix_fallocate(descriptor, 0, num_bytes)
        return Buffer(_map(descriptor, num_bytes), path.encode())
    except OSError as error:
        os.unlink(path)
        raise WeightUpdateFailed(
            f"cannot allocate a buffer of {num_bytes:,} bytes in {SHM_FOLDER}: {error}; enlarge it, or use the "
            "transport 'tcp'"
        ) from error
    finally:
        os.close(descriptor)


def unlink(buffers: Sequence[Buffer]) -> None:
    """Remove the buffers' files. Mappings stay valid. Idempotent."""
    for buffer in buffers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(buffer.export)


class HostBuffers:
    """Two buffers of host memory, kept while their size and the receivers' connections stay the same."""

    def __init__(self) -> None:
        self._buffers: tuple[Buffer, ...] = ()
        self._made_for: tuple[int, frozenset[int]] | None = None

    def get(self, num_bytes: int, connections: frozenset[int]) -> tuple[Buffer, ...]:
        """Return both buffers, new ones for another size or other connections. Raises WeightUpdateFailed."""
        if (num_bytes, connections) != self._made_for:
            self.free()
            self._buffers = create_pair(num_bytes)
            self._made_for = num_bytes, connections
        return self._buffers

    def free(self) -> None:
        """Remove and unmap both buffers. No transport may use them. Idempotent."""
        unlink(self._buffers)
        self._buffers, self._made_for = (), None


class ShmSendTransport(AckedSendTransport):
    """The sending side; see `SendTransport`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._host = HostBuffers()  # used if the pack buffers are on a GPU
        self._packed: Sequence[Buffer] = ()
        self._shared: Sequence[Buffer] = ()  # the pack buffers themselves, or host memory
        self._sizes: tuple[int, ...] = ()  # sizes of the buckets

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        self._sizes = layout.bucket_sizes
        self._packed = self._shared = buffers
        if self._device.type != "cpu":
            connections = frozenset(peer.connection_id for peer in peers)
            self._shared = self._host.get(buffers[0].data.numel(), connections)
        try:
            self._map_all(peers, self._shared)
        finally:
            unlink(self._shared)

    def send(self, bucket: int, buffer: int) -> None:
        if self._shared is not self._packed:
            size = self._sizes[bucket]
            self._shared[buffer].data[:size].copy_(self._packed[buffer].data[:size])
        self.announce(bucket, buffer)

    def finish(self) -> None:
        super().finish()
        self._packed = self._shared = ()

    def close(self) -> None:
        super().close()
        self._packed = self._shared = ()
        self._host.free()


class ShmReceiveTransport(MappedReceiveTransport):
    """The receiving side; see `ReceiveTransport`.

    Mappings are kept for the next attempt, the bounce buffer of a GPU is not.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, is_copied=device.type != "cpu")
        self._files: dict[bytes, torch.Tensor] = {}

    def close(self) -> None:
        super().close()
        self._files = {}

    def _map(self, setup: MapBuffers) -> list[torch.Tensor]:
        kept, self._files = self._files, {}
        for path in setup.exports:
            mapped = kept.get(path)
            self._files[path] = _open_buffer(path, setup.num_bytes) if mapped is None else mapped
        return list(self._files.values())


def create_pair(num_bytes: int) -> tuple[Buffer, Buffer]:
    """Create two buffers, or none if the second does not fit. Raises WeightUpdateFailed."""
    first = create_buffer(num_bytes)
    try:
        return first, create_buffer(num_bytes)
    except WeightUpdateFailed:
        unlink([first])
        raise


def _open_buffer(export: bytes, num_bytes: int) -> torch.Tensor:
    """Map a sender's file. Raises OSError, and TransportBroken for a path that no sender creates."""
    folder, _, name = os.fsdecode(export).rpartition("/")
    if folder != SHM_FOLDER or not name.startswith(SHM_PREFIX) or "\0" in name:
        raise TransportBroken("the path does not belong to a buffer")
    descriptor = os.open(f"{SHM_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < num_bytes:  # reading beyond a file's end would kill the process
            raise TransportBroken("the file is shorter than the buffer")
        return _map(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Map a file as a tensor, which owns the mapping."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
