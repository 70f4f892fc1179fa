"""The metrics of all processes, added up: each report counts once, and no published counter decreases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentloop.api.coordinator import (
    QueueStatus,
    ReplicaUpdate,
    RolloutStatus,
    ServiceStatus,
    UpdateProgress,
    UpdateReport,
)
from agentloop.api.flight import Doing, Flight, FlightPage, FlightRow
from agentloop.api.owners import UserUsage
from agentloop.errors import ServiceUnavailable
from agentloop.observability.metrics import (
    FAMILIES,
    MetricSample,
    MetricsPage,
    MetricsReport,
    MetricsTally,
    count_record,
)
from agentloop.types import KVPolicy, LossCause, ToolCallTimes, ToolOutcome, TrajectoryTimes, TurnTimes
from agentloop_servers.coordinator.metrics import MetricsBook, SavedMetrics, count_update, of_flights, of_status
from agentloop_servers.metrics import MetricsReporter, prometheus_text
from tests.support.records.samples import counted, make_trajectory

NOTHING = ServiceStatus(False, False, None, (), 0, (), ())
EMPTY = FlightPage((), (), (), 0)


class Saving:
    """A store of metrics that may fail, with a clock."""

    def __init__(self) -> None:
        self.saved: SavedMetrics | None = None
        self.fails = False
        self.now = 0.0
        self.book = MetricsBook(self.save, lambda: self.now)

    async def save(self, value: SavedMetrics) -> None:
        if self.fails:
            raise OSError("away")
        self.saved = value

    def shown(self) -> dict[tuple[str, tuple[str, ...]], float]:
        of_state = {(one.name, one.labels) for one in (*of_status(NOTHING), *of_flights(EMPTY))}
        shown = {(one.name, one.labels): one.value for one in self.book.page(NOTHING, EMPTY).samples}
        return {series: value for series, value in shown.items() if series not in of_state}


def report(sequence: int, num: int = 1, life: str = "l1", process: str = "worker-a") -> MetricsReport:
    tally = MetricsTally()
    tally.count("log_events_total", "oops", "error", by=num)
    tally.observe("commit_seconds", 0.02)
    gauges = (MetricSample("loop_lag_seconds", (process,), 0.5),)
    return MetricsReport(process, life, sequence, tally.take(), gauges)


OOPS = "log_events_total", ("oops", "error")


async def test_a_report_is_answered_and_shown_once_it_is_saved_and_counts_once() -> None:
    saving = Saving()
    first = asyncio.create_task(saving.book.report_metrics(report(1, 3)))
    again = asyncio.create_task(saving.book.report_metrics(report(1, 3)))
    await asyncio.sleep(0)
    assert OOPS not in saving.shown()
    assert not first.done()
    await saving.book.save()
    await asyncio.gather(first, again)
    assert saving.shown()[OOPS] == 3
    await saving.book.report_metrics(report(1, 3))  # a late copy is answered at once
    assert saving.shown()[OOPS] == 3


async def test_what_could_not_be_saved_is_neither_answered_nor_shown_until_it_is() -> None:
    saving = Saving()
    saving.fails = True
    first = asyncio.create_task(saving.book.report_metrics(report(1)))
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="away"):
        await saving.book.save()
    saving.fails = False
    repeated = asyncio.create_task(saving.book.report_metrics(report(1)))  # the first report has timed out
    await asyncio.sleep(0)
    assert OOPS not in saving.shown()
    await saving.book.save()
    await repeated
    assert saving.shown()[OOPS] == 1
    first.cancel()


async def test_the_next_coordinator_goes_on_with_the_counts_and_knows_what_it_has() -> None:
    before = Saving()
    for sequence in (1, 2):
        reported = asyncio.create_task(before.book.report_metrics(report(sequence)))
        await asyncio.sleep(0)
        await before.book.save()
        await reported
    after = Saving()
    after.book.restore(before.saved)
    assert after.shown()[OOPS] == 2
    await after.book.report_metrics(report(2))  # repeated because the answer was lost
    other = asyncio.create_task(after.book.report_metrics(report(1, life="l2", process="worker-b")))
    await asyncio.sleep(0)
    await after.book.save()
    await other
    assert after.shown()[OOPS] == 3
    [seen] = after.book.page(NOTHING, EMPTY).observed
    assert sum(seen.counts) == 3
    assert seen.total == pytest.approx(0.06)


async def test_a_silent_process_is_named_and_its_gauges_are_gone_and_its_counts_stay() -> None:
    saving = Saving()
    reported = asyncio.create_task(saving.book.report_metrics(report(1)))
    await asyncio.sleep(0)
    await saving.book.save()
    await reported
    assert saving.shown()["process_up", ("worker-a",)] == 1
    assert saving.shown()["loop_lag_seconds", ("worker-a",)] == 0.5
    saving.now = 31.0
    assert saving.shown() == {OOPS: 1, ("process_up", ("worker-a",)): 0}
    saving.now = 601.0
    await saving.book.save()
    assert saving.shown() == {OOPS: 1}


async def test_a_process_that_closes_says_goodbye_with_its_last_counts_and_a_killed_one_does_not() -> None:
    saving = Saving()
    is_killed = False

    async def until_killed(report: MetricsReport) -> None:
        if is_killed:
            raise ServiceUnavailable("it is dead")
        await saving.book.report_metrics(report)

    tallies = MetricsTally(), MetricsTally()
    closed = MetricsReporter("worker-closed", tallies[0], saving.book.report_metrics)
    killed = MetricsReporter("worker-killed", tallies[1], until_killed)
    for num_before in (1, 2):
        for tally in tallies:
            tally.count("log_events_total", *OOPS[1])
        await asyncio.sleep(0)
        if num_before == 1:
            await saving.book.save()
            await asyncio.sleep(0)
    is_killed = True
    await killed.close()
    await closed.close()
    await saving.book.save()
    assert saving.shown()[OOPS] == 3
    saving.now = 31.0
    assert saving.shown() == {OOPS: 3, ("process_up", ("worker-killed",)): 0}


async def test_a_goodbye_repeats_what_was_not_answered_and_counts_once() -> None:
    saving, tally = Saving(), MetricsTally()
    tally.count("log_events_total", *OOPS[1])
    reporter = MetricsReporter("worker-a", tally, saving.book.report_metrics)
    await asyncio.sleep(0)  # the report gets no answer: nothing is saved
    tally.count("log_events_total", *OOPS[1])
    await reporter.close()
    await reporter.close()
    await saving.book.save()
    assert saving.shown() == {OOPS: 2}
    before = Saving()
    before.book.restore(saving.saved)
    assert before.shown() == {OOPS: 2}


async def test_counts_of_another_release_are_left_out() -> None:
    tally = MetricsTally()
    tally.count("replica_starts_total", "a", "new")
    tally.add(MetricsTally().seen())
    odd = report(1).counted
    odd = type(odd)((MetricSample("no_such_total", (), 1.0),), (odd.observed[0]._replace(counts=(1, 2)),))
    tally.add(odd)
    assert [one.name for one in tally.seen().samples] == ["replica_starts_total"]
    assert tally.seen().observed == ()


def test_the_queue_says_why_nothing_begins() -> None:
    held = RolloutStatus("r", 10, 0, 0, 4, num_held=4)
    status = ServiceStatus(
        True, True, 3, (), 0, (held,), (), asleep=(), queue=QueueStatus(4, 2, 0, 0, "no room", 9.0, 6.0)
    )
    status = replace(status, users=(UserUsage("alice", waiting_calls=2),))
    found = {(one.name, one.labels): one.value for one in of_status(status)}
    reasons = {labels[0] for name, labels in found if name == "not_begun"}
    assert reasons == {"paused", "no_worker", "no_room", "stale"}
    assert found["samples", ("held",)] == 4
    assert found["samples", ("queued",)] == 0
    assert found["calls_waiting", ()] == found["user_calls_waiting", ("alice",)] == 2
    assert [found["calls_waiting_seconds", (wait,)] for wait in ("longest", "median")] == [9.0, 6.0]
    assert all(name in FAMILIES and len(labels) == len(FAMILIES[name].labels) for name, labels in found)


def test_the_update_under_way_says_its_age() -> None:
    under_way = replace(NOTHING, update=UpdateProgress(3, "staging", 0, age_s=7.5))
    aged = MetricSample("weight_update_age_seconds", (), 7.5)
    assert aged in set(of_status(under_way))
    assert aged.name not in {one.name for one in of_status(NOTHING)}


def test_an_update_is_counted_by_its_outcome_and_steps() -> None:
    good = ReplicaUpdate("a", 2000.0, 40.0, transport="tcp", num_bytes=7, transfer_ms=900.0, swap_ms=3.0)
    bad = ReplicaUpdate("b", 0.0, 0.0, error="lost")
    tally = MetricsTally()
    count_update(tally, UpdateReport(2, 1, KVPolicy.RECOMPUTE, (good, bad), 3000.0))
    count_update(tally, UpdateReport(3, 2, KVPolicy.RECOMPUTE, (good,), 3000.0))
    found = counted(tally)
    assert found["weight_updates_total", ("partial", "tcp")] == 1
    assert found["weight_updates_total", ("ok", "tcp")] == 1
    assert found["weight_bytes_total", ("tcp",)] == 14
    assert found["paused_seconds_total", ("update",)] == pytest.approx(0.08)
    totals = {seen.labels[0]: seen.total for seen in tally.seen().observed}
    assert totals["stage"] == pytest.approx(4.0)
    assert totals["transfer"] == pytest.approx(1.8)


def test_a_record_is_counted_by_its_end_its_turns_and_its_tools() -> None:
    times = TrajectoryTimes(
        0.0,
        3_000_000,
        tool_calls=(
            ToolCallTimes("calculator", 0, 20_000, ToolOutcome.OK),
            ToolCallTimes("what the policy wrote", 0, 0, ToolOutcome.UNKNOWN),
        ),
        lost_tokens={LossCause.KILL: 5},
    )
    record = make_trajectory()
    path = record.paths[0]
    turn = replace(path.turns[0], times=TurnTimes(0, 300_000, 800_000, 100_000), cached_tokens=3)
    record = replace(
        record,
        times=times,
        paths=(replace(path, turns=(turn, *(replace(one, times=None) for one in path.turns[1:]))),),
    )
    tally = MetricsTally()
    count_record(tally, record, "rollout")
    found = counted(tally)
    assert found["trajectories_total", (record.stop_reason, "", "rollout")] == 1
    assert found["tool_calls_total", ("calculator", "ok")] == found["tool_calls_total", ("", "unknown")] == 1
    assert found["tokens_lost_total", ("kill",)] == 5
    assert found["turn_tokens_total", ("sampled",)] == record.num_sampled_tokens
    seen = {(one.name, one.labels): one.total for one in tally.seen().observed}
    assert seen["turn_seconds", ("place",)] == pytest.approx(0.1)
    assert seen["turn_seconds", ("first_token",)] == pytest.approx(0.2)
    assert seen["turn_seconds", ("decode",)] == pytest.approx(0.5)
    assert seen["trajectory_turns", ()] == len(path.turns)


def test_what_is_live_is_counted_by_what_it_waits_for() -> None:
    row = FlightRow("r/g/0", Flight(Doing.DECODE, 1.0, 77.0), "w")
    flights = FlightPage((row,), (), (("decode", 5), ("tool search", 2), ("tool shell", 1)), 9)
    assert {(one.name, one.labels): one.value for one in of_flights(flights)} == {
        ("doing", ("decode",)): 5,
        ("doing", ("tool",)): 3,
        ("tools_running", ("search",)): 2,
        ("tools_running", ("shell",)): 1,
        ("free_places", ()): 9,
        ("oldest_running_seconds", ()): 77.0,
    }


async def test_an_engines_own_metrics_have_its_replica_until_it_is_silent() -> None:
    saving = Saving()
    theirs = '# HELP vllm:steps Steps.\n# TYPE vllm:steps counter\nvllm:steps_total{engine="0"} 3.0\n'
    for replica in ("a", "b"):
        await saving.book.report_metrics(MetricsReport(replica, replica, 0, MetricsPage((), ()), engine=theirs))
    text = prometheus_text(saving.book.page(NOTHING, EMPTY)).decode()
    assert text.count("# TYPE vllm:steps_total counter") == 1
    assert {'vllm:steps_total{engine="0",replica="a"} 3.0', 'vllm:steps_total{engine="0",replica="b"} 3.0'} < set(
        text.splitlines()
    )
    saving.now = 60.0
    assert "vllm" not in prometheus_text(saving.book.page(NOTHING, EMPTY)).decode()
