"""The two sides of a pusher in tests: a fleet that really receives, and a sender that does not send."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from agentloop.engine.interface import PushSource, WeightUpdate
from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import view
from agentloop_servers.weight_transfer.receiver import AttemptRestarted, Receiver
from agentloop_servers.weight_transfer.sender import SendReport

TIMEOUT_S = 60.0


class ReceivingFleet:
    """One worker that fetches every push; `received` has the tensors of each update."""

    def __init__(self) -> None:
        self.received: list[dict[str, torch.Tensor]] = []
        self.transports: list[str] = []
        self._receiver = Receiver(torch.device("cpu"), 0)

    async def take(self, update: WeightUpdate) -> None:
        """Receive an update as the engines would; see `FakeCoordinator.on_update`."""
        assert update.push is not None
        self.received.append(await asyncio.to_thread(self._receive, replace(update.push, num_receivers=1)))

    def close(self) -> None:
        self._receiver.close()

    def _receive(self, source: PushSource) -> dict[str, torch.Tensor]:
        incoming = self._receiver.open(source, can_hold=True, timeout_s=TIMEOUT_S)
        self.transports.append(incoming.transport)
        while True:
            try:
                found = {
                    place.name: view(data, place).clone()
                    for bucket, data in incoming.receive_attempt()
                    for place in incoming.layout.in_bucket(bucket)
                }
                incoming.finish()
            except AttemptRestarted:
                continue
            return found


@dataclass
class FakeSender:
    """Loads the offered tensors in `num_attempts` attempts. With `is_hanging`, only a cancel ends it."""

    host: str
    transport: str
    error: Exception | None = None
    is_hanging: bool = False
    num_attempts: int = 1
    attempts: list[list[torch.Tensor]] = field(default_factory=list)
    offers: list[Sequence[Outgoing]] = field(default_factory=list)
    num_running: int = 0
    num_released: int = 0
    is_closed: bool = False
    reasons: list[str] = field(default_factory=list)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def offer(self, items: Sequence[Outgoing]) -> PushSource:
        self.offers.append(items)
        return PushSource(("127.0.0.1:1",), "token", tuple(item.info for item in items))

    def run(
        self, timeout_s: float, before_attempt: Callable[[], None] | None = None, *, late_grace_s: float = 10.0
    ) -> SendReport:
        self.num_running += 1
        try:
            for _ in range(self.num_attempts):
                if before_attempt is not None:
                    before_attempt()
                self.attempts.append([item.load() for item in self.offers[-1]])
            if self.is_hanging:
                assert self._cancelled.wait(TIMEOUT_S)
                time.sleep(0.1)  # detects callers that do not wait for the end of the thread
                raise WeightUpdateFailed("the transfer was cancelled")
            if self.error is not None:
                raise self.error
        finally:
            self.num_running -= 1
        return SendReport(0, (), 0.0, self.num_attempts, 1)

    def expect(self, num_receivers: int) -> None:
        """Do nothing: no receiver is awaited."""

    def cancel(self, reason: str) -> None:
        self.reasons.append(reason)
        self._cancelled.set()

    def release(self) -> None:
        self.num_released += 1

    def close(self) -> None:
        self.is_closed = True
