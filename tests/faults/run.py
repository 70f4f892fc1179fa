"""Run many seeded schedules of faults in parallel, or repeat one of them.

    python -m tests.faults.run                    # a thousand, of all ranges
    python -m tests.faults.run --count 10000
    python -m tests.faults.run --seed 4711        # one schedule, with a traceback
    python -m tests.faults.run --first 3000000 --count 200    # consecutive seeds of one range

Ranges of seeds, and their share of the schedules without --first:
        0...  weights are updated                    7 of 10
  1000000...  adapters are served by name            1 of 10
  2000000...  clients are trainers that take batches 1 of 10
  3000000...  two models share a GPU in turns        1 of 10
The seeds of earlier findings run in addition.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

import structlog

from tests.faults.schedules import (
    FIRST_OF_ADAPTERS,
    FIRST_OF_BATCHES,
    FIRST_OF_TURNS,
    FOUND_SEEDS,
    run_schedule,
)

BATCH = 25
MAX_SCHEDULE_S = 300.0  # a schedule takes a second or two; one that waits in real time would never end
_MIXTURE = (0, 0, 0, 0, 0, 0, 0, FIRST_OF_ADAPTERS, FIRST_OF_BATCHES, FIRST_OF_TURNS)


class ScheduleTooLong(KeyboardInterrupt):
    """A schedule exceeded its time limit. Event loops propagate only this kind of exception from a task."""


def mixed_seeds(count: int) -> list[int]:
    """Return the first seeds of all ranges, in the proportions of the mixture."""
    numbers = Counter[int]()
    seeds = []
    for at in range(count):
        first = _MIXTURE[at % len(_MIXTURE)]
        seeds.append(first + numbers[first])
        numbers[first] += 1
    return seeds


def run_batch(seeds: list[int]) -> tuple[Counter[str], dict[int, str]]:
    """Run some schedules; returns their events, and the problems by seed."""
    _be_quiet()
    counts: Counter[str] = Counter()
    wrong = {}
    for seed in seeds:
        try:
            with _limited(MAX_SCHEDULE_S):
                counts += run_schedule(seed)
        except (Exception, ScheduleTooLong) as error:
            wrong[seed] = "; ".join(map(str, _leaves(error)))[:2000]
    return counts, wrong


def main() -> None:
    """Run the schedules, print every seed with a problem, and exit with 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, help="consecutive seeds from this one, not a mixture of the ranges")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop", action="store_true", help="at the first batch that finds something")
    options = parser.parse_args()
    if options.seed is not None:
        _be_quiet()
        print(run_schedule(options.seed))
        return
    first, count = options.first, options.count
    seeds = [*FOUND_SEEDS, *(mixed_seeds(count) if first is None else range(first, first + count))]
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


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise ScheduleTooLong in the block after `seconds`, and again if its cleanup does not end either."""
    interrupts = []

    def stop(*_: object) -> None:
        interrupts.append(ScheduleTooLong(f"no end within {seconds:g} s"))
        raise interrupts[-1]

    before = signal.signal(signal.SIGALRM, stop)
    # The cleanup gets a second: an interrupt within it would leave the event loop's sockets open.
    signal.setitimer(signal.ITIMER_REAL, seconds, max(1.0, seconds / 10))
    try:
        yield
    except BaseException as error:
        if interrupts:  # the cleanup of the interrupted event loop may raise another error
            raise interrupts[0] from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _be_quiet() -> None:
    """Disable logging: when a schedule fills the disk, a log file on it could not be written either."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    main()
