"""A vLLM-like engine in virtual time that advances from event to event instead of token to token.

Between two events the set of decoding requests is constant, and each step adds one token to every context: the time
of k steps is k (alpha + beta B + gamma C) + gamma B k (k - 1) / 2, and the blocks allocated follow from the context
lengths modulo the block size. A run of decode steps ends when a request ends, when blocks run out, or at the first
step boundary after an arrival. A step with prefill is one event.

The scheduler is vLLM's: decoding requests first, then prefilling requests in order of admission, then waiting
requests in order of arrival, all within a token budget per step. A prompt is admitted if all of it fits. If a
running request finds no block, the request admitted last is preempted and returns to the head of the queue. Full
blocks are shared as soon as they are scheduled: a request admitted later in the same step finds them. Times are
those of `StepTimes`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from tests.benchmarks.balancer.kv import Path, PrefixCache
from tests.benchmarks.balancer.policy import EngineLoad, FleetShape

INFINITY = math.inf


@dataclass(slots=True, eq=False)
class Request:
    """One turn on an engine. `num_prompt_tokens` includes tokens sampled earlier on a lost replica."""

    trajectory: int
    path: Path
    num_prompt_tokens: int
    num_outputs: int  # to sample
    num_sampled: int = 0  # current, except while it decodes: then as of `joined_step`
    num_cached_tokens: int | None = None  # cached at its first admission
    num_computed: int = 0  # tokens with computed KV; current while it is prefilled
    num_stored: int = 0  # full blocks in the prefix cache that it holds
    joined_step: int = -1  # step at which it began to decode; -1: it does not decode
    admission: int = 0  # number of its last admission


class Engine:
    """One replica. At `ends_at`, the time of its next event, the owner calls `complete` and then `plan`."""

    def __init__(self, number: int, shape: FleetShape, started_at: float = 0.0) -> None:
        self.number = number
        self.cache = PrefixCache()
        self.ends_at = INFINITY
        self.version = 0  # changes with `ends_at`
        self.started_at = started_at
        self.busy_s = 0.0
        self.paused_s = 0.0
        self.num_prefilled_tokens = 0
        self.num_sampled_tokens = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.tokens_by_second: list[float] = []  # sampled
        self._shape = shape
        self._times = shape.step_times
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, None] = {}  # in order of admission
        self._prefilling: list[Request] = []  # running requests that do not decode yet
        self._chunks: list[tuple[Request, int]] = []  # chunks of the current step
        self._step = 0  # decode steps so far
        self._ends: list[tuple[int, int, Request]] = []  # step, admission; stale if the admission is not the last
        self._crossings = [0] * shape.block_size  # requests that take a block at steps of this residue
        self._num_decoding = 0
        self._num_context_tokens = 0  # contexts of the decoding requests
        self._num_private_blocks = 0  # blocks of running requests outside the prefix cache
        self._num_admissions = 0
        self._began_at = 0.0
        self._run_steps = 0  # decode steps of the current run; 0: a step with prefill, or idle
        self._paused_at: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_held_blocks(self) -> int:
        """Return the number of blocks of running requests, as of the last event."""
        return self.cache.num_blocks - self.cache.num_idle_blocks + self._num_private_blocks

    def load(self) -> EngineLoad:
        """Return the load as of the last event."""
        return EngineLoad(len(self._running), len(self._waiting), self.num_held_blocks)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises ValueError if it can never fit."""
        if request.num_prompt_tokens + request.num_outputs > self._shape.capacity_tokens:
            raise ValueError(f"{request.num_prompt_tokens} tokens do not fit the KV cache")
        self._waiting.append(request)
        self._cut(now)

    def complete(self, now: float) -> list[Request]:
        """Apply the step or run of steps that has just ended; returns the requests that ended with it."""
        finished: list[Request] = []
        num_steps = self._run_steps or 1
        duration_s = now - self._began_at
        self.busy_s += duration_s
        num_before = self.num_sampled_tokens
        if self._num_decoding:
            finished += self._decode(num_steps)
        for request, num_tokens in self._chunks:
            finished += self._prefilled(request, num_tokens)
        self._chunks.clear()
        self.num_steps += num_steps
        self._count_tokens(self.num_sampled_tokens - num_before, now - duration_s, now)
        self._until(INFINITY, 0)
        return finished

    def plan(self, now: float) -> None:
        """Start the next step or run of steps, if there is work and no step is running."""
        if self.ends_at != INFINITY or self._paused_at is not None:
            return
        self._began_at = now
        had_preemption = self._make_room_to_decode()
        num_reserved = self._growth(1)
        budget = self._shape.max_batched_tokens - self._num_decoding
        for request in tuple(self._prefilling):
            if budget <= 0 or request not in self._running:
                continue
            num_tokens = min(budget, request.num_prompt_tokens - request.num_computed)
            num_blocks = self._num_new_blocks(request, num_tokens)
            while request in self._running and num_blocks > self._num_available() - num_reserved:
                self._preempt_youngest()
                had_preemption = True
                num_reserved = self._growth(1)
            if request in self._running:
                self._schedule(request, num_tokens)
                budget -= num_tokens
        if not had_preemption:
            self._admit(budget, num_reserved)
        self._evict()
        if self._chunks:
            self._until(now + self._mixed_step_s(), 0)
        elif self._num_decoding:
            steps = self._steps_to_next_end()
            self._until(now + self._run_s(steps), steps)

    def pause(self, now: float) -> None:
        """Stop at the next step boundary."""
        self._paused_at = now
        self._cut(now)

    def resume(self, now: float) -> None:
        """Allow `plan` to start steps again. The step that was running at the pause must have ended."""
        if self._paused_at is not None:
            self.paused_s += now - self._paused_at
            self._paused_at = None

    def flush(self, paths: dict[int, Path]) -> None:
        """Drop all KV. Requests in flight wait to be prefilled under new block names, `paths` by trajectory."""
        self._interrupt_all()
        self.cache.clear()
        for request in self._waiting:
            request.path = paths[request.trajectory]

    def lose(self, now: float) -> list[Request]:
        """Remove and return all requests, each with its sampled tokens."""
        if self._run_steps:
            steps = min(self._steps_within(now - self._began_at, is_started=False), self._run_steps - 1)
            self.busy_s += now - self._began_at
            if steps:
                num_before = self.num_sampled_tokens
                self._decode(steps)
                self._count_tokens(self.num_sampled_tokens - num_before, self._began_at, now)
        self._chunks.clear()
        self._until(INFINITY, 0)
        self._interrupt_all()
        lost = list(self._waiting)
        self._waiting.clear()
        return lost

    # Time

    def _until(self, ends_at: float, num_steps: int) -> None:
        self.ends_at = ends_at
        self._run_steps = num_steps
        self.version += 1

    def _cut(self, now: float) -> None:
        """End a run of decode steps with the step that `now` falls into."""
        if self._run_steps:
            steps = max(1, self._steps_within(now - self._began_at, is_started=True))
            if steps < self._run_steps:
                self._until(self._began_at + self._run_s(steps), steps)

    def _run_s(self, num_steps: int) -> float:
        one_s = self._times.step(self._num_decoding, self._num_context_tokens)
        growth_s = self._times.step_token_s * self._num_decoding
        return num_steps * one_s + growth_s * num_steps * (num_steps - 1) / 2

    def _steps_within(self, seconds: float, *, is_started: bool) -> int:
        """Return the number of steps of the run within `seconds`; with `is_started`, include the running step."""
        one_s = self._times.step(self._num_decoding, self._num_context_tokens)
        half = self._times.step_token_s * self._num_decoding / 2
        if half > 0:
            linear = one_s - half
            steps = (math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half)
        else:
            steps = seconds / one_s
        # A boundary that rounding moved past `seconds` has been reached.
        return math.ceil(steps - 1e-7) if is_started else math.floor(steps + 1e-7)

    def _mixed_step_s(self) -> float:
        chunks = ((request.num_computed, request.num_computed + num_tokens) for request, num_tokens in self._chunks)
        return self._times.step_with_prefill(chunks, self._num_decoding, self._num_context_tokens)

    def _count_tokens(self, num_tokens: int, start: float, end: float) -> None:
        """Spread sampled tokens evenly over the seconds between `start` and `end`."""
        by_second = self.tokens_by_second
        by_second.extend([0.0] * (int(end) + 1 - len(by_second)))
        if int(start) == int(end):
            by_second[int(end)] += num_tokens
            return
        rate = num_tokens / (end - start)
        for second in range(int(start), int(end) + 1):
            by_second[second] += rate * (min(end, second + 1) - max(start, second))

    # Decode

    def _decode(self, num_steps: int) -> list[Request]:
        finished = []
        self._num_private_blocks += self._growth(num_steps)
        self._evict()
        self._step += num_steps
        num_tokens = self._num_decoding * num_steps
        self._num_context_tokens += num_tokens
        self.num_sampled_tokens += num_tokens
        while (request := self._next_to_end()) is not None and self._ends[0][0] <= self._step:
            heapq.heappop(self._ends)
            self._leave(request)
            finished.append(request)
        return finished

    def _next_to_end(self) -> Request | None:
        ends = self._ends
        while ends and (ends[0][1] != ends[0][2].admission or ends[0][2].joined_step < 0):
            heapq.heappop(ends)
        return ends[0][2] if ends else None

    def _steps_to_next_end(self) -> int:
        """Return the number of steps that all decoding requests can take together, which is at least one."""
        assert self._next_to_end() is not None
        num_steps = self._ends[0][0] - self._step
        num_available = self._num_available()
        size, num_decoding = self._shape.block_size, self._num_decoding
        if num_available >= num_decoding * -(-num_steps // size):
            return num_steps
        cycles, num_left = divmod(num_available, num_decoding)
        steps = cycles * size
        while steps < num_steps:
            num_left -= self._crossings[(self._step + steps) % size]
            if num_left < 0:
                break
            steps += 1
        return min(steps, num_steps)

    def _growth(self, num_steps: int) -> int:
        """Return the number of blocks that the decoding requests allocate in their next steps."""
        size = self._shape.block_size
        cycles, rest = divmod(num_steps, size)
        start = self._step % size
        crossings = self._crossings
        num_blocks = cycles * self._num_decoding + sum(crossings[start : start + rest])
        if start + rest > size:
            num_blocks += sum(crossings[: start + rest - size])
        return num_blocks

    def _join(self, request: Request) -> None:
        """Start decoding after the prompt, whose prefill sampled the first token."""
        request.joined_step = self._step
        self._num_decoding += 1
        self._num_context_tokens += request.num_prompt_tokens
        self._crossings[(self._step - request.num_prompt_tokens) % self._shape.block_size] += 1
        end = self._step + request.num_outputs - request.num_sampled
        heapq.heappush(self._ends, (end, request.admission, request))

    def _leave(self, request: Request) -> None:
        """Remove a running request; its full blocks stay in the prefix cache."""
        if request.joined_step >= 0:
            num_steps = self._step - request.joined_step
            request.num_computed = request.num_prompt_tokens + num_steps
            request.num_sampled += num_steps
            self._num_decoding -= 1
            self._num_context_tokens -= request.num_computed
            residue = (request.joined_step - request.num_prompt_tokens) % self._shape.block_size
            self._crossings[residue] -= 1
            request.joined_step = -1
        else:
            self._prefilling.remove(request)
        self._store(request, request.num_computed)
        if request.num_computed % self._shape.block_size:
            self._num_private_blocks -= 1
        self.cache.release(request.path, request.num_stored)
        request.num_stored = 0
        del self._running[request]

    # Prefill

    def _admit(self, budget: int, num_reserved: int) -> None:
        size = self._shape.block_size
        while self._waiting and budget > 0 and len(self._running) < self._shape.max_running:
            request = self._waiting[0]
            num_tokens = request.num_prompt_tokens
            num_matched, num_idle = self.cache.match(request.path, (num_tokens - 1) // size)
            num_missing = -(-num_tokens // size) - num_matched
            if num_missing > self._num_available() - num_reserved - num_idle:
                return
            self._waiting.popleft()
            self.cache.hold(request.path, num_matched)
            request.num_stored = num_matched
            request.num_computed = num_matched * size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed
            self._num_admissions += 1
            request.admission = self._num_admissions
            self._running[request] = None
            self._prefilling.append(request)
            num_chunk = min(budget, num_tokens - request.num_computed)
            self._schedule(request, num_chunk)
            budget -= num_chunk

    def _schedule(self, request: Request, num_tokens: int) -> None:
        """Schedule a chunk in the step that is starting; its full blocks are shared from now on."""
        self._num_private_blocks += self._num_new_blocks(request, num_tokens)
        self._chunks.append((request, num_tokens))
        self._store(request, request.num_computed + num_tokens)

    def _prefilled(self, request: Request, num_tokens: int) -> list[Request]:
        request.num_computed += num_tokens
        self.num_prefilled_tokens += num_tokens
        if request.num_computed < request.num_prompt_tokens:
            return []
        request.num_sampled += 1
        self.num_sampled_tokens += 1
        if request.num_sampled == request.num_outputs:
            self._leave(request)
            return [request]
        self._prefilling.remove(request)
        self._join(request)
        return []

    # Blocks

    def _num_available(self) -> int:
        """Count blocks that are free or can be evicted."""
        num_used = self.cache.num_blocks - self.cache.num_idle_blocks + self._num_private_blocks
        return self._shape.capacity_blocks - num_used

    def _num_new_blocks(self, request: Request, num_tokens: int) -> int:
        size = self._shape.block_size
        return -(-(request.num_computed + num_tokens) // size) - -(-request.num_computed // size)

    def _evict(self) -> None:
        num_over = self.cache.num_blocks + self._num_private_blocks - self._shape.capacity_blocks
        if num_over > 0:
            self.cache.evict(num_over)

    def _store(self, request: Request, num_tokens: int) -> None:
        """Put the full blocks of a running request's first `num_tokens` into the prefix cache."""
        num_full = num_tokens // self._shape.block_size
        if num_full > request.num_stored:
            self._num_private_blocks -= num_full - request.num_stored
            self.cache.store(request.path, request.num_stored, num_full)
            request.num_stored = num_full

    def _make_room_to_decode(self) -> bool:
        """Preempt until one decode step fits. Returns True if a request was preempted."""
        num_before = self.num_preemptions
        while self._num_decoding and self._growth(1) > self._num_available():
            self._preempt_youngest()
        return self.num_preemptions > num_before

    def _preempt_youngest(self) -> None:
        """Preempt the request admitted last; every request scheduled in this step is older."""
        self._interrupt(next(reversed(self._running)))
        self.num_preemptions += 1

    def _interrupt_all(self) -> None:
        while self._running:
            self._interrupt(next(reversed(self._running)))

    def _interrupt(self, request: Request) -> None:
        """Return a running request to the head of the queue, where it waits to be prefilled again."""
        is_decoding = request.joined_step >= 0
        self._leave(request)
        if is_decoding:
            request.num_prompt_tokens = request.num_computed + 1  # the last sampled token has no KV yet
        request.num_computed = 0
        self._waiting.appendleft(request)
