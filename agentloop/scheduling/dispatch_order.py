"""The order in which queued samples go out: by priority, by shares within one, and in a flow as they came.

A flow is what is served in its own turn: the rollouts of one owner on equal terms, of one run where they name one,
and a rollout by itself where a limit is its own. Of a higher priority everything goes before anything lower. Flows
of one priority share by stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic
Proportional-Share Resource Management", MIT/LCS/TM-528, 1995): each sample moves its flow's pass on by 1 / share,
and the least pass is next. A flow that had nothing to give joins at the pass of the last one served: it can neither
save up nor fall behind.

A sample is the unit. A group needs no worker of its own: the balancer brings siblings to one replica, wherever they
run. So no group waits for room, none is passed by, and places stay empty only when nothing is admitted.

Invariants: a flow is in the heap, or held back (its `max_running` runs, or its budget has no room), or has nothing
queued. Each step costs O(log flows).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from agentloop.api import RolloutTerms
from agentloop.scheduling.samples import LiveRollout, Sample
from agentloop.scheduling.staleness_budget import FleetVersions, StalenessBudget

FlowKey: TypeAlias = tuple[RolloutTerms, str, bool]


@dataclass(slots=True, eq=False)
class _Flow:
    terms: RolloutTerms
    budget: StalenessBudget | None
    number: int  # of its creation: among equals the older goes first
    num_rollouts: int = 0
    num_running: int = 0
    pass_value: float = 0.0
    is_offered: bool = False  # it is in the heap
    again: OrderedDict[str, Sample] = field(default_factory=OrderedDict)  # what a worker had before goes first
    waiting: OrderedDict[str, Sample] = field(default_factory=OrderedDict)

    @property
    def has_queued(self) -> bool:
        return bool(self.again or self.waiting)

    def admits(self, versions: FleetVersions) -> bool:
        if self.terms.max_running is not None and self.num_running >= self.terms.max_running:
            return False
        return self.budget is None or self.budget.room(versions) > 0

    def pop(self) -> Sample:
        _, sample = (self.again or self.waiting).popitem(last=False)
        return sample


class DispatchOrder:
    """Queued samples in their flows. Whoever takes a sample from it says `begun`, and later `ended`."""

    def __init__(self) -> None:
        self._flows: dict[FlowKey, _Flow] = {}
        self._heap: list[tuple[int, float, int, _Flow]] = []
        self._held: defaultdict[StalenessBudget, set[_Flow]] = defaultdict(set)  # by budget: flows without room
        self._passes: dict[int, float] = {}  # priority -> the pass of the flow it served last
        self._num_flows = 0

    def join(self, rollout: LiveRollout) -> None:
        """Make a rollout's flow, or find it. `leave` follows."""
        key = _key(rollout)
        flow = self._flows.get(key)
        if flow is None:
            self._num_flows += 1
            self._flows[key] = flow = _Flow(rollout.terms, rollout.budget, self._num_flows)
        flow.num_rollouts += 1

    def leave(self, rollout: LiveRollout) -> None:
        """Forget a rollout of which nothing is queued or runs; the last one of its flow takes that along."""
        flow = self._flows[_key(rollout)]
        flow.num_rollouts -= 1
        if flow.num_rollouts == 0:
            del self._flows[_key(rollout)]
            if flow.budget is not None:
                self._release(flow.budget, flow)

    def add(self, sample: Sample, *, is_again: bool = False) -> None:
        """Queue a sample: behind those of its flow, or behind those only that a worker had before."""
        flow = self._flows[_key(sample.rollout)]
        (flow.again if is_again else flow.waiting)[sample.assignment_id] = sample
        self._offer(flow)

    def discard(self, sample: Sample) -> None:
        """Take a sample out of its turn, if it is queued here."""
        flow = self._flows[_key(sample.rollout)]
        if flow.again.pop(sample.assignment_id, None) is None:
            flow.waiting.pop(sample.assignment_id, None)

    def next(self, versions: FleetVersions) -> Sample | None:
        """Take out the next sample that its limits admit; None if there is none."""
        while self._heap:
            priority, pass_value, number, flow = heapq.heappop(self._heap)
            if not flow.has_queued:
                flow.is_offered = False
            elif not flow.admits(versions):
                flow.is_offered = False
                if flow.budget is not None:
                    self._held[flow.budget].add(flow)
            else:
                self._passes[priority] = pass_value
                flow.pass_value = pass_value + 1 / flow.terms.share
                heapq.heappush(self._heap, (priority, flow.pass_value, number, flow))
                return flow.pop()
        return None

    def admits(self, sample: Sample, versions: FleetVersions) -> bool:
        """Tell if a sample's limits would let it run now, whatever its turn."""
        return self._flows[_key(sample.rollout)].admits(versions)

    def begun(self, sample: Sample) -> None:
        """Count a sample as running."""
        self._flows[_key(sample.rollout)].num_running += 1

    def ended(self, sample: Sample) -> None:
        """Count a sample as running no more; what its place or its budget held back is offered again."""
        flow = self._flows[_key(sample.rollout)]
        flow.num_running -= 1
        self._offer(flow)
        if flow.budget is not None:
            self._release(flow.budget)

    def versions_changed(self) -> None:
        """Offer again what the staleness limits held back."""
        for budget in list(self._held):
            self._release(budget)

    def __iter__(self) -> Iterator[Sample]:
        """Yield everything queued, in no order."""
        for flow in self._flows.values():
            yield from flow.again.values()
            yield from flow.waiting.values()

    # --- inside ---

    def _release(self, budget: StalenessBudget, without: _Flow | None = None) -> None:
        for flow in self._held.pop(budget, set()):
            if flow is not without:
                self._offer(flow)

    def _offer(self, flow: _Flow) -> None:
        if flow.is_offered or not flow.has_queued:
            return
        priority = -flow.terms.priority
        flow.is_offered = True
        flow.pass_value = max(flow.pass_value, self._passes.get(priority, 0.0))
        heapq.heappush(self._heap, (priority, flow.pass_value, flow.number, flow))


def _key(rollout: LiveRollout) -> FlowKey:
    terms, budget = rollout.terms, rollout.budget
    if budget is not None:
        return terms, budget.limit.run_id or rollout.rollout_id, True
    is_alone = not terms.run_id and terms.max_running is not None
    return terms, rollout.rollout_id if is_alone else "", False
