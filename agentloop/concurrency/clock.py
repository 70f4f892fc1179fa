"""Time as something passed in, so that a test can own it.

Code that waits takes a `Clock`. In production that is `RealClock()`. In a test of hours it is a `VirtualClock`,
which brings its own event loop: time stands still while any task can run, and jumps to the next timer when none
can. `asyncio.sleep`, `asyncio.timeout` and `loop.time` follow it too, so deadlines expire in virtual time.

    def test_an_hour() -> None:          # a plain function: the clock brings the loop
        clock = VirtualClock()

        async def main() -> float:
            await clock.sleep(3600)
            return clock.now()

        assert clock.run(main()) == 3600.0

Runs are deterministic: the same coroutines wake in the same order at the same times. What happens outside the
loop does not hold time back: no sockets, subprocesses or `asyncio.to_thread` inside a virtual run. A run in which
every task waits and no timer is set can never go on; `run` raises RuntimeError instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MIN_TIMER_S = 2e-9  # the loop's resolution is 1e-9


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Return `seconds` later; 0 lets other tasks run."""


class RealClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyTime:
    """Seconds since 1970 that pass as a monotonic clock does. The wall clock is read once."""

    def __init__(self, wall_s: Callable[[], float], now: Callable[[], float]) -> None:
        self._now = now
        self._at_0 = wall_s() - now()

    def __call__(self) -> float:
        return self._at_0 + self._now()

    def not_before(self, unix_s: float) -> None:
        """Continue from `unix_s` at the earliest, the time of an earlier write."""
        self._at_0 = max(self._at_0, unix_s - self._now())


class Stopwatch:
    """The microseconds since a trajectory began. It may have begun in another process."""

    def __init__(
        self,
        began_at: float | None = None,
        wall_s: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`began_at` is in seconds since 1970; None: now."""
        wall = wall_s()
        self.began_at = wall if began_at is None else began_at
        self._now = now
        self._began = now() - max(wall - self.began_at, 0.0)

    def __call__(self) -> int:
        return self.at(self._now())

    def at(self, now_s: float) -> int:
        """Return the microseconds at a moment of the monotonic clock."""
        return max(round((now_s - self._began) * 1e6), 0)


class VirtualClock:
    """A clock that starts at 0 and jumps to the next timer whenever nothing can run."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Sleep as `Clock.sleep`. Raises RuntimeError on another loop than this clock's, which would wait in real
        time."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a VirtualClock sleeps only inside its own run()")
        await asyncio.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Move time by hand, for synchronous code under test; inside a run, timers passed over fire next."""
        self._now_s += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in a new event loop under this clock, and close the loop. Time continues from where it stands,
        so a clock can run several times."""
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            try:
                return runner.run(main)
            finally:
                self._loop = None

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = _VirtualLoop(self)
        return self._loop


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock  # before super(), which may ask for the time
        super().__init__(_VirtualSelector(clock))

    def time(self) -> float:
        return self._clock.now()

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer. One within the loop's resolution would fire before its time, and time might never move."""
        now = self.time()
        at = max(when, now + _MIN_TIMER_S) if when > now else when
        return super().call_at(at, callback, *args, context=context)


class _VirtualSelector(selectors.DefaultSelector):
    """The loop asks its selector to wait exactly when it has nothing to run: the moment to move time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("virtual time cannot go on: every task waits and no timer is set")
        self._clock.advance(timeout)
        return ready
