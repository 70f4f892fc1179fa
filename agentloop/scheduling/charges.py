"""Charges: what a trajectory counts for on its replica, and what its turns and its end teach of others.

A charge has the seconds of work and the KV that a trajectory is still expected to need (`expected_work.py`,
`kv_forecast.py`). It is made when the trajectory gets its place, and made anew at each of its turns.

Ownership: the Balancer alone, which counts charges on replicas. Invariant: whoever `begin` counted in, `end` counts
out once.
"""

from __future__ import annotations

from dataclasses import replace

from agentloop.scheduling.expected_work import ExpectedWork, Remaining, WorkPriors
from agentloop.scheduling.kv_forecast import KVNeed
from agentloop.scheduling.lease_table import Holding
from agentloop.scheduling.placement import Charge, Demand, Placement
from agentloop.scheduling.step_times import StepTimes

_USUAL_PROMPT_TOKENS = 1024.0  # before the first one was seen


class Charges:
    """The making of charges, and what they follow from."""

    def __init__(
        self, placement: Placement, step_times: StepTimes, priors: WorkPriors, growth_turns: float
    ) -> None:
        """`growth_turns`: the turns by which each trajectory is given room to grow."""
        self._placement = placement
        self._times = step_times
        self._work = ExpectedWork(priors)
        self._growth_turns = growth_turns
        self._num_remembered = priors.num_remembered
        self._num_prompts = 0
        self.mean_prompt_tokens = _USUAL_PROMPT_TOKENS  # of trajectories whose first turn has ended

    def hoped(self, group_id: str) -> float:
        """Return the tokens that the next sample of a group may well grow by."""
        return self._work.hoped(group_id)

    def begin(self, group_id: str) -> None:
        """Count a trajectory in."""
        self._work.begin(group_id)

    def first(self, demand: Demand) -> Charge:
        """Return the charge of somebody who asks for a first place."""
        prompt_tokens = float(demand.num_prompt_tokens)
        if demand.is_session:
            return Charge(self._times.turn_share(0.0, prompt_tokens, 0.0), KVNeed(prompt_tokens, 0.0))
        return self.fresh(demand.group_id, prompt_tokens, demand.group_size)

    def fresh(self, group_id: str, prompt_tokens: float, group_size: int) -> Charge:
        """Return the charge of a group's trajectory without turns."""
        left = self._left(group_id, 0, prompt_tokens)
        work_s = self._times.turn_share(prompt_tokens, left.sampled_tokens, left.observed_tokens)
        shared = prompt_tokens if group_size > 1 else 0.0
        return Charge(work_s, KVNeed(prompt_tokens - shared, self._soon(left)), shared, self._work.hoped(group_id))

    def of(self, holding: Holding, *, is_kept: bool) -> Charge:
        """Return what a holder is charged with from here on."""
        demand = holding.demand
        if demand.is_session:
            return replace(holding.charge, is_kept=is_kept)
        if holding.num_turns == 0:
            charge = self.fresh(demand.group_id, holding.prompt_tokens, demand.group_size)
            return replace(charge, is_kept=is_kept)
        context_tokens = holding.context_tokens
        left = self._left(demand.group_id, holding.num_turns, context_tokens)
        work_s = self._times.turn_share(context_tokens, left.sampled_tokens, left.observed_tokens)
        if not holding.is_warm:
            work_s += self._times.prefill(context_tokens)
        shared = holding.prompt_tokens if demand.group_size > 1 else 0.0
        need = KVNeed(context_tokens - shared, self._soon(left))
        return Charge(work_s, need, shared, left.growth_tokens, is_kept)

    def turn(self, holding: Holding, context_tokens: int, sampled_tokens: int) -> None:
        """Learn from a trajectory's turn, before the holding tells of it."""
        before_tokens = holding.context_tokens
        if holding.num_turns == 0:
            before_tokens = holding.prompt_tokens = float(context_tokens - sampled_tokens)
            self._num_prompts = min(self._num_prompts + 1, self._num_remembered)
            self.mean_prompt_tokens += (before_tokens - self.mean_prompt_tokens) / self._num_prompts
        turn_tokens = max(context_tokens - before_tokens, 0.0)
        self._work.turn(holding.demand.group_id, holding.num_turns + 1, turn_tokens, sampled_tokens)

    def end(self, holding: Holding, num_tokens: int | None) -> None:
        """Count a holder out; one that ran to its end, grown by `num_tokens`, teaches."""
        grown = max(holding.context_tokens - holding.prompt_tokens, 0.0) if holding.num_turns else 0.0
        is_taught = num_tokens is not None and not holding.demand.is_session
        num_turns = holding.num_turns if is_taught else None
        self._work.end(holding.demand.group_id, num_turns, float(num_tokens or 0) - grown)

    def _soon(self, left: Remaining) -> float:
        """Return the tokens that a trajectory is given room to grow by."""
        return left.growth_tokens * min(1.0, self._growth_turns / max(left.num_turns, 1e-9))

    def _left(self, group_id: str, num_turns: int, context_tokens: float) -> Remaining:
        """Return what is still expected of a trajectory: no context grows beyond the longest that is served."""
        room_tokens = self._placement.max_context_tokens - context_tokens
        return self._work.remaining(group_id, num_turns).at_most(room_tokens)
