"""Weight updates that run without a caller: a client chooses a job's id, and polls it.

    PENDING ─► RUNNING ─► COMPLETED | FAILED          PENDING, RUNNING while replicas stage ─► CANCELLED

One job is open at a time. Jobs are stored: a restarted coordinator runs an open job again, which finds the version
served or updates to it. A job has a folder of the service's store; its version is the next number, so that a
return to an older folder is a new version, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import JobState, UpdateJob, UpdateJobs
from agentloop.concurrency.aio import OwnedTasks, deadline_after
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import AgentLoopError, Conflict, NotFound, error_line
from agentloop.fleet.store_follower import FollowedStore
from agentloop_servers.coordinator.replicas import Replicas

MAX_JOBS = 1024  # jobs that are kept, more than a chain of deltas has
MAX_CHAIN = 128
"""Maximum number of a version's deltas. A new replica without a local copy downloads and applies all of them."""

_REJOIN_S = 60.0  # wait for a replica after a restart of the coordinator


class UpdateJobTable:
    """Implements `JobPort`."""

    def __init__(
        self,
        replicas: Replicas,
        store: FollowedStore | None,
        save: Callable[[tuple[UpdateJob, ...]], Awaitable[None]],
        tasks: OwnedTasks,
        log: FilteringBoundLogger,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._replicas = replicas
        # A job's version is not in the store's pointer, so the follower would report that the pointer went back.
        self._source = None if store is None or store.is_followed else store.source
        self._save = save
        self._tasks = tasks
        self._log = log
        self._wall_time = wall_time
        self._jobs: dict[str, UpdateJob] = {}  # in the order of their start
        self._running: asyncio.Task[None] | None = None

    def restore(self, jobs: Sequence[UpdateJob]) -> None:
        """Load the stored jobs and continue an open one."""
        self._jobs = {job.job_id: job for job in jobs}
        for job in jobs:
            if job.is_open:
                self._running = self._tasks.start(self._run(job.job_id, is_restored=True))

    async def update_jobs(self) -> UpdateJobs:
        return UpdateJobs(self._source, tuple(self._jobs.values()))

    async def begin_update(self, job: UpdateJob) -> UpdateJob:
        if (known := self._jobs.get(job.job_id)) is not None:
            return known
        if self._source is None:
            raise Conflict(
                "update jobs need `weights` with `follows: false` in the service's config", param="weights"
            )
        for other in self._jobs.values():
            if other.is_open:
                raise Conflict(f"hot load {other.job_id} of {other.folder!r} is already in progress: retry later")
        names = self._base_names(job)
        while len(self._jobs) >= MAX_JOBS:
            del self._jobs[next(iter(self._jobs))]
        now = self._wall_time()
        self._jobs[job.job_id] = job = replace(job, names=names, created_at=now, updated_at=now)
        try:
            await self._save(tuple(self._jobs.values()))
        except Exception:
            del self._jobs[job.job_id]
            raise
        if self._jobs[job.job_id].is_open:  # not cancelled during the save
            self._running = self._tasks.start(self._run(job.job_id))
        return job

    async def cancel_update(self, job_id: str) -> UpdateJob:
        if (job := self._jobs.get(job_id)) is None:
            raise NotFound(f"unknown hot load {job_id!r}")
        if job.state is JobState.CANCELLED:
            return job
        may_end = job.state is JobState.PENDING or (job.is_open and self._replicas.sync.may_end_early)
        if not may_end:
            raise Conflict(
                f"hot load {job_id} is {job.state}: it can be cancelled only until its replicas swap their weights"
            )
        job = self._changed(job_id, state=JobState.CANCELLED)
        if self._running is not None:  # an earlier job's task has ended, and ignores this
            self._running.cancel()  # no await since the check: the update is still staging
            await asyncio.wait([self._running])
        await self._keep()
        return job

    def _base_names(self, job: UpdateJob) -> tuple[tuple[int, str], ...]:
        """Return the names of the base's completed job. Raises Conflict for an unknown base or a long chain."""
        if not job.base:
            return ()
        done = [one for one in self._jobs.values() if one.folder == job.base and one.state is JobState.COMPLETED]
        if not done:
            raise Conflict(
                f"unknown base {job.base!r}: no hot load of it has completed; publish a full snapshot first"
            )
        if len(names := done[-1].names) > MAX_CHAIN:
            raise Conflict(f"{job.base!r} has {MAX_CHAIN} deltas after its full snapshot: publish a full snapshot")
        return names

    async def _run(self, job_id: str, *, is_restored: bool = False) -> None:
        if is_restored:
            await self._replicas.until_joined(deadline_after(_REJOIN_S))
        await self._replicas.sync.until_idle()
        try:
            await self._replicas.run_update(await self._begin(job_id), self._jobs[job_id].kv_policy)
        except AgentLoopError as error:
            self._changed(job_id, state=JobState.FAILED, error=f"{error.code}: {error.message}")
        except Exception as error:  # a defect: an open job would block all later ones
            self._changed(job_id, state=JobState.FAILED, error=f"internal_error: {error_line(error)}")
            self._log.exception("update_job_broken", job=job_id)
        else:
            self._changed(job_id, state=JobState.COMPLETED)
        await self._keep()

    async def _begin(self, job_id: str) -> WeightUpdate:
        """Return the job's update. Its version is chosen once, and stored before a replica has it."""
        job = self._jobs[job_id]
        if job.version is None:
            completed = [one.version or 0 for one in self._jobs.values() if one.state is JobState.COMPLETED]
            served = self._replicas.fleet.weight_version
            version = max(-1 if served is None else served, *completed, -1) + 1
            job = self._changed(job_id, state=JobState.RUNNING, names=((version, job.folder), *job.names))
            await self._keep()
        assert self._source is not None
        return WeightUpdate(job.names[0][0], published=replace(self._source, names=job.names))

    async def _keep(self) -> None:
        """Store the jobs. After an error of the store, the next change stores them."""
        try:
            await self._save(tuple(self._jobs.values()))
        except Exception as error:  # the disk may recover
            self._log.error("update_jobs_not_saved", error=error_line(error))

    def _changed(self, job_id: str, **fields: object) -> UpdateJob:
        job = replace(self._jobs[job_id], updated_at=self._wall_time(), **fields)  # type: ignore[arg-type]
        self._jobs[job_id] = job
        self._log.info("update_job", job=job_id, folder=job.folder, state=job.state, error=job.error)
        return job
