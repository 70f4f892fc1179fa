"""Policies that look at nothing but requests in flight: random, round-robin, least in flight.

`Counting` is the base of all arms that count: it knows which replicas live and which turns run where, and forgets
what a lost replica had.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tests.benchmarks.balancer.policy import FleetShape, QuietPolicy, TurnAsk, TurnEnd


class Counting(QuietPolicy):
    """Requests in flight, by replica; `in_flight` has the replicas that live as its keys, in order of number."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        self.in_flight: dict[int, int] = dict.fromkeys(range(shape.num_replicas), 0)
        self.rng = random.Random(seed)
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

    def any_least(self, load: Callable[[int], float], replicas: Iterable[int] | None = None) -> int:
        """Return a replica of the least load, drawn evenly from those that tie."""
        loads = {replica: load(replica) for replica in (self.in_flight if replicas is None else replicas)}
        least = min(loads.values())
        return self.rng.choice([replica for replica, one in loads.items() if one == least])


class Random(Counting):
    """Every turn anywhere."""

    def place(self, turn: TurnAsk, now: float) -> int:
        return self.rng.choice(list(self.in_flight))


class RoundRobin(Counting):
    """Every turn on the next replica."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(shape, seed)
        self._last = -1

    def place(self, turn: TurnAsk, now: float) -> int:
        self._last = next((replica for replica in self.in_flight if replica > self._last), min(self.in_flight))
        return self._last


class LeastInFlight(Counting):
    """Every turn where the fewest requests are in flight; ties are drawn."""

    def place(self, turn: TurnAsk, now: float) -> int:
        return self.any_least(self.in_flight.__getitem__)
