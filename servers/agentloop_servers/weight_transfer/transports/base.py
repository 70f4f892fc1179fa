"""The port to the transports that move buckets: a sending half and a receiving half each.

A broadcast *attempt* sends every bucket once, in order. The sender owns two pack buffers and fills them in turn; a
transport takes the packed bytes to its peers. On the sender one object serves all peers of one kind of transport
and lives as long as the `WeightSender`; on the receiver there is one a connection, which lives as long as that. So
a transport may keep what is dear to make (an NCCL communicator, mapped memory) from one attempt to the next, if the
connections are the same.

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
    """One of the sender's pack buffers: its bytes (uint8), and how another process can map them.

    `export` is the transport's own: the file's name for host memory, the CUDA IPC handle for device memory.
    """

    data: torch.Tensor
    export: bytes


class SendTransport(Protocol):
    """The sender's half. Constructed as `XSendTransport(device)`, `device` being where the pack buffers are."""

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        """Get ready for an attempt: exchange what the transport needs (the peers are in their `begin` now).

        `buffers` stay valid until `finish` returned or `abort` was called; keep no reference to them after that.
        Raises TransportBroken; the caller then calls `abort`.
        """

    def send(self, bucket: int, buffer: int) -> None:
        """Start sending `buffers[buffer].data[:layout.bucket_sizes[bucket]]` to all peers, as bucket `bucket`.

        The bytes were packed by work on the current stream. May return before they left. Raises TransportBroken.
        """

    def wait_free(self, buffer: int) -> None:
        """Return once `buffer` may be written again by work on the current stream. Raises TransportBroken."""

    def finish(self) -> None:
        """Return once all that was sent has left. Raises TransportBroken."""

    def abort(self) -> None:
        """Give the attempt up now, from any thread; what waits in another method raises TransportBroken soon.

        Idempotent, never raises, and a later `begin` starts afresh.
        """

    def close(self) -> None:
        """Free everything. Idempotent; no attempt is running."""


class ReceiveTransport(Protocol):
    """The receiver's half. Constructed as `XReceiveTransport(device)`, `device` being where buckets must arrive."""

    def begin(self, peer: Peer, layout: Layout) -> None:
        """Get ready for an attempt: the counterpart of `SendTransport.begin`. Raises TransportBroken."""

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket in order: its index, and its bytes on the device.

        The tensor (uint8, `layout.bucket_sizes[index]` long) is filled for work on the current stream, and valid
        until the next iteration: work on it that was put on the current stream by then is ordered before its memory
        is used again. Raises TransportBroken.
        """

    def finish(self) -> None:
        """Let go of the sender's memory: every bucket was consumed. Raises TransportBroken."""

    def abort(self) -> None:
        """Give the attempt up, as `SendTransport.abort` does."""

    def close(self) -> None:
        """Free everything. Idempotent; no attempt is running."""
