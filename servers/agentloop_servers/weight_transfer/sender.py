"""The sending side of a push: a trainer, or an engine worker that sends its weights to another one.

`WeightSender.run` is one transfer. Connections to workers that received the weights stay open for the next
transfer, together with the resources of their transports. `ReceiverGroup` tracks the workers of one transfer from
Hello to Done. A worker leaves if it is refused, lost, failed or late; its `failure` has the reason. All waits end
with the transfer's deadline or its cancellation.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from agentloop.engine.interface import PushSource, TensorNames
from agentloop.errors import InvalidRequest, WeightUpdateFailed
from agentloop_servers.net.tls import certificate, serving, without_key
from agentloop_servers.weight_transfer.broadcast import Outgoing, PackBuffers, SentBuckets, send_buckets
from agentloop_servers.weight_transfer.layout import DEFAULT_BUCKET_BYTES, Layout, lay_out
from agentloop_servers.weight_transfer.protocol import (
    CONNECTION_POLL_S,
    Abandon,
    Accept,
    Arrived,
    BaseMessage,
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
from agentloop_servers.weight_transfer.transports.base import SendTransport
from agentloop_servers.weight_transfer.transports.cuda_ipc import IpcSendTransport
from agentloop_servers.weight_transfer.transports.handshake import (
    TransportKind,
    Unreachable,
    choose,
    device_name,
    host_name,
)
from agentloop_servers.weight_transfer.transports.nccl import NcclSendTransport
from agentloop_servers.weight_transfer.transports.shared_memory import ShmSendTransport
from agentloop_servers.weight_transfer.transports.tcp import TcpSendTransport

MAX_ATTEMPTS = 3
CLOSE_TIMEOUT_S = 30.0
RECEIVER_GRACE_S = 10.0  # for workers that are missing, counted from the last arrival
OPTIONAL_GRACE_S = 1.0  # the same for optional workers
STALL_S = 15.0  # an attempt without progress for this long has failed
# In units of `stall_s`: the wait for a worker that allocates staging memory, because pinning gigabytes is slow
MEMORY_STALLS = 2
START_STALLS = 4  # in units of `stall_s`: the wait for the first bucket, because NCCL opens its connections
SEND_TRANSPORTS: Mapping[TransportKind, Callable[[torch.device], SendTransport]] = {
    TransportKind.NCCL: NcclSendTransport,
    TransportKind.IPC: IpcSendTransport,
    TransportKind.SHM: ShmSendTransport,
    TransportKind.TCP: TcpSendTransport,
}


@dataclass(frozen=True, slots=True)
class SendReport:
    """The result of a transfer. `failures` has a line for each worker that did not receive the weights."""

    num_bytes: int  # to each worker
    transports: tuple[str, ...]
    transfer_ms: float  # the successful attempt's time, from its first byte to its last
    num_attempts: int
    num_receivers: int  # workers that have verified the weights
    failures: tuple[str, ...] = ()


@dataclass(slots=True)
class Offer:
    """The weights of one `run`, and the requests of other threads during it."""

    token: str
    items: tuple[Outgoing, ...]
    layout: Layout
    cancelled: str | None = None  # the reason of the cancellation
    num_expected: int | None = None  # the workers that can still arrive, if fewer than their Hello says


class WeightSender:
    """Sends the weights of one process, one offer at a time. Its methods block: call `run` in a thread."""

    def __init__(
        self,
        *,
        listen_host: str = "127.0.0.1",
        transport: str = TransportKind.AUTO,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | None = None,
        transports: Mapping[TransportKind, Callable[[torch.device], SendTransport]] = SEND_TRANSPORTS,
        stall_s: float = STALL_S,
        is_encrypted: bool = False,
    ) -> None:
        """`listen_host` is the address at which workers reach this process, so it must not be a wildcard.

        Tensors are packed on `device`, by default the current CUDA device or the CPU. An attempt without progress
        for `stall_s` fails. `is_encrypted` applies to control connections and the `tcp` transport, with this
        sender's own certificate, which its offers contain.
        """
        if listen_host in ("", "0.0.0.0", "::"):
            raise InvalidRequest(
                f"listen_host is {listen_host!r}: it must be an address that workers can connect to",
                param="listen_host",
            )
        self._listen_host = listen_host
        self._asked = TransportKind(transport)
        self._bucket_bytes = bucket_bytes
        self._device = device if device is not None else _default_device()
        self._make_transport = transports
        self._stall_s = stall_s
        self._certificate = certificate() if is_encrypted else ""  # includes its private key
        self._transports: dict[TransportKind, SendTransport] = {}
        self._buffers = PackBuffers(self._device)
        self._condition = threading.Condition()  # guards the fields below; shared with the connections
        self.connections: ControlConnections | None = None
        self._address = ""
        self._offer: Offer | None = None
        self._run_lock = threading.Lock()
        self._num_attempts = 0  # over all runs; gives the attempt ids

    def offer(
        self,
        items: Sequence[Outgoing],
        names: TensorNames = TensorNames.CHECKPOINT,
        token: str | None = None,
    ) -> PushSource:
        """Make an offer for one `run`, in place of an earlier one. Raises CheckpointUnreadable.

        The first call starts to listen. `token` is a fresh secret that several senders share; None makes one.
        """
        tensors = tuple(item.info for item in items)
        offer = Offer(token or secrets.token_urlsafe(32), tuple(items), lay_out(tensors, self._bucket_bytes))
        if self.connections is None:
            self.connections = ControlConnections("weights-sender", self._condition, self._knows)
            tls = serving(self._certificate) if self._certificate else None
            self._address = self.connections.listen(self._listen_host, tls)
        with self._condition:
            self._offer = offer
        certificates = (without_key(self._certificate),) if self._certificate else ()
        return PushSource((self._address,), offer.token, tensors, names, certificates)

    def run(
        self,
        timeout_s: float,
        before_attempt: Callable[[], None] | None = None,
        *,
        late_grace_s: float = RECEIVER_GRACE_S,
    ) -> SendReport:
        """Send the open offer to all its workers, and close it. `before_attempt` runs before each attempt.

        A worker that is dead, hung or late is dropped `late_grace_s` after the last arrival. Returns if at least
        one worker received the weights, otherwise raises WeightUpdateFailed.
        """
        with self._run_lock:
            deadline_at = time.monotonic() + timeout_s
            offer, connections = self._opened()
            group = ReceiverGroup(offer, connections, deadline_at, late_grace_s, self._stall_s)
            reason = "the transfer has started without this worker"
            try:
                group.gather()
                group.accept(self._asked, device_name(self._device), self._bucket_bytes)
                return self._send(offer, group, before_attempt)
            except Exception as error:
                reason = str(error) if isinstance(error, WeightUpdateFailed) else f"the transfer failed: {error!r}"
                group.dismiss(group.left, reason)
                if isinstance(error, WeightUpdateFailed):
                    raise
                raise WeightUpdateFailed(reason) from error
            finally:
                self._end_offer(reason)

    def expect(self, num_receivers: int) -> None:
        """Lower the number of workers to wait for, because others have failed. Callable from any thread."""
        with self._condition:
            if self._offer is not None:
                self._offer.num_expected = num_receivers
            self._condition.notify_all()

    def cancel(self, reason: str) -> None:
        """Cancel the offer from any thread: its running or future `run` raises WeightUpdateFailed."""
        with self._condition:
            if self._offer is not None:
                self._offer.cancelled = self._offer.cancelled or reason
            transports = list(self._transports.values())
            self._condition.notify_all()
        for transport in transports:
            transport.abort()

    def release(self) -> None:
        """Release the pack buffers between updates. The next update allocates new ones."""
        with self._run_lock:
            self._buffers.free()

    def close(self) -> None:
        """Close the offer, the connections and the transports, and stop listening. Idempotent.

        Raises WeightUpdateFailed if a `run` in another thread does not end because a tensor's load hangs.
        """
        self.cancel("the sender was closed")
        if not self._run_lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise WeightUpdateFailed(
                f"the transfer did not end within {CLOSE_TIMEOUT_S:g} s, because the load of a tensor hangs"
            )
        try:
            connections, self.connections = self.connections, None
            if connections is not None:
                connections.close()
            while self._transports:
                self._transports.popitem()[1].close()
            self._buffers.free()
        finally:
            self._run_lock.release()

    def _send(self, offer: Offer, group: ReceiverGroup, before_attempt: Callable[[], None] | None) -> SendReport:
        """Run attempts until one reaches every remaining worker. A lost worker ends the attempt for all."""
        broken = ""
        for num_attempts in range(1, MAX_ATTEMPTS + 1):
            group.await_go(is_again=num_attempts > 1)
            transports = tuple(sorted({str(worker.transport) for worker in group.left}))
            self._num_attempts += 1
            try:
                sent = self._attempt(self._num_attempts, offer, group, before_attempt)
            except TransportBroken as error:
                broken = str(error)
                continue
            group.confirm(EndAttempt(self._num_attempts, sent.checksums))
            num_receivers = len(group.left)
            return SendReport(
                offer.layout.num_bytes, transports, sent.transfer_ms, num_attempts, num_receivers, group.failures
            )
        group.check("the weights were being sent")
        raise WeightUpdateFailed(f"all {MAX_ATTEMPTS} attempts failed, the last one with: {broken}")

    def _attempt(
        self, attempt_id: int, offer: Offer, group: ReceiverGroup, before_attempt: Callable[[], None] | None
    ) -> SentBuckets:
        """Send every bucket to every remaining worker. Raises TransportBroken if another attempt may succeed."""
        connections = frozenset(worker.connection.connection_id for worker in group.left)
        buffers = self._buffers.get(offer.layout.largest_bucket, connections)
        if before_attempt is not None:
            before_attempt()
        by_kind = group.begin_attempt(attempt_id)
        peers = {self._transport(kind): of_kind for kind, of_kind in by_kind.items()}

        def give_up(error: Exception) -> None:
            for transport in peers:
                transport.abort()
            group.tell_all(Abandon(str(error), attempt_id))

        sent = send_buckets(offer.items, offer.layout, buffers, peers, group.moved, give_up)
        try:
            group.await_arrivals(attempt_id)
        except TransportBroken as error:
            give_up(error)
            raise
        return sent

    def _transport(self, kind: TransportKind) -> SendTransport:
        with self._condition:
            if kind not in self._transports:
                self._transports[kind] = self._make_transport[kind](self._device)
            return self._transports[kind]

    def _opened(self) -> tuple[Offer, ControlConnections]:
        with self._condition:
            if self._offer is None or self.connections is None:
                raise WeightUpdateFailed("no offer is open: call `offer` before each `run`")
            return self._offer, self.connections

    def _end_offer(self, reason: str) -> None:
        """Close the offer, and refuse workers that arrived too late."""
        with self._condition:
            self._offer = None
            if self.connections is None:
                return
            self.connections.forget_dead()
            late = [connection for connection in self.connections.known if connection.pop(Hello) is not None]
        for connection in late:
            with contextlib.suppress(ConnectionLost):
                connection.send(Abandon(reason))
            connection.close()

    def _knows(self, hello: Hello) -> bool:
        with self._condition:
            token = "" if self._offer is None else self._offer.token
        return token != "" and hmac.compare_digest(hello.token.encode(), token.encode())


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(slots=True)
class ReceivingWorker:
    """One engine worker of a transfer."""

    connection: Connection
    hello: Hello
    transport: TransportKind = TransportKind.AUTO
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"worker {self.hello.rank} of {self.connection.peer_address}"

    @property
    def loss(self) -> str | None:
        """The reason why its connection broke or it has abandoned the update; None otherwise."""
        abandoned = self.connection.peek(Abandon)
        if abandoned is not None:
            return f"{self.name}: {abandoned.reason}"
        return f"{self.name} was lost: {self.connection.death}" if self.connection.death else None

    def tell(self, message: BaseMessage) -> None:
        """Send a message. No effect if the worker is gone: the next wait for it detects that."""
        with contextlib.suppress(ConnectionLost):
            self.connection.send(message)

    def leave(self, reason: str) -> None:
        """Remove the worker from this update and close its connection. The next update opens another one."""
        self.failure = reason
        self.tell(Abandon(reason))
        self.connection.close()


class GraceTimer:
    """A deadline of `seconds` after the last arrival. It starts at the first `restart`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = float("inf")

    def restart(self, num_times: int = 1) -> None:
        """Restart with `num_times` the seconds."""
        self._ends_at = time.monotonic() + num_times * self._seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._ends_at


class ReceiverGroup:
    """The workers of one transfer, used from the thread of its `run`."""

    def __init__(
        self,
        offer: Offer,
        connections: ControlConnections,
        deadline_at: float,
        late_grace_s: float,
        stall_s: float,
    ) -> None:
        self._offer = offer
        self._connections = connections
        self._condition = connections.condition
        self._deadline_at = deadline_at
        self._late_grace_s = late_grace_s
        self._stall_s = stall_s
        self._stall = GraceTimer(stall_s)  # for the current attempt
        self._is_one_phase = False
        self._workers: list[ReceivingWorker] = []
        self._awaited: list[ReceivingWorker] = []  # workers whose next message is pending
        self._absent: tuple[str, ...] = ()  # a message about workers that never connected

    @property
    def left(self) -> list[ReceivingWorker]:
        """The workers that have not failed."""
        return [worker for worker in self._workers if worker.failure is None]

    @property
    def failures(self) -> tuple[str, ...]:
        return *self._absent, *(worker.failure for worker in self._workers if worker.failure is not None)

    def check(self, state: str) -> None:
        """Raise WeightUpdateFailed if the transfer was cancelled or its deadline has passed."""
        if self._offer.cancelled is not None:
            raise WeightUpdateFailed(f"the transfer was cancelled: {self._offer.cancelled}")
        if time.monotonic() > self._deadline_at:
            raise WeightUpdateFailed(f"the transfer reached its timeout: {state}; raise timeout_s")

    def gather(self) -> None:
        """Wait for the Hello of all workers. Their number is in each Hello; `expect` may lower it.

        Missing workers have the grace after the last arrival, optional ones `OPTIONAL_GRACE_S`.
        """
        grace, optional_grace = GraceTimer(self._late_grace_s), GraceTimer(OPTIONAL_GRACE_S)
        with self._condition:
            while True:
                for connection in self._connections.known:
                    hello = connection.pop(Hello)
                    if hello is not None:
                        connection.forget()
                        self._workers.append(ReceivingWorker(connection, hello))
                        grace.restart()
                        optional_grace.restart()
                hellos = [worker.hello for worker in self._workers]
                told = max((hello.num_receivers for hello in hellos), default=1)
                most = self._offer.num_expected
                wanted = told if most is None else min(told, max(most, 1))
                num_optional = sum(hello.is_optional for hello in hellos)
                num_there = len(hellos) - num_optional
                is_whole = num_optional >= max((hello.num_optional for hello in hellos), default=0)
                if num_there >= wanted and (is_whole or optional_grace.is_over):
                    return
                if grace.is_over:
                    late = f"{wanted - num_there} of {wanted} workers"
                    self._absent = (f"{late} did not connect within {self._late_grace_s:g} s of the others",)
                    return
                self.check(f"{num_there} of {wanted} workers connected")
                self._condition.wait(CONNECTION_POLL_S)

    def accept(self, asked: TransportKind, sender_device: str, bucket_bytes: int) -> None:
        """Choose each worker's transport and send it. Workers that no transport reaches leave."""
        host = host_name()
        for worker in self._workers:
            try:
                worker.transport = choose(asked, sender_device, host, worker.hello)
            except Unreachable as error:
                worker.leave(str(error))
        self._is_one_phase = not all(worker.hello.can_hold for worker in self.left)
        for worker in self.left:
            worker.tell(Accept(worker.transport, self._is_one_phase, bucket_bytes))

    def await_go(self, *, is_again: bool) -> None:
        """Wait for the Go of all remaining workers. Raises WeightUpdateFailed if none remains.

        Before the first attempt a worker allocates its memory, or in a blocking update reaches its commit. Before
        another attempt Go is sent at once, so hung workers are detected here.
        """
        grace_s = self._late_grace_s if is_again or self._is_one_phase else MEMORY_STALLS * self._stall_s
        self._await_each(Go, grace_s, has_begun=is_again)
        for worker in self.left:
            if (loss := worker.loss) is not None:
                worker.leave(loss)
        self._require_some()

    def begin_attempt(self, attempt_id: int) -> dict[TransportKind, tuple[Peer, ...]]:
        """Start an attempt with all remaining workers. Returns them by transport, in connection order.

        A transport keeps its group if this order is unchanged.
        """
        self._stall.restart(START_STALLS)
        self.tell_all(StartAttempt(attempt_id))
        peers: dict[TransportKind, tuple[Peer, ...]] = {}
        for worker in sorted(self.left, key=lambda worker: worker.connection.connection_id):
            peer = Peer(worker.connection, attempt_id, self._check_attempt, worker.hello.host)
            peers[worker.transport] = (*peers.get(worker.transport, ()), peer)
        return peers

    def moved(self) -> None:
        """Restart the stall timer. Raises TransportBroken if the attempt cannot reach all remaining workers."""
        self._stall.restart()
        self._check_attempt()

    def await_arrivals(self, attempt_id: int) -> None:
        """Wait until all remaining workers have consumed every bucket. Raises TransportBroken.

        A transport may send to its receivers one after another, so a worker that dies can delay the others.
        """
        for worker in self.left:
            try:
                while worker.connection.take(Arrived, check=self._check_attempt).attempt_id != attempt_id:
                    pass
                self.moved()
            except ConnectionLost as error:
                raise TransportBroken(f"{worker.name} was lost: {error}") from error

    def confirm(self, end: EndAttempt) -> None:
        """Send the checksums, and wait for each worker's Done. Raises WeightUpdateFailed if no worker sends it."""
        self.tell_all(end)
        try:
            self._await_each(Done, self._late_grace_s)
        except WeightUpdateFailed as error:  # workers that have sent Done have the weights
            self.dismiss(self._awaited, str(error))
        self._require_some()

    def tell_all(self, message: BaseMessage) -> None:
        """Send a message to all remaining workers."""
        for worker in self.left:
            worker.tell(message)

    def dismiss(self, workers: Sequence[ReceivingWorker], reason: str) -> None:
        """Remove workers from this update."""
        for worker in workers:
            worker.leave(reason)

    def _check_attempt(self) -> None:
        """Raise TransportBroken if the attempt cannot reach all remaining workers."""
        try:
            self.check("the weights were being sent")
        except WeightUpdateFailed as error:
            raise TransportBroken(str(error)) from error
        for worker in self.left:
            loss = worker.loss
            if loss is not None:
                raise TransportBroken(loss)
        if self._stall.is_over:
            raise TransportBroken(
                f"the transfer has stalled for {self._stall_s:g} s, because a worker does not read"
            )

    def _require_some(self) -> None:
        if not self.left:
            raise WeightUpdateFailed(f"no worker can receive the weights: {self.failures[0]}")

    def _await_each(self, kind: type[Go | Done], grace_s: float, *, has_begun: bool = False) -> None:
        """Wait for a message from every remaining worker. Lost workers, and those later than the grace, leave.

        The grace starts with the last message, or now if it `has_begun`. Raises WeightUpdateFailed.
        """
        grace = GraceTimer(grace_s)
        if has_begun:
            grace.restart()

        def reason_to_leave(worker: ReceivingWorker) -> str | None:
            if worker.loss is None and grace.is_over:
                return f"{worker.name} did not send {kind.__name__} within {grace_s:g} s of the others"
            return worker.loss

        self._awaited = self.left
        while self._awaited:
            with self._condition:  # Messages first: a worker that sent its message and then disconnected counts.
                num_before = len(self._awaited)
                self._awaited = [worker for worker in self._awaited if worker.connection.pop(kind) is None]
                if len(self._awaited) < num_before:
                    grace.restart()
                leaving = [(worker, reason) for worker in self._awaited if (reason := reason_to_leave(worker))]
                if self._awaited and not leaving:
                    self.check(f"{self._awaited[0].name} has not sent {kind.__name__}")
                    self._condition.wait(CONNECTION_POLL_S)
            for worker, reason in leaving:
                worker.leave(reason)
            self._awaited = [worker for worker in self._awaited if worker.failure is None]
