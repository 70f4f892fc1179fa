"""Stateful tools in isolated trajectories: opened in the process, visible to the reward there, and closed."""

from __future__ import annotations

from agentloop.types import StopReason
from tests.parts.isolation.isolated_worker import isolated_worker
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.life import ending
from tests.support.fleet.worker import task

GARDEN = "tests.support.fleet.life:Garden"
REWARD = "tests.support.fleet.life:number_of_words"


async def test_a_tool_is_opened_and_its_reward_sees_it_in_a_process():
    given = {"tools": ("garden",), "reward": REWARD}
    tasks = [
        task("good", tool_setup={"garden": {"words": ["oak"]}}, **given),
        task("bad", tool_setup={"garden": {"open": "raise"}}, **given),
    ]
    feeder, engine = FakeCoordinator(tasks), scripted_engine(call("garden", word="fir"), "Done.")
    async with isolated_worker(
        feeder, engine, tools={"garden": GARDEN}, capacity=1, own_s=lambda tools: 60.0 * len(tools)
    ) as runs:
        await feeder.is_done.wait()
    assert ending(feeder.records["good/0"]) == (StopReason.COMPLETED, None, 3.0)
    failed = (StopReason.TOOL_FAILED, "tool 'garden' cannot be opened: OSError: no soil", None)
    assert ending(feeder.records["bad/0"]) == failed
    assert runs.num_started <= 2
