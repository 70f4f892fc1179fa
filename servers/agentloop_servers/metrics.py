"""The metrics reporter of each process, and the export of the coordinator's metrics in Prometheus' text format."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence

import psutil
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from agentloop.concurrency.aio import LoopWatch
from agentloop.errors import AgentLoopError
from agentloop.observability.metrics import (
    FAMILIES,
    PREFIX,
    REPORT_S,
    Family,
    Kind,
    MetricSample,
    MetricsPage,
    MetricsReport,
    MetricsTally,
)

ENGINE_PREFIXES = ("vllm:",)

GOODBYE_S = 1.0  # timeout of the last report: Serve gives a process 5 s to shut down

_log = structlog.stdlib.get_logger(__name__)


class MetricsReporter:
    """Reports the metrics of one process periodically. Construct it on the process's event loop, which it
    monitors."""

    def __init__(
        self,
        process: str,
        tally: MetricsTally,
        report: Callable[[MetricsReport], Awaitable[None]],
        gauges: Callable[[], Sequence[MetricSample]] = tuple,
        engine: Callable[[], str] = str,
    ) -> None:
        """`process` is the label value of its gauges. `gauges` returns additional gauges, and `engine` the engine's
        own metrics in Prometheus' text format."""
        self._process = process
        self._tally = tally
        self._report = report
        self._gauges = gauges
        self._engine = engine
        self._watch = LoopWatch()
        self._psutil = psutil.Process()
        self._life, self._sequence = uuid.uuid4().hex, 0
        self._counted: MetricsPage | None = None  # counts of the last report until it is acknowledged
        self._task = asyncio.create_task(self._run(), name="metrics")

    async def close(self) -> None:
        """Send a last report with the counts since the previous report, and stop."""
        self._watch.close()
        self._task.cancel()
        try:
            async with asyncio.timeout(GOODBYE_S):
                if self._counted is not None:
                    await self._send((), is_last=True)
                await self._send((), is_last=True)
        except (AgentLoopError, TimeoutError) as error:
            _log.debug("metrics_not_reported", error=repr(error))

    async def _run(self) -> None:
        while True:
            try:
                await self._send((*self._of_process(), *self._gauges()))
            except AgentLoopError as error:
                _log.debug("metrics_not_reported", error=repr(error))
            await asyncio.sleep(REPORT_S)

    async def _send(self, gauges: tuple[MetricSample, ...], *, is_last: bool = False) -> None:
        """Repeat the last report if it was not acknowledged; otherwise report the counts since then."""
        if self._counted is None:
            self._sequence, self._counted = self._sequence + 1, self._tally.take()
        counted, blocked = self._counted, self._watch.blocked
        if blocked is not None:
            blocked = blocked[0], time.monotonic() - blocked[1]
        await self._report(
            MetricsReport(
                self._process, self._life, self._sequence, counted, gauges, is_last, blocked, self._engine()
            )
        )
        self._counted = None

    def _of_process(self) -> Iterator[MetricSample]:
        labels = (self._process,)
        lag_s, self._watch.longest_s = self._watch.longest_s, 0.0
        yield MetricSample("process_resident_memory_bytes", labels, self._psutil.memory_info().rss)
        yield MetricSample("process_cpu_seconds_total", labels, time.process_time())
        yield MetricSample("loop_lag_seconds", labels, lag_s)


def engine_text() -> str:
    """Return the metrics that an engine in this process has registered with prometheus_client; "" without an
    engine."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Families([metric for metric in REGISTRY.collect() if metric.name.startswith(ENGINE_PREFIXES)])
    )
    return generate_latest(registry).decode()


def prometheus_text(page: MetricsPage) -> bytes:
    """Return a page in Prometheus' text format. Families without a series are omitted."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(page))
    return generate_latest(registry)


class _Page(Collector):
    """Converts a page to metric families of prometheus_client."""

    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for sample in self._page.samples:
            family = FAMILIES[sample.name]
            metric = metrics.setdefault(sample.name, _metric(family))
            assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
            metric.add_metric(sample.labels, sample.value)
        for observed in self._page.observed:
            family = FAMILIES[observed.name]
            metric = metrics.setdefault(observed.name, _metric(family))
            assert isinstance(metric, HistogramMetricFamily)
            buckets, num = [], 0
            for bound, count in zip((*family.buckets, float("inf")), observed.counts, strict=True):
                num += count
                buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", num))
            metric.add_metric(observed.labels, buckets, observed.total)
        for replica, text in self._page.engines:
            for metric in text_string_to_metric_families(text):
                combined = metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for point in metric.samples:
                    combined.add_sample(point.name, {**point.labels, "replica": replica}, point.value)
        yield from metrics.values()


class _Families(Collector):
    """Exports metric families of prometheus_client unchanged."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _metric(family: Family) -> Metric:
    kinds = {
        Kind.COUNTER: CounterMetricFamily,
        Kind.GAUGE: GaugeMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
    }
    made: Metric = kinds[family.kind](PREFIX + family.name, family.about, labels=family.labels)
    return made
