"""Waking those who wait for a change of shared state.

Nothing is remembered: look at the state, and wait without an await in between. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio


class Wakeup:
    """Wakes everybody who waits now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, deadline_at: float) -> bool:
        """False: the loop time `deadline_at` came first."""
        return await is_set_by(self._event, deadline_at)


async def is_set_by(event: asyncio.Event, deadline_at: float) -> bool:
    """Wait for the event. False: the loop time `deadline_at` came first."""
    try:
        async with asyncio.timeout_at(deadline_at):
            await event.wait()
    except TimeoutError:
        return False
    return True


def deadline_after(wait_s: float, bound_s: float) -> float:
    """The loop time `wait_s` from now, or `bound_s` if that is sooner."""
    return asyncio.get_running_loop().time() + min(max(wait_s, 0.0), bound_s)
