"""Minimal reproductions of faults that schedules found."""

from __future__ import annotations

import asyncio

from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import ServiceUnavailable
from agentloop.parsers.by_name import get_parser
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.worker import Worker, WorkerConfig
from agentloop.types import RolloutGroup, Trajectory
from agentloop_servers.coordinator.coordinator import Coordinator
from tests.support.engine.scripted import RENDERER, SPEC, scripted_engine, started
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.service import Service, service
from tests.support.fleet.worker import task


class Refusing(FakeCoordinator):
    """Rejects every record."""

    async def finish_one(self, worker_id: str, trajectory: Trajectory) -> bool:
        await asyncio.sleep(10.0)
        raise ServiceUnavailable("not now")


def test_a_worker_ends_while_its_record_is_refused() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with started(scripted_engine("5", clock=clock)) as engine:
            worker = Worker(
                "w",
                Refusing([task(tools=(), reward=None)]),
                lambda _: engine,
                RENDERER,
                get_parser("hermes"),
                Toolbox([]),
                WorkerConfig(poll_s=0.05),
                max_context_tokens=SPEC.max_context_tokens,
                vocab_size=RENDERER.vocab_size,
            )
            running = asyncio.create_task(worker.run())
            await clock.sleep(2.0)
            assert worker.num_running == 1
            worker.close()
            async with asyncio.timeout(30.0):
                await running

    clock.run(main())


@service("a")
async def test_a_submission_that_is_sent_twice_at_once_is_one(site: Service, coordinator: Coordinator) -> None:
    groups = (RolloutGroup("g", task(), 2),)
    first, second = await asyncio.gather(*(coordinator.rollouts.submit("r", groups) for _ in range(2)))
    assert first == second
    assert first.num_accepted == 2
