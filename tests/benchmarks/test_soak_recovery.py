"""The recovery time that a soak run reports, on histories with a known time."""

import os

import psutil
import pytest

from agentloop.api.coordinator import ReplicaStatus, ServiceStatus
from agentloop.types import Load
from tests.benchmarks.soak_processes import KINDS, Kill
from tests.benchmarks.soak_recovery import Sight, recovered_s

OLD, NEW = psutil.Process(os.getpid()), psutil.Process(os.getppid())


def status(ready: str) -> ServiceStatus:
    replicas = tuple(ReplicaStatus(name, "ready", "e", 0, Load(), 0, 0.5) for name in ready)
    return ServiceStatus(bool(ready), False, 0, replicas, 1, (), ())


def sight(
    at_s: float, kind: str, living: set[psutil.Process], ready: str | None = "ab", delivered: int = 0
) -> Sight:
    processes = {one: frozenset(living if one == kind else {NEW}) for one in KINDS}
    return Sight(at_s, None if ready is None else status(ready), delivered, processes)


@pytest.mark.parametrize("kind", ["ingress", "coordinator"])
def test_a_process_that_was_stopped_and_goes_on_has_recovered_when_the_service_answers(kind: str) -> None:
    """The kind may also be killed later; effects of the next kill do not count."""
    kill = Kill(kind, OLD, at_s=10.0, stop_s=4.0, over_at_s=14.0)
    seen = [sight(9.5, kind, {OLD}), sight(12.0, kind, {OLD}, None), sight(14.1, kind, {OLD}, None)]
    seen += [sight(15.0, kind, {OLD}), sight(30.5, kind, set(), None), sight(42.0, kind, {NEW})]
    assert recovered_s(kill, seen) == 5.0


def test_a_stop_that_nobody_noticed_has_recovered_too() -> None:
    kill = Kill("replica", OLD, at_s=10.0, stop_s=2.0, over_at_s=12.0)
    seen = [sight(9.5, "replica", {OLD}), sight(12.3, "replica", {OLD})]
    assert recovered_s(kill, seen) == pytest.approx(2.3)


def test_a_worker_that_goes_on_has_recovered_with_its_next_record() -> None:
    kill = Kill("worker", OLD, at_s=10.0, stop_s=4.0, over_at_s=14.0)
    seen = [sight(9.5, "worker", {OLD}, delivered=3), sight(14.5, "worker", {OLD}, delivered=4)]
    assert recovered_s(kill, seen) is None
    assert recovered_s(kill, [*seen, sight(16.0, "worker", {OLD}, delivered=5)]) == 6.0


def test_a_replica_that_was_killed_counts_until_its_silence_is_noticed() -> None:
    kill = Kill("replica", OLD, at_s=10.0, stop_s=None, over_at_s=10.0)
    seen = [sight(9.5, "replica", {OLD}), sight(10.5, "replica", set()), sight(12.0, "replica", {NEW})]
    assert recovered_s(kill, seen) is None
    seen += [sight(14.0, "replica", {NEW}, "b"), sight(50.0, "replica", {NEW}, "bc")]
    assert recovered_s(kill, seen) == 40.0


def test_a_core_whose_replica_stays_for_a_while_has_not_recovered() -> None:
    kill = Kill("engine core", OLD, at_s=10.0, stop_s=float("inf"), over_at_s=70.0)
    seen = [
        sight(9.5, "engine core", {OLD}),
        sight(70.5, "engine core", {NEW}),
        sight(99.0, "engine core", {NEW}, "bc"),
    ]
    assert recovered_s(kill, seen) == 89.0


@pytest.mark.parametrize("kind", ["ingress", "coordinator", "worker"])
def test_what_other_blows_took_does_not_matter(kind: str) -> None:
    kill = Kill(kind, OLD, at_s=10.0, stop_s=None, over_at_s=10.0)
    seen = [sight(9.5, kind, {OLD}, "b"), sight(11.0, kind, set(), None), sight(20.0, kind, {NEW}, "b", 1)]
    assert recovered_s(kill, [*seen, sight(21.0, kind, {NEW}, "b", 2)]) == (11.0 if kind == "worker" else 10.0)


def test_one_that_never_came_back_has_no_time() -> None:
    kill = Kill("ingress", OLD, at_s=10.0, stop_s=None, over_at_s=10.0)
    assert recovered_s(kill, [sight(9.5, "ingress", {OLD}), sight(60.0, "ingress", set())]) is None
