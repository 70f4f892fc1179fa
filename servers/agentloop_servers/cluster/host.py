"""The host of a service's processes: their software, their priority, their threads, and its CPUs.

All processes have the same releases of Ray and agentloop and one minor version of Python: Ray only logs a
difference, and fails later in its wire formats or in what was pickled by value.

Ray gives its actors nice 15 and one OpenMP thread, and an engine's own processes inherit both: beside anything else
on the host an engine then waits for a core between two steps, and loads its weights in one thread.
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
"""The variable that a Ray takes its actors' nice value from, when it is started."""

THREADS = "OMP_NUM_THREADS"

_log = structlog.stdlib.get_logger(__name__)


def prepare_engine_process(num_threads: int | None) -> None:
    """Make this process, and those that it will start, fit for an engine on GPUs.

    `num_threads` is what the config asks for. Without it the number that Ray has set is taken back: an engine then
    loads its weights with many threads, and serves with one.
    """
    if not take_priority():
        _log.warning(
            "engine_has_low_priority",
            nice=_niceness(),
            because=f"Ray was started without {NICENESS}=0, and only root may change it: docs/guides/operations.md",
        )
    if num_threads is None:
        os.environ.pop(THREADS, None)


def take_priority() -> bool:
    """Bring this process to nice 0, or leave it as it is and return False: only a privileged one may do that.

    To Linux a nice value is a thread's, which those that it starts inherit.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, int(thread)) > 0:
                    os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    except PermissionError:
        return False
    return True


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def software_of_process() -> str:
    """Return the versions that all processes of a service share, in words."""
    major, minor, _ = platform.python_version_tuple()
    return f"Python {major}.{minor}, Ray {importlib.metadata.version('ray')}, agentloop {__version__}"


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, and its control group's quota if that is less."""
    num_cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return num_cpus if quota == "max" else max(1, min(num_cpus, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups of version 2
        return num_cpus
