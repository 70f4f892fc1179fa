"""Expected work: how many turns a trajectory still takes, from its age, its siblings and all that finished.

Turns of one group are alike (Seer, arXiv 2511.14617: lengths within a group are strongly correlated), and tell more
than tokens do: of those some turns are much longer than others, which says nothing of what is to come. So the
logarithm of a trajectory's turns is taken as normal in two levels:

    log turns of a sample ~ N(m_g, within^2),    m_g of its group ~ N(m, between^2)

m and the whole spread are those of the Kaplan-Meier estimate over buckets of turns (JASA 53, 1958): trajectories
that have not ended count with all that they have outgrown, else the short ones, which end first, would be taken
for all. The posterior of m_g given its finished samples is the usual normal one; but some samples give up at any
turn, so a short one counts only with the probability that it did not (a mixture: it may not condemn a group that
has no other). That the oldest live sibling has had n turns and not ended moves the two moments as a truncation
does: by the hazard of the normal at log n. What is expected of a sample that has had n turns itself is the mean of
the lognormal above n (its hazard by age): E[N | N > n] - n. Each turn is expected to grow the context by what those
of its group did.

Ownership: the Balancer alone. Invariants: an estimate needs no walk over trajectories; what a group has told is
kept while it has live samples, and of `_MAX_IDLE_GROUPS` others, as more samples of them may begin.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

_NUM_PRIOR = 4.0  # finished samples that the priors of the mean and of the spreads are worth
_MIN_SPREAD = 0.1
_NUM_PRIOR_SPREAD = 64.0  # and of the spread between groups: those that end first are alike
_MAX_SIBLINGS = 16  # the last finished samples of a group, that count
_GIVES_UP = 0.1  # share of samples that end at a turn which says nothing of their siblings
_NUM_UNIT_BUCKETS = 16  # of one turn each
_BUCKET_LOG = math.log(2) / 4  # the buckets after them are wider by this factor each
_NUM_BUCKETS = 56
_NEGLIGIBLE = 0.01  # probability
_CHANGES_BEFORE_ESTIMATE = 32  # buckets outgrown
_PRIOR_TURNS = 64.0  # of a group, before its own tokens a turn outweigh those of all groups
_MAX_IDLE_GROUPS = 4096


@dataclass(frozen=True, slots=True)
class WorkPriors:
    """The expectation before anything has finished."""

    growth_tokens: float = 8192.0  # of a context beyond its prompt
    between_groups: float = 0.6  # of the logarithm of turns, as in serving.md's recipe
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
    """News of one group's samples."""

    num_live: int = 0
    logs: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SIBLINGS))  # of finished samples' turns
    oldest: int = 0  # the most turns of a sample that has not finished
    found_at: int = -1  # number of the estimate that `found` follows from
    found: tuple[float, float, float] = (1.0, 0.0, 0.0)
    num_turns: int = 0  # of all samples
    sum_tokens: float = 0.0  # that those turns added to their contexts


@dataclass(frozen=True, slots=True)
class _Outlook:
    """One of the things that a sample's turns may be thought to be, and the probability of it."""

    share: float
    mean: float  # of the logarithm
    variance: float
    num_finished: float = 0.0  # siblings that it follows from


class ExpectedWork:
    """The estimator. Trajectories are counted in by `begin` and out by `end`."""

    def __init__(self, priors: WorkPriors | None = None) -> None:
        self._priors = priors or WorkPriors()
        self._groups: dict[str, _Siblings] = {}  # with live samples
        self._idle: OrderedDict[str, _Siblings] = OrderedDict()  # without, the last that ended at the end
        self._between = self._priors.between_groups**2  # variances
        self._within = self._priors.within_group**2
        self._num_finished = 0.0
        self._turn_tokens = min(self._priors.turn_tokens, self._priors.growth_tokens)
        self._mean_log = (
            math.log(self._priors.growth_tokens / self._turn_tokens) - (self._between + self._within) / 2
        )
        spread = math.sqrt(self._between + self._within)
        below = [_normal((math.log(_bucket_end(k)) - self._mean_log) / spread) for k in range(_NUM_BUCKETS)]
        self._ended = [_NUM_PRIOR * (b - a) for a, b in zip([0.0, *below], below, strict=False)]
        self._outgrew = [_NUM_PRIOR * (1 - share) for share in below]
        self._num_changes = self._num_estimates = 0
        self._sampled_share = self._priors.sampled_share
        self._num_turns = 0

    def begin(self, group_id: str) -> None:
        """Count a trajectory in."""
        group = self._groups.get(group_id) or self._idle.pop(group_id, None) or _Siblings()
        group.num_live += 1
        self._groups[group_id] = group

    def turn(self, group_id: str, num_turns: int, turn_tokens: float, sampled_tokens: int) -> None:
        """Learn from a trajectory's turn, its `num_turns`-th, that added `turn_tokens` to its context."""
        self._num_turns = min(self._num_turns + 1, self._priors.num_remembered)
        weight = 1 / (self._num_turns + _NUM_PRIOR)
        self._turn_tokens += weight * (turn_tokens - self._turn_tokens)
        if turn_tokens > 0:
            self._sampled_share += weight * (min(sampled_tokens / turn_tokens, 1.0) - self._sampled_share)
        self._outgrow(num_turns - 1, num_turns)
        group = self._groups.get(group_id)
        if group is not None:
            group.oldest = max(group.oldest, num_turns)
            group.num_turns += 1
            group.sum_tokens += turn_tokens

    def end(self, group_id: str, num_turns: int | None, more_tokens: float = 0.0) -> None:
        """Count a trajectory out. `num_turns` of one that ran to its end teach; None teaches nothing.

        With `more_tokens` beyond what `turn` was told of it had one turn more.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_live -= 1
        if num_turns is not None:
            if more_tokens > 0 or num_turns == 0:
                self._outgrow(num_turns, num_turns + 1)
                num_turns += 1
                group.num_turns += 1
                group.sum_tokens += more_tokens
            self._ended[_bucket_of(num_turns)] += 1
            self._learn(group, math.log(num_turns))
            self._estimate()
        if group.num_live <= 0:
            group.oldest = 0
            self._idle[group_id] = self._groups.pop(group_id)
            if len(self._idle) > _MAX_IDLE_GROUPS:
                self._idle.popitem(last=False)

    def remaining(self, group_id: str, num_turns: int) -> Remaining:
        """Return what is still expected of a sample of this group that has had so many turns."""
        group = self._group(group_id)
        outlooks = self._outlooks(group, num_turns)
        left = sum(one.share * _mean_above(one.mean, math.sqrt(one.variance), num_turns) for one in outlooks)
        growth = left * self._tokens_a_turn(group)
        return Remaining(growth, growth * self._sampled_share, left)

    def hoped(self, group_id: str) -> float:
        """Return the growth that the next sample of a group may well have: one standard deviation of what is not
        known of its group, and will not be told by the samples that it has now, above the mean.

        Groups of which nothing is known come before what is known to be middling, one sample of each after the
        other (as upper confidence bounds choose in batches: Desautels et al., JMLR 15, 2014).
        """
        group = self._group(group_id)
        num_live = 0 if group is None else group.num_live
        turns = 0.0
        for one in self._outlooks(group, 0):
            spread = math.sqrt(1 / (1 / self._between + (num_live + one.num_finished) / self._within))
            turns += one.share * math.exp(one.mean + one.variance / 2 + spread)
        return turns * self._tokens_a_turn(group)

    # --- inside ---

    def _group(self, group_id: str) -> _Siblings | None:
        return self._groups.get(group_id) or self._idle.get(group_id)

    def _tokens_a_turn(self, group: _Siblings | None) -> float:
        if group is None:
            return self._turn_tokens
        return (group.sum_tokens + _PRIOR_TURNS * self._turn_tokens) / (group.num_turns + _PRIOR_TURNS)

    def _outlooks(self, group: _Siblings | None, num_turns: int) -> list[_Outlook]:
        """Return what may be thought of the turns of a sample that has had so many: that its finished siblings all
        gave up and tell nothing, or that some count.

        What the sample itself has outgrown is left to the caller.
        """
        if group is None:
            return [_Outlook(1.0, self._mean_log, self._between + self._within)]
        none_counts, num, total = self._finished(group)
        outlooks = [self._outlook(group, num_turns, 1.0 - none_counts, num, total)] if none_counts < 1.0 else []
        if none_counts > _NEGLIGIBLE:
            outlooks.append(self._outlook(group, num_turns, none_counts, 0.0, 0.0))
        return outlooks

    def _outlook(
        self, group: _Siblings, num_turns: int, share: float, num_finished: float, sum_logs: float
    ) -> _Outlook:
        precision = 1 / self._between + num_finished / self._within
        mean = (self._mean_log / self._between + sum_logs / self._within) / precision
        variance = 1 / precision
        if group.oldest > max(num_turns, 1):
            whole = variance + self._within
            distance = (math.log(group.oldest - 0.5) - mean) / math.sqrt(whole)
            hazard = _hazard(distance)
            mean += variance / math.sqrt(whole) * hazard
            variance -= variance * variance / whole * hazard * (hazard - distance)
        return _Outlook(share, mean, variance + self._within, num_finished)

    def _outgrow(self, before: int, after: int) -> None:
        """Count the buckets that a trajectory has left behind."""
        for bucket in range(_bucket_of(before), _bucket_of(after)):
            self._outgrew[bucket] += 1
            self._num_changes += 1
        if self._num_changes >= _CHANGES_BEFORE_ESTIMATE:
            self._estimate()

    def _estimate(self) -> None:
        """Make mean and spread anew: each bucket ends its share of those that came to its end."""
        self._num_changes = 0
        self._num_estimates += 1
        alive, mean, square = 1.0, 0.0, 0.0
        for bucket in range(_NUM_BUCKETS):
            ended, outgrew = self._ended[bucket], self._outgrew[bucket]
            is_last = bucket == _NUM_BUCKETS - 1
            share = alive * (1.0 if is_last else ended / max(ended + outgrew, 1e-9))
            middle = math.log(_bucket_end(bucket)) - (_BUCKET_LOG / 2 if bucket >= _NUM_UNIT_BUCKETS else 0.0)
            mean, square, alive = mean + share * middle, square + share * middle * middle, alive - share
        self._mean_log = mean
        found = max(square - mean * mean - self._within, _MIN_SPREAD**2)
        num_finished = sum(self._ended) - _NUM_PRIOR
        weight = num_finished / (num_finished + _NUM_PRIOR_SPREAD)
        self._between = weight * found + (1 - weight) * self._priors.between_groups**2

    def _learn(self, group: _Siblings, log_turns: float) -> None:
        """Learn how far siblings are apart: from the mean of the others, whose own spread is within / n."""
        none_counts, num_finished, sum_logs = self._finished(group)
        if none_counts < 1.0:
            weight = (1.0 - none_counts) * self._owns(log_turns, num_finished, sum_logs)
            self._num_finished = min(self._num_finished + weight, self._priors.num_remembered)
            deviation = log_turns - sum_logs / num_finished
            shrunk = deviation * deviation * num_finished / (num_finished + 1)
            self._within += weight * (shrunk - self._within) / (self._num_finished + _NUM_PRIOR)
            self._within = max(self._within, _MIN_SPREAD**2)
        group.logs.append(log_turns)
        group.found_at = -1

    def _finished(self, group: _Siblings) -> tuple[float, float, float]:
        """Return the probability that none of the finished samples counts and, if some do, how many and the sum of
        their logarithms. The long ones are taken in first, as nobody gives up late."""
        if group.found_at != self._num_estimates:
            none_counts, num, total = 1.0, 0.0, 0.0
            for log_turns in sorted(group.logs, reverse=True):
                weight = self._owns(log_turns, num, total)
                none_counts, num, total = none_counts * (1.0 - weight), num + weight, total + weight * log_turns
            some = max(1.0 - none_counts, _NEGLIGIBLE)
            group.found_at, group.found = self._num_estimates, (none_counts, num / some, total / some)
        return group.found

    def _owns(self, log_turns: float, num_finished: float, sum_logs: float) -> float:
        """Return the probability that a sample came to its own end, and did not give up at any turn before."""
        precision = 1 / self._between + num_finished / self._within
        mean = (self._mean_log / self._between + sum_logs / self._within) / precision
        variance = 1 / precision + self._within
        own = math.exp(-((log_turns - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
        given_up = math.exp(min(log_turns - mean, 0.0))  # evenly over the turns
        return (1 - _GIVES_UP) * own / ((1 - _GIVES_UP) * own + _GIVES_UP * given_up)


def _bucket_of(num_turns: int) -> int:
    if num_turns <= _NUM_UNIT_BUCKETS:
        return max(num_turns, 1) - 1
    bucket = _NUM_UNIT_BUCKETS + math.floor(math.log((num_turns - 0.5) / _NUM_UNIT_BUCKETS) / _BUCKET_LOG)
    return min(bucket, _NUM_BUCKETS - 1)


def _bucket_end(bucket: int) -> float:
    """Return the most turns that a bucket takes; no whole number, after the unit buckets."""
    if bucket < _NUM_UNIT_BUCKETS:
        return bucket + 1.0
    return _NUM_UNIT_BUCKETS * math.exp((bucket - _NUM_UNIT_BUCKETS + 1) * _BUCKET_LOG)


def _mean_above(mean: float, spread: float, num_turns: int) -> float:
    """Return E[N | N > n] - n of a lognormal N."""
    if num_turns < 1:
        return math.exp(mean + spread * spread / 2)
    distance = (mean - math.log(num_turns)) / spread
    above = _normal(distance)
    if above < 1e-4:  # far in the tail it goes on about as n * spread / -distance (Mills' ratio)
        return num_turns * spread / -distance
    return max(math.exp(mean + spread * spread / 2) * _normal(distance + spread) / above - num_turns, 0.0)


def _hazard(distance: float) -> float:
    """Return the mean of a standard normal variable above a value (the inverse Mills ratio)."""
    above = _normal(-distance)
    if above < 1e-12:
        return distance + 1 / distance
    return math.exp(-distance * distance / 2) / (math.sqrt(2 * math.pi) * above)


def _normal(value: float) -> float:
    """Return the normal distribution's share below a value."""
    return 0.5 * math.erfc(-value / math.sqrt(2))
