"""The parts of the desired state that reach the store, and their order."""

import asyncio

import pytest

from agentloop.fleet.desired_state import SavedValue


class SlowStore:
    """Writes in call order, including the writes whose caller has given up."""

    def __init__(self):
        self.value = None
        self.calls = []

    async def save(self, value):
        done = asyncio.get_running_loop().create_future()
        self.calls.append((value, done))
        await asyncio.shield(done)

    async def write_next(self):
        self.value, done = self.calls.pop(0)
        done.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_value_is_owed_until_no_other_can_come_after_it():
    store = SlowStore()
    saved = SavedValue("served", store.save)
    saved.owe("served")
    first = asyncio.create_task(saved.save_pending())
    await asyncio.sleep(0)
    saved.owe("pending")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await saved.save_pending()
    saved.owe("served")  # the intent is withdrawn while its write is in progress
    await store.write_next()
    await first
    await store.write_next()
    assert store.value == "pending"
    again = asyncio.create_task(saved.save_pending())
    await asyncio.sleep(0)
    await store.write_next()
    await again
    assert store.value == "served"
    await saved.save_pending()
    assert not store.calls  # nothing is pending any longer


async def test_what_the_store_refuses_stays_owed():
    values = []

    async def save(value):
        if not values:
            values.append("refused")
            raise OSError("no room")
        values.append(value)

    saved = SavedValue(0, save)
    await saved.save_pending()
    assert values == []  # nothing was pending
    saved.owe(1)
    with pytest.raises(OSError, match="no room"):
        await saved.save_pending()
    await saved.save_pending()
    assert values == ["refused", 1]
