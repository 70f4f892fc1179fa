"""Rebalancing: which trajectories go elsewhere while their tools run, and where all go after a flush.

A replica's last trajectory ends about when all its work is done (each step serves all that are there), so what
counts is the replica with the most work. A trajectory goes from s to t iff that makes the larger of the two smaller
by more than it costs:

    max(W_s - w, W_t + w + prefill(c)) + prefill(c) + hysteresis < W_s

Rails: tokens computed again by moves are at most a share of all prompt tokens, so that reuse does not suffer,
except in the tail, when few trajectories are left and balance is all that counts; nobody moves twice within some of
its own prefills.

Ownership: the Balancer alone. Invariant: a move is planned only for a trajectory that is at a tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentloop.scheduling.lease_table import Holding
from agentloop.scheduling.placement import Placement
from agentloop.scheduling.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """Bounds of moves."""

    hysteresis: float = 0.05  # of the larger replica's work, that a move must win beside its cost
    budget_share: float = 0.005  # of all prompt tokens, that moves may compute again
    budget_tokens: float = 100_000.0  # to begin with
    tail_trajectories: float = 4.0  # a replica on average, below which the budget is none
    min_stay_prefills: float = 20.0  # times its prefill that a trajectory stays where it is


class Rebalance:
    """The rails, and the choice of targets."""

    def __init__(self, placement: Placement, step_times: StepTimes, config: RebalanceConfig) -> None:
        self._placement = placement
        self._times = step_times
        self._config = config
        self._budget_tokens = config.budget_tokens

    def prompted(self, num_prompt_tokens: float) -> None:
        """Take in a prompt, which adds to what moves may cost."""
        self._budget_tokens += self._config.budget_share * num_prompt_tokens

    def target(self, holding: Holding, rho: float, now: float) -> str | None:
        """Return where a trajectory that has just gone to its tool had better go on; None: it stays."""
        placement, config, here = self._placement, self._config, holding.lease.replica_id
        if holding.earlier or not placement.takes_traffic(holding.lease, holding.demand.needs):
            return None
        there = placement.least(here, holding.demand.needs)
        work_here, work_there = placement.work(here), placement.work(there)
        prefill_s = self._times.prefill(holding.context_tokens)
        own_s = holding.charge.work_s
        gain = work_here - max(work_here - own_s, work_there + own_s + prefill_s)
        if gain <= prefill_s + config.hysteresis * work_here:
            return None
        if now - holding.granted_at < config.min_stay_prefills * prefill_s:
            return None
        is_tail = placement.num_counted < config.tail_trajectories * placement.num_placeable
        if not is_tail and self._budget_tokens < holding.context_tokens:
            return None
        if not placement.fits(there, holding.demand.group_id, holding.charge, rho):
            return None
        self._budget_tokens -= holding.context_tokens
        return there

    def spread(self, waiting: Sequence[Holding]) -> Iterator[tuple[Holding, str]]:
        """Yield who goes where after a flush, when a move costs nothing: the longest first, to the least work.

        Each is to be moved before the next is asked for.
        """
        for holding in sorted(waiting, key=lambda one: -one.charge.work_s):
            placement, here = self._placement, holding.lease.replica_id
            if not placement.takes_traffic(holding.lease, holding.demand.needs):
                continue
            there = placement.least(here, holding.demand.needs)
            if placement.work(there) + holding.charge.work_s < placement.work(here):
                yield holding, there
