"""Memory limit for long request bodies that are read and parsed at the same time.

Only bodies longer than `LONG_BODY_BYTES` count; shorter ones never wait. The full length of a body is reserved
before its first byte is read, so two bodies cannot deadlock waiting for each other. Users take turns, and a user
holds at most half of the capacity that other users leave. Freed heap memory is returned to the operating system.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter, deque
from collections.abc import Callable

from agentloop.concurrency.strides import Strides
from agentloop.errors import Overloaded

LONG_BODY_BYTES = 256 << 10
"""Longer bodies are also parsed in a thread, so that they do not block the event loop."""

MIN_BYTES_PER_S = 64 << 10
"""A long body that arrives more slowly, after `SLOW_GRACE_S`, is rejected to free its reservation."""

SLOW_GRACE_S = 5.0

GIVE_BACK_AFTER_S = 1.0


class LongBodies:
    """Reserves capacity for long bodies, `max_bytes` in total. The bodies of one user are admitted in FIFO
    order."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_free = max_bytes
        self._held: Counter[str] = Counter()  # bytes by user
        self._strides = Strides()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # bounded by the connections
        self._giving_back: asyncio.TimerHandle | None = None

    async def admit(self, num_bytes: int, deadline_at: float, user: str = "") -> Callable[[], None]:
        """Wait for capacity for a body. Return an idempotent function that releases it. Raises Overloaded.

        The user "" of a service without keys is the only user, so it may hold all capacity.
        """
        num_bytes = min(num_bytes, self._max_bytes)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append((num_bytes, place))
        self._let_in()
        try:
            async with asyncio.timeout_at(deadline_at):
                await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if place.done() and not place.cancelled():  # admitted, but this task has not resumed since: release
                self._take(user, -num_bytes)
            place.cancel()
            self._let_in()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no capacity for a body of {num_bytes} bytes: other long bodies use the limit of"
                    f" {self._max_bytes} bytes; retry later, or send smaller bodies"
                ) from error
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
        """Return the user whose first body is admitted or dropped next; None if no waiting body can be."""
        for user in sorted(self._waiting, key=self._strides.pass_of):
            num_bytes, place = self._waiting[user][0]
            held = self._held[user]
            if place.done():
                return user
            if user and held and 2 * (held + num_bytes) > self._num_free + held:
                continue  # this user exceeds its share and waits for its own bodies: check the next user
            # A body that waits for capacity is not overtaken: shorter bodies could starve a long one forever.
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


# glibc keeps freed memory in its per-thread arenas. Other C libraries have neither such arenas nor `malloc_trim`.
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
