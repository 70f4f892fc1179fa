"""The distance between recorded logprobs and a trainer's own, over arrays: the monitor of the behaviour policy.

A token's ratio is w = exp(trainer - recorded): the recorded logprob is of the distribution that sampled the token,
the trainer's is of the weights it computed with. Both are in nats, of sampled tokens only. Formulas:

- k3-KL, of the behaviour policy to the trainer's: the mean of w - 1 - log w, which is unbiased and never negative
  (J. Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html);
- effective sample size as a share of N: (sum w)^2 / (N sum w^2) (L. Kish, "Survey Sampling", 1965); 1 is on-policy;
- the share outside a clip range: w < 1 - low or w > 1 + high, as in PPO's objective (arXiv 1707.06347), with the
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
MAX_LOG_RATIO = 60.0  # a log-ratio beyond it counts as this one: sums of squares stay finite
MAX_K3 = 0.01
MIN_ESS = 0.9

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The distance over a number of tokens. Without tokens it is that of equal policies."""

    num_tokens: int
    mean_abs_diff: float  # of logprobs, in nats
    max_abs_diff: float
    k3_kl: float  # in nats a token
    ess: float  # a share, 0 to 1
    max_ratio: float
    ratio_percentiles: tuple[float, ...]  # at PERCENTILES
    share_outside: float  # of the clip range
    share_below_half: float  # ratios under 0.5: tokens that the trainer finds half as likely or less


def mismatch(
    recorded: npt.ArrayLike,
    trainer: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    clip_range: tuple[float, float] = CLIP_RANGE,
) -> Mismatch:
    """Compare two arrays of logprobs of one shape, where `mask` is true; everywhere without one.

    `clip_range` is (low, high) around a ratio of 1. Raises InvalidRequest for shapes that differ, and for compared
    numbers that are not finite.
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
    """A trainer's watch over its batches: compares each, and warns in the log the first time that one is far off.

    The defaults let pass what training four versions behind costs (k3-KL up to 0.007 a step), and what bfloat16
    does against float32 (below 0.0001); they catch a wrong version, other tokens, and another distribution.
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
        """Compare one batch: an array of each, or a list with one array for each row.

        Raises as `mismatch`.
        """
        chosen = None if mask is None else _joined(mask)
        found = mismatch(_joined(recorded), _joined(trainer), chosen, clip_range=self._clip_range)
        self.num_batches += 1
        if found.k3_kl > self._max_k3 or found.ess < self._min_ess:
            self.num_far_off += 1
            if self.num_far_off == 1:
                _log.warning(
                    "trainer_logprobs_far_off",
                    k3_kl=round(found.k3_kl, 6),
                    ess=round(found.ess, 4),
                    max_ratio=round(found.max_ratio, 3),
                    num_tokens=found.num_tokens,
                    batch=self.num_batches,
                    max_k3=self._max_k3,
                    min_ess=self._min_ess,
                    check="agentloop check-logprobs RUN --model DIR tells versions, tokens and precision apart",
                )
        return found


def _log_ratios(
    recorded: npt.ArrayLike, trainer: npt.ArrayLike, mask: npt.ArrayLike | None
) -> npt.NDArray[np.float64]:
    """Return log w of the compared tokens, flat. Raises InvalidRequest."""
    ours, theirs = np.asarray(recorded, np.float64), np.asarray(trainer, np.float64)
    chosen = np.ones(ours.shape, np.bool_) if mask is None else np.asarray(mask).astype(np.bool_)
    if not ours.shape == theirs.shape == chosen.shape:
        shapes = f"{ours.shape}, {theirs.shape} and {chosen.shape}"
        raise InvalidRequest(
            f"recorded logprobs, the trainer's and the mask are of shapes {shapes}", param="trainer"
        )
    ours, theirs = ours[chosen], theirs[chosen]
    for name, values in (("recorded", ours), ("trainer", theirs)):
        if not np.isfinite(values).all():
            raise InvalidRequest(f"{name}: a compared logprob is not finite", param=name)
    return theirs - ours


def _joined(rows: npt.ArrayLike) -> npt.ArrayLike:
    """Return a batch as one array: rows of several lengths are put one behind the other."""
    if not isinstance(rows, list | tuple):
        return rows
    parts = [np.asarray(row) for row in rows]
    return np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0)
