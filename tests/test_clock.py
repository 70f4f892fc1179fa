"""Virtual time: it jumps when the loop is idle, only then, and always in the same order."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentloop.concurrency.clock import Clock, RealClock, VirtualClock


def test_an_hour_passes_at_once() -> None:
    clock = VirtualClock()

    async def main() -> float:
        await clock.sleep(3600)
        return clock.now()

    started_s = time.monotonic()
    assert clock.run(main()) == pytest.approx(3600)
    assert time.monotonic() - started_s < 5


def test_time_stands_while_a_task_can_run() -> None:
    clock = VirtualClock()

    async def busy() -> float:
        for _ in range(1000):
            await clock.sleep(0)
        return clock.now()

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(clock.sleep(5))
            moment = group.create_task(busy())
        return moment.result()

    assert clock.run(main()) == 0.0


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = VirtualClock()
    woken: list[tuple[float, str]] = []

    async def sleeper(name: str, *delays_s: float) -> None:
        for delay_s in delays_s:
            await clock.sleep(delay_s)
            woken.append((clock.now(), name))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("a", 3.0, 3.0))
            group.create_task(sleeper("b", 1.0, 1.0, 5.0))

    clock.run(main())
    assert woken == [(1.0, "b"), (2.0, "b"), (3.0, "a"), (6.0, "a"), (7.0, "b")]


def test_asyncio_deadlines_follow_virtual_time() -> None:
    clock = VirtualClock()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return clock.now()

    assert clock.run(main()) == pytest.approx(60)


def test_a_deadlock_raises_instead_of_hanging() -> None:
    clock = VirtualClock()

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer is set"):
        clock.run(main())


def test_time_goes_on_over_runs_and_by_hand() -> None:
    clock = VirtualClock()
    clock.run(clock.sleep(2.0))
    clock.advance(3.0)
    clock.run(clock.sleep(2.0))
    assert clock.now() == pytest.approx(7.0)


async def test_a_virtual_sleep_outside_its_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="inside its own run"):
        await VirtualClock().sleep(1.0)


async def test_the_real_clock_sleeps_at_least_as_long_as_asked() -> None:
    clock: Clock = RealClock()
    started_s = clock.now()
    await clock.sleep(0.02)
    assert clock.now() - started_s >= 0.019


def test_deadlines_a_rounding_error_away_are_reached() -> None:
    clock = VirtualClock()

    async def wait(num_steps: int) -> int:
        deadline_at, num_rounds = clock.now() + 3e-15, 0
        for _ in range(num_steps):
            await clock.sleep(0)
        while clock.now() < deadline_at and num_rounds < 100:
            num_rounds += 1
            await clock.sleep(deadline_at - clock.now())
        return num_rounds

    async def main() -> list[int]:
        await clock.sleep(5.9)
        return await asyncio.gather(wait(0), wait(1))

    assert clock.run(main()) == [1, 1]
