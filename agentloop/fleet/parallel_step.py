"""One step on many replicas at once, each with a deadline, each failure kept beside its replica.

Once other replicas are through a step, it waits for stragglers a grace of seconds only: a later replica has failed.

Ownership: a `ReplicaProgress` belongs to the procedure that made it; the first failure ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentloop.api.coordinator import ReplicaUpdate
from agentloop.engine.interface import CommitReport, StageReport
from agentloop.errors import AgentLoopError, InvariantBroken
from agentloop.fleet.registry import ReplicaRecord

T = TypeVar("T")


@dataclass(slots=True)
class ReplicaProgress:
    """One replica in a procedure. `failure` is the exception of the step that failed, `error` its text."""

    replica: ReplicaRecord
    verb: str = ""  # the step under way
    stage_s: float = 0.0
    staged: StageReport | None = None
    committed: CommitReport | None = None
    paused_at: float | None = None
    paused_after_s: float = 0.0  # since the update began
    stall_s: float = 0.0
    look_s: float = 0.0
    failure: Exception | None = None
    error: str | None = None

    def end_stall(self, now: float) -> None:
        """Set `stall_s`, at the resume or at the failure: the first call counts."""
        if self.paused_at is not None:
            self.stall_s, self.paused_at = now - self.paused_at, None

    def report(self) -> ReplicaUpdate:
        """Make the replica's part of the update's report. In one phase the commit transferred, else the stage."""
        staged, committed = self.staged, self.committed or CommitReport()
        return ReplicaUpdate(
            replica_id=self.replica.replica_id,
            stage_ms=self.stage_s * 1000.0,
            stall_ms=self.stall_s * 1000.0,
            look_ms=self.look_s * 1000.0,
            paused_at_ms=self.paused_after_s * 1000.0,
            error=self.error,
            held_in=None if staged is None else staged.held_in,
            transport=None if staged is None else staged.transport,
            num_bytes=0 if staged is None else staged.num_bytes,
            transfer_ms=committed.transfer_ms + (0.0 if staged is None else staged.transfer_ms),
            swap_ms=committed.swap_ms,
            verify_ms=committed.verify_ms,
            num_verified=committed.num_verified,
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The deadline of one step on one replica, and the earlier one of stragglers.

    Once a `share` of the replicas is through, and one at least, stragglers have `grace_s` plus `slowness` times the
    slowest one's time.
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
    """Take one step on all replicas at once; `on_failed` is called for each replica that fails.

    Without `limits` only the step's own deadlines hold, for stragglers too. Raises InvariantBroken only.
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
        except Exception as failure:  # whatever went wrong there, the others must get through
            num_failed += 1
            one.failure = failure
            one.error = f"{one.verb}: {_text(failure)}"
            if limits is not None and deadline.expired():
                is_late = replica_id in late
                waited = f"{limits.grace_s:g} s after the others" if is_late else f"within {limits.timeout_s:g} s"
                one.error = f"{one.verb}: no answer {waited}"
            waiting.pop(replica_id, None)
            on_failed(one)

    async with asyncio.TaskGroup() as group:
        for one in progress:
            group.create_task(on_one(one), name=f"{verb} {one.replica.replica_id}")


async def within(timeout_s: float, call: Awaitable[T]) -> T:
    """Await a call under a deadline. Raises TimeoutError, whose text has the seconds."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await call
    except TimeoutError as error:
        if deadline.expired():
            raise TimeoutError(f"no answer within {timeout_s:g} s") from error
        raise


def unfailed(progress: Sequence[ReplicaProgress]) -> list[ReplicaProgress]:
    """Return the replicas on which no step has failed."""
    return [one for one in progress if one.error is None]


def failures(progress: Sequence[ReplicaProgress]) -> str:
    """List the replicas and their errors in one line."""
    return "; ".join(f"{one.replica.replica_id}: {one.error}" for one in progress)


def _text(failure: Exception) -> str:
    if isinstance(failure, TimeoutError):
        return str(failure) or "no answer"
    return failure.message if isinstance(failure, AgentLoopError) else f"{type(failure).__name__}: {failure}"
