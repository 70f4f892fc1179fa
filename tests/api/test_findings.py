"""The first finding names the cause that stops progress, for each cause; a healthy service has no findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentloop.api.coordinator import (
    LostReplica,
    QueueStatus,
    ReplicaStatus,
    RolloutStatus,
    ServiceStatus,
    StartingReplica,
    UpdateProgress,
)
from agentloop.api.findings import Cause, about, degraded, findings
from agentloop.api.flight import Blocked, Doing, Flight, FlightPage, FlightRow, doing_of
from agentloop.api.owners import UserUsage
from agentloop.engine.interface import MemoryTag
from agentloop.types import Load

IDLE, BUSY = Load(), Load(num_running=8)


def replica(state: str = "ready", load: Load = BUSY, **facts: Any) -> ReplicaStatus:
    return ReplicaStatus("r1", state, "simulated", 3, load, 4, facts.pop("age_s", 0.1), **facts)


def rollout(num_running: int = 8, num_queued: int = 0, num_held: int = 0, **facts: Any) -> RolloutStatus:
    return RolloutStatus(facts.pop("name", "r"), 100, 10, num_running, num_queued, num_held, **facts)


def row(doing: Doing, for_s: float, name: str = "r/g/0", **facts: Any) -> FlightRow:
    return FlightRow(name, Flight(doing, for_s, max(for_s, 40.0), **facts), "w1", "r1")


def flying(*rows: FlightRow, num_free: int = 4, **facts: Any) -> FlightPage:
    rows = rows or tuple(row(Doing.DECODE, 1.0, f"r/g/{n}", turn=2) for n in range(8))
    slow = tuple(one for one in rows if one.flight.doing in (Doing.TOOL, Doing.REWARD, Doing.LOOP))
    told = {"sessions": (), "longest_tools": slow} | facts
    return FlightPage(rows, doing=doing_of(one.flight for one in rows), num_free=num_free, **told)


WELL = ServiceStatus(True, False, 3, (replica(),), 1, (rollout(),), (), queue=QueueStatus(0, 0, 100, 1000))
FLYING = flying()
EMPTY = FlightPage((), (), (), 4)
STUCK = replace(WELL, replicas=(replica(load=IDLE),))
NO_ROOM = QueueStatus(9, 0, 990, 1000, "no KV capacity: 990 of 1000 tokens are expected to be used")
ASLEEP = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
NOT_READY = replace(WELL, is_ready=False)
LOADING = StartingReplica("r2", 40.0, "waits for memory")
STAGING = UpdateProgress(4, "staging", 1, (), ("r1",), 30.0)
FAILING = UpdateProgress(4, "switching", 0, ("r1: lost",), (), 30.0)
SEARCH = row(Doing.TOOL, 95.0, what="search", left_s=20.0)

CASES = [
    (replace(WELL, is_paused=True, paused_s=12.0, pause_reason="eval"), FLYING, Cause.PAUSED, "12 s: eval"),
    (replace(WELL, asleep=ASLEEP, asleep_s=5.0), FLYING, Cause.ASLEEP, "weights, kv_cache"),
    (replace(WELL, is_disk_full=True), FLYING, Cause.DISK_FULL, "disk is full"),
    (replace(WELL, store_away="no answer within 60 s"), FLYING, Cause.STORE_AWAY, "no answer within 60 s"),
    (replace(WELL, is_stopping=True), FLYING, Cause.STOPPING, "is stopping"),
    (replace(NOT_READY, replicas=(), starting=(LOADING,)), EMPTY, Cause.LOADING, "none has joined yet"),
    (
        replace(WELL, starting=(LOADING,)),
        FLYING,
        Cause.LOADING,
        "r2 has been waiting to start for 40 s: waits for memory",
    ),
    (replace(WELL, drained=("h1",)), FLYING, Cause.DRAINED, "h1 is drained"),
    (replace(NOT_READY, replicas=()), EMPTY, Cause.NO_REPLICA, "no replica takes traffic"),
    (
        replace(NOT_READY, replicas=(), lost=(LostReplica("r1", "it sent no report", 9.0),)),
        EMPTY,
        Cause.NO_REPLICA,
        "it sent no report",
    ),
    (replace(NOT_READY, weight_version=None), EMPTY, Cause.NO_REPLICA, "no replica takes traffic"),
    (replace(WELL, update=STAGING), FLYING, Cause.UPDATE, "version 4 has been staging for 30 s, waiting for r1"),
    (replace(WELL, update=FAILING), FLYING, Cause.UPDATE, "failed: r1: lost"),
    (WELL, flying(silent=(("w1", 9.0),)), Cause.SILENT_WORKER, "w1 sent no report for 9 s"),
    (
        WELL,
        flying(silent=(("w1", 9.0),), blocked=(Blocked("worker-w1", "my_tool.py:7 in run", 70.0),)),
        Cause.SILENT_WORKER,
        "its event loop is blocked, last at my_tool.py:7 in run",
    ),
    (
        WELL,
        flying(blocked=(Blocked("w0", "old.py:1", 70.0), Blocked("worker-w1", "my_tool.py:7 in run", 7.0))),
        Cause.BLOCKED,
        "loop of worker-w1 was blocked 7 s ago, at my_tool.py:7",
    ),
    (
        WELL,
        flying(blocked=(Blocked("ingress-0", "", 7.0),)),
        Cause.BLOCKED,
        "loop of ingress-0 was blocked 7 s ago: its host was short of CPU",
    ),
    (
        replace(WELL, rollouts=(), unread=(("r", 400.0), ("new", 20.0))),
        EMPTY,
        Cause.UNREAD,
        "the records of r are not read: the oldest has waited for 400 s",
    ),
    (replace(WELL, num_workers=0, rollouts=(rollout(0, 5),)), EMPTY, Cause.NO_WORKER, "5 samples wait"),
    (
        replace(STUCK, rollouts=(rollout(2, 5),)),
        flying(row(Doing.TOOL, 2.0, what="search"), num_free=0),
        Cause.WORKERS_FULL,
        "5 samples wait: all slots of 1 worker(s)",
    ),
    (replace(STUCK, rollouts=(rollout(0, 6, 6),)), EMPTY, Cause.STALE, "6 samples are held"),
    (
        replace(STUCK, queue=NO_ROOM, rollouts=(rollout(2, 9),)),
        flying(row(Doing.TOOL, 20.0, what="search")),
        Cause.NO_ROOM,
        "990 of 1000",
    ),
    (
        replace(
            WELL,
            queue=replace(NO_ROOM, num_waiting=3, longest_wait_s=75.0, median_wait_s=40.0),
            users=(UserUsage("alice", waiting_calls=2), UserUsage("bob"), UserUsage("eve", waiting_calls=1)),
        ),
        FLYING,
        Cause.NO_ROOM,
        "3 session(s) and calls wait for KV cache (alice 2, eve 1): the longest for 75 s, the median for 40 s",
    ),
    (
        replace(WELL, replicas=(replica(), replica("suspect", age_s=8.0))),
        FLYING,
        Cause.REPLICA,
        "is suspect: no heartbeat for 8 s",
    ),
    (replace(WELL, replicas=(replica(is_noise=True),)), FLYING, Cause.REPLICA, "has broken weights"),
    (
        replace(WELL, replicas=(replica(is_thrashing=True, kv_hit_rate=0.2),)),
        FLYING,
        Cause.REPLICA,
        "find only 20% of their earlier KV cache",
    ),
    (WELL, flying(SEARCH), Cause.TOOL, "tool search for 95 s, deadline in 20 s"),
    (WELL, flying(row(Doing.REWARD, 40.0)), Cause.REWARD, "r/g/0 has waited for its reward for 40 s"),
    (WELL, flying(row(Doing.LOOP, 70.0)), Cause.LOOP, "loop for 70 s"),
    (WELL, flying(row(Doing.PLACE, 45.0), row(Doing.PLACE, 44.0, "r/g/1")), Cause.NO_PLACE, "(and 1 more)"),
    (WELL, flying(row(Doing.PREFILL, 150.0)), Cause.TURN, "prefill for 150 s"),
    (
        replace(WELL, rollouts=(rollout(priority=2), rollout(0, 5, name="low", priority=1))),
        FLYING,
        Cause.PRIORITY,
        "low: samples of priority 2 start before those of priority 1",
    ),
    (
        replace(WELL, rollouts=()),
        replace(EMPTY, sessions=(row(Doing.LOOP, 200.0, "s-1"),)),
        Cause.SESSION,
        "1 session(s) hold a KV reservation without making a call; the longest: s-1",
    ),
    (replace(WELL, rollouts=()), EMPTY, Cause.NOTHING, "all submitted work is finished"),
    (WELL, FLYING, Cause.LONG, "no problem found: 8 decode; the oldest, r/g/0, is at turn 2"),
]


@pytest.mark.parametrize(("status", "flights", "cause", "words"), CASES)
def test_a_cause_is_named_first(status: ServiceStatus, flights: FlightPage, cause: Cause, words: str) -> None:
    first = findings(status, flights)[0]
    assert first.cause is cause
    assert words in first.text
    assert first.action


def test_a_busy_service_with_a_queue_has_no_finding() -> None:
    staging = UpdateProgress(4, "staging", 1, age_s=2.0)
    busy = replace(WELL, queue=NO_ROOM, rollouts=(rollout(512, 900),), update=staging)
    for flights in (FLYING, flying(row(Doing.DECODE, 300.0), row(Doing.TOOL, 3.0, what="search"), num_free=0)):
        assert [one.cause for one in findings(busy, flights)] == [Cause.LONG]


def test_the_widest_cause_comes_first_and_the_others_follow() -> None:
    paused = replace(WELL, is_paused=True, paused_s=60.0)
    assert [one.cause for one in findings(paused, flying(SEARCH))] == [Cause.PAUSED, Cause.TOOL]


def test_what_is_degraded_is_what_is_found_of_the_service_and_its_replicas() -> None:
    down = replace(NOT_READY, is_stopping=True, replicas=(replica("quarantined", error="noise"),), drained=("h1",))
    sentences = (
        "the service is stopping: no work is accepted or started",
        "no replica takes traffic",
        "replica r1 is quarantined: noise",
        "h1 is drained: it receives no work",
    )
    assert degraded(down) == sentences
    assert tuple(one.text for one in findings(down, flying(SEARCH)))[:4] == sentences
    assert degraded(WELL) == ()


def test_of_one_trajectory_it_says_what_it_waits_for() -> None:
    flights = flying(row(Doing.TOOL, 9.0, what="search", turn=3, num_tokens=70, left_s=30.0))
    told = about("r/g/0", flights)
    assert told is not None
    assert told.text == "r/g/0: tool search for 9 s on r1, turn 3, 70 tokens; its deadline is in 30 s"
    assert about("r/g/9", flights) is None
