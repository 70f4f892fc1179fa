"""The port to the transports that move buckets, each with a sending half and a receiving half.

A broadcast *attempt* sends every bucket once, in order. The sender owns two pack buffers and fills them in turn; a
transport takes the packed bytes to its peers. The sender has one object for all peers of one kind of transport,
which lives as long as the `WeightSender`; a receiver has one for each connection, which lives as long as that. So a
transport may keep an NCCL communicator or mapped memory for the next attempt, if the connections are the same.

Threads: everything but `abort` is called from one thread (that of `WeightSender.run`, or of
`Incoming.receive_attempt`). `abort` comes from any thread, at any moment, more than once. A transport never waits
without calling `Peer.check` (or `Peer.take`, which does) at least every 50 ms: so it learns that a peer died, that
the attempt was given up, or that time is over.
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
    """One of the sender's pack buffers: its bytes (uint8), and the `export` by which another process maps them.

    `export` is the file's name for host memory, the CUDA IPC handle for device memory.
    """

    data: torch.Tensor
    export: bytes


class SendTransport(Protocol):
    """The sending half of a transport. Constructed as `XSendTransport(device)`, with the pack buffers' device."""

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        """Prepare an attempt: exchange the transport's messages with the peers, which are in their `begin` now.

        `buffers` stay valid until `finish` returned or `abort` was called; keep no reference to them after that.
        Raises TransportBroken; the caller then calls `abort`.
        """

    def send(self, bucket: int, buffer: int) -> None:
        """Start sending `buffers[buffer].data[:layout.bucket_sizes[bucket]]` to all peers, as bucket `bucket`.

        The bytes were packed by work on the current stream. May return before they left. Raises TransportBroken.
        """

    def wait_free(self, buffer: int) -> None:
        """Wait until work on the current stream may write `buffer` again. Raises TransportBroken."""

    def finish(self) -> None:
        """Wait until all buckets have left. Raises TransportBroken."""

    def abort(self) -> None:
        """End the attempt now, from any thread; other methods that wait raise TransportBroken soon.

        Idempotent, never raises, and a later `begin` starts afresh.
        """

    def close(self) -> None:
        """Free everything. Idempotent; no attempt is running."""


class ReceiveTransport(Protocol):
    """The receiving half of a transport. Constructed as `XReceiveTransport(device)`: buckets arrive on `device`."""

    def begin(self, peer: Peer, layout: Layout) -> None:
        """Prepare an attempt: the counterpart of `SendTransport.begin`. Raises TransportBroken."""

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket in order: its index, and its bytes on the device.

        The tensor (uint8, `layout.bucket_sizes[index]` long) is filled for work on the current stream, and valid
        until the next iteration: its memory is used again only after the work that was put on the current stream by
        then. Raises TransportBroken.
        """

    def finish(self) -> None:
        """Release the sender's memory, after every bucket was consumed. Raises TransportBroken."""

    def abort(self) -> None:
        """End the attempt, as `SendTransport.abort` does."""

    def close(self) -> None:
        """Free everything. Idempotent; no attempt is running."""
