"""Benchmark of the task queue on simulated time: worker utilization by group size, and the cost of a poison task.

    python tests/benchmarks/dispatch.py

Durations are log-normal. A worker requests a task whenever one of its slots becomes free. A dead worker sent its
last heartbeat at most `HEARD_S` before its death, is detected after a time within `noticed_s`, and is replaced
after `RESTART_S`. `num_accidents` of the deaths are not caused by a task.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from agentloop.types import Message, RolloutGroup, RolloutTask, StopReason
from tests.support.fleet.placing_queue import PlacingQueue

CAPACITY = 256
MEDIAN_S, SIGMA = 60.0, 1.0
POISON_S = 20.0  # a poison task kills its worker this long after its start
HEARD_S, RESTART_S = 2.0, 30.0
NOTICED_S = 15.0, 15.0
LATE_S = 0.0, 30.0  # a silent host
ACCIDENT_EVERY_S = 100.0


@dataclass
class Outcome:
    """One simulated run."""

    wall_s: float = 0.0
    used_share: float = 0.0  # share of the slots in use while samples are queued
    num_thrown_away: int = 0  # runs of innocent samples that ended with their worker
    num_innocents_failed: int = 0
    num_poisons_failed: int = 0
    num_deaths: int = 0
    kills: Counter[str] = field(default_factory=Counter)  # by poison task


@dataclass
class _Simulation:
    queue: PlacingQueue
    num_workers: int
    poisons: frozenset[str]
    num_accidents: int
    noticed_s: tuple[float, float]
    rng: random.Random
    now: float = 0.0
    events: list[tuple[float, int, str, str, str]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    # by worker: the sample and the number of its start
    running: dict[str, dict[str, int]] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    def run(self) -> Outcome:
        used = offered = 0.0
        for index in range(self.num_workers):
            self._start(f"w{index}")
        for number in range(self.num_accidents):
            self._push((number + 1) * ACCIDENT_EVERY_S, "accident", "")
        while self.events:
            at, number, kind, worker, name = heapq.heappop(self.events)
            if self.queue.num_queued:
                used += (at - self.now) * sum(map(len, self.running.values()))
                offered += (at - self.now) * CAPACITY * self.num_workers
            self.now = at
            if kind == "start":
                self._start(worker)
            elif kind == "accident" and self.running:
                self._die(self.rng.choice(sorted(self.running)))
            elif kind == "lost":
                self.queue.worker_lost(worker, self.now, float(name))
                self._flush_pending()
                self._ask_all()
            elif kind == "ask":
                self._ask(worker)
            elif self.running.get(worker, {}).get(name) == number:
                self._end(worker, name, kind)
        self.outcome.wall_s, self.outcome.used_share = self.now, used / offered if offered else 0.0
        return self.outcome

    def _start(self, worker: str) -> None:
        self.running[worker] = {}
        self._ask(worker)

    def _end(self, worker: str, name: str, kind: str) -> None:
        if kind == "dies":
            self.outcome.kills[name] += 1
            self._die(worker)
            return
        del self.running[worker][name]
        self.queue.finished(name)
        self._ask_all()

    def _die(self, worker: str) -> None:
        self.outcome.num_deaths += 1
        self.outcome.num_thrown_away += len(self.running.pop(worker).keys() - self.poisons)
        alive_at = self.now - self.rng.uniform(0.0, HEARD_S)
        self._push(self.now + self.rng.uniform(*self.noticed_s), "lost", worker, str(alive_at))
        self._push(self.now + RESTART_S, "start", f"{worker}'")

    def _ask_all(self) -> None:
        for worker in list(self.running):
            self._ask(worker)

    def _ask(self, worker: str) -> None:
        running = self.running.get(worker)
        if running is None:
            return
        self.queue.report(worker, running, self.now)
        for sample in self.queue.take(worker, CAPACITY - len(running), self.now):
            name = sample.assignment_id
            is_poison = name in self.poisons
            ends_at = self.now + (POISON_S if is_poison else self.rng.lognormvariate(0, SIGMA) * MEDIAN_S)
            running[name] = self._push(ends_at, "dies" if is_poison else "ends", worker, name)
        if not running and self.queue.num_queued:
            self._push(self.now + 1.0, "ask", worker)

    def _flush_pending(self) -> None:
        for owed in self.queue.pending_records(self.now):
            assert owed.stop_reason is StopReason.LOOP_FAILED
            if owed.sample.assignment_id in self.poisons:
                self.outcome.num_poisons_failed += 1
            else:
                self.outcome.num_innocents_failed += 1
            self.queue.finished(owed.sample.assignment_id)

    def _push(self, at: float, kind: str, worker: str, name: str = "") -> int:
        number = next(self.numbers)
        heapq.heappush(self.events, (at, number, kind, worker, name))
        return number


def simulate(
    num_trajectories: int,
    num_samples: int = 1,
    num_workers: int = 1,
    num_poisons: int = 0,
    seed: int = 0,
    num_accidents: int = 0,
    noticed_s: tuple[float, float] = NOTICED_S,
) -> Outcome:
    """Run `num_trajectories` in groups of `num_samples`; `num_poisons` of them kill every worker that runs them."""
    rng, queue = random.Random(seed), PlacingQueue(max_queued=num_trajectories)
    groups = [
        RolloutGroup(f"g{index}", RolloutTask(f"t{index}", (Message("user", "x"),)), num_samples, "r")
        for index in range(num_trajectories // num_samples)
    ]
    queue.reserve("r", groups)
    queue.add("r", 0.0)
    bad = frozenset(f"r/{groups[index].group_id}/0" for index in rng.sample(range(len(groups)), num_poisons))
    return _Simulation(queue, num_workers, bad, num_accidents, noticed_s, rng).run()


def main() -> None:
    print(f"capacity {CAPACITY}, one worker, 9,600 trajectories: places in use while samples are queued")
    for num_samples in (1, 16, 64, 128, 200, 256):
        found = simulate(9600, num_samples)
        print(f"num_samples {num_samples:4d}  {found.used_share:7.1%}  wall {found.wall_s:8,.0f} s")
    print("1,024 tasks, poisons among them: seeds 0 to 4 in sum")
    for num_workers, num_poisons, num_accidents in (
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (4, 0, 2),
        (4, 1, 0),
        (4, 3, 0),
    ):
        runs = [simulate(1024, 1, num_workers, num_poisons, seed, num_accidents, LATE_S) for seed in range(5)]
        kills = sorted(number for run in runs for number in run.kills.values())
        print(
            f"{num_workers} worker(s), {num_poisons} poison(s), {num_accidents} accident(s): kills {kills},"
            " innocents failed"
            f" {sum(run.num_innocents_failed for run in runs)}, poisons failed"
            f" {sum(run.num_poisons_failed for run in runs)}, runs thrown away"
            f" {sum(run.num_thrown_away for run in runs)}, deaths {sum(run.num_deaths for run in runs)},"
            f" wall {sum(run.wall_s for run in runs):,.0f} s"
        )


if __name__ == "__main__":
    main()
