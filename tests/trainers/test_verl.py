"""Our manager and checkpoint engine under verl's own classes, as far as verl runs without a GPU."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.service.trainer_programs import ROOT, run_program
from tests.support.service.whole_service import simulated_config, whole_service
from tests.support.transfer.receiving import ReceivingFleet

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture
async def push_url():
    """A front door whose fleet receives what is pushed, and the fleet."""
    fleet, coordinator = ReceivingFleet(), FakeCoordinator()
    coordinator.on_update = fleet.take
    coordinator.weight_dtypes = ["float32"]
    async with serving(create_app(coordinator, ReversingEngine().connect, Keys())) as url:
        yield url, fleet
    fleet.close()


async def test_verl_s_replay_buffer_takes_what_the_manager_put(tmp_path, push_url) -> None:
    url_of_fleet, fleet = push_url
    async with whole_service(simulated_config(), tmp_path) as url:
        seen = await run_program("verl", "verl_manager.py", url, url_of_fleet)
    assert (seen["trainer"], seen["n"]) == ("AgentLoopTrainer", 2)
    [received] = fleet.received
    expected = load_file(ROOT / "examples" / "tiny_policy" / "v1" / "model.safetensors")
    assert received.keys() == expected.keys()
    assert all(received[name].equal(tensor.float()) for name, tensor in expected.items())
    assert seen["pushed"]["num_of_others"] == 0
    assert seen["pushed"]["agentloop/update_s"] >= 0
    # Three groups of two; the fourth, whose tool nobody has, is a failure that verl evicts.
    assert len(seen["keys"]) >= 6
    assert {key.rsplit("_", 2)[0] for key in seen["keys"]} == {f"{at:08d}-0000" for at in range(3)}
    assert {key.rsplit("_", 2)[1] for key in seen["keys"]} == {"0", "1"}
    for place, tag in enumerate(seen["tags"]):
        assert tag["status"] == "success"
        assert tag["min_global_steps"] == tag["max_global_steps"] == 0
        assert [version for version, _, _ in tag["weight_versions"]] == [0] * len(tag["weight_versions"])
        assert tag["seq_len"] == tag["prompt_len"] + tag["response_len"] == seen["lengths"]["input_ids"][place]
        for name in ("response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "responses"):
            assert seen["lengths"][name][place] == tag["response_len"], name
    assert seen["evicted"]["training/rollout_failure/evicted_samples"] == 1
    assert seen["is_joined"]
    assert set(seen["rewards"]) <= {0.0, 1.0}
    assert all(logprob < 0 for logprob in seen["max_logprobs"])
