"""`agentloop rollout`: a run from the task file to the summary.

The command owns the run directory and uses the service only through `RolloutClient`; `own_service.py` starts and
stops a service for the run. Finished trajectories are in the service's store, so an interrupted run can still be
exported. A run on an existing service stores the received trajectories in its own run directory.

With `--agent` a user's agent does the work over sessions, in this process or in child processes.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeAlias

import structlog
from rich.console import Console
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_fixed

from agentloop import parts
from agentloop.agents.program import AgentProgram
from agentloop.agents.runner import AgentLimits, AgentRecord, run_agents
from agentloop.api.coordinator import UpdateReport
from agentloop.api.encoded_record import EncodedRecord
from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.errors import AgentLoopError, InvalidRequest, WeightUpdateFailed
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop.rollout.environment import tasks_of
from agentloop.storage.exports import ExportRequest
from agentloop.storage.summary import Summary, summarize
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader, TrajectoryStore
from agentloop.types import KVPolicy, OnStale, RolloutTask, StalenessLimit, Trajectory
from agentloop_servers.cli.progress import ProgressView, Tally, open_progress
from agentloop_servers.cli.terminal import find_modules_here
from agentloop_servers.config.service import KeysConfig, ServiceConfig, new_run_dir
from agentloop_servers.run.store import store_in

REPORT_NAME = "report.html"
PARQUET_NAME = "trajectories.parquet"
SUMMARY_NAME = "summary.json"
LATEST_NAME = "latest"
MAX_PUSHES, PUSH_WAIT_S = 3, 1.0  # attempts if the push fails on the replicas, and the seconds between
CONNECT_TIMEOUT_S = 5.0  # a running service answers within

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WeightPush:
    """A weight push during a run, when `after_share` of the trajectories have finished."""

    directory: Path
    version: int
    after_share: float


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """The environment of a run, and the seed and number of its tasks."""

    environment: str
    seed: int | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The tasks of a run (a file, or an environment's), and the folder that it writes to."""

    tasks: Path | EnvironmentTasks
    num_samples: int
    out: Path
    push: WeightPush | None
    limit: StalenessLimit | None = None
    keep: int | None = None  # out of `num_samples`; None: all

    def load_tasks(self) -> list[RolloutTask]:
        """Return the tasks. Raises InvalidRequest if they cannot be read."""
        if isinstance(self.tasks, Path):
            return load_tasks(self.tasks)
        return tasks_of(self.tasks.environment, seed=self.tasks.seed, count=self.tasks.count)


@dataclass(frozen=True, slots=True)
class Collected:
    """The counts of a run; its records are in the store."""

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


Keep: TypeAlias = Callable[[Trajectory], None]
"""Called with each received trajectory."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A running service, and the user's keys for it."""

    url: str
    api_key: str | None
    admin_key: str | None

    def client(self, retry_timeout_s: float = 120.0) -> RolloutClient:
        """Return a client of the service."""
        return RolloutClient(
            self.url, api_key=self.api_key, admin_key=self.admin_key, retry_timeout_s=retry_timeout_s
        )


class Collect(Protocol):
    """The part of a run between a ready service and its end: `collect`, or an `AgentCollect`."""

    async def __call__(
        self,
        client: RolloutClient,
        tasks: list[RolloutTask],
        options: RunOptions,
        progress: ProgressView,
        keep: Keep = ...,
    ) -> Collected:
        """Roll out every sample, and push the weights during the run."""


async def run_on(
    address: ServiceAddress, options: RunOptions, console: Console, collect_with: Collect | None = None
) -> RunResult:
    """Roll out on a running service, and write the trajectories to a run directory.

    Raises InvalidRequest for unreadable tasks, and for a staleness limit with which the run could not end.
    """
    tasks = options.load_tasks()
    async with address.client(retry_timeout_s=CONNECT_TIMEOUT_S) as client:
        served = (await client.status()).weight_version
    check_can_end(options, len(tasks) * options.num_samples, served or 0)
    run_dir = new_run_dir(options.out)
    begin_run(run_dir, console)
    store = TrajectoryStore(run_dir / STORE_NAME)
    try:
        async with (
            address.client() as client,
            asyncio.TaskGroup() as storing,
            open_progress(console, client) as progress,
        ):

            def keep(trajectory: Trajectory) -> None:
                storing.create_task(store.record(EncodedRecord.of(trajectory)))

            collected = await (collect_with or collect)(client, tasks, options, progress, keep)
    finally:
        await store.close()
    summary = await asyncio.to_thread(write_results, run_dir, collected)
    return RunResult(run_dir, summary, collected.push_error)


def begin_run(run_dir: Path, console: Console) -> None:
    """Point `latest` to a run directory, and write this process's log there."""
    link_latest(run_dir)
    configure_logging(run_dir / LOG_NAME)
    console.print(f"run      {run_dir}", highlight=False, soft_wrap=True)


def _leave_to_the_service(trajectory: Trajectory) -> None:
    """Keep no copy: the service's store in the run directory has the record."""


async def collect(
    client: RolloutClient,
    tasks: list[RolloutTask],
    options: RunOptions,
    progress: ProgressView,
    keep: Keep = _leave_to_the_service,
) -> Collected:
    """Submit all tasks, read every trajectory, and push the weights during the run."""
    started_at = time.monotonic()
    limit = options.limit
    rollout = await client.submit(
        tasks,
        num_samples=options.num_samples,
        keep=options.keep,
        max_staleness=None if limit is None else limit.max_staleness,
        on_stale=OnStale.MASK if limit is None else limit.on_stale,
        trajectories_per_version=None if limit is None else limit.trajectories_per_version,
    )
    tally = Tally(rollout.num_trajectories, started_at, rollout.rollout_ids)
    progress.show(tally)
    doomed = rollout.rollout_ids if rollout.num_trajectories > _room(options.limit) else ()
    async with MidRunPush(client, options.push, rollout.num_trajectories, progress, doomed) as pushing:
        async for trajectory in rollout:
            keep(trajectory)
            tally.add(trajectory)
            progress.show(tally)
            pushing.look(tally.num_finished)
        wall_s = time.monotonic() - started_at
    return pushing.collected(tally, wall_s)


class MidRunPush:
    """The weight push of a run, started when enough trajectories have finished; leaving the context waits for it.

    `doomed` rollouts hold back samples until the new version is live. If the push fails, these would never start,
    so the rollouts are cancelled.
    """

    def __init__(
        self,
        client: RolloutClient,
        push: WeightPush | None,
        num_trajectories: int,
        progress: ProgressView,
        doomed: tuple[str, ...] = (),
    ) -> None:
        self._client = client
        self._push = push
        self._push_at = _push_at(push, num_trajectories)
        self._progress = progress
        self._doomed = doomed
        self._group = asyncio.TaskGroup()
        self._pushing: asyncio.Task[UpdateReport | AgentLoopError] | None = None

    async def __aenter__(self) -> MidRunPush:
        await self._group.__aenter__()
        self.look(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._group.__aexit__(kind, error, trace)

    def look(self, num_finished: int) -> None:
        """Start the push if enough trajectories have finished."""
        if self._push is not None and self._pushing is None and num_finished >= self._push_at:
            pushing = _push(self._client, self._push, self._progress, self._doomed)
            self._pushing = self._group.create_task(pushing)

    def collected(self, tally: Tally, wall_s: float) -> Collected:
        """Return the run's counts, its time and the outcome of its push. Call it after the context."""
        outcome = self._pushing.result() if self._pushing is not None else None
        return Collected(
            num_accepted=tally.num_trajectories,
            num_received=tally.num_finished,
            wall_s=wall_s,
            updates=(outcome,) if isinstance(outcome, UpdateReport) else (),
            push_error=outcome if isinstance(outcome, AgentLoopError) else None,
        )


async def _push(
    client: RolloutClient, push: WeightPush, progress: ProgressView, doomed: tuple[str, ...]
) -> UpdateReport | AgentLoopError:
    """Push the weights. Returns the report, or the error: trajectories in flight continue with the old weights.

    A push that failed on the replicas is repeated; refused weights are not.
    """

    def announce(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        progress.say(f"weights  version {push.version} not pushed, trying again: {error}")

    repeated = AsyncRetrying(
        retry=retry_if_exception(lambda error: type(error) is WeightUpdateFailed),
        stop=stop_after_attempt(MAX_PUSHES),
        wait=wait_fixed(PUSH_WAIT_S),
        before_sleep=announce,
        reraise=True,
    )
    try:
        async for attempt in repeated:
            with attempt:
                # With RECOMPUTE every recorded logprob can be recomputed from the ids and the span's version.
                report = await client.update_weights(
                    push.directory, version=push.version, kv_policy=KVPolicy.RECOMPUTE
                )
    except AgentLoopError as error:
        _log.error("push_failed", code=error.code, reason=error.message)
        progress.say(f"weights  version {push.version} not pushed: {error.message}")
        for rollout_id in doomed:
            await client.cancel(rollout_id)
        return error
    progress.say(f"weights  version {report.version} live, decoding paused for {report.stall_ms:.0f} ms")
    return report


def check_can_end(options: RunOptions, num_trajectories: int, model_version: int) -> None:
    """Raise InvalidRequest if the staleness limit would hold trajectories back forever: a run pushes at most
    once."""
    room, push = _room(options.limit), options.push
    push_at = _push_at(push, num_trajectories)
    if room < push_at:
        raise _never_ends(room, num_trajectories, "reach its push")
    # A push at the start may precede the first trajectory, and versions are counted from that trajectory's version.
    if push is not None and push_at > 0:
        room = _room(options.limit, max(0, push.version - model_version))
    if room < num_trajectories:
        raise _never_ends(room, num_trajectories, "end")


def _never_ends(room: float, num_trajectories: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the staleness limit allows only {room} of {num_trajectories} trajectories: the run would never {what}",
        param="trajectories_per_version",
    )


def _room(limit: StalenessLimit | None, num_versions: int = 0) -> float:
    """Return the number of trajectories that may start after `num_versions` more versions; infinite without a
    limit."""
    if limit is None or limit.trajectories_per_version is None:
        return math.inf
    return (limit.max_staleness + 1 + num_versions) * limit.trajectories_per_version


def _push_at(push: WeightPush | None, num_trajectories: int) -> int:
    """Return the number of finished trajectories at which the push starts."""
    return math.ceil(push.after_share * num_trajectories) if push is not None else 0


def write_results(run_dir: Path, collected: Collected) -> Summary:
    """Export and summarize the records in the store.

    Without the part `agentloop_view` there is no Parquet file and no report; without the extra `export` no Parquet.
    """
    _export("parquet", run_dir / PARQUET_NAME)
    store = TrajectoryReader(store_in(run_dir))
    try:
        summary = summarize(
            store.trajectories(),
            num_accepted=collected.num_accepted,
            wall_s=collected.wall_s,
            updates=collected.updates,
            acknowledged=store.acknowledged(),
        )
    finally:
        store.close()
    summary.write(run_dir / SUMMARY_NAME)
    _export("html", run_dir / REPORT_NAME)
    return summary


def _export(format: str, file: Path) -> None:
    """Export the run in a file's folder to the file; logs a warning if an optional format is unavailable."""
    try:
        parts.load(parts.EXPORTERS, format, param="format")(ExportRequest(store_in(file.parent), file))
    except InvalidRequest as error:
        _log.warning("not_written", file=str(file), reason=error.message)


def link_latest(run_dir: Path) -> None:
    """Point `latest`, next to the run directory, to it, atomically."""
    link = run_dir.parent / f".{LATEST_NAME}.{run_dir.name}"
    link.symlink_to(run_dir.name)
    os.replace(link, run_dir.parent / LATEST_NAME)


MAX_ERRORS_SHOWN = 5  # the log has all


def load_program(agent: str | None, command: str | None, config: ServiceConfig | None) -> AgentProgram | None:
    """Return the agent of the command line, if any. Raises InvalidRequest.

    A module may be in the working directory. A command does not get the service's keys in its environment.
    """
    if agent is not None and command is not None:
        raise InvalidRequest("--agent and --agent-command exclude each other", param="agent")
    if agent is not None:
        find_modules_here()
        return AgentProgram.load(agent)
    if command is not None:
        named = KeysConfig() if config is None else config.keys
        keys = frozenset({named.user_key_env, named.admin_key_env})
        return AgentProgram.command(command, withheld=keys)
    return None


@dataclass(frozen=True, slots=True)
class AgentCollect:
    """A `Collect` that runs the agent once for each sample."""

    program: AgentProgram
    concurrency: int

    async def __call__(
        self,
        client: RolloutClient,
        tasks: list[RolloutTask],
        options: RunOptions,
        progress: ProgressView,
        keep: Keep = _leave_to_the_service,
    ) -> Collected:
        """Run the agents.

        Raises InvalidRequest for options that sessions do not have, and for an unknown reward.
        """
        if options.limit is not None:
            raise InvalidRequest(
                "--max-staleness is not supported with agents: it applies to the service's own loops",
                param="max_staleness",
            )
        if options.keep is not None:
            raise InvalidRequest(
                "--keep is not supported with agents: it applies to the service's own loops", param="keep"
            )
        started_at = time.monotonic()
        tally = Tally(len(tasks) * options.num_samples, started_at)
        progress.show(tally)
        view = _View(tally, progress)
        async with MidRunPush(client, options.push, tally.num_trajectories, progress) as pushing:

            def on_record(record: AgentRecord) -> None:
                if record.trajectory is not None:
                    keep(record.trajectory)
                view.add(record)
                pushing.look(tally.num_finished)

            await run_agents(
                client,
                self.program,
                tasks,
                num_samples=options.num_samples,
                limits=AgentLimits(concurrency=self.concurrency),
                on_record=on_record,
            )
            wall_s = time.monotonic() - started_at
        return pushing.collected(tally, wall_s)


@dataclass(slots=True)
class _View:
    tally: Tally
    progress: ProgressView
    num_shown: int = 0

    def add(self, record: AgentRecord) -> None:
        """Count a record, and print the first few errors."""
        if record.trajectory is not None:
            self.tally.add(record.trajectory)
        else:
            self.tally.add_lost()
        self.progress.show(self.tally)
        trouble = record.error or (f"reward: {record.reward_error}" if record.reward_error else None)
        if trouble is not None and self.num_shown < MAX_ERRORS_SHOWN:
            self.num_shown += 1
            self.progress.say(f"agent    {record.task_id}: {trouble}")
