"""The whole service in virtual time. Its model and a judge, a second fleet, share their accelerators in turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import MemoryTag
from agentloop.fleet.registry import ReplicaState
from agentloop.types import GenerateRequest, SamplingParams
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.model_turns import ModelTurns, TurnsModel
from tests.support.fleet.schedules import NOISE, World
from tests.support.fleet.whole_world import WholeWorld


class TurnsWorld(WholeWorld):
    """The complete state of one schedule. The judge has its own coordinator and trainer, and sequential calls."""

    def __init__(self, seed: int, clock: VirtualClock, checkpoint: Path, folder: Path) -> None:
        super().__init__(seed, clock, checkpoint, folder, has_words=True)
        self.judge = judge = World(seed, clock, checkpoint)
        judge.network = self.network
        judge.config = replace(judge.config, begins_asleep=True)
        self.models = (self, judge)
        self._turns: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.judge.start()
        await super().start()

    async def start_coordinator(self) -> None:
        """Start the turns too: they are a task of this model's coordinator."""
        await super().start_coordinator()
        replicas, judge = self.coordinator.replicas, self.judge

        async def wake(tags: frozenset[MemoryTag]) -> None:
            await judge.ask(lambda c: c.replicas.wake(tags))
            self.history.counts["turn of the judge"] += 1

        status = partial(judge.ask, Coordinator.status)
        policy = TurnsModel(self.coordinator.status, replicas.sleep, replicas.wake, 1)
        other = TurnsModel(status, lambda *order: judge.ask(lambda c: c.replicas.sleep(*order)), wake, 1)
        turns = ModelTurns(
            {"": policy, "judge": other}, self.clock, min_stay_s=0.5, max_wait_s=1.0, start_timeout_s=5.0
        )
        self._turns = asyncio.create_task(turns.run(), name="turns")

    async def crash_coordinator(self) -> None:
        if not self._is_down:
            await self._stop_turns()
        await super().crash_coordinator()

    async def _stop_turns(self) -> None:
        if self._turns is not None:
            assert not self._turns.done(), f"the turns have ended: {self._turns}"
            self._turns.cancel()
            await asyncio.wait([self._turns])

    async def heartbeat(self) -> None:
        await asyncio.gather(super().heartbeat(), self.judge.heartbeat())

    def watch(self) -> None:
        super().watch()
        awake = [[one.url for one in model.placeable()] for model in self.models]
        assert not all(awake), f"two models take traffic at once: {awake}"

    async def train(self) -> None:
        await asyncio.gather(super().train(), self.judge.train())

    async def talk_alike(self, session_id: str) -> None:
        await asyncio.gather(super().talk_alike(session_id), self._call_judge())

    async def _call_judge(self) -> None:
        """Call the judge's replicas in rotation, also while it sleeps."""
        numbers = count()

        async def once() -> None:
            process = self.rng.choice(tuple(self.judge.processes.values()))
            name = f"judge-{next(numbers)}"
            await process.link.generate(GenerateRequest(name, (1,), SamplingParams(max_tokens=20), 15.0))

        while await self._goes_on(1.0):
            await self.insist(once)
            self.history.counts["the judge answered"] += 1

    async def _sleep_and_wake(self) -> None:
        """Do nothing: the turns put models to sleep, not an operator."""

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Do nothing: the turns wake models, also for a waiting push."""

    async def needs_a_push(self) -> bool:
        return self._judge_needs_a_push() or await super().needs_a_push()

    async def push_until_done(self) -> None:
        if self._judge_needs_a_push():
            await self.judge.push_until_done()
        if await super().needs_a_push():
            await super().push_until_done()

    def _judge_needs_a_push(self) -> bool:
        replicas = self.judge.coordinator.replicas
        served = replicas.sync.served_source()
        if served is None or served.version in NOISE:
            return True
        can_come_back = (ReplicaState.ASLEEP, ReplicaState.READY, ReplicaState.UPDATING)
        holders = [one for one in replicas.fleet.replicas if one.state in can_come_back]
        is_relayed = self.judge.wire.can_relay and any(map(replicas.fleet.is_current, holders))
        return not served.update.is_repeatable and not is_relayed

    async def heal(self) -> None:
        await super().heal()
        await self.judge.heal()

    async def close(self) -> None:
        await self._stop_turns()
        await self.judge.close()
        await super().close()
