"""The bridge to verifiers, in its own environment: verifiers' taskset and harness, our sessions, its rewards."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentloop.client.client import RolloutClient
from agentloop.types import StopReason
from tests.support.service.whole_service import simulated_config, whole_service

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "verifiers" / "bin" / "python"


async def run_bridge(*arguments: str) -> tuple[list[list[str]], int]:
    """Return the words of each line that the bridge prints, and its exit status."""
    paths = {"PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}  # its harness is started by `uv`
    paths["PYTHONPATH"] = f"{ROOT}:{Path(__file__).parent / 'verifiers'}"
    program = str(ROOT / "examples" / "12_verifiers.py")
    pipe = asyncio.subprocess.PIPE
    bridge = await asyncio.create_subprocess_exec(PYTHON, program, *arguments, env=os.environ | paths, stdout=pipe)
    output, _ = await bridge.communicate()
    lines = [line.split() for line in output.decode().splitlines()]
    return [words for words in lines if words[0].startswith(("counting", "rollout"))], bridge.returncode or 0


async def test_one_process_runs_a_taskset_and_its_rewards_are_verifiers(tmp_path: Path) -> None:
    assert PYTHON.exists(), "no environment for verifiers: run `make test-clients`"
    async with whole_service(simulated_config(replicas=1), tmp_path) as url, RolloutClient(url) as client:
        [*said, (_, rollout_id)], status = await run_bridge("counting-taskset", url, "2")
        trajectories = (await client.read(rollout_id)).trajectories
    assert status == 0
    found = {(one.task_id, one.sample_index): one for one in trajectories}
    assert len(found) == 6
    for task_id, sample, reward in said:
        record = found.pop((task_id, int(sample)))
        question, answer = record.messages[-2:]
        assert record.stop_reason is StopReason.COMPLETED
        assert question.content == f"Count to {int(task_id[-1]) + 3}."
        assert record.reward == float(reward) == 1.0 + len(answer.content.strip())  # verifiers strips replies
    assert not found
