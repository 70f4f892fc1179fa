"""A trainer that is a Ray actor, with a real Ray: the client is used like anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from agentloop.api.coordinator import UpdateReport
from agentloop.client.client import RolloutClient
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from agentloop_servers.local import start_ray, stop_ray
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.transfer.receiving import ReceivingFleet

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_UPDATES = 2


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Any]:
    class Trainer:  # a local class, so that Ray pickles it by value
        async def train(self, url: str) -> list[UpdateReport]:
            model = torch.nn.Linear(3, 2)
            reports = []
            async with RolloutClient(url) as client:
                for version in range(1, NUM_UPDATES + 1):
                    with torch.no_grad():
                        model.weight.fill_(version)
                    reports.append(await client.update_weights(model.state_dict(), version=version))
            return reports

    start_ray(tmp_path)
    try:
        yield ray.remote(num_cpus=0)(Trainer).remote()
    finally:
        stop_ray()


async def test_an_actor_pushes_what_it_trains(trainer: Any) -> None:
    coordinator, fleet = FakeCoordinator(), ReceivingFleet()
    coordinator.on_update = fleet.take
    try:
        async with asyncio.timeout(120), serving(create_app(coordinator, ReversingEngine().connect, Keys())) as url:
            reports = await trainer.train.remote(url)
    finally:
        fleet.close()
    assert [report.version for report in reports] == [1, 2]
    assert [tensors["weight"].unique().tolist() for tensors in fleet.received] == [[1.0], [2.0]]
    assert fleet.received[0].keys() == {"weight", "bias"}
