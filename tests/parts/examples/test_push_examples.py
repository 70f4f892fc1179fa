"""The examples that push tensors, against the real HTTP app and a fleet that receives the tensors."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentloop.plugins import resolve
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.service.whole_service import whole_service
from tests.support.transfer.receiving import ReceivingFleet

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fleet():
    fleet = ReceivingFleet()
    yield fleet
    fleet.close()


def front_door(fleet):
    coordinator = FakeCoordinator()
    coordinator.on_update = fleet.take
    coordinator.weight_dtypes = ["float32"]
    return serving(create_app(coordinator, ReversingEngine().connect, Keys()))


async def test_a_torch_process_pushes_its_parameters(fleet, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main = resolve("examples.06_torch_push:main", param="example")
    async with front_door(fleet) as url:
        await main(url, 3)
    [received] = fleet.received
    expected = load_file(ROOT / "examples/tiny_policy/v1/model.safetensors")
    assert received.keys() == expected.keys()
    assert all(received[name].equal(tensor.float()) for name, tensor in expected.items())
    output = capsys.readouterr().out
    assert "version 3: moved in" in output
    assert "replica-1: " in output


@pytest.mark.long
async def test_two_fsdp_ranks_push_after_each_step(fleet):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with front_door(fleet) as url, asyncio.timeout(180):
        outputs = await asyncio.gather(*(run_rank(rank, port, url) for rank in range(2)))
    first, second = fleet.received
    expected = load_file(ROOT / "examples/tiny_policy/v1/model.safetensors")
    assert first.keys() == second.keys() == expected.keys()
    assert all(first[name].shape == tensor.shape for name, tensor in expected.items())
    assert not any(first[name].equal(second[name]) for name in expected)
    assert "version 2: stall 20 ms" in outputs[0]


async def run_rank(rank, port, url):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "examples/07_fsdp_push.py",
        url,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.engine
@pytest.mark.long
async def test_engines_with_random_weights_make_sense_after_a_push(tmp_path, capsys, monkeypatch):
    """The weights are pushed over dummy weights, first with vLLM's own verbs and then with our client."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = resolve("examples.13_sense:main", param="example")
    async with whole_service(ServiceConfig.load(ROOT / "examples" / "13_sense.yaml"), tmp_path) as url:
        for is_native in (True, False):
            noise, sense = await main(url, is_native, num_tasks=4)
            assert noise == 0 < sense
    output = capsys.readouterr().out
    assert "ready: False, version: None" in output
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("version")] == [
        f"version {version}" for version in range(4)
    ]
