"""llm-d's precise scorer: a weighted sum of prefix match, free KV and short queue; the highest sum wins.

The weights of its benchmark: prefix 3, KV 2, queue 2. Its index of blocks is fed by KV events; KV use and queue are
this policy's own counts, which are exact at once, where llm-d scrapes metrics every 50 ms: KV use counts the
contexts of turns in flight, the queue counts turns without a first token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from tests.benchmarks.balancer.arms.spread import Counting
from tests.benchmarks.balancer.policy import FleetShape, KVChange, TurnAsk, TurnEnd


class WeightedScores(Counting):
    """Every turn where the sum of its scores, each from 0 to 1, is highest; ties are drawn."""

    hears_kv = True

    def __init__(
        self,
        shape: FleetShape,
        seed: int,
        prefix: float = 3.0,
        kv: float = 2.0,
        queue: float = 2.0,
    ) -> None:
        super().__init__(shape, seed)
        self._shape = shape
        self._weights = (prefix, kv, queue)
        self._holders: dict[int, int] = {}  # block -> bits of the replicas that hold it
        self._held: dict[int, set[int]] = {replica: set() for replica in self.in_flight}
        self._num_tokens: dict[int, int] = dict.fromkeys(self.in_flight, 0)  # contexts of turns in flight
        self._unprefilled: dict[int, set[int]] = {replica: set() for replica in self.in_flight}  # trajectories

    def place(self, turn: TurnAsk, now: float) -> int:
        scores = self.scores(turn)
        return self.any_least(lambda replica: -scores[replica])

    def scores(self, turn: TurnAsk) -> dict[int, float]:
        """Return the sum of each replica's scores."""
        prefix, kv, queue = self._weights
        num_blocks = max(1, turn.num_prompt_tokens // self._shape.block_size)
        matched = self._matched(turn)
        queues = {replica: len(waiting) for replica, waiting in self._unprefilled.items()}
        shortest, longest = min(queues.values()), max(queues.values())
        sums = {}
        for replica, num_waiting in queues.items():
            used = min(1.0, self._num_tokens[replica] / self._shape.capacity_tokens)
            shortness = (longest - num_waiting) / (longest - shortest) if longest > shortest else 1.0
            sums[replica] = prefix * matched[replica] / num_blocks + kv * (1.0 - used) + queue * shortness
        return sums

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        super().began(turn, replica, now)
        self._num_tokens[replica] += turn.num_prompt_tokens
        self._unprefilled[replica].add(turn.trajectory)

    def prefilled(self, turn: TurnAsk, replica: int, now: float) -> None:
        self._unprefilled[replica].discard(turn.trajectory)

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        self._num_tokens[end.replica] -= turn.num_prompt_tokens

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        self._clear(replica)
        for by_replica in (self._held, self._num_tokens, self._unprefilled):
            del by_replica[replica]

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self._held[replica] = set()
        self._num_tokens[replica] = 0
        self._unprefilled[replica] = set()

    def kv_changed(self, replica: int, change: KVChange, now: float) -> None:
        if replica not in self._held:
            return
        if change.is_cleared:
            self._clear(replica)
        bit = 1 << replica
        for name in change.stored:
            self._holders[name] = self._holders.get(name, 0) | bit
        self._held[replica].update(change.stored)
        self._remove(replica, change.removed)

    def _matched(self, turn: TurnAsk) -> dict[int, int]:
        """Count the leading blocks of a prompt that each replica holds. Engines evict a context from its end."""
        hashes = turn.hashes
        num_blocks = turn.num_prompt_tokens // self._shape.block_size
        matched = dict.fromkeys(self.in_flight, num_blocks)
        holding = sum(1 << replica for replica in self.in_flight)
        start = 0
        while start < num_blocks and holding:
            gone = holding & ~self._holders.get(hashes[start], 0)
            holding ^= gone
            while gone:
                replica = gone.bit_length() - 1
                matched[replica] = start
                gone ^= 1 << replica
            wanted = holding
            start = bisect_left(
                range(num_blocks),
                True,
                start,
                key=lambda index: self._holders.get(hashes[index], 0) & wanted != wanted,
            )
        return matched

    def _clear(self, replica: int) -> None:
        self._remove(replica, list(self._held[replica]))

    def _remove(self, replica: int, names: Iterable[int]) -> None:
        mask = ~(1 << replica)
        held = self._held[replica]
        for name in names:
            held.discard(name)
            left = self._holders.get(name, 0) & mask
            if left:
                self._holders[name] = left
            else:
                self._holders.pop(name, None)
