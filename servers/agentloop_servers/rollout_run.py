"""`agentloop rollout`: a whole run, from task file to summary.

It owns the run directory and talks to the service through `RolloutClient` alone; starting and stopping the
service is `local.running_service`. What was finished is in the store whatever happens here: an interrupted run
can still be exported.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentloop.client import RolloutClient
from agentloop.control import UpdateReport
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.export import export, read_all
from agentloop.logs import LOG_NAME, configure_logging
from agentloop.rollout import Rollout
from agentloop.store import STORE_NAME, TrajectoryStore
from agentloop.summary import StaleSummary, Summary, summarize, version_key
from agentloop.tasks import load_tasks
from agentloop.types import KVPolicy, RolloutTask, StalenessLimit, Trajectory
from agentloop_servers.app import new_run_dir
from agentloop_servers.config import ServiceConfig
from agentloop_servers.local import running_service

PARQUET_NAME = "trajectories.parquet"
SUMMARY_NAME = "summary.json"
LATEST_NAME = "latest"

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WeightPush:
    """New weights in the middle of a run: once `after_share` of the trajectories have finished."""

    directory: Path
    version: int
    after_share: float


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run and where to put it."""

    tasks: Path
    num_samples: int
    out: Path
    push: WeightPush | None
    limit: StalenessLimit | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """What came back over HTTP; the records themselves are in the store."""

    num_accepted: int
    num_received: int
    wall_s: float
    updates: tuple[UpdateReport, ...]
    push_error: AgentLoopError | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run. `push_error` is set if the weights could not be pushed; the trajectories are complete."""

    run_dir: Path
    summary: Summary
    push_error: AgentLoopError | None

    @property
    def is_good(self) -> bool:
        return self.summary.lost == 0 and self.push_error is None


async def run_rollout(config: ServiceConfig, options: RunOptions, console: Console) -> RunResult:
    """Start a service, roll out, push in the middle, stop, and write the run directory.

    Raises InvalidRequest for tasks or a model that cannot be read, and for a limit under which the run could not
    end, before anything is started.
    """
    tasks = load_tasks(options.tasks)
    config.model_path()
    check_can_end(options, len(tasks) * options.num_samples, config.model_version)
    run_dir = new_run_dir(options.out)
    link_latest(run_dir)
    configure_logging(run_dir / LOG_NAME)
    console.print(f"run      {run_dir}", highlight=False)
    console.print(f"service  starting {config.replicas} replica(s) of {config.model} …", highlight=False)
    started_at = time.monotonic()
    # The service is this run's own: on a free port, so that runs side by side do not meet.
    private = config.model_copy(update={"port": 0, "run_dir": None})
    async with running_service(private, run_dir) as url:
        end_on_sigterm()  # again: Ray has set its own handler
        console.print(f"service  ready after {time.monotonic() - started_at:.0f} s at {url}", highlight=False)
        keys = (os.environ.get(config.keys.user_key_env), os.environ.get(config.keys.admin_key_env))
        async with RolloutClient(url, api_key=keys[0], admin_key=keys[1]) as client:
            await client.wait_until_ready()
            with open_progress(console) as progress:
                collected = await collect(client, tasks, options, progress)
    summary = await asyncio.to_thread(write_results, run_dir, collected)
    return RunResult(run_dir, summary, collected.push_error)


async def collect(
    client: RolloutClient,
    tasks: list[RolloutTask],
    options: RunOptions,
    progress: ProgressView,
) -> Collected:
    """Submit everything, take every trajectory, push when it is time."""
    started_at = time.monotonic()
    push = options.push
    rollout = await _submit(client, tasks, options)
    tally = Tally(rollout.num_trajectories, started_at)
    progress.show(tally)
    pushing: asyncio.Task[UpdateReport | AgentLoopError] | None = None
    push_at = _push_at(push, rollout.num_trajectories)
    doomed = rollout.rollout_ids if rollout.num_trajectories > _room(options.limit) else ()
    async with asyncio.TaskGroup() as group:
        if push is not None and push_at == 0:
            pushing = group.create_task(_push(client, push, progress, doomed))
        async for trajectory in rollout:
            tally.add(trajectory)
            progress.show(tally)
            if push is not None and pushing is None and tally.num_finished >= push_at:
                pushing = group.create_task(_push(client, push, progress, doomed))
        wall_s = time.monotonic() - started_at
    outcome = pushing.result() if pushing is not None else None
    return Collected(
        num_accepted=rollout.num_trajectories,
        num_received=tally.num_finished,
        wall_s=wall_s,
        updates=(outcome,) if isinstance(outcome, UpdateReport) else (),
        push_error=outcome if isinstance(outcome, AgentLoopError) else None,
    )


async def _submit(client: RolloutClient, tasks: list[RolloutTask], options: RunOptions) -> Rollout:
    limit = options.limit
    if limit is None:
        return await client.submit(tasks, num_samples=options.num_samples)
    return await client.submit(
        tasks,
        num_samples=options.num_samples,
        max_staleness=limit.max_staleness,
        on_stale=limit.on_stale,
        trajectories_per_version=limit.trajectories_per_version,
    )


async def _push(
    client: RolloutClient, push: WeightPush, progress: ProgressView, doomed: tuple[str, ...]
) -> UpdateReport | AgentLoopError:
    """The report, or the error as a value: trajectories in flight go on under the weights there are.

    `doomed` rollouts hold back until the version comes what would then never begin, so they are cancelled.
    """
    try:
        # RECOMPUTE: every recorded logprob can then be computed again from the ids and the span's version alone.
        report = await client.update_weights(push.directory, version=push.version, kv_policy=KVPolicy.RECOMPUTE)
    except AgentLoopError as error:
        _log.error("push_failed", code=error.code, reason=error.message)
        progress.say(f"weights  version {push.version} not pushed: {error.message}")
        for rollout_id in doomed:
            await client.cancel(rollout_id)
        return error
    progress.say(f"weights  version {report.version} live, decoding stood still for {report.stall_ms:.0f} ms")
    return report


def check_can_end(options: RunOptions, num_trajectories: int, model_version: int) -> None:
    """Raises InvalidRequest if the limit would hold some back for ever: a run pushes once, or not at all."""
    room, push = _room(options.limit), options.push
    push_at = _push_at(push, num_trajectories)
    if room < push_at:
        raise _never_ends(room, num_trajectories, "reach its push")
    # A push at once may go before the first trajectory, whose version is the one that versions are counted from.
    if push is not None and push_at > 0:
        room = _room(options.limit, max(0, push.version - model_version))
    if room < num_trajectories:
        raise _never_ends(room, num_trajectories, "end")


def _never_ends(room: float, num_trajectories: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the staleness limit lets {room} of {num_trajectories} trajectories begin: the run would never {what}",
        param="trajectories_per_version",
    )


def _room(limit: StalenessLimit | None, num_versions: int = 0) -> float:
    """How many trajectories may begin once the fleet is `num_versions` further; infinite without an allowance."""
    if limit is None or limit.trajectories_per_version is None:
        return math.inf
    return (limit.max_staleness + 1 + num_versions) * limit.trajectories_per_version


def _push_at(push: WeightPush | None, num_trajectories: int) -> int:
    """How many trajectories have finished when it is time to push."""
    return math.ceil(push.after_share * num_trajectories) if push is not None else 0


def write_results(run_dir: Path, collected: Collected) -> Summary:
    """Export the store and summarise it: the files hold what is on disk, not what was seen on the way."""
    export(run_dir / STORE_NAME, run_dir / PARQUET_NAME, "parquet")
    store = TrajectoryStore(run_dir / STORE_NAME, is_read_only=True)
    try:
        summary = summarize(
            read_all(store),
            num_accepted=collected.num_accepted,
            wall_s=collected.wall_s,
            updates=collected.updates,
        )
    finally:
        store.close()
    summary.write(run_dir / SUMMARY_NAME)
    return summary


def link_latest(run_dir: Path) -> None:
    """Point `latest`, beside the run directory, to it; readers see the old link or the new one."""
    link = run_dir.parent / f".{LATEST_NAME}.{run_dir.name}"
    link.symlink_to(run_dir.name)
    os.replace(link, run_dir.parent / LATEST_NAME)


def end_on_sigterm() -> None:
    """Let SIGTERM cancel the current task, so that everything it started is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


# --- what the user sees -----------------------------------------------------------------------------------


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

    def describe(self) -> str:
        """Speed and versions, in a few words."""
        elapsed_s = max(time.monotonic() - self.started_at, 1e-6)
        versions = ", ".join(f"v{key}: {n}" if key.isdigit() else f"{key}: {n}" for key, n in self._versions())
        return f"{self.num_sampled_tokens / elapsed_s:,.0f} tok/s  {versions}".rstrip()

    def _versions(self) -> list[tuple[str, int]]:
        return sorted(self.by_version.items())


class ProgressView(Protocol):
    """Where a run shows how far it is."""

    def show(self, tally: Tally) -> None:
        """The counts now; called for every trajectory."""

    def say(self, line: str) -> None:
        """One line that stays."""


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
    table.add_row("tokens", f"{summary.sampled_tokens:,} sampled, {summary.observed_tokens:,} observed")
    table.add_row("speed", f"{summary.sampled_tokens_per_s or 0:,.0f} tok/s over {summary.wall_s:.1f} s")
    for key, of_version in summary.success_by_version.items():
        name = f"success v{key}" if key.isdigit() else f"success {key}"
        table.add_row(name, f"{_percent(of_version.success)} of {of_version.num_trajectories}")
    table.add_row("both versions", f"{summary.partial} ({_percent(summary.partial_share)})")
    table.add_row("recovered from a tool error", str(summary.recovered_from_tool_error))
    if summary.stale is not None:
        table.add_row("stale", _describe_stale(summary.stale))
    table.add_row("prefix-cache hits", _percent(summary.prefix_cache_hit_share))
    for update in summary.updates:
        table.add_row(f"update to v{update.version}", f"{update.pause_to_resume_ms:.0f} ms from pause to resume")
    return table


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
