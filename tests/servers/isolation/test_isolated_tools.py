"""Tools with a life of their own in trajectories' processes: opened there, seen by the reward there, and closed."""

from __future__ import annotations

import asyncio

from agentloop.generation import LeaseReporter
from agentloop.parsers.by_name import get_parser
from agentloop.rollout import Toolbox, Worker, WorkerConfig
from agentloop.types import StopReason
from agentloop_servers.config import ServiceConfig
from agentloop_servers.isolation import IsolatedRuns, Setup
from tests.support.engine.scripted import POLICY, RENDERER, SPEC, call, scripted_engine
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
    document = {
        "model": str(POLICY),
        "engine": {"kind": "simulated"},
        "workers": {"tools": {"garden": GARDEN}},
    }
    limits = WorkerConfig(capacity=1, poll_s=0.05, poll_gap_s=0.001)
    reporter = LeaseReporter("w", feeder.report_leases)
    setup = Setup(ServiceConfig.model_validate(document).model_dump_json(), limits)
    await engine.start()
    runs = IsolatedRuns(setup, feeder, lambda url: engine, reporter, own_s=lambda tools: 60.0 * len(tools))
    worker = Worker(
        "w",
        feeder,
        lambda url: engine,
        RENDERER,
        get_parser("hermes"),
        Toolbox([]),
        limits,
        max_context_tokens=SPEC.max_context_tokens,
        vocab_size=RENDERER.vocab_size,
        begin=runs.begin,
        reporter=reporter,
    )
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(200):
            await feeder.is_done.wait()
    finally:
        worker.close()
        await running
        await runs.close()
        await engine.close()
    assert ending(feeder.records["good/0"]) == (StopReason.COMPLETED, None, 3.0)
    failed = (StopReason.TOOL_FAILED, "tool 'garden' cannot be opened: OSError: no soil", None)
    assert ending(feeder.records["bad/0"]) == failed
    assert runs.num_started <= 2
