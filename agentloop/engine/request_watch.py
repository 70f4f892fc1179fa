"""The time of one request in an engine: when it has to end, and when its caller is told of its progress.

Every adapter runs its requests under a `RequestWatch`. Time in which the engine is frozen, by a pause, an update or
sleep, is no time of the request: it moves the deadline, and is told. A request that ends before the first report
costs one timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from agentloop.engine.interface import Delta, OnProgress, Progress
from agentloop.engine.lifecycle import EngineLifecycle, EnginePhase
from agentloop.errors import AgentLoopError, DeadlineExceeded
from agentloop.types import FinishReason, GenerateRequest, Generation

T = TypeVar("T")

LATE_GRACE_S = 5.0
"""How long an engine may take to end a request that is late."""

_MIN_PAUSE_S = 0.05  # between two checks of a deadline that a frozen engine moves
_MIN_INTERVAL_S = 0.1  # between two reports


@dataclass(frozen=True, slots=True)
class ReportPace:
    """The time between two reports of a request: `interval_s`, or the time of `num_tokens` if it is less."""

    interval_s: float = 2.0
    num_tokens: int = 256

    def next_s(self, num_new: int, elapsed_s: float) -> float:
        """Return the time to the next report, after one of `num_new` tokens in `elapsed_s`."""
        if num_new == 0:
            return self.interval_s
        return min(self.interval_s, max(elapsed_s * self.num_tokens / num_new, _MIN_INTERVAL_S))


@dataclass(frozen=True, slots=True)
class StreamPace:
    """The pace at which an engine's streams give out pieces together, each with all tokens since the last.

    A piece costs its readers, up to the client, about 0.2 ms of an event loop, and an engine with 500 streams
    samples 15,000 tokens a second. Few streams have a piece for every step.
    """

    pieces_per_s: float = 2500.0
    least_s: float = 0.005  # below that a stream has its pieces as they come
    most_s: float = 0.25

    def wait_s(self, num_streams: int) -> float:
        """Return the time between two pieces of one of `num_streams` streams; 0: no wait."""
        wait_s = min(num_streams / self.pieces_per_s, self.most_s)
        return wait_s if wait_s >= self.least_s else 0.0


class RequestWatch:
    """The timer of one request, as a context. Awaits within it go through `in_time`.

    Entered, it raises WeightVersionNotServed if the engine serves no version that the request accepts.
    """

    def __init__(
        self,
        request: GenerateRequest,
        lifecycle: EngineLifecycle,
        pace: ReportPace,
        on_progress: OnProgress | None,
        *,
        tokens_from: Callable[[int], Delta] | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`tokens_from` returns the tokens from an index on; None if the caller gets tokens in another way. `end`
        aborts the request: one that `keeps_late` is then given out as it is."""
        self._request = request
        # An adapter's version is demanded of the adapter, which no commit replaces (`HeldAdapters.pin`).
        self._demand = None if request.adapter else request.sampling.weight_version
        self._lifecycle = lifecycle
        self._pace = pace
        self._on_progress = on_progress
        self._tokens_from = tokens_from
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._is_held = lifecycle.phase is EnginePhase.DRAINING  # until the resume, whatever else comes
        self._began_at = self._told_at = self._loop.time()
        self._stood_still_s = self._all_standstill_s
        self._num_told = 0
        self._scope: asyncio.Timeout | None = None
        self._error: Exception | None = None  # raised by whatever is awaited next
        self._ending: asyncio.Task[None] | None = None
        self._late_at = self._began_at + request.timeout_s  # of the next check of the deadline
        self._report_at = math.inf if on_progress is None else self._began_at + pace.interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # not `timer.when()`: uvloop rounds it, and a timer due at once has none

    @property
    def standstill_s(self) -> float:
        """Seconds in which the engine was frozen since the request came."""
        return self._all_standstill_s - self._stood_still_s

    def __enter__(self) -> RequestWatch:
        if self._demand is not None:
            self._lifecycle.pin(self._request.request_id, self._demand)
        self._set_timer()
        return self

    def __exit__(self, *_: object) -> None:
        self._lifecycle.unpin(self._request.request_id)
        if self._timer is not None:
            self._timer.cancel()
        if self._ending is not None:
            self._ending.cancel()

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await a part of the request. Raises DeadlineExceeded, or what the caller's `on_progress` raised."""
        try:
            async with asyncio.timeout(None) as self._scope:
                if self._error is not None:
                    self._scope.reschedule(0.0)
                return await work
        except TimeoutError as error:
            if self._error is None:
                raise
            raise self._error from error
        finally:
            self._scope = None

    def finished(self, generation: Generation) -> Generation:
        """Return the request's generation with its times, and with the reason of what ended it here: its timer, or
        weights that it does not accept."""
        reason = generation.finish_reason
        if reason is FinishReason.ABORT and self._lifecycle.refuses(self._demand):
            reason = FinishReason.REPLACED
        elif reason is FinishReason.ABORT and self._ending is not None:
            reason = FinishReason.DEADLINE
        engine_s = self._loop.time() - self._began_at
        return replace(generation, finish_reason=reason, standstill_s=self.standstill_s, engine_s=engine_s)

    @property
    def _all_standstill_s(self) -> float:
        return self._lifecycle.not_admitting_s if self._is_held else self._lifecycle.frozen_s

    def _set_timer(self) -> None:
        """Set the timer for the deadline or the next report, whichever comes first."""
        self._tick_at = min(self._late_at, self._report_at)
        self._timer = None if math.isinf(self._tick_at) else self._loop.call_at(self._tick_at, self._tick)

    def _tick(self) -> None:
        due_at = self._tick_at
        if self._late_at <= due_at:
            self._late_at = self._watch_deadline()
        if self._report_at <= due_at:
            self._report_at = self._report()
        self._set_timer()

    def _watch_deadline(self) -> float:
        """Check the deadline. Returns the time of the next check; infinity: the request has failed."""
        request, now = self._request, self._loop.time()
        left_s = request.timeout_s - (now - self._began_at - self.standstill_s)
        if left_s > 0 and self._ending is None:
            return now + max(left_s, _MIN_PAUSE_S)
        if request.keeps_late and self._end is not None and self._ending is None:
            self._ending = self._loop.create_task(self._ended(self._end), name="late request")
            return now + LATE_GRACE_S
        self._fail(DeadlineExceeded(f"request {request.request_id} did not finish in {request.timeout_s:g} s"))
        return math.inf

    def _report(self) -> float:
        """Return when to report again; infinity: the request has failed."""
        now = self._loop.time()
        try:
            read = None if self._lifecycle.is_output_held else self._tokens_from
            tokens = Delta((), (), ()) if read is None else read(self._num_told)
            if self._on_progress is not None:
                self._on_progress(Progress(tokens, self.standstill_s))
        except Exception as error:  # of a timer nobody would hear
            self._fail(error)
            return math.inf
        num_new = len(tokens.token_ids)
        self._num_told += num_new
        next_s = self._pace.next_s(num_new, now - self._told_at)
        self._told_at = now
        return now + next_s

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._scope is not None:
            self._scope.reschedule(self._loop.time())

    @staticmethod
    async def _ended(end: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(AgentLoopError):  # an engine that is gone: what is awaited says so
            await end()
