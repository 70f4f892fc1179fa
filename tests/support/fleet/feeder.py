"""A worker, and the coordinator as it sees it, in memory: assignments handed out, records collected."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager

from agentloop.api.coordinator import Orders, WorkerReport
from agentloop.engine import Engine
from agentloop.errors import NoHealthyReplica
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import Renderer
from agentloop.rollout.toolbox import Toolbox, load_tools
from agentloop.rollout.worker import Worker, WorkerConfig
from agentloop.types import Assignment, Lease, Message, RolloutTask, StalenessLimit, Trajectory
from agentloop_tools import SHIPPED_TOOLS
from tests.support.engine.scripted import RENDERER, SPEC


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


def task(task_id: str = "t", **fields: object) -> RolloutTask:
    """A task for the calculator; `fields` override."""
    given = {"messages": (Message("user", "What is 2 + 3?"),), "tools": ("calculator",), "reward": "exact_match"}
    return RolloutTask(task_id=task_id, **{**given, "reference": "5", **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def running_worker(
    feeder: Feeder, engines: Mapping[str, Engine], renderer: Renderer = RENDERER, **config: object
):
    """A worker at work on what the feeder has, over started engines by URL."""
    for engine in engines.values():
        await engine.start()
    toolbox = Toolbox(load_tools(tuple(SHIPPED_TOOLS), SHIPPED_TOOLS))
    worker = Worker(
        "w",
        feeder,
        engines.__getitem__,
        renderer,
        get_parser("hermes"),
        toolbox,
        WorkerConfig(**{"poll_s": 0.05, "poll_gap_s": 0.001, **config}),  # type: ignore[arg-type]
        max_context_tokens=SPEC.max_context_tokens,
        vocab_size=RENDERER.vocab_size,
    )
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.close()
        await running
        await toolbox.close()
        for engine in engines.values():
            await engine.close()
