"""The workers of one transfer, seen from the sender: from their hello to their last word.

A worker leaves by being refused, lost or failed; its `failure` says why, and nothing is sent to it any more. All
waits end with the transfer's deadline or by its cancellation, and they wait for all workers at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.connection import POLL_S, Link, LinkLost, PassWire
from agentloop_servers.weight_transfer.messages import (
    Abandon,
    Accept,
    Arrived,
    BaseMessage,
    Done,
    EndPass,
    Fail,
    Go,
    Hello,
    Ready,
    Refuse,
)
from agentloop_servers.weight_transfer.route import Transport, Unreachable, choose, host_name
from agentloop_servers.weight_transfer.transports.base import LaneBroken

GO_GRACE_S = 30.0  # one phase: how long workers that stand still wait for one that never commits
SETTLE_S = 0.5  # between a lane that broke and the end of the link that explains it


@dataclass(slots=True)
class Worker:
    """One engine worker of a transfer."""

    link: Link
    hello: Hello
    transport: Transport = Transport.AUTO
    failure: str | None = None
    is_done: bool = False

    @property
    def name(self) -> str:
        return f"worker {self.hello.rank} of {self.link.peer}"

    @property
    def loss(self) -> str | None:
        """Why it cannot go on, as its link tells."""
        fail = self.link.peek(Fail)
        if fail is not None:
            return f"{self.name}: {fail.reason}"
        return f"{self.name} was lost: {self.link.death}" if self.link.is_dead else None

    def tell(self, message: BaseMessage) -> None:
        """Send, unless it is gone; that is noticed where something is awaited from it."""
        with contextlib.suppress(LinkLost):
            self.link.send(message)

    def leave(self, reason: str) -> None:
        """It is out of this update; its link closes, so that it comes back afresh."""
        self.failure = reason
        self.tell(Abandon(reason))
        self.link.close()


class Attendance:
    """The workers of one transfer. Used by one thread."""

    def __init__(
        self, condition: threading.Condition, deadline_at: float, cancelled: Callable[[], str | None]
    ) -> None:
        self._condition = condition
        self._deadline_at = deadline_at
        self._cancelled = cancelled
        self._workers: list[Worker] = []

    @property
    def left(self) -> list[Worker]:
        """Those who are not out."""
        return [worker for worker in self._workers if worker.failure is None]

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(worker.failure for worker in self._workers if worker.failure is not None)

    def check(self, state: str) -> None:
        """Raise WeightUpdateFailed if the transfer was cancelled or its time is over."""
        reason = self._cancelled()
        if reason is not None:
            raise WeightUpdateFailed(f"the transfer was cancelled: {reason}")
        if time.monotonic() > self._deadline_at:
            raise WeightUpdateFailed(f"the transfer ran out of time: {state}")

    def check_pass(self) -> None:
        """Raise LaneBroken if the pass cannot reach all who are left."""
        try:
            self.check("the weights were on their way")
        except WeightUpdateFailed as error:
            raise LaneBroken(str(error)) from error
        for worker in self.left:
            loss = worker.loss
            if loss is not None:
                raise LaneBroken(loss)

    def gather(self, links: Callable[[], Sequence[Link]]) -> None:
        """Wait for as many hellos as the workers themselves were told of."""
        with self._condition:
            while True:
                for link in links():
                    hello = link.pop(Hello)
                    if hello is not None:
                        link.forget()
                        self._workers.append(Worker(link, hello))
                wanted = max((worker.hello.num_receivers for worker in self._workers), default=1)
                if len(self._workers) >= wanted:
                    return
                self.check(f"{len(self._workers)} of {wanted} workers connected")
                self._condition.wait(POLL_S)

    def welcome(self, asked: Transport, sender_device: str, bucket_bytes: int) -> None:
        """Choose each worker's lane, and wait until all who are left let the bytes flow."""
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
        self._await_each(Ready)
        self._await_each(Go, grace_s=GO_GRACE_S if is_one_phase else None)

    def require_some(self) -> None:
        """Raise WeightUpdateFailed if nobody is left."""
        if not self.left:
            raise WeightUpdateFailed(f"no worker is left: {self.failures[0]}")

    def tell_all(self, message: BaseMessage) -> None:
        for worker in self.left:
            worker.tell(message)

    def wires(self, pass_id: int) -> dict[Transport, tuple[PassWire, ...]]:
        """The wires of a pass to all who are left, by the lane that serves them."""
        by_transport: dict[Transport, tuple[PassWire, ...]] = {}
        for worker in self.left:
            wire = PassWire(worker.link, pass_id, self.check_pass)
            by_transport[worker.transport] = (*by_transport.get(worker.transport, ()), wire)
        return by_transport

    def await_arrivals(self, pass_id: int) -> None:
        """Wait until all who are left have consumed every bucket. Raises LaneBroken.

        A lane may run through its receivers one after the other, so one that dies here can starve another.
        """
        for worker in self.left:
            try:
                while worker.link.take(Arrived, check=self.check_pass).pass_id != pass_id:
                    pass
            except LinkLost as error:
                raise LaneBroken(f"{worker.name} was lost: {error}") from error

    def drop_lost(self, settle_s: float = 0.0) -> None:
        """Who is lost is out. After a pass broke, wait a moment for the loss that explains it."""
        settled_at = time.monotonic() + settle_s
        with self._condition:
            while all(worker.loss is None for worker in self.left) and time.monotonic() < settled_at:
                self._condition.wait(POLL_S)
        self._drop(self.left)

    def finish(self, end: EndPass) -> None:
        """Everybody has everything: hear from each that it is what was sent."""
        self.tell_all(end)
        pending = self.left
        try:
            while pending:
                with self._condition:
                    pending = [worker for worker in pending if not self._is_done(worker)]
                    if pending and all(worker.loss is None for worker in pending):
                        self.check(f"{pending[0].name} has not confirmed what arrived")
                        self._condition.wait(POLL_S)
                pending = self._drop(pending)
        except WeightUpdateFailed as error:
            self.fail_rest(str(error))

    def fail_rest(self, reason: str) -> None:
        """Whoever is not through is out."""
        for worker in self.left:
            if not worker.is_done:
                worker.leave(reason)

    def _await_each(self, kind: type[Ready | Go], grace_s: float | None = None) -> None:
        """Wait for one message of every worker; those who are lost, or later than the grace, are out."""
        pending = self.left
        num_awaited, late_at = len(pending), float("inf")
        while pending:
            with self._condition:
                pending = [worker for worker in pending if worker.link.pop(kind) is None]
                if grace_s is not None and len(pending) < num_awaited:
                    late_at = min(late_at, time.monotonic() + grace_s)
                if pending and all(worker.loss is None for worker in pending):
                    self.check(f"{pending[0].name} has not said {kind.__name__}")
                    self._condition.wait(POLL_S)
            if time.monotonic() > late_at:
                for worker in pending:
                    worker.leave(f"{worker.name} did not start with the others")
            pending = self._drop(pending)

    def _drop(self, workers: Sequence[Worker]) -> list[Worker]:
        """Those of `workers` who are not lost."""
        for worker in workers:
            loss = worker.loss
            if worker.failure is None and loss is not None:
                worker.leave(loss)
        return [worker for worker in workers if worker.failure is None]

    @staticmethod
    def _is_done(worker: Worker) -> bool:
        worker.is_done = worker.is_done or worker.link.pop(Done) is not None
        return worker.is_done
