"""Step times of a trainer that offers each step more groups than it consumes, on the balancer's simulated fleet.

    make bench-tail                                        # 6 regimes, 20 seeds
    make bench-tail ARGS="--service servers/cpu.yaml"      # on a real service and the shipped tasks, 3 rounds
    make bench-tail ARGS="--regimes base --arms 1x,1.25x --seeds 2 --train-s 60"

A step consumes the first 64 groups that are complete. Unfinished groups count towards the next step, as in
`RolloutClient.batches` with `carry` "next", unless the arm differs. New groups arrive when the trainer requests the
next step. Times are virtual. Ratios compare runs of one seed, which have the same groups in the same order.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from agentloop.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop_servers.config.service import ServiceConfig, new_run_dir
from agentloop_servers.local import running_service
from tests.benchmarks import report
from tests.benchmarks.balancer.arms.oracle import seconds_of
from tests.benchmarks.balancer.arms.ours import OursPolicy, ours
from tests.benchmarks.balancer.compare import ratio
from tests.benchmarks.balancer.engine import INFINITY
from tests.benchmarks.balancer.policy import FleetShape
from tests.benchmarks.balancer.regimes import REGIMES, fleet
from tests.benchmarks.balancer.simulate import Disturbance, Live, Run
from tests.benchmarks.balancer.workload import Workload, generate

TITLE = "Steps of 64 groups that are offered more"
NUM_GROUPS, NUM_STEPS = 64, 10
SHORT_STEPS = 4  # before a step that consumes only leftover groups, which are as many
REGIMES_OF_TAILS = ("base", "short-tools", "heavy-tools", "heavy-lengths", "reasoning-3", "3x")
NUM_SAMPLES, NUM_LIVE_STEPS = 8, 4
TASKS = "examples/data/tasks.jsonl"
LIVE_TITLE = "Steps of 64 groups that are offered more, on a real service"
LIVE_EXPLAINED = f"{NUM_LIVE_STEPS} steps an arm and round of the shipped tasks; ratios are of one round's runs."
COLUMNS = ("arm", "s a step", "against 1x", "carried", "oldest", "turns, first step", "turns, all steps")

EXPLAINED = (
    f"Means over the seeds of {NUM_STEPS} steps. 1.25x: unfinished groups as a step begins, by those it takes. "
    "8 of 10: a group of ten is whole with its first eight, and the other two end with their turn. Known lengths: "
    "among groups that have not begun, those of the longest mean go first, as a perfect memory of tasks would have "
    f"it. Long rounds: what {SHORT_STEPS} steps have left is parked, its KV given up, and makes a step of its own. "
    "Ratios are of one seed's runs, with their 95 % interval. Carried: the share of groups that earlier steps have "
    "left; oldest: the steps that one was left over. Turns: of the groups that counted, to those of all."
)


@dataclass(frozen=True, slots=True)
class Arm:
    """The groups that a step is offered, and their order."""

    offer: float
    num_redundant: int = 0  # samples of a group in addition to the eight that count
    knows_lengths: bool = False
    has_long_rounds: bool = False


ARMS = {
    "1x": Arm(1.0),
    "1.25x": Arm(1.25),
    "1.5x": Arm(1.5),
    "2x": Arm(2.0),
    "8 of 10": Arm(1.0, num_redundant=2),
    "1.25x, 8 of 10": Arm(1.25, num_redundant=2),
    "1x, known lengths": Arm(1.0, knows_lengths=True),
    "1.25x, known lengths": Arm(1.25, knows_lengths=True),
    "1.25x, long rounds": Arm(1.25, has_long_rounds=True),
}

Job = tuple[str, int, str, float]  # regime, seed, arm, seconds of training


class Steps(Run):
    """A run whose groups arrive step by step."""

    def __init__(self, workload: Workload, regime: str, seed: int, arm: Arm, train_s: float) -> None:
        shape, self._num_come = fleet(REGIMES[regime]), math.ceil(NUM_GROUPS * arm.offer)
        self._num_spare = self._num_come - NUM_GROUPS
        self._turns = Counter[int]()  # by group
        for one in workload.trajectories:
            self._turns[one.group] += one.num_turns
        trajectories = (
            replace(one, arrives_at=0.0 if one.group < self._num_come else INFINITY)
            for one in workload.trajectories
        )
        workload = Workload(tuple(trajectories))
        policy = (_longest_first if arm.knows_lengths else ours)(shape, workload, seed)
        super().__init__(policy, shape, workload, Disturbance())
        self._num_siblings = {group: num - arm.num_redundant for group, num in self._num_siblings.items()}
        self._arm, self._train_s = arm, train_s
        self._made_for = dict.fromkeys(range(self._num_come), 0)
        self._open = set(self._made_for)
        self._stopped = set[int]()  # groups in which no turn starts: they are complete, or parked
        self._parked: list[Live] = []
        self._ended: list[tuple[int, int]] = []  # groups and their ages, in steps
        self._step_ended_at: list[float] = []

    def steps(self) -> dict[str, float]:
        self.run()
        first = [self._turns[group] for group, _ in self._ended[:NUM_GROUPS]]
        return {
            "step_s": (self._step_ended_at[-1] - self._train_s * (NUM_STEPS - 1)) / NUM_STEPS,
            "carried": fmean(age > 0 for _, age in self._ended),
            "oldest": max(age for _, age in self._ended),
            "first_turns": fmean(first) / fmean(self._turns.values()),
            "all_turns": fmean(self._turns[group] for group, _ in self._ended) / fmean(self._turns.values()),
        }

    def group_ended(self, group: int, now: float) -> None:
        """Count a group for the step under way, and begin the next step after the last one."""
        self._open.remove(group)
        self._stop({group})
        self._ended.append((group, len(self._step_ended_at) - self._made_for[group]))
        if len(self._ended) % NUM_GROUPS:
            return
        self._step_ended_at.append(now)
        self.is_over = len(self._step_ended_at) == NUM_STEPS
        if not self.is_over:
            self._begin_step(now + self._train_s)

    def _begin_step(self, when: float) -> None:
        number, num_new = len(self._step_ended_at), NUM_GROUPS
        if self._arm.has_long_rounds and number % (SHORT_STEPS + 1) == SHORT_STEPS:
            num_new = 0
            self._stopped -= self._open
            for live in self._parked:
                self._go_on(live, when)
            self._parked = []
        elif self._arm.has_long_rounds:
            num_new += self._num_spare
            self._stop(self._open)
        for new in range(self._num_come, self._num_come + num_new):
            self._made_for[new] = number
            self._open.add(new)
            self.arrive(new, when)
        self._num_come += num_new

    def _stop(self, groups: set[int]) -> None:
        self._stopped |= groups
        waiting = [entry for entry in self._first_turns if entry[2].trajectory.group in groups]
        self._parked += [live for _, _, live in waiting]
        self._first_turns = [entry for entry in self._first_turns if entry[2].trajectory.group not in groups]
        heapq.heapify(self._first_turns)

    def _on_ready(self, now: float, number: int) -> None:
        live = self._live[number]
        if live.trajectory.group not in self._stopped:
            super()._on_ready(now, number)
            return
        self._num_timers -= 1
        self._num_begun -= 1
        self._policy.finished(number, now)
        self._parked.append(live)

    def _go_on(self, live: Live, when: float) -> None:
        if not live.path:
            self._come(live, when)
            return
        self._num_timers += 1
        self._num_begun += 1
        self._at(when, self._on_ready, live.trajectory.number)


def _longest_first(shape: FleetShape, workload: Workload, seed: int) -> OursPolicy:
    """Our policy, except for the order of first turns."""
    policy, seconds = ours(shape, workload, seed), defaultdict[int, list[float]](list)
    for one in workload.trajectories:
        seconds[one.group].append(seconds_of(one, shape))
    policy.rank = lambda turn, now: 0.0 if turn.turn else -fmean(seconds[turn.group])  # type: ignore[method-assign]
    return policy


def run_job(job: Job) -> tuple[Job, dict[str, float]]:
    """Execute one run. Returns the job with its figures."""
    regime, seed, name, train_s = job
    arm, parameters = ARMS[name], REGIMES[regime].workload
    num_groups = math.ceil(NUM_GROUPS * arm.offer) + NUM_GROUPS * (NUM_STEPS - 1)
    num_samples = parameters.num_samples + arm.num_redundant
    workload = generate(replace(parameters, num_groups=num_groups, num_samples=num_samples), seed)
    return job, Steps(workload, regime, seed, arm, train_s).steps()


async def run_service(config: ServiceConfig, names: Sequence[str], num_rounds: int) -> dict[Job, dict[str, float]]:
    """Run the arms one after another on one service, round by round."""
    run_dir = new_run_dir(Path("runs"))
    configure_logging(run_dir / LOG_NAME)
    private, found = config.model_copy(update={"port": 0, "run_dir": None}), dict[Job, dict[str, float]]()
    async with running_service(private, run_dir) as url, RolloutClient(url) as client:
        await _live_steps(client, ARMS["1x"], 1)  # the first step is slower
        for number, name in itertools.product(range(num_rounds), names):
            found["service", number, name, 0.0] = await _live_steps(client, ARMS[name], NUM_LIVE_STEPS)
            report.say(f"round {number}, {name}: {found['service', number, name, 0.0]['step_s']:.1f} s a step")
    return found


async def _live_steps(client: RolloutClient, arm: Arm, num_steps: int) -> dict[str, float]:
    keep = NUM_SAMPLES if arm.num_redundant else None
    asked = {"num_groups": NUM_GROUPS, "num_samples": NUM_SAMPLES + arm.num_redundant, "keep": keep}
    turns, ages, began_at = list[float](), list[int](), time.monotonic()
    async with aclosing(
        client.batches(itertools.cycle(load_tasks(TASKS)), over_provision=arm.offer, **asked)
    ) as batches:
        while len(ages) < num_steps * NUM_GROUPS:
            batch = await anext(batches)
            turns += [
                sum(len(path.own_turns) for one in group for path in one.paths if one.is_complete)
                for group in batch.groups
            ]
            ages += batch.ages
        step_s = (time.monotonic() - began_at) / num_steps
    while any(not one.is_done for one in (await client.status()).rollouts):
        await asyncio.sleep(0.2)
    shares = {"carried": fmean(age > 0 for age in ages), "oldest": max(ages)}
    return {"step_s": step_s, **shares, "first_turns": fmean(turns[:NUM_GROUPS]) / fmean(turns), "all_turns": 1.0}


def main() -> None:
    """Execute all runs and print one table per regime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", type=partial(str.split, sep=","), default=REGIMES_OF_TAILS)
    parser.add_argument("--arms", type=partial(str.split, sep=","), default=[*ARMS], help="1x first")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--service", type=Path, help="a Serve config file, in place of the simulated fleet")
    parser.add_argument("--rounds", type=int, default=3, help="of a service")
    parser.add_argument("--train-s", type=float, default=0.0, help="from a step's end until new groups come")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget-s", type=float, default=1e6, help="then what has ended is the result")
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")
    parser.add_argument("--results", type=Path, help="replace the section of this page")
    options = parser.parse_args()
    if options.service is not None:
        names = [name for name in options.arms if not ARMS[name].has_long_rounds and not ARMS[name].knows_lengths]
        live = asyncio.run(run_service(ServiceConfig.load(options.service), names, options.rounds))
        report.finish(
            LIVE_TITLE, {"": LIVE_EXPLAINED, f"{options.service}": _table(live)}, [*live.items()], options.out
        )
        return
    every = itertools.product(range(options.seeds), options.regimes, options.arms)
    jobs = [(regime, seed, arm, options.train_s) for seed, regime, arm in every]
    found, ends_at = dict[Job, dict[str, float]](), time.monotonic() + options.budget_s
    with multiprocessing.Pool(options.processes) as pool:
        results = pool.imap_unordered(run_job, jobs)
        with suppress(multiprocessing.TimeoutError, StopIteration):
            while True:
                job, figures = results.next(max(0.0, ends_at - time.monotonic()))
                found[job] = figures
    tables = {"": EXPLAINED}
    for key in options.regimes:
        tables[REGIMES[key].name] = _table({job: one for job, one in found.items() if job[0] == key})
    report.finish(TITLE, tables, [[*job, one] for job, one in sorted(found.items())], options.out)
    if options.results is not None:
        report.replace_section(options.results, TITLE, tables)


def _table(found: dict[Job, dict[str, float]]) -> str:
    rows: list[list[object]] = []
    names = [name for name in ARMS if any(job[2] == name for job in found)]
    seconds = {arm: {job[1]: one["step_s"] for job, one in found.items() if job[2] == arm} for arm in names}
    for name in names:
        of = [one for job, one in found.items() if job[2] == name]
        mean, least, most = ratio(seconds[name], seconds[names[0]])
        against = f"{mean:.3f} ({least:.3f} to {most:.3f})" if name != names[0] else ""
        shares = [fmean(one[key] for one in of) for key in ("carried", "oldest", "first_turns", "all_turns")]
        rows.append([name, f"{fmean(seconds[name].values()):.0f}", against, *(f"{one:.2f}" for one in shares)])
    return report.table(COLUMNS, rows)


if __name__ == "__main__":
    main()
