"""The steps that change one replica: stage, pause, commit, wake, resume, sleep; each with its deadline.

Ownership: one object of the `ReplicaSync`; no other code of the service calls these on an engine. The callers of a
step take the replica out of traffic and back, on the `Fleet`. The steps record only the version of its weights:
unknown from the beginning of a commit, or of a sleep that discards them, to the end of the next commit, and once an
engine's answer contradicts it. Every step raises TimeoutError after its deadline, and what the engine raises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from agentloop.engine.interface import (
    ALL_MEMORY,
    Adapter,
    CommitReport,
    EngineControl,
    LeaveGroup,
    MemoryTag,
    PushSource,
    StageReport,
    TrainerOrder,
    WeightUpdate,
)
from agentloop.errors import AgentLoopError, EngineLost, error_line
from agentloop.fleet.desired_state import StandingOrders
from agentloop.fleet.parallel_step import within
from agentloop.fleet.registry import Fleet, ReplicaRecord
from agentloop.types import KVPolicy, PauseMode

T = TypeVar("T")
Connect = Callable[[str], EngineControl]

_ANSWER_S = 1.0  # of a drain, beyond its grace

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """The deadlines of each step on one replica, and the attempts for a late one."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0  # in one phase the commit transfers
    resume_timeout_s: float = 60.0
    straggler_grace_s: float = 10.0  # after the others are through with a step
    exact_grace_s: float = 5.0  # for requests that do not accept the new version; a straggler has no more
    sleep_timeout_s: float = 120.0
    wake_timeout_s: float = 120.0
    offer_timeout_s: float = 30.0
    save_timeout_s: float = 5.0  # of an order, into the store; the fleet obeys it also unsaved
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT runs requests to their end
    settle_s: float = 5.0  # after a restart within an update: the time for replicas to say what they hold
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    catch_up_pause_s: float = 60.0  # between two rounds of such attempts
    turn_wait_s: float = 120.0  # of an update, while another model has the turn
    num_reports: int = 16

    @property
    def switch_timeout_s(self) -> float:
        """The longest that a replica can take from its pause to its resume."""
        return self.pause_timeout_s + self.commit_timeout_s + self.wake_timeout_s + self.resume_timeout_s

    @property
    def update_timeout_s(self) -> float:
        """The longest that an update can take: in a sleeping fleet, if every step takes its whole time."""
        return (
            self.turn_wait_s
            + self.wake_timeout_s
            + self.stage_timeout_s
            + self.switch_timeout_s
            + 2 * self.save_timeout_s
        )


class ReplicaSteps:
    """The steps on a replica's engine, each under its deadline. `connect` returns the engine at a URL."""

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

    async def digest_of(self, replica: ReplicaRecord, update: WeightUpdate) -> str:
        """Stage an update, and return the digest of its weights; empty if the replica does not answer."""
        try:
            return (await self.stage(replica, update)).digest
        except (EngineLost, ConnectionError, TimeoutError) as error:
            _log.warning("weights_not_compared", replica=replica.replica_id, error=error_line(error))
            return ""

    async def follow_trainer(self, replica: ReplicaRecord, order: TrainerOrder) -> None:
        """Join a trainer's group, receive a part of its transfer, or leave; or make a version on its host."""
        timeout_s = self.config.offer_timeout_s if isinstance(order, LeaveGroup) else self.config.stage_timeout_s
        await within(timeout_s, self._engine(replica).follow_trainer(order))

    async def load_adapter(self, replica: ReplicaRecord, adapter: Adapter) -> StageReport:
        """Serve a version of an adapter to the calls that begin from now on."""
        return await within(self.config.stage_timeout_s, self._engine(replica).load_adapter(adapter))

    async def unload_adapter(self, replica: ReplicaRecord, name: str) -> None:
        """Serve an adapter no more."""
        await within(self.config.offer_timeout_s, self._engine(replica).unload_adapter(name))

    async def drain_pinned(self, replica: ReplicaRecord, version: int) -> None:
        """Let requests end that do not accept the version to come. A replica that does not answer is left alone."""
        grace_s = self.config.exact_grace_s
        with suppress(AgentLoopError, TimeoutError, ConnectionError):
            await within(grace_s + _ANSWER_S, self._engine(replica).drain_pinned(version, grace_s))

    async def pause_for_commit(self, replica: ReplicaRecord, kv_policy: KVPolicy) -> None:
        """Freeze requests where they are, for the commit that follows."""
        await within(self.config.pause_timeout_s, self._engine(replica).pause(PauseMode.KEEP, kv_policy))

    async def commit(self, replica: ReplicaRecord, version: int, *, resumes: bool = False) -> CommitReport:
        """Swap in the staged weights, and with `resumes` end the pause. Until this has ended, the replica's weights
        are unknown."""
        engine, timeout_s = self._engine(replica), self.config.commit_timeout_s
        self._fleet.forget_version(replica)
        if resumes:
            timeout_s += self.config.resume_timeout_s
        try:
            report = await within(timeout_s, engine.commit(version, resumes=resumes))
        except (EngineLost, ConnectionError):
            if not resumes:
                raise
            # Perhaps only the answer is lost, and the replica samples under the version: freeze it, and look.
            await self.pause_for_commit(replica, KVPolicy.KEEP)
            if engine.weight_version != version:
                raise
            report = CommitReport(canary_ms=1e3 * await within(self.config.resume_timeout_s, engine.resume()))
        self._fleet.committed(replica, version)
        return report

    async def wake(self, replica: ReplicaRecord, tags: frozenset[MemoryTag]) -> None:
        """Take memory back if the engine can sleep: the KV cache only while its weight version is known."""
        now = self._fleet.get(replica.replica_id)
        if now is None or now.weight_version is None:
            tags = tags - {MemoryTag.KV_CACHE}
        if tags and replica.registration.info.can_sleep:
            await self._order(replica, self.config.wake_timeout_s, self._engine(replica).wake(tags))

    async def resume(self, replica: ReplicaRecord) -> float:
        """End a pause. Returns the seconds of the look at new weights; 0 if no commit came before."""
        return await self._order(replica, self.config.resume_timeout_s, self._engine(replica).resume())

    async def pause_for_operator(self, replica: ReplicaRecord, mode: PauseMode) -> None:
        """Pause the engine in the mode of an operator's order."""
        await self._order(replica, self.config.operator_pause_timeout_s, self._engine(replica).pause(mode))

    async def sleep(self, replica: ReplicaRecord, orders: StandingOrders) -> None:
        """Give back the memory that sleeps by `orders`, and no other: an update under way may stage into it."""
        if orders.sleep_level == 2:
            self._fleet.forget_version(replica)
        await self._order(replica, self.config.sleep_timeout_s, self._engine(replica).sleep(orders.sleep_level))
        await self.wake(replica, ALL_MEMORY - orders.asleep)

    async def offer(self, replica: ReplicaRecord) -> PushSource | None:
        """Offer a replica's weights for another replica to stage; None if its engine cannot send them."""
        return await within(self.config.offer_timeout_s, self._engine(replica).offer())

    async def _order(self, replica: ReplicaRecord, timeout_s: float, order: Awaitable[T]) -> T:
        """Await an order, and forget the replica's version if the engine holds another at its answer.

        A look or a commit may have ended there after its caller was gone.
        """
        answer = await within(timeout_s, order)
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.weight_version != self._engine(replica).weight_version:
            self._fleet.forget_version(replica)
        return answer

    def _engine(self, replica: ReplicaRecord) -> EngineControl:
        return self._connect(replica.url)
