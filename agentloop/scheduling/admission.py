"""Admission: how much of a replica's KV may be spoken for, and who waits for room.

A trajectory may begin on a replica if the forecast (`kv_forecast.py`), with it, is at most `rho` of the capacity.
More of them make a decode step cheaper for each, as its fixed part is shared: a turn of n sampled tokens pays
n alpha / B of it in a batch of B. Too many push out each other's KV, and turns that return compute their contexts
again. If what is lost by that grows with the p-th power of the number of trajectories, the sum of both is least
where

    seconds lost to contexts computed again = seconds of fixed parts / p

so `rho` is moved until it is so, with p about 3: it grows slowly while less is lost and work waits, shrinks while
more is, and is cut by a quarter when more is lost than all fixed parts together (thrashing).

A flush has every trajectory that goes on compute its context again, once. What that costs grows with the first
power of their number, so a third of it counts beside the other. Nobody has KV to come back to then: those at tools
ask for room before they go on, and who waits over a flush costs it nothing.

Who comes back from a long tool, and finds no room, waits for the replica where its KV was, and goes elsewhere as
soon as there is room. Others may pass it, who fit where it does not: those with the most to come are tried first,
as they end last. Once `MAX_PASSED` others took places on a replica before the one that has waited longest for it,
the line is closed: that replica is kept for it. An empty replica takes anybody, so the wait of the first in line
ends at the latest when that many others, and the trajectories that ran before, have ended or gone to long tools.

Ownership: the Balancer alone, one for the fleet. Invariants: least <= rho <= most; who waits is in one line.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_PASSED = 32  # places on a replica that others may take before who waited longest for it
_FLUSH_SHARE = 1 / 3  # of the seconds that a flush costs, that count: 1 / p
_NUM_NEXT = 4  # of a line that are tried when there may be room


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds of the share of KV that may be spoken for, and of what moves it."""

    initial: float = 1.0
    least: float = 0.3
    most: float = 4.0
    growth: float = 0.04  # of a window in which little was lost and work had to wait
    shrinkage: float = 0.08  # of one in which too much was
    cut: float = 0.25  # of one of thrashing
    little_lost: float = 0.2  # of the fixed parts
    much_lost: float = 0.45
    thrashing: float = 1.0
    window_turns: int = 48  # over the fleet, before it moves; at least two of each trajectory


@dataclass(slots=True)
class _ReplicaLine:
    """Those that wait for one replica."""

    members: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by arrival: the tokens to come of each
    num_passed: int = 0  # places that others took since the first of them became the first

    @property
    def first(self) -> str:
        return next(iter(self.members))

    @property
    def is_closed(self) -> bool:
        """True if nobody passes the first any more."""
        return self.num_passed >= MAX_PASSED


class Admission:
    """The share of KV that may be spoken for, and the lines of those that wait to go on."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self._config = config or AdmissionConfig()
        self.rho = self._config.initial
        self._num_turns = 0
        self._turns_each = 2
        self._lost_s = 0.0
        self._fixed_s = 0.0
        self._is_waited_for = False
        self._num_since_flush = 0  # turns
        self._flush_debt_s = 0.0  # of the flushes so far, not counted yet
        self._flush_turn_s = 0.0  # of it, that each turn counts
        self._lines: dict[str, _ReplicaLine] = {}  # by replica
        self._line_of: dict[str, str] = {}  # holder -> replica, those that have waited longest first
        self._freed: set[str] = set()  # replicas with news since `next_up`

    # --- the share ---

    def turn(self, lost_s: float, fixed_s: float, num_live: int) -> None:
        """Take in a turn: seconds that its KV was computed again for, and its part of the steps' fixed times.

        `num_live` trajectories run in the fleet: what a change brings shows when each has had some turns.
        """
        flush_s = min(self._flush_turn_s, self._flush_debt_s)
        self._flush_debt_s -= flush_s
        self._num_since_flush += 1
        self._num_turns += 1
        self._lost_s += lost_s + _FLUSH_SHARE * flush_s
        self._fixed_s += fixed_s
        if self._num_turns >= max(self._config.window_turns, self._turns_each * num_live):
            self._move()

    def flushed(self, lost_s: float) -> None:
        """Take in a flush, after which contexts are computed again for so many seconds.

        They are spread over as many turns as came since the flush before: so many are expected until the next.
        """
        self._flush_debt_s += lost_s
        self._flush_turn_s = self._flush_debt_s / max(self._num_since_flush, 1)
        self._num_since_flush = 0

    def refused(self) -> None:
        """Note that a trajectory had to wait."""
        self._is_waited_for = True

    def _move(self) -> None:
        config, lost = self._config, self._lost_s / max(self._fixed_s, 1e-9)
        self._turns_each = 4 if lost > config.much_lost else 2
        if lost > config.thrashing:
            self.rho *= 1 - config.cut
        elif lost > config.much_lost:
            self.rho *= 1 - config.shrinkage
        elif lost < config.little_lost and self._is_waited_for:
            self.rho *= 1 + config.growth
        self.rho = min(max(self.rho, config.least), config.most)
        self._num_turns, self._lost_s, self._fixed_s, self._is_waited_for = 0, 0.0, 0.0, False

    # --- the lines ---

    @property
    def num_waiting(self) -> int:
        """Holders that wait to go on."""
        return len(self._line_of)

    def is_free(self, replica_id: str, holder_id: str = "") -> bool:
        """Tell if a holder may go on, or one without a name begin, on a replica before those that wait for it."""
        line = self._lines.get(replica_id)
        return line is None or not line.is_closed or line.first == holder_id

    def placed(self, replica_id: str) -> None:
        """Note that somebody begins or goes on, who passes whoever waits for that replica."""
        line = self._lines.get(replica_id)
        if line is not None:
            line.num_passed += 1

    def wait(self, holder_id: str, replica_id: str, left_tokens: float) -> None:
        """Put a holder that will grow by so much more in a replica's line, if it is in none."""
        self.refused()
        if holder_id not in self._line_of:
            self._line_of[holder_id] = replica_id
            self._lines.setdefault(replica_id, _ReplicaLine()).members[holder_id] = left_tokens

    def freed(self, replica_id: str) -> None:
        """Note that less of a replica's KV may be spoken for."""
        self._freed.add(replica_id)

    def next_up(self) -> tuple[str, ...]:
        """Return the holders that may find room now, by what was freed since this was asked before.

        Of each replica it is the first in a closed line, else those with the most tokens to come; where none waits
        it is the one that has waited longest anywhere.
        """
        freed, self._freed = self._freed, set()
        if not self._line_of:
            return ()
        found: dict[str, None] = {}
        for replica_id in freed:
            line = self._lines.get(replica_id)
            if line is None:
                found[next(iter(self._line_of))] = None
            elif line.is_closed:
                found[line.first] = None
            else:
                found.update(dict.fromkeys(heapq.nlargest(_NUM_NEXT, line.members, line.members.__getitem__)))
        return tuple(found)

    def leave(self, holder_id: str) -> None:
        """Take a holder out of its line. No-op if it is in none."""
        replica_id = self._line_of.pop(holder_id, None)
        if replica_id is not None:
            self._freed.add(replica_id)
            line = self._lines[replica_id]
            if line.first == holder_id:
                line.num_passed = 0
            del line.members[holder_id]
            if not line.members:
                del self._lines[replica_id]

    def dissolve(self, replica_id: str) -> None:
        """Drop the line of a replica that is lost: its holders wait for another one when they ask again."""
        line = self._lines.pop(replica_id, None)
        for holder_id in () if line is None else line.members:
            del self._line_of[holder_id]
