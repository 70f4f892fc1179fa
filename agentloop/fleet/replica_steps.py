"""The steps that change one replica: stage, freeze, commit, wake, resume, pause, sleep; each with its deadline.

Ownership: one object of the `ReplicaSync`; no other code of the service calls these on an engine. A step takes no
replica out of traffic and puts none in: its caller does, on the `Fleet`. Only what a step means for a replica's
weights is recorded here: unknown from the beginning of a commit, or of a sleep that discards them, to the end of
the next commit. Every step raises TimeoutError after its deadline, and what the engine raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentloop.engine import (
    ALL_MEMORY,
    CommitReport,
    EngineControl,
    MemoryTag,
    PushSource,
    StageReport,
    WeightUpdate,
)
from agentloop.fleet.desired_state import StandingOrders
from agentloop.fleet.parallel_step import within
from agentloop.fleet.registry import Fleet, ReplicaRecord
from agentloop.types import KVPolicy, PauseMode

Connect = Callable[[str], EngineControl]


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Deadlines of each step on one replica, and how often a late one is tried."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0  # in one phase the commit transfers
    resume_timeout_s: float = 60.0
    straggler_grace_s: float = 10.0  # after the others are through with a step
    sleep_timeout_s: float = 120.0
    wake_timeout_s: float = 120.0
    offer_timeout_s: float = 30.0
    save_timeout_s: float = 5.0  # of an order, into the store; the fleet obeys also one that is not saved
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT runs requests to their end
    settle_s: float = 5.0  # after a restart within an update: the time for replicas to say what they hold
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    catch_up_pause_s: float = 60.0  # between two rounds of such attempts
    num_reports: int = 16

    @property
    def switch_timeout_s(self) -> float:
        """The longest that a replica can take from its pause to its resume."""
        return self.pause_timeout_s + self.commit_timeout_s + self.wake_timeout_s + self.resume_timeout_s

    @property
    def update_timeout_s(self) -> float:
        """The longest that an update can take: in a sleeping fleet, if every step takes its whole time."""
        return self.wake_timeout_s + self.stage_timeout_s + self.switch_timeout_s + 2 * self.save_timeout_s


class ReplicaSteps:
    """Each step on one replica's engine, which `connect` gives for its URL."""

    def __init__(self, fleet: Fleet, connect: Connect, config: WeightConfig) -> None:
        self._fleet = fleet
        self._connect = connect
        self.config = config

    async def stage(
        self, replica: ReplicaRecord, update: WeightUpdate, timeout_s: float | None = None
    ) -> StageReport:
        """Receive and check the weights of an update while decoding goes on."""
        timeout_s = self.config.stage_timeout_s if timeout_s is None else timeout_s
        return await within(timeout_s, self._engine(replica).stage(update))

    async def freeze(self, replica: ReplicaRecord, kv_policy: KVPolicy) -> None:
        """Keep requests where they are, for a commit."""
        await within(self.config.pause_timeout_s, self._engine(replica).pause(PauseMode.KEEP, kv_policy))

    async def commit(self, replica: ReplicaRecord, version: int) -> CommitReport:
        """Swap in what was staged. Until this has ended, the replica's weights are unknown."""
        self._fleet.forget_version(replica)
        report = await within(self.config.commit_timeout_s, self._engine(replica).commit(version))
        self._fleet.committed(replica, version)
        return report

    async def wake(self, replica: ReplicaRecord, tags: frozenset[MemoryTag]) -> None:
        """Take memory back, of an engine that can sleep: the KV cache only for weights that are known."""
        now = self._fleet.get(replica.replica_id)
        if now is None or now.weight_version is None:
            tags = tags - {MemoryTag.KV_CACHE}
        if tags and replica.registration.info.can_sleep:
            await within(self.config.wake_timeout_s, self._engine(replica).wake(tags))

    async def resume(self, replica: ReplicaRecord) -> float:
        """Let it sample. Returns the seconds of the look at its first step, the first after a commit."""
        return await within(self.config.resume_timeout_s, self._engine(replica).resume())

    async def pause(self, replica: ReplicaRecord, mode: PauseMode) -> None:
        """Have it sample nothing, as an operator has ordered."""
        await within(self.config.operator_pause_timeout_s, self._engine(replica).pause(mode))

    async def sleep(self, replica: ReplicaRecord, orders: StandingOrders) -> None:
        """Give back the memory that the fleet has given back, and no other: an update may stage by now."""
        if orders.sleep_level == 2:
            self._fleet.forget_version(replica)
        await within(self.config.sleep_timeout_s, self._engine(replica).sleep(orders.sleep_level))
        await self.wake(replica, ALL_MEMORY - orders.asleep)

    async def offer(self, replica: ReplicaRecord) -> PushSource | None:
        """Offer the weights that it serves for another replica to stage; None if it cannot."""
        return await within(self.config.offer_timeout_s, self._engine(replica).offer())

    def _engine(self, replica: ReplicaRecord) -> EngineControl:
        return self._connect(replica.url)
