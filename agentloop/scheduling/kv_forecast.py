"""The KV forecast: the KV that a replica's trajectories hold, and what they will soon hold.

Trajectories grow while they run and give all back when they end. How long each will become is known badly and
late; what it holds is known exactly, and too many can be made fewer at the next tool boundary (`retention.py`). So
room is what is left beside all that is held and a few turns' growth of each, not beside the peak to come: replicas
would stand half empty for the sake of lengths that most trajectories never reach.

What siblings share (their prompt) is counted once for a group.

Ownership: the Balancer, one for each replica. Invariant: the sums are those of what was put in and not taken out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVNeed:
    """One trajectory's tokens: those of its own that it holds, and those it will soon grow by."""

    held: float
    growth: float


class KVForecast:
    """The needs of one replica's trajectories."""

    def __init__(self) -> None:
        self._shared: dict[str, list[float]] = {}  # group -> its members, the tokens they share
        self._shared_tokens = 0.0
        self._held_tokens = 0.0  # by single trajectories
        self._growth_tokens = 0.0
        self.num_trajectories = 0

    @property
    def now_tokens(self) -> float:
        """Tokens that the trajectories hold together now."""
        return self._held_tokens + self._shared_tokens

    @property
    def soon_tokens(self) -> float:
        """Tokens that they will hold together soon."""
        return self._held_tokens + self._growth_tokens + self._shared_tokens

    def add(self, need: KVNeed, group_id: str, shared_tokens: float) -> None:
        """Count a trajectory in; `shared_tokens` it has in common with its group, beside what it holds itself."""
        self._held_tokens += need.held
        self._growth_tokens += need.growth
        self.num_trajectories += 1
        members = self._shared.setdefault(group_id, [0.0, 0.0])
        members[0] += 1
        self._shared_tokens += max(shared_tokens - members[1], 0.0)
        members[1] = max(members[1], shared_tokens)

    def remove(self, need: KVNeed, group_id: str) -> None:
        """Count a trajectory out again, with the need it was added with."""
        self._held_tokens -= need.held
        self._growth_tokens -= need.growth
        self.num_trajectories -= 1
        members = self._shared[group_id]
        members[0] -= 1
        if members[0] <= 0:
            self._shared_tokens -= members[1]
            del self._shared[group_id]
        if self.num_trajectories == 0:  # the sums of floats must not drift
            self._held_tokens = self._growth_tokens = self._shared_tokens = 0.0

    def with_one(self, need: KVNeed, group_id: str, shared_tokens: float) -> float:
        """Return the tokens held soon if one more trajectory of this group comes."""
        shared = 0.0 if group_id in self._shared else shared_tokens
        return self.soon_tokens + need.held + need.growth + shared
