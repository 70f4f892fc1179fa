"""The engines of a fleet, who may act on them, and what all of them are to be: the ground that updates, catching
up and operator's orders share.

Ownership: one object, in the coordinator's event loop, made by the `WeightController`. Engines come from `connect`
and belong to whoever made it. Three rules keep the procedures apart:
- `fleet_wide`: one update, sleep or wake at a time; a catch-up begins only while there is none;
- `busy`: the replicas that an update or a catch-up has, from the stage to the end; nobody else touches these;
- `gate`: held over every stretch in which engines freeze or go on, so that what `operator_mode` and `asleep` say
  when it is taken is still true when it is left. Taken after `fleet_wide`, never before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agentloop.clock import Clock
from agentloop.engine import EngineControl, MemoryTag, WeightUpdate
from agentloop.errors import Conflict
from agentloop.fleet.registry import Fleet, Replica, ReplicaState
from agentloop.types import KVPolicy, PauseMode

Connect = Callable[[str], EngineControl]


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Deadlines of each step on one replica, and how often a late one is tried."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0  # in one phase the commit transfers
    resume_timeout_s: float = 60.0
    sleep_timeout_s: float = 120.0
    wake_timeout_s: float = 120.0
    offer_timeout_s: float = 30.0
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT runs requests to their end
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    num_reports: int = 16


class FleetEngines:
    """What the three procedures share. `asleep` and `operator_mode` change under the gate only; `asleep` loses its
    weights also while an update that wakes the fleet stages."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Connect,
        clock: Clock,
        config: WeightConfig,
        current: tuple[WeightUpdate, KVPolicy] | None,
    ) -> None:
        self.fleet = fleet
        self.clock = clock
        self.config = config
        self.gate = asyncio.Lock()
        self.busy: set[str] = set()
        self.current = current  # the update that made the fleet's version, if there is one
        self.operator_mode: PauseMode | None = None
        self.sleep_level = 0
        self.asleep: frozenset[MemoryTag] = frozenset()
        self._connect = connect
        self._engines: dict[str, tuple[str, EngineControl]] = {}  # replica id -> (url, engine)
        self._ongoing: str | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def engine(self, replica: Replica) -> EngineControl:
        known = self._engines.get(replica.replica_id)
        if known is None or known[0] != replica.url:
            known = (replica.url, self._connect(replica.url))
            self._engines[replica.replica_id] = known
        return known[1]

    def forget(self, replica_id: str) -> None:
        """A replica is gone: drop what was kept for it."""
        self._engines.pop(replica_id, None)

    def free(self, *states: ReplicaState) -> list[Replica]:
        """The replicas in these states that no procedure has."""
        return [one for one in self.fleet.replicas if one.state in states and one.replica_id not in self.busy]

    def is_current(self, replica: Replica) -> bool:
        """Whether it holds the fleet's weights, as far as we know."""
        return replica.weight_version is not None and replica.weight_version == self.fleet.weight_version

    def served(self) -> tuple[WeightUpdate, KVPolicy] | None:
        """The update that made what the fleet serves, if we know it."""
        current = self.current
        return current if current is not None and current[0].version == self.fleet.weight_version else None

    @contextmanager
    def fleet_wide(self, what: str) -> Iterator[None]:
        """One at a time. Raises Conflict naming the one that is going on."""
        if self._ongoing is not None:
            raise Conflict(f"{self._ongoing} is going on")
        self._ongoing = what
        self._is_idle.clear()
        try:
            yield
        finally:
            self._ongoing = None
            self._is_idle.set()

    async def idle(self) -> None:
        """Wait until nothing fleet-wide goes on; bounded, because all its steps have deadlines."""
        while self._ongoing is not None:
            await self._is_idle.wait()

    def settle(self, replica: Replica, error: str) -> None:
        """After a procedure on `replica`: never UPDATING. With weights as they were it gets its state back."""
        now = self.fleet.get(replica.replica_id)
        if now is not None and now.incarnation != replica.incarnation and now.url == replica.url:
            self.fleet.forget_version(now)  # it left and came back meanwhile: what it said may precede our commit
        if now is None or now.state is not ReplicaState.UPDATING:
            return
        is_untouched = now.weight_version == replica.weight_version and now.weight_version is not None
        if replica.state in (ReplicaState.JOINING, ReplicaState.ASLEEP) and is_untouched:
            self.fleet.put_back(replica)
        else:
            self.fleet.quarantine(replica, error)
