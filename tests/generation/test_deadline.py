"""Movable deadlines: the time at which they end their task, and the cost of their timer."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from agentloop.concurrency.clock import VirtualClock
from agentloop.generation.deadline import Deadline

Test = Callable[[VirtualClock], Coroutine[None, None, None]]


def virtually(test: Test) -> Callable[[], None]:
    def run() -> None:
        clock = VirtualClock()
        clock.run(test(clock))

    run.__name__ = test.__name__
    return run


async def ended_at(clock: VirtualClock, deadline: Deadline, work: Coroutine[None, None, None]) -> float:
    with pytest.raises(TimeoutError):
        async with deadline:
            await work
    assert deadline.has_ended_task
    return clock.now()


@virtually
async def test_it_ends_the_task_when_it_comes(clock: VirtualClock) -> None:
    deadline = Deadline.moving(10.0, 3600.0)
    assert await ended_at(clock, deadline, asyncio.sleep(99.0)) == deadline.enforced_at == 10.0


@virtually
async def test_a_grace_puts_its_enforcement_off_for_as_long_as_it_lasts(clock: VirtualClock) -> None:
    async def work(in_grace_s: float) -> None:
        with deadline.grace(20.0):
            await asyncio.sleep(in_grace_s)
        await asyncio.sleep(99.0)

    deadline = Deadline.moving(10.0, 3600.0)
    assert await ended_at(clock, deadline, work(5.0)) == 10.0
    deadline = Deadline.moving(10.0, 3600.0)
    assert await ended_at(clock, deadline, work(7.0)) - 10.0 == 10.0
    deadline = Deadline.moving(10.0, 3600.0)
    # The rest after the grace period is already late.
    assert await ended_at(clock, deadline, work(15.0)) - 20.0 == 15.0
    deadline = Deadline.moving(10.0, 3600.0)
    assert await ended_at(clock, deadline, work(99.0)) - 35.0 == 30.0


@virtually
async def test_time_that_stands_still_puts_it_off_up_to_a_bound(clock: VirtualClock) -> None:
    async def work(still_s: float) -> None:
        with deadline.standing_still():
            await asyncio.sleep(still_s)
        await asyncio.sleep(9999.0)

    deadline = Deadline.moving(10.0, 100.0)
    assert await ended_at(clock, deadline, work(60.0)) == 70.0
    deadline = Deadline.moving(10.0, 100.0)
    assert await ended_at(clock, deadline, work(9999.0)) - 70.0 == 110.0


@virtually
async def test_what_ends_in_time_leaves_no_timer(clock: VirtualClock) -> None:
    """A deadline that is postponed after its end, by a loop that ignores cancellation, leaves no timer either."""
    async with Deadline.moving(10.0, 3600.0) as deadline:
        await asyncio.sleep(1.0)
    with deadline.grace(20.0), deadline.standing_still():
        await asyncio.sleep(50.0)
    assert not deadline.has_ended_task
    late = Deadline.moving(10.0, 3600.0)
    await ended_at(clock, late, asyncio.sleep(99.0))
    with late.grace(20.0):
        await asyncio.sleep(50.0)
    assert late.enforced_at == 61.0


class CountingLoop:
    """An event loop that counts the timers set while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop, self.num_set = asyncio.get_running_loop(), 0
        call_at = loop.call_at

        def counted(*args: object, **named: object) -> asyncio.TimerHandle:
            self.num_set += 1
            return call_at(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_at", counted)


def test_a_turn_in_time_sets_no_timer_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Deadline.moving(1000.0, 3600.0) as deadline:
            counting = CountingLoop(monkeypatch)
            for _ in range(100):
                with deadline.grace(20.0):
                    await asyncio.sleep(0)
                with deadline.standing_still():
                    await asyncio.sleep(0)
            assert counting.num_set == 0

    asyncio.run(main())


def test_a_time_between_two_milliseconds_ends_the_task_on_uvloop() -> None:
    """The event loop of the service's processes rounds times, sometimes down to the present."""

    async def main() -> None:
        async with asyncio.timeout(60.0) as patience:
            with pytest.raises(TimeoutError):
                async with Deadline.moving(0.0054, 3600.0):
                    await asyncio.sleep(120.0)
        assert not patience.expired()

    uvloop.run(main())
