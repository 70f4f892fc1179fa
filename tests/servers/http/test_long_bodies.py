"""Slots for long bodies: waiting, admission and release."""

from __future__ import annotations

import asyncio

import pytest

from agentloop.errors import Overloaded
from agentloop_servers.http.bodies import LongBodies
from agentloop_servers.http.guard import HttpGuard, HttpLimits

FAR_S = 3600.0


def far() -> float:
    return asyncio.get_running_loop().time() + FAR_S


async def waiting(bodies: LongBodies, num_bytes: int, user: str = "") -> asyncio.Task:
    task = asyncio.create_task(bodies.admit(num_bytes, far(), user))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_those_that_fit_get_in_and_the_others_wait_in_their_order():
    bodies = LongBodies(100)
    first, second = [await bodies.admit(50, far()) for _ in range(2)]
    long, short = await waiting(bodies, 80), await waiting(bodies, 10)
    first()
    first()  # a repeated release has no effect
    await asyncio.sleep(0)
    assert not long.done()
    assert not short.done()  # a short body does not overtake forever
    second()
    (await long)()
    (await short)()
    (await bodies.admit(1000, far()))()  # a body longer than the total gets all of it
    await bodies.admit(100, far())


async def test_who_waits_too_long_is_told_so_and_who_leaves_keeps_no_place():
    bodies = LongBodies(100)
    release = await bodies.admit(100, far())
    with pytest.raises(Overloaded, match="100 bytes"):
        await bodies.admit(1, asyncio.get_running_loop().time() + 0.01)
    gone, next_one = await waiting(bodies, 100), await waiting(bodies, 100)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    release()
    (await next_one)()
    late = await waiting(bodies, 100)
    (await late)()
    held = await bodies.admit(100, far())
    taken = await waiting(bodies, 100)
    held()  # its slot belongs to another body now
    taken.cancel()  # cancelled before it is notified
    await asyncio.gather(taken, return_exceptions=True)
    await bodies.admit(100, asyncio.get_running_loop().time() + 1.0)


async def test_one_users_bodies_leave_room_for_others():
    bodies = LongBodies(256)
    held = [await waiting(bodies, 32, "a") for _ in range(9)]
    assert [task.done() for task in held] == [True] * 4 + [False] * 5
    assert (await waiting(bodies, 1, "b")).done()
    assert [(await waiting(bodies, 32, user)).done() for user in "cd"] == [True, True]
    (await held[0])()
    await asyncio.sleep(0)
    # the others have taken more since: half of the rest fits 3 bodies
    assert sum(task.done() for task in held) == 4
    (await bodies.admit(60, far(), "e"))()


async def test_users_take_turns_and_a_long_body_is_not_overtaken():
    bodies = LongBodies(100)
    release = await bodies.admit(100, far(), "a")
    first, second = await waiting(bodies, 40, "a"), await waiting(bodies, 40, "a")
    other, long = await waiting(bodies, 40, "b"), await waiting(bodies, 90, "c")
    release()
    await asyncio.sleep(0)
    assert [task.done() for task in (first, second, other, long)] == [False, False, True, False]
    (await other)()
    (await long)()
    (await first)()
    (await second)()


async def test_a_long_body_that_dribbles_is_refused():
    loop, elapsed = asyncio.get_running_loop(), 0.0
    real = loop.time
    loop.time = lambda: real() + elapsed  # type: ignore[method-assign]
    statuses = []

    async def receive():
        nonlocal elapsed
        elapsed += 1.0  # a kilobyte per second
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(1024), "more_body": True}

    async def send(message):
        statuses.append(message.get("status"))

    async def app(scope, receive, send):
        while True:
            await receive()

    length = str(1 << 20).encode()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", length)]}
    try:
        await HttpGuard(app, HttpLimits())(scope, receive, send)
    finally:
        del loop.time  # type: ignore[method-assign]
    assert statuses[0] == 408
    assert elapsed < 8
