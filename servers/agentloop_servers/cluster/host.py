"""The host of a service's processes: software versions, process priority, thread counts and usable CPUs.

All processes must have the same versions of Ray and agentloop and the same minor version of Python: Ray only logs a
difference, and later fails to decode its wire formats or values pickled by value.

Ray starts its actors with nice 15 and one OpenMP thread, and an engine's processes inherit both. An engine on a
shared host would then wait for a core between two steps, and load its weights with one thread.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path

import structlog

from agentloop import __version__

NICENESS = "RAY_worker_niceness"
"""The environment variable with the nice value of Ray's actors, read when Ray starts."""

THREADS = "OMP_NUM_THREADS"

_log = structlog.stdlib.get_logger(__name__)


def prepare_engine_process(num_threads: int | None) -> None:
    """Set the priority and thread count of this process and its future child processes for an engine on GPUs.

    `num_threads` is the configured number. If it is None, remove the number that Ray has set: the engine then loads
    its weights with many threads and serves with one.
    """
    if not take_priority():
        _log.warning(
            "engine_has_low_priority",
            nice=_niceness(),
            because=(
                f"Ray was started without {NICENESS}=0, and only root can raise the priority later: see"
                " docs/guides/operations.md"
            ),
        )
    if num_threads is None:
        os.environ.pop(THREADS, None)


def take_priority() -> bool:
    """Set this process to nice 0. Return False if the process lacks the privilege to raise its priority."""
    try:
        # On Linux the nice value belongs to a thread, and new threads and processes inherit it: change all threads.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                if os.getpriority(os.PRIO_PROCESS, int(thread)) > 0:
                    os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    except PermissionError:
        return False
    return True


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def software_of_process() -> str:
    """Return the versions that all processes of a service must share, as text."""
    major, minor, _ = platform.python_version_tuple()
    return f"Python {major}.{minor}, Ray {importlib.metadata.version('ray')}, agentloop {__version__}"


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use: the minimum of its affinity and its cgroup quota."""
    num_cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return num_cpus if quota == "max" else max(1, min(num_cpus, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2
        return num_cpus
