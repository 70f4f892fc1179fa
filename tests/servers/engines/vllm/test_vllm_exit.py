"""The processes of a vLLM engine end with the process that started it, for any end of that process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine

PROGRAM = """
import asyncio
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.policy_model import POLICY
from tests.contract.vllm_case import vllm_config

async def main():
    engine = VllmEngine(vllm_config(POLICY / "v0"))
    await engine.start()
    print("up", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_engine_process_outlives_its_service_process(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(PROGRAM)
    started = {
        number: subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
        for number in (signal.SIGTERM, signal.SIGKILL)
    }
    below: list[psutil.Process] = []
    try:
        for process in started.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            own = psutil.Process(process.pid).children(recursive=True)
            assert any("EngineCore" in child.name() or "spawn_main" in " ".join(child.cmdline()) for child in own)
            below += own
        for number, process in started.items():
            process.send_signal(number)
        for process in started.values():
            process.wait()
        deadline_at = time.monotonic() + 60.0
        while left := [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < deadline_at, left
            psutil.wait_procs(left, timeout=1.0)
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
        for child in below:
            if child.is_running():
                child.kill()
