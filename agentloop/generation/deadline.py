"""Deadlines that do not count the time during which the service is unavailable.

The service is unavailable to a call while no replica is free, while the call's request is frozen in an engine (a
pause, an update, sleep), and from a lost replica's last report on. This time is added to the `Deadline` of the
trajectory or call. A fixed deadline, which for example an HTTP client enforces, counts this time and does not move.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_LAST_WORD_S = 0.25


class Deadline:
    """The deadline of a task and the calls that it awaits, in the event loop's time; fixed, or moved by
    unavailability."""

    def __init__(self, at: float = math.inf) -> None:
        """Make a fixed deadline."""
        self.at = at
        self._max_unavailable_s: float | None = None
        self._scope: asyncio.Timeout | None = None  # ends the task; None: it is enforced elsewhere
        self._is_enforced = False  # the scope may still end the task
        self._timer: asyncio.TimerHandle | None = None  # fires when the scope ends, or earlier
        self._look_at = math.inf  # not `timer.when()`: uvloop rounds it, and a timer due at once has none
        self._grace_s = 0.0
        self._stood_still_s = 0.0
        self._since: float | None = None  # standing still
        self._num_waiting = 0

    @classmethod
    def moving(cls, timeout_s: float, max_unavailable_s: float) -> Deadline:
        """Return a deadline that moves, by at most `max_unavailable_s` in total.

        As a context manager it ends its block with TimeoutError, as `asyncio.timeout` does. Its timer is set once,
        and again if the deadline has moved when the timer fires.
        """
        made = cls(loop_time() + timeout_s)
        made._max_unavailable_s = max_unavailable_s
        return made

    async def __aenter__(self) -> Deadline:
        self._scope = await asyncio.timeout(None).__aenter__()
        self._is_enforced = True
        self._enforce()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_enforced = False
        if self._timer is not None:
            self._timer.cancel()
        assert self._scope is not None, "not entered"
        await self._scope.__aexit__(kind, error, trace)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; constant while the service is unavailable."""
        is_still = self._since is not None and self._max_unavailable_s is not None
        return self.at - (self._since if is_still and self._since is not None else loop_time())

    @property
    def enforced_at(self) -> float | None:
        """The event-loop time at which the deadline ends its task; None if it ends no task.

        The time can change: a grace period, or time without an available service, postpones the end.
        """
        if self._scope is None or math.isinf(self.at):
            return None
        if self._scope.expired():
            return self._scope.when()
        still_s = 0.0 if self._since is None or self._max_unavailable_s is None else self._max_unavailable_s
        return self.at + self._grace_s + max(still_s - self._stood_still_s, 0.0)

    @property
    def has_ended_task(self) -> bool:
        """True once the deadline has ended its task."""
        return self._scope is not None and self._scope.expired()

    @property
    def unavailable_s(self) -> float:
        """Seconds during which the service was unavailable so far."""
        return self._stood_still_s + (0.0 if self._since is None else loop_time() - self._since)

    @property
    def patience_s(self) -> float:
        """Seconds for which a call may wait for the service.

        With a fixed deadline the wait ends shortly before it, so that the error names the reason.
        """
        if self._max_unavailable_s is None:
            left_s = self.at - loop_time()
            return max(left_s - _LAST_WORD_S, 0.5 * left_s)
        return self._max_unavailable_s - self.unavailable_s

    def stood_still(self, seconds: float) -> None:
        """Move the deadline by seconds during which the service was unavailable."""
        self._stood_still_s += seconds
        if self._max_unavailable_s is not None and seconds:
            self.at += seconds
            self._enforce()

    @property
    def is_fixed(self) -> bool:
        """True if the caller enforces the deadline, which then does not move."""
        return self._max_unavailable_s is None

    @property
    def is_spent(self) -> bool:
        """True if a moving deadline has moved by its maximum."""
        return self._max_unavailable_s is not None and self.patience_s <= 0

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Within this context the service is unavailable, and its time does not count."""
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
        """Within this context enforce the deadline `seconds` later: the awaited call ends before."""
        self._put_off(seconds)
        try:
            yield
        finally:
            self._put_off(0.0)

    def _put_off(self, seconds: float) -> None:
        self._grace_s = seconds
        if self._look_at > self.at + seconds:
            self._enforce()

    def _enforce(self) -> None:
        """Set the timer earlier if the task must end before it fires."""
        when = self.enforced_at if self._is_enforced else None
        if when is not None and self._look_at > when:
            self._set_timer(when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """End the task, or set the timer again if the deadline has moved."""
        when = self.enforced_at
        assert self._scope is not None
        if when is not None and when > self._look_at:
            self._set_timer(when)
        else:
            self._is_enforced = False
            self._scope.reschedule(when)


def loop_time() -> float:
    """Return the event loop's time, in which deadlines are set."""
    return asyncio.get_running_loop().time()
