"""Export of traces to an OTLP receiver.

A thread creates the spans of ended trajectories and sends them in batches. The process that ends a trajectory
passes its record here, so no record is decoded again. The queue is bounded: if the receiver is slow or down, traces
are dropped, and the log reports their number.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from agentloop.api.coordinator import UpdateReport
from agentloop.errors import InvalidRequest
from agentloop.storage.exports import ExportRequest
from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop.types import Trajectory
from agentloop_servers.config.service import TracingSettings, saved_config
from agentloop_traces.spans import SpanMaker, Trace

MAX_REQUEST_BYTES = 4 << 20
"""Approximate maximum size of one request to a receiver."""

_MAX_WAITING = 4_000_000  # tokens of the queued trajectories; above this, new ones are dropped
_BASE_TOKENS = 1000  # counted per trajectory in addition to the tokens of its paths
_SEND_EVERY_S = 1.0
_SEND_TIMEOUT_S = 10.0
_CLOSE_S = 2.0
_QUIET_S = 60.0  # minimum interval between two log lines
_NUM_RECENT = 1000  # trajectories with which a slow one is compared

_log = structlog.stdlib.get_logger("tracing")


class Tracing:
    """Exports the traces of one process: a sample of trajectories, and all slow or failed ones if configured."""

    Settings = TracingSettings

    def __init__(self, settings: TracingSettings, run: str, model: str) -> None:
        """`model` is the run's served model name. Call `close` at the end."""
        self._settings = settings
        self._spans = SpanMaker(run, model, content=settings.content)
        self._exporter = exporter_to(settings.endpoint)
        self._seconds: deque[float] = deque(maxlen=_NUM_RECENT)  # durations of recent trajectories
        self._sorted: list[float] = []  # the same durations, sorted
        self._waiting: deque[tuple[Trajectory | UpdateReport, int]] = deque()
        self._closing = threading.Event()
        # Tokens added to and removed from the queue; the thread owns the second.
        self._num_given = self._num_taken = 0
        self._num_dropped = 0
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def give(self, ended: Trajectory | UpdateReport) -> None:
        """Queue the trace of an ended trajectory or update, if it is sampled or kept. Fast; never raises."""
        size = _BASE_TOKENS
        if isinstance(ended, Trajectory):
            if not self._is_kept(ended):
                return
            size += sum(len(path.prompt_ids) + len(path.response_ids) for path in ended.paths)
        if self._num_given - self._num_taken + size > _MAX_WAITING:
            self._num_dropped += 1
        else:
            self._num_given += size
            self._waiting.append((ended, size))

    def close(self) -> None:
        """Send queued traces for at most `_CLOSE_S` seconds. Blocks."""
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends the retries of a running request

    def _is_kept(self, record: Trajectory) -> bool:
        keep, is_slow = self._settings.keep, self._is_slow(record.timings.total_s)
        return (
            (is_slow and "slowest" in keep)
            or (record.failure is not None and "failed" in keep)
            or self._spans.is_sampled(record, self._settings.sample)
        )

    def _is_slow(self, total_s: float) -> bool:
        """Return True if the duration exceeds 99% of at least 100 recent ones."""
        if len(self._seconds) == _NUM_RECENT:
            del self._sorted[bisect_left(self._sorted, self._seconds[0])]
        self._seconds.append(total_s)
        insort(self._sorted, total_s)
        return len(self._sorted) > 100 and total_s > self._sorted[len(self._sorted) * 99 // 100 - 1]

    def _run(self) -> None:
        for traces in batches(self._traces()):
            if not sent(self._exporter, traces):
                self._num_dropped += len(traces)
            if time.monotonic() >= self._quiet_until:
                self._report_dropped()
        self._report_dropped()

    def _report_dropped(self) -> None:
        if self._num_dropped:
            reason = "the receiver did not accept them, or more trajectories ended than could be sent"
            _log.warning("traces_dropped", num=self._num_dropped, endpoint=self._settings.endpoint, reason=reason)
            self._num_dropped, self._quiet_until = 0, time.monotonic() + _QUIET_S

    def _traces(self) -> Iterator[Trace | None]:
        """Yield queued traces, and None when a batch is due, until `close` is called."""
        is_closing = False
        while not is_closing:
            # Poll: waking the thread for each trace would cost as much as creating its spans.
            is_closing = self._closing.wait(_SEND_EVERY_S)
            while self._waiting:
                ended, size = self._waiting.popleft()
                self._num_taken += size
                yield self._spans.trace(ended)
            yield None


def batches(traces: Iterable[Trace | None]) -> Iterator[list[Trace]]:
    """Collect traces into requests of `MAX_REQUEST_BYTES`; None ends the current request."""
    batch: list[Trace] = []
    for trace in traces:
        if batch and (
            trace is None or sum(other.num_bytes for other in batch) + trace.num_bytes > MAX_REQUEST_BYTES
        ):
            yield batch
            batch = []
        if trace is not None and trace.spans:
            batch.append(trace)
    if batch:
        yield batch


def exporter_to(endpoint: str) -> OTLPSpanExporter:
    """Return the exporter to a receiver. It reads variables such as OTEL_EXPORTER_OTLP_HEADERS."""
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT_S)


def sent(exporter: OTLPSpanExporter, traces: Iterable[Trace]) -> bool:
    """Send one request. Returns False if the receiver did not accept it in 10 s; the exporter logs the reason."""
    spans = [span for trace in traces for span in trace.spans]
    return exporter.export(spans) is SpanExportResult.SUCCESS


def otlp(request: ExportRequest) -> str:
    """Send the traces of the run's latest updates and of all or one rollout's records: `export --format otlp`.

    Raises InvalidRequest if the receiver does not accept them, and NotFound.
    """
    folder, num_sent = folder_of(request.store).resolve(), 0
    config, reader = saved_config(folder), TrajectoryReader(request.store)
    maker = SpanMaker(folder.name, "" if config is None else config.served_name, content=request.content)
    exporter = exporter_to(request.endpoint)
    try:
        ended: Iterable[Trajectory | UpdateReport] = chain(
            reader.updates(), reader.trajectories(request.rollout_id)
        )
        for traces in batches(map(maker.trace, ended)):
            if not sent(exporter, traces):
                raise InvalidRequest(
                    f"{request.endpoint} did not accept the traces: see the exporter's log for the reason",
                    param="endpoint",
                )
            num_sent += len(traces)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
        reader.close()
    return f"{num_sent} traces sent to {request.endpoint}"
