"""Stride scheduling: whose turn it is among users that share something, by their shares.

Each turn moves its user's pass on by 1 / share, and the least pass is next (Waldspurger and Weihl, "Stride
Scheduling: Deterministic Proportional-Share Resource Management", MIT/LCS/TM-528, 1995). One that had nothing to
give joins at the pass of the last one served: it can neither save up nor fall behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Strides:
    """The passes of users by their names. Synchronous."""

    def __init__(self, share: Callable[[str], float] = lambda _: 1.0) -> None:
        """`share` is asked at each turn, so it may change."""
        self._share = share
        self._passes: dict[str, float] = {}
        self._served = 0.0  # the pass of the last one served
        self._prune_at = 64  # users

    def pass_of(self, user: str) -> float:
        """Return a user's pass: the least of those that wait is next."""
        return max(self._passes.get(user, 0.0), self._served)

    def took(self, user: str) -> None:
        """Count a turn of a user."""
        self._served = self.pass_of(user)
        self._passes[user] = self._served + 1 / self._share(user)
        if len(self._passes) > self._prune_at:
            # A pass that the others have reached says no more than a missing one: idle users cost no memory.
            self._passes = {name: value for name, value in self._passes.items() if value > self._served}
            self._prune_at = max(64, 2 * len(self._passes))


class FairQueue(Generic[T]):
    """Lines of items by user; the users take turns. The owner bounds it."""

    def __init__(self, strides: Strides | None = None) -> None:
        self._strides = strides or Strides()
        self._lines: dict[str, deque[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, user: str) -> bool:
        return user in self._lines

    def push(self, user: str, one: T) -> None:
        """Add an item to the end of a user's line."""
        self._lines.setdefault(user, deque()).append(one)

    def pop(self, is_alive: Callable[[T], bool]) -> T | None:
        """Take out the next item that is alive; None if there is none."""
        while self._lines:
            user = min(self._lines, key=self._strides.pass_of)
            line = self._lines[user]
            one = line.popleft()
            if not line:
                del self._lines[user]
            if is_alive(one):
                self._strides.took(user)
                return one
        return None
