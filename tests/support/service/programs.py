"""Programs that a test runs in another environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path


async def output_of(
    *command: str | Path, home: str | Path, timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] = {}
) -> str:
    """Run a program to its end with only PATH from this process's environment, and return its output.

    Its errors fail the test.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out.decode()[-2000:], err.decode()[-6000:])
    return out.decode()
