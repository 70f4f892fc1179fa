"""The service's metrics: their families, and the counters of one process.

A process counts in a `MetricsTally` and reports the increments since its last report, and its gauges. The
coordinator durably adds the reports of all processes before it acknowledges and exports them
(`coordinator/metrics.py`). A killed process loses the counts since its last report, and no counter ever decreases.
Processes push their metrics, because workers run user code and therefore have no listening port.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from agentloop.types import ToolOutcome, Trajectory, Turn

PREFIX = "agentloop_"

REPORT_S = 5.0
"""The interval between two reports of a process."""

Labels: TypeAlias = tuple[str, ...]


class Kind(StrEnum):
    """The type of a metric family, in Prometheus' terms."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """The metrics of one name. Names of counters end in `_total`, names of durations in `_seconds`."""

    name: str  # without the prefix
    kind: Kind
    about: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, in its unit


_MS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)
_FEW = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_TOKENS = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


def _gauges(*rows: tuple[str, str, Labels]) -> tuple[Family, ...]:
    return tuple(Family(name, Kind.GAUGE, about, labels) for name, about, labels in rows)


def _counters(*rows: tuple[str, str, Labels]) -> tuple[Family, ...]:
    return tuple(Family(name, Kind.COUNTER, about, labels) for name, about, labels in rows)


def _histograms(*rows: tuple[str, str, Labels, tuple[float, ...]]) -> tuple[Family, ...]:
    return tuple(Family(name, Kind.HISTOGRAM, about, labels, buckets) for name, about, labels, buckets in rows)


FAMILIES = {
    family.name: family
    for family in (
        # The fleet
        *_gauges(
            ("replicas", "Replicas, by engine pool and state.", ("entry", "state")),
            ("replica_requests", "Requests in an engine: running, waiting.", ("replica", "phase")),
            (
                "replica_kv_tokens",
                "KV tokens: used by the engine; reserved by leases; limit of the reservations; capacity.",
                ("replica", "kind"),
            ),
            ("replica_weight_version", "Weight version of a replica.", ("replica",)),
            ("replica_kv_hit_ratio", "Fraction of returning turns' contexts found in the cache.", ("replica",)),
            ("replica_heartbeat_age_seconds", "Time since a replica's last heartbeat.", ("replica",)),
        ),
        *_counters(
            ("replica_steps_total", "Steps of an engine's scheduler.", ("replica",)),
            ("replica_sampled_tokens_total", "Tokens sampled by an engine.", ("replica",)),
            ("replica_preemptions_total", "Requests preempted by an engine.", ("replica",)),
            ("replica_prompt_tokens_total", "Prompt tokens of turns.", ("replica",)),
            ("replica_cached_prompt_tokens_total", "Prompt tokens of turns found in the cache.", ("replica",)),
            ("replica_starts_total", "Replicas that joined: new, replacement, return.", ("entry", "reason")),
        ),
        # The queue
        *_gauges(
            (
                "samples",
                "Samples without a record: queued, held by a staleness limit, running.",
                ("state",),
            ),
            ("calls_waiting", "Session and direct calls that wait for KV.", ()),
            ("calls_waiting_seconds", "Wait times of session and direct calls: longest, median.", ("wait",)),
            ("user_calls_waiting", "Session and direct calls that wait for KV, by user.", ("user",)),
            ("workers", "Worker processes.", ()),
            ("doing", "Live trajectories, by current activity.", ("doing",)),
            ("tools_running", "Live trajectories in a tool call.", ("tool",)),
            ("free_places", "Free trajectory slots of workers.", ()),
            ("oldest_running_seconds", "Age of the oldest live trajectory.", ()),
            ("not_begun", "1 for each reason why queued work does not start.", ("reason",)),
        ),
        *_histograms(("queue_wait_seconds", "Time that a sample waits for a worker.", (), _S)),
        # Trajectories of workers, and sessions, counted when they end
        *_counters(
            ("trajectories_total", "Records, by end state.", ("stop_reason", "failure", "source")),
            ("tokens_lost_total", "Sampled tokens that were discarded.", ("cause",)),
            ("turns_resumed_total", "Turns of lost workers from which trajectories continued.", ()),
            ("turn_tokens_total", "Tokens of turns: prompt; cached part of the prompt; sampled.", ("kind",)),
            ("tokens_uncredited_total", "Sampled tokens in paths that a reward does not reach.", ("lineage",)),
            ("splits_total", "Paths that could not extend the previous path.", ("reason",)),
            ("tool_calls_total", "Tool calls.", ("tool", "outcome")),
            ("reward_errors_total", "Failed rewards.", ()),
            ("malformed_calls_total", "Tool calls that the parser could not read.", ("parser",)),
            ("logprob_problems_total", "Answers with invalid ids or logprobs; replicas with broken weights.", ()),
        ),
        *_histograms(
            (
                "trajectory_seconds",
                "Time per phase: queue, generate, tool, reward, unavailable; total.",
                ("phase",),
                _S,
            ),
            ("trajectory_turns", "Turns of a trajectory.", (), _FEW),
            ("trajectory_sampled_tokens", "Sampled tokens of a trajectory.", (), _TOKENS),
            (
                "trajectory_staleness",
                "Weight versions between a trajectory's oldest tokens and the fleet.",
                (),
                _FEW,
            ),
            (
                "turn_seconds",
                "place: wait for a replica; first_token: from then to the first token; decode: the rest.",
                ("phase",),
                _S,
            ),
            ("tool_seconds", "Duration of a tool call, without the wait for its slot.", ("tool",), _S),
            ("reward_seconds", "Duration of scoring a trajectory.", (), _S),
        ),
        # Weights
        *_gauges(
            ("weight_version", "Weight version that the fleet serves.", ()),
            ("weight_update_age_seconds", "Time since the start of the running update.", ()),
            ("asleep", "1 for each kind of memory that the fleet has released.", ("memory",)),
        ),
        *_counters(
            ("weight_updates_total", "Updates, by outcome: ok, partial, failed.", ("outcome", "transport")),
            ("weight_bytes_total", "Bytes of weights received by the engines' workers.", ("transport",)),
            ("paused_seconds_total", "Time without sampling: pause, sleep, update.", ("cause",)),
        ),
        *_histograms(
            ("weight_update_seconds", "Duration of an update's steps on the slowest replica.", ("step",), _MS)
        ),
        # The endpoint
        *_counters(
            ("http_requests_total", "Responses of the public port.", ("route", "method", "status")),
            ("calls_repeated_total", "Model calls that a session had already answered: client retries.", ()),
            ("streams_cut_total", "Streams that ended early, by client disconnect or failure.", ("by",)),
        ),
        *_histograms(("http_seconds", "Time from a request's headers to the end of its response.", ("route",), _S)),
        *_gauges(
            ("http_in_flight", "Running requests of the public port.", ("process", "route")),
            ("sessions_open", "Open sessions.", ("process",)),
            ("session_bytes", "Memory of sessions in bytes.", ("process",)),
        ),
        # Processes
        *_gauges(
            ("process_up", "0 if the process has not reported for half a minute.", ("process",)),
            ("process_resident_memory_bytes", "Resident memory in bytes.", ("process",)),
            ("loop_lag_seconds", "Longest delay of the event loop since the last report.", ("process",)),
            ("store_bytes", "Size of the run's database in bytes.", ()),
            ("disk_free_bytes", "Free bytes of the run directory's disk.", ()),
            ("build_info", "Always 1; the labels describe the build.", ("version", "engine", "ray", "mode")),
        ),
        *_counters(
            ("process_cpu_seconds_total", "CPU time of the process.", ("process",)),
            ("log_events_total", "Warnings and errors in the log.", ("event", "level")),
        ),
        *_histograms(("commit_seconds", "Duration of commits of the run's database.", (), _MS)),
    )
}
"""All metric families by name. Other names raise KeyError."""


class MetricSample(NamedTuple):
    """The value of one series of a counter or a gauge."""

    name: str
    labels: Labels
    value: float


class Observed(NamedTuple):
    """One series of a histogram: the count of each bucket, including the one above all bounds, and the sum of
    values."""

    name: str
    labels: Labels
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """All exported metrics at one moment."""

    samples: tuple[MetricSample, ...]
    observed: tuple[Observed, ...]
    engines: tuple[tuple[str, str], ...] = ()  # (replica, its engine's own metrics in Prometheus' text format)


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """A process's counts since its last report, and its gauges.

    A process repeats a report until it is acknowledged. `sequence` increases by one with each new report of a
    `life`. The report with `is_last` is sent at shutdown: it is acknowledged immediately, and the process's gauges
    are removed.
    """

    process: str  # the label value
    life: str  # unique id of the process's lifetime
    sequence: int
    counted: MetricsPage
    gauges: tuple[MetricSample, ...] = ()
    is_last: bool = False
    blocked: tuple[str, float] | None = None  # FILE:LINE that last blocked the event loop, and seconds since then
    engine: str = ""  # its engine's own metrics in Prometheus' text format


@dataclass(slots=True)
class _Buckets:
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0


class MetricsTally:
    """The counters and histograms of one process, or the sums of all processes. Thread-safe: any thread can log."""

    def __init__(self) -> None:
        self.trace: Callable[[object], None] = lambda ended: None  # called with each counted trajectory and update
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        self._observed: dict[tuple[str, Labels], _Buckets] = {}

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter."""
        key = name, labels
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        with self._lock:
            buckets = self._buckets_of(name, labels)
            buckets.counts[bisect_left(buckets.bounds, value)] += 1
            buckets.total += value

    def add(self, page: MetricsPage) -> None:
        """Add the counts of another tally. Families that this release does not have, or with other buckets, are
        ignored."""
        for sample in page.samples:
            if sample.name in FAMILIES:
                self.count(sample.name, *sample.labels, by=sample.value)
        with self._lock:
            for observed in page.observed:
                if observed.name in FAMILIES and len(observed.counts) == len(FAMILIES[observed.name].buckets) + 1:
                    buckets = self._buckets_of(observed.name, observed.labels)
                    buckets.counts = [a + b for a, b in zip(buckets.counts, observed.counts, strict=True)]
                    buckets.total += observed.total

    def seen(self) -> MetricsPage:
        """Return all counters and histograms."""
        with self._lock:
            counts = tuple(MetricSample(*key, value) for key, value in self._counts.items())
            observed = tuple(
                Observed(*key, tuple(buckets.counts), buckets.total) for key, buckets in self._observed.items()
            )
        return MetricsPage(counts, observed)

    def take(self) -> MetricsPage:
        """Return all counters and histograms, and reset them."""
        taken = MetricsTally()
        with self._lock:
            taken._counts, taken._observed = self._counts, self._observed
            self._counts, self._observed = {}, {}
        return taken.seen()

    def _buckets_of(self, name: str, labels: Labels) -> _Buckets:
        if (buckets := self._observed.get((name, labels))) is None:
            bounds = FAMILIES[name].buckets
            buckets = self._observed[name, labels] = _Buckets(bounds, [0] * (len(bounds) + 1))
        return buckets


@dataclass(frozen=True, slots=True)
class SavedMetrics:
    """The stored counts with which the next coordinator continues."""

    counted: MetricsPage
    sequences: dict[str, int] = field(default_factory=dict)  # the sequence of the last counted report, by life


_PHASES = {
    "queue": ("trajectory_seconds", "queue"),
    "place": ("turn_seconds", "place"),
    "prefill": ("turn_seconds", "first_token"),
    "decode": ("turn_seconds", "decode"),
    "tools": ("trajectory_seconds", "tool"),
    "reward": ("trajectory_seconds", "reward"),
    "unavailable": ("trajectory_seconds", "unavailable"),
}


def phase_seconds(page: MetricsPage) -> dict[str, float]:
    """Return the total seconds of trajectories and turns by phase. Standstill time is also part of turn phases."""
    totals = {(observed.name, *observed.labels): observed.total for observed in page.observed}
    return {phase: totals.get(key, 0.0) for phase, key in _PHASES.items()}


def count_record(tally: MetricsTally, record: Trajectory, source: str) -> None:
    """Count a finished trajectory: of a worker (`source` "rollout"), or a session."""
    tally.trace(record)
    tally.count("trajectories_total", record.stop_reason, record.failure or "", source)
    tally.count("turns_resumed_total", by=record.num_resumed_turns)
    turns = [turn for path in record.paths for turn in path.own_turns]
    tally.observe("trajectory_turns", len(turns))
    tally.observe("trajectory_sampled_tokens", record.num_sampled_tokens)
    for turn in turns:
        _count_turn(tally, turn)
    for path in record.paths:
        if path.split_reason is not None:
            tally.count("splits_total", path.split_reason)
    credited = set(record.credited_paths)
    for index, path in enumerate(record.paths):
        if index not in credited and path.lineage is not None:
            tally.count("tokens_uncredited_total", path.lineage.kind, by=path.num_own_sampled_tokens)
    if record.times is not None:
        for cause, num_tokens in record.times.lost_tokens.items():
            tally.count("tokens_lost_total", cause, by=num_tokens)
        for call in record.times.tool_calls:
            # A policy can invent tool names, which must not become label values.
            tool = call.name if call.outcome is not ToolOutcome.UNKNOWN else ""
            tally.count("tool_calls_total", tool, call.outcome)
            tally.observe("tool_seconds", call.duration_us / 1e6, tool)
    if source == "rollout":
        _count_timings(tally, record)


def _count_turn(tally: MetricsTally, turn: Turn) -> None:
    tally.count("turn_tokens_total", "prompt", by=turn.prompt_len)
    tally.count("turn_tokens_total", "cached", by=turn.cached_tokens)
    tally.count("turn_tokens_total", "sampled", by=turn.end - turn.start)
    if (times := turn.times) is not None and times.first_token_us is not None:
        tally.observe("turn_seconds", times.queue_us / 1e6, "place")
        tally.observe("turn_seconds", (times.first_token_us - times.begun_us - times.queue_us) / 1e6, "first_token")
        tally.observe("turn_seconds", (times.ended_us - times.first_token_us) / 1e6, "decode")


def _count_timings(tally: MetricsTally, record: Trajectory) -> None:
    timings = record.timings
    tally.observe("queue_wait_seconds", timings.queue_s)
    for phase in ("queue", "generate", "tool", "reward", "unavailable", "total"):
        tally.observe("trajectory_seconds", getattr(timings, f"{phase}_s"), phase)
    if record.reward is not None or record.reward_error is not None:
        tally.observe("reward_seconds", timings.reward_s)
    tally.count("reward_errors_total", by=record.reward_error is not None)
