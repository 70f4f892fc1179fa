"""Two training processes (FSDP2 and DDP, gloo on CPU) that push together into the real HTTP app."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import orjson
import pytest
import torch

from agentloop.engine.interface import WeightUpdate
from agentloop.errors import WeightUpdateFailed
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from tests.servers.weight_transfer.training_rank import HANGS, MANY_PASSES, REFUSED, WORLD_SIZE, make_model
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.transfer.receiving import ReceivingFleet

pytestmark = pytest.mark.slow

TIMEOUT_S = 180.0


async def run_rank(rank: int, rendezvous: Path, url: str) -> dict[str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.servers.weight_transfer.training_rank",
        str(rank),
        str(rendezvous),
        url,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return orjson.loads(output.splitlines()[-1])  # gloo also writes lines


@pytest.fixture(scope="module")
async def job(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, str]], dict[int, dict[str, torch.Tensor]]]:
    """Return each rank's results, and the tensors that the fleet received under each version."""
    coordinator, fleet = FakeCoordinator(), ReceivingFleet()
    got: dict[int, dict[str, torch.Tensor]] = {}
    is_over = asyncio.Event()

    async def take(update: WeightUpdate) -> None:
        if update.version == HANGS:
            await is_over.wait()
        if update.version == REFUSED:
            raise WeightUpdateFailed("replica-1: no such tensor")
        if update.version != MANY_PASSES:
            await fleet.take(update)
            got[update.version] = fleet.received[-1]

    coordinator.on_update = take
    rendezvous = tmp_path_factory.mktemp("job") / "rendezvous"
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            serving(create_app(coordinator, ReversingEngine().connect, Keys())) as url,
        ):
            seen = await asyncio.gather(*(run_rank(rank, rendezvous, url) for rank in range(WORLD_SIZE)))
            is_over.set()
    finally:
        fleet.close()
    return list(seen), got


Job = tuple[list[dict[str, str]], dict[int, dict[str, torch.Tensor]]]


@pytest.mark.parametrize(("name", "version", "seed"), [("fsdp", 1, 1), ("ddp", 2, 2), ("after it", 9, 1)])
def test_all_ranks_get_the_report_and_the_fleet_gets_whole_tensors(
    job: Job, name: str, version: int, seed: int
) -> None:
    ranks, got = job
    assert {rank[name] for rank in ranks} == {f"version {version} from 0, 1 replica(s)"}
    expected = dict(make_model(seed).named_parameters())
    assert list(got[version]) == list(expected)
    assert all(got[version][name].equal(tensor.detach()) for name, tensor in expected.items())


def test_one_rank_alone_sends_what_it_has_whole(job: Job) -> None:
    (first, _), got = job
    assert first["alone"].startswith("version 6 ")
    assert got[6]["0.weight"].equal(dict(make_model(6).named_parameters())["0.weight"].detach())
    assert "'0.weight' is sharded over 2 ranks" in first["a shard alone"]


def test_ranks_that_bring_different_tensors_all_hear_of_it(job: Job) -> None:
    ranks, got = job
    for rank in ranks:
        assert rank["mismatch"].startswith("invalid_request: ranks 0 and 1 differ: 5 tensors for version 3 and 4")
        assert "5 tensors for version 3 and 5 tensors for version 4" in rank["version mismatch"]
    assert ranks[0]["no tensor"].startswith("invalid_request: rank 1: 'a' is a str, not a tensor")
    assert ranks[1]["no tensor"].startswith("invalid_request: 'a' is a str, not a tensor")
    assert not got.keys() & {3, 4}


def test_all_ranks_raise_what_the_service_raised(job: Job) -> None:
    assert {rank["refused"] for rank in job[0]} == {"weight_update_failed: replica-1: no such tensor"}


def test_every_pass_gathers_on_all_ranks(job: Job) -> None:
    ranks, _ = job
    assert {rank["passes"] for rank in ranks} == {f"version {MANY_PASSES} from 0, 1 replica(s)"}
    assert [rank["equal passes"] for rank in ranks] == ["[3]", "[]"]


def test_a_cancelled_sender_tells_the_others(job: Job) -> None:
    assert job[0][0]["cancelled"] == "cancelled"
    assert job[0][1]["cancelled"].startswith("weight_update_failed: rank 0: CancelledError")


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(job: Job) -> None:
    first = job[0][0]
    assert first["nobody came"].startswith("deadline_exceeded: the other ranks did not call push within 1 s")
    assert first["broken"].startswith("weight_update_failed: the ranks lost their connection")
