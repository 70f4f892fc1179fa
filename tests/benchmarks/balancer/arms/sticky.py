"""Policies that keep a trajectory where its first turn went.

- `ConsistentHash`: vllm-router's `consistent_hash` by session id: a ring of 160 virtual nodes a worker, rebuilt
  when workers come or go (src/policies/consistent_hash.rs; xxh3 stands for its furc hash).
- `StickyInFlight`: verl's `GlobalRequestLoadBalancer`: an LRU of 10,000 requests to servers, a new one to the
  server with the fewest requests in flight, ties at random.
- `StickySessions`: vllm-router's `sticky_least_loaded`, which SkyRL and prime-rl use: a new session to the worker
  with the fewest sessions that have not finished, ties by rendezvous hash (src/policies/sticky_least_loaded.rs).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import xxhash

from tests.benchmarks.balancer.arms.spread import Counting
from tests.benchmarks.balancer.policy import FleetShape, TurnAsk

_NUM_REMEMBERED = 10_000


class ConsistentHash(Counting):
    """A trajectory on the owner of its place on the ring."""

    def __init__(self, shape: FleetShape, seed: int, num_virtual_nodes: int = 160) -> None:
        super().__init__(shape, seed)
        self._seed = seed
        self._num_virtual_nodes = num_virtual_nodes
        self._build()

    def place(self, turn: TurnAsk, now: float) -> int:
        place = _digest(f"trajectory {turn.trajectory}", self._seed)
        return self._owners[bisect_right(self._places, place) % len(self._places)]

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        self._build()

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self._build()

    def _build(self) -> None:
        ring = sorted(
            (_digest(f"replica {replica}:{node}", self._seed), replica)
            for replica in self.in_flight
            for node in range(self._num_virtual_nodes)
        )
        self._places = [place for place, _ in ring]
        self._owners = [replica for _, replica in ring]


class StickyInFlight(Counting):
    """A trajectory where it was; its first turn, and one after a loss, where the fewest requests are in flight."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(shape, seed)
        self._homes: OrderedDict[int, int] = OrderedDict()  # least recently asked for first

    def place(self, turn: TurnAsk, now: float) -> int:
        home = self._homes.pop(turn.trajectory, None)
        if home not in self.in_flight:
            home = self.any_least(self.in_flight.__getitem__)
        self._homes[turn.trajectory] = home
        if len(self._homes) > _NUM_REMEMBERED:
            self._homes.popitem(last=False)
        return home


class StickySessions(Counting):
    """A trajectory where it was; its first turn, and one after a loss, where the fewest trajectories live."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(shape, seed)
        self._seed = seed
        self._homes: dict[int, int] = {}
        self.num_sessions: dict[int, int] = dict.fromkeys(self.in_flight, 0)

    def place(self, turn: TurnAsk, now: float) -> int:
        home = self._homes.get(turn.trajectory)
        if home is None:
            home = self.choose(turn)
            self._homes[turn.trajectory] = home
            self.num_sessions[home] += 1
        return home

    def choose(self, turn: TurnAsk) -> int:
        """Return where a trajectory begins."""
        return min(self.in_flight, key=lambda replica: (self.num_sessions[replica], self._tie(turn, replica)))

    def finished(self, trajectory: int, now: float) -> None:
        home = self._homes.pop(trajectory, None)
        if home is not None:
            self.num_sessions[home] -= 1

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        del self.num_sessions[replica]
        self._homes = {trajectory: home for trajectory, home in self._homes.items() if home != replica}

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self.num_sessions[replica] = 0

    def _tie(self, turn: TurnAsk, replica: int) -> int:
        return -_digest(f"{turn.trajectory}:{replica}", self._seed)


def _digest(text: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(), seed)
