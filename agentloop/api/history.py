"""The last quarter of an hour of a service in numbers, for pages and terminals without a Prometheus beside them."""

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
"""Names in `FAMILIES` of `observability/metrics.py`: about ten series per replica, some thirty of the service.

Counters are totals; readers take differences."""


@dataclass(frozen=True, slots=True)
class HistorySeries:
    """One series: a value for each of the page's times, null where it was not there."""

    name: str
    labels: Labels
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Series over time. `interval_s` is between two rows: a second, and more in a fleet of hundreds of replicas."""

    interval_s: float
    times: tuple[float, ...]  # seconds since 1970, the oldest first
    series: tuple[HistorySeries, ...]
