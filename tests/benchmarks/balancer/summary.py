"""The figures of one run, and how long throughput took to come back after an update, a loss or an addition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.benchmarks.balancer.simulate import Happening, Recording

_BASELINE_S = 30  # before a happening
_UNDISTURBED_S = 90.0  # after one, before the next has a baseline of its own
_WINDOW_S = 5
_RECOVERED = 0.9
_STEADY_SHARE = 0.6  # of the turns: what happens later happens in the tail, which has no steady throughput


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times in seconds, shares of 1."""

    makespan_s: float
    tokens_per_s: float  # sampled, over the makespan
    reuse: float  # of prompt tokens
    reuse_bound: float  # with one cache for the fleet that never evicts
    prefilled_tokens: int
    idle_share: float  # of the engines' time
    group_p50_s: float  # from the start of the run: when half of the groups were complete
    group_p99_s: float
    trajectory_p50_s: float  # from its first placement
    trajectory_p99_s: float
    first_token_p50_s: float
    turn_p50_s: float  # asked to answered
    cycle_p50_s: float  # with the tool's time
    num_preemptions: int
    num_moves: int
    recovery_s: tuple[float | None, ...]  # of what happened before the tail; None: never
    policy_us_per_turn: float  # CPU
    policy_us_per_place: float
    ended_at: tuple[float, ...]  # of trajectories, sorted: one in a hundred
    tokens_by_second: tuple[int, ...]  # of the fleet; empty where nothing happened


def summarize(record: Recording) -> Summary:
    """Reduce a recording to its figures."""
    fleet = _sum_by_second(record.tokens_by_second)
    group_p50, group_p99 = np.percentile(record.group_ended_at, (50, 99))
    trajectory_p50, trajectory_p99 = np.percentile(record.trajectory_s, (50, 99))
    return Summary(
        makespan_s=record.makespan_s,
        tokens_per_s=record.num_sampled_tokens / record.makespan_s,
        reuse=record.num_cached_tokens / record.num_input_tokens,
        reuse_bound=record.num_bound_tokens / record.num_input_tokens,
        prefilled_tokens=record.num_prefilled_tokens,
        idle_share=1.0 - record.busy_s / record.alive_s,
        group_p50_s=float(group_p50),
        group_p99_s=float(group_p99),
        trajectory_p50_s=float(trajectory_p50),
        trajectory_p99_s=float(trajectory_p99),
        first_token_p50_s=float(np.median(record.first_token_s)),
        turn_p50_s=float(np.median(record.turn_s)),
        cycle_p50_s=float(np.median(record.cycle_s)) if record.cycle_s else 0.0,
        num_preemptions=record.num_preemptions,
        num_moves=record.num_moves,
        recovery_s=recoveries(record),
        policy_us_per_turn=record.policy_ns / 1e3 / record.num_turns,
        policy_us_per_place=record.place_ns / 1e3 / record.num_places,
        ended_at=tuple(float(at) for at in np.percentile(record.trajectory_ended_at, range(101))),
        tokens_by_second=tuple(int(tokens) for tokens in fleet) if record.happenings else (),
    )


def recoveries(record: Recording) -> tuple[float | None, ...]:
    """Return the time of each happening in the steady part of a run until throughput was back at 90 %.

    After an update and a loss: of the whole fleet's tokens a second in the 30 s before, in the ratio of replicas
    left; what follows another too soon is judged by that one's. After an addition: the added replica's against the
    mean of the others. Over 5 s each, and before the next happening.
    """
    fleet = _sum_by_second(record.tokens_by_second)
    steady = [one for one in record.happenings if one.share_done <= _STEADY_SHARE]
    if not steady:
        return ()
    ends = [int(one.at) for one in steady[1:]] + [len(fleet)]
    found, baseline, last_at = [], 0.0, -_UNDISTURBED_S
    for one, end in zip(steady, ends, strict=True):
        if one.at - last_at >= _UNDISTURBED_S:
            baseline = float(np.mean(fleet[max(0, int(one.at) - _BASELINE_S) : int(one.at)]))
        found.append(_recovery(record, one, fleet, baseline, end))
        last_at = one.at
    return tuple(found)


def _recovery(record: Recording, one: Happening, fleet: np.ndarray, baseline: float, end: int) -> float | None:
    num_replicas = len(record.tokens_by_second)
    for second in range(int(one.at), min(end, len(fleet)) - _WINDOW_S + 1):
        window = slice(second, second + _WINDOW_S)
        if one.kind == "add":
            added = sum(record.tokens_by_second[-1][window])
            others = (float(np.sum(fleet[window])) - added) / (num_replicas - 1)
            has_recovered = others > 0 and added >= _RECOVERED * others
        else:
            left = (num_replicas - 1) / num_replicas if one.kind == "loss" else 1.0
            has_recovered = float(np.mean(fleet[window])) >= _RECOVERED * left * baseline
        if has_recovered:
            return max(0.0, second - one.at)
    return None


def _sum_by_second(replicas: list[list[float]]) -> np.ndarray:
    fleet = np.zeros(max(map(len, replicas)))
    for tokens in replicas:
        fleet[: len(tokens)] += tokens
    return fleet
