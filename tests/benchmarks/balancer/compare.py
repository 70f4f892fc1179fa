"""Figures of a run, and tables of runs: means over the seeds, and paired ratios with confidence intervals.

A ratio to another arm is the geometric mean over the seeds that both arms have; a seed's workload is the same for
both. The interval is Student's t for the mean of the logarithms, at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

import numpy as np

from tests.benchmarks.balancer.simulate import Recording
from tests.benchmarks.report import table

Row = dict[str, float | str]
"""A run's regime, arm, seed and figures: one line of the results file."""

_Z = 1.959964  # normal distribution, 95 %, two-sided

COLUMNS = (
    "arm",
    "makespan s",
    "tokens/s between quartiles",
    "groups p50 s",
    "reuse / bound %",
    "uncached Mtok",
    "idle %",
    "preempted",
    "moved",
    "CPU us/turn",
)


def figures(record: Recording) -> dict[str, float]:
    """Reduce a recording to its figures. Times are in seconds, shares between 0 and 1."""
    return {
        "makespan_s": record.makespan_s,
        "quartile_tokens_per_s": tokens_per_s_between_quartiles(record.tokens_by_second),
        "group_p50_s": float(np.median(record.group_ended_at)),
        "reuse": record.num_cached_tokens / record.num_input_tokens,
        "reuse_bound": record.num_bound_tokens / record.num_input_tokens,
        "prefilled_tokens": record.num_prefilled_tokens,
        "idle_share": 1.0 - record.busy_s / record.alive_s,
        "num_preemptions": record.num_preemptions,
        "num_moves": record.num_moves,
        "policy_us_per_turn": record.policy_ns / 1e3 / record.num_turns,
    }


def tokens_per_s_between_quartiles(replicas: Sequence[Sequence[float]]) -> float:
    """Return the sampling rate between the first and the third quartile of all tokens."""
    fleet = np.zeros(1 + max(map(len, replicas)))
    for tokens in replicas:
        fleet[1 : 1 + len(tokens)] += tokens
    done = np.cumsum(fleet)  # cumulative, at the end of each second
    begin, end = np.interp((0.25 * done[-1], 0.75 * done[-1]), done, np.arange(len(done)))
    return float(0.5 * done[-1] / (end - begin))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float]:
    """Return the mean of the paired ratios of two arms by seed, and the bounds of its interval."""
    logs = [math.log(ours[seed] / theirs[seed]) for seed in ours.keys() & theirs.keys()]
    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = student_t(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def student_t(num_free: int) -> float:
    """Return the two-sided 95 % quantile of Student's t (Abramowitz and Stegun 26.7.5)."""
    first = (_Z**3 + _Z) / (4 * num_free)
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * num_free**2)
    return _Z + first + second


def regime_table(rows: Iterable[Row], is_steady: bool, against: str) -> str:
    """Return a regime's table, one row per arm; the last column is the ratio of arm `against` to the row's arm."""
    by_arm: dict[str, list[Row]] = {}
    for row in rows:
        by_arm.setdefault(str(row["arm"]), []).append(row)
    key = "quartile_tokens_per_s" if is_steady else "makespan_s"
    judged = {name: {int(run["seed"]): float(run[key]) for run in runs} for name, runs in by_arm.items()}
    lines = []
    for name, runs in by_arm.items():
        found = ""
        if name != against and judged.get(against, {}).keys() & judged[name].keys():
            mean, least, most = ratio(judged[against], judged[name])
            found = f"{mean:.3f} ({least:.3f} to {most:.3f})"
        lines.append([*_cells(name, runs), found])
    return table((*COLUMNS, f"{'tokens/s' if is_steady else 'makespan'} of {against} / its"), lines)


def _cells(name: str, runs: Sequence[Row]) -> list[str]:
    def mean(key: str) -> float:
        return fmean(float(run[key]) for run in runs)

    return [
        name,
        f"{mean('makespan_s'):,.0f}",
        f"{mean('quartile_tokens_per_s'):,.0f}",
        f"{mean('group_p50_s'):,.0f}",
        f"{100 * mean('reuse'):.1f} / {100 * mean('reuse_bound'):.1f}",
        f"{mean('prefilled_tokens') / 1e6:.1f}",
        f"{100 * mean('idle_share'):.1f}",
        f"{mean('num_preemptions'):,.0f}",
        f"{mean('num_moves'):,.0f}",
        f"{mean('policy_us_per_turn'):.0f}",
    ]
