"""What the loss of a replica costs: tokens sampled again per kill, with and without reports of turns under way.

    python -m tests.benchmarks.tokens_per_kill
    python -m tests.benchmarks.tokens_per_kill --results tests/benchmarks/RESULTS.md

64 trajectories of two turns, of up to 900 tokens of 20 ms each, on two simulated replicas in virtual time. One is
killed every 15 s. Every token that an engine samples is counted here; the soak knows of those in heartbeats alone.
`every 2 s`: as engines are configured, or 256 tokens. `none`: as before there were reports: a turn begins again.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from pathlib import Path

import structlog

from agentloop.request_watch import ReportPace
from tests.benchmarks import report
from tests.support.fleet.killed_replicas import Loss, run_with_kills

TITLE = "Tokens sampled again per kill (simulated)"
PACES = {"every 2 s": ReportPace(), "none": ReportPace(interval_s=1e9, num_tokens=10**9)}
COLUMNS = ("reports of turns", "kills", "incomplete", "sampled", "again, share", "again per kill, mean", "max")


def main() -> None:
    """Run both arms on the same seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the table as JSON too")
    parser.add_argument("--results", type=Path, help="replace the section of this page")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    rows = [_row(name, [_loss(pace, seed) for seed in range(options.seeds)]) for name, pace in PACES.items()]
    tables = {"": report.table(COLUMNS, rows)}
    report.finish(TITLE, tables, rows, options.out)
    if options.results is not None:
        report.replace_section(options.results, TITLE, tables)


def _loss(pace: ReportPace, seed: int) -> Loss:
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        return run_with_kills(Path(folder), pace, seed)


def _row(name: str, losses: list[Loss]) -> tuple[object, ...]:
    per_kill = [one.num_wasted / one.num_kills for one in losses]
    num_sampled, num_wasted = sum(one.num_sampled for one in losses), sum(one.num_wasted for one in losses)
    incomplete = sum(not record.is_complete for one in losses for record in one.records)
    share = f"{num_wasted / num_sampled:.1%}"
    num_kills = sum(one.num_kills for one in losses)
    return name, num_kills, incomplete, f"{num_sampled:,}", share, statistics.mean(per_kill), max(per_kill)


if __name__ == "__main__":
    main()
