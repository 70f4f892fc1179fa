"""A start that hangs, in any thread and in Python or native code, ends its process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROCESS = """
import ctypes, time
from agentloop_servers.processes.serve_process import ends_unless_done

mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
with ends_unless_done(0.2, "the engine's start"):
    {start}
time.sleep(2)
print("started", flush=True)
"""


@pytest.mark.parametrize(
    ("start", "status", "said"),
    [
        ("time.sleep(600)", 1, "the engine's start takes longer than 0.2 s"),
        ("lock(mutex); lock(mutex)  # for ever, and with Python's lock", 1, "Timeout"),
        ("pass", 0, "started"),
    ],
    ids=["hangs", "hangs in C", "ends in time"],
)
def test_the_process_ends_and_says_why(start, status, said):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS.format(start=start)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert ("started" in done.stdout) == (status == 0)
    assert ("<string>" in done.stderr) == (status == 1)  # the position at which it hangs
