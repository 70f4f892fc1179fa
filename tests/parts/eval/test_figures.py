"""Pass rates, their intervals, and comparisons, against values computed by hand and by enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest

from agentloop.errors import InvalidRequest
from agentloop_eval import Evaluation, SampleResult, TaskResult, compare, figures_of
from agentloop_eval.figures import interval, pass_at


def evaluation(rewards: dict[str, list[float | None]], *, k: int = 4, pass_at: float = 1.0) -> Evaluation:
    tasks = tuple(
        TaskResult(name, name[0], tuple(SampleResult(one, "" if one is not None else "lost") for one in values))
        for name, values in rewards.items()
    )
    return Evaluation(k, pass_at, "2026-11-29T00:00:00+00:00", tasks)


@pytest.mark.parametrize("num_passed", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_pass(num_passed: int, k: int) -> None:
    samples = [True] * num_passed + [False] * (5 - num_passed)
    draws = list(combinations(samples, k))
    assert pass_at(5, num_passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("k", [0, 6])
def test_k_beyond_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="5 samples"):
        pass_at(5, 1, k)


def test_errors_are_in_no_rate() -> None:
    figures = figures_of(evaluation({"a1": [1, 0, None, None], "a2": [1, 1, 1, 1], "b1": [None] * 4}))
    assert figures.pass_at_1 is not None
    assert figures.pass_at_k is not None
    assert (figures.pass_at_1.mean, figures.pass_at_k.mean) == (0.75, 1.0)  # pass@4 exists for a2 only
    assert (figures.num_tasks, figures.num_judged, figures.num_errors, figures.num_mixed) == (3, 6, 6, 1)
    assert figures.errors == {"lost": 6}
    only_errors = figures_of(evaluation({"a1": [1], "b1": [None]}), "b")
    assert (only_errors.pass_at_1, only_errors.mean_reward, only_errors.num_tasks) == (None, None, 1)


def test_an_interval_resamples_tasks() -> None:
    narrow, wide = interval([0.5] * 40), interval([0.0, 1.0] * 20)
    assert (narrow.low, narrow.high) == (0.5, 0.5)
    # The standard error of 40 coin flips is 0.079; 1.96 times that is 0.155.
    assert wide.low == pytest.approx(0.345, abs=0.03)
    assert wide.high == pytest.approx(0.655, abs=0.03)
    assert interval([0.0, 1.0] * 20) == wide
    assert (interval([1.0]).low, interval([1.0]).high) == (None, None)


def test_a_comparison_is_paired() -> None:
    """Tasks differ far more than the two policies, so only the difference per task shows the change."""
    before = {f"t{number}": [float(number % 2)] * 3 + [0.0] for number in range(40)}
    after = {name: [*values[:3], 1.0 if int(name[1:]) < 20 else 0.0] for name, values in before.items()}
    change = compare(evaluation(before), evaluation(after))
    assert change.pass_at_1.mean == pytest.approx(0.125)
    assert change.pass_at_1.excludes_zero
    assert (change.num_tasks, change.num_better, change.num_worse) == (40, 20, 0)
    same = compare(evaluation(before), evaluation(before))
    assert (same.pass_at_1.mean, same.pass_at_1.excludes_zero, same.num_better) == (0.0, False, 0)


def test_what_cannot_be_compared_is_refused() -> None:
    one = evaluation({"a1": [1, 0], "a2": [0, 0]})
    with pytest.raises(InvalidRequest, match="1 are in one of them only, such as 'a2'"):
        compare(one, evaluation({"a1": [1, 0]}))
    with pytest.raises(InvalidRequest, match=r"rewards of 1 and 0\.5"):
        compare(one, evaluation({"a1": [1, 0], "a2": [0, 0]}, pass_at=0.5))
    with pytest.raises(InvalidRequest, match="in both"):
        compare(one, evaluation({"a1": [None], "a2": [None]}))
