"""The whole service under seeded schedules of faults, in virtual time.

`tests/support/fleet/` defines the events, `checker.py` the invariants. A failure names its seed: `python -m
tests.faults.run --seed N` repeats it exactly.
"""

from __future__ import annotations

import asyncio

import pytest

from agentloop.concurrency.clock import VirtualClock
from tests.faults import run
from tests.faults.run import mixed_seeds, run_batch
from tests.faults.schedules import FIRST_OF_ADAPTERS, FIRST_OF_BATCHES, FIRST_OF_TURNS, FOUND_SEEDS
from tests.support.fleet.faulty_link import Fault

pytestmark = pytest.mark.slow

NUM_SEEDS = 12  # the first of the thousand that `make test-faults` runs
ENOUGH_SEEDS = 50  # for everything to happen
HAPPENINGS = (
    *("_kill", "_crash", "_kill_worker", "_kill_ingress", "_hang", "_stand_still", "_stall_worker", "_jump"),
    *("_stall_coordinator", "_fill_disk", "_slow_disk", "_malform", "operator paused", "slept 1", "woke"),
    *("update", "replica failed", "unreadable", "transfers", "one phase", "broken transfers", "relayed"),
    *("begun again", "resampled turns", "swapped in flight", "client left", "ended: completed"),
    *("ended: loop_failed", "ended: cancelled", "order refused"),
    *("cancelled", "refused other work", "acknowledged beyond"),
    *("killed two", "WeightsRefused", "folder rewritten", "rewritten folder refused"),
    *("held", "hold released"),
    *("alike: answer lost", "alike: retried", "damaged a journal", "resumed turns"),
    *("linked by a quote", "linked by a header", "path compacts", "path delegates"),
)


def test_schedules() -> None:
    _, wrong = run_batch(list(range(NUM_SEEDS)))
    assert not wrong


def test_schedules_with_adapters() -> None:
    totals, wrong = run_batch([FIRST_OF_ADAPTERS + number for number in range(NUM_SEEDS)])
    assert not wrong
    for what in (
        "adapter pushed",
        "evicted",
        "unloaded",
        "replica failed",
        "_kill",
        "_crash",
        "client: model_not_found",
        "rewritten folder refused",
    ):
        assert totals[what] > 0, f"{what} never happened in {totals}"


def test_schedules_with_batches() -> None:
    seeds = [*range(NUM_SEEDS), 34, 2071]  # the last two seeds have found faults
    totals, wrong = run_batch([FIRST_OF_BATCHES + seed for seed in seeds])
    assert not wrong
    for what in (
        "carried groups",
        "groups that ended with their batch",
        "ended: stale",
        "update",
        "_kill",
        "_crash",
    ):
        assert totals[what] > 0, f"{what} never happened in {totals}"


def test_schedules_with_turns_of_models() -> None:
    totals, wrong = run_batch([FIRST_OF_TURNS + number for number in range(NUM_SEEDS)])
    assert not wrong
    for what in ("turn of the judge", "the judge answered", "update", "_kill", "_crash"):
        assert totals[what] > 0, f"{what} never happened in {totals}"


@pytest.mark.long
def test_in_schedules_everything_happens() -> None:
    totals, wrong = run_batch(list(range(ENOUGH_SEEDS)))
    assert not wrong
    # A harness that injects no faults proves nothing.
    for what in (*Fault, *HAPPENINGS):
        assert totals[what] > 0, f"{what} never happened in {totals}"


def test_the_schedules_that_found_something() -> None:
    _, wrong = run_batch(list(FOUND_SEEDS))
    assert not wrong


def test_a_plain_count_has_schedules_of_all_ranges() -> None:
    seeds = mixed_seeds(200)
    for first, num_seeds in ((0, 140), (FIRST_OF_ADAPTERS, 20), (FIRST_OF_BATCHES, 20), (FIRST_OF_TURNS, 20)):
        assert {*range(first, first + num_seeds)} <= {*seeds}
    assert len({*seeds}) == 200
    assert mixed_seeds(10) == seeds[:10]


def test_a_schedule_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_schedule", lambda seed: VirtualClock().run(spin()))
    monkeypatch.setattr(run, "MAX_SCHEDULE_S", 0.05)
    _, wrong = run_batch([FIRST_OF_TURNS, 1])
    assert wrong == dict.fromkeys((FIRST_OF_TURNS, 1), "no end within 0.05 s")


async def spin() -> None:
    while True:
        await asyncio.sleep(0)


def test_a_schedule_can_be_run_again() -> None:
    first = run_batch([17])
    assert not first[1]
    assert run_batch([17]) == first
