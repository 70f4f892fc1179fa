"""A process ends on SIGTERM even if its main thread waits outside Python, like a process of Ray."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROCESS = """
import asyncio, ctypes, os, signal, sys, threading, time
from agentloop_servers.processes.serve_process import end_on_sigterm

async def close():
    print("closing", flush=True)
    {close}
    print("closed", flush=True)

async def serve():
    end_on_sigterm(close, {grace_s})
    {before}
    print("ready", flush=True)
    {serve}

def told(*_):
    sys.exit(3)

signal.signal(signal.SIGTERM, told)
def run():
    try:
        asyncio.run(serve())
    except BaseException:
        os._exit(4)

threading.Thread(target=run, daemon=True).start()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever, and no signal ends it
"""
FOREVER = "await asyncio.sleep(600)"
FORKS = """if (child := os.fork()) == 0:
        time.sleep(30)
        os._exit(5)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM"""


def process_of(serve: str = FOREVER, close: str = "pass", grace_s: float = 60.0, before: str = "pass") -> str:
    """Return the source of a process that handles SIGTERM like the service, with its main thread outside Python."""
    return PROCESS.format(close=close, serve=serve, grace_s=grace_s, before=before)


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (process_of(close="await asyncio.sleep(0.01)"), 0, "closing\nclosed\n"),
        (process_of(close=FOREVER, grace_s=0.2), 1, "closing\n"),
        (process_of(serve="time.sleep(600)", grace_s=0.2), 1, ""),
        (process_of(close="1 / 0"), 0, "closing\n"),
        (process_of(before=FORKS), 0, "closing\nclosed\n"),
    ],
    ids=["closes", "does not close", "blocked loop", "fails to close", "a child was told before"],
)
def test_it_closes_and_ends(source, status, said):
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status
    assert "".join(line for line in rest.splitlines(keepends=True) if line.startswith("clos")) == said


HUNG_UP = """
import asyncio, os, pathlib, signal, sys
from agentloop_servers.run.locks import pass_on_signal, take_lock
from agentloop_servers.processes.serve_process import on_sighup

async def serve():
    told = asyncio.Event()
    on_sighup(told.set)
    run_dir = pathlib.Path(sys.argv[1])
    lock = take_lock(run_dir / "service.lock")
    lock.set_text(str(os.getpid()))
    for _ in range(2):
        pass_on_signal(run_dir, signal.SIGHUP)
        async with asyncio.timeout(20):
            await told.wait()
        told.clear()
        print("told", flush=True)

asyncio.run(serve())
"""


def test_sighup_is_told_to_the_event_loop_and_ends_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", HUNG_UP, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "told\ntold\n"), done.stderr
