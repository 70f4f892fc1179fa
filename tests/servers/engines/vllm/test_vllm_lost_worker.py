"""One worker of a tensor-parallel vLLM engine is killed: the engine ends with all its processes.

On a GPU host this needs two GPUs.
"""

import asyncio

import psutil
import pytest
import torch

from agentloop.errors import EngineLost
from agentloop.types import GenerateRequest, SamplingParams
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.vllm_case import vllm_config
from tests.support.transfer.adapters import POLICY

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs"),
]


def processes() -> set[psutil.Process]:
    """Return this process's descendants except multiprocessing's resource tracker, which stays."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "resource_tracker" not in "".join(child.cmdline())}


async def test_a_killed_worker_ends_the_engine() -> None:
    can_sleep = torch.cuda.is_available()
    before = processes()
    engine = VllmEngine(vllm_config(POLICY, tensor_parallel_size=2, can_sleep=can_sleep))
    await engine.start()
    try:
        started = processes() - before
        workers = [process for process in started if "Worker_TP" in process.name() + "".join(process.cmdline())]
        assert len(workers) == 2
        sampling = SamplingParams(max_tokens=900, min_tokens=900)
        calls = [
            asyncio.create_task(engine.generate(GenerateRequest(f"r{number}", (1, 2, 3), sampling)))
            for number in range(8)
        ]
        while engine.load().num_running < 8:
            await asyncio.sleep(0.01)
        workers[1].kill()
        async with asyncio.timeout(60):
            for call in calls:
                with pytest.raises(EngineLost):
                    await call
            with pytest.raises(EngineLost):
                await engine.check_health()
            if can_sleep:
                await engine.sleep(1)  # its processes hold no memory, so its partner's turn can start
    finally:
        await engine.close()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
