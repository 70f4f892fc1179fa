"""The metrics of the whole service: the sums of its processes' reports, and metrics derived from its state.

A report is stored before it is acknowledged and shown. So a displayed counter never decreases, also after a crash
of any process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from agentloop.api.coordinator import ReplicaStatus, ServiceStatus, UpdateReport
from agentloop.api.flight import Blocked, FlightPage
from agentloop.observability.metrics import (
    REPORT_S,
    MetricSample,
    MetricsPage,
    MetricsReport,
    MetricsTally,
    SavedMetrics,
)

_SILENT_S = 6 * REPORT_S  # after this time a process is shown as down
_GONE_S = 600.0  # after this time a process is removed


@dataclass(slots=True)
class _ReportingProcess:
    name: str  # empty: the process has ended, or an earlier coordinator received its last report
    heard_at: float
    sequence: int = 0
    gauges: tuple[MetricSample, ...] = ()
    engine: str = ""  # the engine's own metrics
    blocked: tuple[str, float] | None = None  # FILE:LINE and the time


class MetricsBook:
    """The counters of all processes. Call `save` every REPORT_S."""

    def __init__(self, save: Callable[[SavedMetrics], Awaitable[None]], now: Callable[[], float]) -> None:
        self._save = save
        self._now = now
        self._total = MetricsTally()
        self._shown = MetricsPage((), ())
        self._processes: dict[str, _ReportingProcess] = {}  # by process instance (`life`)
        self._unsaved: set[str] = set()  # process instances with unsaved reports
        self._saved = asyncio.Event()  # set by the next save, which then replaces it

    def restore(self, saved: SavedMetrics | None) -> None:
        """Load the counters of an earlier coordinator."""
        if saved is not None:
            self._total.add(saved.counted)
            self._shown = self._total.seen()
            now = self._now()
            self._processes = {
                life: _ReportingProcess("", now, sequence) for life, sequence in saved.sequences.items()
            }

    async def report_metrics(self, report: MetricsReport) -> None:
        """Add a report once. Returns when it is stored; the last report of a process returns at once."""
        process = self._processes.setdefault(report.life, _ReportingProcess(report.process, 0.0))
        process.name, process.heard_at, process.gauges = report.process, self._now(), report.gauges
        process.engine = report.engine
        if report.is_last:
            process.name = ""
        if report.blocked is not None:
            process.blocked = report.blocked[0], self._now() - report.blocked[1]
        if report.sequence > process.sequence:
            process.sequence = report.sequence
            self._total.add(report.counted)
            self._unsaved.add(report.life)
        if report.life in self._unsaved and not report.is_last:
            await self._saved.wait()

    async def save(self) -> None:
        """Store, show and acknowledge the reports received so far.

        Re-raises the store's error: the next save includes them, and processes repeat unacknowledged reports.
        """
        now = self._now()
        self._processes = {life: one for life, one in self._processes.items() if now - one.heard_at < _GONE_S}
        if not self._unsaved:
            return
        unsaved, self._unsaved = self._unsaved, set()
        saved, self._saved = self._saved, asyncio.Event()
        counted = self._total.seen()
        try:
            await self._save(SavedMetrics(counted, {life: one.sequence for life, one in self._processes.items()}))
        except BaseException:
            self._unsaved |= unsaved
            raise
        self._shown = counted
        saved.set()

    def samples(self, status: ServiceStatus, flights: FlightPage) -> Iterator[MetricSample]:
        """Yield the metrics of the whole service, without those of single processes."""
        return chain(self._shown.samples, of_status(status), of_flights(flights))

    def page(self, status: ServiceStatus, flights: FlightPage) -> MetricsPage:
        """Return all current metrics."""
        heard_since = self._now() - _SILENT_S
        heard = (one for one in self._processes.values() if one.engine and one.heard_at > heard_since)
        engines = tuple((one.name, one.engine) for one in heard)
        samples = *self.samples(status, flights), *self._of_processes()
        return MetricsPage(samples, self._shown.observed, engines)

    def blocked(self) -> tuple[Blocked, ...]:
        """Return the last blockage of each process's event loop."""
        found = ((one.name, one.blocked) for one in self._processes.values() if one.name)
        return tuple(Blocked(name, last[0], self._now() - last[1]) for name, last in found if last is not None)

    def _of_processes(self) -> Iterator[MetricSample]:
        now = self._now()
        silent = {one.name for one in self._processes.values() if one.name}
        for one in self._processes.values():
            if one.name and now - one.heard_at < _SILENT_S:
                silent.discard(one.name)
                yield MetricSample("process_up", (one.name,), 1.0)
                yield from one.gauges
        for name in silent:
            yield MetricSample("process_up", (name,), 0.0)


def of_status(status: ServiceStatus) -> Iterator[MetricSample]:
    """Yield the metrics of the service's state."""
    states = Counter((replica.entry, replica.state) for replica in status.replicas)
    yield from (MetricSample("replicas", labels, num) for labels, num in states.items())
    for replica in status.replicas:
        yield from _of_replica(replica)
    yield from _of_queue(status)
    if status.weight_version is not None:
        yield MetricSample("weight_version", (), status.weight_version)
    if status.update is not None:
        yield MetricSample("weight_update_age_seconds", (), status.update.age_s)
    yield from (MetricSample("asleep", (memory,), 1.0) for memory in status.asleep)


def of_flights(flights: FlightPage) -> Iterator[MetricSample]:
    """Yield the metrics of live trajectories and sessions."""
    doing = Counter[str]()
    for name, num in flights.doing:
        kind, _, tool = name.partition(" ")
        doing[kind] += num
        if tool:
            yield MetricSample("tools_running", (tool,), num)
    yield from (MetricSample("doing", (kind,), num) for kind, num in doing.items())
    yield MetricSample("free_places", (), flights.num_free)
    if flights.oldest:
        yield MetricSample("oldest_running_seconds", (), flights.oldest[0].flight.age_s)


def _of_replica(replica: ReplicaStatus) -> Iterator[MetricSample]:
    name, load = replica.replica_id, replica.load
    yield MetricSample("replica_requests", (name, "running"), load.num_running)
    yield MetricSample("replica_requests", (name, "waiting"), load.num_waiting)
    yield MetricSample("replica_kv_tokens", (name, "used"), load.kv_used_tokens)
    yield MetricSample("replica_kv_tokens", (name, "promised"), replica.kv_predicted_tokens)
    yield MetricSample("replica_kv_tokens", (name, "limit"), replica.kv_limit_tokens)
    yield MetricSample("replica_kv_tokens", (name, "capacity"), load.kv_capacity_tokens)
    if replica.weight_version is not None:
        yield MetricSample("replica_weight_version", (name,), replica.weight_version)
    if replica.kv_hit_rate is not None:
        yield MetricSample("replica_kv_hit_ratio", (name,), replica.kv_hit_rate)
    yield MetricSample("replica_heartbeat_age_seconds", (name,), replica.heartbeat_age_s)
    yield MetricSample("replica_steps_total", (name,), load.num_steps)
    yield MetricSample("replica_sampled_tokens_total", (name,), load.num_sampled_tokens)
    yield MetricSample("replica_preemptions_total", (name,), load.num_preemptions)


def _of_queue(status: ServiceStatus) -> Iterator[MetricSample]:
    num_queued = sum(rollout.num_queued for rollout in status.rollouts)
    num_held = sum(rollout.num_held for rollout in status.rollouts)
    yield MetricSample("samples", ("queued",), num_queued - num_held)
    yield MetricSample("samples", ("held",), num_held)
    yield MetricSample("samples", ("running",), sum(rollout.num_running for rollout in status.rollouts))
    yield MetricSample("calls_waiting", (), status.queue.num_waiting)
    yield MetricSample("calls_waiting_seconds", ("longest",), status.queue.longest_wait_s)
    yield MetricSample("calls_waiting_seconds", ("median",), status.queue.median_wait_s)
    yield from (MetricSample("user_calls_waiting", (one.name,), one.waiting_calls) for one in status.users)
    yield MetricSample("workers", (), status.num_workers)
    reasons = {
        "paused": status.is_paused,
        "asleep": bool(status.asleep),
        "no_replica": not status.is_ready,
        "no_worker": status.num_workers == 0 and num_queued > 0,
        "no_room": bool(status.queue.reason),
        "stale": 0 < num_queued == num_held,
    }
    yield from (MetricSample("not_begun", (reason,), 1.0) for reason, holds in reasons.items() if holds)


def count_update(tally: MetricsTally, report: UpdateReport) -> None:
    """Count a weight update that succeeded on at least one replica."""
    tally.trace(report)
    came = [replica for replica in report.replicas if replica.error is None]
    transports = sorted({replica.transport or "files" for replica in came})
    outcome = "ok" if len(came) == len(report.replicas) else "partial"
    tally.count("weight_updates_total", outcome, "+".join(transports))
    for replica in came:
        tally.count("weight_bytes_total", replica.transport or "files", by=replica.num_bytes)
    steps = {
        "stage": max((replica.stage_ms for replica in came), default=0.0),
        "transfer": report.transfer_ms,
        "swap": max((replica.swap_ms for replica in came), default=0.0),
        "verify": max((replica.verify_ms for replica in came), default=0.0),
        "stall": report.stall_ms,
        "total": report.total_ms,
    }
    for step, ms in steps.items():
        tally.observe("weight_update_seconds", ms / 1000, step)
    tally.count("paused_seconds_total", "update", by=report.stall_ms / 1000)
