"""A worker without text: multi-turn generations of greedy ids through leases, as the real worker does it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from agentloop.api.coordinator import WorkerReport
from agentloop.checks import check_generation
from agentloop.errors import AgentLoopError, DeadlineExceeded, EnginePaused, ServiceUnavailable
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import (
    Assignment,
    FinishReason,
    GenerateRequest,
    Generation,
    RolloutGroup,
    RolloutTask,
    SamplingParams,
    StopReason,
    Trajectory,
)
from tests.support.fleet.schedules import World
from tests.support.records.turns import make_reply

TURN_TIMEOUT_S = 3.0
MAX_ATTEMPTS = 100  # of one generation; what needs more has been forgotten


@dataclass(frozen=True, slots=True)
class Sampled:
    """One generation that a trajectory went on with."""

    request: GenerateRequest
    generation: Generation


class ScheduleWorker:
    """Takes trajectories until told to stop, and keeps every generation that was used."""

    def __init__(self, worker_id: str, world: World) -> None:
        self.worker_id = worker_id
        self.sampled: list[Sampled] = []
        self._world = world
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                report = WorkerReport(self.worker_id, 4 - len(self._running), tuple(self._running))
                try:
                    orders = await self._world.ask(lambda c, report=report: c.rollouts.take(report, 0.5))
                except ServiceUnavailable:
                    await self._world.clock.sleep(0.05)
                    continue
                for assignment in orders.start:
                    task = group.create_task(self._run(assignment), name=f"run {assignment.assignment_id}")
                    self._running[assignment.assignment_id] = task
                await self._world.clock.sleep(0.1)

    async def _run(self, assignment: Assignment) -> None:
        try:
            trajectory = await self._trajectory(assignment)
            for _ in range(MAX_ATTEMPTS):
                try:
                    await self._world.ask(lambda c: c.rollouts.finish(self.worker_id, trajectory))
                    return
                except (OSError, ServiceUnavailable):
                    await self._world.clock.sleep(0.2)
            raise AssertionError(f"{assignment.assignment_id} could not be handed in")
        finally:
            del self._running[assignment.assignment_id]

    async def _trajectory(self, assignment: Assignment) -> Trajectory:
        rng = Random(f"{assignment.assignment_id}@{assignment.attempt}")
        path = GrowingPath()
        path.start([rng.randrange(1000) for _ in range(rng.randint(1, 40))])
        leased = _Leased(self._world, assignment)
        for turn in range(assignment.task.limits.max_turns):
            if turn:
                path.add_observed([rng.randrange(1000) for _ in range(rng.randint(1, 10))])
                await self._world.clock.sleep(rng.uniform(0.0, 0.3))
            await self._turn(path, leased, f"{assignment.assignment_id}@{assignment.attempt}:{turn}", rng)
        return Trajectory(
            task_id=assignment.task.task_id,
            group_id=assignment.group_id,
            sample_index=assignment.sample_index,
            paths=path.paths(),
            stop_reason=StopReason.COMPLETED,
            is_complete=True,
            attempt=assignment.attempt,
            rollout_id=assignment.rollout_id,
        )

    async def _turn(self, path: GrowingPath, leased: _Leased, name: str, rng: Random) -> None:
        """One turn; what an operator's abort cut goes on where it was."""
        room = rng.randint(1, 30)
        prompt_ids, parts = path.context_ids, list[Generation]()
        for part in range(MAX_ATTEMPTS):
            sampling = SamplingParams(room, temperature=0.0, min_tokens=room)
            request = GenerateRequest(f"{name}.{part}", prompt_ids, sampling, TURN_TIMEOUT_S)
            generation = await leased.generate(request)
            self.sampled.append(Sampled(request, generation))
            parts.append(generation)
            prompt_ids += generation.token_ids
            room -= len(generation.token_ids)
            if generation.finish_reason is not FinishReason.ABORT:
                assert room == 0, f"{name}: {room} tokens are missing"
            else:
                self._world.history.counts["aborted"] += 1
            if room == 0:
                path.add_turn(make_reply(*parts))
                return
        raise AssertionError(f"{name} was aborted for ever")


class _Leased:
    """One trajectory's way to an engine."""

    def __init__(self, world: World, assignment: Assignment) -> None:
        self._world = world
        self._assignment_id = assignment.assignment_id
        self._lease = assignment.lease

    async def generate(self, request: GenerateRequest) -> Generation:
        """On a retryable failure again, elsewhere if it is the replica's. Raises what is not retryable."""
        world = self._world
        for _ in range(MAX_ATTEMPTS):
            world.watch()
            try:
                generation = await world.connect(self._lease.url).generate(request)
                check_generation(request, generation, vocab_size=1000)
                return generation
            except AgentLoopError as error:
                if not error.retryable and not isinstance(error, DeadlineExceeded):
                    raise
                world.history.counts[f"generate: {error.code}"] += 1
                if not isinstance(error, EnginePaused):
                    self._lease = await world.moved(self._assignment_id, self._lease)
                await world.clock.sleep(0.05)
        raise AssertionError(f"{request.request_id} found no replica")


def make_work(rng: Random) -> tuple[RolloutGroup, ...]:
    """A few groups of multi-turn trajectories."""

    def task(number: int) -> RolloutTask:
        limits = RolloutTask("", ()).limits
        limits = type(limits)(max_turns=rng.randint(1, 4))
        return RolloutTask(f"task-{number}", (), limits=limits)

    return tuple(RolloutGroup(f"g{n}", task(n), rng.randint(1, 3), "r") for n in range(rng.randint(2, 4)))
