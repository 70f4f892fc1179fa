"""A follower of a store: the conditions under which it updates the fleet, and its status otherwise."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from agentloop.engine.interface import PublishedSource, WeightUpdate
from agentloop.errors import ChecksumMismatch, InvariantBroken, StoreUnreachable
from agentloop.fleet.store_follower import MAX_BACKOFF_S, FollowedStore, StoreFollower

SOURCE = PublishedSource("/store", "run-1")


class Site:
    """A store and a fleet: their versions, and the updates that were requested of the fleet."""

    def __init__(self, poll_s: float = 5.0) -> None:
        self.latest: int | Exception = 0
        self.served: int | None = 0
        self.is_asleep = False
        self.failure: Exception | None = None
        self.asked: list[int] = []
        self.saved: WeightUpdate | None = None
        self._poll_s = poll_s
        self.begin_anew()

    def begin_anew(self, source: PublishedSource = SOURCE) -> None:
        """Start as a new coordinator that follows `source`."""
        store, log = FollowedStore(source, self._read, self._poll_s), structlog.get_logger()
        is_asleep = lambda: self.is_asleep  # noqa: E731
        self.follower = StoreFollower(store, lambda: self.served, is_asleep, self._update, self._save, log)
        self.follower.restore(self.saved)

    async def _read(self) -> int:
        if isinstance(self.latest, Exception):
            raise self.latest
        return self.latest

    async def _save(self, followed: WeightUpdate) -> None:
        self.saved = followed

    async def _update(self, update: WeightUpdate) -> None:
        assert update.published is not None
        self.asked.append(update.version)
        if self.failure is not None:
            raise self.failure
        self.served = update.version


async def test_it_follows_the_pointer_forward_and_says_that_it_went_back() -> None:
    site = Site()
    site.latest = 3
    await site.follower.look()
    await site.follower.look()
    assert (site.asked, site.follower.status.error) == ([3], "")
    site.latest = 2
    await site.follower.look()
    assert site.follower.status.error.startswith("pointer_went_back")
    site.latest = 3
    site.served = 1  # the operator has rolled back manually
    await site.follower.look()
    assert (site.asked, site.follower.status.error) == ([3], ""), "which holds until the next version"
    site.begin_anew()
    await site.follower.look()
    assert site.asked == [3], "also for the next coordinator"
    site.begin_anew(PublishedSource("/store", "run-2"))
    await site.follower.look()
    assert site.asked == [3, 3], "but another run's version is another"


async def test_a_sleeping_fleet_is_left_asleep() -> None:
    site = Site()
    site.latest, site.is_asleep = 3, True
    await site.follower.look()
    assert (site.asked, site.follower.status.state) == ([], "asleep")
    site.is_asleep = False
    await site.follower.look()
    assert site.served == 3


async def test_a_version_that_fails_is_tried_ever_later_and_the_next_one_at_once() -> None:
    site = Site()
    site.latest, site.failure = 3, ChecksumMismatch("tensor w")
    waits = [await site.follower.look() for _ in range(6)]
    assert waits == [5.0, 10.0, 20.0, 40.0, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert site.follower.status.error == "checksum_mismatch: tensor w"
    site.latest, site.failure = 4, None
    assert await site.follower.look() == 5.0
    assert (site.served, site.follower.status.error) == (4, "")
    site.latest, site.failure = 5, ChecksumMismatch("tensor w")
    assert [await site.follower.look() for _ in range(2)] == [5.0, 10.0]
    site.served = 5  # through a push
    assert await site.follower.look() == 5.0, "no update fails any more"
    site.served = 4
    assert (await site.follower.look(), site.asked[-2:]) == (5.0, [5, 5]), "an older version by hand holds here too"
    site.latest = StoreUnreachable("no route")
    assert await site.follower.look() == 5.0, "a look costs nothing"
    assert site.follower.status.latest == 5


async def test_it_looks_when_it_is_woken_and_a_bug_ends_it() -> None:
    site = Site(poll_s=3600.0)
    running = asyncio.create_task(site.follower.run())
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
        site.latest = 3
        site.follower.wake()
        while site.served != 3:
            await asyncio.sleep(0)
        site.latest, site.failure = 4, InvariantBroken("a bug")
        site.follower.wake()
        with pytest.raises(InvariantBroken):
            await running
