"""The way of traces to an OTLP receiver. Spans are made and sent by a thread, in batches, of what has ended.

The process that ends a trajectory has its record in hand and gives it here: nothing is decoded again. A receiver
that is slow or dead costs traces, which are counted in the log, and nothing else: what waits is bounded.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
import urllib.request
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import unquote

import structlog

from agentloop.api.coordinator import UpdateReport
from agentloop.errors import error_line
from agentloop.spans import MAX_REQUEST_BYTES, SpanMaker
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop.types import Trajectory
from agentloop_servers.config import TracingSettings, saved_config

_MAX_WAITING = 4_000_000  # tokens of what waits for the thread; what comes then is dropped
_BASE_TOKENS = 1000  # of each, beside its paths'
_SEND_EVERY_S = 1.0
_SEND_TIMEOUT_S = 10.0
_CLOSE_S = 2.0
_QUIET_S = 60.0  # after a line of the log
_NUM_RECENT = 1000  # trajectories that a slow one is compared with

_TOO_MUCH = "too much waited"

_log = structlog.stdlib.get_logger("tracing")


class Tracing:
    """The traces of one process: of a share of what ends, and of all that is kept for its end."""

    def __init__(self, settings: TracingSettings, run: str, model: str) -> None:
        """`model` is the name that the run serves. End it with `close`."""
        self._settings = settings
        self._spans = SpanMaker(run, model, content=settings.content)
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
        reason = _TOO_MUCH
        for batch in batches(self._traces()):
            reason = _TOO_MUCH
            try:
                post(self._settings.endpoint, batch)
            except (OSError, http.client.HTTPException, ValueError) as error:  # a header that cannot be sent, too
                self._num_dropped += len(batch)
                reason = error_line(error)
            if time.monotonic() >= self._quiet_until:
                self._tell(reason)
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if self._num_dropped:
            _log.warning("traces_dropped", num=self._num_dropped, reason=reason)
            self._num_dropped, self._quiet_until = 0, time.monotonic() + _QUIET_S

    def _traces(self) -> Iterator[bytes]:
        """Yield the traces of what is given, and an empty one whenever a batch is due, until the end."""
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(_SEND_EVERY_S)  # to wake for each would cost as much as its spans
            while self._waiting:
                ended, size = self._waiting.popleft()
                self._num_taken += size
                yield self._spans.encoded(ended)
            yield b""


def batches(traces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Gather traces into requests of `MAX_REQUEST_BYTES`; an empty one ends the request at once."""
    batch: list[bytes] = []
    for trace in traces:
        if batch and (not trace or sum(map(len, batch)) + len(trace) > MAX_REQUEST_BYTES):
            yield batch
            batch = []
        if trace:
            batch.append(trace)
    if batch:
        yield batch


def post(endpoint: str, batch: list[bytes]) -> None:
    """Send one request, with the headers that the usual variable names. Raises OSError and HTTPException."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if pair)
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    headers["content-type"] = "application/x-protobuf"
    url = f"{endpoint.rstrip('/')}/v1/traces"
    with urllib.request.urlopen(urllib.request.Request(url, b"".join(batch), headers), timeout=_SEND_TIMEOUT_S):
        pass


def send_run(store: Path | Home, rollout_id: str | None, endpoint: str, *, content: bool) -> int:
    """Send the traces of a run's records, or of one rollout's, and of its latest updates; returns their number.

    Raises as `post`, and NotFound.
    """
    folder, num_sent = folder_of(store).resolve(), 0
    config, reader = saved_config(folder), TrajectoryReader(store)
    spans = SpanMaker(folder.name, "" if config is None else config.served_name, content=content)
    try:
        ended: Iterable[Trajectory | UpdateReport] = chain(reader.updates(), reader.trajectories(rollout_id))
        for batch in batches(map(spans.encoded, ended)):
            post(endpoint, batch)
            num_sent += len(batch)
    finally:
        reader.close()
    return num_sent
