"""The distance between recorded logprobs and a trainer's own, against closed forms and by its warnings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from structlog.testing import capture_logs

from agentloop.errors import InvalidRequest
from agentloop.values.mismatch import MismatchMonitor, mismatch

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.3, 0.2, 0.1])  # behavior policy and trainer


def test_k3_of_samples_is_the_kl_of_the_distributions() -> None:
    """Each id occurs as often as the behavior policy samples it, so the estimate is the exact sum."""
    ids = np.repeat(np.arange(4), (50, 30, 15, 5))
    found = mismatch(np.log(P)[ids], np.log(Q)[ids])
    assert found.k3_kl == pytest.approx(float((P * np.log(P / Q)).sum()), abs=1e-12)
    assert found.ess == pytest.approx(1 / float((Q**2 / P).sum()), abs=1e-12)  # E[w]^2 / E[w^2]
    assert found.mean_abs_diff == pytest.approx(float((P * np.abs(np.log(P / Q))).sum()), abs=1e-12)
    assert found.max_ratio == pytest.approx(2.0)
    assert found.max_abs_diff == pytest.approx(math.log(2))


def test_shares_count_tokens_on_either_side_of_the_clip_range() -> None:
    ratios = np.array([0.4, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0, 1.0])
    found = mismatch(np.zeros(8), np.log(ratios))
    assert found.share_outside == 4 / 8
    assert found.share_below_half == 1 / 8
    assert mismatch(np.zeros(8), np.log(ratios), clip_range=(0.5, 1.5)).share_outside == 2 / 8
    assert found.ratio_percentiles[2] == pytest.approx(1.0)
    assert list(found.ratio_percentiles) == sorted(found.ratio_percentiles)


def test_equal_logprobs_are_no_mismatch_and_so_is_no_token() -> None:
    same = mismatch(np.full(5, -3.0, np.float32), np.full(5, -3.0))
    assert (same.k3_kl, same.ess, same.share_outside, same.max_ratio) == (0.0, 1.0, 0.0, 1.0)
    none = mismatch(np.full(3, -1.0), np.full(3, -9.0), np.zeros(3, np.bool_))
    assert (none.num_tokens, none.k3_kl, none.ess) == (0, 0.0, 1.0)


def test_a_token_of_no_probability_stays_finite() -> None:
    found = mismatch(np.array([-9999.0, -0.1]), np.array([-0.1, -0.1]))
    assert math.isfinite(found.k3_kl)
    assert found.ess == pytest.approx(0.5, abs=1e-9)
    assert found.max_abs_diff == pytest.approx(9998.9)


def test_what_the_mask_leaves_out_may_be_anything() -> None:
    mask = np.array([[True, False], [True, True]])
    recorded, trainer = np.array([[-1.0, 0.0], [-2.0, -1.5]]), np.array([[-1.0, np.nan], [-2.0, -1.5]])
    assert mismatch(recorded, trainer, mask).k3_kl == 0.0
    with pytest.raises(InvalidRequest, match="not finite"):
        mismatch(recorded, trainer)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="shapes"):
        mismatch(np.zeros(3), np.zeros(4))


def test_the_monitor_warns_once_and_counts_all() -> None:
    monitor = MismatchMonitor()
    rows = [np.zeros(4), np.zeros(2)]
    with capture_logs() as logs:
        monitor.compare(rows, [np.full(4, 0.02), np.full(2, -0.02)], [np.ones(4), np.ones(2)])
        assert logs == []
        for _ in range(3):
            found = monitor.compare(rows, [np.full(4, 1.5), np.full(2, -1.5)])
    assert found.num_tokens == 6
    assert [entry["event"] for entry in logs] == ["trainer_logprobs_far_off"]
    assert (logs[0]["log_level"], logs[0]["batch"]) == ("warning", 2)
    assert (monitor.num_batches, monitor.num_far_off) == (4, 3)


def test_one_heavy_token_is_seen_by_the_effective_sample_size() -> None:
    """Its k3 may be small in the average; the share of the batch that carries the gradient shows it."""
    monitor, trainer = MismatchMonitor(max_k3=math.inf), np.zeros(1000)
    trainer[0] = math.log(40.0)
    with capture_logs() as logs:
        found = monitor.compare(np.zeros(1000), trainer)
    assert found.ess == pytest.approx(1039**2 / (1000 * 2599))
    assert len(logs) == 1
