"""Programs that run in a trainer's own environment, with this checkout's sources."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.service.programs import output_of

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "parts" / "trainers" / "programs"
PROGRAM_TIMEOUT_S = 400


async def run_program(trainer: str, program: str, *arguments: str) -> dict[str, Any]:
    """Run one of `tests/parts/trainers/programs` in a trainer's environment; returns the last JSON that it printed.

    Its errors fail the test. TRAINER_ENVIRONMENTS names another folder than `.venv/trainers`.
    """
    python = _python_of(trainer)
    paths = (ROOT, ROOT / "servers", ROOT / "tools", ROOT / "examples")
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command, home = (python, PROGRAMS / program, *arguments), os.environ.get("HOME", "/")
    out = await output_of(*command, home=home, timeout_s=PROGRAM_TIMEOUT_S, cwd=ROOT, env=environment)
    return json.loads(out.splitlines()[-1])


def _python_of(trainer: str) -> Path:
    environments = Path(os.environ.get("TRAINER_ENVIRONMENTS", ROOT / ".venv" / "trainers"))
    python = environments / trainer / "bin" / "python"
    assert python.exists(), f"no environment for {trainer}: run `make test-trainers`"
    return python
