"""The desired state of the fleet: its weights, and the orders that hold until they are taken back.

Ownership: `ReplicaSync` alone replaces these values. Both outlive a coordinator: orders are stored before a replica
hears of them, and of weights the intent before a replica is touched, the outcome once the first one holds them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from agentloop.api.coordinator import NamedAdapter, UpdateReport
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, PushSource, WeightUpdate
from agentloop.errors import ServiceUnavailable
from agentloop.types import KVPolicy, PauseMode

T = TypeVar("T")

WEIGHTS = frozenset({MemoryTag.WEIGHTS})
TURN_REASON = "another model's turn"
"""The reason of a sleep by which models take turns on their accelerators."""


@dataclass(frozen=True, slots=True)
class StandingOrders:
    """The orders of operators and trainers that hold until they are taken back: a pause, a sleep, hosts to clear.

    Times are of the wall clock, in seconds since 1970: they are shown, and nothing is decided by them.
    """

    pause: PauseMode | None = None
    pause_reason: str = ""
    paused_at: float = 0.0
    asleep: frozenset[MemoryTag] = frozenset()  # the memory that is given back
    sleep_level: int = 0  # 2: the weights were discarded
    sleep_reason: str = ""
    asleep_at: float = 0.0
    drained: frozenset[str] = frozenset()  # the addresses of hosts that get no work

    @property
    def is_paused(self) -> bool:
        return self.pause is not None

    def paused(self, mode: PauseMode, reason: str, now: float) -> StandingOrders:
        """Pause in `mode`; a second pause keeps the time of the first."""
        paused_at = self.paused_at if self.is_paused else now
        return replace(self, pause=mode, pause_reason=reason or self.pause_reason, paused_at=paused_at)

    def resumed(self) -> StandingOrders:
        """End the pause."""
        return replace(self, pause=None, pause_reason="", paused_at=0.0)

    def put_to_sleep(self, level: int, reason: str, now: float) -> StandingOrders:
        """Give all memory back. Level 1 after level 2 stays level 2: the weights were discarded."""
        has_weights = MemoryTag.WEIGHTS not in self.asleep
        return replace(
            self,
            asleep=ALL_MEMORY,
            sleep_level=level if has_weights else max(level, self.sleep_level),
            sleep_reason=reason or self.sleep_reason,
            asleep_at=self.asleep_at if self.asleep else now,
        )

    def awake_to_stage(self) -> StandingOrders:
        """Take back the memory of the weights; their values may still be discarded."""
        return replace(self, asleep=self.asleep - WEIGHTS)

    def woken(self, tags: frozenset[MemoryTag]) -> StandingOrders:
        """Take the memory of these tags back."""
        if asleep := self.asleep - tags:
            return replace(self, asleep=asleep)
        return replace(self, asleep=asleep, sleep_level=0, sleep_reason="", asleep_at=0.0)


@dataclass(frozen=True, slots=True)
class UpdateSource:
    """An update, and the KV policy of its commit.

    `digest` identifies the request: its version and source, a push by its token. `update.digest` identifies the
    weights that replicas have staged.
    """

    update: WeightUpdate
    kv_policy: KVPolicy
    digest: str = ""

    @property
    def version(self) -> int:
        return self.update.version

    @classmethod
    def of(cls, update: WeightUpdate, kv_policy: KVPolicy) -> UpdateSource:
        """Make the value with its digest, which is equal for a repeat of the same update."""
        token = "" if update.push is None else update.push.token
        published = "" if update.published is None else f"{update.published.store} {update.published.run}"
        source = update.directory or update.transfer or published
        names = (str(update.version), source, update.adapter or "", token)
        return cls(update, kv_policy, hashlib.sha256("\0".join(names).encode()).hexdigest())

    def without_secret(self) -> UpdateSource:
        """Return the form to store: a push is stored without address and token, as its process will be gone."""
        if self.update.push is None:
            return self
        return replace(self, update=replace(self.update, push=PushSource((), "", ())))


@dataclass(frozen=True, slots=True)
class FleetWeights:
    """The weights of the fleet, as they are stored for the next coordinator.

    `served` is the last update that succeeded, `report` its answer. `pending` is the update under way: a failure
    removes it, and after a coordinator's death the versions that replicas hold decide. A slow disk may store an
    outcome after it was told, but `pending` is stored before: so a coordinator that finds one tells no version
    until it is resolved.
    """

    served: UpdateSource | None = None
    pending: UpdateSource | None = None
    report: UpdateReport | None = None

    @property
    def served_version(self) -> int | None:
        """The version of `served`."""
        return None if self.served is None else self.served.version

    def now_serving(self, source: UpdateSource) -> FleetWeights:
        """Record that `source` is served; its report follows."""
        return FleetWeights(served=source)

    def rolled_back(self) -> FleetWeights:
        """Remove `pending`: its update has failed."""
        return replace(self, pending=None)

    def without_secrets(self) -> FleetWeights:
        """Return the form to store."""
        served, pending = self.served, self.pending
        return replace(
            self,
            served=None if served is None else served.without_secret(),
            pending=None if pending is None else pending.without_secret(),
        )


@dataclass(frozen=True, slots=True)
class FleetAdapters:
    """The adapters that the fleet serves by name, as they are stored for the next coordinator.

    `strays` are names of others that a replica may hold: of a push under way, or of one that it has missed.
    """

    served: tuple[NamedAdapter, ...] = ()  # the one pushed longest ago first
    strays: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that every replica is brought to. `Fleet.weight_version` has the version."""

    weights: FleetWeights = FleetWeights()
    orders: StandingOrders = StandingOrders()


class SavedValue(Generic[T]):
    """A value that is kept in the store. It is owed until the last save that was begun has succeeded.

    An earlier save does not count: after a timeout it may still reach the disk, and be the later one there.
    """

    def __init__(self, value: T, save: Callable[[T], Awaitable[None]] | None) -> None:
        """`save` writes a value; writes reach the store in the order of their calls. None: nothing is stored."""
        self._value = value
        self._save = save
        self._is_owed = False
        self._num_begun = 0
        self.has_failed = False  # the last save that has ended

    @property
    def is_owed(self) -> bool:
        """True while the store may not have the value."""
        return self._is_owed

    def owe(self, value: T) -> None:
        """Replace the value; the next `save_owed` writes it."""
        self._value = value
        self._is_owed = True

    async def save_first(self, value: T, before: T, timeout_s: float) -> None:
        """Write a value before any replica is touched. If that raises ServiceUnavailable, `before` is owed."""
        self.owe(value)
        try:
            async with asyncio.timeout(timeout_s):
                await self.save_owed()
        except Exception as error:
            self.owe(before)
            raise ServiceUnavailable(f"the update cannot be recorded: {error}") from error

    async def save_owed(self) -> None:
        """Write the value if it is owed. Raises what the store raises; the value then stays owed."""
        if not self._is_owed:
            return
        self._num_begun += 1
        value, number = self._value, self._num_begun
        if self._save is not None:
            try:
                await self._save(value)
            except Exception:
                self.has_failed = True
                raise
        self.has_failed = False
        if number == self._num_begun and value == self._value:
            self._is_owed = False
