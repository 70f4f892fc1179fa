"""Deadlines that do not count the time in which the service itself stands still.

The service stands still for a call while no replica can be had, while its request is frozen in an engine (a
pause, an update, sleep), and from the last that was heard of a replica that is lost. All of it is told to the one
`Deadline` of the trajectory or the call, which moves by as much. A deadline that somebody outside holds, as an
HTTP client does, is fixed: it counts the same seconds and stays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

_LAST_WORD_S = 0.25


class Deadline:
    """A moment in the event loop's time, for one task and the calls it awaits."""

    def __init__(self, at: float = math.inf) -> None:
        """A fixed one."""
        self.at = at
        self._max_standstill_s: float | None = None
        self._scope: asyncio.Timeout | None = None  # enforces it, and moves with it
        self._grace_s = 0.0
        self._stood_still_s = 0.0
        self._since: float | None = None  # standing still
        self._num_waiting = 0

    @classmethod
    def of(cls, scope: asyncio.Timeout, max_standstill_s: float) -> Deadline:
        """Return the deadline that a timeout enforces. Both move, by at most `max_standstill_s` in all."""
        when = scope.when()
        made = cls(math.inf if when is None else when)
        made._scope, made._max_standstill_s = scope, max_standstill_s
        return made

    @property
    def left_s(self) -> float:
        """Seconds until it; they do not pass while the service stands still."""
        is_still = self._since is not None and self._max_standstill_s is not None
        return self.at - (self._since if is_still and self._since is not None else loop_time())

    @property
    def enforced_at(self) -> float | None:
        """The moment at which its timeout ends the task as things are now; None: it has none."""
        return None if self._scope is None else self._scope.when()

    @property
    def standstill_s(self) -> float:
        """Seconds in which the service stood still so far."""
        return self._stood_still_s + (0.0 if self._since is None else loop_time() - self._since)

    @property
    def patience_s(self) -> float:
        """Seconds for which whoever waits for the service may go on. Not to the last before a fixed one: then he
        can say for what he waited."""
        if self._max_standstill_s is None:
            left_s = self.at - loop_time()
            return max(left_s - _LAST_WORD_S, 0.5 * left_s)
        return self._max_standstill_s - self.standstill_s

    def stood_still(self, seconds: float) -> None:
        """Move by so many seconds that have passed."""
        self._stood_still_s += seconds
        if self._max_standstill_s is not None and seconds:
            self.at += seconds
            self._enforce()

    @property
    def is_fixed(self) -> bool:
        """True for a deadline that somebody outside holds."""
        return self._max_standstill_s is None

    @property
    def is_spent(self) -> bool:
        """True if a deadline that moves has moved as far as it may."""
        return self._max_standstill_s is not None and self.patience_s <= 0

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """While this lasts, time does not count."""
        if self._num_waiting == 0:
            self._since = loop_time()
        self._num_waiting += 1
        self._enforce()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                since, self._since = self._since, None
                self.stood_still(0.0 if since is None else loop_time() - since)
                self._enforce()

    @contextmanager
    def grace(self, seconds: float) -> Iterator[None]:
        """While this lasts, it is enforced so much later: whoever awaits something then ends it by himself."""
        self._grace_s = seconds
        self._enforce()
        try:
            yield
        finally:
            self._grace_s = 0.0
            self._enforce()

    def _enforce(self) -> None:
        if self._scope is None or self._scope.expired():
            return
        is_still = self._since is not None and self._max_standstill_s is not None
        self._scope.reschedule(self.at + self._grace_s + (max(self.patience_s, 0.0) if is_still else 0.0))


def loop_time() -> float:
    """Return the time by which deadlines are set."""
    return asyncio.get_running_loop().time()
