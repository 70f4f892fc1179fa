"""The service's metrics: their families, and what one process counts.

A process counts in a `MetricsTally` and reports what was added since its last report, with gauges of its own. The
coordinator adds the reports of all up, durably, before it answers them and shows them (`coordinator/metrics.py`): a
process that is killed takes the counts of its last seconds with it, and no count ever falls. Worker processes run
users' code and listen nowhere, so they are not asked: they tell.
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
"""The time between two reports of a process."""

Labels: TypeAlias = tuple[str, ...]


class Kind(StrEnum):
    """The type of a family, by Prometheus' name of it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name. The names of counters end in `_total`, and those of times in `_seconds`."""

    name: str  # without the prefix
    kind: Kind
    about: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram's, in its unit


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
            ("replicas", "Replicas, by their state.", ("entry", "state")),
            ("replica_requests", "Requests in an engine: running, waiting.", ("replica", "phase")),
            (
                "replica_kv_tokens",
                "KV: used by the engine; promised to those with places; the limit for that; its capacity.",
                ("replica", "kind"),
            ),
            ("replica_weight_version", "The weight version that a replica holds.", ("replica",)),
            ("replica_kv_hit_ratio", "Of the contexts of turns that return, the share found cached.", ("replica",)),
            ("replica_heartbeat_age_seconds", "The time since a replica's last heartbeat.", ("replica",)),
        ),
        *_counters(
            ("replica_steps_total", "Steps of an engine's scheduler.", ("replica",)),
            ("replica_sampled_tokens_total", "Tokens that an engine sampled.", ("replica",)),
            ("replica_preemptions_total", "Requests whose KV an engine took.", ("replica",)),
            ("replica_prompt_tokens_total", "Tokens of the prompts of turns.", ("replica",)),
            ("replica_cached_prompt_tokens_total", "Of these, those found cached.", ("replica",)),
            ("replica_starts_total", "Replicas that joined: new, replacement, return.", ("entry", "reason")),
        ),
        # The queue
        *_gauges(
            (
                "samples",
                "Samples without a record: queued, held by a staleness limit, running.",
                ("state",),
            ),
            ("calls_waiting", "Sessions and direct calls that wait for KV.", ()),
            ("calls_waiting_seconds", "How long they have waited: longest, median.", ("wait",)),
            ("user_calls_waiting", "The same calls, by user.", ("user",)),
            ("workers", "Worker processes.", ()),
            ("doing", "Live trajectories, by what they wait for.", ("doing",)),
            ("tools_running", "Of these, those at a tool.", ("tool",)),
            ("free_places", "Places of workers that are free.", ()),
            ("oldest_running_seconds", "The age of the oldest live trajectory.", ()),
            ("not_begun", "1 for each reason why what waits does not begin.", ("reason",)),
        ),
        *_histograms(("queue_wait_seconds", "The wait of a sample for its worker.", (), _S)),
        # Trajectories, counted when they end: those of workers, and sessions
        *_counters(
            ("trajectories_total", "Records, by their end.", ("stop_reason", "failure", "source")),
            ("tokens_lost_total", "Sampled tokens that were thrown away.", ("cause",)),
            ("turns_resumed_total", "Turns of lost workers that trajectories went on from.", ()),
            ("turn_tokens_total", "Tokens of turns: of prompts, of these found cached, sampled.", ("kind",)),
            ("splits_total", "Paths that could not extend the one before.", ("reason",)),
            ("tool_calls_total", "Calls of tools.", ("tool", "outcome")),
            ("reward_errors_total", "Rewards that failed.", ()),
            ("malformed_calls_total", "Calls of tools that a turn's parser could not read.", ("parser",)),
            ("logprob_problems_total", "Answers with ids or logprobs that cannot be; replicas of noise.", ()),
        ),
        *_histograms(
            ("trajectory_seconds", "queue, generate, tool, reward, standstill; total.", ("phase",), _S),
            ("trajectory_turns", "Turns of a trajectory.", (), _FEW),
            ("trajectory_sampled_tokens", "Tokens that its policy sampled.", (), _TOKENS),
            ("trajectory_staleness", "Versions that the fleet was ahead of its oldest tokens.", (), _FEW),
            (
                "turn_seconds",
                "place: waits for a replica; first_token: from there; decode: the rest.",
                ("phase",),
                _S,
            ),
            ("tool_seconds", "A call of a tool, without the wait for its slot.", ("tool",), _S),
            ("reward_seconds", "Scoring a trajectory.", (), _S),
        ),
        # Weights
        *_gauges(
            ("weight_version", "The weight version that the fleet serves.", ()),
            ("weight_update_age_seconds", "The time since the update under way began.", ()),
            ("asleep", "1 for memory that the fleet has given back.", ("memory",)),
        ),
        *_counters(
            ("weight_updates_total", "Updates, by their outcome: ok, partial, failed.", ("outcome", "transport")),
            ("weight_bytes_total", "Bytes of weights that arrived at engines' workers.", ("transport",)),
            ("paused_seconds_total", "Time in which nothing was sampled: pause, sleep, update.", ("cause",)),
        ),
        *_histograms(("weight_update_seconds", "The steps of updates, of the slowest replica.", ("step",), _MS)),
        # The endpoint
        *_counters(
            ("http_requests_total", "Answers of the public port.", ("route", "method", "status")),
            ("calls_repeated_total", "Model calls that a session had had before: retries of clients.", ()),
            ("streams_cut_total", "Streams that ended early: by a client that left, or a failure.", ("by",)),
        ),
        *_histograms(("http_seconds", "From a request's headers to the end of its answer.", ("route",), _S)),
        *_gauges(
            ("http_in_flight", "Requests of the public port that have no answer yet.", ("process", "route")),
            ("sessions_open", "Sessions that have not ended.", ("process",)),
            ("session_bytes", "Memory of sessions.", ("process",)),
        ),
        # Processes
        *_gauges(
            ("process_up", "0: nothing was heard of the process for half a minute.", ("process",)),
            ("process_resident_memory_bytes", "Resident memory.", ("process",)),
            ("loop_lag_seconds", "The longest time by which the event loop was late lately.", ("process",)),
            ("store_bytes", "Bytes of the run's database.", ()),
            ("disk_free_bytes", "Free bytes of the disk that has the run.", ()),
            ("build_info", "1.", ("version", "engine", "ray", "mode")),
        ),
        *_counters(
            ("process_cpu_seconds_total", "CPU time of the process.", ("process",)),
            ("log_events_total", "Lines of warnings and errors in the log.", ("event", "level")),
        ),
        *_histograms(("commit_seconds", "Commits of the run's database.", (), _MS)),
    )
}
"""All families by name; an import of another one's name is an error of ours."""


class MetricSample(NamedTuple):
    """The value of one series of a counter or a gauge."""

    name: str
    labels: Labels
    value: float


class Observed(NamedTuple):
    """One series of a histogram: how many were in each of its buckets and above them all, and their sum."""

    name: str
    labels: Labels
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """All that the service shows at one moment."""

    samples: tuple[MetricSample, ...]
    observed: tuple[Observed, ...]
    engines: tuple[tuple[str, str], ...] = ()  # replicas, and their engines' own metrics in Prometheus' text


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """A process's counts since its last report, and its gauges.

    A process repeats a report until it is answered; `sequence` grows by one with each new one of its `life`. One
    that `is_last` is a goodbye: it is answered at once, and nothing more is said of the process.
    """

    process: str  # as in labels
    life: str  # which no other process has had
    sequence: int
    counted: MetricsPage
    gauges: tuple[MetricSample, ...] = ()
    is_last: bool = False
    blocked: tuple[str, float] | None = None  # FILE:LINE that blocked its event loop last, and how long ago in s
    engine: str = ""  # its engine's own metrics, in Prometheus' text


@dataclass(slots=True)
class _Buckets:
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0


class MetricsTally:
    """The counts of a process, or of all of them. Thread-safe: logs come from anywhere."""

    def __init__(self) -> None:
        self.trace: Callable[[object], None] = lambda ended: None  # told of each trajectory and update counted
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
            seen = self._buckets_of(name, labels)
            seen.counts[bisect_left(seen.bounds, value)] += 1
            seen.total += value

    def add(self, page: MetricsPage) -> None:
        """Add what another one has counted; what an other release counts otherwise is left out."""
        for one in page.samples:
            if one.name in FAMILIES:
                self.count(one.name, *one.labels, by=one.value)
        with self._lock:
            for more in page.observed:
                if more.name in FAMILIES and len(more.counts) == len(FAMILIES[more.name].buckets) + 1:
                    seen = self._buckets_of(more.name, more.labels)
                    seen.counts = [a + b for a, b in zip(seen.counts, more.counts, strict=True)]
                    seen.total += more.total

    def seen(self) -> MetricsPage:
        """Return all counts and histograms."""
        with self._lock:
            counts = tuple(MetricSample(*key, value) for key, value in self._counts.items())
            observed = tuple(Observed(*key, tuple(one.counts), one.total) for key, one in self._observed.items())
        return MetricsPage(counts, observed)

    def take(self) -> MetricsPage:
        """Return all counts and histograms, and begin anew."""
        taken = MetricsTally()
        with self._lock:
            taken._counts, taken._observed = self._counts, self._observed
            self._counts, self._observed = {}, {}
        return taken.seen()

    def _buckets_of(self, name: str, labels: Labels) -> _Buckets:
        if (seen := self._observed.get((name, labels))) is None:
            bounds = FAMILIES[name].buckets
            seen = self._observed[name, labels] = _Buckets(bounds, [0] * (len(bounds) + 1))
        return seen


@dataclass(frozen=True, slots=True)
class SavedMetrics:
    """The counts that the next coordinator goes on with."""

    counted: MetricsPage
    sequences: dict[str, int] = field(default_factory=dict)  # of the last report of each life that counts


_PHASES = {
    "queue": ("trajectory_seconds", "queue"),
    "place": ("turn_seconds", "place"),
    "prefill": ("turn_seconds", "first_token"),
    "decode": ("turn_seconds", "decode"),
    "tools": ("trajectory_seconds", "tool"),
    "reward": ("trajectory_seconds", "reward"),
    "standstill": ("trajectory_seconds", "standstill"),
}


def phase_seconds(page: MetricsPage) -> dict[str, float]:
    """Return the seconds that trajectories and turns spent so far, by phase. Standstills are part of turns."""
    totals = {(one.name, *one.labels): one.total for one in page.observed}
    return {phase: totals.get(key, 0.0) for phase, key in _PHASES.items()}


def count_record(tally: MetricsTally, record: Trajectory, source: str) -> None:
    """Count a trajectory that has ended: a worker's (`source` "rollout"), or a session."""
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
    if record.times is not None:
        for cause, num_tokens in record.times.lost_tokens.items():
            tally.count("tokens_lost_total", cause, by=num_tokens)
        for call in record.times.tool_calls:
            tool = call.name if call.outcome is not ToolOutcome.UNKNOWN else ""  # the policy may call anything
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
    for phase in ("queue", "generate", "tool", "reward", "standstill", "total"):
        tally.observe("trajectory_seconds", getattr(timings, f"{phase}_s"), phase)
    if record.reward is not None or record.reward_error is not None:
        tally.observe("reward_seconds", timings.reward_s)
    tally.count("reward_errors_total", by=record.reward_error is not None)
