"""One step on many replicas at once, each with a deadline, each failure kept beside its replica.

Ownership: a `ReplicaProgress` belongs to the procedure that made it; the first failure ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentloop.api import ReplicaUpdate
from agentloop.engine import CommitReport, StageReport
from agentloop.errors import AgentLoopError, InvariantBroken
from agentloop.fleet.registry import ReplicaRecord

T = TypeVar("T")


@dataclass(slots=True)
class ReplicaProgress:
    """One replica in a procedure. `error` is set once a step failed on it; `failure` says with what."""

    replica: ReplicaRecord
    stage_s: float = 0.0
    staged: StageReport | None = None
    committed: CommitReport | None = None
    paused_at: float | None = None
    stall_s: float = 0.0
    failure: Exception | None = None
    error: str | None = None

    def end_stall(self, now: float) -> None:
        """Record that sampling goes on, or never will: the first call counts."""
        if self.paused_at is not None and self.stall_s == 0.0:
            self.stall_s = now - self.paused_at

    def report(self) -> ReplicaUpdate:
        """Return what the update meant for it. In one phase the commit transferred, else the stage did."""
        staged, committed = self.staged, self.committed or CommitReport()
        return ReplicaUpdate(
            replica_id=self.replica.replica_id,
            stage_ms=self.stage_s * 1000.0,
            stall_ms=self.stall_s * 1000.0,
            error=self.error,
            held_in=None if staged is None else staged.held_in,
            transport=None if staged is None else staged.transport,
            num_bytes=0 if staged is None else staged.num_bytes,
            transfer_ms=committed.transfer_ms + (0.0 if staged is None else staged.transfer_ms),
            swap_ms=committed.swap_ms,
            verify_ms=committed.verify_ms,
            num_verified=committed.num_verified,
        )


async def on_all(
    progress: Sequence[ReplicaProgress],
    verb: str,
    step: Callable[[ReplicaProgress], Awaitable[None]],
    timeout_s: float,
) -> None:
    """Take one step on all replicas at once. Raises InvariantBroken only."""

    async def on_one(one: ReplicaProgress) -> None:
        try:
            await within(timeout_s, step(one))
        except InvariantBroken:
            raise
        except Exception as failure:  # whatever went wrong there, the others must get through
            one.failure = failure
            one.error = f"{verb}: {_text(failure, timeout_s)}"

    async with asyncio.TaskGroup() as group:
        for one in progress:
            group.create_task(on_one(one), name=f"{verb} {one.replica.replica_id}")


async def within(timeout_s: float, call: Awaitable[T]) -> T:
    """Await a call under a deadline. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await call


def unfailed(progress: Sequence[ReplicaProgress]) -> list[ReplicaProgress]:
    """Return those on which no step has failed."""
    return [one for one in progress if one.error is None]


def failures(progress: Sequence[ReplicaProgress]) -> str:
    """Name the replicas and their errors in one line."""
    return "; ".join(f"{one.replica.replica_id}: {one.error}" for one in progress)


def _text(failure: Exception, timeout_s: float) -> str:
    if isinstance(failure, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return failure.message if isinstance(failure, AgentLoopError) else f"{type(failure).__name__}: {failure}"
