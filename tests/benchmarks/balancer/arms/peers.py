"""The rules of other routers that decide something: round robin, least loaded, sticky, and two that match prefixes.

- `Sticky`: vllm-router's `sticky_least_loaded`, which SkyRL and prime-rl use (ties are drawn, where it hashes).
- `CacheAware`: smg's and vllm-router's `cache_aware`. The routers match text in a radix tree; here its nodes are
  the runs that prompts consist of: a system prompt, a group's, a trajectory's own. Text does not change with the
  weights. Both bound the tree by at least 2^25 characters a worker, which no regime sends: nothing is evicted.

`Counting` is the base of all arms that count: it knows which replicas live and which turns run where, and forgets
what a lost replica had.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.benchmarks.balancer.policy import FleetShape, QuietPolicy, TurnAsk, TurnEnd
from tests.benchmarks.balancer.workload import Workload


class Counting(QuietPolicy):
    """Requests in flight, by replica; `in_flight` has the replicas that live as its keys, in order of number."""

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
        """Return a replica of the least load, drawn evenly from those that tie."""
        least = min(map(load, self.in_flight))
        return self._rng.choice([replica for replica in self.in_flight if load(replica) == least])


class RoundRobin(Counting):
    """Every turn on the next replica."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(shape, seed)
        self._last = -1

    def place(self, turn: TurnAsk, now: float) -> int:
        self._last = next((replica for replica in self.in_flight if replica > self._last), min(self.in_flight))
        return self._last


class LeastLoaded(Counting):
    """Every turn where the fewest requests are in flight; ties are drawn."""

    def place(self, turn: TurnAsk, now: float) -> int:
        return self.any_least(self.in_flight.__getitem__)


class Sticky(Counting):
    """A trajectory where it was; its first turn, and one after a loss, where the fewest trajectories live."""

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


_THRESHOLD = 0.3  # of a prompt, beyond which a match decides
_ABSOLUTE, _RELATIVE = 64, 1.5  # requests in flight: both exceeded, loads decide

_Run = tuple[str, int]


class CacheAware(Counting):
    """The replica that was sent the longest beginning of a prompt, if enough matches and loads are alike.

    Loads differ too much if max - min > 64 and max > 1.5 x min. A prompt that matches too little goes to the least
    loaded replica (smg) or, `misses_to_smallest`, to the one with the smallest tree (vllm-router).
    """

    def __init__(self, shape: FleetShape, workload: Workload, seed: int, *, misses_to_smallest: bool) -> None:
        super().__init__(shape, seed)
        self._trajectories = workload.trajectories
        self._misses_to_smallest = misses_to_smallest
        self._sent: dict[_Run, dict[int, int]] = {}  # run -> replica -> its end there, in tokens of the context
        self._num_tokens: dict[int, int] = dict.fromkeys(self.in_flight, 0)  # of a replica's tree

    def place(self, turn: TurnAsk, now: float) -> int:
        chosen = self._choose(turn)
        for run, start, end in self._runs(turn):
            ends = self._sent.setdefault(run, {})
            before = ends.get(chosen, start)
            ends[chosen] = max(before, end)
            self._num_tokens[chosen] += ends[chosen] - before
        return chosen

    def matched(self, turn: TurnAsk) -> dict[int, int]:
        """Return how many leading tokens of a prompt each replica was sent, if any; the first sent first."""
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
        """Yield the runs of a prompt, each from and to a token."""
        one = self._trajectories[turn.trajectory]
        yield ("system", one.system), 0, one.num_system_tokens
        yield ("group", one.group), one.num_system_tokens, one.num_group_tokens
        if turn.num_prompt_tokens > one.num_group_tokens:
            yield ("trajectory", one.number), one.num_group_tokens, turn.num_prompt_tokens
