"""The places of long bodies: who waits, who gets in, and what is given back."""

from __future__ import annotations

import asyncio

import pytest

from agentloop.errors import Overloaded
from agentloop_servers.http.bodies import LongBodies

FAR_S = 3600.0


def far() -> float:
    return asyncio.get_running_loop().time() + FAR_S


async def waiting(bodies: LongBodies, num_bytes: int) -> asyncio.Task:
    task = asyncio.create_task(bodies.admit(num_bytes, far()))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_those_that_fit_get_in_and_the_others_wait_in_their_order():
    bodies = LongBodies(100)
    first, second = [await bodies.admit(50, far()) for _ in range(2)]
    long, short = await waiting(bodies, 80), await waiting(bodies, 10)
    first()
    first()  # once is enough
    await asyncio.sleep(0)
    assert not long.done()
    assert not short.done()  # a short one does not overtake for ever
    second()
    (await long)()
    (await short)()
    (await bodies.admit(1000, far()))()  # one that is longer than all gets all
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
    held()  # the place is another's now,
    taken.cancel()  # who leaves before it knows
    await asyncio.gather(taken, return_exceptions=True)
    await bodies.admit(100, asyncio.get_running_loop().time() + 1.0)
