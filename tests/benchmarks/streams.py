"""Streaming requests that stay in flight during weight updates.

A `Flight` owns its requests from `start` to `end`. Every piece is recorded with its arrival time, so that gaps and
throughput can be computed afterwards over any interval. All times are `time.perf_counter()`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Source = Callable[[str, tuple[int, ...]], AsyncIterator["Piece"]]
"""Starts one request, by id and prompt; yields its pieces to its end."""

Load = Callable[[str, tuple[int, ...]], Awaitable[None]]
"""Runs one request to its end, without reading its pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that arrived together. `version` is that of the last token, None if the engine does not report it."""

    token_ids: tuple[int, ...]
    version: int | None = None


@dataclass(slots=True)
class Stream:
    """One request: its pieces with their arrival times."""

    request_id: str
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int, int | None]] = field(default_factory=list)  # time, tokens, version
    is_over: bool = False

    def gap_ms(self, since: float, is_after: Callable[[float, int | None], bool]) -> float | None:
        """Return the longest time without a piece between `since` and the first piece after the update.

        An engine that holds its output during an update releases older tokens together with the first new one.
        Returns None if there is no piece before or after the update.
        """
        longest = None
        for (before_at, _, _), (at, _, version) in pairwise(self.arrivals):
            if at >= since:
                longest = max(longest or 0.0, (at - before_at) * 1000)
                if is_after(at, version):
                    return longest
        return None


class Flight:
    """Requests in flight. An error of any request is raised at the next call."""

    def __init__(
        self,
        source: Source,
        prompts: Sequence[tuple[int, ...]],
        name: str,
        *,
        load: Load | None = None,
        num_streams: int | None = None,
    ) -> None:
        """The first `num_streams` requests (default: all) are streamed; the others are in flight as `load`."""
        requests = [Stream(f"{name}-{n}", prompt) for n, prompt in enumerate(prompts)]
        self._source = source
        self._load = load
        self.streams, self.others = requests[:num_streams], requests[num_streams or len(requests) :]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, num_tokens: int, timeout_s: float) -> None:
        """Start the requests, and return once every stream has `num_tokens`."""
        self._tasks = [asyncio.create_task(self._run(other)) for other in self.others]
        self._tasks += [asyncio.create_task(self._read(stream)) for stream in self.streams]
        await self.until(lambda stream: len(stream.token_ids) >= num_tokens, timeout_s)

    async def restart(self) -> None:
        """Resend every request with its prompt and its tokens so far. The requests must have ended."""
        await asyncio.wait(self._tasks)
        self.check()
        for stream in self.streams:
            stream.is_over = False
        self._tasks = [asyncio.create_task(self._read(stream)) for stream in self.streams]

    async def until(self, is_reached: Callable[[Stream], bool], timeout_s: float) -> None:
        """Wait until `is_reached` is true for every request.

        Raises TimeoutError, or RuntimeError if one has ended.
        """
        async with asyncio.timeout(timeout_s):
            while not all(map(is_reached, self.streams)):
                self.check()
                self.check_alive()
                await asyncio.sleep(0.002)

    def check(self) -> None:
        """Raise the error of a request that failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    def check_alive(self) -> None:
        """Raise RuntimeError if a request has ended without an abort."""
        if num_over := sum(request.is_over for request in (*self.streams, *self.others)):
            raise RuntimeError(
                f"{num_over} of the requests have reached the end of their context: raise --context, or ask for "
                "fewer updates"
            )

    async def end(self, abort: Callable[[str], object], timeout_s: float = 60.0) -> None:
        """Abort all requests, and wait for their last answers. Raises the error of any of them."""
        for request in (*self.streams, *self.others):
            if not request.is_over:
                await abort(request.request_id)  # type: ignore[misc]
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Cancel all requests, for cleanup after an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tokens_per_s(self, intervals: Sequence[tuple[float, float]]) -> float:
        """Return the tokens per second that arrived within the intervals."""
        seconds = sum(end - start for start, end in intervals)
        num_tokens = sum(
            count
            for stream in self.streams
            for at, count, _ in stream.arrivals
            if any(start <= at < end for start, end in intervals)
        )
        return num_tokens / seconds if seconds else 0.0

    def gaps_ms(self, since: float, is_after: Callable[[float, int | None], bool]) -> list[float]:
        """Return every request's gap at an update that began at `since`. Raises ValueError if one has no gap."""
        gaps = [stream.gap_ms(since, is_after) for stream in self.streams]
        missing = [stream.request_id for stream, gap in zip(self.streams, gaps, strict=True) if gap is None]
        if missing:
            raise ValueError(f"no token before or none after the update: {', '.join(missing)}")
        return [gap for gap in gaps if gap is not None]

    def first_token_at(self, is_after: Callable[[float, int | None], bool]) -> float:
        """Return the time of the first token after an update in any stream."""
        arrivals = (arrival for stream in self.streams for arrival in stream.arrivals)
        return min(at for at, _, version in arrivals if is_after(at, version))

    def ordinary_gap_ms(self, start: float, end: float) -> float:
        """Return the median time between two pieces of one request within an interval."""
        gaps = [
            (later[0] - earlier[0]) * 1000
            for stream in self.streams
            for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
            if start <= earlier[0] and later[0] < end
        ]
        return statistics.median(gaps) if gaps else 0.0

    async def _run(self, other: Stream) -> None:
        assert self._load is not None, "somebody has to run them"
        await self._load(other.request_id, other.prompt)
        other.is_over = True

    async def _read(self, stream: Stream) -> None:
        prompt = stream.prompt + tuple(stream.token_ids)
        async for piece in self._source(stream.request_id, prompt):
            if piece.token_ids:
                stream.arrivals.append((time.perf_counter(), len(piece.token_ids), piece.version))
                stream.token_ids.extend(piece.token_ids)
        stream.is_over = True


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of all requests during some updates, in milliseconds."""

    p50: float
    maximum: float
    num_gaps: int

    @classmethod
    def of(cls, gaps_ms: Sequence[float]) -> Gaps:
        return cls(statistics.median(gaps_ms), max(gaps_ms), len(gaps_ms))
