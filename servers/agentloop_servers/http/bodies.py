"""Long bodies: how many bytes of them are read and parsed at once, and their memory, which goes back to the system.

Only bodies longer than `LONG_BODY_BYTES` count. Each has its whole length admitted before a byte of it is read, so
no two wait for each other; short ones never wait.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable

from agentloop.errors import Overloaded

LONG_BODY_BYTES = 256 << 10
"""Longer bodies are parsed in a thread, too: the event loop has other requests to serve."""

GIVE_BACK_AFTER_S = 1.0


class LongBodies:
    """Room for long bodies, `max_bytes` in all, first come, first served."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_free = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = (
            deque()
        )  # open requests; bounded by the connections
        self._giving_back: asyncio.TimerHandle | None = None

    async def admit(self, num_bytes: int, deadline_at: float) -> Callable[[], None]:
        """Wait for room for a body. Returns the function, idempotent, that gives it back. Raises Overloaded."""
        num_bytes = min(num_bytes, self._max_bytes)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, place))
        self._let_in()
        try:
            async with asyncio.timeout_at(deadline_at):
                await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if place.done() and not place.cancelled():  # it was let in, and does not know yet
                self._num_free += num_bytes
            place.cancel()
            self._let_in()
            if isinstance(error, TimeoutError):
                raise Overloaded(f"{self._max_bytes} bytes of long bodies are being read") from error
            raise
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._num_free += num_bytes
                self._let_in()
                self._give_back_soon()

        return release

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._num_free):
            num_bytes, place = self._waiting.popleft()
            if not place.done():
                self._num_free -= num_bytes
                place.set_result(None)

    def _give_back_soon(self) -> None:
        if self._giving_back is None and _trim is not None:
            self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)


# glibc keeps what was freed in the heaps of its threads; other libraries have no such call, and no such heaps.
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
