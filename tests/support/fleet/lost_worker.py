"""Parts for tests of lost workers: an engine that hangs at a turn, and a coordinator that reassigns work."""

import asyncio
from dataclasses import replace

from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import StopReason
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import SPEC, turns
from tests.support.fleet.fake_coordinator import FakeCoordinator


class HangingEngine(SimulatedEngine):
    """Follows a script; from turn `hangs_at` on it never answers."""

    def __init__(self, *replies: str, hangs_at: int = 99) -> None:
        super().__init__(SPEC, policy=ScriptedPolicy(turns(*replies)))
        self.hangs_at = hangs_at
        self.num_turns = 0
        self.is_hanging = asyncio.Event()

    async def generate(self, request, on_progress=None):
        self.num_turns += 1
        if self.num_turns > self.hangs_at:
            self.is_hanging.set()
            await asyncio.Event().wait()
        return await super().generate(request, on_progress)


class Relay(FakeCoordinator):
    """Reassigns a worker's tasks to the next worker, as after a worker loss."""

    def __init__(self, tasks, **options):
        super().__init__(tasks, **options)
        self.given = list(self._waiting)
        self.refuses: set[StopReason] = set()
        self.refused: list[StopReason] = []
        self.is_refused = asyncio.Event()

    def lose_worker(self) -> None:
        self.given = [replace(assignment, attempt=assignment.attempt + 1) for assignment in self.given]
        self._waiting.extend(one for one in self.given if f"{one.group_id}/{one.sample_index}" not in self.records)

    async def finish_one(self, worker_id, trajectory):
        if trajectory.stop_reason in self.refuses:
            self.refused.append(trajectory.stop_reason)
            self.is_refused.set()
            return False
        return await super().finish_one(worker_id, trajectory)


def files(folder):
    return sorted(folder.iterdir()) if folder.is_dir() else []
