"""The whole service on Ray with isolated trajectories: poison tasks among good ones harm only themselves."""

from pathlib import Path

import pytest

from agentloop.client.client import RolloutClient
from agentloop.observability.logs import LOG_NAME
from agentloop.types import Limits, Message, RolloutTask, StopReason
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[3] / "servers" / "simulated.yaml"
HERE = "tests.parts.isolation.poison"


def task(name: str, **fields: object) -> RolloutTask:
    limits = Limits(max_tokens_per_turn=64, timeout_s=120)
    return RolloutTask(name, (Message("user", "What is 2 + 3?"),), limits=limits, **fields)  # type: ignore[arg-type]


async def test_poison_costs_itself(tmp_path: Path):
    config = ServiceConfig.load(CONFIG)
    workers = config.workers.model_copy(update={"isolation": "process", "max_processes": 3})
    poison = [
        task("exit", loop=f"{HERE}:Dies", reference="exit"),
        task("segfault", loop=f"{HERE}:Dies", reference="segfault"),
        task("popen", loop="subprocess:Popen"),
    ]
    good = [task(f"good{n}", reward=f"{HERE}:where") for n in range(12)]
    config = config.model_copy(update={"port": 0, "workers": workers})
    async with running_service(config, tmp_path) as url, RolloutClient(url) as client:
        rollout = await client.submit([*good[:6], *poison, *good[6:]])
        found = {record.task_id: record async for record in rollout}
    ends = {name: (found[name].stop_reason, found[name].error) for name in ("exit", "segfault")}
    assert ends == {
        "exit": (StopReason.LOOP_FAILED, "its process ended: exit status 7"),
        "segfault": (StopReason.LOOP_FAILED, "its process ended: signal 11 (SIGSEGV)"),
    }
    assert found["popen"].stop_reason is StopReason.INVALID_TASK
    assert all(found[one.task_id].is_complete and found[one.task_id].attempt == 0 for one in good)
    assert len({found[one.task_id].reward for one in good}) > 1, "their rewards are the ids of their processes"
    assert "worker_lost" not in (tmp_path / LOG_NAME).read_text()
