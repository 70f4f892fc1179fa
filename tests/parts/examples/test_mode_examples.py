"""The deployment mode examples over the whole service with simulated engines, and the refusals of each mode."""

from __future__ import annotations

import importlib

import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import AgentLoopError, InvalidRequest
from tests.support.service.whole_service import simulated_config, whole_service
from tests.support.transfer.adapters import POLICY, shipped_policy

V1 = POLICY.parent / "v1"


SHORT = {"max_context_tokens": 256}  # pseudo-random ids reach the limit


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(("staging", "staging_device"), [(None, "nowhere"), ("host", "host")])
async def test_the_hybrid_example_trains_while_the_engines_sleep(tmp_path, capsys, staging, staging_device):
    example = importlib.import_module("examples.04_hybrid")
    config = simulated_config(mode="hybrid", engine={"weight_staging": staging, **SHORT})
    async with whole_service(config, tmp_path) as url, RolloutClient(url) as client:
        await example.main(url, str(POLICY), num_steps=2, num_tasks=2)
        status = await client.status()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version")]
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2"]
    assert status.weight_version == 2
    assert status.is_ready
    assert not status.asleep
    num_bytes = sum(4 * parameter.numel() for parameter in shipped_policy().parameters())
    for report in status.updates:
        assert len(report.replicas) == 2
        for replica in report.replicas:
            assert (replica.staging_device, replica.transport, replica.error) == (staging_device, "shm", None)
            assert replica.num_bytes >= num_bytes


async def test_standalone_takes_pushes_and_directories_and_never_sleeps(tmp_path):
    async with whole_service(simulated_config(mode="standalone"), tmp_path) as url, RolloutClient(url) as client:
        report = await client.update_weights(shipped_policy().named_parameters(), version=1)
        assert [replica.staging_device for replica in report.replicas] == ["host", "host"]
        assert (await client.update_weights(V1, version=2)).version == 2
        with pytest.raises(InvalidRequest, match="standalone"):
            await client.sleep()


async def test_debug_takes_a_directory_by_hand_and_no_push(tmp_path):
    async with whole_service(simulated_config(mode="debug"), tmp_path) as url, RolloutClient(url) as client:
        assert (await client.update_weights(V1, version=1)).version == 1
        with pytest.raises(AgentLoopError, match="debug"):
            await client.update_weights(shipped_policy().named_parameters(), version=2)
        for refused in (client.sleep(), client.wake()):
            with pytest.raises(InvalidRequest, match="debug"):
                await refused
        assert (await client.status()).weight_version == 1


async def test_a_judge_never_takes_weights(tmp_path):
    async with whole_service(simulated_config(mode="colocated"), tmp_path) as url, RolloutClient(url) as client:
        with pytest.raises(InvalidRequest, match="colocated"):
            await client.update_weights(V1, version=1)
        with pytest.raises(AgentLoopError, match="colocated"):
            await client.update_weights(shipped_policy().named_parameters(), version=1)
        assert (await client.status()).weight_version == 0


async def test_a_gang_receives_with_every_worker(tmp_path):
    config = simulated_config(
        mode="standalone", replicas=1, engine={"tensor_parallel_size": 2, "data_parallel_size": 2}
    )
    async with whole_service(config, tmp_path) as url, RolloutClient(url) as client:
        assert [replica.num_workers for replica in (await client.status()).replicas] == [4]
        report = await client.update_weights(shipped_policy().named_parameters(), version=1)
        assert report.replicas[0].error is None
        assert (await client.status()).weight_version == 1
