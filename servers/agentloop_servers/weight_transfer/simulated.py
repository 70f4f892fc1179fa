"""Pushed weights for a simulated engine: every byte is received and checked as in a worker, and then dropped.

So the whole path from a trainer to a fleet runs on a machine without an engine. Each update has receivers of its
own, one a worker, each in a thread; an update that ends early aborts them, and their threads end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch

from agentloop.aio import in_daemon_thread
from agentloop.engine import HeldIn, PushSource, StageReport, WeightUpdate
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.receiver import Incoming, Receiver, receive

T = TypeVar("T")


class _SimulatedWorker:
    """One worker's receiver with its update. `leave` may be called from any thread, at any time."""

    def __init__(self, rank: int) -> None:
        self._receiver = Receiver(torch.device("cpu"), rank)
        self._is_left = False
        self.incoming: Incoming | None = None

    def open(self, push: PushSource, can_hold: bool, timeout_s: float) -> Incoming:
        incoming = self._receiver.open(
            push, can_hold=can_hold, timeout_s=timeout_s, is_given_up=lambda: self._is_left
        )
        self.incoming = incoming
        if self._is_left:
            self.leave()
            raise CheckpointUnreadable("the update was given up", param="push")
        return incoming

    def receive(self) -> float:
        """Receive all tensors and compare their checksums with the sender's. Returns the milliseconds."""
        assert self.incoming is not None, "it was opened"
        receive(self.incoming, lambda name, tensor: None)  # there is no model
        self._receiver.close()
        return self.incoming.transfer_ms

    def leave(self) -> None:
        self._is_left = True
        if self.incoming is not None:
            self.incoming.abort()
        self._receiver.close()


class ReceivedWeights:
    """A `WeightSource` (`agentloop/simulation/weights.py`) over the real transfer. `can_hold` false: one phase."""

    def __init__(self, num_workers: int, *, can_hold: bool, timeout_s: float) -> None:
        self._num_workers = num_workers
        self._can_hold = can_hold
        self._timeout_s = timeout_s
        self._waiting: list[_SimulatedWorker] = []  # one phase: opened by a stage, for the transfer

    async def stage(self, update: WeightUpdate) -> StageReport:
        push = update.push
        assert push is not None, "asked for pushes only"
        self._drop()
        workers = [_SimulatedWorker(rank) for rank in range(self._num_workers)]
        opened = await _on_all(workers, lambda worker: worker.open(push, self._can_hold, self._timeout_s))
        transport, num_bytes = opened[0].transport, opened[0].layout.num_bytes
        if opened[0].is_one_phase:
            self._waiting = workers
            return StageReport(HeldIn.NOWHERE, transport, num_bytes)
        times_ms = await _on_all(workers, _SimulatedWorker.receive)
        return StageReport(HeldIn.HOST, transport, num_bytes, max(times_ms))

    async def transfer(self, update: WeightUpdate) -> float:
        workers, self._waiting = self._waiting, []
        return max(await _on_all(workers, _SimulatedWorker.receive))

    async def offer(self, version: int) -> PushSource | None:
        return None

    def _drop(self) -> None:
        for worker in self._waiting:
            worker.leave()
        self._waiting = []


async def _on_all(workers: list[_SimulatedWorker], step: Callable[[_SimulatedWorker], T]) -> list[T]:
    """Run one step of every worker at once. The first failure, or a cancellation, makes all leave."""
    try:
        return list(await asyncio.gather(*(in_daemon_thread(step, worker) for worker in workers)))
    except BaseException:
        for worker in workers:
            worker.leave()
        raise
