"""The curves of one or more runs as a picture: reward over steps and over time, age, mismatch, held-out success.

`python -m examples.train.curves DIRECTORY [ARM ...]` draws what `ablations.py` wrote there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

Found = Mapping[str, Any]
_WINDOW = 5  # steps of the running mean


def draw(arms: Mapping[str, Sequence[Found]], file: Path) -> None:
    """Write the picture; of each arm the runs of its seeds, the mean of which is the line."""
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8))
    for number, (name, runs) in enumerate(arms.items()):
        colour = f"C{number}"
        _curve(axes[0, 0], [_smooth(_column(run, "reward")) for run in runs], colour, name)
        for run in runs:
            axes[0, 1].plot(np.array(_column(run, "at_s")) / 60, _smooth(_column(run, "reward")), colour, alpha=0.8)
        _curve(axes[0, 2], [_column(run, "staleness_mean") for run in runs], colour, name)
        _curve(axes[1, 0], [np.maximum(_mismatch(run, "k3_kl"), 1e-8) for run in runs], colour, name)
        _curve(axes[1, 1], [_mismatch(run, "ess") for run in runs], colour, name)
        gains = [run["held_out"]["gain"] for run in runs]
        errors = [run["held_out"]["standard_error"] for run in runs]
        places = number + np.linspace(-0.15, 0.15, len(runs)) if len(runs) > 1 else [number]
        axes[1, 2].errorbar(places, gains, yerr=errors, fmt="o", color=colour, capsize=3)
    axes[1, 0].set_yscale("log")
    axes[1, 2].set_xticks(range(len(arms)), list(arms), rotation=20)
    axes[1, 2].axhline(0, color="grey", linewidth=0.5)
    titles = (
        (f"training reward, mean of {_WINDOW} steps", "step"),
        (f"training reward, mean of {_WINDOW} steps", "minutes"),
        ("mean age of a trajectory, versions", "step"),
        ("k3-KL, recorded to trained policy", "step"),
        ("effective sample size / tokens", "step"),
        ("held-out success, gain and standard error", ""),
    )
    for ax, (title, label) in zip(axes.flat, titles, strict=True):
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(label)
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _column(run: Found, name: str) -> list[float]:
    return [step[name] for step in run["steps"]]


def _mismatch(run: Found, name: str) -> list[float]:
    return [step["mismatch"][name] for step in run["steps"]]


def _smooth(values: Sequence[float]) -> np.ndarray:
    """The mean of each value and those before it, over a window."""
    return np.array([np.mean(values[max(0, end - _WINDOW) : end]) for end in range(1, len(values) + 1)])


def _curve(ax: Any, curves: Sequence[Sequence[float] | np.ndarray], colour: str, name: str) -> None:
    """Draw the mean of the curves, and the curves themselves faintly."""
    length = min(map(len, curves))
    steps = np.arange(1, length + 1)
    if len(curves) > 1:
        for curve in curves:
            ax.plot(steps, curve[:length], colour, alpha=0.25, linewidth=0.8)
    ax.plot(steps, np.mean([curve[:length] for curve in curves], axis=0), colour, label=name)


def main(directory: str, *chosen: str) -> None:
    """The command line."""
    runs: dict[str, list[Found]] = {name: [] for name in chosen}
    for file in sorted(Path(directory).glob("*-seed*.json")):
        name = file.name.rpartition("-seed")[0]
        if not chosen or name in chosen:
            runs.setdefault(name, []).append(json.loads(file.read_text(encoding="utf-8")))
    draw({name: found for name, found in runs.items() if found}, Path(directory) / "curves.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
