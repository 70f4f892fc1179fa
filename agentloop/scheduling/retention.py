"""Retention: whose KV stays spoken for while a tool runs.

To hold c tokens of a replica's KV for w seconds keeps c / capacity of its work from beginning; to let them go may
cost their prefill once more. Both are equal at

    break-even = prefill(c) * capacity / c

and keeping for that long, whatever is known, costs at most twice what the best rule would (ski rental: Karlin et
al. 1988). But who takes the room keeps it to its own end, and the one that returns waits for somebody's. So KV is
kept for some times the break-even, and let go of at once only for tools that are expected to run longer than that.
Nothing is told to the engine: KV that is let go of is used again if it is still there.

Ownership: the Balancer alone. Invariant: `due` yields a turn's holding at most once.
"""

from __future__ import annotations

import heapq

from agentloop.scheduling.lease_table import Holding
from agentloop.scheduling.step_times import StepTimes
from agentloop.scheduling.tool_times import ToolTimes


class Retention:
    """The tool times learned, and the turns whose time to let go will come."""

    def __init__(self, step_times: StepTimes, factor: float) -> None:
        self.times = ToolTimes()
        self._factor = factor
        self._step_times = step_times
        self._timers: list[tuple[float, int, int, Holding]] = []  # when, number, turn
        self._num_timers = 0

    def keeps(self, holding: Holding, capacity_tokens: int, now: float) -> bool:
        """Tell if a holder that goes to its tool keeps its KV, for now."""
        worth_s = self._worth(holding, capacity_tokens)
        if self.times.expected_wait(holding.tool, 0.0, 4 * worth_s) > worth_s:
            return False
        self._num_timers += 1
        heapq.heappush(self._timers, (now + worth_s, self._num_timers, holding.num_turns, holding))
        return True

    def due(self, now: float) -> list[Holding]:
        """Return those that have kept their KV for as long as it is worth, and are at the same tool still."""
        found = []
        while self._timers and self._timers[0][0] <= now:
            _, _, turn, holding = heapq.heappop(self._timers)
            if holding.num_turns == turn and holding.is_at_tool:
                found.append(holding)
        return found

    def _worth(self, holding: Holding, capacity_tokens: int) -> float:
        tokens = max(holding.context_tokens, 1.0)
        return self._factor * self._step_times.prefill(tokens) * capacity_tokens / tokens
