"""The summary of a run, stored as `summary.json`. It is computed from the records in one pass."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import orjson

from agentloop.api.coordinator import UpdateReport
from agentloop.types import StopReason, Trajectory
from agentloop.values import codec

RecordKey: TypeAlias = tuple[str, str, int]
"""A record's key: rollout id, group id, sample index."""

_STALE_COUNTS = ("dropped_attempts", "given_up", "masked", "finished", "late", "masked_tokens")
MIXED = "mixed"
NONE = "none"


@dataclass(frozen=True, slots=True)
class VersionSuccess:
    """Success of the trajectories of one weight version; `success` is the mean of their rewards."""

    num_trajectories: int
    num_rewarded: int
    success: float | None


@dataclass(frozen=True, slots=True)
class StaleSummary:
    """Counts of trajectories that exceeded the staleness limit of their run, by outcome."""

    dropped_attempts: int  # discarded and rolled out again
    given_up: int  # samples without remaining attempts
    masked: int  # completed, with stale tokens excluded from the mask
    finished: int  # stopped before their end
    late: int  # within the limit at their end, but above it when the coordinator received them
    masked_tokens: int


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """The distribution of trajectory lengths in sampled tokens; zeros if there are no trajectories."""

    num_trajectories: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class TrainedLengths:
    """Lengths of all trajectories next to those of the trained ones: discarded trajectories are often long."""

    submitted: LengthSummary  # all trajectories with tokens, with their length when they ended (truncated ones too)
    trained: LengthSummary  # complete, with tokens in the mask, and acknowledged if the run has acknowledgments
    num_unknown: int  # trajectories without tokens, in neither distribution


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """One weight update."""

    version: int
    pause_to_resume_ms: float  # the longest pause of any replica
    total_ms: float
    num_failed_replicas: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run. Shares are None if their denominator is 0."""

    accepted: int
    records: int
    lost: int  # accepted samples without a readable record; must be 0
    complete: int
    stop_reasons: dict[str, int]
    prompt_tokens: int
    sampled_tokens: int
    observed_tokens: int
    wall_s: float
    sampled_tokens_per_s: float | None
    success: float | None
    success_by_version: dict[str, VersionSuccess]  # keys: see `version_key`
    partial: int  # trajectories with tokens of several weight versions
    partial_share: float | None  # partial / records
    recovered_from_tool_error: int
    prefix_cache_hit_share: float | None  # cached / all prompt tokens
    updates: tuple[UpdateSummary, ...]
    stale: StaleSummary | None  # None: no record has a staleness limit
    failures: dict[str, int]  # trajectories by the `FailureClass` that ended them
    lengths: TrainedLengths

    def write(self, path: Path) -> None:
        """Write `summary.json` atomically."""
        unfinished = path.with_name(f".{path.name}.part")
        unfinished.write_bytes(orjson.dumps(codec.to_builtins(self), option=orjson.OPT_INDENT_2) + b"\n")
        os.replace(unfinished, path)


def version_key(trajectory: Trajectory) -> str:
    """Return a trajectory's weight version as text, "mixed" for several, or "none" without sampled tokens."""
    versions = trajectory.versions
    if not versions:
        return NONE
    return MIXED if len(versions) > 1 else str(versions[0])


def summarize(
    trajectories: Iterable[Trajectory],
    *,
    num_accepted: int,
    wall_s: float,
    updates: Sequence[UpdateReport] = (),
    acknowledged: Collection[RecordKey] | None = None,
) -> Summary:
    """Return the summary of a run's records. If a key has two records, the first one is used.

    `acknowledged` are the records that a trainer acknowledged; None if the run has no acknowledgments.
    """
    submitted, trained = list[int](), list[int]()
    failures: Counter[str] = Counter()
    stop_reasons: Counter[str] = Counter()
    by_version: dict[str, list[float | None]] = defaultdict(list)
    stale: Counter[str] | None = None
    prompt = sampled = observed = computed = cached = complete = recovered = 0
    for key, trajectory in _each_once(trajectories):
        stop_reasons[trajectory.stop_reason.value] += 1
        complete += trajectory.is_complete
        by_version[version_key(trajectory)].append(trajectory.reward)
        recovered += trajectory.num_tool_errors > 0 and trajectory.reward == 1
        num_sampled = trajectory.num_sampled_tokens
        sampled += num_sampled
        submitted.append(num_sampled)
        if trajectory.is_trained and (acknowledged is None or key in acknowledged):
            trained.append(num_sampled)
        failures.update(() if trajectory.failure is None else (trajectory.failure.value,))
        observed += sum(len(path.response_ids) for path in trajectory.paths) - num_sampled
        prompt += sum(len(path.prompt_ids) for path in trajectory.paths)
        turns = [turn for path in trajectory.paths for turn in path.turns]
        computed += sum(turn.prompt_len for turn in turns)
        cached += sum(turn.cached_tokens for turn in turns)
        if trajectory.max_staleness is not None:
            stale = Counter() if stale is None else stale
            stale.update(_stale(trajectory))
    partial = len(by_version.get(MIXED, ()))
    return Summary(
        accepted=num_accepted,
        records=len(submitted),
        lost=num_accepted - len(submitted),
        complete=complete,
        stop_reasons=dict(sorted(stop_reasons.items())),
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        observed_tokens=observed,
        wall_s=round(wall_s, 3),
        sampled_tokens_per_s=_share(sampled, wall_s),
        success=_success([reward for rewards in by_version.values() for reward in rewards]).success,
        success_by_version={key: _success(by_version[key]) for key in sorted(by_version, key=_version_order)},
        partial=partial,
        partial_share=_share(partial, len(submitted)),
        recovered_from_tool_error=recovered,
        prefix_cache_hit_share=_share(cached, computed),
        updates=tuple(_update(report) for report in updates),
        stale=None if stale is None else StaleSummary(**{name: stale[name] for name in _STALE_COUNTS}),
        failures=dict(sorted(failures.items())),
        lengths=TrainedLengths(_lengths(submitted), _lengths(trained), submitted.count(0)),
    )


def _each_once(trajectories: Iterable[Trajectory]) -> Iterator[tuple[RecordKey, Trajectory]]:
    """Yield the first record of each key."""
    seen: set[RecordKey] = set()
    for trajectory in trajectories:
        key = (trajectory.rollout_id, trajectory.group_id, trajectory.sample_index)
        if key not in seen:
            seen.add(key)
            yield key, trajectory


def _lengths(num_sampled: Sequence[int]) -> LengthSummary:
    lengths = np.array([number for number in num_sampled if number > 0])
    if lengths.size == 0:
        return LengthSummary(0, 0.0, 0.0, 0.0, 0.0, 0)
    p50, p90, p99 = (round(float(value), 1) for value in np.percentile(lengths, (50, 90, 99)))
    return LengthSummary(lengths.size, round(float(lengths.mean()), 1), p50, p90, p99, int(lengths.max()))


def _stale(trajectory: Trajectory) -> dict[str, int]:
    """Return one record's contribution to the counts of `StaleSummary`."""
    is_ended = trajectory.stop_reason is StopReason.STALE
    limit, staleness = trajectory.max_staleness, trajectory.staleness
    is_over = limit is not None and staleness is not None and staleness > limit
    return {
        "dropped_attempts": trajectory.num_stale_attempts,
        "given_up": int(is_ended and not trajectory.paths),
        "masked": int(trajectory.num_masked_tokens > 0 and not is_ended),
        "finished": int(is_ended and bool(trajectory.paths)),
        "late": int(is_over and trajectory.is_complete and not is_ended),
        "masked_tokens": trajectory.num_masked_tokens,
    }


def _success(rewards: list[float | None]) -> VersionSuccess:
    known = [reward for reward in rewards if reward is not None]
    return VersionSuccess(len(rewards), len(known), _share(sum(known), len(known)))


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


def _version_order(key: str) -> tuple[int, int]:
    return (0, int(key)) if key.isdigit() else (1, len(key))


def _update(report: UpdateReport) -> UpdateSummary:
    return UpdateSummary(
        version=report.version,
        pause_to_resume_ms=round(report.stall_ms, 3),
        total_ms=round(report.total_ms, 3),
        num_failed_replicas=sum(replica.error is not None for replica in report.replicas),
    )
