"""Pushed weights for a simulated engine: all bytes are received and verified as in a worker, then dropped.

So the whole path from a trainer to a fleet runs without an engine. Each update has its own receivers, one thread
per worker; aborting the update ends the threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch

from agentloop.concurrency.aio import in_daemon_thread
from agentloop.engine.interface import (
    GroupInit,
    LeaveGroup,
    PushSource,
    StageReport,
    StagingDevice,
    TrainerOrder,
    TransferPart,
    WeightUpdate,
)
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import has_tied_embeddings
from agentloop_servers.weight_transfer.group_member import GroupMember
from agentloop_servers.weight_transfer.receiver import Incoming, Receiver, receive

T = TypeVar("T")


class _SimulatedWorker:
    """One worker's receiver with its update. `leave` may be called from any thread at any time."""

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
            raise CheckpointUnreadable("the update was cancelled", param="push")
        return incoming

    def receive(self, *, is_tied: bool = False) -> float:
        """Receive all tensors and verify their checksums. Returns the milliseconds."""
        assert self.incoming is not None, "it was opened"
        receive(self.incoming, lambda name, tensor: None, is_tied=is_tied)  # there is no model to load them into
        self._receiver.close()
        return self.incoming.transfer_ms

    def leave(self) -> None:
        self._is_left = True
        if self.incoming is not None:
            self.incoming.abort()
        self._receiver.close()


class ReceivedWeights:
    """A `WeightSource` (`agentloop/simulation/weights.py`) with the real transfer.

    Without `can_hold` updates are blocking. `model` is the model's folder; only its tied output head matters.
    """

    def __init__(self, num_workers: int, *, can_hold: bool, timeout_s: float, model: str = "") -> None:
        self._num_workers = num_workers
        self._can_hold = can_hold
        self._timeout_s = timeout_s
        self._is_tied = bool(model) and has_tied_embeddings(model)
        self._waiting: list[_SimulatedWorker] = []  # blocking update: opened by the stage, received by the commit
        self._members: dict[str, list[GroupMember]] = {}
        self._received: tuple[str, int] | None = None  # transfer id, and the bytes of its parts over all workers

    async def follow_trainer(self, order: TrainerOrder) -> None:
        """Implements the engine's `follow_trainer`. A part that fails drops its transfer."""
        match order:
            case GroupInit():
                ranks = range(self._num_workers)
                members = [GroupMember(order, rank, torch.device("cpu"), self._timeout_s) for rank in ranks]
                self._members[order.name] = members
                await asyncio.gather(*(in_daemon_thread(one.join) for one in members))
                if failed := [one.error for one in members if one.error]:
                    raise CheckpointUnreadable(failed[0], param="master_address")
            case TransferPart():
                self._received, num_bytes = None, self._bytes_of(order.transfer_id)
                members = self._members.get(order.group, [])
                num_bytes += sum(await asyncio.gather(*(in_daemon_thread(_drain, one, order) for one in members)))
                self._received = order.transfer_id, num_bytes
            case LeaveGroup():
                for one in self._members.pop(order.name, []):
                    one.leave()

    def _bytes_of(self, transfer_id: str) -> int:
        return self._received[1] if self._received is not None and self._received[0] == transfer_id else 0

    async def stage(self, update: WeightUpdate) -> StageReport:
        push, received, self._received = update.push, self._received, None
        self._drop()
        if push is None:
            if received is None or received[0] != update.transfer:
                raise CheckpointUnreadable("no complete part of this transfer was received", param="update_info")
            return StageReport(StagingDevice.HOST, "gloo", received[1] // self._num_workers)
        workers = [_SimulatedWorker(rank) for rank in range(self._num_workers)]
        opened = await _on_all(workers, lambda worker: worker.open(push, self._can_hold, self._timeout_s))
        transport, num_bytes = opened[0].transport, opened[0].layout.num_bytes
        if opened[0].is_one_phase:
            self._waiting = workers
            return StageReport(StagingDevice.NOWHERE, transport, num_bytes)
        times_ms = await _on_all(workers, lambda worker: worker.receive(is_tied=self._is_tied))
        return StageReport(StagingDevice.HOST, transport, num_bytes, max(times_ms), opened[0].digest)

    async def transfer(self, update: WeightUpdate) -> float:
        workers, self._waiting = self._waiting, []
        return max(await _on_all(workers, _SimulatedWorker.receive))

    async def offer(self, version: int) -> PushSource | None:
        return None

    def _drop(self) -> None:
        for worker in self._waiting:
            worker.leave()
        self._waiting = []


def _drain(member: GroupMember, part: TransferPart) -> int:
    """Receive a part and drop it. Returns its size in bytes."""
    return sum(tensor.nbytes for _, tensor in member.receive(part, lambda: None))


async def _on_all(workers: list[_SimulatedWorker], step: Callable[[_SimulatedWorker], T]) -> list[T]:
    """Run one step on every worker in parallel. If one fails or is cancelled, all leave."""
    try:
        return list(await asyncio.gather(*(in_daemon_thread(step, worker) for worker in workers)))
    except BaseException:
        for worker in workers:
            worker.leave()
        raise
