"""The follower of a store of published versions: when its pointer moves, the fleet is updated.

It polls the pointer, and looks at once when it is woken: a notification that is lost only delays. After an update
that fails it looks ever later, up to a minute; the fleet serves on. A sleeping fleet is left asleep: its memory is
another process's. The version that the fleet was at is saved: one that an operator brings back to an older version
stays there until the next one is published, whatever restarts.

Ownership: one task of the coordinator; it decides on the fleet through `update` alone. `status` is what it says.
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
POINTER_TIMEOUT_S = 60.0  # of the pointer: libraries of stores try again by themselves


@dataclass(frozen=True, slots=True)
class FollowedStore:
    """A run's versions in a store."""

    source: PublishedSource
    read_latest: Callable[[], Awaitable[int]]
    poll_s: float = 5.0


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
        """`served`: the fleet's version. `update` brings it to another one, or raises an AgentLoopError.

        `save` keeps what was followed for `restore`.
        """
        self._store = store
        self._served = served
        self._is_asleep = is_asleep
        self._update = update
        self._save = save
        self._log = log
        self._woken = asyncio.Event()
        self._done: int | None = None  # the last version of the store that the fleet was at
        self._failures = (-1, 0)  # a version, and how often its update has failed
        self.status = StoreStatus()

    def restore(self, followed: WeightUpdate | None) -> None:
        """Take up what an earlier follower saved, if it followed the same run."""
        if followed is not None and followed.published == self._store.source:
            self._done = followed.version

    def wake(self) -> None:
        """Look at the pointer now."""
        self._woken.set()

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            self._woken.clear()
            wait_s = await self.look()
            await is_set_by(self._woken, deadline_after(wait_s))

    async def look(self) -> float:
        """Read the pointer once and follow it. Returns the seconds until the next look."""
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
            raise StoreUnreachable(f"no answer from the store within {POINTER_TIMEOUT_S:g} s") from error

    async def _follow(self, latest: int, before: StoreStatus) -> StoreStatus:
        served, update = self._served(), WeightUpdate(latest, published=self._store.source)
        newest = max(self._done or 0, served or 0)
        if latest < newest:
            raise PointerWentBack(f"the latest version is {latest}, after {newest}: a pointer moves forward only")
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
        """Return the pause after a failed update; a woken look comes before its end."""
        _, num = self._failures
        return min(self._store.poll_s * 2 ** (num - 1), MAX_BACKOFF_S) if num else 0.0
