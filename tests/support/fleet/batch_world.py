"""The whole service in virtual time. Its clients are trainers that consume batches: `RolloutClient.batches`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import cast

from agentloop.api.coordinator import FrontPort, Page, RolloutStatus, RolloutTerms
from agentloop.client.batches import BatchPosition, BatchRule, Carry, batches_of
from agentloop.client.rollout import Rollout
from agentloop.errors import NotFound
from agentloop.types import RolloutGroup, RolloutTask
from tests.support.fleet.faulty_link import FaultyPort, Stall
from tests.support.fleet.whole_world import CALLS, WholeWorld, make_groups

TRAINING_S = 3.0  # the longest time between two batches


class BatchWorld(WholeWorld):
    """The complete state of one schedule."""

    async def roll_out(self, rollout_id: str, groups: tuple[RolloutGroup, ...]) -> None:
        """Consume all batches of some tasks.

        Check that each batch is complete, that no group is repeated, and that none is missing, unless batches
        cancel groups.
        """
        rng = Random(f"batches of {rollout_id} {self.seed}")
        front = cast(FrontPort, FaultyPort(self.network, CALLS, self._deliver, Stall(self.clock)))
        service, num_samples, limit = _Insisting(self, front), rng.randint(1, 3), groups[0].staleness
        lots = (groups, make_groups(rng, f"{rollout_id}b", 0.0), make_groups(rng, f"{rollout_id}c", 0.0))
        tasks = [replace(one.task, task_id=f"t{number}") for number, one in enumerate(sum(lots, ()))]
        rule = BatchRule(rng.randint(1, 3), rng.choice((1.0, 1.5, 2.5)), rng.choice(tuple(Carry)))
        acknowledge, taken = rng.random() < 0.5, list[str]()
        # A trainer can only return to a batch whose records are kept and whose groups still run.
        may_restart = not acknowledge and rule.carry is Carry.NEXT

        async def submit(new: Sequence[RolloutTask], first: int) -> Rollout:
            name, rollout = f"{rollout_id}-{first}", Rollout(service)
            rollout.expect(name, len(new), num_samples)
            self.ledger.acknowledging |= {name} if acknowledge else set()
            await service.submit(
                name, tuple(RolloutGroup(one.task_id, one, num_samples, name, limit) for one in new)
            )
            return rollout

        position, num_trained, restarts = (
            BatchPosition(rollout_id),
            0,
            Random(f"restarts of {rollout_id} {self.seed}"),
        )
        is_over = False
        while not is_over:
            rollout, taken = Rollout(service), taken[:num_trained]
            rollout.continue_at(position.parts)
            batches = batches_of(
                rollout, tasks, rule, submit, acknowledge=acknowledge, position=position, num_samples=num_samples
            )
            is_over = True
            async for batch in batches:
                for group in batch.groups:
                    assert {one.sample_index for one in group} == set(range(num_samples)), f"{group} is not whole"
                    assert len({(one.rollout_id, one.group_id) for one in group}) == 1, f"{group} are of several"
                taken += [group[0].task_id for group in batch.groups]
                self.history.counts["batches"] += 1
                self.history.counts["carried groups"] += sum(age > 0 for age in batch.ages)
                if rule.carry is Carry.CANCEL:
                    self.history.counts["groups that ended with their batch"] += batch.num_unfinished
                if restarts.random() < 0.5:  # a checkpoint
                    position, num_trained = BatchPosition.decode(batch.position), len(taken)
                await self.clock.sleep(rng.uniform(0.0, TRAINING_S))
                if may_restart and restarts.random() < 0.3:
                    self.history.counts["restarts of a trainer"] += 1
                    is_over = False
                    break
            await batches.aclose()
        assert len(set(taken)) == len(taken), f"{rollout_id} has groups in two batches: {taken}"
        missing = {one.task_id for one in tasks} - {*taken}
        assert rule.carry is Carry.CANCEL or not missing, f"{rollout_id} has {missing} in no batch"


class _Insisting:
    """The client's side of a rollout: it retries calls that can succeed later, and records the answers."""

    def __init__(self, world: BatchWorld, front: FrontPort) -> None:
        self._world = world
        self._front = front
        self._read_to = defaultdict[str, int](int)

    async def submit(self, rollout_id: str, groups: tuple[RolloutGroup, ...]) -> None:
        ledger = self._world.ledger
        await self._world.insist(lambda: self._front.submit(rollout_id, groups, RolloutTerms()))
        ledger.accepted[rollout_id] = groups
        ledger.delivered[rollout_id], ledger.skipped[rollout_id] = [], set()

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        self._world.ledger.cancelling.add(rollout_id)
        status = await self._world.insist(lambda: self._front.cancel(rollout_id))
        self._world.ledger.cancelled.add(rollout_id)
        return status

    async def acknowledge(self, rollout_id: str, cursor: int) -> RolloutStatus:
        return await self._world.insist(lambda: self._front.acknowledge(rollout_id, cursor))

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """Return the status of a rollout. Raises NotFound, without a retry, if it was never submitted."""
        if rollout_id not in self._world.ledger.accepted:
            raise NotFound(f"unknown rollout {rollout_id}")
        return (await self._world.insist(lambda: self._front.read(rollout_id, 1 << 60, 1, 0.0))).decoded().status

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        read = await self._world.insist(lambda: self._front.read(rollout_id, after, limit, wait_s))
        page = read.decoded()
        delivered, is_repeated = self._world.ledger.delivered[rollout_id], after < self._read_to[rollout_id]
        # An earlier process of this trainer may have read the first records.
        known = {(one.group_id, one.sample_index) for one in delivered} if is_repeated else set()
        delivered += [one for one in page.trajectories if (one.group_id, one.sample_index) not in known]
        self._read_to[rollout_id] = max(self._read_to[rollout_id], page.cursor)
        return page
