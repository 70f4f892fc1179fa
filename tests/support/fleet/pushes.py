"""Weights that processes push in virtual time: transfers take time, senders die, some updates must be blocking."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import PushSource, StageReport, StagingDevice, WeightUpdate
from agentloop.errors import CheckpointUnreadable
from agentloop.simulation.engine import SimulatedEngine


@dataclass(slots=True)
class Sender:
    """A process that offers weights. `engine`: another replica, which can send weights as long as it holds them."""

    version: int
    transfer_s: float = 0.0
    is_one_phase: bool = False
    dies_at: float = inf
    engine: SimulatedEngine | None = None

    def is_there(self, now: float) -> bool:
        holds = self.engine is None or (self.engine.weight_version == self.version and not self.engine.asleep)
        return holds and now < self.dies_at


class Wire:
    """All senders, and the invariants between them and the engines."""

    def __init__(self, clock: Clock, can_relay: bool = True, relay_s: float = 0.0) -> None:
        self.clock = clock
        self.problems: list[str] = []
        self.num_transfers = 0
        self.num_relayed = 0
        self.num_broken = 0
        self.num_one_phase = 0
        self._can_relay = can_relay
        self._relay_s = relay_s
        self._senders: dict[str, Sender] = {}

    @property
    def can_relay(self) -> bool:
        return self._can_relay

    def listen(self, sender: Sender) -> PushSource:
        token = f"sender {len(self._senders)}"
        self._senders[token] = sender
        return PushSource((f"sim:{len(self._senders)}",), token, ())

    def receiver(self) -> Receiver:
        return Receiver(self)

    def find(self, update: WeightUpdate) -> Sender:
        """Return the sender of an update. Raises CheckpointUnreadable if it is gone."""
        assert update.push is not None
        sender = self._senders[update.push.token]
        if sender.version != update.version:
            self.problems.append(f"version {sender.version} is delivered as {update.version}")
        if update.push.num_receivers < 1:
            self.problems.append(f"version {update.version} is pushed to nobody")
        if not sender.is_there(self.clock.now()):
            self._break()
        return sender

    async def transfer(self, sender: Sender) -> float:
        """Transfer all bytes of one replica; returns milliseconds.

        Raises CheckpointUnreadable if the sender dies in between.
        """
        started_at = self.clock.now()
        await self.clock.sleep(max(0.0, min(sender.transfer_s, sender.dies_at - started_at)))
        if not sender.is_there(self.clock.now()):
            self._break()
        self.num_transfers += 1
        self.num_relayed += sender.engine is not None
        self.num_one_phase += sender.is_one_phase
        return (self.clock.now() - started_at) * 1000.0

    def offer(self, version: int, engine: SimulatedEngine) -> PushSource | None:
        return self.listen(Sender(version, self._relay_s, engine=engine)) if self._can_relay else None

    def _break(self) -> None:
        self.num_broken += 1
        raise CheckpointUnreadable("the sender is gone", param="push")


class Receiver:
    """One engine's receiving side (a WeightSource). `engine` is the engine that it offers."""

    def __init__(self, wire: Wire) -> None:
        self.engine: SimulatedEngine | None = None
        self._wire = wire

    async def stage(self, update: WeightUpdate) -> StageReport:
        sender = self._wire.find(update)
        if sender.is_one_phase:
            return StageReport(StagingDevice.NOWHERE, "shm")
        return StageReport(StagingDevice.HOST, "shm", 1000, await self._wire.transfer(sender))

    async def transfer(self, update: WeightUpdate) -> float:
        return await self._wire.transfer(self._wire.find(update))

    async def offer(self, version: int) -> PushSource | None:
        return None if self.engine is None else self._wire.offer(version, self.engine)
