"""A vLLM engine over several hosts loses one of them; simulated on one host by a fake that reports the loss."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentloop.errors import EngineError, EngineLost
from agentloop.types import GenerateRequest, SamplingParams
from agentloop_servers.engines.vllm.config import HostShare
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.net.tcp import listening_socket
from tests.contract.policy_model import POLICY
from tests.contract.vllm_case import vllm_config

LOST = "the part of engine vllm on 10.0.0.7 is lost: its process ended with status 1"
GROUP = """
import os, subprocess, sys
from agentloop_servers.engines.vllm.headless import guard
if os.fork() == 0:
    guard()
obedient = subprocess.Popen(["sleep", "600"])
deaf = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
print(obedient.pid, deaf.pid, flush=True)
obedient.wait()
"""


class OneOtherHost:
    """Another host without a part of the engine."""

    tell: Callable[[str], None]
    is_closed = False

    def __init__(self, *, is_lost: bool = False) -> None:
        self._is_lost = is_lost

    async def start(self, on_lost: Callable[[str], None]) -> HostShare:
        self.tell = on_lost
        if self._is_lost:
            on_lost(LOST)
        with listening_socket("127.0.0.1") as probe:
            return HostShare(1, 0, "127.0.0.1", "127.0.0.1", probe.getsockname()[1])

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.engine
@pytest.mark.long
async def test_a_lost_host_ends_the_engine_and_its_requests_at_once() -> None:
    other = OneOtherHost()
    engine = VllmEngine(vllm_config(Path(POLICY) / "v0"), other)
    await engine.start()
    try:
        (core,) = multiprocessing.active_children()
        sampling = SamplingParams(max_tokens=900, min_tokens=900)
        call = asyncio.create_task(engine.generate(GenerateRequest("r", (1, 2, 3), sampling)))
        while engine.load().num_steps < 3:
            await asyncio.sleep(0.01)
        other.tell(LOST)
        with pytest.raises(EngineLost):
            await asyncio.wait_for(call, 60.0)
        with pytest.raises(EngineLost) as lost:
            await engine.check_health()
        assert lost.value.message == LOST
        core.join(5.0)
        assert core.exitcode is not None
    finally:
        await engine.close()
    assert other.is_closed


async def start_and_lose() -> None:
    """Start an engine whose other host is lost at once, and print the error."""
    other = OneOtherHost(is_lost=True)
    try:
        await VllmEngine(vllm_config(Path(POLICY) / "v0"), other).start()
    except EngineError as error:
        print(error.message, multiprocessing.active_children(), other.is_closed)


@pytest.mark.engine
@pytest.mark.long
def test_a_start_without_the_other_host_is_given_up() -> None:
    """Runs in a separate process, because a vLLM that fails to start leaves sockets open."""
    code = f"import asyncio; from {__name__} import start_and_lose; asyncio.run(start_and_lose())"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == f"vLLM did not start: {LOST} [] True"


@pytest.mark.slow
def test_the_group_of_a_headless_process_ends_with_its_stdin_even_if_it_is_killed() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", GROUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    members = [psutil.Process(int(pid)) for pid in leader.stdout.readline().split()]
    leader.kill()
    leader.wait()
    assert all(member.is_running() for member in members)
    leader.stdin.close()
    leader.stdout.close()
    gone, left = psutil.wait_procs(members, 10.0)
    assert (len(gone), left) == (2, [])
