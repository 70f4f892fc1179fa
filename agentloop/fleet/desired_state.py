"""The desired state of the fleet: its weights, and the orders that hold until they are taken back.

Ownership: `ReplicaSync` alone replaces these values. The orders outlive a coordinator: they are stored beside the
weights before a replica hears of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentloop.engine import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.types import KVPolicy, PauseMode

WEIGHTS = frozenset({MemoryTag.WEIGHTS})


@dataclass(frozen=True, slots=True)
class StandingOrders:
    """The orders of operators and trainers that hold until they are taken back: a pause, and a sleep.

    Times are of the wall clock, in seconds since 1970: they are shown, and nothing is decided by them.
    """

    pause: PauseMode | None = None
    pause_reason: str = ""
    paused_at: float = 0.0
    asleep: frozenset[MemoryTag] = frozenset()  # the memory that is given back
    sleep_level: int = 0  # 2: the weights were discarded
    sleep_reason: str = ""
    asleep_at: float = 0.0

    @property
    def is_paused(self) -> bool:
        return self.pause is not None

    def paused(self, mode: PauseMode, reason: str, now: float) -> StandingOrders:
        """Pause in `mode`; a pause that goes on began when it began."""
        paused_at = self.paused_at if self.is_paused else now
        return replace(self, pause=mode, pause_reason=reason or self.pause_reason, paused_at=paused_at)

    def resumed(self) -> StandingOrders:
        """Take the pause back."""
        return replace(self, pause=None, pause_reason="", paused_at=0.0)

    def put_to_sleep(self, level: int, reason: str, now: float) -> StandingOrders:
        """Give all memory back; a lighter sleep does not bring back weights that a deeper one has discarded."""
        has_weights = MemoryTag.WEIGHTS not in self.asleep
        return replace(
            self,
            asleep=ALL_MEMORY,
            sleep_level=level if has_weights else max(level, self.sleep_level),
            sleep_reason=reason or self.sleep_reason,
            asleep_at=self.asleep_at if self.asleep else now,
        )

    def awake_to_stage(self) -> StandingOrders:
        """Take back the memory of the weights; what was in it may still be discarded."""
        return replace(self, asleep=self.asleep - WEIGHTS)

    def woken(self, tags: frozenset[MemoryTag]) -> StandingOrders:
        """Take memory back."""
        if asleep := self.asleep - tags:
            return replace(self, asleep=asleep)
        return replace(self, asleep=asleep, sleep_level=0, sleep_reason="", asleep_at=0.0)


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that every replica is brought to. The version is the registry's: `Fleet.weight_version`."""

    source: tuple[WeightUpdate, KVPolicy] | None = None  # the update that made the fleet's version, if there is one
    orders: StandingOrders = StandingOrders()

    @property
    def is_paused(self) -> bool:
        """Tell if an operator has paused the fleet."""
        return self.orders.is_paused

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The memory that is given back."""
        return self.orders.asleep
