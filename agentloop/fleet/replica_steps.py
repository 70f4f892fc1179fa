"""The steps that change one replica (stage, pause, commit, wake, resume, sleep), and their parallel execution.

Every step raises TimeoutError after its deadline, and the engine's errors. `ReplicaSync` owns the one
`ReplicaSteps`; no other code calls these methods of an engine. Callers take the replica out of traffic before a
step, and back after it. A replica's version is None from the start of a commit (or of a level-2 sleep) until the
next successful commit, and whenever its engine reports a different version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from agentloop.api.coordinator import ReplicaUpdate
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
from agentloop.errors import AgentLoopError, EngineLost, InvariantBroken, error_line
from agentloop.fleet.desired_state import StandingOrders
from agentloop.fleet.registry import Fleet, ReplicaRecord
from agentloop.types import KVPolicy, PauseMode

T = TypeVar("T")


@dataclass(slots=True)
class ReplicaProgress:
    """The progress of one replica in a procedure. `failure` is the failed step's exception, `error` its text."""

    replica: ReplicaRecord
    verb: str = ""  # the current step
    stage_s: float = 0.0
    staged: StageReport | None = None
    committed: CommitReport | None = None
    paused_at: float | None = None
    paused_after_s: float = 0.0  # since the start of the update
    stall_s: float = 0.0
    canary_s: float = 0.0
    failure: Exception | None = None
    error: str | None = None

    def end_stall(self, now: float) -> None:
        """Set `stall_s` at the resume or at the failure. Only the first call has an effect."""
        if self.paused_at is not None:
            self.stall_s, self.paused_at = now - self.paused_at, None

    def report(self) -> ReplicaUpdate:
        """Make the replica's part of the update report. In a blocking update the commit has the transfer time."""
        staged, committed = self.staged, self.committed or CommitReport()
        return ReplicaUpdate(
            replica_id=self.replica.replica_id,
            stage_ms=self.stage_s * 1000.0,
            stall_ms=self.stall_s * 1000.0,
            canary_ms=self.canary_s * 1000.0,
            paused_at_ms=self.paused_after_s * 1000.0,
            error=self.error,
            staging_device=None if staged is None else staged.staging_device,
            transport=None if staged is None else staged.transport,
            num_bytes=0 if staged is None else staged.num_bytes,
            transfer_ms=committed.transfer_ms + (0.0 if staged is None else staged.transfer_ms),
            swap_ms=committed.swap_ms,
            verify_ms=committed.verify_ms,
            num_verified=committed.num_verified,
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The deadline of one step on one replica, and the shorter deadline of stragglers.

    It starts once a `share` of the replicas, and at least one, has completed the step. Stragglers then have
    `grace_s`, and in addition `slowness` times the duration of the slowest replica so far.
    """

    timeout_s: float
    grace_s: float
    share: float = 0.0
    slowness: float = 0.0


async def on_all(
    progress: Sequence[ReplicaProgress],
    verb: str,
    step: Callable[[ReplicaProgress], Awaitable[None]],
    limits: StepLimits | None = None,
    on_failed: Callable[[ReplicaProgress], None] = lambda one: None,
) -> None:
    """Run one step on all replicas in parallel. `on_failed` is called for each replica that fails.

    Without `limits` only the step's own deadlines apply. Raises nothing but InvariantBroken.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    waiting: dict[str, asyncio.Timeout] = {}
    late: set[str] = set()
    num_through = num_failed = 0

    def hurry() -> None:
        if limits is None or num_through < max(1.0, limits.share * (len(progress) - num_failed)):
            return
        now = loop.time()
        give_up_at = now + limits.grace_s + limits.slowness * (now - started_at)
        for replica_id, deadline in waiting.items():
            if give_up_at < started_at + limits.timeout_s and not deadline.expired():
                deadline.reschedule(give_up_at)
                late.add(replica_id)

    async def on_one(one: ReplicaProgress) -> None:
        nonlocal num_through, num_failed
        one.verb, replica_id = verb, one.replica.replica_id
        try:
            async with asyncio.timeout_at(None if limits is None else started_at + limits.timeout_s) as deadline:
                waiting[replica_id] = deadline
                await step(one)
            num_through += 1
            del waiting[replica_id]
            hurry()
        except InvariantBroken:
            raise
        except Exception as failure:  # a failure must not end the step on other replicas
            num_failed += 1
            one.failure = failure
            one.error = f"{one.verb}: {_text(failure)}"
            if limits is not None and deadline.expired():
                is_late = replica_id in late
                waited = (
                    f"within {limits.grace_s:g} s of the other replicas"
                    if is_late
                    else f"within {limits.timeout_s:g} s"
                )
                one.error = f"{one.verb}: no answer {waited}"
            waiting.pop(replica_id, None)
            on_failed(one)

    async with asyncio.TaskGroup() as group:
        for one in progress:
            group.create_task(on_one(one), name=f"{verb} {one.replica.replica_id}")


async def within(timeout_s: float, call: Awaitable[T]) -> T:
    """Await a call with a timeout. Raises TimeoutError with the seconds in its text."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await call
    except TimeoutError as error:
        if deadline.expired():
            raise TimeoutError(f"no answer within {timeout_s:g} s") from error
        raise


def unfailed(progress: Sequence[ReplicaProgress]) -> list[ReplicaProgress]:
    """Return the replicas without a failed step."""
    return [one for one in progress if one.error is None]


def failures(progress: Sequence[ReplicaProgress]) -> str:
    """Return the replicas and their errors in one line."""
    return "; ".join(f"{one.replica.replica_id}: {one.error}" for one in progress)


def _text(failure: Exception) -> str:
    if isinstance(failure, TimeoutError):
        return str(failure) or "no answer"
    return failure.message if isinstance(failure, AgentLoopError) else f"{type(failure).__name__}: {failure}"


Connect = Callable[[str], EngineControl]

_ANSWER_S = 1.0  # in addition to the grace of a drain

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """The timeouts of the steps on one replica, and the retries of late replicas."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0  # a blocking update transfers in the commit
    resume_timeout_s: float = 60.0
    straggler_grace_s: float = 10.0  # after the other replicas have completed the step
    exact_grace_s: float = 5.0  # for requests that do not accept the new version; stragglers have no more time
    sleep_timeout_s: float = 120.0
    wake_timeout_s: float = 120.0
    offer_timeout_s: float = 30.0
    save_timeout_s: float = 5.0  # for storing an order; the fleet follows it even if the store fails
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT lets requests finish
    settle_s: float = 5.0  # after a restart during an update: the time for replicas to report their version
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    catch_up_pause_s: float = 60.0  # between two rounds of attempts
    turn_wait_s: float = 120.0  # how long an update waits while another model uses the accelerators
    num_reports: int = 16

    @property
    def switch_timeout_s(self) -> float:
        """The longest time between the pause and the resume of a replica."""
        return self.pause_timeout_s + self.commit_timeout_s + self.wake_timeout_s + self.resume_timeout_s

    @property
    def update_timeout_s(self) -> float:
        """The longest duration of an update: of a sleeping fleet, with the full timeout in each step."""
        return (
            self.turn_wait_s
            + self.wake_timeout_s
            + self.stage_timeout_s
            + self.switch_timeout_s
            + 2 * self.save_timeout_s
        )


class ReplicaSteps:
    """The steps on a replica's engine, each with its timeout. `connect` returns the engine at a URL."""

    def __init__(self, fleet: Fleet, connect: Connect, config: WeightConfig) -> None:
        self._fleet = fleet
        self._connect = connect
        self.config = config

    async def stage(
        self, replica: ReplicaRecord, update: WeightUpdate, timeout_s: float | None = None
    ) -> StageReport:
        """Receive and verify the weights of an update while the engine decodes."""
        timeout_s = self.config.stage_timeout_s if timeout_s is None else timeout_s
        return await within(timeout_s, self._engine(replica).stage(update))

    async def digest_of(self, replica: ReplicaRecord, update: WeightUpdate) -> str:
        """Stage an update and return the digest of its weights; empty if the replica does not answer."""
        try:
            return (await self.stage(replica, update)).digest
        except (EngineLost, ConnectionError, TimeoutError) as error:
            _log.warning("weights_not_compared", replica=replica.replica_id, error=error_line(error))
            return ""

    async def follow_trainer(self, replica: ReplicaRecord, order: TrainerOrder) -> None:
        """Send a trainer's order: join a group, receive a part, leave the group, or prepare a version on its
        host."""
        timeout_s = self.config.offer_timeout_s if isinstance(order, LeaveGroup) else self.config.stage_timeout_s
        await within(timeout_s, self._engine(replica).follow_trainer(order))

    async def load_adapter(self, replica: ReplicaRecord, adapter: Adapter) -> StageReport:
        """Load a version of an adapter. Calls that start later use it."""
        return await within(self.config.stage_timeout_s, self._engine(replica).load_adapter(adapter))

    async def unload_adapter(self, replica: ReplicaRecord, name: str) -> None:
        """Unload an adapter."""
        await within(self.config.offer_timeout_s, self._engine(replica).unload_adapter(name))

    async def drain_pinned(self, replica: ReplicaRecord, version: int) -> None:
        """Wait until the requests that do not accept the next version have finished.

        Errors are ignored: a replica that does not answer fails in the next step.
        """
        grace_s = self.config.exact_grace_s
        with suppress(AgentLoopError, TimeoutError, ConnectionError):
            await within(grace_s + _ANSWER_S, self._engine(replica).drain_pinned(version, grace_s))

    async def pause_for_commit(self, replica: ReplicaRecord, kv_policy: KVPolicy) -> None:
        """Freeze the requests in flight, for the commit that follows."""
        await within(self.config.pause_timeout_s, self._engine(replica).pause(PauseMode.KEEP, kv_policy))

    async def commit(self, replica: ReplicaRecord, version: int, *, resumes: bool = False) -> CommitReport:
        """Swap in the staged weights, and end the pause if `resumes`. The version is None until this succeeds."""
        engine, timeout_s = self._engine(replica), self.config.commit_timeout_s
        self._fleet.forget_version(replica)
        if resumes:
            timeout_s += self.config.resume_timeout_s
        try:
            report = await within(timeout_s, engine.commit(version, resumes=resumes))
        except (EngineLost, ConnectionError):
            if not resumes:
                raise
            # The commit may have succeeded although its answer was lost, and the replica may sample: freeze it to
            # find out.
            await self.pause_for_commit(replica, KVPolicy.KEEP)
            if engine.weight_version != version:
                raise
            report = CommitReport(canary_ms=1e3 * await within(self.config.resume_timeout_s, engine.resume()))
        self._fleet.committed(replica, version)
        return report

    async def wake(self, replica: ReplicaRecord, tags: frozenset[MemoryTag]) -> None:
        """Allocate the memory of `tags` again; no-op for an engine that cannot sleep.

        While the replica's weight version is unknown, its KV cache stays released.
        """
        now = self._fleet.get(replica.replica_id)
        if now is None or now.weight_version is None:
            tags = tags - {MemoryTag.KV_CACHE}
        if tags and replica.registration.info.can_sleep:
            await self._order(replica, self.config.wake_timeout_s, self._engine(replica).wake(tags))

    async def resume(self, replica: ReplicaRecord) -> float:
        """End a pause. Returns the seconds of the canary check; 0 if no commit came before."""
        return await self._order(replica, self.config.resume_timeout_s, self._engine(replica).resume())

    async def pause_for_operator(self, replica: ReplicaRecord, mode: PauseMode) -> None:
        """Pause the engine in the mode that the operator ordered."""
        await self._order(replica, self.config.operator_pause_timeout_s, self._engine(replica).pause(mode))

    async def sleep(self, replica: ReplicaRecord, orders: StandingOrders) -> None:
        """Release only the memory that is asleep in `orders`: a running update may stage into the rest."""
        if orders.sleep_level == 2:
            self._fleet.forget_version(replica)
        await self._order(replica, self.config.sleep_timeout_s, self._engine(replica).sleep(orders.sleep_level))
        await self.wake(replica, ALL_MEMORY - orders.asleep)

    async def offer(self, replica: ReplicaRecord) -> PushSource | None:
        """Return a peer source that sends the replica's weights; None if its engine cannot send them."""
        return await within(self.config.offer_timeout_s, self._engine(replica).offer())

    async def _order(self, replica: ReplicaRecord, timeout_s: float, order: Awaitable[T]) -> T:
        """Await an order. Sets the replica's version to None if the engine's version differs afterwards.

        A canary check or commit may have ended on the engine after its caller had left.
        """
        answer = await within(timeout_s, order)
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.weight_version != self._engine(replica).weight_version:
            self._fleet.forget_version(replica)
        return answer

    def _engine(self, replica: ReplicaRecord) -> EngineControl:
        return self._connect(replica.url)
