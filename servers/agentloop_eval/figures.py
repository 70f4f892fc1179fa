"""Pass rates of an evaluation with bootstrap confidence intervals, and paired comparisons of two evaluations.

pass@k is the unbiased estimator of Chen et al. (2021, arXiv:2107.03374): of n samples of which c pass, the
probability that k of them drawn without replacement include one that passes. Intervals resample tasks, not samples:
samples of one task are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from agentloop.errors import InvalidRequest
from agentloop_eval.evaluation import Evaluation, TaskResult

_NUM_RESAMPLES = 10_000
_SEED = 0  # equal evaluations have equal intervals
_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over tasks with its 95 % confidence interval. `low` and `high` are None with fewer than two tasks."""

    mean: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """True if the interval does not contain 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of some tasks. A rate is None if no task has enough samples with a reward."""

    num_tasks: int
    num_judged: int  # samples with a reward
    num_errors: int
    pass_at_1: Interval | None
    pass_at_k: Interval | None
    k: int
    mean_reward: Interval | None  # avg@k
    num_mixed: int  # tasks with passed and failed samples: those on which a policy can learn
    mean_tokens: float
    median_seconds: float
    stop_reasons: Mapping[str, int]
    errors: Mapping[str, int]
    version_shares: Mapping[str, float]  # shares of the sampled tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """The change from one evaluation to another of the same tasks: the mean of the differences per task."""

    num_tasks: int
    pass_at_1: Interval
    mean_reward: Interval
    num_better: int
    num_worse: int


def pass_at(num_samples: int, num_passed: int, k: int) -> float:
    """Return pass@k of a task. Raises ValueError for k above the number of samples."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, but the task has {num_samples} samples")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of one value per task, with a percentile bootstrap interval over tasks."""
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return Interval(mean, None, None)
    generator = np.random.default_rng(_SEED)
    means = [array[generator.integers(0, len(array), len(array))].mean() for _ in range(_NUM_RESAMPLES)]
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(mean, float(low), float(high))


def figures_of(evaluation: Evaluation, category: str | None = None) -> Figures:
    """Return the figures of all tasks, or of one category."""
    tasks = [task for task in evaluation.tasks if category is None or task.category == category]
    samples = [sample for task in tasks for sample in task.samples]
    judged = [sample for sample in samples if sample.reward is not None]
    k, passed = evaluation.num_samples, [_passed(task, evaluation.pass_at) for task in tasks]
    versions: Counter[str] = Counter()
    for sample in samples:
        versions.update(sample.versions)
    total = versions.total()
    return Figures(
        num_tasks=len(tasks),
        num_judged=len(judged),
        num_errors=len(samples) - len(judged),
        pass_at_1=_rate(pass_at(len(one), sum(one), 1) for one in passed if one),
        pass_at_k=_rate(pass_at(len(one), sum(one), k) for one in passed if len(one) >= k),
        k=k,
        mean_reward=_rate(float(np.mean(rewards)) for task in tasks if (rewards := _rewards(task))),
        num_mixed=sum(0 < sum(one) < len(one) for one in passed),
        mean_tokens=float(np.mean([sample.num_tokens for sample in samples])) if samples else 0.0,
        median_seconds=float(np.median([sample.seconds for sample in samples])) if samples else 0.0,
        stop_reasons=Counter(sample.stop_reason for sample in samples),
        errors=Counter(sample.error for sample in samples if sample.reward is None),
        version_shares={name: versions[name] / total for name in sorted(versions, key=int) if total},
    )


def rows_of(evaluation: Evaluation) -> list[str | None]:
    """Return the rows of a table: the categories, if there are several, in the order of the tasks; None for all."""
    categories = list(dict.fromkeys(task.category for task in evaluation.tasks))
    return [*(categories if len(categories) > 1 else []), None]


def compare(before: Evaluation, after: Evaluation, category: str | None = None) -> Comparison:
    """Compare two evaluations task by task. A task whose samples are all errors in one of them is left out.

    Raises InvalidRequest if their tasks or pass thresholds differ, or if no task has rewards in both.
    """
    first, second = ({(task.category, task.task_id): task for task in one.tasks} for one in (before, after))
    if first.keys() != second.keys():
        missing = sorted(name for _, name in first.keys() ^ second.keys())
        raise InvalidRequest(
            f"the evaluations have different tasks: {len(missing)} are in one of them only, such as "
            f"{missing[0]!r}; evaluate both on the same tasks"
        )
    if before.pass_at != after.pass_at:
        raise InvalidRequest(
            f"the evaluations pass at rewards of {before.pass_at:g} and {after.pass_at:g}: repeat one with the "
            "--pass-at of the other"
        )
    pairs = [
        (task, second[key])
        for key, task in first.items()
        if (category is None or task.category == category) and _rewards(task) and _rewards(second[key])
    ]
    if not pairs:
        raise InvalidRequest("no task has samples with a reward in both evaluations")

    def change(value: Callable[[TaskResult], float]) -> list[float]:
        return [value(new) - value(old) for old, new in pairs]

    rates = change(lambda task: float(np.mean(_passed(task, before.pass_at))))
    return Comparison(
        num_tasks=len(pairs),
        pass_at_1=interval(rates),
        mean_reward=interval(change(lambda task: float(np.mean(_rewards(task))))),
        num_better=sum(rate > 0 for rate in rates),
        num_worse=sum(rate < 0 for rate in rates),
    )


def _rewards(task: TaskResult) -> list[float]:
    return [sample.reward for sample in task.samples if sample.reward is not None]


def _passed(task: TaskResult, pass_at: float) -> list[bool]:
    return [reward >= pass_at for reward in _rewards(task)]


def _rate(values: Iterable[float]) -> Interval | None:
    found = list(values)
    return interval(found) if found else None
