"""A coordinator with a real store and fake replicas that send heartbeats, in virtual time; restartable."""

import asyncio
import sqlite3
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import wraps

from agentloop.api.coordinator import Refusal, WorkerReport
from agentloop.api.encoded_record import EncodedRecord
from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import ServiceUnavailable
from agentloop.fleet.registry import FleetConfig
from agentloop.scheduling.balancer import BalancerConfig
from agentloop.scheduling.replica_books import ShareBounds
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import StopReason
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from tests.support.engine.engines import INFO, FakeEngine
from tests.support.records.samples import make_trajectory

CONFIG = CoordinatorConfig(
    max_queued_trajectories=50,
    worker_timeout_s=10.0,
    placement_wait_s=5.0,
    restart_grace_s=3.0,
    fleet=FleetConfig(suspect_after_s=3.0, dead_after_s=6.0),
    balancer=BalancerConfig(usual_growth_tokens=100.0, share=ShareBounds(most=1.0)),
)


class Inline(Executor):
    """Runs a call at once: virtual time does not include threads."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class FlakyStore(TrajectoryStore):
    """A store with configurable disk failures."""

    is_broken = False
    stalled = None  # an event that commits and submissions wait for
    silent = None  # an event that reads wait for: the database does not answer
    num_commits = 0
    loses_answers = False  # commits take place, and their callers get a database error

    async def accept(self, *arguments):
        if self.stalled is not None:
            await self.stalled.wait()
        await super().accept(*arguments)
        if self.loses_answers:
            raise ServiceUnavailable("the answer of a commit was lost")

    async def add_records(self, records):
        self.num_commits += 1
        if self.is_broken:
            raise sqlite3.OperationalError("disk I/O error")
        if self.stalled is not None:
            await self.stalled.wait()
        num_new = await super().add_records(records)
        if self.loses_answers:
            raise ServiceUnavailable("the answer of a commit was lost")
        return num_new

    async def check_owner(self):
        if self.silent is not None:
            await self.silent.wait()
        await super().check_owner()

    async def save_state(self, name, value):
        if self.is_broken:
            raise sqlite3.OperationalError("database or disk is full")
        await super().save_state(name, value)


class Service:
    """A coordinator with fake replicas that send heartbeats, on one run directory; restartable."""

    def __init__(self, clock, path, config=CONFIG, info=INFO):
        self.clock, self.path, self.config, self.info = clock, path, config, info
        self.engines = {}
        self.silent = set()

    async def start(self):
        self.store = FlakyStore(self.path / "trajectories.sqlite", Inline)
        self.coordinator = Coordinator(self.store, self.connect, self.config, self.clock, probe=self.probe)
        await self.coordinator.start()
        self.heartbeats = asyncio.create_task(self.heartbeat())
        return self.coordinator

    async def stop(self):
        await self.coordinator.check_health()
        self.coordinator.rollouts.queue.check()
        self.heartbeats.cancel()
        await asyncio.gather(self.heartbeats, return_exceptions=True)
        await self.coordinator.close()
        await self.coordinator.close()

    async def probe(self, url):
        await self.connect(url).sample()

    def connect(self, url):
        return self.engines[url.removeprefix("fake://")]

    async def join(self, *replica_ids, version=0):
        for replica_id in replica_ids:
            self.engines[replica_id] = FakeEngine(self.clock, f"fake://{replica_id}", version, self.info)
            await self.coordinator.replicas.register(self.engines[replica_id].registration())
        await self.clock.sleep(0.1)

    async def heartbeat(self):
        while True:
            for replica_id, engine in self.engines.items():
                replicas = self.coordinator.replicas
                if replica_id not in self.silent and not await replicas.heartbeat(replica_id, engine.report()):
                    await replicas.register(engine.registration())
            await self.clock.sleep(1.0)

    async def states(self):
        return {one.replica_id: one.state for one in (await self.coordinator.status()).replicas}


def service(*replica_ids, config=CONFIG, info=INFO):
    """Run an async test that takes a started service (and its coordinator) in virtual time."""

    def decorate(test):
        @wraps(test)
        def run(tmp_path):
            clock = VirtualClock()

            async def main():
                site = Service(clock, tmp_path, config, info)
                await site.start()
                await site.join(*replica_ids)
                try:
                    async with asyncio.timeout(1e5):
                        await test(site, site.coordinator)
                finally:
                    await site.stop()

            clock.run(main())

        del run.__wrapped__
        return run

    return decorate


async def read_page(coordinator, rollout_id, after, limit, wait_s):
    """Return the coordinator's decoded answer."""
    return (await coordinator.rollouts.read(rollout_id, after, limit, wait_s)).decoded()


async def hand_in(workers, worker_id, trajectory):
    """Submit one record. Raises the error of the submission."""
    [answer] = await workers.finish(worker_id, (EncodedRecord.of(trajectory),))
    if isinstance(answer, Refusal):
        raise answer.raised()
    return answer


def report(worker_id="w", num_free=8, *running):
    return WorkerReport(worker_id, num_free, running)


def record(assignment, stop_reason=StopReason.COMPLETED):
    trajectory = make_trajectory(
        assignment.group_id, assignment.sample_index, rollout_id=assignment.rollout_id, stop_reason=stop_reason
    )
    return replace(trajectory, attempt=assignment.attempt)


def assignment_ids(assignments):
    return [assignment.assignment_id for assignment in assignments]
