"""The `shm` transport: buckets lie in files of /dev/shm that the sender and the workers of its host have mapped.

The sender creates two files for its user alone, with random names, and unlinks them as soon as all workers have
them open: from then on the memory goes with the last process that maps it, however that ends. On a sender without a
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
    """Make a file of that size, mapped; `export` is its path. Raises WeightUpdateFailed if there is no room."""
    path = f"{SHM_FOLDER}/{SHM_PREFIX}{secrets.token_hex(16)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # or the first write beyond what is free kills the process
        return Buffer(_map(descriptor, num_bytes), path.encode())
    except OSError as error:
        os.unlink(path)
        raise WeightUpdateFailed(
            f"{SHM_FOLDER} has no room for a buffer of {num_bytes:,} bytes: {error}"
        ) from error
    finally:
        os.close(descriptor)


def unlink(buffers: Sequence[Buffer]) -> None:
    """Remove the names; mappings stay. Idempotent."""
    for buffer in buffers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(buffer.export)


class ShmSendTransport(AckedSendTransport):
    """The sending half; see `SendTransport`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers: tuple[Buffer, ...] = ()
        # With pack buffers on a GPU: host memory, for `_own_connections` alone.
        self._own: tuple[Buffer, ...] = ()
        self._own_connections: frozenset[int] = frozenset()
        self._sizes: tuple[int, ...] = ()  # of the buckets

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        self._sizes = layout.bucket_sizes
        self._buffers = tuple(buffers)
        shared = self._buffers
        if self._device.type != "cpu":
            shared = self._own_buffers(buffers[0].data.numel(), frozenset(peer.connection_id for peer in peers))
        try:
            self._map(peers, shared)
        finally:
            unlink(shared)

    def send(self, bucket: int, buffer: int) -> None:
        if self._own and self._buffers:
            size = self._sizes[bucket]
            self._own[buffer].data[:size].copy_(self._buffers[buffer].data[:size])
        self._announce(bucket, buffer)

    def finish(self) -> None:
        super().finish()
        self._buffers = ()

    def close(self) -> None:
        super().close()
        self._buffers, self._own, self._own_connections = (), (), frozenset()

    def _own_buffers(self, num_bytes: int, connections: frozenset[int]) -> tuple[Buffer, ...]:
        """Return the same files for the same connections, which have them open; a new one needs names."""
        if connections != self._own_connections or not self._own or self._own[0].data.numel() != num_bytes:
            self._own, self._own_connections = (), frozenset()
            self._own = create_pair(num_bytes)
            self._own_connections = connections
        return self._own


class ShmReceiveTransport(MappedReceiveTransport):
    """The receiving half; see `ReceiveTransport`.

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
    """Make two files; none is left if the second finds no room. Raises WeightUpdateFailed."""
    first = create_buffer(num_bytes)
    try:
        return first, create_buffer(num_bytes)
    except WeightUpdateFailed:
        unlink([first])
        raise


def _open_buffer(export: bytes, num_bytes: int) -> torch.Tensor:
    """Map a sender's file. Raises TransportBroken for a path that no sender makes, and OSError."""
    folder, _, name = os.fsdecode(export).rpartition("/")
    if folder != SHM_FOLDER or not name.startswith(SHM_PREFIX) or "\0" in name:
        raise TransportBroken("the path is not a buffer's")
    descriptor = os.open(f"{SHM_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < num_bytes:  # reading beyond a file's end kills the process
            raise TransportBroken("the file is shorter than the buffer")
        return _map(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Map a file as a tensor, which keeps the mapping alive and ends it."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
