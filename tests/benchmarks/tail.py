"""The time of a trainer's steps when each is offered more groups than it takes, on the balancer's simulated fleet.

    make bench-tail                                        # 6 regimes, 20 seeds
    make bench-tail ARGS="--regimes base --seeds 2 --train-s 60"

A step takes the 64 groups that are whole first; what is unfinished then counts in the next one, as
`RolloutClient.batches` does with `carry` "next". New groups come when the trainer asks for the next step. Times are
virtual; the ratios are of runs of one seed, whose groups are the same and come in the same order.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from tests.benchmarks import report
from tests.benchmarks.balancer.arms.ours import ours
from tests.benchmarks.balancer.compare import ratio
from tests.benchmarks.balancer.engine import INFINITY
from tests.benchmarks.balancer.regimes import REGIMES, fleet
from tests.benchmarks.balancer.simulate import Disturbance, Run
from tests.benchmarks.balancer.workload import Workload, generate

TITLE = "Steps of 64 groups that are offered more"
NUM_GROUPS, NUM_STEPS = 64, 5
OFFERS = (1.0, 1.25, 1.5, 2.0)
REGIMES_OF_TAILS = ("base", "short-tools", "heavy-tools", "heavy-lengths", "reasoning-3", "3x")
COLUMNS = ("offered", "s a step", "against 1x", "carried", "oldest", "turns, first step", "turns, all steps")

EXPLAINED = (
    f"Means over the seeds of {NUM_STEPS} steps. Offered: unfinished groups as a step begins, by those it takes. "
    "Ratios are of one seed's runs, with their 95 % interval. Carried: the share of groups that earlier steps have "
    "left; oldest: the steps that one was left over. Turns: of the groups that counted, to those of all."
)

Job = tuple[str, int, float, float]  # regime, seed, offer, seconds of training


class Steps(Run):
    """A run whose groups come step by step."""

    def __init__(self, workload: Workload, regime: str, seed: int, offer: float, train_s: float) -> None:
        shape, self._num_come = fleet(REGIMES[regime]), math.ceil(NUM_GROUPS * offer)
        self._turns = Counter[int]()  # by group
        for one in workload.trajectories:
            self._turns[one.group] += one.num_turns
        trajectories = (
            replace(one, arrives_at=0.0 if one.group < self._num_come else INFINITY)
            for one in workload.trajectories
        )
        workload = Workload(tuple(trajectories))
        super().__init__(ours(shape, workload, seed), shape, workload, Disturbance())
        self._train_s = train_s
        self._made_for = dict.fromkeys(range(self._num_come), 0)
        self._ended: list[tuple[int, int]] = []  # groups and their ages, in steps
        self._step_ended_at: list[float] = []

    def steps(self) -> dict[str, float]:
        """Run, and return the figures of the steps."""
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
        self._ended.append((group, len(self._step_ended_at) - self._made_for[group]))
        if len(self._ended) % NUM_GROUPS:
            return
        self._step_ended_at.append(now)
        self.is_over = len(self._step_ended_at) == NUM_STEPS
        for new in () if self.is_over else range(self._num_come, self._num_come + NUM_GROUPS):
            self._made_for[new] = len(self._step_ended_at)
            self.arrive(new, now + self._train_s)
        self._num_come += NUM_GROUPS


def run_job(job: Job) -> dict[str, float]:
    """Do one run."""
    regime, seed, offer, train_s = job
    num_groups = math.ceil(NUM_GROUPS * offer) + NUM_GROUPS * (NUM_STEPS - 1)
    workload = generate(replace(REGIMES[regime].workload, num_groups=num_groups), seed)
    return Steps(workload, regime, seed, offer, train_s).steps()


def main() -> None:
    """Do all runs and print a table a regime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", type=partial(str.split, sep=","), default=REGIMES_OF_TAILS)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--train-s", type=float, default=0.0, help="from a step's end until new groups come")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")
    parser.add_argument("--results", type=Path, help="replace the section of this page")
    options = parser.parse_args()
    jobs = list(itertools.product(options.regimes, range(options.seeds), OFFERS, [options.train_s]))
    with multiprocessing.Pool(options.processes) as pool:
        found = dict(zip(jobs, pool.imap(run_job, jobs), strict=True))
    tables = {"": EXPLAINED}
    for key in options.regimes:
        tables[REGIMES[key].name] = _table({job: one for job, one in found.items() if job[0] == key})
    report.finish(TITLE, tables, [[*job, one] for job, one in found.items()], options.out)
    if options.results is not None:
        report.replace_section(options.results, TITLE, tables)


def _table(found: dict[Job, dict[str, float]]) -> str:
    seconds = {offer: {job[1]: one["step_s"] for job, one in found.items() if job[2] == offer} for offer in OFFERS}
    rows: list[list[object]] = []
    for offer in OFFERS:
        of = [one for job, one in found.items() if job[2] == offer]
        mean, least, most = ratio(seconds[offer], seconds[1.0])
        against = f"{mean:.3f} ({least:.3f} to {most:.3f})" if offer > 1.0 else ""
        shares = [fmean(one[name] for one in of) for name in ("carried", "oldest", "first_turns", "all_turns")]
        rows.append(
            [f"{offer:g}x", f"{fmean(seconds[offer].values()):.0f}", against, *(f"{one:.2f}" for one in shares)]
        )
    return report.table(COLUMNS, rows)


if __name__ == "__main__":
    main()
