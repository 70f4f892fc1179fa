"""The desired state of the fleet: its weights, and the pause, sleep and drain orders in force.

Only `ReplicaSync` replaces these values. They survive a coordinator restart: an order is stored before it is sent
to a replica. For weights, `pending` is stored before the first replica changes, and the result is stored once a
replica holds the weights.
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
"""The sleep reason that marks time sharing: another model uses the accelerators now."""


@dataclass(frozen=True, slots=True)
class StandingOrders:
    """The orders of operators and trainers that are in force: a pause, a sleep, drained hosts.

    Times are wall-clock seconds since 1970. They are only displayed; no decision depends on them.
    """

    pause: PauseMode | None = None
    pause_reason: str = ""
    paused_at: float = 0.0
    asleep: frozenset[MemoryTag] = frozenset()  # the memory that is released
    sleep_level: int = 0  # level 2 discards the weights
    sleep_reason: str = ""
    asleep_at: float = 0.0
    drained: frozenset[str] = frozenset()  # addresses of hosts that receive no new work

    @property
    def is_paused(self) -> bool:
        return self.pause is not None

    def paused(self, mode: PauseMode, reason: str, now: float) -> StandingOrders:
        """Return the orders with a pause in `mode`. A repeated pause keeps the time of the first one."""
        paused_at = self.paused_at if self.is_paused else now
        return replace(self, pause=mode, pause_reason=reason or self.pause_reason, paused_at=paused_at)

    def resumed(self) -> StandingOrders:
        """Return the orders without the pause."""
        return replace(self, pause=None, pause_reason="", paused_at=0.0)

    def put_to_sleep(self, level: int, reason: str, now: float) -> StandingOrders:
        """Return the orders with all memory released.

        A level-1 sleep after a level-2 sleep keeps level 2, because the weights are already discarded.
        """
        has_weights = MemoryTag.WEIGHTS not in self.asleep
        return replace(
            self,
            asleep=ALL_MEMORY,
            sleep_level=level if has_weights else max(level, self.sleep_level),
            sleep_reason=reason or self.sleep_reason,
            asleep_at=self.asleep_at if self.asleep else now,
        )

    def awake_to_stage(self) -> StandingOrders:
        """Return the orders with the weights' memory allocated. After a level-2 sleep its content is undefined."""
        return replace(self, asleep=self.asleep - WEIGHTS)

    def woken(self, tags: frozenset[MemoryTag]) -> StandingOrders:
        """Return the orders with the memory of `tags` allocated."""
        if asleep := self.asleep - tags:
            return replace(self, asleep=asleep)
        return replace(self, asleep=asleep, sleep_level=0, sleep_reason="", asleep_at=0.0)


@dataclass(frozen=True, slots=True)
class UpdateSource:
    """An update and the KV policy of its commit.

    `digest` identifies the request by version and source (by the token for a push); `update.digest` identifies the
    content of the staged weights.
    """

    update: WeightUpdate
    kv_policy: KVPolicy
    digest: str = ""

    @property
    def version(self) -> int:
        return self.update.version

    @classmethod
    def of(cls, update: WeightUpdate, kv_policy: KVPolicy) -> UpdateSource:
        """Make the value. Its digest is the same for a repeated request."""
        token = "" if update.push is None else update.push.token
        published = () if (of := update.published) is None else (of.store, of.run, *dict(of.names).values())
        source = update.directory or update.transfer or " ".join(published)
        names = (str(update.version), source, update.adapter or "", token)
        return cls(update, kv_policy, hashlib.sha256("\0".join(names).encode()).hexdigest())

    def without_secret(self) -> UpdateSource:
        """Return the value without a push's address and token: the sender is gone after a restart."""
        if self.update.push is None:
            return self
        return replace(self, update=replace(self.update, push=PushSource((), "", ())))


@dataclass(frozen=True, slots=True)
class FleetWeights:
    """The weights of the fleet, in the form that is stored for the next coordinator.

    `served` is the last successful update and `report` its report. `pending` is the update in progress; it is
    removed if the update fails. `pending` is always stored before replicas change, but the result may reach the
    disk late. A coordinator that starts and finds `pending` therefore reports no version until the replicas have
    reported theirs.
    """

    served: UpdateSource | None = None
    pending: UpdateSource | None = None
    report: UpdateReport | None = None

    @property
    def served_version(self) -> int | None:
        return None if self.served is None else self.served.version

    def now_serving(self, source: UpdateSource) -> FleetWeights:
        """Return the value after `source` was committed. The report is added later."""
        return FleetWeights(served=source)

    def rolled_back(self) -> FleetWeights:
        """Return the value without `pending`, after its update failed."""
        return replace(self, pending=None)

    def without_secrets(self) -> FleetWeights:
        """Return the form to store, without addresses and tokens of pushes."""
        served, pending = self.served, self.pending
        return replace(
            self,
            served=None if served is None else served.without_secret(),
            pending=None if pending is None else pending.without_secret(),
        )


@dataclass(frozen=True, slots=True)
class FleetAdapters:
    """The adapters that the fleet serves by name, in the form that is stored for the next coordinator.

    `strays` are other adapter names that replicas may hold, from a push in progress or from a missed unload.
    """

    served: tuple[NamedAdapter, ...] = ()  # in push order, oldest first
    strays: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that every replica should have. The fleet's version is `Fleet.weight_version`."""

    weights: FleetWeights = FleetWeights()
    orders: StandingOrders = StandingOrders()


class SavedValue(Generic[T]):
    """A value that is written to the store. It stays pending until the most recently started save has succeeded.

    An earlier save does not count: after a timeout it may still reach the disk and overwrite a later one.
    """

    def __init__(self, value: T, save: Callable[[T], Awaitable[None]] | None) -> None:
        """`save` writes a value, and applies writes in the order of the calls. With None nothing is stored."""
        self._value = value
        self._save = save
        self._is_pending = False
        self._num_begun = 0
        self.has_failed = False  # the result of the last save that finished

    @property
    def is_pending(self) -> bool:
        """True while the store may not have the value."""
        return self._is_pending

    def owe(self, value: T) -> None:
        """Replace the value. The next `save_pending` writes it."""
        self._value = value
        self._is_pending = True

    async def save_first(self, value: T, before: T, timeout_s: float) -> None:
        """Write `value` before any replica changes.

        Raises ServiceUnavailable if the store fails; the previous value `before` is then pending.
        """
        self.owe(value)
        try:
            async with asyncio.timeout(timeout_s):
                await self.save_pending()
        except Exception as error:
            self.owe(before)
            raise ServiceUnavailable(f"the update was not started, because it cannot be stored: {error}") from error

    async def save_pending(self) -> None:
        """Write the value if it is pending. Re-raises the store's error, and the value stays pending."""
        if not self._is_pending:
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
            self._is_pending = False
