"""The `tcp` transport: buckets are sent over separate sockets, once to each host with workers.

For each attempt the sender listens at the address where the worker reached it. The worker opens NUM_STREAMS
connections with a token from the control connection, and reads stripe i of every bucket from connection i; they
use TLS if the control connection does. The sender has a thread per connection, so a bucket is sent while the next
one is packed.

With several workers on a host, the first reads into two buffers in /dev/shm, which its siblings have mapped (as
with `shm`). The sender forwards its BucketReady to them, and reuses a buffer only after they have consumed it. A
sibling that cannot map the buffers gets its own connections, and so do all workers in the attempt after a failed
one.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import selectors
import socket
import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import cast

import msgspec
import torch

from agentloop.errors import WeightUpdateFailed
from agentloop_servers.net.tcp import keep_alive, listening_socket
from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.protocol import Peer, TransportBroken
from agentloop_servers.weight_transfer.transports.base import Buffer
from agentloop_servers.weight_transfer.transports.handshake import (
    AckedSendTransport,
    BucketReady,
    MapBuffers,
    post,
    take,
)
from agentloop_servers.weight_transfer.transports.shared_memory import ShmReceiveTransport, create_pair, unlink

NUM_STREAMS = 4  # a single connection is limited by its window on a long route, and by one core on a fast one
POLL_S = 0.05
ANSWER_TIMEOUT_S = 10.0  # for connecting to the sender's port
HANDSHAKE_TIMEOUT_S = 1.0  # for TLS and the token; the next connection waits during this time
TOKEN_BYTES = 16


class Connect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender listens on `port`. Connection i starts with the token and the byte i.

    With `has_siblings` the worker responds with buffers for its siblings, or none if memory is short. Port 0 means
    that the worker is a sibling, and MapBuffers follows.
    """

    port: int = 0
    token: bytes = b""
    has_siblings: bool = False


def stripes(size: int) -> list[slice]:
    """Return the parts of a bucket, one per connection."""
    bounds = [size * number // NUM_STREAMS for number in range(NUM_STREAMS + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


class _Stream:
    """One connection of the sender, and the thread that writes to it."""

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        connection.settimeout(None)
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "weights-tcp")

    def send(self, data: memoryview) -> Future[None]:
        return self._thread.submit(self._connection.sendall, data)

    def close(self) -> None:
        """Close the connection, which ends a blocked write. Idempotent."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS's own shutdown would wait
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._connection.close()


class TcpSendTransport:
    """The sending side; see `SendTransport`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peers: Sequence[Peer] = ()
        self._streams: list[list[_Stream]] = []  # one list per peer
        self._buffers: list[torch.Tensor] = []  # host memory
        self._packed: Sequence[Buffer] = ()
        self._sizes: tuple[int, ...] = ()  # sizes of the buckets
        self._sending: dict[int, list[Future[None]]] = {}  # buffer -> writes of the last bucket in it
        self._shared: list[tuple[Peer, AckedSendTransport]] = []  # the first worker of a host, and its siblings
        self._is_unfinished = False  # the last attempt did not finish

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        self.abort()
        self._peers, self._packed, self._sizes = peers, buffers, layout.bucket_sizes
        if self._device.type == "cpu":
            self._buffers = [buffer.data for buffer in buffers]
        elif not self._buffers or self._buffers[0].numel() != buffers[0].data.numel():
            self._buffers = [torch.empty_like(buffer.data, device="cpu", pin_memory=True) for buffer in buffers]
        by_host: dict[object, list[Peer]] = {}
        for peer in peers:
            by_host.setdefault(peer if self._is_unfinished else peer.host, []).append(peer)
        self._is_unfinished = True
        self._connect([(first, bool(siblings)) for first, *siblings in by_host.values()])
        refused: list[Peer] = []
        for first, *siblings in by_host.values():
            if siblings:
                for sibling in siblings:
                    post(sibling, Connect())
                request, mapped = take(first, MapBuffers), AckedSendTransport(self._device)
                refused += mapped.map(siblings, request)
                if request.exports:
                    self._shared.append((first, mapped))
        self._connect([(sibling, False) for sibling in refused])

    def _connect(self, workers: Sequence[tuple[Peer, bool]]) -> None:
        """Open the streams of workers, given with the flag `has_siblings`. Raises TransportBroken."""
        with contextlib.ExitStack() as listening:
            waiting = []
            for peer, has_siblings in workers:
                listener = listening.enter_context(listening_socket(peer.own_host))
                listener.settimeout(POLL_S)
                token = secrets.token_bytes(TOKEN_BYTES)
                post(peer, Connect(listener.getsockname()[1], token, has_siblings))
                waiting.append((peer, listener, token))
            for one in waiting:
                self._streams.append(_accepted(*one))

    def send(self, bucket: int, buffer: int) -> None:
        size = self._sizes[bucket]
        if self._device.type != "cpu":
            self._buffers[buffer][:size].copy_(self._packed[buffer].data[:size])
        data = memoryview(self._buffers[buffer].numpy())
        try:
            self._sending[buffer] = [
                stream.send(data[stripe])
                for streams in self._streams
                for stream, stripe in zip(streams, stripes(size), strict=True)
            ]
        except RuntimeError as error:  # the stream's thread has ended
            raise TransportBroken("the attempt was cancelled") from error

    def wait_free(self, buffer: int) -> None:
        sending = self._sending.pop(buffer, None)
        if sending is None:
            return
        while wait(sending, timeout=POLL_S).not_done:
            for peer in self._peers:
                peer.check()
        try:
            for one in sending:
                one.result()
        except OSError as error:
            raise TransportBroken(f"a connection to a worker failed: {error}") from error
        for first, siblings in self._shared:
            ready = take(first, BucketReady)
            siblings.announce(ready.bucket, ready.buffer)
        for _, siblings in self._shared:
            siblings.wait_free(buffer)

    def finish(self) -> None:
        for buffer in list(self._sending):
            self.wait_free(buffer)
        self.abort()
        self._is_unfinished = False

    def abort(self) -> None:
        streams, self._streams = self._streams, []
        for stream in (one for of_peer in streams for one in of_peer):
            stream.close()
        self._sending, self._shared = {}, []

    def close(self) -> None:
        self.abort()
        self._buffers, self._packed, self._peers = [], (), ()


def _accepted(peer: Peer, listener: socket.socket, token: bytes) -> list[_Stream]:
    """Return a worker's connections in order, and close connections of others. Raises TransportBroken."""
    found: dict[int, _Stream] = {}
    try:
        while len(found) < NUM_STREAMS:
            peer.check()
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(HANDSHAKE_TIMEOUT_S)
                with contextlib.suppress(OSError):
                    if peer.tls is not None:
                        connection = peer.tls.wrap_socket(connection, server_side=True)
                    said = b""
                    while len(said) <= TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES + 1 - len(said))):
                        said += more
                    number = said[-1] if said else NUM_STREAMS
                    is_known = len(said) > TOKEN_BYTES and hmac.compare_digest(said[:-1], token)
                    if is_known and number < NUM_STREAMS and number not in found:
                        found[number] = _Stream(connection)
                        continue
                connection.close()
    except BaseException:
        for stream in found.values():
            stream.close()
        raise
    return [found[number] for number in range(NUM_STREAMS)]


class TcpReceiveTransport:
    """The receiving side; see `ReceiveTransport`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attempt: tuple[Peer, Layout] | None = None
        self._connections: list[socket.socket] = []
        self._pair: tuple[Buffer, ...] = ()  # the buffers of a host's first worker
        self._mapped = ShmReceiveTransport(device)  # the same buffers in its siblings
        self._is_sibling = False

    def begin(self, peer: Peer, layout: Layout) -> None:
        self.abort()
        told = take(peer, Connect)
        self._is_sibling = told.port == 0
        if self._is_sibling:
            with contextlib.suppress(TransportBroken):
                return self._mapped.begin(peer, layout)
            told, self._is_sibling = take(peer, Connect), False
        try:
            for number in range(NUM_STREAMS):
                connection = socket.create_connection((peer.peer_host, told.port), ANSWER_TIMEOUT_S)
                keep_alive(connection)
                if peer.tls is not None:
                    connection = peer.tls.wrap_socket(connection)
                self._connections.append(connection)
                connection.sendall(told.token + bytes([number]))
                connection.setblocking(False)
        except OSError as error:
            raise TransportBroken(f"cannot connect to the sender's port {told.port}: {error}") from error
        if told.has_siblings:
            with contextlib.suppress(WeightUpdateFailed):
                self._pair = create_pair(layout.largest_bucket)
            post(peer, MapBuffers([buffer.export for buffer in self._pair], layout.largest_bucket))
        self._attempt = peer, layout

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        if self._is_sibling:
            with contextlib.closing(self._mapped) as mapped:
                return (yield from mapped.buckets())
        if self._attempt is None:
            raise TransportBroken("the attempt was cancelled")
        (peer, layout), pair = self._attempt, self._pair
        is_copied = self._device.type != "cpu"
        memories = [buffer.data for buffer in pair] or [
            torch.empty(layout.largest_bucket, dtype=torch.uint8, pin_memory=is_copied)
        ]
        held = torch.empty_like(memories[0], device=self._device) if is_copied else None
        for bucket, size in enumerate(layout.bucket_sizes):
            number = bucket % len(memories)
            data = memories[number][:size]
            _read(peer, self._connections, memoryview(data.numpy()))
            if pair:
                unlink(pair)  # the siblings mapped it before the first bucket arrived
                post(peer, BucketReady(bucket, number))
            yield bucket, data if held is None else held[:size].copy_(data)

    def finish(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._attempt = None
        unlink(self._pair)
        self._pair = ()
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def close(self) -> None:
        self.abort()


def _read(peer: Peer, connections: Sequence[socket.socket], data: memoryview) -> None:
    """Fill `data`, a bucket, with the stripes of all connections. Raises TransportBroken."""
    with selectors.DefaultSelector() as ready:
        try:
            for one, stripe in zip(connections, stripes(len(data)), strict=True):
                if stripe.start < stripe.stop:
                    ready.register(one, selectors.EVENT_READ, data[stripe])
            found = list(ready.get_map().values())  # TLS may have buffered bytes, for which there is no event
            while ready.get_map():
                peer.check()
                for key in found:
                    left = _read_some(cast(socket.socket, key.fileobj), key.data)
                    if left:
                        ready.modify(key.fileobj, selectors.EVENT_READ, left)
                    else:
                        ready.unregister(key.fileobj)
                found = [key for key, _ in ready.select(POLL_S)]
        except (OSError, ValueError) as error:  # closed by `abort`
            raise TransportBroken(f"a connection to the sender failed: {error}") from error


def _read_some(connection: socket.socket, left: memoryview) -> memoryview:
    """Read the available bytes. Returns the part that is still empty. Raises OSError, TransportBroken."""
    with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
        while left:
            num_bytes = connection.recv_into(left)
            if num_bytes == 0:
                raise TransportBroken("the sender closed a connection")
            left = left[num_bytes:]
    return left
