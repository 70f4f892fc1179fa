"""`agentloop rollout --agent` with default settings: real vLLM replicas, the shipped policy, unmodified agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader
from agentloop.types import Trajectory
from tests.servers.processes import processes_with

pytestmark = [pytest.mark.clients, pytest.mark.engine, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
AGENT = ("--agent", "examples.08_openai_agent:run")
COMMAND = ("--agent-command", f"{sys.executable} examples/08_openai_agent.py {{prompt}}")


@dataclass(frozen=True)
class Run:
    output: str
    rows: list[dict[str, Any]]
    records: list[Trajectory]
    summary: dict[str, Any]


def roll_out(folder: Path, num_tasks: int, *arguments: str) -> Run:
    """Run the calculator's tasks, and check that no session or process is left."""
    lines = (ROOT / "examples/data/tasks.jsonl").read_text().splitlines()
    tasks = [line for line in lines if json.loads(line)["tools"] == ["calculator"]]
    (folder / "tasks.jsonl").write_text("\n".join(tasks[:num_tasks]))
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "agentloop_servers.cli", "rollout", "--out", str(folder / "runs")]
    process = subprocess.run(
        [*command, "--tasks", str(folder / "tasks.jsonl"), *arguments],
        cwd=ROOT,
        env={**os.environ, marker: "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    assert processes_with(marker) == []
    directory = (folder / "runs" / "latest").resolve()
    store = TrajectoryReader(directory / STORE_NAME)
    [rollout_id] = {row["rollout_id"] for row in rows(directory)}
    records = [trajectory for _, trajectory in store.read(rollout_id, 0, 10_000)]
    store.close()
    summary = json.loads((directory / "summary.json").read_text())
    return Run(process.stdout, rows(directory), records, summary)


def rows(directory: Path) -> list[dict[str, Any]]:
    return pq.read_table(directory / "trajectories.parquet").to_pylist()


def test_an_openai_agent_learns_from_a_push_in_the_middle(tmp_path: Path) -> None:
    run = roll_out(tmp_path, 48, *AGENT, "--samples", "2", "--concurrency", "12")
    summary = run.summary
    assert (summary["accepted"], summary["records"], summary["lost"], summary["complete"]) == (96, 96, 0, 96)
    assert summary["stop_reasons"] == {"completed": 96}
    assert "version 1 live" in run.output
    of_version = summary["success_by_version"]
    assert of_version["1"]["num_trajectories"] >= 10
    assert of_version["1"]["success"] >= 0.95
    assert of_version["0"]["success"] < of_version["1"]["success"]
    assert len(run.rows) == 96
    for record in run.records:
        [path] = record.paths  # nothing was tokenized again
        roles = [message.role for message in record.messages]
        assert roles.count("assistant") == len(path.turns)
        assert roles[-1] == "assistant"
        assert path.response_mask.sum() == sum(turn.end - turn.start for turn in path.turns)
        assert (path.logprobs[~path.response_mask] == 0).all()
        assert (path.logprobs[path.response_mask] <= 0).all()
    assert any(len(record.path.turns) > 1 for record in run.records)


@pytest.mark.clients  # each sample has a separate process: too long for `make test`
def test_a_command_that_knows_nothing_of_us_is_recorded_too(tmp_path: Path) -> None:
    push = ("--push", "examples/tiny_policy/v1", "--push-after", "0")
    run = roll_out(tmp_path, 6, *COMMAND, "--samples", "1", "--concurrency", "2", *push)
    assert (run.summary["records"], run.summary["lost"], run.summary["complete"]) == (6, 0, 6)
    assert run.summary["success"] >= 0.5
    assert {record.group_id[-6:] for record in run.records} == {f"{index:06d}" for index in range(6)}
