"""CPU time of a service by kind of process, between two moments."""

from __future__ import annotations

import contextlib

import psutil

from tests.benchmarks.soak_processes import Tree


class CpuSeconds:
    """User and system seconds of a process and its descendants, since this object was created.

    Processes that ended since then are not counted, nor are those in `without` and their descendants.
    """

    def __init__(self, pid: int, *, root: str = "service") -> None:
        self._pid = pid
        self._root = root
        self._before = self._now()

    def used(self, without: frozenset[int] = frozenset()) -> dict[str, float]:
        """Return the seconds by kind, in descending order."""
        found: dict[str, float] = {}
        hidden = set(without)
        for pid in without:
            with contextlib.suppress(psutil.Error):
                hidden |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        for process, (kind, seconds) in self._now().items():
            spent = seconds - self._before.get(process, (kind, 0.0))[1]
            if process.pid not in hidden and spent > 0.005:
                found[kind] = found.get(kind, 0.0) + spent
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _now(self) -> dict[psutil.Process, tuple[str, float]]:
        tree = Tree(self._pid)
        tree.refresh()
        found = {}
        for process in tree.processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                kind = self._root if process.pid == self._pid else tree.kind_of(process) or "others"
                found[process] = kind, times.user + times.system
        return found
