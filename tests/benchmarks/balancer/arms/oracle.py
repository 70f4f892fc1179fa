"""A policy that knows all lengths and tool times: an upper bound, not a competitor.

Longest processing time first: the trajectory with the most remaining seconds starts first. A group is assigned as a
unit to the replica with the least remaining work, and stays there.
"""

from __future__ import annotations

from collections import defaultdict

from tests.benchmarks.balancer.arms.peers import Counting
from tests.benchmarks.balancer.policy import FleetShape, TurnAsk, TurnEnd
from tests.benchmarks.balancer.workload import Trajectory, Workload


class LongestFirst(Counting):
    """Longest processing time first with known lengths; sticky, siblings together."""

    def __init__(self, shape: FleetShape, workload: Workload, seed: int) -> None:
        super().__init__(shape, seed)
        self._known = {one.number: _Known(one, shape) for one in workload.trajectories}
        self._siblings: defaultdict[int, list[int]] = defaultdict(list)
        for one in workload.trajectories:
            self._siblings[one.group].append(one.number)
        self._homes: dict[int, int] = {}  # trajectory -> replica whose load includes its work
        self._work_s: dict[int, float] = dict.fromkeys(self.in_flight, 0.0)

    def rank(self, turn: TurnAsk, now: float) -> float:
        return -self._known[turn.trajectory].left_s

    def place(self, turn: TurnAsk, now: float) -> int:
        if turn.trajectory not in self._homes:
            chosen = self.any_least(self._work_s.__getitem__)
            for number in self._siblings[turn.group]:
                if number not in self._homes:
                    self._homes[number] = chosen
                    self._work_s[chosen] += self._known[number].work_s
        return self._homes[turn.trajectory]

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        self._work_s[self._homes[turn.trajectory]] -= self._known[turn.trajectory].turn_ended()

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        self._homes = {number: home for number, home in self._homes.items() if home != replica}
        del self._work_s[replica]

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self._work_s[replica] = 0.0


def seconds_of(one: Trajectory, shape: FleetShape) -> float:
    """Return the duration of a trajectory on a fully loaded fleet, including its tools."""
    return _Known(one, shape).left_s


class _Known:
    """The remaining work of a trajectory: seconds until its end, and the engine seconds that it needs."""

    def __init__(self, one: Trajectory, shape: FleetShape) -> None:
        times, num_decoding = shape.step_times, max(1.0, shape.max_live / shape.num_replicas)
        self._turns: list[tuple[float, float]] = []  # seconds until its tool returns, and engine seconds
        num_cached = 0
        tools = (*one.tools, 0.0)
        for prompt, output, tool_s in zip(one.prompt_tokens(), one.outputs, tools, strict=True):
            context = prompt + output
            sampled_s = output * times.step(num_decoding, num_decoding * context)
            prefill_s = times.step_with_prefill([(num_cached, prompt)])
            self._turns.append((prefill_s + sampled_s + tool_s, prefill_s + sampled_s / num_decoding))
            num_cached = context
        self._turns.reverse()
        self.left_s = sum(turn_s for turn_s, _ in self._turns)
        self.work_s = sum(work_s for _, work_s in self._turns)

    def turn_ended(self) -> float:
        """Remove the next turn, and return the engine seconds that it used."""
        turn_s, work_s = self._turns.pop()
        self.left_s -= turn_s
        self.work_s -= work_s
        return work_s
