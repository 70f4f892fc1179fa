"""Many seeded schedules of faults, side by side; or one of them again.

python -m tests.faults.run                    # a thousand: 0, 1, 2, ...
python -m tests.faults.run --count 10000
python -m tests.faults.run --seed 4711        # this one alone, with a traceback
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

import structlog

from tests.faults.schedules import FOUND_SEEDS, run_schedule

BATCH = 25


def run_batch(seeds: list[int]) -> tuple[Counter[str], dict[int, str]]:
    """Run some schedules; returns what happened in them, and what is wrong by seed."""
    _be_quiet()
    counts: Counter[str] = Counter()
    wrong = {}
    for seed in seeds:
        try:
            counts += run_schedule(seed)
        except Exception as error:
            wrong[seed] = "; ".join(map(str, _leaves(error)))[:2000]
    return counts, wrong


def main() -> None:
    """Run them, print every seed that found something, and exit with 1 if one did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop", action="store_true", help="at the first batch that finds something")
    options = parser.parse_args()
    if options.seed is not None:
        _be_quiet()
        print(run_schedule(options.seed))
        return
    seeds = [*FOUND_SEEDS, *range(options.first, options.first + options.count)]
    started, totals, num_wrong = time.monotonic(), Counter[str](), 0
    with ProcessPoolExecutor(options.processes) as pool:
        batches = [pool.submit(run_batch, seeds[at : at + BATCH]) for at in range(0, len(seeds), BATCH)]
        for batch in as_completed(batches):
            counts, wrong = batch.result()
            totals += counts
            num_wrong += len(wrong)
            for seed, problem in wrong.items():
                print(f"seed {seed}: {problem}", flush=True)
            if wrong and options.stop:
                pool.shutdown(cancel_futures=True)
                sys.exit(1)
    print(", ".join(f"{name} {count}" for name, count in sorted(totals.items())))
    print(f"{len(seeds)} schedules, {num_wrong} with problems, {time.monotonic() - started:.0f} s")
    sys.exit(1 if num_wrong else 0)


def _be_quiet() -> None:
    """Log nothing: what a schedule fills is the disk of the log too, where that goes to a file."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    main()
