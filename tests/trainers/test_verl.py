"""Our manager and checkpoint engine under verl's own classes, as far as verl runs without a GPU."""

from __future__ import annotations

import pytest

from agentloop.client import RolloutClient
from tests.support.service.trainer_programs import run_program
from tests.support.service.whole_service import simulated_config, whole_service

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(500)]


async def test_verl_s_replay_buffer_takes_what_the_manager_put(tmp_path) -> None:
    async with whole_service(simulated_config(), tmp_path) as url:
        seen = await run_program("verl", "verl_manager.py", url)
        async with RolloutClient(url) as client:
            version = (await client.status()).weight_version
    assert (seen["trainer"], seen["n"]) == ("AgentLoopTrainer", 2)
    assert version == 7  # verl's step is the service's version
    assert seen["pushed"]["num_of_others"] == 0
    assert seen["pushed"]["agentloop/update_s"] > 0
    # Three groups of two; the fourth, whose tool nobody has, is a failure that verl evicts.
    assert len(seen["keys"]) >= 6
    assert {key.rsplit("_", 2)[0] for key in seen["keys"]} == {f"{at:08d}-0000" for at in range(3)}
    assert {key.rsplit("_", 2)[1] for key in seen["keys"]} == {"0", "1"}
    for place, tag in enumerate(seen["tags"]):
        assert tag["status"] == "success"
        assert tag["min_global_steps"] == tag["max_global_steps"] == 7
        assert [version for version, _, _ in tag["weight_versions"]] == [7] * len(tag["weight_versions"])
        assert tag["seq_len"] == tag["prompt_len"] + tag["response_len"] == seen["lengths"]["input_ids"][place]
        for name in ("response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "responses"):
            assert seen["lengths"][name][place] == tag["response_len"], name
    assert seen["is_joined"]
    assert set(seen["rewards"]) <= {0.0, 1.0}
    assert all(logprob < 0 for logprob in seen["max_logprobs"])
