"""The distribution of `SamplingParams`, sampled in torch for a batch: the half that runs inside SGLang's
schedulers.

SGLang 0.5.17's own sampler means something else by the same fields: its penalties lag a token behind with
overlapped scheduling and are forgotten when a request is prefilled again, the repetition penalty leaves the
prompt out, seeds count in its deterministic mode only, and a logprob is that of the distribution before
truncation. So SGLang is asked for nothing but a batch of logits, and everything else is done here, in the order
of `SamplingParams`.

One uniform number a row is drawn, by a hash of the request's seed and the token's place; the token is where it
falls in the running sum of the row's weights. Weights are whole numbers, so sums are exact: what has no weight is
never sampled, and every tensor-parallel rank, which sees the same logits, finds the same token without asking the
others.

A request's history (which ids it has, how often) is kept on the device beside its row and grows as tokens are
sampled: with overlapped scheduling the scheduler's own record is a token behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from agentloop.sampling import LogprobsMode, SamplingParams
from agentloop_servers.engines.sglang.requests import RAW_TOKEN_ID

Constrain = Callable[[torch.Tensor], None]
"""Writes minus infinity where a batch's constraints exclude an id, in place."""

_WEIGHT_BITS = 36  # of the likeliest id; sums of 2^17 ids stay exact in 53 bits
_ROWS_AT_ONCE = 128  # of the drawing, whose whole numbers take 16 bytes an id


class Row:
    """One request as the sampler sees it, from its first token to its last."""

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, device: torch.device, seed: int
    ) -> None:
        """`seed` is used where `sampling` has none."""
        self.sampling = sampling
        self.seed = sampling.seed if sampling.seed is not None else seed
        self.num_sampled = 0
        self._device = device
        ids, biases = [pair[0] for pair in sampling.logit_bias], [pair[1] for pair in sampling.logit_bias]
        self.bias_ids, self.biases = self._tensor(ids), torch.tensor(biases, dtype=torch.float32, device=device)
        self.stop_ids = self._tensor(sampling.stop_token_ids)
        self.counts: torch.Tensor | None = None  # of the reply's ids, [vocabulary]
        if sampling.frequency_penalty or sampling.presence_penalty:
            self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.seen: torch.Tensor | None = None  # ids of prompt and reply, [vocabulary]
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._prompt_ids = self._tensor(sorted(set(prompt_ids)))
        self.restart(())

    def restart(self, reply_ids: Sequence[int]) -> None:
        """Take the reply so far from the scheduler: the request is prefilled, so nothing of it is under way."""
        self.num_sampled = len(reply_ids)
        if self.counts is None and self.seen is None:
            return
        reply = self._tensor(list(reply_ids))
        if self.counts is not None:
            self.counts.zero_().index_add_(0, reply, torch.ones_like(reply, dtype=torch.float32))
        if self.seen is not None:
            self.seen.zero_()[torch.cat((self._prompt_ids, reply))] = True

    def add(self, token_id: torch.Tensor) -> None:
        """Note a sampled id, `[1]` on the device."""
        self.num_sampled += 1
        if self.counts is not None:
            self.counts.index_add_(0, token_id, torch.ones_like(token_id, dtype=torch.float32))
        if self.seen is not None:
            self.seen[token_id] = True

    @property
    def is_banned_to_stop(self) -> bool:
        """True while its stop tokens must not come."""
        return self.num_sampled < self.sampling.min_tokens and len(self.stop_ids) > 0

    @property
    def is_adjusted(self) -> bool:
        """True if its logits are not the model's own, constraints aside."""
        has_history = self.counts is not None or self.seen is not None
        return has_history or len(self.bias_ids) > 0 or self.is_banned_to_stop

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply biases, the ban and penalties to its logits `[vocabulary]`, in place."""
        sampling = self.sampling
        if len(self.bias_ids):
            logits[self.bias_ids] += self.biases
        if self.is_banned_to_stop:
            logits[self.stop_ids] = -torch.inf
        if self.seen is not None:
            penalty = sampling.repetition_penalty
            repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self.seen, repeated, logits))
        if self.counts is not None:
            logits -= sampling.frequency_penalty * self.counts + sampling.presence_penalty * (self.counts > 0)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)


@dataclass(slots=True)
class SampledBatch:
    """The tokens of one step, all tensors on the device."""

    token_ids: torch.Tensor  # [n], int64
    logprobs: torch.Tensor  # [n], float32, nats
    top_logprobs: torch.Tensor  # [n, k], descending; k is the most that a row wants, and may be 0
    top_ids: torch.Tensor  # [n, k]


@dataclass(slots=True)
class _RowTensors:
    """The parameters of a batch's rows as tensors; made once for as long as the rows are the same."""

    rows: tuple[Row, ...]
    temperatures: torch.Tensor  # [n, 1]; 1 for greedy rows
    is_greedy: torch.Tensor  # [n]
    has_greedy: bool
    has_drawn: bool
    has_temperature: bool
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]]
    truncated: torch.Tensor | None  # the places of rows with top-k, top-p or min-p
    min_ps: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of these, [m, 1]
    top_ks: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    top_ps: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    num_tops: int = 0


class BatchSampler:
    """The sampler of one scheduler."""

    def __init__(self, mode: LogprobsMode) -> None:
        self._mode = mode
        self._batch: _RowTensors | None = None

    def sample(self, logits: torch.Tensor, rows: Sequence[Row], constrain: Constrain | None = None) -> SampledBatch:
        """Sample one id a row from the model's logits `[n, vocabulary]`, which it may overwrite.

        The rows' histories grow by it. In mode BOTH the raw logprob comes first among the alternatives.
        """
        batch = self._batch_of(rows)
        logits = logits.float()
        own = logits
        if constrain is not None or any(row.is_adjusted for row in rows):
            own = logits.clone()
            if constrain is not None:
                constrain(own)
            for place, row in enumerate(rows):
                if row.is_adjusted:
                    row.adjust(own[place])
        scaled = own / batch.temperatures if batch.has_temperature else own
        if batch.truncated is not None:
            scaled = scaled.clone() if scaled is logits else scaled
            scaled[batch.truncated] = _truncated(scaled[batch.truncated], batch)
        token_ids = own.argmax(1) if batch.has_greedy else None
        if batch.has_drawn:
            drawn = _draw(scaled, torch.from_numpy(self._uniforms(batch)).to(scaled.device, non_blocking=True))
            token_ids = drawn if token_ids is None else torch.where(batch.is_greedy, token_ids, drawn)
        assert token_ids is not None
        for place, row in enumerate(rows):
            row.add(token_ids[place : place + 1])
        return self._with_logprobs(batch, logits, scaled, token_ids)

    def _with_logprobs(
        self, batch: _RowTensors, logits: torch.Tensor, scaled: torch.Tensor, token_ids: torch.Tensor
    ) -> SampledBatch:
        chosen = token_ids[:, None]
        if self._mode is LogprobsMode.RAW:
            scaled = logits
        total = scaled.logsumexp(1, keepdim=True)
        logprobs = scaled.gather(1, chosen) - total
        tops, top_ids = scaled.topk(batch.num_tops, 1)
        tops = tops - total
        if self._mode is LogprobsMode.BOTH:
            raw = logits.gather(1, chosen) - logits.logsumexp(1, keepdim=True)
            tops = torch.cat((raw, tops), 1)
            top_ids = torch.cat((torch.full_like(chosen, RAW_TOKEN_ID), top_ids), 1)
        return SampledBatch(token_ids, logprobs[:, 0], tops, top_ids)

    def _batch_of(self, rows: Sequence[Row]) -> _RowTensors:
        if self._batch is None or self._batch.rows != tuple(rows):
            self._batch = _new_batch(tuple(rows))
        return self._batch

    @staticmethod
    def _uniforms(batch: _RowTensors) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return a number in [0, 1) for each row."""
        places = np.fromiter((row.num_sampled for row in batch.rows), np.uint64, len(batch.rows))
        with np.errstate(over="ignore"):
            mixed = _mixed(batch.seeds + places * np.uint64(0x9E3779B97F4A7C15))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _new_batch(rows: tuple[Row, ...]) -> _RowTensors:
    samplings, device = [row.sampling for row in rows], rows[0].stop_ids.device
    temperatures = [sampling.temperature for sampling in samplings]
    with np.errstate(over="ignore"):
        # Seeds that are neighbours are far apart after one round.
        seeds = _mixed(np.array([row.seed & (2**64 - 1) for row in rows], np.uint64) + np.uint64(1))
    batch = _RowTensors(
        rows,
        torch.tensor([[value or 1.0] for value in temperatures], device=device),
        torch.tensor([value == 0 for value in temperatures], device=device),
        has_greedy=any(value == 0 for value in temperatures),
        has_drawn=any(value != 0 for value in temperatures),
        has_temperature=any(value not in (0, 1) for value in temperatures),
        seeds=seeds,
        truncated=None,
        num_tops=max(sampling.num_top_logprobs for sampling in samplings),
    )
    cut = [
        place
        for place, sampling in enumerate(samplings)
        if sampling.temperature != 0 and (sampling.top_k or sampling.top_p < 1 or sampling.min_p)
    ]
    if cut:
        batch.truncated = torch.tensor(cut, device=device)
        batch.min_ps = torch.tensor([[samplings[place].min_p] for place in cut], device=device)
        batch.top_ps = torch.tensor([[samplings[place].top_p] for place in cut], device=device)
        batch.top_ks = torch.tensor([[samplings[place].top_k] for place in cut], device=device)
    return batch


def _truncated(logits: torch.Tensor, batch: _RowTensors) -> torch.Tensor:
    """Return rows `[m, vocabulary]` with minus infinity where min-p, then top-k, then top-p exclude an id."""
    size = logits.shape[1]
    floor = logits.amax(1, keepdim=True) + batch.min_ps.log()
    logits = logits.masked_fill(logits < floor, -torch.inf)
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    last = torch.where(batch.top_ks == 0, size, batch.top_ks.clamp(max=size)) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last), -torch.inf)
    shares = ordered.softmax(1)
    before = shares.cumsum(1) - shares
    # The first id stays whatever rounding makes of its share; a top_p of 1 excludes nothing.
    is_out = (before >= batch.top_ps) & (batch.top_ps < 1)
    is_out[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(is_out, -torch.inf))


def _draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return one id a row, by its softmax; `uniforms` are `[n]` in [0, 1), float64."""
    drawn = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        weights = (rows - rows.amax(1, keepdim=True)).exp().double().mul_(2.0**_WEIGHT_BITS).long()
        sums = weights.cumsum(1)
        total = sums[:, -1]
        point = (uniforms[start : start + _ROWS_AT_ONCE] * total).long()
        drawn.append(torch.searchsorted(sums, torch.minimum(point, total - 1)[:, None], right=True)[:, 0])
    return torch.cat(drawn)
