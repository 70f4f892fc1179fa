"""The user's view of a rollout: its progress while it runs, and the summary as a table."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentloop.api.findings import about
from agentloop.client.client import RolloutClient
from agentloop.errors import AgentLoopError
from agentloop.storage.summary import MIXED, LengthSummary, StaleSummary, Summary, version_key
from agentloop.types import Trajectory

_OLDEST_S = 2.0
_NUM_LOOKED_AT = 1000  # trajectories of the service that are searched for the run's oldest


@dataclass(slots=True)
class Tally:
    """Counts of a running rollout."""

    num_trajectories: int
    started_at: float
    rollout_ids: tuple[str, ...] = ()  # empty for agents
    num_finished: int = 0
    num_sampled_tokens: int = 0
    by_version: Counter[str] = field(default_factory=Counter)
    total_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # the latest trajectories'

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished trajectory."""
        self.num_finished += 1
        self.num_sampled_tokens += trajectory.num_sampled_tokens
        self.by_version[version_key(trajectory)] += 1
        self.total_s.append(trajectory.timings.total_s)

    def add_lost(self) -> None:
        """Count a trajectory without a record."""
        self.num_finished += 1

    def describe(self) -> str:
        """Return throughput, versions, seconds per trajectory, and the estimated time left."""
        elapsed_s = max(time.monotonic() - self.started_at, 1e-6)
        by_version = sorted(self.by_version.items())
        versions = ", ".join(f"v{key}: {n}" if key.isdigit() else f"{key}: {n}" for key, n in by_version)
        parts = [f"{self.num_sampled_tokens / elapsed_s:,.0f} tok/s", versions]
        if self.total_s:
            p50, p95 = np.percentile(self.total_s, (50, 95))
            parts.append(f"p50 {p50:.1f} s, p95 {p95:.1f} s")
        if 0 < self.num_finished < self.num_trajectories:
            eta_s = elapsed_s * (self.num_trajectories - self.num_finished) / self.num_finished
            parts.append(f"ETA {eta_s:.0f} s")
        return "  ".join(filter(None, parts))


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def show(self, tally: Tally) -> None:
        """Show the current counts; called for every trajectory."""

    def say(self, line: str) -> None:
        """Print a permanent line."""


class LiveProgress:
    """A progress bar on a terminal, the counts, and the states of the three oldest trajectories."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("rollout "), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("", total=None)
        self._rollout_ids: tuple[str, ...] = ()
        self._counts = ""
        self._oldest: tuple[str, ...] = ()

    async def follow(self, client: RolloutClient) -> None:
        """Poll the oldest trajectories until the service refuses: the route needs the admin key."""
        with suppress(AgentLoopError):
            while True:
                page = await client.flight(_NUM_LOOKED_AT)
                own = [row.id for row in page.oldest if row.id.partition("/")[0] in self._rollout_ids]
                self._oldest = tuple(found.text for name in own[:3] if (found := about(name, page)) is not None)
                await asyncio.sleep(_OLDEST_S)
        self._oldest = ()

    def picture(self) -> Group:
        """Return the bar and the lines below it."""
        lines = (Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in (self._counts, *self._oldest))
        return Group(self._bar, *lines)

    def show(self, tally: Tally) -> None:
        self._rollout_ids, self._counts = tally.rollout_ids, tally.describe()
        self._bar.update(self._task, completed=tally.num_finished, total=tally.num_trajectories)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False)


class PlainProgress:
    """Prints a line per tenth of the run, for output that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tenths_shown = -1

    def show(self, tally: Tally) -> None:
        tenths = 10 * tally.num_finished // max(tally.num_trajectories, 1)
        if tenths > self._tenths_shown:
            self._tenths_shown = tenths
            self.say(f"rollout  {tally.num_finished}/{tally.num_trajectories}  {tally.describe()}")

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


@asynccontextmanager
async def open_progress(console: Console, client: RolloutClient) -> AsyncIterator[LiveProgress | PlainProgress]:
    """Show the progress of a run on a service, in the view that fits the console."""
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    progress = LiveProgress(console)
    async with asyncio.TaskGroup() as group:
        with Live(console=console, get_renderable=progress.picture):
            following = group.create_task(progress.follow(client))
            yield progress
        following.cancel()


def summary_table(summary: Summary, push_error: AgentLoopError | None = None) -> Table:
    """Return the summary as a table. `push_error` is the error of the weight push, if it failed."""
    table = Table(show_header=False, box=None, pad_edge=False)
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary.stop_reasons.items())
    table.add_row("trajectories", f"{summary.records} of {summary.accepted} accepted, {summary.lost} lost")
    table.add_row("stop reasons", reasons or "-")
    if summary.failures:
        failures = ", ".join(f"{whose} {count}" for whose, count in summary.failures.items())
        table.add_row("failures", failures)
    table.add_row("tokens", f"{summary.sampled_tokens:,} sampled, {summary.observed_tokens:,} observed")
    table.add_row("throughput", f"{summary.sampled_tokens_per_s or 0:,.0f} tok/s over {summary.wall_s:.1f} s")
    for key, of_version in summary.success_by_version.items():
        name = f"at v{key}" if key.isdigit() else {MIXED: "across versions"}.get(key, "without tokens")
        table.add_row(f"success {name}", f"{_percent(of_version.success)} of {of_version.num_trajectories}")
    table.add_row("crossed an update", f"{summary.partial} ({_percent(summary.partial_share)})")
    table.add_row("recovered from a tool error", str(summary.recovered_from_tool_error))
    if summary.stale is not None:
        table.add_row("stale", _describe_stale(summary.stale))
    table.add_row("tokens per trajectory", _describe_lengths(summary.lengths.submitted))
    if summary.lengths.trained != summary.lengths.submitted:
        table.add_row("tokens per trained trajectory", _describe_lengths(summary.lengths.trained))
    table.add_row("prefix-cache hits", _percent(summary.prefix_cache_hit_share))
    for update in summary.updates:
        table.add_row(f"update to v{update.version}", f"{update.pause_to_resume_ms:.0f} ms from pause to resume")
    if push_error is not None:
        table.add_row("update", f"failed; all tokens have the old version: {push_error.message}")
    return table


def _describe_lengths(lengths: LengthSummary) -> str:
    if lengths.num_trajectories == 0:
        return "none"
    spread = f"p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, p99 {lengths.p99:,.0f}, max {lengths.max:,}"
    return f"mean {lengths.mean:,.1f}, {spread}"


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
