"""The mismatch between recorded logprobs and a trainer's logprobs, over arrays of sampled tokens.

A token's ratio is w = exp(trainer - recorded): the recorded logprob is under the distribution that sampled the
token, the trainer's is under the trainer's weights. Both are in nats. Formulas:

- k3-KL, of the behaviour policy to the trainer's: the mean of w - 1 - log w, which is unbiased and never negative
  (J. Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html);
- effective sample size as a fraction of N: (sum w)^2 / (N sum w^2) (L. Kish, "Survey Sampling", 1965); 1 is
  on-policy;
- the fraction outside a clip range: w < 1 - low or w > 1 + high, as in PPO's objective (arXiv 1707.06347), with the
  higher upper bound of DAPO (arXiv 2503.14476) by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from agentloop.errors import InvalidRequest

CLIP_RANGE = (0.2, 0.28)
PERCENTILES = (1.0, 5.0, 50.0, 95.0, 99.0)
MAX_LOG_RATIO = 60.0  # log-ratios are clipped to this, so that sums of squares stay finite
MAX_K3 = 0.01
MIN_ESS = 0.9

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The mismatch over a number of tokens. Without tokens it has the values of equal policies."""

    num_tokens: int
    mean_abs_diff: float  # difference of logprobs, in nats
    max_abs_diff: float
    k3_kl: float  # nats per token
    ess: float  # fraction, 0 to 1
    max_ratio: float
    ratio_percentiles: tuple[float, ...]  # for each of PERCENTILES
    share_outside: float  # fraction of ratios outside the clip range
    share_below_half: float  # fraction of ratios below 0.5: tokens that are at most half as likely for the trainer


def mismatch(
    recorded: npt.ArrayLike,
    trainer: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    clip_range: tuple[float, float] = CLIP_RANGE,
) -> Mismatch:
    """Compare two arrays of logprobs of equal shape where `mask` is true; without a mask, everywhere.

    `clip_range` is (low, high) around a ratio of 1. Raises InvalidRequest for different shapes, and for compared
    values that are not finite.
    """
    log_ratio = _log_ratios(recorded, trainer, mask)
    if log_ratio.size == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 1.0, 1.0, (1.0,) * len(PERCENTILES), 0.0, 0.0)
    distance = np.abs(log_ratio)
    log_ratio = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(log_ratio)
    low, high = clip_range
    return Mismatch(
        num_tokens=log_ratio.size,
        mean_abs_diff=float(distance.mean()),
        max_abs_diff=float(distance.max()),
        k3_kl=float((np.expm1(log_ratio) - log_ratio).mean()),
        ess=float(ratio.sum() ** 2 / (ratio.size * np.square(ratio).sum())),
        max_ratio=float(ratio.max()),
        ratio_percentiles=tuple(map(float, np.percentile(ratio, PERCENTILES))),
        share_outside=float(((ratio < 1 - low) | (ratio > 1 + high)).mean()),
        share_below_half=float((ratio < 0.5).mean()),
    )


class MismatchMonitor:
    """Compares each batch of a trainer, and logs a warning for the first batch beyond a threshold.

    The default thresholds accept the mismatch of training four versions behind (k3-KL up to 0.007 per step) and of
    bfloat16 against float32 (below 0.0001). They detect wrong versions, wrong tokens and a wrong distribution.
    """

    def __init__(
        self,
        *,
        max_k3: float = MAX_K3,
        min_ess: float = MIN_ESS,
        clip_range: tuple[float, float] = CLIP_RANGE,
    ) -> None:
        self._max_k3 = max_k3
        self._min_ess = min_ess
        self._clip_range = clip_range
        self.num_batches = 0
        self.num_far_off = 0  # batches beyond a threshold

    def compare(
        self, recorded: npt.ArrayLike, trainer: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> Mismatch:
        """Compare one batch, given as arrays or as lists with one array per row. Raises the errors of
        `mismatch`."""
        selected = None if mask is None else _joined(mask)
        result = mismatch(_joined(recorded), _joined(trainer), selected, clip_range=self._clip_range)
        self.num_batches += 1
        if result.k3_kl > self._max_k3 or result.ess < self._min_ess:
            self.num_far_off += 1
            if self.num_far_off == 1:
                _log.warning(
                    "trainer_logprobs_far_off",
                    k3_kl=round(result.k3_kl, 6),
                    ess=round(result.ess, 4),
                    max_ratio=round(result.max_ratio, 3),
                    num_tokens=result.num_tokens,
                    batch=self.num_batches,
                    max_k3=self._max_k3,
                    min_ess=self._min_ess,
                    check=(
                        "run `agentloop check-logprobs RUN --model DIR` to find out if versions, tokens or"
                        " precision differ"
                    ),
                )
        return result


def _log_ratios(
    recorded: npt.ArrayLike, trainer: npt.ArrayLike, mask: npt.ArrayLike | None
) -> npt.NDArray[np.float64]:
    """Return log w of the compared tokens as a flat array. Raises InvalidRequest."""
    ours, theirs = np.asarray(recorded, np.float64), np.asarray(trainer, np.float64)
    selected = np.ones(ours.shape, np.bool_) if mask is None else np.asarray(mask).astype(np.bool_)
    if not ours.shape == theirs.shape == selected.shape:
        shapes = f"{ours.shape}, {theirs.shape} and {selected.shape}"
        raise InvalidRequest(
            f"recorded logprobs, the trainer's logprobs and the mask must have equal shapes, not {shapes}",
            param="trainer",
        )
    ours, theirs = ours[selected], theirs[selected]
    for name, values in (("recorded", ours), ("trainer", theirs)):
        if not np.isfinite(values).all():
            raise InvalidRequest(f"{name}: a compared logprob is not finite", param=name)
    return theirs - ours


def _joined(rows: npt.ArrayLike) -> npt.ArrayLike:
    """Return a batch as one array; rows of different lengths are concatenated."""
    if not isinstance(rows, list | tuple):
        return rows
    parts = [np.asarray(row) for row in rows]
    return np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0)
