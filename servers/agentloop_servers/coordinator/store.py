"""The store off the event loop: one thread for every call, and one transaction for all records waiting at a time.

Ownership: takes over the store and the executor; `close` ends both. The records that wait for a commit are as many
as there are callers waiting in `commit`, and no more: every caller waits for the disk before it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from agentloop.engine import PushSource, WeightUpdate
from agentloop.types import KVPolicy, RolloutGroup, Trajectory

T = TypeVar("T")

MAX_BATCH = 512  # records in one transaction


class Store(Protocol):
    """What the coordinator keeps its work in: `agentloop.storage.trajectory_store.TrajectoryStore`. Synchronous."""

    def accept(self, rollout_id: str, groups: Sequence[RolloutGroup]) -> None:
        """Record work as accepted; durable on return."""

    def commit(self, trajectories: Sequence[Trajectory]) -> int:
        """Record terminal records, durable on return; those known stay as they are. Returns how many were new."""

    def record(self, trajectory: Trajectory) -> bool:
        """Record a finished session, durable on return; whether it is new. Raises Conflict."""

    def holds_sessions(self, rollout_id: str) -> bool:
        """Whether a rollout consists of recorded sessions."""

    def read(self, rollout_id: str, after: int, limit: int) -> list[tuple[int, Trajectory]]:
        """Records after a cursor, in commit order, each with its cursor."""

    def counts(self, rollout_id: str) -> tuple[int, int]:
        """(accepted, finished) trajectories. Raises NotFound."""

    def unfinished(self) -> list[tuple[RolloutGroup, tuple[int, ...]]]:
        """Groups with the samples that lack a record."""

    def save_weights(self, update: WeightUpdate, kv_policy: KVPolicy) -> None:
        """Remember the update that the fleet serves; durable on return."""

    def saved_weights(self) -> tuple[WeightUpdate, KVPolicy] | None:
        """The last update saved, or None."""

    def close(self) -> None:
        """Let go of the file."""


class StoreThread:
    """The store for an event loop."""

    def __init__(self, store: Store, executor: Executor | None = None) -> None:
        """`executor` runs one call at a time; a thread of its own by default."""
        self._store = store
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._waiting: list[tuple[Trajectory, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def accept(self, rollout_id: str, groups: Sequence[RolloutGroup]) -> None:
        await self._call(lambda: self._store.accept(rollout_id, groups))

    async def record(self, trajectory: Trajectory) -> bool:
        """Raises Conflict."""
        return await self._call(lambda: self._store.record(trajectory))

    async def holds_sessions(self, rollout_id: str) -> bool:
        return await self._call(lambda: self._store.holds_sessions(rollout_id))

    async def read(self, rollout_id: str, after: int, limit: int) -> list[tuple[int, Trajectory]]:
        return await self._call(lambda: self._store.read(rollout_id, after, limit))

    async def counts(self, rollout_id: str) -> tuple[int, int]:
        """Raises NotFound."""
        return await self._call(lambda: self._store.counts(rollout_id))

    async def unfinished(self) -> list[tuple[RolloutGroup, tuple[int, ...]]]:
        return await self._call(self._store.unfinished)

    async def save_weights(self, update: WeightUpdate, kv_policy: KVPolicy) -> None:
        """Of a push only that it was one: its process and its secret are gone when somebody asks."""
        if update.push is not None:
            update = replace(update, push=PushSource((), "", ()))
        await self._call(lambda: self._store.save_weights(update, kv_policy))

    async def saved_weights(self) -> tuple[WeightUpdate, KVPolicy] | None:
        return await self._call(self._store.saved_weights)

    async def commit(self, trajectory: Trajectory) -> None:
        """Return once this record is durable; raises what the store raised for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory, done))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name="store-flush")
        await done

    async def commit_all(self, trajectories: Sequence[Trajectory]) -> None:
        """Return once all these are durable, in one transaction."""
        await self._call(lambda: self._store.commit(trajectories))

    async def close(self) -> None:
        """Finish what waits, then close the store. Call once."""
        if self._flusher is not None:
            await self._flusher
        await self._call(self._store.close)
        self._executor.shutdown()

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                await self._commit_batch(batch)
        finally:
            self._flusher = None

    async def _commit_batch(self, batch: list[tuple[Trajectory, asyncio.Future[None]]]) -> None:
        records = [trajectory for trajectory, _ in batch]
        try:
            await self._call(lambda: self._store.commit(records))
        except Exception as error:
            if len(batch) > 1:
                for one in batch:  # one bad record must not fail the others of its batch
                    await self._commit_batch([one])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        for _, done in batch:
            if not done.done():
                done.set_result(None)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
