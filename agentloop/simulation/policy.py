"""Tokens, latency and faults of a simulated engine; the engine itself is in `engine.py`.

A policy sees KV as one integer, its *state*: what a model would keep for the ids it has read. `advance` reads ids
into it under one weight version, so a state mixes versions exactly where real KV does, and drawing a token from it
shows whether the engine kept, reused or recomputed KV as it should.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, TypeAlias

import xxhash

from agentloop.types import GenerateRequest, Generation, SamplingParams, WeightVersionSpan

_MASK = 2**64 - 1
_MULTIPLIER = 0xD1342543DE82EF95  # odd, from Steele and Vigna's table of good 64-bit multipliers
_VERSION_STEP = 0x9E3779B97F4A7C15
_LOGITS = (0.0, -1.0, -2.0, -3.0)  # of the ids HashPolicy can sample at any position
_OTHER_LOGIT = -20.0  # of all other ids: they are sampled only where a bias lifts them
_pair = struct.Struct("<QQ").pack


class TokenStream(Protocol):
    """One request's tokens."""

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        """Read `token_ids` into a state; the state of nothing is 0. How ids are cut must not matter."""

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        """Return the next id and its logprob. Called once a sampled token, in order."""

    def alternatives(self, state: int, weight_version: int) -> tuple[tuple[int, float], ...]:
        """Return what `sample`, called next with the same arguments, chooses from: ids and logprobs, best first."""


class TokenPolicy(Protocol):
    """A stand-in for a model."""

    def open(self, request: GenerateRequest) -> TokenStream:
        """Open the tokens of one request. What it raises, `generate` raises."""


class HashPolicy:
    """Pseudo-random ids that prove their origin: a token follows from the ids before it, the versions they were
    read under, the version it is sampled under, and (unless temperature is 0) the seed.

    Each position has four candidate ids with logits 0, -1, -2, -3, so logprobs are those of a real distribution:
    temperature, top-k, top-p, penalties and biases apply; greedy logprobs are 0. A request without a seed draws
    from `seed` and its request id.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def open(self, request: GenerateRequest) -> TokenStream:
        own = request.sampling.seed
        if own is not None:
            seed = own
        else:
            seed = xxhash.xxh3_64_intdigest(request.request_id.encode(), seed=self._seed & _MASK)
        return _HashStream(request.sampling, self._vocab_size, seed & _MASK)

    def continuation(self, token_ids: Sequence[int], weight_version: int, num_tokens: int) -> tuple[int, ...]:
        """Return the greedy ids that follow `token_ids` where all KV and sampling is of one version."""
        stream = _HashStream(SamplingParams(num_tokens, temperature=0.0), self._vocab_size, 0)
        state = stream.advance(0, token_ids, weight_version)
        sampled = []
        for _ in range(num_tokens):
            token_id, _ = stream.sample(state, weight_version)
            sampled.append(token_id)
            state = stream.advance(state, (token_id,), weight_version)
        return tuple(sampled)


class _HashStream:
    __slots__ = ("_adjustment", "_logits", "_sampling", "_seed", "_vocab_size")

    def __init__(self, sampling: SamplingParams, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._sampling = sampling
        self._logits = _LOGITS[:vocab_size]
        self._adjustment = _Adjustment(sampling) if _Adjustment.is_needed(sampling) else None

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        step = weight_version * _VERSION_STEP + 1
        for token_id in token_ids:
            state = (state * _MULTIPLIER + token_id + step) & _MASK
        return state

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        place = xxhash.xxh3_64_intdigest(_pair(state, weight_version & _MASK))
        ids, (cumulative, logprobs) = self._candidates(place)
        choice = 0
        if len(logprobs) > 1:
            draw = xxhash.xxh3_64_intdigest(_pair(place, self._seed)) / 2**64
            choice = min(bisect_right(cumulative, draw), len(logprobs) - 1)
        token_id = (place + choice) % self._vocab_size if ids is None else ids[choice]
        if self._adjustment is not None:
            self._adjustment.counts[token_id] += 1
        return token_id, logprobs[choice]

    def alternatives(self, state: int, weight_version: int) -> tuple[tuple[int, float], ...]:
        place = xxhash.xxh3_64_intdigest(_pair(state, weight_version & _MASK))
        ids, (_, logprobs) = self._candidates(place)
        if ids is None:
            ids = tuple((place + index) % self._vocab_size for index in range(len(logprobs)))
        return tuple(zip(ids, logprobs, strict=False))

    def _candidates(self, place: int) -> tuple[tuple[int, ...] | None, _Distribution]:
        """Return ids best first (None: those from `place` on, in order), and how likely the first of them are."""
        sampling, logits, ids = self._sampling, self._logits, None
        if self._adjustment is not None:
            base = {(place + index) % self._vocab_size: logit for index, logit in enumerate(logits)}
            ids, logits = self._adjustment.apply(base)
        return ids, _distribution(logits, sampling.temperature, sampling.top_p, sampling.top_k)


class _Adjustment:
    """The penalties and biases of one request, applied to its logits."""

    __slots__ = ("_bias", "_frequency", "_presence", "counts")

    def __init__(self, sampling: SamplingParams) -> None:
        self._bias = dict(sampling.logit_bias)
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self.counts: Counter[int] = Counter()  # of the ids sampled so far

    @staticmethod
    def is_needed(sampling: SamplingParams) -> bool:
        return bool(sampling.logit_bias or sampling.frequency_penalty or sampling.presence_penalty)

    def apply(self, base: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return ids and logits, best first: those of `base` and the biased ones; the best logit becomes 0."""
        logits = {token_id: _OTHER_LOGIT for token_id, bias in self._bias.items() if bias > 0} | base
        for token_id in logits:
            count = self.counts[token_id]
            penalty = self._frequency * count + self._presence * (count > 0)
            logits[token_id] += self._bias.get(token_id, 0.0) - penalty
        ids = sorted(logits, key=lambda token_id: -logits[token_id])
        return tuple(ids), tuple(logits[token_id] - logits[ids[0]] for token_id in ids)


_Distribution: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


@lru_cache(maxsize=1024)
def _distribution(logits: tuple[float, ...], temperature: float, top_p: float, top_k: int) -> _Distribution:
    """Return cumulative probabilities and logprobs of the candidates that sampling leaves, best first."""
    logits = logits[: top_k or len(logits)]
    if temperature == 0:
        return (1.0,), (0.0,)
    # The best logit is 0, so no weight overflows however small the temperature is.
    weights = [math.exp(logit / temperature) for logit in logits]
    total = sum(weights)
    kept, mass = 0, 0.0
    while kept < len(weights) and (kept == 0 or mass < top_p):
        mass += weights[kept] / total
        kept += 1
    total = sum(weights[:kept])
    cumulative = tuple(sum(weights[: index + 1]) / total for index in range(kept))
    logprobs = tuple(logit / temperature - math.log(total) for logit in logits[:kept])
    return cumulative, logprobs


class ScriptedPolicy:
    """A policy with given replies: `script` maps a prompt's ids to the ids that answer it.

    After its last id a reply goes on with the request's first stop token, or without one with its last id, until
    the request ends. Logprobs are made up and tell positions apart; what is sampled has no alternative. An empty
    reply needs a stop token. A script must honour the constraints of the requests it answers.
    """

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._script = script

    def open(self, request: GenerateRequest) -> TokenStream:
        reply = tuple(self._script(request.token_ids))
        stops = request.sampling.stop_token_ids
        return _ScriptedStream(reply, stops[0] if stops else reply[-1])


class _ScriptedStream:
    __slots__ = ("_after", "_num_sampled", "_reply")

    def __init__(self, reply: tuple[int, ...], after: int) -> None:
        self._reply = reply
        self._after = after
        self._num_sampled = 0

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        return 0

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        token_id, logprob = self._next()
        self._num_sampled += 1
        return token_id, logprob

    def alternatives(self, state: int, weight_version: int) -> tuple[tuple[int, float], ...]:
        return (self._next(),)

    def _next(self) -> tuple[int, float]:
        position = self._num_sampled
        token_id = self._reply[position] if position < len(self._reply) else self._after
        return token_id, -(1 + position % 7) / 8


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds of one engine step: `a + b*x` for x uncached tokens prefilled in it, and
    `alpha + beta*batch + gamma*context_tokens` for the requests that decode. All zero: no time passes."""

    prefill_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    decode_s_per_request: float = 0.0
    decode_s_per_context_token: float = 0.0

    @property
    def is_zero(self) -> bool:
        return self == LatencyModel()

    def step_s(self, num_prefilled: int, num_decoding: int, num_context_tokens: int) -> float:
        """Return the seconds one step takes."""
        prefill_s = self.prefill_s + self.prefill_s_per_token * num_prefilled if num_prefilled else 0.0
        if not num_decoding:
            return prefill_s
        per_batch_s = self.decode_s_per_request * num_decoding
        return prefill_s + self.decode_s + per_batch_s + self.decode_s_per_context_token * num_context_tokens


class Malformation(StrEnum):
    """Ways for an engine's answer to be wrong."""

    SHORT_LOGPROBS = "short_logprobs"  # one logprob fewer than ids
    ID_OUT_OF_RANGE = "id_out_of_range"  # the last id is the vocabulary's size
    SENTINEL_LOGPROB = "sentinel_logprob"  # the last logprob is -9999
    NAN_LOGPROB = "nan_logprob"  # the last logprob is NaN
    SPAN_GAP = "span_gap"  # the last token has no weight version
    SHORT_TOP_LOGPROBS = "short_top_logprobs"  # alternatives for one token fewer than ids


@dataclass(slots=True)
class Faults:
    """Faults to come; a test arms them at any time, and each occurrence uses one up."""

    num_lost: int = 0  # so many `generate` calls raise EngineLost at once
    num_hung: int = 0  # so many requests are accepted and never run; abort, cancellation and close end them
    malformed: list[Malformation] = field(default_factory=list)  # how the next answers are wrong, in order
    num_failed_stages: int = 0  # so many stages raise CheckpointUnreadable
    num_failed_commits: int = 0  # so many commits raise WeightUpdateFailed
    commit_delay_s: float = 0.0  # every commit takes so much longer


def malformed(generation: Generation, how: Malformation, vocab_size: int) -> Generation:
    """Return a generation of at least one token, made wrong."""
    match how:
        case Malformation.SHORT_LOGPROBS:
            return replace(generation, logprobs=generation.logprobs[:-1])
        case Malformation.ID_OUT_OF_RANGE:
            return replace(generation, token_ids=(*generation.token_ids[:-1], vocab_size))
        case Malformation.SENTINEL_LOGPROB:
            return replace(generation, logprobs=(*generation.logprobs[:-1], -9999.0))
        case Malformation.NAN_LOGPROB:
            return replace(generation, logprobs=(*generation.logprobs[:-1], math.nan))
        case Malformation.SPAN_GAP:
            *earlier, last = generation.weight_versions
            cut = WeightVersionSpan(last.version, last.start, last.end - 1)
            return replace(generation, weight_versions=(*earlier, cut))
        case Malformation.SHORT_TOP_LOGPROBS:
            return replace(generation, top_logprobs=generation.top_logprobs[:-1])
