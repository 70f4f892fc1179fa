"""Continuous batching of a simulated engine: waiting, running and preempted requests. Synchronous.

The scheduler owns the queues, each request's tokens and the KV of running requests. Invariants: a request is
exactly one of waiting, running and hung; only running requests hold KV; preempted requests wait before new ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentloop.engine.adapters import HeldAdapter
from agentloop.simulation.kv_cache import KVCache, KVSequence
from agentloop.simulation.policy import Malformation, TokenStream, routed_experts
from agentloop.types import FinishReason, GenerateRequest, Generation
from agentloop.values.aux_rows import AuxKind, AuxRows, ragged
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode

_PREFILL_TOKENS_PER_STEP = 4096  # admission stops at this budget, as in a real scheduler
_FIRST_ADAPTER_SALT = 1 << 63  # larger than all weight versions


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from its arrival to its end."""

    request: GenerateRequest
    stream: TokenStream
    max_tokens: int
    done: asyncio.Future[Generation]
    malformation: Malformation | None
    has_progress: asyncio.Event | None  # set when a streamed request has new tokens
    sequence: KVSequence
    sampled: SampledTokens
    has_run: bool = False
    cached_tokens: int = 0
    first_token_at: float | None = None  # time of the event loop
    adapter: HeldAdapter | None = None  # the adapter version that the request uses
    has_routes: bool = False
    mask: list[Sequence[int]] | None = None  # the ids kept for each token; None: the engine returns no mask
    num_with_aux: int = 0  # tokens whose auxiliary rows are in `sampled`

    def weight_version(self, served: int) -> int:
        """Return the version under which the request runs: the adapter's, else `served`."""
        return served if self.adapter is None else self.adapter.adapter.version

    def sample(self, version: int) -> FinishReason | None:
        """Append one sampled token. Returns the finish reason if the request has ended."""
        sampling, state, sampled = self.request.sampling, self.sequence.state, self.sampled
        if sampling.score_from is not None:
            self._score(sampling.score_from, version)
            return FinishReason.LENGTH
        alternatives, raw_logprob, mode = None, None, sampled.logprobs_mode
        if sampling.num_top_logprobs:
            likeliest = self.stream.alternatives(state, version, is_raw=mode is LogprobsMode.RAW)
            alternatives = likeliest[: sampling.num_top_logprobs]
        if self.mask is not None:
            self.mask.append(sorted(token_id for token_id, _ in self.stream.alternatives(state, version)))
        token_id, logprob = self.stream.sample(state, version)
        if mode is LogprobsMode.BOTH:
            raw_logprob = self.stream.raw_logprob(state, version, token_id)
        elif mode is LogprobsMode.RAW:
            logprob = self.stream.raw_logprob(state, version, token_id)
        if not sampled.token_ids:
            self.first_token_at = self.done.get_loop().time()
        sampled.append(token_id, logprob, version, alternatives, raw_logprob)
        if self.has_progress is not None:
            self.has_progress.set()
        num_tokens = len(sampled.token_ids)
        if token_id in sampling.stop_token_ids and num_tokens > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_tokens else None

    def with_aux(self) -> SampledTokens:
        """Return the tokens so far, after adding the auxiliary rows of the new ones."""
        sampled, num_had, num_prompt = self.sampled, self.num_with_aux, len(self.request.token_ids)
        if len(sampled) == num_had or not (self.has_routes or self.mask):
            return sampled
        aux: dict[AuxKind, AuxRows] = {}
        if self.has_routes:
            start = num_prompt + num_had - 1 if num_had else self.request.routes_from
            ids = (*self.request.token_ids, *sampled.token_ids)
            aux[AuxKind.ROUTED_EXPERTS] = routed_experts(ids, start, len(ids) - 1)
        if self.mask:
            aux[AuxKind.SAMPLING_MASK] = ragged(num_prompt + num_had, self.mask[num_had:])
        sampled.add_aux(aux)
        self.num_with_aux = len(sampled)
        return sampled

    def _score(self, start: int, version: int) -> None:
        """Append the prompt's own tokens from `start`, with logprobs computed under `version` without cached KV."""
        ids, stream, num_tops = self.request.token_ids, self.stream, self.request.sampling.num_top_logprobs
        state = stream.advance(0, ids[:start], version)
        for token_id in ids[start:]:
            tops = stream.alternatives(state, version, is_raw=True)[:num_tops] if num_tops else None
            self.sampled.append(token_id, stream.raw_logprob(state, version, token_id), version, tops)
            state = stream.advance(state, (token_id,), version)


class Scheduler:
    """The requests of one engine."""

    def __init__(self, kv: KVCache, max_running: int, kv_version: Callable[[int | None, int], int]) -> None:
        """`kv_version` is `EngineLifecycle.kv_version`: maps a requested and the served version to a KV version."""
        self.num_sampled_tokens = 0
        self.num_preemptions = 0
        self._kv = kv
        self._max_running = max_running
        self._live: dict[str, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()  # bounded by the number of callers, which wait for one each
        self._running: dict[str, LiveRequest] = {}  # in order of admission
        self._kv_version = kv_version
        self._num_prefill_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests that are not waiting, including hung ones."""
        return len(self._live) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of the requests without a sampled token."""
        return self._num_prefill_tokens

    @property
    def has_begun(self) -> bool:
        """True while a request that has run has not ended."""
        return self.num_running > 0 or (bool(self._waiting) and self._waiting[0].has_run)

    def can_step(self, *, only_begun: bool) -> bool:
        """Return True if a step has work. With `only_begun`, requests that have not run are not started."""
        return bool(self._running) or (bool(self._waiting) and (not only_begun or self._waiting[0].has_run))

    def find(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def all(self) -> tuple[LiveRequest, ...]:
        """Return every request, oldest first."""
        return tuple(self._live.values())

    def submit(self, live: LiveRequest, *, is_hung: bool) -> None:
        """Queue a request with an unused id. A hung request is registered but not queued."""
        self._live[live.request.request_id] = live
        self._num_prefill_tokens += len(live.request.token_ids)
        if not is_hung:
            rank = live.request.sampling.priority
            later = (
                position
                for position, other in enumerate(self._waiting)
                if not other.has_run and other.request.sampling.priority > rank
            )
            self._waiting.insert(next(later, len(self._waiting)), live)

    def remove(self, live: LiveRequest) -> None:
        """Remove a request in any state. Idempotent."""
        request_id = live.request.request_id
        if self._live.get(request_id) is not live:
            return
        del self._live[request_id]
        if not live.sampled:
            self._num_prefill_tokens -= len(live.request.token_ids)
        if self._running.pop(request_id, None) is None and live in self._waiting:
            self._waiting.remove(live)
        self._kv.release(live.sequence)

    def drop_kv(self) -> None:
        """Preempt all running requests, which are prefilled again later, and clear the prefix cache."""
        for live in reversed(tuple(self._running.values())):
            self._preempt(live)
        self._kv.clear()

    def admit(self, version: int, *, only_begun: bool, max_admitted: int) -> int:
        """Admit waiting requests, with KV of all their ids. Returns the number of prefilled (uncached) tokens."""
        num_prefilled = 0
        max_running = min(self._max_running, len(self._running) + max_admitted)
        while self._waiting and len(self._running) < max_running:
            live = self._waiting[0]
            if num_prefilled >= _PREFILL_TOKENS_PER_STEP or (only_begun and not live.has_run):
                break
            ids = (*live.request.token_ids, *live.sampled.token_ids)
            num_cached = self._acquire(live, ids, live.weight_version(version))
            if num_cached is None:
                break
            self._running[live.request.request_id] = self._waiting.popleft()
            if not live.has_run:
                live.has_run, live.cached_tokens = True, num_cached
            num_prefilled += len(ids) - num_cached
        return num_prefilled

    def _acquire(self, live: LiveRequest, ids: tuple[int, ...], version: int) -> int | None:
        # A preempted request is prefilled under the current version, so its KV version may change.
        if live.adapter is None:
            salt = self._kv_version(live.request.kv_version, version)
        else:
            salt = _FIRST_ADAPTER_SALT + live.adapter.number
        if live.sequence.kv_version != salt:
            live.sequence = self._kv.sequence(salt)

        def read(state: int, token_ids: Sequence[int]) -> int:
            return live.stream.advance(state, token_ids, version)

        return self._kv.admit(live.sequence, ids, read)

    def decoding_tokens(self) -> tuple[int, int]:
        """Return the number of requests that decode in the next step, and of their KV tokens."""
        lengths = [live.sequence.num_tokens for live in self._running.values() if live.sampled.token_ids]
        return len(lengths), sum(lengths)

    def step(self, version: int, max_burst: int) -> list[tuple[LiveRequest, FinishReason]]:
        """Sample one token per running request; with `max_burst` > 1, up to that many tokens in total.

        Returns the requests that ended, which are already removed.
        """
        ended = []
        budget = max_burst
        for live in tuple(self._running.values()):
            reason, num_sampled = self._sample(live, live.weight_version(version), max(1, budget))
            self.num_sampled_tokens += num_sampled
            if reason is not None:
                self.remove(live)
                ended.append((live, reason))
            if max_burst > 1:
                budget -= num_sampled
                if budget <= 0:
                    break
        return ended

    def _sample(self, live: LiveRequest, version: int, max_tokens: int) -> tuple[FinishReason | None, int]:
        """Sample up to `max_tokens` tokens. Returns the finish reason or None, and the number of tokens."""
        if live.request.request_id not in self._running:
            return None, 0  # preempted earlier in this step
        prompt_len, sequence = len(live.request.token_ids), live.sequence
        for num_sampled in range(max_tokens):
            if sequence.num_tokens < prompt_len + len(live.sampled.token_ids) and not self._grow(live, version):
                return None, num_sampled
            if not live.sampled:
                self._num_prefill_tokens -= prompt_len
            reason = live.sample(version)
            if reason is not None:
                return reason, num_sampled + 1
        return None, max_tokens

    def _grow(self, live: LiveRequest, version: int) -> bool:
        """Compute the KV of the last sampled token. Returns False if the request itself was preempted."""
        last = live.sampled.token_ids[-1]
        state = live.stream.advance(live.sequence.state, (last,), version)
        while not self._kv.append(live.sequence, last, state):
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is live:
                return False
        return True

    def _preempt(self, live: LiveRequest) -> None:
        self.num_preemptions += 1
        self._kv.release(live.sequence)
        del self._running[live.request.request_id]
        self._waiting.appendleft(live)
