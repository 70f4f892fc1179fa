"""Bubblewrap sandboxes: 200 open at once, the start of the next one beside them, and cycles that leave nothing.

python -m tests.benchmarks.sandboxes [--open 200] [--cycles 10000]

A start is `create` and the end of its first command, `true`; a warm one takes a sandbox that waits. Cold and warm
ones alternate. A cycle makes a sandbox, runs a command in it that writes a file and leaves a process, and closes
it. Memory is each process's share of it (PSS).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import os
import statistics
import tempfile
import time
from pathlib import Path

from agentloop_tools.sandbox import SandboxSource
from agentloop_tools.sandbox.bubblewrap import NOBODY, Bubblewrap
from agentloop_tools.sandbox.pool import WarmSandboxes
from agentloop_tools.sandbox.port import Sandboxes

NUM_STARTS = 100


PROGRAMS = {"bwrap", "unshare", "nsenter", "prlimit", "setpriv", "bash", "sh", "sleep"}  # a sandbox's


def processes() -> list[int]:
    """Those of sandboxes: by their program, and the user that they have where this one is root's."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            is_theirs = os.stat(f"/proc/{pid}").st_uid == (NOBODY if os.geteuid() == 0 else os.geteuid())
            if is_theirs and Path(f"/proc/{pid}/comm").read_text().strip() in PROGRAMS:
                found.append(int(pid))
    return found


def left() -> dict[str, int]:
    """What a sandbox could leave: processes, mounts, files, and open files of this process."""
    return {
        "processes": len(processes()),
        "mounts": Path("/proc/self/mounts").read_text().count("agentloop-sandboxes"),
        "files": len(glob.glob(f"{tempfile.gettempdir()}/agentloop-sandboxes-*/{os.getpid()}-*/*")),
        "open files": len(os.listdir("/proc/self/fd")),
    }


def share_of_memory() -> float:
    """The MiB of all sandboxes' processes."""
    total = 0
    for pid in processes():
        with contextlib.suppress(OSError):
            [line] = [
                one for one in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if one[:4] == "Pss:"
            ]
            total += int(line.split()[1])
    return total / 1024


async def started(sandboxes: Sandboxes) -> float:
    """The milliseconds until a new sandbox has run a command."""
    began = time.perf_counter()
    sandbox = await sandboxes.create()
    await sandbox.exec("true")
    took = 1000 * (time.perf_counter() - began)
    await sandbox.close()
    return took


async def starts(num_open: int) -> None:
    sandboxes = Bubblewrap()
    warm = WarmSandboxes(sandboxes, num_warm=2)
    began = time.perf_counter()
    for _ in range(num_open // 4):
        opened = await asyncio.gather(*(sandboxes.create(SandboxSource()) for _ in range(4)))
        await asyncio.gather(*(one.exec("true") for one in opened))
    took, num_processes = time.perf_counter() - began, len(processes())
    each = await asyncio.to_thread(share_of_memory) / num_open
    print(f"{num_open} open after {took:.1f} s: {num_processes} processes, {each:.2f} MiB of memory each")
    await started(warm)
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(NUM_STARTS):
        for name, maker in (("cold", sandboxes), ("warm", warm)):
            await asyncio.sleep(0.1)  # so that the next one waits
            times[name].append(await started(maker))
    for name, measured in times.items():
        cuts = statistics.quantiles(measured, n=100)
        print(f"{name}: p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms of {NUM_STARTS}")
    await warm.close()


async def cycles(num_cycles: int, at_once: int = 4) -> None:
    sandboxes = Bubblewrap()
    before = left()
    remaining = iter(range(num_cycles))

    async def cycle() -> None:
        for _ in remaining:
            sandbox = await sandboxes.create()
            ran = await sandbox.exec("echo > file; sleep 1000 & echo on")
            assert ran.output == b"on\n", ran
            await sandbox.close()

    began = time.perf_counter()
    await asyncio.gather(*(cycle() for _ in range(at_once)))
    took = time.perf_counter() - began
    print(f"{num_cycles} cycles in {took:.0f} s, {num_cycles / took:.0f} a second; before {before}, after {left()}")
    await sandboxes.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--open", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=10_000)
    chosen = parser.parse_args()
    asyncio.run(starts(chosen.open))
    asyncio.run(cycles(chosen.cycles))
