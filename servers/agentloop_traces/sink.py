"""Traces sent to an OTLP receiver: a thread makes the spans of ended trajectories and sends them in batches.

The process that ends a trajectory passes its record here, so nothing is decoded again. A slow or dead receiver
costs traces, which the log counts, and nothing else: the queue is bounded.
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
"""Bytes of one request to a receiver, about."""

_MAX_WAITING = 4_000_000  # tokens of what waits for the thread; what comes then is dropped
_BASE_TOKENS = 1000  # of each, beside its paths'
_SEND_EVERY_S = 1.0
_SEND_TIMEOUT_S = 10.0
_CLOSE_S = 2.0
_QUIET_S = 60.0  # after a line of the log
_NUM_RECENT = 1000  # trajectories that a slow one is compared with

_log = structlog.stdlib.get_logger("tracing")


class Tracing:
    """The traces of one process: of a share of what ends, and of all that is kept for its end."""

    Settings = TracingSettings

    def __init__(self, settings: TracingSettings, run: str, model: str) -> None:
        """`model` is the name that the run serves. End it with `close`."""
        self._settings = settings
        self._spans = SpanMaker(run, model, content=settings.content)
        self._exporter = exporter_to(settings.endpoint)
        self._seconds: deque[float] = deque(maxlen=_NUM_RECENT)  # of recent trajectories
        self._sorted: list[float] = []  # the same
        self._waiting: deque[tuple[Trajectory | UpdateReport, int]] = deque()
        self._closing = threading.Event()
        self._num_given = self._num_taken = 0  # tokens; the second is the thread's
        self._num_dropped = 0
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def give(self, ended: Trajectory | UpdateReport) -> None:
        """Send the trace of what has ended, if it is to be kept. Takes microseconds, and raises nothing."""
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
        """Send what waits, as far as a moment allows. Blocks."""
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends a request that is still repeated

    def _is_kept(self, record: Trajectory) -> bool:
        kept, is_slow = self._settings.keep, self._is_slow(record.timings.total_s)
        return (
            (is_slow and "slowest" in kept)
            or (record.failure is not None and "failed" in kept)
            or self._spans.is_sampled(record, self._settings.sample)
        )

    def _is_slow(self, total_s: float) -> bool:
        """Tell if it took longer than 99 % of the recent ones, of which there are a hundred at least."""
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
            reason = "the receiver did not take them, or more ended than could be sent"
            _log.warning("traces_dropped", num=self._num_dropped, endpoint=self._settings.endpoint, reason=reason)
            self._num_dropped, self._quiet_until = 0, time.monotonic() + _QUIET_S

    def _traces(self) -> Iterator[Trace | None]:
        """Yield the traces of what ended, and None whenever a batch is due, until the end."""
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(
                _SEND_EVERY_S
            )  # a wake-up for each trace would cost as much as its spans
            while self._waiting:
                ended, size = self._waiting.popleft()
                self._num_taken += size
                yield self._spans.trace(ended)
            yield None


def batches(traces: Iterable[Trace | None]) -> Iterator[list[Trace]]:
    """Gather traces into requests of `MAX_REQUEST_BYTES`; None ends the request at once."""
    batch: list[Trace] = []
    for trace in traces:
        if batch and (trace is None or sum(one.num_bytes for one in batch) + trace.num_bytes > MAX_REQUEST_BYTES):
            yield batch
            batch = []
        if trace is not None and trace.spans:
            batch.append(trace)
    if batch:
        yield batch


def exporter_to(endpoint: str) -> OTLPSpanExporter:
    """Return the exporter to a receiver; OTEL_EXPORTER_OTLP_HEADERS and the like apply to it."""
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT_S)


def sent(exporter: OTLPSpanExporter, traces: Iterable[Trace]) -> bool:
    """Send one request. Returns False if the receiver did not take it within 10 s; the exporter logs the reason."""
    spans = [span for trace in traces for span in trace.spans]
    return exporter.export(spans) is SpanExportResult.SUCCESS


def otlp(request: ExportRequest) -> str:
    """Send the traces of a run's records, or of one rollout's, and of its latest updates: `export --format otlp`.

    Raises InvalidRequest if the receiver does not take them, and NotFound.
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
                raise InvalidRequest(f"{request.endpoint} did not take the traces", param="endpoint")
            num_sent += len(traces)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
        reader.close()
    return f"{num_sent} traces sent to {request.endpoint}"
