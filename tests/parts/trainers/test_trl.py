"""TRL's own trainers on the service with two real engines, in a separate environment: `make test-trainers`."""

from __future__ import annotations

import asyncio

import pytest

from agentloop.client.client import RolloutClient
from agentloop_servers.config.service import ServiceConfig
from tests.support.service.trainer_programs import ROOT, run_program
from tests.support.service.whole_service import whole_service

pytestmark = [pytest.mark.trainers, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def url(tmp_path_factory):
    config = ServiceConfig.load(ROOT / "servers" / "cpu_push.yaml")
    assert config.num_replicas == 2
    async with whole_service(config, tmp_path_factory.mktemp("run")) as found:
        yield found


async def is_idle(url: str) -> bool:
    """Return True if the service has ended all work of a trainer that has left."""
    async with RolloutClient(url) as client:
        for _ in range(100):
            status = await client.status()
            if status.queue.num_queued == 0 and sum(one.num_running for one in status.rollouts) == 0:
                return True
            await asyncio.sleep(0.1)
    return False


async def test_async_grpo_trains_on_two_engines_with_a_push_after_each_step(url: str) -> None:
    seen = await run_program("trl", "trl_async.py", url, "4")
    steps = [entry for entry in seen["history"] if "ratio" in entry]
    assert len(steps) == 4
    assert seen["versions"] == [1, 2, 3, 4, 5]  # the first pushes the weights that TRL loaded; then one per step
    assert seen["moved"] > 1e-4  # the policy was trained
    assert seen["group_sizes"] == [4]
    # A row's version is the version of its oldest trained token, in TRL's count; no row is older than allowed.
    assert seen["num_taken"] > 0
    assert seen["wrong_versions"] == 0
    assert 0 <= seen["staleness"][0] <= seen["staleness"][1]
    # The weights arrived: transformers, with each version's weights, computes the recorded logprobs.
    assert seen["num_mixed"] > 0  # some rows have tokens of several versions
    assert seen["recomputed"]["num_tokens"] > 500
    assert seen["recomputed"]["max_difference"] < 1e-3
    assert seen["recomputed"]["k3"] < 1e-6
    assert seen["recomputed"]["k3_of_another_version"] > 100 * seen["recomputed"]["k3"]
    # Before the first push of a trained version the staleness is 0 and the ratio is 1.
    assert steps[0]["sample/staleness_max"] == 0
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-3)
    assert steps[0]["kl"] < 1e-6
    for step in steps:
        assert step["ratio"] == pytest.approx(1, abs=0.2)
        assert step["kl"] < 0.05
        assert step["sample/staleness_max"] <= 3
    logged = set().union(*steps)
    assert {f"rollout/{name}" for name in LOGGED} | {"reward", "weights/stall_s"} <= logged
    # Stopped, restarted under its run id, and stopped for good: nothing is left in the process or the service.
    assert seen["again"] == 5
    assert seen["is_empty"]
    assert seen["threads"] == []
    assert await is_idle(url)


LOGGED = ("reward", "success", "staleness", "mixed_version_share", "wasted_token_share", "failed_share")


async def test_grpo_corrects_by_the_recorded_logprobs_and_pushes_before_each_rollout(url: str) -> None:
    async with RolloutClient(url) as client:
        before = (await client.status()).weight_version
    assert before is not None
    seen = await run_program("trl", "trl_sync.py", url, "3")
    assert "temperature" in seen["refusal"] or "sampled at" in seen["refusal"]
    steps = [entry for entry in seen["history"] if "sampling/importance_sampling_ratio/mean" in entry]
    assert len(steps) == 3
    for step in steps:  # on-policy: each rollout uses the weights of the current step
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
        assert step["rollout/mixed_version_share"] == 0
    assert sorted({version for pair in seen["versions"] for version in pair}) == [
        before + 1,
        before + 2,
        before + 3,
    ]
    assert await is_idle(url)


async def test_grpo_in_server_mode_trains_with_the_service_as_its_vllm_server(url: str) -> None:
    async with RolloutClient(url) as client:
        before = (await client.status()).weight_version
        assert before is not None
        seen = await run_program("trl", "trl_server.py", url, "3")
        assert (await client.status()).weight_version == before + 3
    steps = [entry for entry in seen["history"] if "sampling/importance_sampling_ratio/mean" in entry]
    assert len(steps) == 3
    for step in steps:  # each rollout used the weights of its step, so the trainer computes the same logprobs
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
    assert await is_idle(url)
