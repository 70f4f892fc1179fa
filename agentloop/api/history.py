"""Metrics of the last 15 minutes, for the dashboard and `agentloop top` without a Prometheus server."""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.observability.metrics import Labels

HISTORY_S = 900.0

HISTORY_FAMILIES = frozenset(
    (
        *("replicas", "replica_requests", "replica_kv_tokens", "replica_weight_version", "replica_kv_hit_ratio"),
        *("replica_heartbeat_age_seconds", "replica_steps_total", "replica_sampled_tokens_total"),
        *("replica_preemptions_total", "samples", "calls_waiting", "workers", "doing", "free_places"),
        *("oldest_running_seconds", "not_begun", "weight_version", "weight_update_age_seconds", "asleep"),
        *("trajectories_total", "turn_tokens_total", "tokens_lost_total", "paused_seconds_total"),
    )
)
"""Names in `FAMILIES` of `observability/metrics.py`: about ten series per replica and thirty for the service.

Counters are totals; readers compute differences."""


@dataclass(frozen=True, slots=True)
class HistorySeries:
    """One time series: a value for each of the page's times, None where it is missing."""

    name: str
    labels: Labels
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Time series with common times, `interval_s` apart: one second, or more with hundreds of replicas."""

    interval_s: float
    times: tuple[float, ...]  # Unix times in seconds, ascending
    series: tuple[HistorySeries, ...]
