"""The KV share: how much of the fleet's KV the holders of leases may have, promised growth included.

A share of 1.0 is the engines' whole KV. Three verbs move it, each by what engines report:

    grow   something waits for room, and the engines' KV is partly unused: 2 % a second
    trim   turns computed more than 12 % of their prompt tokens again although their KV should have been there: 8 %
    cut    the same of more than 30 % (thrashing): 25 %

KV in use is what requests in flight hold, as heartbeats say, and the contexts of holders that are at their tools.
KV that a flush took counts as computed again: fewer trajectories make a flush cheaper.

Ownership: the Balancer, one for the fleet. Readers: `Balancer.has_room` and `move`.
Invariant: least <= share <= most.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNUSED = 0.85  # of the fleet's KV in use, below which some is unused
_GROWTH = 0.02  # a second
_MUCH_LOST, _SHRINKAGE = 0.12, 0.08
_THRASHING, _CUT = 0.30, 0.25
_WINDOW_TURNS = 48  # before what was lost is judged; at least two turns of each trajectory, four after a trim


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """Bounds of the share."""

    least: float = 0.3
    most: float = 4.0


class KVShare:
    """The share, and the window of turns by which it is judged."""

    def __init__(self, bounds: ShareBounds) -> None:
        self._bounds = bounds
        self.value = min(max(1.0, bounds.least), bounds.most)
        self._num_turns = 0
        self._prompt_tokens = 0.0
        self._lost_tokens = 0.0
        self._turns_each = 2

    def turn(self, prompt_tokens: float, lost_tokens: float, num_holders: int) -> None:
        """Count a turn's prompt tokens and those computed again; judge once each holder had turns."""
        self._num_turns += 1
        self._prompt_tokens += prompt_tokens
        self._lost_tokens += lost_tokens
        if self._num_turns < max(_WINDOW_TURNS, self._turns_each * num_holders):
            return
        lost = self._lost_tokens / max(self._prompt_tokens, 1.0)
        self._turns_each = 4 if lost > _MUCH_LOST else 2
        if lost > _THRASHING:
            self._scale(1 - _CUT)
        elif lost > _MUCH_LOST:
            self._scale(1 - _SHRINKAGE)
        self._num_turns, self._prompt_tokens, self._lost_tokens = 0, 0.0, 0.0

    def grow(self, used_tokens: float, capacity_tokens: float) -> bool:
        """Grow if engines have unused KV. Returns true if it grew. Call about once a second, while samples wait."""
        before = self.value
        if used_tokens < _UNUSED * capacity_tokens:
            self._scale(1 + _GROWTH)
        return self.value > before

    def _scale(self, factor: float) -> None:
        self.value = min(max(self.value * factor, self._bounds.least), self._bounds.most)
