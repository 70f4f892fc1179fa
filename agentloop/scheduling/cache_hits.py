"""Cache hits: the share of their contexts that turns found cached when they returned to their KV.

Ownership: the Balancer alone; sums by replica that forget, so that they tell of the last turns. Reader: the
service's status, which calls a replica degraded that thrashes.
"""

from __future__ import annotations

from dataclasses import dataclass

_NUM_REMEMBERED = 256  # turns, about
_MIN_HIT_RATE = 0.5  # of turns that return, below which contexts are computed again rather than continued
_MIN_TURNS = 32.0  # before that is said


@dataclass(slots=True)
class CacheHits:
    """The hits on one replica."""

    num_turns: float = 0.0  # that returned to their KV
    left: float = 0.0  # tokens of their last contexts, and how many of these were found
    found: float = 0.0

    def take(self, num_left: float, num_cached: int) -> None:
        """Count a turn that returned: the tokens that its last turn left, and those found cached."""
        keep = 1 - 1 / _NUM_REMEMBERED
        self.num_turns = self.num_turns * keep + 1
        self.left = self.left * keep + num_left
        self.found = self.found * keep + min(num_cached, num_left)

    @property
    def rate(self) -> float | None:
        """The share of returning contexts that was found cached; None before the first."""
        return self.found / self.left if self.left else None

    @property
    def is_thrashing(self) -> bool:
        """True if turns that return compute most of their contexts again."""
        return self.num_turns >= _MIN_TURNS and self.found < _MIN_HIT_RATE * self.left
