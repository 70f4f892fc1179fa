"""Long bodies: how many bytes of them are read and parsed at once, and their memory, which goes back to the system.

Only bodies longer than `LONG_BODY_BYTES` count; shorter ones never wait. The whole length of a body is reserved
before a byte of it is read, so no two bodies wait for each other. Users take turns, and no user fills the room: it
holds at most half of the room that other users leave.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter, deque
from collections.abc import Callable

from agentloop.concurrency.strides import Strides
from agentloop.errors import Overloaded

LONG_BODY_BYTES = 256 << 10
"""Longer bodies are parsed in a thread, too: the event loop has other requests to serve."""

MIN_BYTES_PER_S = 64 << 10
"""A long body that arrives more slowly, after `SLOW_GRACE_S`, is refused: its room is needed."""

SLOW_GRACE_S = 5.0

GIVE_BACK_AFTER_S = 1.0


class LongBodies:
    """Room for long bodies, `max_bytes` in all. The bodies of one user are admitted in order."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_free = max_bytes
        self._held: Counter[str] = Counter()  # bytes by user
        self._strides = Strides()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # bounded by the connections
        self._giving_back: asyncio.TimerHandle | None = None

    async def admit(self, num_bytes: int, deadline_at: float, user: str = "") -> Callable[[], None]:
        """Wait for room for a body. Return the function, idempotent, that releases it. Raises Overloaded.

        The user "" of a service without keys has no neighbors: it may hold all the room.
        """
        num_bytes = min(num_bytes, self._max_bytes)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append((num_bytes, place))
        self._let_in()
        try:
            async with asyncio.timeout_at(deadline_at):
                await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if place.done() and not place.cancelled():  # it was admitted, and its task has not run since
                self._take(user, -num_bytes)
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
                self._take(user, -num_bytes)
                self._let_in()
                self._give_back_soon()

        return release

    def _let_in(self) -> None:
        while (user := self._next_user()) is not None:
            num_bytes, place = self._waiting[user].popleft()
            if not self._waiting[user]:
                del self._waiting[user]
            if not place.done():
                self._take(user, num_bytes)
                self._strides.took(user)
                place.set_result(None)

    def _next_user(self) -> str | None:
        """Return the user whose first body is admitted or dropped next; None if all wait."""
        for user in sorted(self._waiting, key=self._strides.pass_of):
            num_bytes, place = self._waiting[user][0]
            held = self._held[user]
            if place.done():
                return user
            if user and held and 2 * (held + num_bytes) > self._num_free + held:
                continue  # it waits for its own bodies only; the next user is checked
            # A body that waits for room is not overtaken: short ones would keep a long one waiting for ever.
            return user if num_bytes <= self._num_free else None
        return None

    def _take(self, user: str, num_bytes: int) -> None:
        self._num_free -= num_bytes
        self._held[user] += num_bytes
        if not self._held[user]:
            del self._held[user]

    def _give_back_soon(self) -> None:
        if self._giving_back is None and _trim is not None:
            self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)


# glibc keeps what was freed in the heaps of its threads; other libraries have no such call, and no such heaps.
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
