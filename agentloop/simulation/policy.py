"""Tokens, latency and faults of a simulated engine.

A policy represents KV by one integer, its *state*. `advance` adds ids to it under one weight version, so a state
mixes versions exactly where real KV does. The token sampled from a state therefore shows if the engine kept, reused
or recomputed KV correctly.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Protocol, TypeAlias

import numpy as np
import xxhash

from agentloop.types import GenerateRequest, Generation, SamplingParams, WeightVersionSpan
from agentloop.values.aux_rows import AuxKind, AuxRows, ragged

_MASK = 2**64 - 1
_MULTIPLIER = 0xD1342543DE82EF95  # odd, from Steele and Vigna's table of good 64-bit multipliers
_VERSION_STEP = 0x9E3779B97F4A7C15
_LOGITS = (3.0, 2.0, 1.0, 0.0)  # logits of the candidate ids of HashPolicy at each position
_OTHER_LOGIT = -17.0  # logit of all other ids, which are sampled only with a bias or if all candidates are banned

_pair = struct.Struct("<QQ").pack


NUM_EXPERTS = 64
ROUTES_SHAPE = (3, 2)  # layers, experts per token


def routed_experts(token_ids: Sequence[int], start: int, end: int) -> AuxRows:
    """Return the experts of the positions `[start, end)` of a context, which depend on each token and its position
    only, so that a reader can compare recorded rows with the recorded ids."""
    width = math.prod(ROUTES_SHAPE)
    ids = np.asarray(token_ids[start:end], np.int64)[:, None] * 31 + np.arange(start, end)[:, None] * 7
    values = (ids + np.arange(width) * 13) % NUM_EXPERTS
    return AuxRows(start, values.astype(np.uint8).ravel(), ROUTES_SHAPE)


class TokenStream(Protocol):
    """The token source of one request."""

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        """Return the state after `token_ids`. The initial state is 0. The result is independent of chunking."""

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        """Return the next id and its logprob. Called once per sampled token, in order."""

    def alternatives(
        self, state: int, weight_version: int, *, is_raw: bool = False
    ) -> tuple[tuple[int, float], ...]:
        """Return the candidates of the next `sample` with the same arguments: ids and logprobs, best first.

        With `is_raw`, logprobs are those of the plain softmax, independent of the request's sampling parameters.
        """

    def raw_logprob(self, state: int, weight_version: int, token_id: int) -> float:
        """Return the plain softmax's logprob of the id that `sample` returned for the same arguments."""


class TokenPolicy(Protocol):
    """A replacement of a model."""

    def open(self, request: GenerateRequest) -> TokenStream:
        """Return the token source of one request. `generate` raises its exceptions."""


class HashPolicy:
    """Samples pseudo-random ids that prove their origin.

    A token is a function of the preceding ids, the weight versions under which they were read, the adapter, the
    version under which it is sampled, and (unless temperature is 0) the seed. Each position has four candidates
    with the logits 3, 2, 1, 0, to which `SamplingParams` apply as in a real engine. Without a seed in the request,
    the seed is derived from `seed` and the request id.
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
        salt = xxhash.xxh3_64_intdigest(request.adapter.encode()) if request.adapter else 0
        return _HashStream(request.sampling, self._vocab_size, seed & _MASK, request.token_ids, salt)


class _HashStream:
    __slots__ = ("_adjustment", "_logits", "_salt", "_sampling", "_seed", "_vocab_size")

    def __init__(
        self, sampling: SamplingParams, vocab_size: int, seed: int, prompt_ids: Sequence[int], salt: int
    ) -> None:
        """`salt` identifies the adapter; 0 without an adapter."""
        self._vocab_size = vocab_size
        self._seed = seed
        self._sampling = sampling
        self._salt = salt
        self._logits = _LOGITS[:vocab_size]
        is_adjusted = _Adjustment.is_needed(sampling)
        self._adjustment = _Adjustment(sampling, vocab_size, prompt_ids) if is_adjusted else None

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        step = weight_version * _VERSION_STEP + 1 + self._salt
        for token_id in token_ids:
            state = (state * _MULTIPLIER + token_id + step) & _MASK
        return state

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        place = xxhash.xxh3_64_intdigest(_pair(state, weight_version & _MASK))
        ids, (cumulative, logprobs) = self._candidates(place)
        choice = 0
        if len(cumulative) > 1:
            draw = xxhash.xxh3_64_intdigest(_pair(place, self._seed)) / 2**64
            choice = min(bisect_right(cumulative, draw), len(cumulative) - 1)
        token_id = (place + choice) % self._vocab_size if ids is None else ids[choice]
        if self._adjustment is not None:
            self._adjustment.add(token_id)
        return token_id, logprobs[choice]

    def alternatives(
        self, state: int, weight_version: int, *, is_raw: bool = False
    ) -> tuple[tuple[int, float], ...]:
        place = xxhash.xxh3_64_intdigest(_pair(state, weight_version & _MASK))
        ids, (_, logprobs) = (None, _distribution(self._logits)) if is_raw else self._candidates(place)
        if ids is None:
            ids = tuple((place + index) % self._vocab_size for index in range(len(logprobs)))
        return tuple(zip(ids, logprobs, strict=False))

    def raw_logprob(self, state: int, weight_version: int, token_id: int) -> float:
        place = xxhash.xxh3_64_intdigest(_pair(state, weight_version & _MASK))
        index, (_, logprobs) = (token_id - place) % self._vocab_size, _distribution(self._logits)
        return logprobs[index] if index < len(logprobs) else logprobs[0] + _OTHER_LOGIT - self._logits[0]

    def _candidates(self, place: int) -> tuple[tuple[int, ...] | None, _Distribution]:
        """Return the candidate ids, best first, and the distribution; None means consecutive ids from `place`."""
        sampling, logits, ids = self._sampling, self._logits, None
        if self._adjustment is not None:
            base = {(place + index) % self._vocab_size: logit for index, logit in enumerate(logits)}
            ids, logits = self._adjustment.apply(base)
        return ids, _distribution(logits, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


class _Adjustment:
    """The biases, bans and penalties of one request, applied to its logits."""

    __slots__ = ("_bias", "_counts", "_num_sampled", "_prompt_ids", "_sampling", "_stop_ids", "_vocab_size")

    def __init__(self, sampling: SamplingParams, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._bias = dict(sampling.logit_bias)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._prompt_ids = frozenset(prompt_ids if sampling.repetition_penalty != 1 else ())
        self._counts: Counter[int] = Counter()  # number of samples per id
        self._num_sampled = 0

    @staticmethod
    def is_needed(sampling: SamplingParams) -> bool:
        has_penalty = sampling.looks_back or sampling.repetition_penalty != 1
        return bool(sampling.logit_bias or has_penalty or (sampling.min_tokens and sampling.stop_token_ids))

    def add(self, token_id: int) -> None:
        """Count a sampled id."""
        self._counts[token_id] += 1
        self._num_sampled += 1

    def apply(self, base: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the ids of `base` and the biased ids, without banned ones, and their logits; best first."""
        banned = self._stop_ids if self._num_sampled < self._sampling.min_tokens else frozenset()
        known = {token_id: _OTHER_LOGIT for token_id, bias in self._bias.items() if bias > 0} | base
        logits = {
            token_id: self._adjusted(token_id, logit) for token_id, logit in known.items() if token_id not in banned
        }
        if not logits:
            spare = next((token_id for token_id in range(self._vocab_size) if token_id not in banned), min(base))
            logits = {spare: self._adjusted(spare, _OTHER_LOGIT)}
        ids = sorted(logits, key=lambda token_id: -logits[token_id])
        return tuple(ids), tuple(logits[token_id] for token_id in ids)

    def _adjusted(self, token_id: int, logit: float) -> float:
        sampling, count = self._sampling, self._counts[token_id]
        logit += self._bias.get(token_id, 0.0)
        if count or token_id in self._prompt_ids:
            repetition = sampling.repetition_penalty
            logit = logit / repetition if logit > 0 else logit * repetition
        return logit - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)


_Distribution: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


@lru_cache(maxsize=1024)
def _distribution(
    logits: tuple[float, ...], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> _Distribution:
    """Return cumulative probabilities of the ids that can be sampled, best first, and the logprobs to report."""
    if temperature == 0:
        return (1.0,), _log_softmax(logits)
    # Relative to the largest logit, so that small temperatures cause no overflow.
    scaled = [(logit - logits[0]) / temperature for logit in logits]
    scaled = [logit for logit in scaled if min_p == 0 or logit >= math.log(min_p)]
    logprobs = _log_softmax(scaled[: top_k or len(scaled)])
    if top_p < 1:
        before = (0.0, *accumulate(map(math.exp, logprobs)))  # probability mass of all more likely ids
        logprobs = _log_softmax([logprob for logprob, mass in zip(logprobs, before, strict=False) if mass < top_p])
    return tuple(accumulate(map(math.exp, logprobs))), logprobs


def _log_softmax(logits: Sequence[float]) -> tuple[float, ...]:
    """Return the logprobs of logits in descending order."""
    total = math.log(sum(math.exp(logit - logits[0]) for logit in logits))
    return tuple(logit - logits[0] - total for logit in logits)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The duration of an engine step.

    A step takes `prefill_s + prefill_s_per_token * tokens` for uncached prefill tokens, plus `decode_s +
    decode_s_per_request * requests + decode_s_per_context_token * context_tokens` for decoding requests. If all
    fields are zero, steps take no time.
    """

    prefill_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    decode_s_per_request: float = 0.0
    decode_s_per_context_token: float = 0.0

    @property
    def is_zero(self) -> bool:
        return self == LatencyModel()

    def step_s(self, num_prefilled: int, num_decoding: int, num_context_tokens: int) -> float:
        """Return the duration of a step in seconds."""
        prefill_s = self.prefill_s + self.prefill_s_per_token * num_prefilled if num_prefilled else 0.0
        if not num_decoding:
            return prefill_s
        per_batch_s = self.decode_s_per_request * num_decoding
        return prefill_s + self.decode_s + per_batch_s + self.decode_s_per_context_token * num_context_tokens


class Malformation(StrEnum):
    """Defects of an engine's answer."""

    SHORT_LOGPROBS = "short_logprobs"  # one logprob fewer than ids
    ID_OUT_OF_RANGE = "id_out_of_range"  # the last id is the vocabulary's size
    SENTINEL_LOGPROB = "sentinel_logprob"  # the last logprob is -9999
    NAN_LOGPROB = "nan_logprob"  # the last logprob is NaN
    SPAN_GAP = "span_gap"  # the last token has no weight version
    SHORT_TOP_LOGPROBS = "short_top_logprobs"  # the last token has no alternatives
    SHORT_ROUTES = "short_routes"  # the last row of the routed experts is missing
    LATE_MASK = "late_mask"  # the rows of the sampling mask belong to the tokens before theirs


@dataclass(slots=True)
class Faults:
    """Faults to inject. A test may set them at any time; each occurrence decrements a counter."""

    num_lost: int = 0  # number of `generate` calls that raise EngineLost immediately
    num_hung: int = 0  # number of requests that are accepted but never run; abort, cancellation and close end them
    malformed: list[Malformation] = field(default_factory=list)  # defects of the next answers, in order
    num_failed_stages: int = 0  # number of `stage` calls that raise CheckpointUnreadable
    num_failed_commits: int = 0  # number of commits that raise WeightUpdateFailed
    commit_delay_s: float = 0.0  # additional duration of every commit
    noise_versions: frozenset[int] = frozenset()  # versions that fail the canary check
    canary_delay_s: float = 0.0  # duration of every canary check


def malformed(generation: Generation, how: Malformation, vocab_size: int) -> Generation:
    """Return a generation of at least one token with the defect `how`."""
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
        case Malformation.SHORT_ROUTES:
            rows = (generation.aux or {})[AuxKind.ROUTED_EXPERTS]
            return replace(generation, aux={AuxKind.ROUTED_EXPERTS: rows.cut(rows.start, rows.end - 1)})
        case Malformation.LATE_MASK:
            rows = (generation.aux or {})[AuxKind.SAMPLING_MASK]
            late = [rows.rows()[-1], *rows.rows()[:-1]]
            return replace(generation, aux={AuxKind.SAMPLING_MASK: ragged(rows.start, late)})
