"""A limited number of tasks starts per round of the event loop, in FIFO order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import pytest

from agentloop.concurrency.strides import Strides
from agentloop_servers.http.guard import TickLimiter


async def rounds_of(limiter: TickLimiter, num_tasks: int) -> list[int]:
    """Return the round in which each task started."""
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
        async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
        await asyncio.gather(waiting[0], *waiting[2:])
    assert waiting[1].cancelled()


async def test_it_rests_when_nobody_comes():
    limiter = TickLimiter(2, share=0.0)
    await limiter.enter()
    await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        await rounds_of(limiter, 10)


async def test_long_rounds_begin_their_share_and_no_more():
    """Streams that keep the event loop busy must not starve starting ones: half of its time is theirs."""
    loop, clock = asyncio.get_running_loop(), Clock()
    limiter = TickLimiter(4, seconds_each=0.001, share=0.5)
    with clock.of(loop):
        waiting = [asyncio.create_task(clock.work(limiter, 0.001)) for _ in range(512)]
        num_rounds, most_at_once = 0, 0
        while not all(task.done() for task in waiting):
            before = clock.num_done
            clock.now += 0.1  # the work in progress
            await asyncio.sleep(0)
            num_rounds, most_at_once = num_rounds + 1, max(most_at_once, clock.num_done - before)
    assert clock.order == sorted(clock.order)
    assert num_rounds < 20  # four per round would take 128 rounds
    assert most_at_once <= 100  # a round of 0.1 s becomes at most 0.2 s


class Clock:
    """An event loop's time, advanced manually."""

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


@dataclass
class Shares:
    """The duration of the users' calls, and the fraction of the time that the event loop had work."""

    took_s: dict[str, list[float]]
    wall_s: float
    busy_s: float

    @property
    def calls_per_s(self) -> float:
        return sum(map(len, self.took_s.values())) / self.wall_s


async def shares_of(agents: dict[str, int], wall_s: float = 2.0) -> Shares:
    """Run these agents' calls for some virtual seconds. A call takes ten rounds of the loop, 0.2 ms each."""
    loop, clock = asyncio.get_running_loop(), Clock()
    limiter, shares = TickLimiter(4), Shares({user: [] for user in agents}, wall_s, 0.0)

    async def call(user: str) -> None:
        began = clock.now
        await limiter.enter(user)
        for _ in range(10):
            await asyncio.sleep(0)
            clock.now += 0.0002
            shares.busy_s += 0.0002
        limiter.leave(user)
        shares.took_s[user].append(clock.now - began)

    async def talk(user: str) -> None:
        while clock.now < wall_s:
            await call(user)
            await asyncio.sleep(0)

    async def pass_time() -> None:
        while clock.now < wall_s:
            await asyncio.sleep(0)
            clock.now += 0.00001  # a round without work

    with clock.of(loop):
        async with asyncio.TaskGroup() as group:
            group.create_task(pass_time())
            for user, num_agents in agents.items():
                for _ in range(num_agents):
                    group.create_task(talk(user))
    return shares


async def test_two_users_reach_the_throughput_of_one():
    one, two = await shares_of({"a": 100}), await shares_of({"a": 50, "b": 50})
    assert two.calls_per_s >= 0.95 * one.calls_per_s
    a, b = (len(two.took_s[user]) for user in "ab")
    assert abs(a - b) <= 0.1 * (a + b)


@pytest.mark.parametrize("num_agents", [1, 3])
async def test_a_crowd_leaves_another_user_the_event_loop(num_agents: int):
    """A's load at most triples B's median, A gets half of the turns, and the event loop stays busy."""
    alone, one = await shares_of({"b": num_agents}), await shares_of({"a": 300})
    both = await shares_of({"a": 300, "b": num_agents})
    assert median(both.took_s["b"]) <= 3 * median(alone.took_s["b"])
    assert len(both.took_s["a"]) >= 0.45 * sum(map(len, both.took_s.values()))
    assert both.busy_s >= 0.9 * both.wall_s
    assert both.calls_per_s >= 0.9 * one.calls_per_s


async def test_a_probe_without_a_key_holds_nobody_back():
    one, probed = await shares_of({"a": 100}), await shares_of({"a": 100, "": 1})
    assert len(probed.took_s["a"]) >= 0.95 * len(one.took_s["a"])


def test_users_that_are_idle_cost_no_memory():
    class Counted(Strides):
        def num_users(self) -> int:
            return len(self._passes)

    strides = Counted()
    for index in range(100_000):
        strides.took(f"user {index}")
        strides.took("busy")
    assert strides.num_users() <= 64
