"""`agentloop export --format hf` as read by the package `datasets`, in its own environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentloop.storage.trajectory_store import STORE_NAME
from agentloop_servers.cli.commands import app
from tests.support.records.samples import fill_store, make_group, make_path, make_trajectory

pytestmark = [pytest.mark.clients, pytest.mark.slow]

PYTHON = Path(__file__).parents[2] / ".venv" / "clients" / "datasets" / "bin" / "python"
PROGRAM = """
import json, sys
from datasets import load_dataset
found = load_dataset(sys.argv[1])
rows = found["train"]
print(json.dumps({"splits": list(found), "types": str(rows.features.arrow_schema.types), "rows": rows.to_list()}))
"""


def test_a_run_is_loaded_as_it_is_stored(tmp_path: Path) -> None:
    assert PYTHON.exists(), "no environment for datasets: run `make test-clients`"
    forked = make_trajectory("b", 0, paths=(make_path(), make_path(((1, 0, 3), (2, 5, 8)))))
    records = [make_trajectory("a", 0), make_trajectory("a", 1, paths=(), reward=None), forked]
    fill_store(tmp_path / STORE_NAME, {"r": [make_group("a", 2), make_group("b", 1)]}, records)
    for format in ("hf", "parquet"):
        assert CliRunner().invoke(app, ["export", str(tmp_path), "--format", format]).exit_code == 0
    stored = pq.read_table(tmp_path / "trajectories.parquet")
    folder = tmp_path / "trajectories.hf"
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["splits"] == ["train"]
    shard = pq.read_table(folder / "data" / "00000.parquet")
    assert found["types"] == str(shard.schema.types).replace("element: ", "item: ")
    assert found["rows"] == shard.to_pylist()
    assert list(found["rows"][0]) == stored.column_names
    assert len(found["rows"]) == stored.num_rows == 4
