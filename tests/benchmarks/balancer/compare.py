"""All arms in all regimes over some seeds: the runs, side by side in processes, and tables and verdicts of them.

Every arm gets the same workloads and seeds. Runs are ordered by regime and seed and then by arm, so that whatever
the machine does besides falls on all arms alike; only the CPU times can show it, everything else is virtual.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, stdev

from tests.benchmarks.balancer.policy import Arm
from tests.benchmarks.balancer.regimes import Regime, Scale, at_scale, fleet
from tests.benchmarks.balancer.simulate import run
from tests.benchmarks.balancer.summary import Summary, summarize
from tests.benchmarks.balancer.workload import Workload, WorkloadParameters, generate
from tests.benchmarks.report import table

OURS = "ours"
REUSE_POINTS = 1.0  # of the bound, where the working set fits
MARGIN = 0.10  # of makespan, where a regime needs one
NO_WORSE = 0.005  # of makespan: less is no difference

COLUMNS = (
    "arm",
    "makespan s",
    "tokens/s",
    "reuse / bound %",
    "uncached Mtok",
    "idle %",
    "groups done p50 s",
    "p99 s",
    "trajectory p50 s",
    "recovery s",
    "preempted",
    "moved",
    "CPU us/turn",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One arm in one regime: a summary a seed, in order of the seeds."""

    arm: str
    parameters: Mapping[str, float | str]
    is_oracle: bool
    runs: tuple[Summary, ...]

    @property
    def title(self) -> str:
        if not self.parameters:
            return self.arm
        return f"{self.arm} ({', '.join(f'{name} {value}' for name, value in self.parameters.items())})"

    def mean(self, figure: Callable[[Summary], float]) -> float:
        return fmean(map(figure, self.runs))

    @property
    def makespan_s(self) -> float:
        return self.mean(lambda run: run.makespan_s)

    @property
    def reuse_gap(self) -> float:
        """Points of reuse below the infinite-cache bound."""
        return 100 * self.mean(lambda run: run.reuse_bound - run.reuse)

    @property
    def recoveries(self) -> list[float | None]:
        return [recovery for run in self.runs for recovery in run.recovery_s]


ArmSource = Callable[[], Sequence[Arm]]
"""Makes the arms, in each process anew: policies are made by closures, which no process sends to another."""

_Job = tuple[Regime, Scale, int, int]  # seed, arm


def compare(
    regimes: Sequence[Regime],
    scale: Scale,
    source: ArmSource,
    seeds: Sequence[int],
    num_processes: int,
    on_run: Callable[[Regime, Arm, int, Summary], None],
) -> dict[str, list[Entry]]:
    """Run everything. Returns by regime an entry for each arm, in the order of the arms."""
    arms = source()
    jobs = [(regime, scale, seed, arm) for regime in regimes for seed in seeds for arm in range(len(arms))]
    runs: dict[tuple[str, int], list[Summary]] = {}
    with multiprocessing.Pool(num_processes, _begin, (source,)) as pool:
        for (regime, _, seed, arm), summary in zip(jobs, pool.imap(_run, jobs), strict=True):
            runs.setdefault((regime.name, arm), []).append(summary)
            on_run(regime, arms[arm], seed, summary)
    return {
        regime.name: [
            Entry(arm.name, arm.parameters, arm.is_oracle, tuple(runs[regime.name, number]))
            for number, arm in enumerate(arms)
        ]
        for regime in regimes
    }


def best_variants(entries: Sequence[Entry]) -> list[Entry]:
    """Keep each competitor's default, its first entry, and its best other variant if that is faster."""
    kept: list[Entry] = []
    for name in dict.fromkeys(entry.arm for entry in entries):
        variants = [entry for entry in entries if entry.arm == name]
        best = min(variants, key=lambda entry: entry.makespan_s)
        kept += [variants[0]] if best is variants[0] else [variants[0], best]
    return kept


def regime_table(entries: Sequence[Entry]) -> str:
    """Return a table with a row an arm: means over the seeds and, after the sign, the spread of one seed."""
    return table(COLUMNS, [_row(entry) for entry in entries])


def verdicts(regime: Regime, entries: Sequence[Entry]) -> list[str]:
    """Say of each goal of the balancer whether our arm meets it in this regime; nothing if it did not run."""
    ours = next((entry for entry in entries if entry.arm == OURS), None)
    if ours is None:
        return []
    found = []
    if regime.fits:
        met = ours.reuse_gap <= REUSE_POINTS
        found.append(_verdict(met, f"reuse within 1 point of the bound: {ours.reuse_gap:.2f} points below"))
    others = [entry for entry in entries if not entry.is_oracle and entry.arm != OURS]
    if others:
        best = min(others, key=lambda entry: entry.makespan_s)
        ratios = _ratios(ours, best)
        gain = 1.0 - fmean(ratios)
        text = f"{100 * gain:+.1f} % (of one seed ±{100 * _spread(ratios):.1f}) against {best.title}"
        found.append(_verdict(gain >= -NO_WORSE, f"makespan not worse than any arm's: {text}"))
        if regime.needs_margin:
            found.append(_verdict(gain >= MARGIN, f"makespan at least 10 % better: {text}"))
    if ours.recoveries:
        came_back = [recovery for recovery in ours.recoveries if recovery is not None]
        limit = ours.mean(lambda run: run.cycle_p50_s)
        middle = median(came_back) if came_back else None
        met = middle is not None and len(came_back) == len(ours.recoveries) and middle <= limit
        text = "never" if middle is None else f"{middle:.1f} s"
        lacking = len(ours.recoveries) - len(came_back)
        text += f", {lacking} of {len(ours.recoveries)} times not at all" if lacking else ""
        found.append(_verdict(met, f"recovery within a median turn ({limit:.1f} s with its tool): {text}"))
    return found


def oracle_gap(entries: Sequence[Entry]) -> str:
    """Say how far our makespan is from the best oracle's; empty if either did not run."""
    ours = next((entry for entry in entries if entry.arm == OURS), None)
    oracles = [entry for entry in entries if entry.is_oracle]
    if ours is None or not oracles:
        return ""
    best = min(oracles, key=lambda entry: entry.makespan_s)
    return f"Our makespan is {100 * (fmean(_ratios(ours, best)) - 1):+.1f} % of the best oracle's, {best.title}."


@lru_cache(maxsize=2)
def _workload(parameters: WorkloadParameters, seed: int) -> Workload:
    return generate(parameters, seed)


_arms: list[Arm] = []


def _begin(source: ArmSource) -> None:
    _arms[:] = source()


def _run(job: _Job) -> Summary:
    regime, scale, seed, arm = job
    workload = _workload(at_scale(regime, scale).workload, seed)
    return summarize(run(_arms[arm], fleet(regime, scale), workload, regime.disturbance, seed))


def _row(entry: Entry) -> list[object]:
    return [
        entry.title,
        _with_spread(run.makespan_s for run in entry.runs),
        _with_spread(run.tokens_per_s for run in entry.runs),
        f"{100 * entry.mean(lambda run: run.reuse):.1f} / {100 * entry.mean(lambda run: run.reuse_bound):.1f}",
        _with_spread((run.prefilled_tokens / 1e6 for run in entry.runs), 1),
        f"{100 * entry.mean(lambda run: run.idle_share):.1f}",
        _with_spread(run.group_p50_s for run in entry.runs),
        _with_spread(run.group_p99_s for run in entry.runs),
        _with_spread(run.trajectory_p50_s for run in entry.runs),
        _recovery(entry.recoveries),
        f"{entry.mean(lambda run: run.num_preemptions):.0f}",
        f"{entry.mean(lambda run: run.num_moves):.0f}",
        f"{entry.mean(lambda run: run.policy_us_per_turn):.0f}",
    ]


def _recovery(recoveries: Sequence[float | None]) -> str:
    """The median; in brackets how many of all never came back."""
    came_back = [recovery for recovery in recoveries if recovery is not None]
    if not recoveries:
        return ""
    lacking = len(recoveries) - len(came_back)
    never = f" ({lacking} of {len(recoveries)} never)" if lacking else ""
    return (f"{median(came_back):.1f}" if came_back else "-") + never


def _ratios(entry: Entry, other: Entry) -> list[float]:
    return [a.makespan_s / b.makespan_s for a, b in zip(entry.runs, other.runs, strict=True)]


def _with_spread(values: Iterable[float], digits: int = 0) -> str:
    values = list(values)
    return f"{fmean(values):,.{digits}f} ±{_spread(values):,.{digits}f}"


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _verdict(is_met: bool, text: str) -> str:
    return f"- {'met' if is_met else '**NOT met**'}: {text}"
