"""Batched sampling in torch from the distribution of `SamplingParams`, inside SGLang's schedulers.

SGLang 0.5.17's own sampler has different semantics for the same fields: with overlapped scheduling its penalties
are one token late, and a repeated prefill resets them; the repetition penalty ignores the prompt; seeds have an
effect only in deterministic mode; and logprobs are those of the distribution before truncation (measured by
`tests/gpu/sglang_native_sampler.py`). SGLang therefore only computes the logits of a batch, and this module does
the rest, in the order of `SamplingParams`.

Each row draws two uniform numbers, by a hash of the request's seed and the token's index. The first selects a block
of ids by the cumulative sum of block probabilities, the second selects an id in the block. The full vocabulary is
thus read only four times per step (softmax, maximum, block sums), and cumulative sums are short. The sums are
exact, in integers: an id with probability 0 is never sampled, and all tensor-parallel ranks, which have equal
logits, select the same token without communication.

A request's history (its ids and their counts) is stored on the device and updated as tokens are sampled, because
with overlapped scheduling the scheduler's own record is one token behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from agentloop.errors import InvariantBroken
from agentloop.values.sampling import LogprobsMode, SamplingParams
from agentloop_sglang.requests import RAW_TOKEN_ID

Constrain = Callable[[torch.Tensor], None]
"""A function that sets the logits of ids that a batch's constraints exclude to minus infinity, in place."""

_Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

_NUM_STEPS_KEPT = 3  # SGLang overlaps two steps
_BLOCK_IDS = 512  # ids per block; a vocabulary of 2^17 ids has 256 blocks
_BLOCK_BITS = 44  # scale of the blocks' probabilities as integers
_ID_BITS = 40  # scale of the most likely id in a block; sums over a block stay exact in 53 bits


class Row:
    """The sampler's state of one request."""

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, device: torch.device, seed: int
    ) -> None:
        """`seed` is used if `sampling` has no seed."""
        self.sampling = sampling
        self.seed = sampling.seed if sampling.seed is not None else seed
        self.num_sampled = 0
        self.device = device
        self._prompt_ids = sorted(set(prompt_ids)) if sampling.repetition_penalty != 1 else []
        self._reply: torch.Tensor | None = None  # ids to count before the next token is sampled
        self._seen_before: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None  # counts of the reply's ids, [vocabulary]
        self._seen: torch.Tensor | None = None  # True for ids of prompt and reply, [vocabulary]
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.has_history = self._counts is not None or self._seen is not None
        if sampling.logit_bias:
            self._bias_ids = self._ids([token_id for token_id, _ in sampling.logit_bias])
            biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
            self._biases = _to_device(biases, device)
        if sampling.min_tokens and sampling.stop_token_ids:
            self._stop_ids = self._ids(sampling.stop_token_ids)
        self.restart(())

    def restart(self, reply_ids: Sequence[int]) -> None:
        """Reset the reply so far, at a prefill. No step of the request may be running."""
        self.num_sampled = len(reply_ids)
        if self.has_history:
            self._reply = self._ids(list(reply_ids))
            self._seen_before = self._ids([*self._prompt_ids, *reply_ids])

    @property
    def is_banned_to_stop(self) -> bool:
        """True while stop tokens must not be sampled."""
        return self.num_sampled < self.sampling.min_tokens and len(self.sampling.stop_token_ids) > 0

    @property
    def may_be_adjusted(self) -> bool:
        """True if `adjust` may change the logits in any step."""
        return self.has_history or len(self.sampling.logit_bias) > 0 or self.sampling.min_tokens > 0

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply biases, the ban on stop tokens and penalties to logits `[vocabulary]`, in place."""
        self._count_reply()
        sampling = self.sampling
        if sampling.logit_bias:
            logits[self._bias_ids] += self._biases
        if self.is_banned_to_stop:
            logits[self._stop_ids] = -torch.inf
        if self._seen is not None:
            penalty = sampling.repetition_penalty
            repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self._seen, repeated, logits))
        if self._counts is not None:
            logits -= sampling.frequency_penalty * self._counts + sampling.presence_penalty * (self._counts > 0)

    def add(self, token_id: torch.Tensor) -> None:
        """Add a sampled id, `[1]` on the device, to the history."""
        if self._counts is not None:
            self._counts.index_add_(0, token_id, torch.ones_like(token_id, dtype=torch.float32))
        if self._seen is not None:
            self._seen[token_id] = True

    def _count_reply(self) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if self._counts is not None:
            self._counts.zero_().index_add_(0, reply, torch.ones_like(reply, dtype=torch.float32))
        if self._seen is not None and self._seen_before is not None:
            self._seen.zero_()[self._seen_before] = True

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return _to_device(np.array(ids, np.int64), self.device)


@dataclass(slots=True)
class SampledBatch:
    """The tokens of one step. All tensors are on the device."""

    token_ids: torch.Tensor  # [n], int64
    logprobs: torch.Tensor  # [n], float32, nats
    top_logprobs: torch.Tensor  # [n, k], descending; k is the maximum of the rows' requests, and can be 0
    top_ids: torch.Tensor  # [n, k]


@dataclass(slots=True)
class _RowTensors:
    """The parameters of a batch's rows as tensors, reused while the batch has the same rows."""

    rows: tuple[Row, ...]
    temperatures: torch.Tensor  # [n, 1]; 1 for greedy rows
    is_greedy: torch.Tensor  # [n]
    has_greedy: bool
    has_drawn: bool
    has_temperature: bool
    adjusted: list[tuple[int, Row]]  # (index, row) of the rows whose logits may be adjusted
    seeds: _Words
    num_tops: int
    truncated: torch.Tensor | None = None  # indices of the rows with top-k, top-p or min-p, [m]
    min_ps: torch.Tensor | None = None  # for the truncated rows, [m, 1]
    top_ks: torch.Tensor | None = None  # [m, 1]
    top_ps: torch.Tensor | None = None  # [m, 1]


class BatchSampler:
    """The sampler of one scheduler. A step calls `begin` on the host, and then `sample` on the device's stream."""

    def __init__(self, mode: LogprobsMode) -> None:
        self._mode = mode
        self._batch: _RowTensors | None = None
        self._uniforms = torch.empty(0, dtype=torch.float64)
        # Keep references to tensors of running steps, so that the allocator does not reuse their memory.
        self._recent: deque[object] = deque(maxlen=_NUM_STEPS_KEPT)

    def begin(self, rows: Sequence[Row]) -> None:
        """Copy the next step's parameters to the device, without waiting for it."""
        if self._batch is None or self._batch.rows != tuple(rows):
            self._batch = _new_batch(tuple(rows))
        if self._batch.has_drawn:
            self._uniforms = _to_device(_uniforms(self._batch), self._batch.temperatures.device)
        self._recent.append((self._batch, self._uniforms))

    def sample(self, logits: torch.Tensor, constrain: Constrain | None = None) -> SampledBatch:
        """Sample one id for each row of the last `begin` from the model's logits `[n, vocabulary]`.

        The ids are added to the rows' histories. In mode BOTH the raw logprob is the first of the alternatives.
        """
        batch = self._batch
        if batch is None:
            raise InvariantBroken("`sample` was called before `begin`")
        logits = logits.float()
        own = self._own_logits(logits, batch, constrain)
        scaled = own / batch.temperatures if batch.has_temperature else own
        if batch.truncated is not None:
            scaled = scaled.clone() if scaled is logits else scaled
            scaled[batch.truncated] = _truncated(scaled[batch.truncated], batch)
        softmax = _Softmax(scaled)
        token_ids = softmax.likeliest[:, 0]  # greedy rows are never truncated
        if batch.has_drawn:
            drawn = _draw(softmax.shares, self._uniforms)
            token_ids = torch.where(batch.is_greedy, token_ids, drawn) if batch.has_greedy else drawn
        for row in batch.rows:
            row.num_sampled += 1
        for place, row in batch.adjusted:
            row.add(token_ids[place : place + 1])
        raw = None
        if self._mode is not LogprobsMode.SAMPLED:
            raw = softmax if scaled is logits else _Softmax(logits)
        return self._with_logprobs(batch, softmax, raw, token_ids)

    @staticmethod
    def _own_logits(logits: torch.Tensor, batch: _RowTensors, constrain: Constrain | None) -> torch.Tensor:
        """Return the logits with everything but temperature and truncation applied."""
        if constrain is None and not batch.adjusted:
            return logits
        own = logits.clone()
        if constrain is not None:
            constrain(own)
        for place, row in batch.adjusted:
            row.adjust(own[place])
        return own

    def _with_logprobs(
        self, batch: _RowTensors, sampled: _Softmax, raw: _Softmax | None, token_ids: torch.Tensor
    ) -> SampledBatch:
        chosen = token_ids[:, None]
        reported = raw if raw is not None and self._mode is LogprobsMode.RAW else sampled
        tops, top_ids = reported.logits.topk(batch.num_tops, 1)
        tops = tops - reported.total
        if raw is not None and self._mode is LogprobsMode.BOTH:
            tops = torch.cat((raw.logprobs(chosen), tops), 1)
            top_ids = torch.cat((torch.full_like(chosen, RAW_TOKEN_ID), top_ids), 1)
        return SampledBatch(token_ids, reported.logprobs(chosen)[:, 0], tops, top_ids)


class _Softmax:
    """The distribution of logits `[n, vocabulary]`, float32."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.shares = logits.softmax(1)
        largest, self.likeliest = logits.max(1, keepdim=True)  # [n, 1] both
        # The largest probability is at least 1/vocabulary, so its logarithm is as exact as a logsumexp.
        self.total = largest - self.shares.gather(1, self.likeliest).log()  # [n, 1]: the log of the sum of exp

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logprobs of ids `[n, k]`."""
        return self.logits.gather(1, ids) - self.total


def _to_device(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy to the device through pinned memory, so that the copy does not synchronize with the stream."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _uniforms(batch: _RowTensors) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return two numbers in [0, 1) for each row, determined by its seed and the index of its next token."""
    places = np.fromiter((row.num_sampled for row in batch.rows), np.uint64, len(batch.rows))
    draws = places[:, None] * np.uint64(2) + np.arange(2, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mixed(batch.seeds[:, None] + draws * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: _Words) -> _Words:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014) to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _new_batch(rows: tuple[Row, ...]) -> _RowTensors:
    samplings, device = [row.sampling for row in rows], rows[0].device
    temperatures = np.array([[sampling.temperature] for sampling in samplings], np.float32)
    is_greedy = temperatures[:, 0] == 0
    with np.errstate(over="ignore"):
        # Mix once, so that adjacent seeds do not start adjacent sequences.
        seeds = _mixed(np.array([row.seed & (2**64 - 1) for row in rows], np.uint64) + np.uint64(1))
    batch = _RowTensors(
        rows,
        _to_device(np.where(temperatures == 0, np.float32(1), temperatures), device),
        _to_device(is_greedy, device),
        has_greedy=bool(is_greedy.any()),
        has_drawn=not is_greedy.all(),
        has_temperature=bool(((temperatures != 0) & (temperatures != 1)).any()),
        adjusted=[(place, row) for place, row in enumerate(rows) if row.may_be_adjusted],
        seeds=seeds,
        num_tops=max(sampling.num_top_logprobs for sampling in samplings),
    )
    cut = [
        place
        for place, sampling in enumerate(samplings)
        if sampling.temperature != 0 and (sampling.top_k or sampling.top_p < 1 or sampling.min_p)
    ]
    if cut:
        batch.truncated = _to_device(np.array(cut, np.int64), device)
        batch.min_ps = _to_device(np.array([[samplings[place].min_p] for place in cut], np.float32), device)
        batch.top_ps = _to_device(np.array([[samplings[place].top_p] for place in cut], np.float32), device)
        batch.top_ks = _to_device(np.array([[samplings[place].top_k] for place in cut], np.int64), device)
    return batch


def _truncated(logits: torch.Tensor, batch: _RowTensors) -> torch.Tensor:
    """Return the rows `[m, vocabulary]` with minus infinity for ids that min-p, then top-k, then top-p exclude."""
    if batch.min_ps is None or batch.top_ks is None or batch.top_ps is None:
        return logits
    size = logits.shape[1]
    floor = logits.amax(1, keepdim=True) + batch.min_ps.log()
    logits = logits.masked_fill(logits < floor, -torch.inf)
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    last = torch.where(batch.top_ks == 0, size, batch.top_ks.clamp(max=size)) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last), -torch.inf)
    shares = ordered.softmax(1)
    before = shares.cumsum(1) - shares
    # Never exclude the first id, for any rounding of its probability; a top_p of 1 excludes nothing.
    is_out = (before >= batch.top_ps) & (batch.top_ps < 1)
    is_out[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(is_out, -torch.inf))


def _draw(shares: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample one id per row. Shapes: `shares` `[n, vocabulary]`; `uniforms` `[n, 2]` in [0, 1), float64."""
    size = shares.shape[1]
    num_whole = size // _BLOCK_IDS
    sums = shares[:, : num_whole * _BLOCK_IDS].unflatten(1, (num_whole, _BLOCK_IDS)).sum(2)
    if num_whole * _BLOCK_IDS < size:
        sums = torch.cat((sums, shares[:, num_whole * _BLOCK_IDS :].sum(1, keepdim=True)), 1)
    block = _fall(sums.double() * 2.0**_BLOCK_BITS, uniforms[:, :1])
    ids = block * _BLOCK_IDS + torch.arange(_BLOCK_IDS, device=shares.device)
    inside = shares.gather(1, ids.clamp(max=size - 1)).double().masked_fill_(ids >= size, 0)
    place = _fall(inside * (2.0**_ID_BITS / inside.amax(1, keepdim=True)), uniforms[:, 1:])
    return (block * _BLOCK_IDS + place)[:, 0]


def _fall(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the indices `[n, 1]` that numbers in [0, 1) select in the cumulative sums of `weights` `[n, m]`."""
    sums = weights.long().cumsum(1)
    total = sums[:, -1:]
    point = (uniform * total).long()
    return torch.searchsorted(sums, torch.minimum(point, total - 1), right=True)
