"""The coordinator as a worker sees it, in memory: it hands out assignments and collects records."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from agentloop.api.coordinator import Orders, WorkerReport
from agentloop.errors import NoHealthyReplica
from agentloop.types import Assignment, Lease, RolloutTask, StalenessLimit, Trajectory


class Feeder:
    """Leases name the replicas in turn; `move` goes to the next one that is not in `dead`."""

    def __init__(
        self,
        tasks: Sequence[RolloutTask],
        urls: Sequence[str] = ("sim://a",),
        num_samples: int = 1,
        staleness: StalenessLimit | None = None,
    ) -> None:
        self.urls = list(urls)
        self.dead: set[str] = set()
        self.records: dict[str, Trajectory] = {}
        self.num_moves = 0
        self.cancel: list[str] = []
        self.is_done = asyncio.Event()
        self.finish_failures: deque[Exception] = deque()
        self._waiting = deque(
            Assignment(
                f"{task.task_id}/{sample}",
                task.task_id,
                sample,
                task,
                self.lease_on(self.urls[(place + sample) % len(self.urls)]),
                staleness=staleness,
            )
            for place, task in enumerate(tasks)
            for sample in range(num_samples)
        )
        self._num_expected = len(self._waiting)

    def lease_on(self, url: str) -> Lease:
        return Lease(f"lease on {url}", replica_id=url, url=url)

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        start = tuple(self._waiting.popleft() for _ in range(min(report.num_free, len(self._waiting))))
        cancel, self.cancel = tuple(self.cancel), []
        if not start and not cancel:
            await asyncio.sleep(min(wait_s, 0.02))
        return Orders(start, cancel)

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool) -> Lease:
        self.num_moves += 1
        others = [url for url in self.urls if url != lease.url and url not in self.dead]
        if not others:
            raise NoHealthyReplica("no other replica")
        return self.lease_on(others[0])

    async def finish(self, worker_id: str, trajectory: Trajectory) -> None:
        if self.finish_failures:
            raise self.finish_failures.popleft()
        key = f"{trajectory.group_id}/{trajectory.sample_index}"
        assert key not in self.records, f"{key} finished twice"
        self.records[key] = trajectory
        if len(self.records) == self._num_expected:
            self.is_done.set()
