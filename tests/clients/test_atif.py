"""`agentloop export --format atif` as read by Harbor's validator and the package `atif`, in their environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentloop.images import IMAGES_FOLDER
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop_servers.cli.commands import app
from tests.parts.view.test_atif import PNG, RECORDS
from tests.support.records.samples import fill_store

pytestmark = [pytest.mark.clients, pytest.mark.slow]

PYTHON = Path(__file__).parents[2] / ".venv" / "clients" / "harbor" / "bin" / "python"
PROGRAM = """
import json, sys
from pathlib import Path
import atif
from harbor.utils.trajectory_validator import TrajectoryValidator
found = {}
for file in sorted(Path(sys.argv[1]).glob("*.json")):
    validator = TrajectoryValidator()
    found[file.name] = [] if validator.validate(file) else validator.get_errors()
    atif.Trajectory.model_validate_json(file.read_bytes())
print(json.dumps(found))
"""


@pytest.mark.parametrize("options", [(), ("--no-prompt-ids",)])
def test_both_accept_every_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not PYTHON.exists():
        pytest.skip("needs harbor and atif in .venv/clients/harbor, an environment of Python 3.12")
    (tmp_path / IMAGES_FOLDER).mkdir()
    (tmp_path / IMAGES_FOLDER / ("ab" * 32)).write_bytes(PNG)
    fill_store(tmp_path / STORE_NAME, {"r": []}, RECORDS)
    assert CliRunner().invoke(app, ["export", str(tmp_path), "--format", "atif", *options]).exit_code == 0
    folder = str(tmp_path / "trajectories.atif")
    done = subprocess.run([PYTHON, "-c", PROGRAM, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 6
    assert {name: found for name, found in errors.items() if found} == {}


def test_the_validator_finds_an_error(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("needs harbor and atif in .venv/clients/harbor, an environment of Python 3.12")
    (tmp_path / "one.json").write_text('{"schema_version": "ATIF-v1.8", "steps": []}')
    program = PROGRAM.replace("    atif.", "    continue\n    atif.")
    done = subprocess.run([PYTHON, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["one.json"] != []
