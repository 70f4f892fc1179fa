"""`agentloop rollout --model NAME` with default settings: a real vLLM replica of SmolLM2, four samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentloop.client.rollout import load_tasks
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop_models.fetch import cache_folder, is_complete
from agentloop_verify.check_logprobs import check_logprobs, plain_references

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
NAME = "smollm2-135m-instruct-q4_1"


def test_a_published_model_rolls_out_by_its_name_and_its_logprobs_are_reproduced(tmp_path: Path) -> None:
    if not is_complete(cache_folder() / NAME):
        pytest.skip(f"needs {NAME} in {cache_folder()}: agentloop models fetch {NAME}")
    shipped = ROOT / "examples" / "data" / "short_answers.jsonl"
    assert len(load_tasks(shipped)) == 32
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(shipped.read_text().splitlines(keepends=True)[:2]))
    command = ["rollout", "--model", NAME, "--tasks", str(tasks), "--samples", "2", "--out", str(tmp_path)]
    process = subprocess.run(
        [sys.executable, "-m", "agentloop_servers.cli", *command],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    run_dir = (tmp_path / "latest").resolve()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["lost"] == 0
    rows = pq.read_table(run_dir / "trajectories.parquet").to_pylist()
    assert len(rows) == 4
    assert all(row["answer"].strip() for row in rows)
    assert (run_dir / "report.html").is_file()
    saved = json.loads((run_dir / "config.json").read_text())
    assert (saved["model"], saved["endpoint"]["model_name"]) == (str(cache_folder() / NAME), NAME)
    assert (saved["replicas"], saved["engine"]["max_context_tokens"]) == (1, 2048)
    check = check_logprobs(
        run_dir / STORE_NAME, cache_folder() / NAME, {}, plain_references("cpu", "float32"), max_trajectories=4
    )
    assert check.k3_by_span is not None
    assert check.k3_by_span < 1e-4
