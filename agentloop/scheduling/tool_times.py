"""Tool times: how long each tool takes to return, by name, and what that says of one that runs.

Ownership: the Balancer alone. Times are counted in buckets of a factor of two from 1/16 s on, with old counts
halved now and then, so that a tool whose times change is learned anew. A tool that was never seen has the times of
all tools together. Invariant: an estimate costs O(buckets).
"""

from __future__ import annotations

import math
from collections import OrderedDict

_SHORTEST_S = 1 / 16
_NUM_TIMES = 20  # the last one from 2^15 s on: 9 hours
_MAX_COUNT = 4096.0  # in one bucket, before the counts are halved
_MAX_TOOLS = 1024  # names that are remembered, the least recently used forgotten
_MIDDLES_S: tuple[float, ...] = (
    _SHORTEST_S / 2,
    *(_SHORTEST_S * 2.0 ** (bucket - 0.5) for bucket in range(1, _NUM_TIMES)),
)
_PRIOR_COUNT = 8.0  # calls of its own before a tool's own times outweigh those of all tools


class ToolTimes:
    """Return times by tool name."""

    def __init__(self) -> None:
        self._all = [0.0] * _NUM_TIMES
        self._num_all = 0.0
        self._by_tool: OrderedDict[str, list[float]] = OrderedDict()

    def returned(self, tool: str, wait_s: float) -> None:
        """Learn from a call that has returned."""
        bucket = _bucket(wait_s)
        counts = self._by_tool.setdefault(tool, [0.0] * _NUM_TIMES)
        self._by_tool.move_to_end(tool)
        if len(self._by_tool) > _MAX_TOOLS:
            self._by_tool.popitem(last=False)
        for known in (self._all, counts):
            known[bucket] += 1.0
            if known[bucket] > _MAX_COUNT:
                known[:] = [count / 2 for count in known]
        self._num_all = sum(self._all)

    def expected_wait(self, tool: str, waited_s: float, horizon_s: float) -> float:
        """Return how much longer a call that has run for `waited_s` is expected to take, at most `horizon_s`.

        The cap keeps a mean finite that a heavy tail would not have.
        """
        counts = self._counts(tool)
        first = _bucket(waited_s)
        total = weighted = 0.0
        for bucket in range(first, _NUM_TIMES):
            total += counts[bucket]
            weighted += counts[bucket] * min(max(_MIDDLES_S[bucket] - waited_s, _SHORTEST_S), horizon_s)
        if total == 0.0:  # none was ever that long: as long again, as with any heavy tail
            return min(waited_s, horizon_s) if sum(counts) else 0.0
        return weighted / total

    def _counts(self, tool: str) -> list[float]:
        own = self._by_tool.get(tool)
        if own is None:
            return self._all
        scale = _PRIOR_COUNT / self._num_all
        return [mine + scale * others for mine, others in zip(own, self._all, strict=True)]


def _bucket(wait_s: float) -> int:
    if wait_s <= _SHORTEST_S:
        return 0
    return min(math.ceil(math.log2(wait_s / _SHORTEST_S)), _NUM_TIMES - 1)
