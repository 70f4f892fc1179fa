"""Cache hits: what turns found cached, beside what the residency model predicted and what their last turn left.

Ownership: the Balancer alone; sums by replica that forget, so that they tell of the last turns. A turn's prediction
is made when its end is told: what came or went while it ran is in it already, so it can be off by that.
"""

from __future__ import annotations

from dataclasses import dataclass

_NUM_REMEMBERED = 256  # turns, about
_MIN_HIT_RATE = 0.5  # of turns that return, below which contexts are computed again rather than continued
_MIN_TURNS = 32.0  # before that is said


@dataclass(slots=True)
class _Sums:
    num_returned: float = 0.0  # turns that returned to their KV
    left: float = 0.0  # tokens of their last contexts, and how many of these were found
    found: float = 0.0
    predicted: float = 0.0  # tokens of all turns
    reported: float = 0.0
    difference: float = 0.0


class CacheHits:
    """The hits of each replica."""

    def __init__(self) -> None:
        self._by_replica: dict[str, _Sums] = {}

    def take(self, replica_id: str, num_left: float, num_predicted: int, num_cached: int) -> None:
        """Take in a turn: the tokens its last one left there (0: none did), those predicted, those found."""
        sums = self._by_replica.setdefault(replica_id, _Sums())
        keep = 1 - 1 / _NUM_REMEMBERED
        if num_left > 0:
            sums.num_returned = sums.num_returned * keep + 1
            sums.left = sums.left * keep + num_left
            sums.found = sums.found * keep + min(num_cached, num_left)
        sums.predicted = sums.predicted * keep + num_predicted
        sums.reported = sums.reported * keep + num_cached
        sums.difference = sums.difference * keep + abs(num_predicted - num_cached)

    def hit_rate(self, replica_id: str) -> float | None:
        """Return the share of the contexts of turns that returned that was found; None: none has."""
        sums = self._by_replica.get(replica_id)
        return sums.found / sums.left if sums is not None and sums.left else None

    def agreement(self, replica_id: str) -> float | None:
        """Return 1 - sum |predicted - found| / sum of the larger total; None: no turn had any."""
        sums = self._by_replica.get(replica_id)
        total = 0.0 if sums is None else max(sums.predicted, sums.reported)
        return 1.0 - sums.difference / total if sums is not None and total else None

    def is_thrashing(self, replica_id: str) -> bool:
        """Tell if turns that return compute most of their contexts again."""
        sums = self._by_replica.get(replica_id)
        return sums is not None and sums.num_returned >= _MIN_TURNS and sums.found < _MIN_HIT_RATE * sums.left

    def flushed(self) -> None:
        """Begin anew: no KV is left."""
        self._by_replica.clear()

    def forget(self, replica_id: str) -> None:
        """Drop the sums of a replica that is lost."""
        self._by_replica.pop(replica_id, None)
