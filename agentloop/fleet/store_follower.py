"""Follows a store of published versions, and updates the fleet when the store's pointer moves.

The follower polls the pointer; `wake` polls at once, so a lost notification only delays an update. The followed
version is saved: if an operator rolls the fleet back, the older version stays until the next one is published,
even after a restart. One task of the coordinator runs it. It changes the fleet only through `update`, and reports
through `status`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import StoreStatus
from agentloop.concurrency.aio import deadline_after, is_set_by
from agentloop.engine.interface import PublishedSource, WeightUpdate
from agentloop.errors import AgentLoopError, InvariantBroken, PointerWentBack, StoreUnreachable

MAX_BACKOFF_S = 60.0
POINTER_TIMEOUT_S = 60.0  # store clients retry within this time


@dataclass(frozen=True, slots=True)
class FollowedStore:
    """The published versions of one run in a store."""

    source: PublishedSource
    read_latest: Callable[[], Awaitable[int]]
    poll_s: float = 5.0
    is_followed: bool = True  # False: a version is served only if an `UpdateJob` names it


class StoreFollower:
    """Keeps the fleet at the latest published version. Run `run` as a task."""

    def __init__(
        self,
        store: FollowedStore,
        served: Callable[[], int | None],
        is_asleep: Callable[[], bool],
        update: Callable[[WeightUpdate], Awaitable[object]],
        save: Callable[[WeightUpdate], Awaitable[None]],
        log: FilteringBoundLogger,
    ) -> None:
        """`served` returns the fleet's version. `update` updates the fleet, or raises an AgentLoopError.

        `save` stores the followed update for `restore`.
        """
        self._store = store
        self._served = served
        self._is_asleep = is_asleep
        self._update = update
        self._save = save
        self._log = log
        self._woken = asyncio.Event()
        self._done: int | None = None  # the last published version that the fleet reached
        self._failures = (-1, 0)  # a version and the number of its failed updates
        self.status = StoreStatus()

    def restore(self, followed: WeightUpdate | None) -> None:
        """Restore the followed version that an earlier follower saved, if it followed the same run."""
        if followed is not None and followed.published == self._store.source:
            self._done = followed.version

    def wake(self) -> None:
        """Poll the pointer now."""
        self._woken.set()

    async def run(self) -> None:
        """Poll forever."""
        while True:
            self._woken.clear()
            wait_s = await self.look()
            await is_set_by(self._woken, deadline_after(wait_s))

    async def look(self) -> float:
        """Poll the pointer once and update the fleet if it moved. Returns the seconds until the next poll."""
        before = self.status
        try:
            latest = await self._read()
            self.status = await self._follow(latest, before)
        except InvariantBroken:
            raise
        except AgentLoopError as error:
            self.status = StoreStatus(self.status.latest, "failed", f"{error.code}: {error.message}")
            if self.status.error != before.error:
                self._log.warning("store_not_followed", latest=self.status.latest, error=self.status.error)
        return max(self._store.poll_s, self._backoff_s())

    async def _read(self) -> int:
        try:
            async with asyncio.timeout(POINTER_TIMEOUT_S):
                return await self._store.read_latest()
        except TimeoutError as error:
            raise StoreUnreachable(
                f"the store of published weights {self._store.source} did not answer within {POINTER_TIMEOUT_S:g} s"
            ) from error

    async def _follow(self, latest: int, before: StoreStatus) -> StoreStatus:
        served, update = self._served(), WeightUpdate(latest, published=self._store.source)
        newest = max(self._done or 0, served or 0)
        if latest < newest:
            raise PointerWentBack(
                f"the store's pointer went back from version {newest} to {latest}: publish a newer version"
            )
        if latest not in (served, self._done):
            if self._is_asleep():
                return StoreStatus(latest, "asleep")
            self.status = StoreStatus(latest, "updating", before.error)
            try:
                await self._update(update)
            except AgentLoopError:
                version, num = self._failures
                self._failures = latest, num + 1 if version == latest else 1
                raise
        self._failures = (-1, 0)
        if latest != self._done:
            await self._save(update)
            self._done = latest
        return StoreStatus(latest)

    def _backoff_s(self) -> float:
        """Return the minimum pause after a failed update; `wake` ends it early."""
        _, num = self._failures
        return min(self._store.poll_s * 2 ** (num - 1), MAX_BACKOFF_S) if num else 0.0
