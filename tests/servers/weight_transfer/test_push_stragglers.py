"""A trainer's push to a fleet with one replica that is dead, hung or late: real sender, receivers and clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from agentloop.api.coordinator import ReplicaRegistration, ServiceStatus, UpdateReport
from agentloop.client.push import PushOptions
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import PushSource, StageReport, WeightUpdate
from agentloop.errors import EngineLost
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, ReplicaState
from agentloop.fleet.replica_steps import WeightConfig
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.types import KVPolicy
from agentloop_servers.weight_transfer.simulated import ReceivedWeights
from agentloop_servers.weight_transfer.trainer import TensorPusher

TENSORS = {"w": torch.ones(4, 4), "b": torch.zeros(4)}
GRACE_S = 1.0
STAGE_TIMEOUT_S = 600.0  # the delay that one bad replica would cause for all
PATIENCE_S = 60.0  # the test's own timeout


class BadReceiver(ReceivedWeights):
    """Receives normally, unless it `hangs`, is `lost`, or arrives `late_s` after the others."""

    def __init__(self) -> None:
        super().__init__(1, can_hold=True, timeout_s=STAGE_TIMEOUT_S)
        self.fault: str | None = None

    async def stage(self, update: WeightUpdate) -> StageReport:
        match self.fault:
            case "lost":
                raise EngineLost("the process died")
            case "hung":
                await asyncio.sleep(STAGE_TIMEOUT_S)
            case "late":
                await asyncio.sleep(3 * GRACE_S)
        return await super().stage(update)


@dataclass
class PushedFleet:
    """Three replicas, of which "c" may be bad, and the port through which a pusher reaches the service."""

    sync: ReplicaSync
    fleet: Fleet
    late: LateReplicas
    bad: BadReceiver
    url: str = "http://127.0.0.1:1"
    told: list[PushSource] = field(default_factory=list)

    async def update_from(self, source: PushSource, options: PushOptions) -> UpdateReport:
        self.told.append(source)
        return await self.sync.update_weights(WeightUpdate(options.version, push=source), KVPolicy.KEEP)

    async def status(self) -> ServiceStatus:
        return ServiceStatus(True, False, self.fleet.weight_version, (), 0, (), (), update=self.sync.progress)

    def state(self, replica_id: str) -> ReplicaState:
        replica = self.fleet.get(replica_id)
        assert replica is not None
        return replica.state


@asynccontextmanager
async def pushed_fleet() -> AsyncIterator[tuple[PushedFleet, TensorPusher]]:
    clock, fleet, bad = RealClock(), Fleet(), BadReceiver()
    config = WeightConfig(stage_timeout_s=STAGE_TIMEOUT_S, straggler_grace_s=GRACE_S)
    engines = {}
    sync = ReplicaSync(fleet, lambda url: engines[url], clock, config)
    late = LateReplicas(sync, fleet, clock)
    for name in "abc":
        weights = bad if name == "c" else ReceivedWeights(1, can_hold=True, timeout_s=STAGE_TIMEOUT_S)
        engine = engines[name] = SimulatedEngine(SimulatedSpec(), clock=clock, weight_source=weights)
        await engine.start()
        fleet.register(ReplicaRegistration(name, name, engine.info, 0), clock.now())
        assert await late.bring_up(name)
    site = PushedFleet(sync, fleet, late, bad)
    pusher = TensorPusher(site)
    try:
        yield site, pusher
    finally:
        await pusher.close()
        for engine in engines.values():
            await engine.close()


@pytest.mark.parametrize("fault", ["lost", "hung", "late"])
async def test_a_push_goes_on_without_one_and_the_next_does_not_wait_for_it(fault: str) -> None:
    async with pushed_fleet() as (site, pusher):
        site.bad.fault = fault
        async with asyncio.timeout(PATIENCE_S):
            report = await pusher.push(TENSORS, PushOptions(1, late_grace_s=GRACE_S))
        assert [one.error is None for one in report.replicas] == [True, True, False]
        assert site.state("c") is ReplicaState.QUARANTINED
        assert [replica.replica_id for replica in site.fleet.placeable()] == ["a", "b"]
        site.bad.fault = "hung"
        async with asyncio.timeout(PATIENCE_S):  # independent of the sender's grace for required receivers
            await pusher.push(TENSORS, PushOptions(2, late_grace_s=STAGE_TIMEOUT_S))
        assert site.fleet.weight_version == 2
        site.bad.fault = None
        # a quarantined replica is optional
        report = await pusher.push(TENSORS, PushOptions(3, late_grace_s=GRACE_S))
        assert [one.error for one in report.replicas] == [None, None, None]
        assert [replica.replica_id for replica in site.fleet.placeable()] == ["a", "b", "c"]


async def test_the_sender_hears_at_once_of_a_replica_that_has_failed() -> None:
    async with pushed_fleet() as (site, pusher):
        site.bad.fault = "lost"
        async with asyncio.timeout(PATIENCE_S):
            report = await pusher.push(TENSORS, PushOptions(1, late_grace_s=STAGE_TIMEOUT_S))
        assert [one.error for one in report.replicas] == [None, None, "stage: the process died"]
