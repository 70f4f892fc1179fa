"""Stride scheduling: fair turns among users of a shared resource, proportional to their shares.

Each turn advances its user's pass by 1 / share, and the user with the smallest pass is next (Waldspurger and Weihl,
"Stride Scheduling: Deterministic Proportional-Share Resource Management", MIT/LCS/TM-528, 1995). A user that was
idle rejoins at the pass of the last served user, so it neither accumulates credit nor falls behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Strides:
    """The passes of users, by name. Synchronous."""

    def __init__(self, share: Callable[[str], float] = lambda _: 1.0) -> None:
        """`share` is called at each turn, so a user's share can change."""
        self._share = share
        self._passes: dict[str, float] = {}
        self._served = 0.0  # the pass of the last served user
        self._prune_at = 64  # number of users

    def pass_of(self, user: str) -> float:
        """Return a user's pass. Of the waiting users, the one with the smallest pass is next."""
        return max(self._passes.get(user, 0.0), self._served)

    def took(self, user: str) -> None:
        """Record a turn of a user."""
        self._served = self.pass_of(user)
        self._passes[user] = self._served + 1 / self._share(user)
        if len(self._passes) > self._prune_at:
            # A pass that is not above the last served one is equivalent to a missing entry: drop idle users.
            self._passes = {name: value for name, value in self._passes.items() if value > self._served}
            self._prune_at = max(64, 2 * len(self._passes))


class FairQueue(Generic[T]):
    """A FIFO queue per user; the users take turns. The owner must bound its size."""

    def __init__(self, strides: Strides | None = None) -> None:
        self._strides = strides or Strides()
        self._lines: dict[str, deque[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, user: str) -> bool:
        return user in self._lines

    def push(self, user: str, one: T) -> None:
        """Append an item to a user's queue."""
        self._lines.setdefault(user, deque()).append(one)

    def pop(self, is_alive: Callable[[T], bool]) -> T | None:
        """Remove and return the next item that is alive, dropping items that are not; None if the queue is
        empty."""
        while self._lines:
            user = min(self._lines, key=self._strides.pass_of)
            queue = self._lines[user]
            item = queue.popleft()
            if not queue:
                del self._lines[user]
            if is_alive(item):
                self._strides.took(user)
                return item
        return None
