"""Injected time, so that tests can control it.

Code that waits takes a `Clock`: `RealClock()` in production, or a `VirtualClock` in tests that simulate hours. A
`VirtualClock` has its own event loop: its time is constant while any task can run, and jumps to the next timer when
no task can. `asyncio.sleep`, `asyncio.timeout` and `loop.time` use it, too, so deadlines expire in virtual time.

    def test_an_hour() -> None:          # a plain function: the clock brings the loop
        clock = VirtualClock()

        async def main() -> float:
            await clock.sleep(3600)
            return clock.now()

        assert clock.run(main()) == 3600.0

Runs are deterministic: the same coroutines wake in the same order at the same times. Virtual time does not wait for
work outside the loop, so do not use sockets, subprocesses or `asyncio.to_thread` in a virtual run. If every task
waits and no timer is set, `run` raises RuntimeError instead of hanging.
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
        """Return the seconds since an arbitrary moment. The value never decreases."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; 0 lets other tasks run."""


class RealClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyTime:
    """The Unix time in seconds, advanced by a monotonic clock. The wall clock is read only once."""

    def __init__(self, wall_s: Callable[[], float], now: Callable[[], float]) -> None:
        self._now = now
        self._at_0 = wall_s() - now()

    def __call__(self) -> float:
        return self._at_0 + self._now()

    def not_before(self, unix_s: float) -> None:
        """Move the time forward to `unix_s`, the time of an earlier write, if it is behind."""
        self._at_0 = max(self._at_0, unix_s - self._now())


class Stopwatch:
    """The microseconds since the start of a trajectory, which may have started in another process."""

    def __init__(
        self,
        began_at: float | None = None,
        wall_s: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`began_at` is the Unix time of the start in seconds; None: now."""
        wall = wall_s()
        self.began_at = wall if began_at is None else began_at
        self._now = now
        self._began = now() - max(wall - self.began_at, 0.0)

    def __call__(self) -> int:
        return self.at(self._now())

    def at(self, now_s: float) -> int:
        """Return the microseconds at the time `now_s` of the monotonic clock."""
        return max(round((now_s - self._began) * 1e6), 0)


class VirtualClock:
    """A clock that starts at 0 and jumps to the next timer whenever no task can run."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Sleep in virtual time. Raises RuntimeError on any other event loop, which would sleep in real time."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("VirtualClock.sleep works only inside its own run(): this is another event loop")
        await asyncio.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Advance time manually, for tests of synchronous code. Inside a run, expired timers fire next."""
        self._now_s += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in a new event loop with this clock, and close the loop. Can be called several times: time
        continues from its current value."""
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
        self._clock = clock  # set before super().__init__, which may call time()
        super().__init__(_VirtualSelector(clock))

    def time(self) -> float:
        return self._clock.now()

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer."""
        # The loop runs timers within its resolution early. Virtual time would then not advance, possibly forever.
        now = self.time()
        at = max(when, now + _MIN_TIMER_S) if when > now else when
        return super().call_at(at, callback, *args, context=context)


class _VirtualSelector(selectors.DefaultSelector):
    """Advances virtual time instead of waiting: the loop calls `select` with a timeout only if no task can run."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("virtual time cannot advance: every task waits and no timer is set")
        self._clock.advance(timeout)
        return ready
