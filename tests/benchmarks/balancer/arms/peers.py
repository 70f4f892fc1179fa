"""Routing rules of other routers: round robin, least loaded, sticky, and two that match prefixes.

- `Sticky`: vllm-router's `sticky_least_loaded`, which SkyRL and prime-rl use (ties are drawn at random here, hashed
  there).
- `CacheAware`: smg's and vllm-router's `cache_aware`. The routers match text in a radix tree; here its nodes are
  the runs that a prompt consists of: the system prompt, the group's run and the trajectory's run. Text does not
  change with the weights. Both routers limit the tree to 2^25 characters or more per worker, which no regime
  reaches, so nothing is evicted.

`Counting` is the base of all arms that count requests: it tracks the live replicas and the turns that run on each,
and drops the state of a lost replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.benchmarks.balancer.policy import FleetShape, QuietPolicy, TurnAsk, TurnEnd
from tests.benchmarks.balancer.workload import Workload


class Counting(QuietPolicy):
    """Requests in flight by replica. The keys of `in_flight` are the live replicas, in numerical order."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        self.in_flight: dict[int, int] = dict.fromkeys(range(shape.num_replicas), 0)
        self._rng = random.Random(seed)
        self._runs_on: dict[int, int] = {}  # trajectory -> replica of its turn in flight

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        self.in_flight[replica] += 1
        self._runs_on[turn.trajectory] = replica

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        self.in_flight[self._runs_on.pop(turn.trajectory)] -= 1

    def replica_lost(self, replica: int, now: float) -> None:
        del self.in_flight[replica]
        self._runs_on = {trajectory: on for trajectory, on in self._runs_on.items() if on != replica}

    def replica_added(self, replica: int, now: float) -> None:
        self.in_flight[replica] = 0

    def any_least(self, load: Callable[[int], float]) -> int:
        """Return a replica with the least load; ties are drawn uniformly."""
        least = min(map(load, self.in_flight))
        return self._rng.choice([replica for replica in self.in_flight if load(replica) == least])


class RoundRobin(Counting):
    """Every turn runs on the next replica."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(shape, seed)
        self._last = -1

    def place(self, turn: TurnAsk, now: float) -> int:
        self._last = next((replica for replica in self.in_flight if replica > self._last), min(self.in_flight))
        return self._last


class LeastLoaded(Counting):
    """Every turn runs on the replica with the fewest requests in flight; ties are drawn at random."""

    def place(self, turn: TurnAsk, now: float) -> int:
        return self.any_least(self.in_flight.__getitem__)


class Sticky(Counting):
    """A trajectory stays on its replica.

    Its first turn, and a turn after a loss, use the replica with the fewest trajectories.
    """

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(shape, seed)
        self._homes: dict[int, int] = {}
        self.num_live: dict[int, int] = dict.fromkeys(self.in_flight, 0)

    def place(self, turn: TurnAsk, now: float) -> int:
        home = self._homes.get(turn.trajectory)
        if home is None:
            home = self._homes[turn.trajectory] = self.any_least(self.num_live.__getitem__)
            self.num_live[home] += 1
        return home

    def finished(self, trajectory: int, now: float) -> None:
        self.num_live[self._homes.pop(trajectory)] -= 1

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        del self.num_live[replica]
        self._homes = {trajectory: home for trajectory, home in self._homes.items() if home != replica}

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self.num_live[replica] = 0


_THRESHOLD = 0.3  # a longer matching share of the prompt decides
_ABSOLUTE, _RELATIVE = 64, 1.5  # requests in flight: if both limits are exceeded, loads decide

_Run = tuple[str, int]


class CacheAware(Counting):
    """Chooses the replica that received the longest prefix of the prompt, if enough matches and loads are balanced.

    Loads are unbalanced if max - min > 64 and max > 1.5 x min. A prompt with too short a match goes to the least
    loaded replica (smg) or, with `misses_to_smallest`, to the replica with the smallest tree (vllm-router).
    """

    def __init__(self, shape: FleetShape, workload: Workload, seed: int, *, misses_to_smallest: bool) -> None:
        super().__init__(shape, seed)
        self._trajectories = workload.trajectories
        self._misses_to_smallest = misses_to_smallest
        self._sent: dict[_Run, dict[int, int]] = {}  # run -> replica -> end of its cached part, in context tokens
        self._num_tokens: dict[int, int] = dict.fromkeys(self.in_flight, 0)  # size of each replica's tree

    def place(self, turn: TurnAsk, now: float) -> int:
        chosen = self._choose(turn)
        for run, start, end in self._runs(turn):
            ends = self._sent.setdefault(run, {})
            before = ends.get(chosen, start)
            ends[chosen] = max(before, end)
            self._num_tokens[chosen] += ends[chosen] - before
        return chosen

    def matched(self, turn: TurnAsk) -> dict[int, int]:
        """Return the prompt's matching prefix length by replica, for replicas with a match, first recipient
        first.
        """
        matched: dict[int, int] = {}
        for run, start, end in self._runs(turn):
            for replica, sent in self._sent.get(run, {}).items():
                if matched.get(replica, 0) == start:
                    matched[replica] = min(sent, end)
        return matched

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        del self._num_tokens[replica]
        for ends in self._sent.values():
            ends.pop(replica, None)

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self._num_tokens[replica] = 0

    def _choose(self, turn: TurnAsk) -> int:
        most, least = max(self.in_flight.values()), min(self.in_flight.values())
        if most - least > _ABSOLUTE and most > _RELATIVE * least:
            return min(self.in_flight, key=self.in_flight.__getitem__)
        matched = self.matched(turn)
        best = max(matched, key=matched.__getitem__, default=None)
        if best is not None and matched[best] > _THRESHOLD * turn.num_prompt_tokens:
            return best
        sizes = self._num_tokens if self._misses_to_smallest else self.in_flight
        return min(sizes, key=sizes.__getitem__)

    def _runs(self, turn: TurnAsk) -> Iterator[tuple[_Run, int, int]]:
        """Yield the runs of a prompt with their first and last token."""
        one = self._trajectories[turn.trajectory]
        yield ("system", one.system), 0, one.num_system_tokens
        yield ("group", one.group), one.num_system_tokens, one.num_group_tokens
        if turn.num_prompt_tokens > one.num_group_tokens:
            yield ("trajectory", one.number), one.num_group_tokens, turn.num_prompt_tokens
