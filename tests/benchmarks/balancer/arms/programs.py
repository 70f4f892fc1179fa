"""The core of vllm-router's Program scheduling (src/program_scheduling): admission by tokens, sticky, with a queue.

A program is a trajectory. While a turn of it runs, and for `ttl_s` after it, its context counts on its replica;
then it is paused and counts no more. A new or paused one begins where its tokens fit `fill` times the KV capacity:
new ones on the replica with the most room, paused ones on the replica they had, or, after they waited a second, on
one whose room exceeds that of their own by 1.2 times their context. Who waited for `force_s` begins anyway. The
latest to pause resumes first, before new ones.

Left out, as they need windows of statistics: a TTL fitted to tools, deadlines fitted to throughput, privileged
programs, and yielding after 14 rounds. A new one is bound when it begins, not when it asks, so none waits for a
full replica while another has room.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tests.benchmarks.balancer.arms.spread import Counting
from tests.benchmarks.balancer.policy import FleetShape, TurnAsk, TurnEnd

_DECODE_BUFFER_TOKENS = 256
_CROSS_REPLICA_HEADROOM = 1.2
_OBSERVATION_S = 1.0  # waited before another replica is thought of


@dataclass(slots=True)
class _Program:
    replica: int
    num_tokens: int
    is_active: bool = True  # its tokens count
    num_turns: int = 0  # that have ended; an older one's TTL is void
    ended_at: float = 0.0


class Programs(Counting):
    """Every turn where its tokens fit, or later."""

    def __init__(
        self, shape: FleetShape, seed: int, fill: float = 1.0, ttl_s: float = 10.0, force_s: float = 300.0
    ) -> None:
        super().__init__(shape, seed)
        self._capacity_tokens = fill * shape.capacity_tokens
        self._ttl_s = ttl_s
        self._force_s = force_s
        self._programs: dict[int, _Program] = {}
        self._waiting_since: dict[int, float] = {}
        self._pauses: list[tuple[float, int, int]] = []  # when, trajectory, turns ended until then
        self.used_tokens: dict[int, int] = dict.fromkeys(self.in_flight, 0)

    def rank(self, turn: TurnAsk, now: float) -> float:
        program = self._programs.get(turn.trajectory)
        return -program.ended_at if program is not None else 0.0

    def place(self, turn: TurnAsk, now: float) -> int | None:
        self._pause(now)
        program = self._programs.get(turn.trajectory)
        num_tokens = turn.num_prompt_tokens + _DECODE_BUFFER_TOKENS
        if program is not None and program.is_active:
            chosen: int | None = program.replica
        else:
            since = self._waiting_since.setdefault(turn.trajectory, now)
            home = None if program is None else program.replica
            chosen = self._choose(home, num_tokens, now - since)
        if chosen is None:
            return None
        self._waiting_since.pop(turn.trajectory, None)
        if program is None:
            program = self._programs[turn.trajectory] = _Program(chosen, 0)
        elif not program.is_active:
            program.replica, program.num_tokens, program.is_active = chosen, 0, True
        self._count(program, num_tokens)
        return chosen

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        program = self._programs[turn.trajectory]
        self._count(program, end.num_context_tokens)
        program.num_turns += 1
        program.ended_at = now
        heapq.heappush(self._pauses, (now + self._ttl_s, turn.trajectory, program.num_turns))

    def finished(self, trajectory: int, now: float) -> None:
        self._waiting_since.pop(trajectory, None)
        program = self._programs.pop(trajectory, None)
        if program is not None and program.is_active:
            self._count(program, 0)

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        del self.used_tokens[replica]
        lost = [trajectory for trajectory, program in self._programs.items() if program.replica == replica]
        for trajectory in lost:
            del self._programs[trajectory]

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self.used_tokens[replica] = 0

    def pause(self, trajectory: int) -> None:
        """Count a trajectory's context no more until it resumes."""
        program = self._programs[trajectory]
        self._count(program, 0)
        program.is_active = False

    def _choose(self, home: int | None, num_tokens: int, waited_s: float) -> int | None:
        roomiest = min(self.used_tokens, key=self.used_tokens.__getitem__)
        if home is None:
            home = roomiest
        if waited_s >= self._force_s or self._fits(home, num_tokens):
            return home
        headroom = self._room(roomiest) - self._room(home)
        is_worth_it = headroom >= _CROSS_REPLICA_HEADROOM * num_tokens
        return roomiest if waited_s >= _OBSERVATION_S and is_worth_it and self._fits(roomiest, num_tokens) else None

    def _fits(self, replica: int, num_tokens: int) -> bool:
        return not self.used_tokens[replica] or num_tokens <= self._capacity_tokens - self.used_tokens[replica]

    def _room(self, replica: int) -> float:
        return max(0.0, self._capacity_tokens - self.used_tokens[replica])

    def _count(self, program: _Program, num_tokens: int) -> None:
        self.used_tokens[program.replica] += num_tokens - program.num_tokens
        program.num_tokens = num_tokens

    def _pause(self, now: float) -> None:
        while self._pauses and self._pauses[0][0] <= now:
            _, trajectory, num_turns = heapq.heappop(self._pauses)
            program = self._programs.get(trajectory)
            is_idle = trajectory not in self._runs_on
            if program is not None and program.is_active and is_idle and program.num_turns == num_turns:
                self.pause(trajectory)
