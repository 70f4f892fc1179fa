"""The canary check on vLLM: it has a reserved slot and KV blocks, and runs before every other request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentloop.engine.canary import CANARY_PREFIX
from agentloop.engine.interface import WeightUpdate
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, PauseMode, SamplingParams
from agentloop_servers.engines.vllm.config import prepare_environment
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.weight_transfer.worker_calls import WorkerMethod
from tests.contract.policy_model import POLICY
from tests.contract.vllm_case import vllm_config

pytestmark = pytest.mark.engine

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE = 4, 10, 32
POLICIES = ["fcfs", "priority"]
CANARY_ID, NEXT_ID = f"{CANARY_PREFIX}1", f"{CANARY_PREFIX}2"
NUM_IN_FLIGHT = 256
NUM_STEP_TOKENS = 64


def start_scheduler(policy: str) -> Any:
    config = vllm_config(POLICY / "v0", max_num_seqs=NUM_SLOTS, scheduling_policy=policy, max_model_len=256)
    prepare_environment(config)
    from tests.support.vllm_scheduler import SchedulerAlone  # noqa: PLC0415 - imports vLLM

    return SchedulerAlone(config, NUM_BLOCKS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_cache_cleared", [False, True], ids=["keep", "recompute"])
def test_the_check_runs_first_with_every_slot_and_every_block_taken(policy: str, is_cache_cleared: bool) -> None:
    scheduler, names = start_scheduler(policy), [f"r{number}" for number in range(NUM_SLOTS + 2)]
    for name in names:  # two of them wait
        scheduler.add(name, (NUM_BLOCKS - 2) // NUM_SLOTS * BLOCK_SIZE - 2)
    assert scheduler.step() == names[:NUM_SLOTS]
    assert (scheduler.num_free_blocks, scheduler.kv_use) == (0, 1.0)
    scheduler.pause(is_cache_cleared=is_cache_cleared)
    scheduler.add(CANARY_ID, 4, max_tokens=1)
    assert scheduler.step() == []
    scheduler.resume()
    assert scheduler.step() == [CANARY_ID, *names[:NUM_SLOTS]]  # the canary check shares a step with requests
    assert scheduler.names == set(names)
    assert scheduler.step() == names[:NUM_SLOTS]
    assert (scheduler.num_free_blocks, scheduler.kv_use) == (0, 1.0)


def test_the_step_of_the_check_has_no_more_tokens_than_others() -> None:
    scheduler = start_scheduler("fcfs")
    scheduler.limit_step(NUM_STEP_TOKENS)
    scheduler.add("short", NUM_STEP_TOKENS - 4)
    scheduler.add("whole", NUM_STEP_TOKENS)
    scheduler.add(CANARY_ID, 4, max_tokens=1)
    assert [scheduler.step() for _ in range(3)] == [[CANARY_ID, "short"], ["short"], ["short"]]
    scheduler.abort("short")
    assert [scheduler.step() for _ in range(2)] == [["whole"], ["whole"]]
    assert scheduler.num_tokens == [NUM_STEP_TOKENS, 1, 1, NUM_STEP_TOKENS, 1]


def test_requests_that_end_in_a_pause_cost_no_empty_step() -> None:
    scheduler = start_scheduler("fcfs")
    scheduler.add("stays", 4)
    scheduler.add("ends", 4)
    scheduler.step()
    scheduler.pause(is_cache_cleared=False)
    scheduler.abort("ends")
    assert not scheduler.has_work
    scheduler.resume()
    assert scheduler.has_work
    assert scheduler.step() == ["stays"]
    assert scheduler.reported_ended == {"ends"}


def test_an_aborted_check_leaves_its_blocks_reserved() -> None:
    scheduler = start_scheduler("fcfs")
    num_free = scheduler.num_free_blocks
    assert num_free == NUM_BLOCKS - 2 == scheduler.config.cache_config.num_gpu_blocks - 1
    scheduler.add(CANARY_ID, 4, max_tokens=1)
    scheduler.abort(CANARY_ID)  # before it is scheduled
    assert scheduler.step() == []
    scheduler.add(NEXT_ID, 4, max_tokens=9)
    assert scheduler.step() == [NEXT_ID]
    scheduler.abort(NEXT_ID)  # while it is running
    assert scheduler.step() == []
    assert (scheduler.num_free_blocks, scheduler.kv_use) == (num_free, 0.0)


class SlowEngine(VllmEngine):
    async def slow_steps(self, seconds: float) -> None:
        """Make each step take `seconds` longer from now on."""
        install = "tests.support.transfer.slow_steps:install"
        await self._process.on_workers(WorkerMethod.EXTEND_RUNNER, install, str(seconds))

    def forbid_resumes(self) -> None:
        """Allow only a commit to resume the engine's process."""

        async def resume() -> None:
            raise AssertionError("the commit has resumed the engine")

        self._process.resume = resume  # type: ignore[method-assign]


async def test_a_push_with_every_slot_taken_and_slow_steps_succeeds() -> None:
    engine = SlowEngine(vllm_config(POLICY / "v0", max_num_seqs=NUM_IN_FLIGHT, max_model_len=512))
    await engine.start()
    try:
        assert engine.info.max_running == NUM_IN_FLIGHT
        requests = [
            GenerateRequest(f"r{number}", tuple(range(5, 30)), SamplingParams(max_tokens=200, ignore_eos=True))
            for number in range(NUM_IN_FLIGHT + 16)  # some of them wait
        ]
        asked = [asyncio.create_task(engine.generate(request)) for request in requests]
        while engine.load().num_running < NUM_IN_FLIGHT or engine.load().num_sampled_tokens < NUM_IN_FLIGHT:
            await asyncio.sleep(0.05)
        await engine.slow_steps(1.0)
        engine.forbid_resumes()
        for version, policy in enumerate((KVPolicy.KEEP, KVPolicy.RECOMPUTE), start=1):
            await engine.stage(WeightUpdate(version, directory=str(POLICY / f"v{version % 2}")))
            await engine.pause(PauseMode.KEEP, policy)
            assert not any(task.done() for task in asked)
            report = await engine.commit(version, resumes=True)
            assert (engine.weight_version, engine.is_paused) == (version, False)
            assert report.canary_ms > 1000.0
        await engine.slow_steps(0.0)
        answers: list[Generation] = await asyncio.gather(*asked)
        assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
        assert {len(answer.token_ids) for answer in answers} == {200}
        assert {span.version for answer in answers for span in answer.weight_versions} == {0, 1, 2}
    finally:
        await engine.close()
