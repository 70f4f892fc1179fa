"""The interface of the transports that move buckets, each with a sending and a receiving side.

A broadcast *attempt* sends every bucket once, in order. The sender alternates between two pack buffers, and a
transport moves the packed bytes to its peers. The sender has one object per kind of transport for all peers; a
receiver has one per connection. They outlive an attempt, so a communicator or mapped memory can be reused while
the connections are the same.

Everything but `abort` is called from one thread. `abort` may be called from any thread at any time, repeatedly.
Every wait calls `Peer.check` (or `Peer.take`, which does) at least every 50 ms, to detect a dead peer, a
cancellation or a deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.protocol import Peer


@dataclass(frozen=True, slots=True)
class Buffer:
    """One of the sender's pack buffers: its bytes (uint8), and the `export` with which another process maps them.

    `export` is the file name of host memory, or the CUDA IPC handle of device memory.
    """

    data: torch.Tensor
    export: bytes


class SendTransport(Protocol):
    """The sending side. Constructed as `XSendTransport(device)` with the pack buffers' device."""

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        """Prepare an attempt: exchange the transport's messages with the peers, which are in their `begin` now.

        `buffers` are valid until `finish` returns or `abort` is called; keep no reference afterwards. Raises
        TransportBroken; the caller then calls `abort`.
        """

    def send(self, bucket: int, buffer: int) -> None:
        """Start to send `buffers[buffer].data[:layout.bucket_sizes[bucket]]` to all peers as bucket `bucket`.

        The bytes were packed by work on the current stream. May return before they are sent. Raises
        TransportBroken.
        """

    def wait_free(self, buffer: int) -> None:
        """Wait until work on the current stream may write `buffer` again. Raises TransportBroken."""

    def finish(self) -> None:
        """Wait until all buckets were sent. Raises TransportBroken."""

    def abort(self) -> None:
        """End the attempt now, from any thread. Waiting methods soon raise TransportBroken.

        Idempotent and never raises. A later `begin` starts again.
        """

    def close(self) -> None:
        """Release everything. Idempotent. No attempt may run."""


class ReceiveTransport(Protocol):
    """The receiving side. Constructed as `XReceiveTransport(device)`; buckets arrive on `device`."""

    def begin(self, peer: Peer, layout: Layout) -> None:
        """Prepare an attempt: the counterpart of `SendTransport.begin`. Raises TransportBroken."""

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket in order: its index, and its bytes on the device.

        The tensor (uint8, `layout.bucket_sizes[index]` long) is filled for work on the current stream. It is valid
        until the next iteration: its memory is reused only after the work that was enqueued on the current stream
        by then. Raises TransportBroken.
        """

    def finish(self) -> None:
        """Release the sender's memory after every bucket was consumed. Raises TransportBroken."""

    def abort(self) -> None:
        """End the attempt, as `SendTransport.abort` does."""

    def close(self) -> None:
        """Release everything. Idempotent. No attempt may run."""
