"""The real service loses its worker process: trajectories resume from their last turn, with the same tokens."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.rollout.tool import tool
from agentloop.types import Trajectory
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from tests.benchmarks.soak_processes import Tree
from tests.support.fleet.calculator import evaluate

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "data" / "tasks.jsonl"
NUM_TASKS = 12
MIN_RESUMED = 4  # the policy answers some tasks without a call
PAUSE_S = 6.0  # per tool call: the tokens sampled before it are on disk by then


@tool(name="calculator", timeout_s=60.0)
async def slow_calculator(
    expression: Annotated[str, Field(description="An arithmetic expression, such as 12 * (3 + 4)")],
) -> str:
    """Evaluate an arithmetic expression."""
    await asyncio.sleep(PAUSE_S)
    return evaluate(expression)


TASKS = [replace(task, seed=7) for task in load_tasks(EXAMPLES)[:NUM_TASKS]]


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RolloutClient, Path]]:
    run_dir = tmp_path_factory.mktemp("run")
    config = ServiceConfig.load(ROOT / "servers" / "cpu.yaml")
    tools = {"calculator": "tests.servers.test_resumed_service:slow_calculator"}
    workers = config.workers.model_copy(update={"tools": tools})
    config = config.model_copy(update={"port": 0, "replicas": 1, "workers": workers})
    async with running_service(config, run_dir) as url, RolloutClient(url) as client:
        yield client, run_dir


async def rolled_out(client: RolloutClient) -> dict[str, Trajectory]:
    async with asyncio.timeout(200):
        return {record.task_id: record async for record in await client.submit(TASKS)}


@pytest.fixture(scope="module")
async def undisturbed(site: tuple[RolloutClient, Path]) -> dict[str, Trajectory]:
    return await rolled_out(site[0])


def workers() -> list[int]:
    """Return the worker processes of this test's service only."""
    tree = Tree(os.getpid())
    tree.refresh()
    return [process.pid for process in tree.of("worker")]


async def test_a_trajectory_goes_on_with_the_tokens_of_its_finished_turns(
    site: tuple[RolloutClient, Path], undisturbed: dict[str, Trajectory]
) -> None:
    client, run_dir = site
    rolling = asyncio.create_task(rolled_out(client))
    async with asyncio.timeout(60):
        while len(list((run_dir / "turns").glob("*"))) < MIN_RESUMED:
            await asyncio.sleep(0.1)
    (victim,) = workers()
    os.kill(victim, signal.SIGKILL)
    found = await rolling
    assert set(found) == {task.task_id for task in TASKS}
    assert all(record.is_complete for record in found.values())
    assert victim not in workers()
    resumed = [record for record in found.values() if record.num_resumed_turns]
    assert len(resumed) >= MIN_RESUMED, [(one.attempt, one.num_resumed_turns) for one in found.values()]
    for record in resumed:
        path, expected = record.path, undisturbed[record.task_id].path
        end = path.turns[record.num_resumed_turns - 1].end
        assert record.attempt >= 1
        assert path.prompt_ids.tolist() == expected.prompt_ids.tolist()
        assert path.response_ids[:end].tolist() == expected.response_ids[:end].tolist()
        assert path.response_mask[:end].tolist() == expected.response_mask[:end].tolist()
        assert path.logprobs[:end] == pytest.approx(expected.logprobs[:end], abs=1e-3)
        assert len(path.turns) > record.num_resumed_turns
    async with asyncio.timeout(60):
        while list((run_dir / "turns").glob("*")):  # no journal is left
            await asyncio.sleep(0.2)
