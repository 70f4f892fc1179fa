"""Processes of a service: lookup by an environment variable or a Serve deployment, and stopping one of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil


def processes_with(marker: str, grace_s: float = 10.0) -> list[str]:
    """Return the command lines of processes that still have `marker` in their environment after a grace period."""
    give_up_at = time.monotonic() + grace_s
    while (pids := pids_with(marker)) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return [command for pid in pids if (command := _command(pid))]


def pids_with(marker: str) -> list[int]:
    """Return the ids of the living processes that have `marker` in their environment."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _has(folder, marker.encode())]


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of the living descendants of a process, by process id."""
    found = {}
    for process in psutil.Process(root).children(recursive=True):
        if command := _command(process.pid):  # a zombie has no command line
            found[process.pid] = command
    return found


def deployed(kind: str, root: int | None = None) -> list[int]:
    """Return the process ids of one Serve deployment that this process, or `root`, has started."""
    mark = f"ServeReplica:agentloop:{kind}"
    return [pid for pid, command in descendants(os.getpid() if root is None else root).items() if mark in command]


def stop_process(pid: int, timeout_s: float = 10.0) -> None:
    """Send SIGSTOP, and wait until every thread has stopped: on busy cores some continue for a while."""
    os.kill(pid, signal.SIGSTOP)
    give_up_at = time.monotonic() + timeout_s
    while any(_state(thread) not in "TX" for thread in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"process {pid} goes on after SIGSTOP")
        time.sleep(0.001)


def _has(folder: Path, marker: bytes) -> bool:
    try:
        if marker not in (folder / "environ").read_bytes():
            return False
        return _state(folder) not in "ZX"
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # the process ended during the check


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _state(folder: Path) -> str:
    """Return the state letter of proc(5) for a process or thread: T is stopped, Z a zombie, X gone."""
    try:
        return (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
