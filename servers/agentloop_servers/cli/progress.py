"""The user's view of a rollout: its progress while it runs, and the summary as a table."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentloop.storage.summary import LengthSummary, StaleSummary, Summary, version_key
from agentloop.types import Trajectory


@dataclass(slots=True)
class Tally:
    """Counts while a run goes on."""

    num_trajectories: int
    started_at: float
    num_finished: int = 0
    num_sampled_tokens: int = 0
    by_version: Counter[str] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory) -> None:
        """Count one more."""
        self.num_finished += 1
        self.num_sampled_tokens += trajectory.num_sampled_tokens
        self.by_version[version_key(trajectory)] += 1

    def add_lost(self) -> None:
        """Count one more, without a record."""
        self.num_finished += 1

    def describe(self) -> str:
        """Speed and versions, in a few words."""
        elapsed_s = max(time.monotonic() - self.started_at, 1e-6)
        versions = ", ".join(f"v{key}: {n}" if key.isdigit() else f"{key}: {n}" for key, n in self._versions())
        return f"{self.num_sampled_tokens / elapsed_s:,.0f} tok/s  {versions}".rstrip()

    def _versions(self) -> list[tuple[str, int]]:
        return sorted(self.by_version.items())


class ProgressView(Protocol):
    """The place where a run shows its progress."""

    def show(self, tally: Tally) -> None:
        """Show the counts as they are now; called for every trajectory."""

    def say(self, line: str) -> None:
        """Print a line that stays."""


class LiveProgress:
    """A bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("rollout "),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, tally: Tally) -> None:
        self._bar.update(
            self._task, completed=tally.num_finished, total=tally.num_trajectories, description=tally.describe()
        )

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False)


class PlainProgress:
    """A line for every tenth, where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tenths_shown = -1

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, tally: Tally) -> None:
        tenths = 10 * tally.num_finished // max(tally.num_trajectories, 1)
        if tenths > self._tenths_shown:
            self._tenths_shown = tenths
            self.say(f"rollout  {tally.num_finished}/{tally.num_trajectories}  {tally.describe()}")

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def open_progress(console: Console) -> LiveProgress | PlainProgress:
    """The view that fits the console."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


def summary_table(summary: Summary) -> Table:
    """The summary as a small table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary.stop_reasons.items())
    table.add_row("trajectories", f"{summary.records} of {summary.accepted} accepted, {summary.lost} lost")
    table.add_row("ended by", reasons or "-")
    if summary.failures:
        failures = ", ".join(f"{whose} {count}" for whose, count in summary.failures.items())
        table.add_row("failures", failures)
    table.add_row("tokens", f"{summary.sampled_tokens:,} sampled, {summary.observed_tokens:,} observed")
    table.add_row("speed", f"{summary.sampled_tokens_per_s or 0:,.0f} tok/s over {summary.wall_s:.1f} s")
    for key, of_version in summary.success_by_version.items():
        name = f"success v{key}" if key.isdigit() else f"success {key}"
        table.add_row(name, f"{_percent(of_version.success)} of {of_version.num_trajectories}")
    table.add_row("both versions", f"{summary.partial} ({_percent(summary.partial_share)})")
    table.add_row("recovered from a tool error", str(summary.recovered_from_tool_error))
    if summary.stale is not None:
        table.add_row("stale", _describe_stale(summary.stale))
    for name, lengths in (("submitted", summary.lengths.submitted), ("trained", summary.lengths.trained)):
        table.add_row(f"sampled tokens, {name}", _describe_lengths(lengths))
    table.add_row("prefix-cache hits", _percent(summary.prefix_cache_hit_share))
    for update in summary.updates:
        table.add_row(f"update to v{update.version}", f"{update.pause_to_resume_ms:.0f} ms from pause to resume")
    return table


def _describe_lengths(lengths: LengthSummary) -> str:
    if lengths.num_trajectories == 0:
        return "none"
    spread = f"p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, p99 {lengths.p99:,.0f}, max {lengths.max:,}"
    return f"{lengths.mean:,.1f} a trajectory of {lengths.num_trajectories}: {spread}"


def _describe_stale(stale: StaleSummary) -> str:
    counts = (
        (stale.dropped_attempts, "attempts dropped"),
        (stale.given_up, "given up"),
        (stale.masked, "masked"),
        (stale.finished, "ended early"),
        (stale.late, "late"),
        (stale.masked_tokens, "tokens masked"),
    )
    return ", ".join(f"{count:,} {name}" for count, name in counts if count > 0) or "none"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
