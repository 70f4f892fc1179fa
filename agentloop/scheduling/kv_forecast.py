"""The KV forecast: the most KV that a replica's trajectories will need at once, from now to their ends.

Trajectories grow while they run and give all back when they end. If all grow alike, then after each has grown
by t more tokens those with less than t to go are gone, and the others hold what they have and t more:

    need(t) = sum of (held_i + t) over all i with remaining_i >= t,    peak = max over t of need(t)

(the "past-future" rule of LightLLM, ASPLOS 2025, there for single requests). Sums are kept by buckets of remaining
tokens, a factor of sqrt(2) wide, so that a change costs O(1) and the peak O(buckets), however many trajectories.
What siblings share (their prompt) is counted once for a group, and what all groups share once for the replica.

Ownership: the Balancer, one for each replica. Invariant: the sums are those of what was put in and not taken out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FEWEST_TOKENS = 64.0
_MAX_PEAKS = 64  # remembered between two changes
_NUM_BUCKETS = 26  # the last one from 64 * 2^12.5 = 370k tokens on


@dataclass(frozen=True, slots=True)
class KVNeed:
    """One trajectory's tokens: those of its own that it holds, and those it will still grow by."""

    held: float
    remaining: float

    @property
    def bucket(self) -> int:
        if self.remaining <= _FEWEST_TOKENS:
            return 0
        return min(math.ceil(2 * math.log2(self.remaining / _FEWEST_TOKENS)), _NUM_BUCKETS - 1)


class KVForecast:
    """The needs of one replica's trajectories."""

    def __init__(self) -> None:
        self._num = [0] * _NUM_BUCKETS
        self._held = [0.0] * _NUM_BUCKETS
        self._remaining = [0.0] * _NUM_BUCKETS
        self._shared: dict[str, list[float]] = {}  # group -> its members, the tokens they share
        self._shared_tokens = 0.0
        self.num_trajectories = 0
        self._held_tokens = 0.0  # what trajectories hold now, but for what they share
        self._growth_tokens = 0.0  # what they will still grow by, one by one
        self._peaks: dict[KVNeed | None, float] = {}  # since the last change: who waits asks again

    @property
    def now_tokens(self) -> float:
        """Tokens that the trajectories hold together now."""
        return self._held_tokens + self._shared_tokens

    @property
    def outlook_tokens(self) -> float:
        """Measure at O(1) to compare replicas by: tokens held when all have grown by half of what they will."""
        return self._held_tokens + self._growth_tokens / 2 + self._shared_tokens

    def add(self, need: KVNeed, group_id: str, shared_tokens: float) -> None:
        """Count a trajectory in; `shared_tokens` it has in common with its group, beside what it holds itself."""
        self._change(need, 1)
        members = self._shared.setdefault(group_id, [0.0, 0.0])
        members[0] += 1
        self._shared_tokens += max(shared_tokens - members[1], 0.0)
        members[1] = max(members[1], shared_tokens)

    def remove(self, need: KVNeed, group_id: str) -> None:
        """Count a trajectory out again, with the need it was added with."""
        self._change(need, -1)
        members = self._shared[group_id]
        members[0] -= 1
        if members[0] <= 0:
            self._shared_tokens -= members[1]
            del self._shared[group_id]
        if self.num_trajectories == 0:  # the sums of floats must not drift
            self._held, self._remaining = [0.0] * _NUM_BUCKETS, [0.0] * _NUM_BUCKETS
            self._held_tokens = self._growth_tokens = self._shared_tokens = 0.0

    def shares(self, group_id: str) -> bool:
        """Tell if a trajectory of this group is counted, so that another one brings its own tokens alone."""
        return group_id in self._shared

    def peak(self, more: KVNeed | None = None, more_shared: float = 0.0) -> float:
        """Return the tokens needed at the worst moment to come, with one trajectory `more` or without."""
        peak = self._peaks.get(more)
        if peak is None:
            if len(self._peaks) >= _MAX_PEAKS:
                self._peaks.clear()
            peak = self._peaks[more] = self._own_peak(more)
        return peak + self._shared_tokens + more_shared

    def _own_peak(self, more: KVNeed | None) -> float:
        """Return the peak of what trajectories do not share."""
        at = -1 if more is None else more.bucket
        num, held, peak = 0, 0.0, 0.0
        for bucket in range(_NUM_BUCKETS - 1, -1, -1):
            num_here, remaining = self._num[bucket], self._remaining[bucket]
            if more is not None and bucket == at:
                num_here, remaining = num_here + 1, remaining + more.remaining
                held += more.held
            if num_here:
                num += num_here
                held += self._held[bucket]
                need = held + num * remaining / num_here
                if need > peak:
                    peak = need
        return peak

    def _change(self, need: KVNeed, sign: int) -> None:
        self._peaks.clear()
        bucket = need.bucket
        self._num[bucket] += sign
        self._held[bucket] += sign * need.held
        self._remaining[bucket] += sign * need.remaining
        self._held_tokens += sign * need.held
        self._growth_tokens += sign * need.remaining
        self.num_trajectories += sign
