"""Pictures of a comparison: who is how far from the best in which regime, and throughput around disturbances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.benchmarks.balancer.compare import OURS, Entry

matplotlib.use("Agg")

_NUM_LINES = 6
_WORST = 50.0  # of a grid's colours


def draw(results: Mapping[str, Sequence[Entry]], folder: Path) -> list[Path]:
    """Draw all pictures of the results, by regime, into a folder. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        _grid(results, folder / "makespan.png", "makespan, % above the regime's best arm", _makespans),
        _grid(results, folder / "reuse.png", "reuse, points below the infinite-cache bound", _reuse_gaps),
        _completions(results, folder / "completions.png"),
    ]
    if any(entry.runs[0].tokens_by_second for entries in results.values() for entry in entries):
        paths.append(_throughputs(results, folder / "throughput.png"))
    return paths


def _makespans(entries: Sequence[Entry]) -> list[float]:
    best = min(entry.makespan_s for entry in entries)
    return [100 * (entry.makespan_s / best - 1) for entry in entries]


def _reuse_gaps(entries: Sequence[Entry]) -> list[float]:
    return [entry.reuse_gap for entry in entries]


def _grid(
    results: Mapping[str, Sequence[Entry]],
    path: Path,
    title: str,
    figures: Callable[[Sequence[Entry]], list[float]],
) -> Path:
    """Draw one number for each arm (row) and regime (column): of its best variant, the mean over the seeds."""
    arms = list(dict.fromkeys(entry.arm for entries in results.values() for entry in entries))
    values = np.full((len(arms), len(results)), np.nan)
    for column, entries in enumerate(results.values()):
        for entry, value in zip(entries, figures(entries), strict=True):
            row = arms.index(entry.arm)
            values[row, column] = np.nanmin([values[row, column], value])
    figure, axes = plt.subplots(figsize=(3.5 + 0.8 * len(results), 2.4 + 0.38 * len(arms)))
    axes.imshow(values, cmap="RdYlGn_r", aspect="auto", vmin=0, vmax=_WORST)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "white" if value > 0.8 * _WORST or value < 0.05 * _WORST else "black"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(results)), list(results), rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(arms)), arms, fontsize=8)
    axes.set_title(title, fontsize=10)
    return _save(figure, path)


def _completions(results: Mapping[str, Sequence[Entry]], path: Path) -> Path:
    """Draw the share of trajectories that have ended against time, a panel a regime."""
    figure, panels = _panels(len(results))
    for axes, (name, entries) in zip(panels, results.items(), strict=False):
        for entry in _shown(entries):
            times = np.mean([run.ended_at for run in entry.runs], axis=0)
            axes.plot(times, range(101), label=entry.arm, **_style(entry))
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("s", fontsize=8)
        axes.set_ylabel("trajectories ended, %", fontsize=8)
        axes.legend(fontsize=6)
    return _save(figure, path)


def _throughputs(results: Mapping[str, Sequence[Entry]], path: Path) -> Path:
    """Draw tokens a second of the first seed, averaged over 5 s, a panel a disturbed regime."""
    disturbed = {name: entries for name, entries in results.items() if entries[0].runs[0].tokens_by_second}
    figure, panels = _panels(len(disturbed))
    for axes, (name, entries) in zip(panels, disturbed.items(), strict=False):
        for entry in _shown(entries):
            tokens = np.array(entry.runs[0].tokens_by_second, dtype=float)
            axes.plot(np.convolve(tokens, np.ones(5) / 5, "same"), label=entry.arm, **_style(entry))
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("s", fontsize=8)
        axes.set_ylabel("tokens/s", fontsize=8)
        axes.legend(fontsize=6)
    return _save(figure, path)


def _shown(entries: Sequence[Entry]) -> list[Entry]:
    """Ours, the best of the others, and the oracles' best: more lines than that hide each other."""
    by_makespan = sorted(entries, key=lambda entry: entry.makespan_s)
    ours = [entry for entry in by_makespan if entry.arm == OURS]
    oracles = [entry for entry in by_makespan if entry.is_oracle][:1]
    others = [entry for entry in by_makespan if not entry.is_oracle and entry.arm != OURS]
    return [*ours, *oracles, *others[: _NUM_LINES - len(ours) - len(oracles)]]


def _style(entry: Entry) -> dict[str, Any]:
    if entry.arm == OURS:
        return {"color": "black", "linewidth": 2.0}
    return {"linewidth": 1.0, "linestyle": "--" if entry.is_oracle else "-"}


def _panels(num: int) -> tuple[Figure, list[Axes]]:
    num_columns = min(3, num)
    num_rows = -(-num // num_columns)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=(5.2 * num_columns, 3.4 * num_rows), squeeze=False)
    for axes in grid.flat[num:]:
        axes.set_visible(False)
    return figure, list(grid.flat)


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
