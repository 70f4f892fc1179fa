"""The balancer against other policies on a simulated fleet: a table a regime, verdicts on its goals, pictures.

    make bench-balancer                                         # everything: 15 regimes, 5 seeds
    make bench-balancer ARGS="--regimes 3x,flush-30 --arms ours,sticky --seeds 2"
    make bench-balancer ARGS="--grid"                           # variants of the arms too, the best of each shown
    make bench-balancer ARGS="--big --regimes base --seeds 1"   # 64 replicas, 10,000 trajectories

Times are virtual; only the CPU column depends on the machine. `results.json` has every run's figures, with the
parameters and seeds that made its workload.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.balancer.arms.catalog import default_arms, grid_arms
from tests.benchmarks.balancer.arms.ours import ours
from tests.benchmarks.balancer.compare import (
    Entry,
    best_variants,
    compare,
    oracle_gap,
    regime_table,
    verdicts,
)
from tests.benchmarks.balancer.plots import draw
from tests.benchmarks.balancer.policy import Arm
from tests.benchmarks.balancer.regimes import BIG, REGIMES, Regime, Scale, at_scale, fleet
from tests.benchmarks.balancer.summary import Summary

TITLE = "Balancer: policies on a simulated fleet"


def arms(names: Sequence[str], has_grid: bool) -> list[Arm]:
    """Return the arms whose names contain one of `names`; all without names."""
    found = [ours(), *default_arms(), *(grid_arms() if has_grid else ())]
    return [arm for arm in found if not names or any(name in arm.name for name in names)]


def main() -> None:
    options = _options()
    regimes = [one for one in REGIMES if not options.regimes or one.key in options.regimes]
    scale = BIG if options.big else Scale()
    scale = replace(scale, step_times=options.step_times)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    source = partial(arms, options.arms, options.grid)
    num_runs = len(regimes) * len(seeds) * len(source())
    print(f"{num_runs} runs in {options.processes} processes")
    started = time.monotonic()
    count = 0

    def on_run(regime: Regime, arm: Arm, seed: int, summary: Summary) -> None:
        nonlocal count
        count += 1
        if options.verbose or not count % 20:
            print(
                f"{count}/{num_runs} {regime.name}, seed {seed}, {arm.name}: {summary.makespan_s:.0f} s", flush=True
            )

    results = compare(regimes, scale, source, seeds, options.processes, on_run)
    shown = {name: best_variants(entries) if options.grid else entries for name, entries in results.items()}
    tables = {
        regime.name: "\n\n".join(
            filter(
                None,
                (
                    regime_table(shown[regime.name]),
                    "\n".join(verdicts(regime, results[regime.name])),
                    oracle_gap(shown[regime.name]),
                ),
            )
        )
        for regime in regimes
    }
    tables = {"": _settings(scale, options, time.monotonic() - started), **tables}
    report.finish(TITLE, tables, _records(regimes, scale, results), options.out / "results.json")
    (options.out / "tables.md").write_text(report.section(TITLE, tables))
    for path in draw(shown, options.out):
        print(path)
    if options.results is not None:
        report.replace_section(options.results, TITLE, tables)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = partial(str.split, sep=",")
    keys = ", ".join(one.key for one in REGIMES)
    parser.add_argument("--regimes", type=names, default=[], help=f"by commas; all without: {keys}")
    parser.add_argument("--arms", type=names, default=[], help="parts of names, by commas; all without")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--grid", action="store_true", help="run every arm's declared variants too")
    parser.add_argument("--big", action="store_true", help="64 replicas and 10,000 trajectories")
    parser.add_argument(
        "--step-times", default=Scale().step_times, help="a file of step_times/, without its ending"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-balancer"), help="for tables, JSON and PNG")
    parser.add_argument("--results", type=Path, help="a page whose section to replace")
    parser.add_argument("--verbose", action="store_true", help="a line a run")
    return parser.parse_args()


def _settings(scale: Scale, options: argparse.Namespace, wall_s: float) -> str:
    return (
        f"{scale.num_replicas} replicas of {scale.step_times}, blocks of {scale.block_size} tokens, "
        f"{scale.num_trajectories:,} trajectories, places for {scale.num_live:,}; mean of {options.seeds} seeds "
        f"from {options.first_seed} on ± their standard deviation. Reuse is the share of prompt tokens that the "
        f"engine had cached, beside the bound of one cache for the fleet that never evicts. {wall_s / 60:.1f} "
        f"minutes in {options.processes} processes."
    )


def _records(
    regimes: Sequence[Regime], scale: Scale, results: Mapping[str, Sequence[Entry]]
) -> list[dict[str, object]]:
    return [
        {
            "regime": asdict(at_scale(regime, scale)),
            "fleet": asdict(fleet(regime, scale)),
            "arms": [asdict(entry) for entry in results[regime.name]],
        }
        for regime in regimes
    ]


if __name__ == "__main__":
    main()
