"""Expected work: how much longer a trajectory will become, from its age, its siblings and all that finished.

A trajectory's growth is the tokens of its context beyond its prompt. Growths of one group are alike (Seer, arXiv
2511.14617: lengths within a group are strongly correlated), so its logarithm is taken as normal in two levels:

    log growth of a sample ~ N(m_g, within^2),    m_g of its group ~ N(m, between^2)

m and the whole spread are those of the Kaplan-Meier estimate over buckets of growth (JASA 53, 1958): trajectories
that have not ended count with all that they have outgrown, else the short ones, which end first, would be taken
for all. The posterior of m_g given its finished samples is the usual normal one. That the oldest live sibling has
grown to g and not ended moves its two moments as a truncation does: by the hazard of the normal at log g. What is
expected of a sample that has grown to g itself is the mean of the lognormal above g (its hazard by age):
E[G | G > g] - g.

Ownership: the Balancer alone. Invariant: an estimate needs no walk over trajectories; a group is forgotten when its
last sample has ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIN_GROWTH = 1.0  # tokens: a logarithm needs some
_NUM_PRIOR = 4.0  # finished samples that the priors of the mean and of the spreads are worth
_MIN_SPREAD = 0.1
_FIRST_BUCKET = 64.0  # tokens of growth
_BUCKET_LOG = math.log(2) / 2  # each bucket is wider by a factor of sqrt(2)
_NUM_GROWTHS = 28
_CHANGES_BEFORE_ESTIMATE = 32  # buckets outgrown


@dataclass(frozen=True, slots=True)
class WorkPriors:
    """The expectation before anything has finished."""

    growth_tokens: float = 8192.0
    between_groups: float = 0.6  # of the logarithm, as in serving.md's recipe
    within_group: float = 0.3
    sampled_share: float = 0.33  # of the growth; the rest is observed
    turn_tokens: float = 800.0  # by which a turn grows its context
    num_remembered: int = 1024  # finished samples that the running means remember, about


@dataclass(frozen=True, slots=True)
class Remaining:
    """The tokens still expected of one trajectory."""

    growth_tokens: float
    sampled_tokens: float
    num_turns: float

    @property
    def observed_tokens(self) -> float:
        return self.growth_tokens - self.sampled_tokens

    def at_most(self, growth_tokens: float) -> Remaining:
        """Return the same, cut to a growth: a context has an end."""
        if self.growth_tokens <= growth_tokens:
            return self
        share = max(growth_tokens, 0.0) / self.growth_tokens
        return Remaining(self.growth_tokens * share, self.sampled_tokens * share, self.num_turns * share)


@dataclass(slots=True)
class _Siblings:
    """The growths that the samples of one group have told."""

    num_live: int = 0
    num_finished: int = 0
    sum_logs: float = 0.0  # of the growths of finished samples
    oldest: float = 0.0  # the largest growth of a sample that has not finished


class ExpectedWork:
    """The estimator. Groups are counted in by `begin` and out by `end`."""

    def __init__(self, priors: WorkPriors | None = None) -> None:
        self._priors = priors or WorkPriors()
        self._groups: dict[str, _Siblings] = {}
        self._between = self._priors.between_groups**2  # variances
        self._within = self._priors.within_group**2
        self._num_finished = 0
        self._mean_log = math.log(self._priors.growth_tokens) - (self._between + self._within) / 2
        spread = math.sqrt(self._between + self._within)
        below = [_normal((math.log(_bucket_end(k)) - self._mean_log) / spread) for k in range(_NUM_GROWTHS)]
        self._ended = [_NUM_PRIOR * (b - a) for a, b in zip([0.0, *below], below, strict=False)]
        self._outgrew = [_NUM_PRIOR * (1 - share) for share in below]
        self._num_changes = 0
        self._sampled_share = self._priors.sampled_share
        self._turn_tokens = self._priors.turn_tokens
        self._num_turns = 0

    def begin(self, group_id: str) -> None:
        """Count a trajectory in."""
        self._groups.setdefault(group_id, _Siblings()).num_live += 1

    def turn(self, group_id: str, growth_tokens: float, turn_tokens: float, sampled_tokens: int) -> None:
        """Learn from a turn that grew its context by `turn_tokens`, now `growth_tokens` beyond its prompt."""
        self._num_turns = min(self._num_turns + 1, self._priors.num_remembered)
        weight = 1 / (self._num_turns + _NUM_PRIOR)
        self._turn_tokens += weight * (turn_tokens - self._turn_tokens)
        if turn_tokens > 0:
            self._sampled_share += weight * (min(sampled_tokens / turn_tokens, 1.0) - self._sampled_share)
        self._outgrow(growth_tokens - turn_tokens, growth_tokens)
        group = self._groups.get(group_id)
        if group is not None:
            group.oldest = max(group.oldest, growth_tokens)

    def end(self, group_id: str, growth_tokens: float | None, known_tokens: float) -> None:
        """Count a trajectory out. `growth_tokens` of one that ran to its end teach; None teaches nothing.

        `known_tokens` are the growth at its last turn that was told of.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_live -= 1
        if growth_tokens is not None:
            self._outgrow(known_tokens, growth_tokens)
            self._ended[_bucket_of(growth_tokens)] += 1
            self._learn(group, math.log(max(growth_tokens, _MIN_GROWTH)))
            self._estimate()
        if group.num_live <= 0:
            del self._groups[group_id]

    def remaining(self, group_id: str, growth_tokens: float) -> Remaining:
        """Return what is still expected of a sample of this group that has grown so far."""
        mean, variance = self._of_group(group_id, growth_tokens)
        growth = _mean_above(mean, math.sqrt(variance), growth_tokens)
        return Remaining(growth, growth * self._sampled_share, growth / max(self._turn_tokens, 1.0))

    def hoped(self, group_id: str) -> float:
        """Return the growth that the next sample of a group may well have: one standard deviation of what is not
        known of its group, and will not be told by the samples that it has now, above the mean.

        Groups of which nothing is known come before what is known to be middling, one sample of each after the
        other (as upper confidence bounds choose in batches: Desautels et al., JMLR 15, 2014).
        """
        mean, variance = self._of_group(group_id, 0.0)
        group = self._groups.get(group_id)
        num_begun = 0 if group is None else group.num_live + group.num_finished
        spread = math.sqrt(1 / (1 / self._between + num_begun / self._within))
        return math.exp(mean + variance / 2 + spread)

    # --- inside ---

    def _of_group(self, group_id: str, growth_tokens: float) -> tuple[float, float]:
        """Return mean and variance of the logarithm of the growth of a sample that has grown so far.

        What the sample itself has outgrown is left to the caller.
        """
        group = self._groups.get(group_id)
        if group is None:
            return self._mean_log, self._between + self._within
        precision = 1 / self._between + group.num_finished / self._within
        mean = (self._mean_log / self._between + group.sum_logs / self._within) / precision
        variance = 1 / precision
        if group.oldest > max(growth_tokens, _MIN_GROWTH):
            whole = variance + self._within
            distance = (math.log(group.oldest) - mean) / math.sqrt(whole)
            hazard = _hazard(distance)
            mean += variance / math.sqrt(whole) * hazard
            variance -= variance * variance / whole * hazard * (hazard - distance)
        return mean, variance + self._within

    def _outgrow(self, before: float, after: float) -> None:
        """Count the buckets that a trajectory has left behind."""
        for bucket in range(_bucket_of(before), _bucket_of(after)):
            self._outgrew[bucket] += 1
            self._num_changes += 1
        if self._num_changes >= _CHANGES_BEFORE_ESTIMATE:
            self._estimate()

    def _estimate(self) -> None:
        """Make mean and spread anew: each bucket ends its share of those that came to its end."""
        self._num_changes = 0
        alive, mean, square = 1.0, 0.0, 0.0
        for bucket in range(_NUM_GROWTHS):
            ended, outgrew = self._ended[bucket], self._outgrew[bucket]
            is_last = bucket == _NUM_GROWTHS - 1
            share = alive * (1.0 if is_last else ended / max(ended + outgrew, 1e-9))
            middle = math.log(_bucket_end(bucket)) - _BUCKET_LOG / 2
            mean, square, alive = mean + share * middle, square + share * middle * middle, alive - share
        self._mean_log = mean
        self._between = max(square - mean * mean - self._within, _MIN_SPREAD**2)

    def _learn(self, group: _Siblings, log_growth: float) -> None:
        """Learn how far siblings are apart: from the mean of the others, whose own spread is within / n."""
        if group.num_finished:
            self._num_finished = min(self._num_finished + 1, self._priors.num_remembered)
            deviation = log_growth - group.sum_logs / group.num_finished
            shrunk = deviation * deviation * group.num_finished / (group.num_finished + 1)
            self._within += (shrunk - self._within) / (self._num_finished + _NUM_PRIOR)
            self._within = max(self._within, _MIN_SPREAD**2)
        group.num_finished += 1
        group.sum_logs += log_growth


def _bucket_of(growth_tokens: float) -> int:
    if growth_tokens <= _FIRST_BUCKET:
        return 0
    return min(math.ceil(math.log(growth_tokens / _FIRST_BUCKET) / _BUCKET_LOG), _NUM_GROWTHS - 1)


def _bucket_end(bucket: int) -> float:
    return _FIRST_BUCKET * math.exp(bucket * _BUCKET_LOG)


def _mean_above(mean: float, spread: float, grown: float) -> float:
    """Return E[G | G > g] - g of a lognormal G."""
    if grown < _MIN_GROWTH:
        return math.exp(mean + spread * spread / 2) - grown
    distance = (mean - math.log(grown)) / spread
    above = _normal(distance)
    if above < 1e-4:  # far in the tail its growth goes on about as g * spread / -distance (Mills' ratio)
        return grown * spread / -distance
    return max(math.exp(mean + spread * spread / 2) * _normal(distance + spread) / above - grown, 0.0)


def _hazard(distance: float) -> float:
    """Return the mean of a standard normal variable above a value (the inverse Mills ratio)."""
    above = _normal(-distance)
    if above < 1e-12:
        return distance + 1 / distance
    return math.exp(-distance * distance / 2) / (math.sqrt(2 * math.pi) * above)


def _normal(value: float) -> float:
    """Return the normal distribution's share below a value."""
    return 0.5 * math.erfc(-value / math.sqrt(2))
