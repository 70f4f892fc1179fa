"""The processes of a service that a soak run started: their kinds and sizes, and the signals sent to them.

Only descendants of the service's own process are ever signaled. A process is identified by its pid and its start
time, so that a reused pid is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field

import numpy as np
import psutil

KINDS = {
    "replica": "ServeReplica:agentloop:EngineReplica",
    "engine core": "VLLM::",
    "worker": "ServeReplica:agentloop:AgentLoopWorker",
    "coordinator": "ServeReplica:agentloop:Coordinator",
    "ingress": "ServeReplica:agentloop:Ingress",
}
"""The kinds of processes to kill, with a part of their command lines."""

OTHERS = {
    "serve controller": "ServeController",
    "port keeper": "PortKeeper",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "scheduler": "sglang::scheduler",
}
WARM_UP_S = 120.0  # age of a process before its size counts: its pools fill first


@dataclass(slots=True)
class Kill:
    """One process that was killed, or stopped for a while."""

    kind: str
    process: psutil.Process
    at_s: float
    stop_s: float | None  # length of the stop; None: SIGKILL
    over_at_s: float  # time of its death, or of its continuation

    @property
    def name(self) -> str:
        if self.stop_s is None:
            return "SIGKILL"
        return "SIGSTOP for good" if self.stop_s == float("inf") else "SIGSTOP, SIGCONT"


@dataclass(slots=True)
class Samples:
    """The size of one process over its life."""

    kind: str
    at_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Growth:
    """The sizes of all processes of one kind: the last medians, and their growth per minute."""

    num_processes: int
    rss_mib: float
    rss_slope: float
    threads: float
    threads_slope: float
    files: float
    files_slope: float


class Tree:
    """All current and past descendants of one process."""

    def __init__(self, root_pid: int) -> None:
        self._root = psutil.Process(root_pid)
        self._seen: dict[psutil.Process, None] = {}
        self.samples: dict[psutil.Process, Samples] = {}

    def refresh(self) -> None:
        """Rescan; processes started since the last scan are included from now on."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                self._seen.setdefault(process)

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """Return all processes ever seen."""
        return tuple(self._seen)

    def of(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind that are not stopped."""
        return [one for one in self._seen if self.kind_of(one) == kind]

    def kind_of(self, process: psutil.Process) -> str | None:
        """Return the kind of a living process; None for a dead process or an unknown kind."""
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return None
            command = " ".join(process.cmdline())
        except psutil.Error:
            return None
        marks = (KINDS | OTHERS).items()
        return next((kind for kind, mark in marks if mark in command), "service" if process == self._root else None)

    def sample(self) -> None:
        """Record the size of each process."""
        now = time.monotonic()
        for process in self._seen:
            kind = self.kind_of(process)
            if kind is None:
                continue
            with contextlib.suppress(psutil.Error):
                size = (process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())
                one = self.samples.setdefault(process, Samples(kind))
                one.at_s.append(now)
                for values, value in zip((one.rss_mib, one.threads, one.files), size, strict=True):
                    values.append(value)  # type: ignore[attr-defined]

    def living(self) -> list[str]:
        """Return the command lines of all processes ever seen that are still running."""
        found = []
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        return found

    def growth(self, kind: str) -> Growth | None:
        """Return the sizes of a kind's processes past their warm-up; None if no process lived that long."""
        grown = [
            one for one in self.samples.values() if one.kind == kind and one.at_s[-1] > one.at_s[0] + 2 * WARM_UP_S
        ]
        if not grown:
            return None
        figures = []
        for name in ("rss_mib", "threads", "files"):
            series = [_settled(one, getattr(one, name)) for one in grown]
            figures += [float(np.median([values[-1] for _, values in series])), _slope_per_minute(series)]
        return Growth(len(grown), *figures)


def strike(kind: str, process: psutil.Process, stop_s: float | None) -> Kill:
    """Kill a process, or stop it; the caller continues it."""
    process.send_signal(signal.SIGKILL if stop_s is None else signal.SIGSTOP)
    now = time.monotonic()
    return Kill(kind, process, now, stop_s, now)


def release(kill: Kill, *, is_killed: bool = False) -> bool:
    """Continue or end a stopped process. Returns False if it no longer exists."""
    try:
        if not kill.process.is_running() or kill.process.status() == psutil.STATUS_ZOMBIE:
            return False
        kill.process.send_signal(signal.SIGKILL if is_killed else signal.SIGCONT)
    except psutil.Error:
        return False
    return True


def _settled(one: Samples, values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    at_s = np.array(one.at_s)
    is_settled = at_s >= at_s[0] + WARM_UP_S
    return at_s[is_settled] / 60.0, np.array(values, float)[is_settled]


def _slope_per_minute(series: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the common slope of lines with different starts, by least squares."""
    above = sum(float(((x - x.mean()) * (y - y.mean())).sum()) for x, y in series)
    below = sum(float(((x - x.mean()) ** 2).sum()) for x, _ in series)
    return above / below if below else 0.0
