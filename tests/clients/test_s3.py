"""Published versions over S3, in an environment with s3fs and moto's server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "s3" / "bin" / "python"


def test_versions_are_published_to_s3_and_followed_from_there(tmp_path: Path) -> None:
    assert PYTHON.exists(), "no environment for s3: run `make test-clients`"
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "servers"))
    ran = subprocess.run(
        [str(PYTHON), "-m", "tests.clients.s3.versions", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.endswith("all as published\n")
