"""The history of the last 15 minutes: the stored series, their age limits and their memory."""

from __future__ import annotations

from agentloop.api.history import HISTORY_FAMILIES, HISTORY_S
from agentloop.observability.metrics import FAMILIES, MetricSample
from agentloop_servers.coordinator.history import MAX_BYTES, History


def fleet(num: int, value: float) -> list[MetricSample]:
    return [MetricSample("replica_kv_tokens", (f"r{n}", kind), value) for n in range(num) for kind in "abcd"]


def test_its_families_are_there_and_bounded() -> None:
    assert FAMILIES.keys() >= HISTORY_FAMILIES
    labels = {label for name in HISTORY_FAMILIES for label in FAMILIES[name].labels}
    assert not labels & {"tool", "route", "event", "process", "parser"}


def test_a_quarter_of_an_hour_is_kept_with_gaps_where_a_series_was_not_there() -> None:
    history = History()
    for second in range(2000):
        lost = [MetricSample("asleep", ("kv",), 1.0)] if second in (1990, 1995) else []
        history.add(
            1000.0 + second, [*lost, MetricSample("workers", (), second), MetricSample("store_bytes", (), 1.0)]
        )
    page = history.page((), 0.0)
    assert (len(page.times), page.times[0], page.times[-1]) == (HISTORY_S, 2100.0, 2999.0)
    assert {one.name: sum(value is not None for value in one.values) for one in page.series} == {
        "workers": 900,
        "asleep": 2,
    }
    late = history.page(("workers", "calls_waiting"), 2996.5)
    assert late.times == (2997.0, 2998.0, 2999.0)
    assert [(one.name, one.values) for one in late.series] == [("workers", (1997.0, 1998.0, 1999.0))]


def test_a_large_fleet_has_fewer_rows_of_the_same_time_in_bounded_memory() -> None:
    history, at = History(), 0.0
    while at < 3 * HISTORY_S:
        history.add(at, fleet(512 if at > HISTORY_S else 4, at))
        at += history.interval_s
    page = history.page((), 0.0)
    assert history.interval_s == 4.0
    assert page.times[-1] - page.times[0] > 0.99 * HISTORY_S
    assert sum(len(one.values) for one in page.series) * 8 <= MAX_BYTES
    assert page.series[0].values[-1] == page.times[-1]
