"""Programs that run in a trainer's own environment, beside this checkout's sources."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "parts" / "trainers" / "programs"
PROGRAM_TIMEOUT_S = 400


async def run_program(trainer: str, program: str, *arguments: str) -> dict[str, Any]:
    """Run one of `tests/parts/trainers/programs` in a trainer's environment; the JSON that it printed last.

    Its errors are the test's. TRAINER_ENVIRONMENTS names another folder than `.venv/trainers`.
    """
    python = _python_of(trainer)
    paths = (ROOT, ROOT / "servers", ROOT / "tools", ROOT / "examples")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    process = await asyncio.create_subprocess_exec(
        python,
        PROGRAMS / program,
        *arguments,
        env=environment,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-6000:]
    return json.loads(out.decode().splitlines()[-1])


def _python_of(trainer: str) -> Path:
    environments = Path(os.environ.get("TRAINER_ENVIRONMENTS", ROOT / ".venv" / "trainers"))
    python = environments / trainer / "bin" / "python"
    assert python.exists(), f"no environment for {trainer}: run `make test-trainers`"
    return python
