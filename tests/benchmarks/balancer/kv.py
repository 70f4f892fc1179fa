"""The prefix cache of a simulated replica: blocks by run, not by token. Synchronous.

A context is a path of runs: the system prompt's blocks, then the group's, then the trajectory's. A block is named
by its run and its position in the context. Runs are cached from their first block on, and vLLM's eviction order
keeps that true: a request that ends frees its last block first, so the least recently used run loses its tail, and
a trajectory's run is evicted before its group's run and that before the system prompt's. Each operation costs
O(runs on the path), independent of the context length.

Differences from vLLM: a run is held as a whole while any request holds a block of it; a block that two requests
compute separately is stored once as soon as both are scheduled, not when both have ended.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

END = 1 << 40
"""The end of the last run of a path, which belongs to the trajectory."""

Run = tuple[int, int, int]
"""Name, first block and end, in blocks of the context."""

Path = tuple[Run, ...]
"""Consecutive runs; the first begins with block 0, and none is empty."""


@dataclass(slots=True)
class _Cached:
    end: int  # blocks from the run's first to this one are cached
    num_holders: int = 0


class PrefixCache:
    """The cached blocks of one replica. Callers that need more blocks than are free call `evict` first."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_idle_blocks = 0  # held by no request
        self._runs: dict[int, _Cached] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # run -> its first block; least recently used first

    def match(self, path: Path, max_blocks: int) -> tuple[int, int]:
        """Return the number of cached leading blocks, up to `max_blocks`, and of idle blocks that `hold`
        would use.
        """
        num_matched = num_idle = 0
        for run, first, end in path:
            cached = self._runs.get(run)
            if cached is None or first >= max_blocks:
                break
            num_matched = min(cached.end, max_blocks)
            if not cached.num_holders:
                num_idle += cached.end - first
            if cached.end < end:
                break
        return num_matched, num_idle

    def hold(self, path: Path, num_blocks: int) -> None:
        """Hold the runs of the first `num_blocks` blocks, which must be cached."""
        for run, first, _ in path:
            if first >= num_blocks:
                break
            self._hold(run, first)

    def store(self, path: Path, num_held: int, num_blocks: int) -> int:
        """Cache a holder's blocks from `num_held` to `num_blocks` and hold their runs. Returns how many are new."""
        num_new = 0
        for run, first, end in path:
            if first >= num_blocks:
                break
            if end > num_held:
                if first >= num_held:
                    self._hold(run, first)
                cached = self._runs[run]
                stop = min(end, num_blocks)
                if stop > cached.end:
                    num_new += stop - cached.end
                    cached.end = stop
        self.num_blocks += num_new
        return num_new

    def release(self, path: Path, num_held: int) -> None:
        """Release the runs of the first `num_held` blocks; they become the most recently used."""
        for run, first, _ in reversed(path):
            if first >= num_held:
                continue
            cached = self._runs[run]
            cached.num_holders -= 1
            if not cached.num_holders:
                self._idle[run] = first
                self.num_idle_blocks += cached.end - first

    def evict(self, num_blocks: int) -> None:
        """Evict idle blocks, least recently used first. Raises ValueError if there are too few."""
        if num_blocks > self.num_idle_blocks:
            raise ValueError(f"{num_blocks} blocks to evict, {self.num_idle_blocks} idle")
        self.num_blocks -= num_blocks
        self.num_idle_blocks -= num_blocks
        while num_blocks:
            run, first = next(iter(self._idle.items()))
            cached = self._runs[run]
            new_end = max(first, cached.end - num_blocks)
            num_blocks -= cached.end - new_end
            cached.end = new_end
            if new_end == first:
                del self._idle[run], self._runs[run]

    def clear(self) -> None:
        """Drop everything. Raises ValueError while a request holds a block."""
        if self.num_blocks != self.num_idle_blocks:
            raise ValueError("a request holds blocks")
        self._runs.clear()
        self._idle.clear()
        self.num_blocks = self.num_idle_blocks = 0

    def _hold(self, run: int, first: int) -> None:
        cached = self._runs.get(run)
        if cached is None:
            cached = self._runs[run] = _Cached(first)
        elif not cached.num_holders:
            del self._idle[run]
            self.num_idle_blocks -= cached.end - first
        cached.num_holders += 1
