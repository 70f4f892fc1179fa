"""The side of a push that holds the weights: a trainer, or an engine worker that helps another one.

`WeightSender` listens from its first offer on. Workers say hello with the offer's token; `run` waits for all of
them, chooses a transport for each, and makes one broadcast attempt after the other until one reaches every worker
that is left. A worker lost during an attempt ends it for all, and the others get a fresh one. Connections of
workers that came through stay open for the next update, and with them what their transports keep.

`ReceiverGroup` has the workers of one transfer, from their hello to their last word. A worker leaves by being
refused, lost, failed or late; its `failure` says why, and nothing is sent to it any more. All waits end with the
transfer's deadline or by its cancellation, they wait for all workers at once, and those that are there wait for one
that is not for a grace of seconds only. An attempt in which nothing moves is void, whoever holds it up: each begins
with a roll call, and who does not answer has left.
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

from agentloop.engine import PushSource, TensorNames
from agentloop.errors import InvalidRequest, WeightUpdateFailed
from agentloop_servers.weight_transfer.broadcast import Outgoing, PackBuffers, Route, SentBuckets, send_buckets
from agentloop_servers.weight_transfer.layout import DEFAULT_BUCKET_BYTES, Layout, lay_out
from agentloop_servers.weight_transfer.protocol import (
    CONNECTION_POLL_S,
    Abandon,
    AbandonAttempt,
    Accept,
    Arrived,
    AttemptPeer,
    BaseMessage,
    Connection,
    ConnectionLost,
    Done,
    EndAttempt,
    Fail,
    Go,
    Hello,
    Listener,
    Ready,
    Refuse,
    StartAttempt,
)
from agentloop_servers.weight_transfer.transports.base import SendTransport, TransportBroken
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

MAX_ATTEMPTS = 3
CLOSE_TIMEOUT_S = 30.0
RECEIVER_GRACE_S = 10.0
"""How long workers that are there wait for one that is not, from the latest arrival on."""
OPTIONAL_GRACE_S = 1.0  # the same for those that a transfer can do without
STALL_S = 15.0  # in which no bucket moves: the attempt is void
MEMORY_STALLS = 2  # so many times that long workers wait for one that takes its memory: gigabytes are pinned
START_STALLS = 4  # and for the first bucket: NCCL sets its connections up
SEND_TRANSPORTS: Mapping[TransportKind, Callable[[torch.device], SendTransport]] = {
    TransportKind.NCCL: NcclSendTransport,
    TransportKind.IPC: IpcSendTransport,
    TransportKind.SHM: ShmSendTransport,
}


@dataclass(frozen=True, slots=True)
class SendReport:
    """Figures of a transfer. `failures` has a line for each worker that did not come through."""

    num_bytes: int  # to each worker
    transports: tuple[str, ...]
    transfer_ms: float  # of the attempt that worked, from its first byte to its last
    num_attempts: int
    num_receivers: int  # that have compared what arrived with what was sent
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Offer:
    token: str
    items: tuple[Outgoing, ...]
    layout: Layout


class WeightSender:
    """One process's offers of weights, one at a time. Blocking; run it in a thread."""

    def __init__(
        self,
        *,
        listen_host: str = "127.0.0.1",
        transport: str = TransportKind.AUTO,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | None = None,
        transports: Mapping[TransportKind, Callable[[torch.device], SendTransport]] = SEND_TRANSPORTS,
        stall_s: float = STALL_S,
    ) -> None:
        """`listen_host` is the address that workers reach this process at, so no wildcard.

        Tensors are packed on `device`: the current CUDA device by default, or the CPU if there is none. An attempt
        in which no bucket moves for `stall_s` is void.
        """
        if listen_host in ("", "0.0.0.0", "::"):
            raise InvalidRequest("listen_host must be an address that workers can connect to", param="listen_host")
        self._listen_host = listen_host
        self._asked = TransportKind(transport)
        self._bucket_bytes = bucket_bytes
        self._device = device if device is not None else _default_device()
        self._make_transport = transports
        self._stall_s = stall_s
        self._transports: dict[TransportKind, SendTransport] = {}
        self._buffers = PackBuffers(self._device)
        self._condition = threading.Condition()  # guards what follows, and is shared with the connections
        self._listener: Listener | None = None
        self._connections: list[Connection] = []
        self._offer: _Offer | None = None
        self._cancelled: str | None = None
        self._expected: int | None = None  # workers that may still come, where less than they were told
        self._run_lock = threading.Lock()
        self._num_attempts = 0  # ever; numbers the attempts

    def offer(
        self,
        items: Sequence[Outgoing],
        names: TensorNames = TensorNames.CHECKPOINT,
        token: str | None = None,
    ) -> PushSource:
        """Open an offer for one `run`; an earlier one that was not run is void. Raises CheckpointUnreadable.

        Listens from the first call on. `token`: a fresh secret that several senders share, instead of a new one.
        """
        tensors = tuple(item.info for item in items)
        offer = _Offer(token or secrets.token_urlsafe(32), tuple(items), lay_out(tensors, self._bucket_bytes))
        with self._condition:
            if self._listener is None:
                self._listener = Listener(self._listen_host, self._condition, self._knows, self._add_connection)
            self._offer, self._cancelled, self._expected = offer, None, None
            return PushSource((self._listener.address,), offer.token, tensors, names)

    def run(
        self,
        timeout_s: float,
        before_attempt: Callable[[], None] | None = None,
        *,
        late_grace_s: float = RECEIVER_GRACE_S,
    ) -> SendReport:
        """Serve the open offer to all workers that were told of it. `before_attempt` runs before each attempt.

        A worker that is dead, hung or late is left out `late_grace_s` after the others are there. Returns if at
        least one worker came through. Raises WeightUpdateFailed. Either way the offer is used up.
        """
        with self._run_lock:
            deadline_at = time.monotonic() + timeout_s
            group = ReceiverGroup(
                self._condition, deadline_at, lambda: self._cancelled, late_grace_s, self._stall_s
            )
            reason = "the transfer has begun without this worker"
            try:
                offer = self._open_offer()
                group.gather(lambda: self._connections, lambda: self._expected)
                group.welcome(self._asked, device_name(self._device), self._bucket_bytes)
                return self._send(offer, group, before_attempt)
            except Exception as error:
                reason = str(error) if isinstance(error, WeightUpdateFailed) else f"the transfer failed: {error!r}"
                group.fail_rest(reason)
                if isinstance(error, WeightUpdateFailed):
                    raise
                raise WeightUpdateFailed(reason) from error
            finally:
                self._end_offer(reason)

    def expect(self, num_receivers: int) -> None:
        """Wait for no more than so many workers, from any thread: the others are known to have failed."""
        with self._condition:
            self._expected = num_receivers
            self._condition.notify_all()

    def cancel(self, reason: str) -> None:
        """End the offer, from any thread: a `run` in progress raises WeightUpdateFailed, or the next one does."""
        with self._condition:
            self._cancelled = self._cancelled or reason
            transports = list(self._transports.values())
            self._condition.notify_all()
        for transport in transports:
            transport.abort()

    def release(self) -> None:
        """Give the pack buffers' memory back between updates; the next one takes it again."""
        with self._run_lock:
            self._buffers.free()

    def close(self) -> None:
        """End the offer, the connections and the transports, and stop listening. Idempotent.

        Raises WeightUpdateFailed if a `run` in another thread does not end, because a tensor's load hangs.
        """
        self.cancel("the sender was closed")
        if not self._run_lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise WeightUpdateFailed("the transfer does not end: a tensor's load hangs")
        try:
            with self._condition:
                listener, self._listener = self._listener, None
            if listener is not None:
                listener.close()
            with self._condition:
                connections, self._connections = self._connections, []
            for connection in connections:
                connection.close()
            while self._transports:
                self._transports.popitem()[1].close()
            self._buffers.free()
        finally:
            self._run_lock.release()

    def _send(self, offer: _Offer, group: ReceiverGroup, before_attempt: Callable[[], None] | None) -> SendReport:
        """Make attempts until one reaches every worker that is left."""
        broken = ""
        for num_attempts in range(1, MAX_ATTEMPTS + 1):
            group.check("the weights were on their way")
            group.drop_lost()
            group.call_roll(is_again=num_attempts > 1)
            group.require_some()
            transports = tuple(sorted({str(worker.transport) for worker in group.left}))
            try:
                end, sent = self._attempt(offer, group, before_attempt)
            except TransportBroken as error:
                broken = str(error)
                group.drop_lost(LOSS_SETTLE_S)
                continue
            group.finish(end)
            group.require_some()
            num_receivers = len(group.left)
            return SendReport(
                offer.layout.num_bytes, transports, sent.transfer_ms, num_attempts, num_receivers, group.failures
            )
        group.check("the weights were on their way")
        raise WeightUpdateFailed(f"{MAX_ATTEMPTS} passes broke off, the last one: {broken}")

    def _attempt(
        self, offer: _Offer, group: ReceiverGroup, before_attempt: Callable[[], None] | None
    ) -> tuple[EndAttempt, SentBuckets]:
        """Make one attempt. Raises TransportBroken if another one may help."""
        connections = frozenset(worker.connection.connection_id for worker in group.left)
        buffers = self._buffers.get(offer.layout.largest_bucket, connections)
        if before_attempt is not None:
            before_attempt()
        self._num_attempts += 1
        attempt_id = self._num_attempts
        group.begin_attempt()
        group.tell_all(StartAttempt(attempt_id))
        routes = [Route(self._transport(kind), peers) for kind, peers in group.peers(attempt_id).items()]

        def give_up(error: Exception) -> None:
            for route in routes:
                route.transport.abort()
            group.tell_all(AbandonAttempt(str(error), attempt_id))

        sent = send_buckets(offer.items, offer.layout, buffers, routes, group.moved, give_up)
        try:
            group.await_arrivals(attempt_id)
        except TransportBroken as error:
            give_up(error)
            raise
        return EndAttempt(attempt_id, sent.checksums), sent

    def _transport(self, kind: TransportKind) -> SendTransport:
        with self._condition:
            if kind not in self._transports:
                self._transports[kind] = self._make_transport[kind](self._device)
            return self._transports[kind]

    def _open_offer(self) -> _Offer:
        with self._condition:
            if self._offer is None:
                raise WeightUpdateFailed("there is no open offer: call `offer` before each `run`")
            return self._offer

    def _end_offer(self, reason: str) -> None:
        """Withdraw the offer; workers that came too late are told."""
        with self._condition:
            self._offer = None
            self._connections = [connection for connection in self._connections if not connection.is_dead]
            late = [connection for connection in self._connections if connection.pop(Hello) is not None]
        for connection in late:
            with contextlib.suppress(ConnectionLost):
                connection.send(Refuse(reason))
            connection.close()

    def _knows(self, hello: Hello) -> bool:
        with self._condition:
            token = "" if self._offer is None else self._offer.token
        return token != "" and hmac.compare_digest(hello.token.encode(), token.encode())

    def _add_connection(self, connection: Connection) -> None:
        with self._condition:
            self._connections = [known for known in self._connections if not known.is_dead]
            self._connections.append(connection)


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


LOSS_SETTLE_S = 0.5  # between a transport that broke and the end of the connection that explains it


@dataclass(slots=True)
class ReceivingWorker:
    """One engine worker of a transfer."""

    connection: Connection
    hello: Hello
    transport: TransportKind = TransportKind.AUTO
    failure: str | None = None
    is_done: bool = False

    @property
    def name(self) -> str:
        return f"worker {self.hello.rank} of {self.connection.peer_address}"

    @property
    def loss(self) -> str | None:
        """The reason why it cannot go on, as its connection tells; None while it can."""
        fail = self.connection.peek(Fail)
        if fail is not None:
            return f"{self.name}: {fail.reason}"
        return f"{self.name} was lost: {self.connection.death}" if self.connection.is_dead else None

    def tell(self, message: BaseMessage) -> None:
        """Send a message, unless the worker is gone; that is noticed where something is awaited from it."""
        with contextlib.suppress(ConnectionLost):
            self.connection.send(message)

    def leave(self, reason: str) -> None:
        """Exclude it from this update; its connection closes, so that it comes back afresh."""
        self.failure = reason
        self.tell(Abandon(reason))
        self.connection.close()


class Patience:
    """The time that those that are there have for those that are not: a grace from the latest arrival on."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._late_at = float("inf")

    def arrived(self) -> None:
        """Note that one more is there."""
        self._late_at = time.monotonic() + self._grace_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._late_at


class ReceiverGroup:
    """The workers of one transfer. Used by one thread."""

    def __init__(
        self,
        condition: threading.Condition,
        deadline_at: float,
        cancelled: Callable[[], str | None],
        late_grace_s: float,
        stall_s: float,
    ) -> None:
        self._condition = condition
        self._deadline_at = deadline_at
        self._cancelled = cancelled
        self._late_grace_s = late_grace_s
        self._stall_s = stall_s
        self._workers: list[ReceivingWorker] = []
        self._absent: tuple[str, ...] = ()  # a line on those that never came
        self._void_at = float("inf")  # when the attempt under way is void, if nothing moves

    @property
    def left(self) -> list[ReceivingWorker]:
        """The workers that are not excluded."""
        return [worker for worker in self._workers if worker.failure is None]

    @property
    def failures(self) -> tuple[str, ...]:
        return *self._absent, *(worker.failure for worker in self._workers if worker.failure is not None)

    def check(self, state: str) -> None:
        """Raise WeightUpdateFailed if the transfer was cancelled or its time is over."""
        reason = self._cancelled()
        if reason is not None:
            raise WeightUpdateFailed(f"the transfer was cancelled: {reason}")
        if time.monotonic() > self._deadline_at:
            raise WeightUpdateFailed(f"the transfer ran out of time: {state}")

    def check_attempt(self) -> None:
        """Raise TransportBroken if the attempt cannot reach all workers that are left."""
        try:
            self.check("the weights were on their way")
        except WeightUpdateFailed as error:
            raise TransportBroken(str(error)) from error
        for worker in self.left:
            loss = worker.loss
            if loss is not None:
                raise TransportBroken(loss)
        if time.monotonic() > self._void_at:
            raise TransportBroken("nothing moves: a worker does not take what is sent")

    def begin_attempt(self) -> None:
        """Give the attempt that begins its time until something moves."""
        self._void_at = time.monotonic() + START_STALLS * self._stall_s

    def moved(self) -> None:
        """Note that the sender's own part of the attempt goes on, or that a worker's does; then `check_attempt`."""
        self._void_at = time.monotonic() + self._stall_s
        self.check_attempt()

    def gather(self, connections: Callable[[], Sequence[Connection]], expected: Callable[[], int | None]) -> None:
        """Wait for as many hellos as the workers themselves were told of, or as are `expected` if that is less, and
        no longer than the grace for the last of them. Those that the transfer can do without get a moment."""
        patience, moment = Patience(self._late_grace_s), Patience(OPTIONAL_GRACE_S)
        with self._condition:
            while True:
                for connection in connections():
                    hello = connection.pop(Hello)
                    if hello is not None:
                        connection.forget()
                        self._workers.append(ReceivingWorker(connection, hello))
                        patience.arrived()
                        moment.arrived()
                hellos = [worker.hello for worker in self._workers]
                told = max((hello.num_receivers for hello in hellos), default=1)
                most = expected()
                wanted = told if most is None else min(told, max(most, 1))
                num_optional = sum(hello.is_optional for hello in hellos)
                num_there = len(hellos) - num_optional
                is_whole = num_optional >= max((hello.num_optional for hello in hellos), default=0)
                if num_there >= wanted and (is_whole or moment.is_over):
                    return
                if patience.is_over:
                    late = f"{wanted - num_there} of {wanted} workers"
                    self._absent = (f"{late} were not there {self._late_grace_s:g} s after the others",)
                    return
                self.check(f"{num_there} of {wanted} workers connected")
                self._condition.wait(CONNECTION_POLL_S)

    def welcome(self, asked: TransportKind, sender_device: str, bucket_bytes: int) -> None:
        """Choose each worker's transport, and wait until all that are left let the bytes flow."""
        host = host_name()
        for worker in self._workers:
            try:
                worker.transport = choose(asked, sender_device, host, worker.hello)
            except Unreachable as error:
                worker.tell(Refuse(str(error)))
                worker.leave(str(error))
        is_one_phase = not all(worker.hello.can_hold for worker in self.left)
        for worker in self.left:
            worker.tell(Accept(worker.transport, is_one_phase, bucket_bytes))
        self._await_each(Ready, MEMORY_STALLS * self._stall_s)

    def call_roll(self, *, is_again: bool) -> None:
        """Wait until all that are left let the bytes of an attempt flow.

        After an attempt that was void each of them is there at once. Before, in one phase, each has to commit.
        """
        self._await_each(Go, self._late_grace_s, has_begun=is_again)

    def require_some(self) -> None:
        """Raise WeightUpdateFailed if no worker is left."""
        if not self.left:
            raise WeightUpdateFailed(f"no worker is left: {self.failures[0]}")

    def tell_all(self, message: BaseMessage) -> None:
        """Send a message to all workers that are left."""
        for worker in self.left:
            worker.tell(message)

    def peers(self, attempt_id: int) -> dict[TransportKind, tuple[AttemptPeer, ...]]:
        """Group all workers that are left by the transport that serves them, for one attempt."""
        by_transport: dict[TransportKind, tuple[AttemptPeer, ...]] = {}
        for worker in self.left:
            peer = AttemptPeer(worker.connection, attempt_id, self.check_attempt)
            by_transport[worker.transport] = (*by_transport.get(worker.transport, ()), peer)
        return by_transport

    def await_arrivals(self, attempt_id: int) -> None:
        """Wait until all workers that are left have consumed every bucket. Raises TransportBroken.

        A transport may run through its receivers one after the other, so one that dies here can starve another.
        """
        for worker in self.left:
            try:
                while worker.connection.take(Arrived, check=self.check_attempt).attempt_id != attempt_id:
                    pass
                self.moved()
            except ConnectionLost as error:
                raise TransportBroken(f"{worker.name} was lost: {error}") from error

    def drop_lost(self, settle_s: float = 0.0) -> None:
        """Exclude workers that were lost. After an attempt broke, wait `settle_s` for the loss that explains it."""
        settled_at = time.monotonic() + settle_s
        with self._condition:
            while all(worker.loss is None for worker in self.left) and time.monotonic() < settled_at:
                self._condition.wait(CONNECTION_POLL_S)
        self._drop(self.left)

    def finish(self, end: EndAttempt) -> None:
        """Hear from each worker, now that all have everything, that it is what was sent."""
        self.tell_all(end)
        try:
            self._await_all(self._is_done, "confirmed what arrived", self._late_grace_s)
        except WeightUpdateFailed as error:
            self.fail_rest(str(error))

    def fail_rest(self, reason: str) -> None:
        """Exclude every worker that has not come through."""
        for worker in self.left:
            if not worker.is_done:
                worker.leave(reason)

    def _await_each(self, kind: type[Ready | Go], grace_s: float, *, has_begun: bool = False) -> None:
        """Wait for one message of every worker; those that are lost, or later than the grace, are excluded."""

        def is_there(worker: ReceivingWorker) -> bool:
            return worker.connection.pop(kind) is not None

        self._await_all(is_there, f"said {kind.__name__}", grace_s, has_begun=has_begun)

    def _await_all(
        self, is_there: Callable[[ReceivingWorker], bool], what: str, grace_s: float, *, has_begun: bool = False
    ) -> None:
        """Wait for every worker. The grace runs from the latest that is there, or, if it `has_begun`, from now."""
        pending, patience = self.left, Patience(grace_s)
        if has_begun:
            patience.arrived()
        while pending:
            with self._condition:
                num_before = len(pending)
                pending = [worker for worker in pending if not is_there(worker)]
                if len(pending) < num_before:
                    patience.arrived()
                if pending and all(worker.loss is None for worker in pending):
                    self.check(f"{pending[0].name} has not {what}")
                    self._condition.wait(CONNECTION_POLL_S)
            if patience.is_over:
                for worker in pending:
                    worker.leave(f"{worker.name} had not {what} {grace_s:g} s after the others")
            pending = self._drop(pending)

    def _drop(self, workers: Sequence[ReceivingWorker]) -> list[ReceivingWorker]:
        """Exclude those of `workers` that are lost; return the others."""
        for worker in workers:
            loss = worker.loss
            if worker.failure is None and loss is not None:
                worker.leave(loss)
        return [worker for worker in workers if worker.failure is None]

    @staticmethod
    def _is_done(worker: ReceivingWorker) -> bool:
        worker.is_done = worker.is_done or worker.connection.pop(Done) is not None
        return worker.is_done
