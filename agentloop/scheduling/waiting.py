"""The queues in which samples, calls and returning trajectories wait for capacity on a replica.

Samples stay in the rollout queue, before their prefill, until the balancer has capacity. Sessions and direct calls
wait here until their deadline; users take turns (`UserTurns`), and each user's calls keep their order.
Trajectories and sessions that move or return from tools wait in the balancer's queues.

All waits for leases are here. `changed` is called when KV was released, `fleet_changed` when a replica enters or
leaves traffic. Invariant: of a user's calls with the same needs, the oldest is tried first, also after a repeated
request.
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

_COMES_BACK_S = 30.0  # a call that repeats its request within this time after its deadline keeps its position
_COUNT_AGE_S = 0.2
# Extra capacity for users below their share: one user's burst may use all of it, so the others get as much again
_OWN_SHARE = 1.0
_REFUSAL_COUNTS_S = 5.0  # a refused sample asks again each second while a worker has a free slot


@dataclass(frozen=True, slots=True)
class WaitingConfig:
    """Limits of new work."""

    is_limited: bool = True  # False: new work starts at once if a replica takes traffic
    overcommit: float = 0.25  # share of the capacity that calls may use beyond it, because their clients wait
    patience_s: float = 10.0  # how long calls may keep a sample from starting


@dataclass(slots=True, eq=False)
class _Ticket:
    """The position of a waiting call."""

    holder_id: str
    asked_at: float
    number: int
    event: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False

    def __lt__(self, other: _Ticket) -> bool:
        return (self.asked_at, self.number) < (other.asked_at, other.number)


class Waiting:
    """The waits for leases of the balancer."""

    def __init__(
        self,
        fleet: Fleet,
        balancer: Balancer,
        config: WaitingConfig,
        clock: Clock,
        changed: ChangeSignal,
        users: UserTurns | None = None,
    ) -> None:
        """`changed` wakes the workers that wait for samples."""
        self._fleet = fleet
        self._balancer = balancer
        self._config = config
        self._clock = clock
        self._changed = changed
        self._users = users or UserTurns()
        self._held: Counter[str] = Counter()  # user -> leases, at the last count
        self._counted_at = -_COUNT_AGE_S
        self._going_on: dict[str, asyncio.Event] = {}  # holders with a lease that wait for another one
        # Engine pools that can serve the calls -> user -> heap. Obsolete tickets are dropped at the top.
        self._lines: dict[frozenset[str], dict[str, list[_Ticket]]] = {}
        # Holder -> time of its first request, and of its last deadline
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._num_asked = 0
        self._refused_since: float | None = None  # the first refusal of a sample since one started
        self._refused_at = 0.0  # the last refusal of a sample

    # Samples

    def try_to_place(self, demand: Demand) -> Lease | NoPlace:
        """Grant a sample its lease, or return the reason why it has to wait."""
        now = self._clock.now()
        # A sample that calls kept waiting for `patience_s` may use the calls' extra capacity, and no call starts
        # before it.
        over = self._config.overcommit if self._is_samples_turn(now) else 0.0
        wanted = demand.needs.version
        is_served = wanted is None or self._fleet.serves(wanted, demand.needs.adapter)
        if not is_served or not self._fleet.may_serve(demand.needs):  # its first turn fails with the error
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

    # Calls

    async def begin_call(self, demand: Demand, wait_s: float) -> Lease:
        """Grant a session or direct call its lease as soon as there is capacity.

        Raises NoHealthyReplica after `wait_s`; a caller that repeats the request keeps its position. Raises
        UnsupportedParameter if no engine of the service meets its needs.
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

    # Holders with a lease

    async def go_on(self, holder_id: str, grant: Callable[[], Lease], wait_s: float) -> Lease:
        """Return a lease from `grant` as soon as a replica takes traffic and has capacity.

        Raises NoHealthyReplica after `wait_s`; the caller may repeat the request.
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
        self._wake_next()  # there may be capacity for the next holder
        return lease

    # For all

    def fleet_changed(self) -> None:
        """Retry all waiting work, after a replica has entered or left traffic."""
        for event in self._going_on.values():
            event.set()
        self.changed()

    def changed(self) -> None:
        """Retry waiting work after KV was released; of the balancer's queues only the first holder."""
        self._wake_next()
        if self._is_refusing(self._clock.now()):
            self._changed.notify()
        self._wake()

    def status(self, num_queued: int) -> QueueStatus:
        """Return the amount of waiting work, its waiting times, and the reason."""
        uses = [self._balancer.kv_use(replica.replica_id) for replica in self._fleet.placeable()]
        predicted, limit = sum(use.predicted_tokens for use in uses), sum(use.limit_tokens for use in uses)
        now = self._clock.now()
        waits_s = [now - one.asked_at for one in self._tickets()]
        is_waiting = bool(waits_s) or (num_queued > 0 and self._is_refusing(now))
        reason = f"no KV capacity: {predicted} of {limit} tokens are expected to be used" if is_waiting else ""
        times_s = (max(waits_s), median(waits_s)) if waits_s else (0.0, 0.0)
        return QueueStatus(num_queued, len(waits_s), predicted, limit, reason, *times_s)

    def by_user(self) -> Counter[str]:
        """Return the number of waiting calls by user."""
        return Counter(self._user_of(one.holder_id) for one in self._tickets())

    def rows(self, limit: int, name: str = "") -> tuple[FlightRow, ...]:
        """Return the waiting sessions and direct calls, the longest wait first, and `name` in addition."""
        now, tickets = self._clock.now(), sorted(self._tickets(), key=lambda one: one.asked_at)
        named = [one for one in tickets[limit:] if one.holder_id == session_holder(name)]
        waits_s = [(one.holder_id.removeprefix("/"), now - one.asked_at) for one in (*tickets[:limit], *named)]
        return tuple(FlightRow(one, Flight(Doing.PLACE, wait_s, wait_s), "") for one, wait_s in waits_s)

    def _fits(self, demand: Demand, over: float) -> bool:
        has_lease = self._balancer.lease_of(demand.holder_id) is not None
        if has_lease or not self._config.is_limited:
            return True
        return self._balancer.has_room(demand, over)

    def _grant(self, demand: Demand, able: frozenset[str], ticket: _Ticket) -> Lease:
        """Grant the lease if it is this call's turn and there is capacity, otherwise raise NoHealthyReplica."""
        # Weights first: a call for weights that are not served must fail at once instead of waiting for capacity.
        self._fleet.check_weights(demand.needs)
        now, user = self._clock.now(), self._user_of(demand.holder_id)
        has_lease = self._balancer.lease_of(demand.holder_id) is not None
        if not has_lease and not self._may_begin(demand, user, able, ticket, now):
            raise NoHealthyReplica("no replica has KV capacity for another session now: it waits in the queue")
        lease = self._balancer.acquire(demand, now)
        if not has_lease:
            self._users.took(user)
            self._held[user] += 1
        return lease

    def _may_begin(self, demand: Demand, user: str, able: frozenset[str], ticket: _Ticket, now: float) -> bool:
        heads, over = self._heads(able), self._config.overcommit
        if heads[user] is not ticket or self._is_samples_turn(now):
            return False
        # The user with the lowest pass value is next. A user below its share may start beyond the capacity, so
        # that a burst of another user does not delay it.
        if min(heads, key=self._users.pass_of) == user and self._fits(demand, over):
            return True
        return self._has_less(user, now) and self._fits(demand, max(over, _OWN_SHARE))

    def _has_less(self, user: str, now: float) -> bool:
        """Return True if a user has fewer leases than its share of all."""
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
        """Return True if samples wait for capacity while workers have free slots."""
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
        """Return each user's first ticket."""
        lines = self._lines[able]
        for user, line in list(lines.items()):
            while line and line[0].is_gone:
                heapq.heappop(line)
            if not line:
                del lines[user]
        return {user: line[0] for user, line in lines.items()}
