"""A few begin in each round of the event loop, in the order they came."""

from __future__ import annotations

import asyncio

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
    found = await rounds_of(TickLimiter(3), 20)
    assert found == sorted(found)
    assert all(found.count(number) <= 3 for number in found[3:])
    assert found[-1] - found[0] <= 20 // 3 + 2


async def test_those_that_fit_do_not_wait():
    limiter = TickLimiter(3)
    for _ in range(5):
        async with asyncio.timeout(5):
            for _ in range(3):
                await limiter.enter()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_who_gave_up_takes_no_place():
    limiter = TickLimiter(1)
    await limiter.enter()
    waiting = [asyncio.create_task(limiter.enter()) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(waiting[0], *waiting[2:])
    assert waiting[1].cancelled()


async def test_it_rests_when_nobody_comes():
    limiter = TickLimiter(2)
    await limiter.enter()
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await rounds_of(limiter, 10)
