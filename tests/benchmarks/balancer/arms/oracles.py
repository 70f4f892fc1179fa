"""Policies that know what no balancer can know; nothing is measured against them but distance.

- `StickyGroups` on engines that never evict: the least prefill a run can have where trajectories stay.
- `LongestFirst`: the known lengths of all trajectories. The longest begins first; groups go whole to the replica
  with the least work left; and no replica is given more contexts than a multiple of its KV capacity.
- `KnownPrograms`: admission by tokens as vllm-router's Program scheduling has it, with known lengths and tools: the
  longest goes first, and a context counts during a tool if the tool is known to be short.
"""

from __future__ import annotations

import math
from collections import defaultdict

from tests.benchmarks.balancer.arms.programs import Programs
from tests.benchmarks.balancer.arms.spread import Counting
from tests.benchmarks.balancer.arms.sticky import StickySessions
from tests.benchmarks.balancer.policy import FleetShape, TurnAsk, TurnEnd, step_s
from tests.benchmarks.balancer.step_curves import StepTimes
from tests.benchmarks.balancer.workload import Trajectory, Workload


class StickyGroups(StickySessions):
    """A trajectory where it was; a new one with its siblings, unless `slack` fewer trajectories live elsewhere."""

    def __init__(self, shape: FleetShape, seed: int, slack: int) -> None:
        super().__init__(shape, seed)
        self._slack = slack
        self._group_homes: dict[int, int] = {}

    def choose(self, turn: TurnAsk) -> int:
        least = super().choose(turn)
        home = self._group_homes.get(turn.group)
        if home in self.in_flight and self.num_sessions[home] < self.num_sessions[least] + self._slack:
            return home
        self._group_homes[turn.group] = least
        return least


class LongestFirst(Counting):
    """Longest processing time first with known lengths; sticky.

    `fill`: contexts of a replica's live trajectories, at their known mean, over its KV capacity; None: no bound.
    `is_together`: siblings go where their group's first went, as long as there is room.
    """

    def __init__(
        self, shape: FleetShape, workload: Workload, seed: int, fill: float | None, is_together: bool
    ) -> None:
        super().__init__(shape, seed)
        self._known = _known(shape, workload)
        self._siblings: defaultdict[int, list[_Known]] = defaultdict(list)
        for one in self._known.values():
            self._siblings[one.group].append(one)
        self._room_tokens = None if fill is None else fill * shape.capacity_tokens
        self._is_together = is_together
        self._homes: dict[int, int] = {}  # trajectory -> replica
        self._planned: dict[int, int] = {}  # trajectory -> replica that its work is counted on
        self._group_homes: dict[int, int] = {}
        self._work_s: dict[int, float] = dict.fromkeys(self.in_flight, 0.0)  # planned and not done
        self._num_tokens: dict[int, float] = dict.fromkeys(self.in_flight, 0.0)  # of live trajectories

    def rank(self, turn: TurnAsk, now: float) -> float:
        return -self._known[turn.trajectory].left_s

    def place(self, turn: TurnAsk, now: float) -> int | None:
        home = self._homes.get(turn.trajectory)
        if home is not None:
            return home
        known = self._known[turn.trajectory]
        chosen = self._choose(known)
        if chosen is None:
            return None
        if self._is_together and turn.group not in self._group_homes:
            self._group_homes[turn.group] = chosen
            for sibling in self._siblings[turn.group]:
                if sibling.number not in self._planned:
                    self._plan(sibling, chosen)
        self._plan(known, chosen)
        self._homes[turn.trajectory] = chosen
        self._num_tokens[chosen] += known.mean_tokens
        return chosen

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        done_s = self._known[turn.trajectory].turn_ended()
        self._work_s[self._planned[turn.trajectory]] -= done_s

    def finished(self, trajectory: int, now: float) -> None:
        home = self._homes.pop(trajectory, None)
        if home is not None:
            self._num_tokens[home] -= self._known[trajectory].mean_tokens
        planned = self._planned.pop(trajectory, None)
        if planned is not None:
            self._work_s[planned] -= self._known[trajectory].work_s

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        for by_key in (self._homes, self._planned, self._group_homes):
            for key in [key for key, where in by_key.items() if where == replica]:
                del by_key[key]
        del self._work_s[replica], self._num_tokens[replica]

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self._work_s[replica] = self._num_tokens[replica] = 0.0

    def _choose(self, known: _Known) -> int | None:
        group_home = self._group_homes.get(known.group) if self._is_together else None
        if group_home is not None and self._has_room(group_home, known):
            return group_home
        with_room = [replica for replica in self.in_flight if self._has_room(replica, known)]
        return self.any_least(self._work_s.__getitem__, with_room) if with_room else None

    def _has_room(self, replica: int, known: _Known) -> bool:
        num_tokens = self._num_tokens[replica]
        return not num_tokens or self._room_tokens is None or num_tokens + known.mean_tokens <= self._room_tokens

    def _plan(self, known: _Known, replica: int) -> None:
        before = self._planned.get(known.number)
        if before is not None:
            self._work_s[before] -= known.work_s
        self._planned[known.number] = replica
        self._work_s[replica] += known.work_s


class KnownPrograms(Programs):
    """Programs that know their lengths and tools. A context counts during tools of at most `hold_s` seconds."""

    def __init__(self, shape: FleetShape, workload: Workload, seed: int, fill: float, hold_s: float) -> None:
        super().__init__(shape, seed, fill, ttl_s=math.inf)
        self._hold_s = hold_s
        self._known = _known(shape, workload)

    def rank(self, turn: TurnAsk, now: float) -> float:
        return -self._known[turn.trajectory].left_s

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        known = self._known[turn.trajectory]
        known.turn_ended()
        if known.tools[turn.turn] > self._hold_s:
            self.pause(turn.trajectory)


class _Known:
    """What is left of a trajectory: seconds until its end, and the seconds of an engine that it takes."""

    def __init__(self, one: Trajectory, times: StepTimes, num_decoding: float) -> None:
        self.number, self.group = one.number, one.group
        prompts = one.prompt_tokens()
        contexts = [prompt + output for prompt, output in zip(prompts, one.outputs, strict=True)]
        self.mean_tokens = sum(contexts) / len(contexts)
        self.tools = [seconds for _, seconds in one.tools] + [0.0]  # by turn
        self._turns: list[tuple[float, float]] = []  # seconds until its tool returns, and of the engine
        num_cached = 0
        for turn, (prompt, output) in enumerate(zip(prompts, one.outputs, strict=True)):
            token_s = step_s(times, num_decoding, num_decoding * contexts[turn])
            prefill_s = times.prefill(prompt, num_cached)
            self._turns.append(
                (prefill_s + output * token_s + self.tools[turn], prefill_s + output * token_s / num_decoding)
            )
            num_cached = contexts[turn]
        self._turns.reverse()
        self.left_s = sum(turn_s for turn_s, _ in self._turns)
        self.work_s = sum(work_s for _, work_s in self._turns)

    def turn_ended(self) -> float:
        """Take the next turn off. Returns the engine's seconds that it took."""
        turn_s, work_s = self._turns.pop()
        self.left_s -= turn_s
        self.work_s -= work_s
        return work_s


def _known(shape: FleetShape, workload: Workload) -> dict[int, _Known]:
    """Return what is known, by trajectory, with as many decoding on a replica as workers have places for."""
    num_decoding = max(1.0, shape.max_live / shape.num_replicas)
    return {one.number: _Known(one, shape.step_times, num_decoding) for one in workload.trajectories}
