"""Turnstile: however many requests arrive at once, the event loop begins a few in each of its rounds.

Reading a request and making its prompt is a millisecond of work without a pause. A thousand that begin in one round
would hold up every stream and every answer for that long; here what is under way goes on in between.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets `width` tasks through in each round of the event loop, first come, first served."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._num_passed = 0  # in this round
        self._is_counting = False  # a next round is scheduled
        self._waiting: deque[asyncio.Future[None]] = deque()  # open requests; bounded by the connections

    async def enter(self) -> None:
        """Wait for a place in a round."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin_round, loop)
        if self._num_passed < self._width:
            self._num_passed += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_passed = 0
        while self._waiting and self._num_passed < self._width:
            place = self._waiting.popleft()
            if not place.done():  # its request has been given up
                place.set_result(None)
                self._num_passed += 1
        self._is_counting = self._num_passed > 0
        if self._is_counting:
            loop.call_soon(self._begin_round, loop)
