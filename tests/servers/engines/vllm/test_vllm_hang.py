"""A vLLM engine whose process stops: its replica detects this, fails its requests and ends it."""

import asyncio
import multiprocessing
import os

import pytest

from agentloop.errors import EngineLost
from agentloop.types import GenerateRequest, SamplingParams
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.server import Replica, ReplicaConfig
from tests.contract.vllm_case import vllm_config
from tests.servers.processes import stop_process
from tests.support.fleet.directory import Directory
from tests.support.transfer.adapters import POLICY

pytestmark = [pytest.mark.engine, pytest.mark.long]


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_stopped_engine_process_is_found_by_its_steps_and_ended():
    engine, directory = VllmEngine(vllm_config(POLICY)), Directory()
    limits = ReplicaConfig(heartbeat_interval_s=0.2, stall_timeout_s=8.0, first_step_timeout_s=60.0)
    trust = Trust("secret")
    replica, clients = Replica("r", engine, directory, trust, "127.0.0.1", config=limits), EngineClients(trust)
    children = set(multiprocessing.active_children())
    await replica.start()
    try:
        (core,) = set(multiprocessing.active_children()) - children
        remote = clients.connect(replica.url)
        prompt = tuple(range(10, 800))
        await remote.generate(GenerateRequest("good", prompt, SamplingParams(max_tokens=20)))
        assert engine.load().num_steps >= 20
        calls = [
            asyncio.create_task(
                remote.generate(
                    GenerateRequest(f"r{number}", prompt, SamplingParams(max_tokens=200, min_tokens=200))
                )
            )
            for number in range(3)
        ]
        while engine.load().num_running < 3:
            await asyncio.sleep(0.01)
        stop_process(core.pid)
        async with asyncio.timeout(60):
            for call in calls:
                with pytest.raises(EngineLost):
                    await call
            with pytest.raises(EngineLost, match="hung: no step for"):
                await replica.check_health()
            while is_there(core.pid):
                core.join(0)
                await asyncio.sleep(0.1)
        assert len(directory.left) == 1
    finally:
        await replica.close()
        await clients.close()
