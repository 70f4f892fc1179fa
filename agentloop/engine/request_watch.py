"""Deadlines and progress reports of requests in an engine.

Every engine runs its requests under a `RequestWatch`. Time during which the engine is frozen (by a pause, an update
or sleep) extends the deadline and is reported. A request that ends before its first report costs one timer.
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
"""Seconds that an engine has to abort a request after its deadline."""

_MIN_PAUSE_S = 0.05  # minimum interval between two checks of a deadline that a frozen engine extends
_MIN_INTERVAL_S = 0.1  # minimum interval between two reports


@dataclass(frozen=True, slots=True)
class ReportPace:
    """The interval between two progress reports: `interval_s`, or the time to sample `num_tokens` if shorter."""

    interval_s: float = 2.0
    num_tokens: int = 256

    def next_s(self, num_new: int, elapsed_s: float) -> float:
        """Return the seconds to the next report, given `num_new` tokens in the last `elapsed_s` seconds."""
        if num_new == 0:
            return self.interval_s
        return min(self.interval_s, max(elapsed_s * self.num_tokens / num_new, _MIN_INTERVAL_S))


@dataclass(frozen=True, slots=True)
class StreamPace:
    """Limits the rate of pieces of all streams of an engine by merging tokens into fewer pieces.

    Each piece costs the processes up to the client about 0.2 ms of an event loop, and an engine with 500 streams
    samples 15,000 tokens per second. With few streams there is one piece per step.
    """

    pieces_per_s: float = 2500.0  # total of all streams
    least_s: float = 0.005  # shorter waits are skipped
    most_s: float = 0.25

    def wait_s(self, num_streams: int) -> float:
        """Return the seconds between two pieces of one stream if there are `num_streams`; 0 for no wait."""
        wait_s = min(num_streams / self.pieces_per_s, self.most_s)
        return wait_s if wait_s >= self.least_s else 0.0


class RequestWatch:
    """A context manager with the timer of one request. Inside it, await through `in_time`.

    Entering raises WeightVersionNotServed if the request does not accept the served version.
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
        """`tokens_from` returns the tokens from an index on; None if progress reports need no tokens.

        `end` aborts the request. At the deadline of a request with `keeps_late` it is called, and the tokens so far
        are the result.
        """
        self._request = request
        # With an adapter, the demand refers to the adapter's version (`HeldAdapters.pin`), which a commit keeps.
        self._demand = None if request.adapter else request.sampling.weight_version
        self._lifecycle = lifecycle
        self._pace = pace
        self._on_progress = on_progress
        self._tokens_from = tokens_from
        self._end = end
        self._loop = asyncio.get_running_loop()
        # A request that arrives during a drain waits until the resume, so the drain counts as frozen time.
        self._is_held = lifecycle.phase is EnginePhase.DRAINING
        self._began_at = self._told_at = self._loop.time()
        self._stood_still_s = self._total_unavailable_s
        self._num_told = 0
        self._scope: asyncio.Timeout | None = None
        self._error: Exception | None = None  # raised by the current or next await
        self._ending: asyncio.Task[None] | None = None
        self._late_at = self._began_at + request.timeout_s  # time of the next check of the deadline
        self._report_at = math.inf if on_progress is None else self._began_at + pace.interval_s
        self._timer: asyncio.TimerHandle | None = None
        # Not `timer.when()`: uvloop rounds it, and returns none for a timer due immediately.
        self._tick_at = math.inf

    @property
    def unavailable_s(self) -> float:
        """Seconds since the request's arrival during which the engine was frozen."""
        return self._total_unavailable_s - self._stood_still_s

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
        """Await a part of the request. Raises DeadlineExceeded, or the exception of the caller's `on_progress`."""
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
        """Return the generation with its times, and with the finish reason if the watch or a commit ended it."""
        reason = generation.finish_reason
        if reason is FinishReason.ABORT and self._lifecycle.refuses(self._demand):
            reason = FinishReason.REPLACED
        elif reason is FinishReason.ABORT and self._ending is not None:
            reason = FinishReason.DEADLINE
        engine_s = self._loop.time() - self._began_at
        return replace(generation, finish_reason=reason, unavailable_s=self.unavailable_s, engine_s=engine_s)

    @property
    def _total_unavailable_s(self) -> float:
        return self._lifecycle.not_admitting_s if self._is_held else self._lifecycle.frozen_s

    def _set_timer(self) -> None:
        """Set the timer for the deadline or the next report, whichever is earlier."""
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
        """Check the deadline. Returns the time of the next check; infinity if the request has failed."""
        request, now = self._request, self._loop.time()
        left_s = request.timeout_s - (now - self._began_at - self.unavailable_s)
        # The timer fires at the original deadline; time for which the engine was frozen extends it.
        if left_s > 0 and self._ending is None:
            return now + max(left_s, _MIN_PAUSE_S)
        if request.keeps_late and self._end is not None and self._ending is None:
            self._ending = self._loop.create_task(self._ended(self._end), name="late request")
            return now + LATE_GRACE_S
        self._fail(DeadlineExceeded(f"request {request.request_id} did not finish in {request.timeout_s:g} s"))
        return math.inf

    def _report(self) -> float:
        """Report progress. Returns the time of the next report; infinity if the request has failed."""
        now = self._loop.time()
        try:
            # Tokens sampled with weights that have not passed the canary check must not leave the engine.
            read_tokens = None if self._lifecycle.is_output_held else self._tokens_from
            tokens = Delta((), (), ()) if read_tokens is None else read_tokens(self._num_told)
            if self._on_progress is not None:
                self._on_progress(Progress(tokens, self.unavailable_s))
        except Exception as error:  # asyncio would only log an exception in a timer: raise it from `in_time`
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
        with contextlib.suppress(AgentLoopError):  # if the engine is lost, the awaited work raises it
            await end()
