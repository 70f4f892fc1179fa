"""Waiting: the place where samples, calls and returning trajectories wait for room on a replica.

- A sample begins while the balancer has room for it; else it stays in the queue, before its prefill.
- A session or a direct call has a client that waits, so it may begin up to `overcommit` beyond that room; then it
  waits until its deadline. Users take turns (`UserTurns`), and the calls of one user keep their order. A call of a
  user that holds less than its share of all places may begin up to twice the room.
- A sample that was refused for `patience_s` may begin up to the same bound, and until then no call does.
- A trajectory or session that has begun, and moves or returns from its tools, waits in the balancer's lines.

Ownership: the one place where leases are waited for. `changed` is called where KV was given back, `fleet_changed`
where a replica takes traffic that did not, or the other way round.
Invariant: of a user's calls that need the same kinds of replicas, the one that asked first is tried first, also if
it had to ask again.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from agentloop.api.coordinator import QueueStatus, session_holder
from agentloop.api.flight import Doing, Flight, FlightRow
from agentloop.api.owners import owner_of
from agentloop.concurrency.aio import ChangeSignal, deadline_after, is_set_by
from agentloop.concurrency.clock import Clock
from agentloop.errors import NoHealthyReplica
from agentloop.fleet.registry import Fleet
from agentloop.scheduling.balancer import Balancer
from agentloop.scheduling.dispatch_order import UserTurns
from agentloop.scheduling.lease_table import Demand
from agentloop.scheduling.samples import NoPlace
from agentloop.types import Lease
from agentloop.values.capabilities import NO_NEEDS

_COMES_BACK_S = 30.0  # after its deadline a call that asks again within this time keeps its turn
_COUNT_AGE_S = 0.2
_OWN_SHARE = 1.0  # of the room, beyond it: one user's crowd may fill it, and the other shares are as much at most
_REFUSAL_COUNTS_S = 5.0  # a sample that was refused asks again each second while a worker has a place for it


@dataclass(frozen=True, slots=True)
class WaitingConfig:
    """Bounds of what may begin."""

    is_limited: bool = True  # False: everything may begin at once, as far as replicas take traffic
    overcommit: float = 0.25  # of the room, that calls may take beyond it
    patience_s: float = 10.0  # of a sample that calls keep from beginning


@dataclass(slots=True, eq=False)
class _Ticket:
    """A call's turn among those that wait."""

    holder_id: str
    asked_at: float
    number: int
    event: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False

    def __lt__(self, other: _Ticket) -> bool:
        return (self.asked_at, self.number) < (other.asked_at, other.number)


class Waiting:
    """The queues before the balancer's leases."""

    def __init__(
        self,
        fleet: Fleet,
        balancer: Balancer,
        config: WaitingConfig,
        clock: Clock,
        changed: ChangeSignal,
        users: UserTurns | None = None,
    ) -> None:
        """`changed` wakes the workers that ask for samples."""
        self._fleet = fleet
        self._balancer = balancer
        self._config = config
        self._clock = clock
        self._changed = changed
        self._users = users or UserTurns()
        self._held: Counter[str] = Counter()  # places of each user, as counted last
        self._counted_at = -_COUNT_AGE_S
        self._going_on: dict[str, asyncio.Event] = {}  # holders that have begun, and wait for a place
        # Heaps by the kinds of replicas that can serve the calls in it, and by user; tickets that are gone leave at
        # the top.
        self._lines: dict[frozenset[str], dict[str, list[_Ticket]]] = {}
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # holder -> when it asked first, and left
        self._num_asked = 0
        self._refused_since: float | None = None  # samples: the first refusal since one began
        self._refused_at = 0.0  # and the last one

    # --- samples ---

    def try_to_place(self, demand: Demand) -> Lease | NoPlace:
        """Grant a sample its lease, or say why it has to wait."""
        now = self._clock.now()
        over = self._config.overcommit if self._is_samples_turn(now) else 0.0
        if not self._fleet.may_serve(demand.needs):  # its turn is told so, by an error
            demand = replace(demand, needs=NO_NEEDS)
        if not self._fits(demand, over):
            is_full = demand.needs == NO_NEEDS or not self._balancer.has_room(replace(demand, needs=NO_NEEDS), over)
            self._refused_at = now
            if is_full and self._refused_since is None:
                self._refused_since = now
            return NoPlace.FULL if is_full else NoPlace.LATER
        try:
            lease = self._balancer.acquire(demand, now)
        except NoHealthyReplica:
            return NoPlace.FULL
        self._refused_since = None
        return lease

    # --- calls ---

    async def begin_call(self, demand: Demand, wait_s: float) -> Lease:
        """Grant a session or a direct call its lease, as soon as there is room for it.

        Raises NoHealthyReplica after `wait_s`: a caller with time left asks again, and keeps its turn. Raises
        UnsupportedParameter if no engine of the service can serve what it needs.
        """
        self._fleet.check_needs(demand.needs)
        able = self._fleet.able(demand.needs)
        deadline_at = deadline_after(wait_s)
        ticket = self._enter(demand.holder_id, able)
        try:
            while True:
                try:
                    return self._grant(demand, able, ticket)
                except NoHealthyReplica as error:
                    refusal = error
                if not await is_set_by(ticket.event, deadline_at):
                    self._left[demand.holder_id] = ticket.asked_at, self._clock.now()
                    raise refusal
                ticket.event.clear()
        finally:
            ticket.is_gone = True
            self._wake()

    # --- what has begun ---

    async def go_on(self, holder_id: str, grant: Callable[[], Lease], wait_s: float) -> Lease:
        """Return a lease from `grant`, now or once a replica takes traffic again or has room.

        Raises NoHealthyReplica after `wait_s`: a caller with time left asks again.
        """
        deadline_at = deadline_after(wait_s)
        event = asyncio.Event()
        try:
            while True:
                try:
                    lease = grant()
                    break
                except NoHealthyReplica:
                    self._going_on[holder_id] = event
                    if not await is_set_by(event, deadline_at):
                        raise
                    event.clear()
        finally:
            if self._going_on.get(holder_id) is event:
                del self._going_on[holder_id]
        self._wake_next()  # there may be room for another
        return lease

    # --- for all ---

    def fleet_changed(self) -> None:
        """Try all that wait, as a replica takes traffic that did not, or no more."""
        for event in self._going_on.values():
            event.set()
        self.changed()

    def changed(self) -> None:
        """Try what waits, as KV was given back. Of the holders that have begun, the first of each line is tried."""
        self._wake_next()
        if self._is_refusing(self._clock.now()):
            self._changed.notify()
        self._wake()

    def status(self, num_queued: int) -> QueueStatus:
        """Return the numbers that wait, for how long, and the reason."""
        uses = [self._balancer.kv_use(replica.replica_id) for replica in self._fleet.placeable()]
        predicted, limit = sum(use.predicted_tokens for use in uses), sum(use.limit_tokens for use in uses)
        now = self._clock.now()
        waits_s = [now - one.asked_at for one in self._tickets()]
        is_waiting = bool(waits_s) or (num_queued > 0 and self._is_refusing(now))
        reason = f"no room: {predicted} of {limit} tokens of KV are predicted to be needed" if is_waiting else ""
        times_s = (max(waits_s), median(waits_s)) if waits_s else (0.0, 0.0)
        return QueueStatus(num_queued, len(waits_s), predicted, limit, reason, *times_s)

    def by_user(self) -> Counter[str]:
        """Count the calls that wait, by user."""
        return Counter(self._user_of(one.holder_id) for one in self._tickets())

    def rows(self, limit: int, name: str = "") -> tuple[FlightRow, ...]:
        """Return the sessions and direct calls that wait, the longest first, and `name` after them."""
        now, tickets = self._clock.now(), sorted(self._tickets(), key=lambda one: one.asked_at)
        named = [one for one in tickets[limit:] if one.holder_id == session_holder(name)]
        waits_s = [(one.holder_id.removeprefix("/"), now - one.asked_at) for one in (*tickets[:limit], *named)]
        return tuple(FlightRow(one, Flight(Doing.PLACE, wait_s, wait_s), "") for one, wait_s in waits_s)

    # --- inside ---

    def _fits(self, demand: Demand, over: float) -> bool:
        has_lease = self._balancer.lease_of(demand.holder_id) is not None
        if has_lease or not self._config.is_limited:
            return True
        return self._balancer.has_room(demand, over)

    def _grant(self, demand: Demand, able: frozenset[str], ticket: _Ticket) -> Lease:
        """Raises NoHealthyReplica unless there is room, and no other call's turn comes before. Raises
        WeightVersionNotServed or ModelNotFound first: a call for other weights does not wait for room."""
        self._fleet.check_weights(demand.needs)
        now, user = self._clock.now(), self._user_of(demand.holder_id)
        has_lease = self._balancer.lease_of(demand.holder_id) is not None
        if not has_lease and not self._may_begin(demand, user, able, ticket, now):
            raise NoHealthyReplica("no replica has room for another session now")
        lease = self._balancer.acquire(demand, now)
        if not has_lease:
            self._users.took(user)
            self._held[user] += 1
        return lease

    def _may_begin(self, demand: Demand, user: str, able: frozenset[str], ticket: _Ticket, now: float) -> bool:
        heads, over = self._heads(able), self._config.overcommit
        if heads[user] is not ticket or self._is_samples_turn(now):
            return False
        if min(heads, key=self._users.pass_of) == user and self._fits(demand, over):
            return True
        return self._has_less(user, now) and self._fits(demand, max(over, _OWN_SHARE))

    def _has_less(self, user: str, now: float) -> bool:
        """Tell if a user holds fewer places than its share of all that are held."""
        if now - self._counted_at > _COUNT_AGE_S:
            self._held, self._counted_at = Counter(map(self._user_of, self._balancer.holders)), now
        held = self._held
        shares = {name: self._users.limits_of(name).share for name in (*held, user)}
        return held[user] * sum(shares.values()) < shares[user] * held.total()

    def _user_of(self, holder_id: str) -> str:
        return self._users.name_of(owner_of(holder_id))

    def _tickets(self) -> list[_Ticket]:
        lines = (line for by_user in self._lines.values() for line in by_user.values())
        return [one for line in lines for one in line if not one.is_gone]

    def _is_refusing(self, now: float) -> bool:
        """Tell if samples wait for room, and workers for samples."""
        return self._refused_at > 0.0 and now - self._refused_at <= _REFUSAL_COUNTS_S

    def _is_samples_turn(self, now: float) -> bool:
        since = self._refused_since
        return since is not None and self._is_refusing(now) and now - since >= self._config.patience_s

    def _enter(self, holder_id: str, able: frozenset[str]) -> _Ticket:
        now = self._clock.now()
        while self._left and now - next(iter(self._left.values()))[1] > _COMES_BACK_S:
            self._left.popitem(last=False)
        asked_at, _ = self._left.pop(holder_id, (now, now))
        self._num_asked += 1
        ticket = _Ticket(holder_id, asked_at, self._num_asked)
        heapq.heappush(self._lines.setdefault(able, {}).setdefault(self._user_of(holder_id), []), ticket)
        return ticket

    def _wake_next(self) -> None:
        for holder_id in self._balancer.next_up():
            event = self._going_on.get(holder_id)
            if event is not None:
                event.set()

    def _wake(self) -> None:
        for able in self._lines:
            for head in self._heads(able).values():
                head.event.set()

    def _heads(self, able: frozenset[str]) -> dict[str, _Ticket]:
        """Return the ticket of each user that comes before its others."""
        lines = self._lines[able]
        for user, line in list(lines.items()):
            while line and line[0].is_gone:
                heapq.heappop(line)
            if not line:
                del lines[user]
        return {user: line[0] for user, line in lines.items()}
