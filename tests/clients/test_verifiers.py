"""The bridge to verifiers, in its own environment: its taskset and harness, our session, its reward."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentloop.agents.program import AgentProgram
from agentloop.agents.runner import AgentRecord, run_agents
from agentloop.client.client import RolloutClient
from agentloop.types import Message, RolloutTask, StopReason
from tests.support.service.whole_service import simulated_config, whole_service

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "verifiers" / "bin" / "python"


def task(name: str) -> RolloutTask:
    return RolloutTask(name, (Message("user", "said by the taskset"),))


async def test_a_taskset_runs_on_sessions_and_its_reward_is_theirs(tmp_path: Path, monkeypatch) -> None:
    assert PYTHON.exists(), "no environment for verifiers: run `make test-clients`"
    monkeypatch.setenv("PATH", f"{PYTHON.parent}:{os.environ['PATH']}")  # its harness is run by `uv`
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "verifiers"))
    bridge = AgentProgram.command(f"{PYTHON} {ROOT / 'examples' / '12_verifiers.py'}")
    async with whole_service(simulated_config(replicas=1), tmp_path) as url, RolloutClient(url) as client:
        tasks = [task("counting-taskset/1"), task("no-such-taskset/0")]
        with bridge:
            found: dict[str, AgentRecord] = {}
            await run_agents(client, bridge, tasks, on_record=lambda one: found.update({one.task_id: one}))
    record, failed = found["counting-taskset/1"], found["no-such-taskset/0"]
    assert record.trajectory is not None
    assert record.trajectory.stop_reason is StopReason.COMPLETED
    question, answer = record.trajectory.messages[-2:]
    assert question.content == "Count to 4."
    assert record.trajectory.reward == 1.0 + len(answer.content.strip())  # verifiers strips replies
    assert "no_such_taskset" in (failed.error or "")
