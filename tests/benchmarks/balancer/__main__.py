"""Compare the balancer with other routing policies on a simulated fleet, with one table per regime.

    make bench-balancer  # everything: 17 regimes, 7 arms, 20 seeds
    make bench-balancer ARGS="--regimes 3x,flush-30 --arms ours,sticky --seeds 2"

Each run is one line of `--runs`. A call executes the runs that the file does not have yet, and prints tables of all
runs in it. Times are virtual: only the CPU column depends on the machine. After a change of the balancer or the
simulator, use another file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.balancer.arms.oracle import LongestFirst
from tests.benchmarks.balancer.arms.ours import ours, ours_sessions
from tests.benchmarks.balancer.arms.peers import CacheAware, LeastLoaded, RoundRobin, Sticky
from tests.benchmarks.balancer.compare import Row, figures, regime_table
from tests.benchmarks.balancer.policy import ArmMaker
from tests.benchmarks.balancer.regimes import NUM_LIVE, NUM_REPLICAS, REGIMES, fleet
from tests.benchmarks.balancer.simulate import run
from tests.benchmarks.balancer.workload import Workload, WorkloadParameters, generate

TITLE = "Balancer: policies on a simulated fleet"

ARMS: dict[str, ArmMaker] = {
    "ours": ours,
    "ours, sessions": ours_sessions,
    "round robin": lambda shape, work, seed: RoundRobin(shape, seed),
    "least loaded": lambda shape, work, seed: LeastLoaded(shape, seed),
    "sticky": lambda shape, work, seed: Sticky(shape, seed),
    "cache_aware (smg)": partial(CacheAware, misses_to_smallest=False),
    "cache_aware (vllm-router)": partial(CacheAware, misses_to_smallest=True),
    "oracle: longest first": LongestFirst,
}

Job = tuple[str, int, str]  # regime, seed, arm


def run_job(job: Job) -> Row:
    key, seed, arm = job
    regime = REGIMES[key]
    record = run(ARMS[arm], fleet(regime), _workload(regime.workload, seed), regime.disturbance, seed)
    return {"regime": key, "arm": arm, "seed": seed, **figures(record)}


def missing(rows: Iterable[Row], regimes: Sequence[str], arms: Sequence[str], seeds: Iterable[int]) -> list[Job]:
    """Return the runs that are missing from the rows, grouped by seed."""
    done = {(row["regime"], row["seed"], row["arm"]) for row in rows}
    return [job for job in itertools.product(regimes, seeds, arms) if job not in done]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a results file; an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Execute the missing runs, and print tables of all runs."""
    options = _options()
    rows = read_rows(options.runs)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = missing(rows, options.regimes, options.arms, seeds)
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    with options.runs.open("a") as file, multiprocessing.Pool(options.processes) as pool:
        for number, row in enumerate(pool.imap(run_job, jobs), 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
            name = f"{row['regime']}, seed {row['seed']}, {row['arm']}"
            print(f"{number}/{len(jobs)} {name}: {float(row['makespan_s']):.0f} s", flush=True)
    tables = {"": _SETTINGS}
    for key in options.regimes:
        own = [row for row in rows if row["regime"] == key]
        tables[REGIMES[key].name] = regime_table(own, REGIMES[key].is_steady, options.against)
    report.finish(TITLE, tables, rows, None)
    if options.results is not None:
        report.replace_section(options.results, TITLE, tables)


_SETTINGS = (
    f"{NUM_REPLICAS} replicas, places for {NUM_LIVE} trajectories; means over the seeds, and ratios of runs of one "
    "seed with their 95 % interval. Reuse is the share of prompt tokens that the engine had cached, beside what it "
    "had if the replica that each turn went to never evicted."
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = partial(str.split, sep=",")
    parser.add_argument("--regimes", type=names, default=list(REGIMES), help=f"by commas: {', '.join(REGIMES)}")
    parser.add_argument("--arms", type=names, default=list(ARMS), help=f"by commas: {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--against", default="ours", help="the arm whose ratios to the others are shown")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-balancer/runs.jsonl"), help="a line a run")
    parser.add_argument("--results", type=Path, help="a page whose section to replace")
    return parser.parse_args()


@lru_cache(maxsize=1)
def _workload(parameters: WorkloadParameters, seed: int) -> Workload:
    return generate(parameters, seed)


if __name__ == "__main__":
    main()
