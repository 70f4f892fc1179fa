"""A few begin in each round of the event loop, in the order they came."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentloop_servers.http.guard import TickLimiter


async def rounds_of(limiter: TickLimiter, num_tasks: int) -> list[int]:
    """The round in which each task got through."""
    num_rounds, passed_in = 0, {}

    async def count() -> None:
        nonlocal num_rounds
        while len(passed_in) < num_tasks:
            num_rounds += 1
            await asyncio.sleep(0)

    async def enter(index: int) -> None:
        await limiter.enter()
        passed_in[index] = num_rounds

    async with asyncio.TaskGroup() as group:
        for index in range(num_tasks):
            group.create_task(enter(index))
        group.create_task(count())
    return [passed_in[index] for index in range(num_tasks)]


async def test_a_few_in_each_round_in_the_order_they_came():
    found = await rounds_of(TickLimiter(3, share=0.0), 20)
    assert found == sorted(found)
    assert all(found.count(number) <= 3 for number in found[3:])
    assert found[-1] - found[0] <= 20 // 3 + 2


async def test_those_that_fit_do_not_wait():
    limiter = TickLimiter(3, share=0.0)
    for _ in range(5):
        async with asyncio.timeout(5):
            for _ in range(3):
                await limiter.enter()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_who_gave_up_takes_no_place():
    limiter = TickLimiter(1, share=0.0)
    await limiter.enter()
    waiting = [asyncio.create_task(limiter.enter()) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(waiting[0], *waiting[2:])
    assert waiting[1].cancelled()


async def test_it_rests_when_nobody_comes():
    limiter = TickLimiter(2, share=0.0)
    await limiter.enter()
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await rounds_of(limiter, 10)


async def test_long_rounds_begin_their_share_and_no_more():
    """Streams that keep the event loop busy must not starve those that begin: half of its time is theirs."""
    loop, clock = asyncio.get_running_loop(), Clock()
    limiter = TickLimiter(4, seconds_each=0.001, share=0.5)
    with clock.of(loop):
        waiting = [asyncio.create_task(clock.work(limiter, 0.001)) for _ in range(512)]
        num_rounds, most_at_once = 0, 0
        while not all(task.done() for task in waiting):
            before = clock.num_done
            clock.now += 0.1  # what is under way
            await asyncio.sleep(0)
            num_rounds, most_at_once = num_rounds + 1, max(most_at_once, clock.num_done - before)
    assert clock.order == sorted(clock.order)
    assert num_rounds < 20  # with four in a round it would be 128 of them
    assert most_at_once <= 100  # a round of 0.1 s becomes one of 0.2 s at most


class Clock:
    """An event loop's time, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self.order: list[int] = []
        self._num_made = 0

    @contextmanager
    def of(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        real = loop.time
        loop.time = lambda: self.now  # type: ignore[method-assign]
        try:
            yield
        finally:
            loop.time = real  # type: ignore[method-assign]

    async def work(self, limiter: TickLimiter, seconds: float) -> None:
        number, self._num_made = self._num_made, self._num_made + 1
        await limiter.enter()
        self.now += seconds
        self.num_done += 1
        self.order.append(number)


async def test_users_take_turns_whatever_the_crowd_of_one():
    limiter, order = TickLimiter(1, share=0.0), list[str]()

    async def begin(user: str) -> None:
        await limiter.enter(user)
        order.append(user)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for user in ["a"] * 300 + ["b"] * 3:
            group.create_task(begin(user))
    assert order[:300].count("b") == 3
    assert max(index for index, user in enumerate(order) if user == "b") < 12


@pytest.mark.parametrize("num_alone", [0, 300])
async def test_a_crowd_leaves_another_user_the_event_loop(num_alone: int):
    """Each call is ten rounds of the loop, and 2 ms of its time. B's takes 3 times as long as alone, at most."""
    loop, clock = asyncio.get_running_loop(), Clock()
    busy_s, took = 0.0, list[float]()
    limiter = TickLimiter(4, cpu_s=lambda: busy_s)

    async def call(user: str) -> None:
        nonlocal busy_s
        began = clock.now
        await limiter.enter(user)
        for _ in range(10):
            await asyncio.sleep(0)
            clock.now += 0.0002
            busy_s += 0.0002
        if user == "b":
            took.append(clock.now - began)

    async def crowd() -> None:
        while len(took) < 60:
            await call("a")
            await asyncio.sleep(0)

    async def pass_time() -> None:
        while len(took) < 60:  # the loop would sleep until its next timer
            await asyncio.sleep(0)
            clock.now += 0.00005

    with clock.of(loop):
        others = [asyncio.create_task(crowd()) for _ in range(num_alone)]
        others.append(asyncio.create_task(pass_time()))
        while len(took) < 60:
            await call("b")
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    assert sorted(took)[30] <= 3 * (0.002 + 10 * 0.00005)
