"""The receiving side of a push, in one engine worker process.

`Receiver` keeps the connections to its last senders, with their transports, for later updates. An `Incoming` is
one update. It belongs to the thread that iterates `receive_attempt`; only `abort` is called from other threads.
Every failure to receive the weights raises CheckpointUnreadable.

    incoming = receiver.open(source, can_hold=True, timeout_s=60)
    while True:
        try:
            for bucket, data in incoming.receive_attempt():
                ...
            incoming.finish()
            break
        except AttemptRestarted:
            continue
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from agentloop.engine.interface import PushSource
from agentloop.engine.weight_digest import sums_digest
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import check_tied, head_and_twins
from agentloop_servers.weight_transfer.layout import lay_out, view
from agentloop_servers.weight_transfer.protocol import (
    Abandon,
    Accept,
    Arrived,
    Connection,
    ConnectionLost,
    ControlConnections,
    Done,
    EndAttempt,
    Go,
    Hello,
    Peer,
    StartAttempt,
    TransportBroken,
)
from agentloop_servers.weight_transfer.transports.base import ReceiveTransport
from agentloop_servers.weight_transfer.transports.cuda_ipc import IpcReceiveTransport
from agentloop_servers.weight_transfer.transports.handshake import TransportKind, device_name, host_name
from agentloop_servers.weight_transfer.transports.nccl import NcclReceiveTransport
from agentloop_servers.weight_transfer.transports.shared_memory import ShmReceiveTransport
from agentloop_servers.weight_transfer.transports.tcp import TcpReceiveTransport
from agentloop_servers.weight_transfer.verify import bucket_checksum, checksum, to_host

ABANDON_GRACE_S = 5.0  # between a transport's error and the sender's message that the attempt is void
MAX_CONNECTIONS = 2  # kept between updates: the trainer's, and that of the last peer replica
RECEIVE_TRANSPORTS: Mapping[TransportKind, Callable[[torch.device], ReceiveTransport]] = {
    TransportKind.NCCL: NcclReceiveTransport,
    TransportKind.IPC: IpcReceiveTransport,
    TransportKind.SHM: ShmReceiveTransport,
    TransportKind.TCP: TcpReceiveTransport,
}


class AttemptRestarted(Exception):
    """The sender restarts at bucket 0, because another worker was lost. Call `receive_attempt` again."""


@dataclass(slots=True)
class _KnownSender:
    """A connection to a sender, with the transports that were used with it."""

    connection: Connection
    transports: dict[TransportKind, ReceiveTransport] = field(default_factory=dict)

    def close(self) -> None:
        self.connection.close()
        while self.transports:
            self.transports.popitem()[1].close()


class Receiver:
    """The receiving end of one engine worker, for one update at a time."""

    def __init__(
        self,
        device: torch.device,
        rank: int,
        *,
        transports: Mapping[TransportKind, Callable[[torch.device], ReceiveTransport]] = RECEIVE_TRANSPORTS,
    ) -> None:
        """`rank` is this worker's index in its replica. Buckets arrive on `device`."""
        self._device = device
        self._rank = rank
        self._make_transport = transports
        self._condition = threading.Condition()  # shared with the connections
        self._connections: ControlConnections | None = None
        self._senders: dict[str, _KnownSender] = {}  # by address, least recently used first

    def open(
        self,
        push: PushSource,
        *,
        can_hold: bool,
        timeout_s: float,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> Incoming:
        """Send Hello to the sender, and wait until it has accepted all workers. Raises CheckpointUnreadable.

        `can_hold` says that staging memory is available. `timeout_s` limits this call, and separately the
        transfer. `is_given_up` is called at least every 50 ms; True ends the wait.
        """
        if push.num_receivers < 1:
            raise CheckpointUnreadable(
                f"the push has num_receivers {push.num_receivers}, expected 1 or more", param="push"
            )
        num_senders = len(push.addresses)
        if num_senders != 1 and self._rank >= num_senders:
            raise CheckpointUnreadable(f"the push has no sender for worker {self._rank}", param="push")
        number = self._rank if num_senders > 1 else 0
        address, certificate = push.addresses[number], "".join(push.certificates[number : number + 1])
        deadline_at = time.monotonic() + timeout_s
        hello = Hello(
            token=push.token,
            rank=self._rank,
            host=host_name(),
            device=device_name(self._device),
            can_hold=can_hold,
            num_receivers=max(1, push.num_receivers // num_senders),
            num_optional=push.num_optional // num_senders,
            is_optional=push.is_optional,
        )
        try:
            sender = self._reach(address, certificate, hello, timeout_s)
            connection = sender.connection

            def check() -> None:
                refusal = connection.peek(Abandon)
                if refusal is not None or is_given_up():
                    raise ConnectionLost("the update was cancelled" if refusal is None else refusal.reason)

            accept = connection.take(Accept, deadline_at=deadline_at, check=check)
        except (ConnectionLost, TimeoutError) as error:
            self._forget(address)
            raise CheckpointUnreadable(f"the sender at {address}: {error}", param="push") from error
        kind = TransportKind(accept.transport)
        if kind not in sender.transports:
            sender.transports[kind] = self._make_transport[kind](self._device)
        return Incoming(push, connection, sender.transports[kind], accept, self._condition, timeout_s)

    def close(self) -> None:
        """Close all connections and release their transports. Idempotent. No update may be open."""
        for address in list(self._senders):
            self._forget(address)
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def _reach(self, address: str, certificate: str, hello: Hello, timeout_s: float) -> _KnownSender:
        """Send Hello on the kept connection, or on a new one. Raises ConnectionLost."""
        for other in [known for known, kept in self._senders.items() if kept.connection.death]:
            self._forget(other)
        sender = self._senders.pop(address, None)
        if sender is not None:
            with contextlib.suppress(ConnectionLost):
                sender.connection.send(hello)
                self._senders[address] = sender  # now the most recently used
                return sender
            sender.close()
        while len(self._senders) >= MAX_CONNECTIONS:
            self._forget(next(iter(self._senders)))
        if self._connections is None:
            self._connections = ControlConnections("weights-receiver", self._condition)
        sender = self._senders[address] = _KnownSender(self._connections.connect(address, timeout_s, certificate))
        sender.connection.send(hello)
        return sender

    def _forget(self, address: str) -> None:
        sender = self._senders.pop(address, None)
        if sender is not None:
            sender.close()


class Incoming:
    """One update that this worker receives, in one or several attempts."""

    def __init__(
        self,
        push: PushSource,
        connection: Connection,
        transport: ReceiveTransport,
        accept: Accept,
        condition: threading.Condition,
        timeout_s: float,
    ) -> None:
        self.layout = lay_out(push.tensors, accept.bucket_bytes)
        self.is_one_phase = accept.is_one_phase
        self.transport = accept.transport
        self.transfer_ms = 0.0  # the last attempt's time, from its first byte until its last byte was consumed
        self.digest = ""  # identifies the tensors and checksums, set after their comparison
        self.tensors = push.tensors
        self._connection = connection
        self._transport = transport
        self._condition = condition
        self._timeout_s = timeout_s
        self._deadline_at: float | None = None  # set by the first `receive_attempt`
        self._aborted = False
        self._sums: list[torch.Tensor] = []  # one per bucket of this attempt

    def receive_attempt(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Run one attempt from Go to Arrived. Yields every bucket in order: its index and its bytes (uint8) on the
        device.

        The bytes are valid until the next iteration, and for work that was enqueued on the current stream before
        it. Go means that memory is available, or in a blocking update that generation is frozen. Raises
        AttemptRestarted and CheckpointUnreadable.
        """
        if self._deadline_at is None:
            self._deadline_at = time.monotonic() + self._timeout_s
        with self._breaking():
            self._connection.send(Go())
            attempt_id = self._connection.take(StartAttempt, check=self._check).attempt_id
            self._transport.begin(Peer(self._connection, attempt_id, self._check), self.layout)
            started_at = time.monotonic()
            self._sums = []
            with contextlib.closing(self._transport.buckets()) as arriving:  # type: ignore[type-var]
                for bucket, data in arriving:
                    self._sums.append(bucket_checksum(data))
                    yield bucket, data
            self._transport.finish()
            self.transfer_ms = (time.monotonic() - started_at) * 1000
            self._connection.send(Arrived(attempt_id))

    def finish(self) -> None:
        """Compare the checksums of all buckets with the sender's, and send it the result.

        Raises AttemptRestarted, and CheckpointUnreadable if a bucket differs.
        """
        with self._breaking():
            sent = self._connection.take(EndAttempt, check=self._check).checksums
            problem = self._difference(to_host(self._sums), sent)
            if problem is None:
                self.digest = sums_digest(self.tensors, sent)
                self._connection.send(Done())
        if problem is not None:
            self.fail(problem)
            raise CheckpointUnreadable(problem, param="push")

    def fail(self, reason: str) -> None:
        """Leave this update and send the reason. The sender continues with the other workers. Idempotent."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send(Abandon(reason))
        self._transport.abort()
        self._connection.close()

    def abort(self) -> None:
        """Leave this update now, from any thread. Its waits raise CheckpointUnreadable. Idempotent."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()
        self.fail("the update was cancelled")

    def _difference(self, received: list[int], sent: list[int]) -> str | None:
        if not len(received) == len(sent) == len(self.layout.bucket_sizes):
            return (
                f"expected {len(self.layout.bucket_sizes)} buckets, got {len(received)} and {len(sent)} checksums"
            )
        differing = [bucket for bucket, pair in enumerate(zip(received, sent, strict=True)) if pair[0] != pair[1]]
        if not differing:
            return None
        first = self.layout.in_bucket(differing[0])
        return (
            f"{len(differing)} of {len(sent)} buckets changed in transit over {self.transport}, "
            f"the first has {first[0].name} and {len(first) - 1} more tensors"
        )

    def _check(self) -> None:
        """Raise TransportBroken if this attempt cannot continue. `_breaking` decides whether it restarts."""
        self._check_wanted()
        abandoned = self._connection.peek(Abandon)
        if abandoned is not None:
            raise TransportBroken(abandoned.reason)
        if self._connection.death:
            raise TransportBroken(f"the connection was lost: {self._connection.death}")
        if self._deadline_at is not None and time.monotonic() > self._deadline_at:
            raise TransportBroken(f"the transfer did not end within {self._timeout_s:g} s")

    def _check_wanted(self) -> None:
        if self._aborted:
            raise TransportBroken("the update was cancelled")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Convert a broken attempt into AttemptRestarted or CheckpointUnreadable, and abort the transport."""
        try:
            yield
        except (TransportBroken, ConnectionLost) as error:
            self._transport.abort()
            abandoned = self._last_word()
            if abandoned is not None and abandoned.attempt_id is not None and not self._aborted:
                self._drop_starts(abandoned.attempt_id)
                raise AttemptRestarted(abandoned.reason) from error
            reason = str(error) if abandoned is None else abandoned.reason
            self.fail(reason)
            raise CheckpointUnreadable(f"the weights did not arrive: {reason}", param="push") from error

    def _last_word(self) -> Abandon | None:
        """Wait for the sender's reason, which may arrive after a transport's error; None if none arrives."""
        deadline_at = min(time.monotonic() + ABANDON_GRACE_S, self._deadline_at or float("inf"))
        try:
            return self._connection.take(Abandon, deadline_at=deadline_at, check=self._check_wanted)
        except (ConnectionLost, TimeoutError, TransportBroken):
            return None

    def _drop_starts(self, attempt_id: int) -> None:
        """Drop StartAttempt messages up to `attempt_id`: an attempt may end before this worker has started it."""
        while (start := self._connection.peek(StartAttempt)) is not None and start.attempt_id <= attempt_id:
            self._connection.pop(StartAttempt)


def receive(incoming: Incoming, take: Callable[[str, torch.Tensor], None], *, is_tied: bool = False) -> None:
    """Receive all tensors and compare them with the sender's. Restarts if another receiver was lost.

    A tensor passed to `take` is valid for work that is enqueued on the current stream before `take` returns.
    `is_tied` means that the model ties its output head. Raises CheckpointUnreadable, also if a tied head differs
    from the embeddings.
    """
    tied = head_and_twins(incoming.tensors) if is_tied else []
    sums: dict[str, torch.Tensor] = {}
    while True:
        try:
            for bucket, data in incoming.receive_attempt():
                for place in incoming.layout.in_bucket(bucket):
                    tensor = view(data, place)
                    if place.name in tied:
                        sums[place.name] = checksum(tensor)
                    take(place.name, tensor)
            incoming.finish()
        except AttemptRestarted:
            continue
        check_tied(tied, dict(zip(sums, to_host(list(sums.values())), strict=True)))
        return
