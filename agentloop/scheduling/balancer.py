"""The balancer: which replica a trajectory runs on, for all its turns, and how many run at a time.

The rule. A trajectory or session that holds a lease goes where it was. A new one goes where its group, or the
longest routed beginning of its prompt, is, unless the least loaded replica has less by a multiple of that prompt;
then there. It begins if the KV of all that run there and their promised growth leave room within the share of KV
that may be used (`kv_share.py`). While something waits for room, holders whose tools have run for some seconds are
let go of: their KV no longer counts, and each asks before its next turn, in order of arrival. When the contexts on
a replica outgrow its KV, it lets holders at their tools go too, those with the fewest turns first. In the tail,
when few trajectories are left, a turn's end moves its trajectory to a replica that has much less.

Ownership: one object, in the coordinator's event loop, pure and synchronous, time passed in; it reads the `Fleet`
and owns the lease table, the replicas' books, the share, and the index of routed prefixes.

The life of a trajectory here: `has_room`, then `acquire`; `turn_begun` and `turn_ended` at each turn, reported in
batches by the process that runs it; perhaps an order to go elsewhere or to ask first, followed at the next turn
(`move`); `release`.

Invariants: a holder has at most one lease; lease ids are never used twice; a replica's book is the sum of the
leases counted on it; a holder that waits for room on a replica goes before all that arrived later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from agentloop.api.coordinator import (
    HeldLease,
    LeaseOrders,
    LeaseReport,
    TurnBegun,
    TurnEnded,
    is_session_holder,
    session_holder,
)
from agentloop.api.flight import Doing, Flight, FlightRow
from agentloop.errors import InvariantBroken, NoHealthyReplica, NotFound, UnsupportedParameter
from agentloop.fleet.registry import Fleet
from agentloop.scheduling.lease_table import Demand, Holding, LeaseTable
from agentloop.scheduling.replica_books import KVShare, ReplicaBooks, RoutedPrefixes, ShareBounds
from agentloop.types import Lease
from agentloop.values.capabilities import NO_NEEDS, Needs

_PREFIX_SLACK = 4.0  # times a common prefix, that its replica may have beyond the least loaded one
_IDLE_S = 5.0  # at a tool, after which a holder is let go of while others wait
_TAIL = 8  # trajectories a replica on average, below which balance counts more than KV
_TAIL_GAIN = 2.0  # times what a trajectory has and is promised, that a move in the tail must find free
_LOST_BLOCKS = 2  # of a context, that count as found: its end is no full block


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of the leases and of how much of the KV may be used."""

    lease_ttl_s: float = 60.0  # silence of a process after which its leases end
    usual_growth_tokens: float = 8192.0  # of a trajectory beyond its prompt, before any has ended
    share: ShareBounds = field(default_factory=ShareBounds)
    limits_kv: bool = True  # False: no holder asks before a turn because contexts have outgrown the KV


@dataclass(frozen=True, slots=True)
class KVUse:
    """A replica's KV: what its holders have and are promised, what they may have, and its hits."""

    predicted_tokens: int
    limit_tokens: int
    hit_rate: float | None  # of the contexts of turns that returned
    is_thrashing: bool


class Balancer:
    """The placement of trajectories and sessions on replicas: their leases, and the KV that these take."""

    def __init__(self, fleet: Fleet, config: BalancerConfig | None = None) -> None:
        self._fleet = fleet
        self._config = config or BalancerConfig()
        self._table = LeaseTable()
        self._books = ReplicaBooks(fleet, self._config.usual_growth_tokens)
        self._prefixes = RoutedPrefixes()
        self.share = KVShare(self._config.share)
        self._waits_for: dict[str, str] = {}  # holder -> the replica in whose line it is
        self._lines: dict[str, None] = {}  # replicas that have holders in line
        self._is_refusing = False  # since the last look
        self._is_freed = False  # since `next_up` was asked
        self._found: tuple[Demand | None, str | None] = (
            None,
            None,
        )  # by `has_room`: to look at all replicas takes long

    # --- what others see ---

    @property
    def num_holders(self) -> int:
        return len(self._table)

    @property
    def holders(self) -> Iterable[str]:
        return self._table.holders

    def num_leases(self, replica_id: str) -> int:
        """Return the number of leases that count on a replica."""
        return self._books.book(replica_id).num_leases

    def kv_use(self, replica_id: str) -> KVUse:
        """Return a replica's use of KV: taken, promised, and found again by its turns."""
        book, replica = self._books.book(replica_id), self._fleet.get(replica_id)
        capacity_tokens = 0 if replica is None else replica.capacity_tokens
        return KVUse(
            predicted_tokens=round(book.held_tokens + book.num_kept * self._books.promise.tokens),
            limit_tokens=round(self.share.value * capacity_tokens),
            hit_rate=book.hits.rate,
            is_thrashing=book.hits.is_thrashing,
        )

    def lease_of(self, holder_id: str) -> Lease | None:
        """Return the lease that a trajectory or a session holds."""
        holding = self._table.of_holder(holder_id)
        return None if holding is None else holding.lease

    def holder_of(self, lease_id: str) -> str | None:
        """Return the holder of a lease; None for one that is not known."""
        holding = self._table.of_lease(lease_id)
        return None if holding is None else holding.demand.holder_id

    def sessions(self, limit: int, now: float, name: str = "") -> tuple[FlightRow, ...]:
        """Return sessions and direct calls with a place, the longest idle first, and `name` after them."""
        found = heapq.nsmallest(
            limit,
            (one for one in self._table if one.demand.is_session),
            key=lambda one: now if one.idle_since is None else one.idle_since,
        )
        named = self._table.of_holder(session_holder(name))
        if named is not None and named not in found:
            found.append(named)
        return tuple(_session_row(one, now) for one in found)

    def next_up(self) -> tuple[str, ...]:
        """Return the first holder in each replica's line, if room may have become free since this was asked."""
        if not self._is_freed:
            return ()
        self._is_freed = False
        return tuple(next(iter(self._books.book(name).line)) for name in self._lines)

    # --- leases ---

    def has_room(self, demand: Demand, over: float = 0.0) -> bool:
        """Tell if one more trajectory or session may begin; it may take `over` times the room beyond it.

        Raises UnsupportedParameter as `acquire`.
        """
        try:
            found = self._room_for(demand, over)
        except NoHealthyReplica:
            return False
        self._found = demand, found
        self._is_refusing |= found is None
        return found is not None

    def acquire(self, demand: Demand, now: float) -> Lease:
        """Grant a holder a lease, or return the one that it has on a replica that takes traffic.

        It is granted also without room (`has_room`). Raises NoHealthyReplica, or UnsupportedParameter if no engine
        can serve the demand's needs, WeightVersionNotServed, or ModelNotFound for an adapter that is not served.
        """
        self._fleet.check_weights(demand.needs)
        holding = self._table.of_holder(demand.holder_id)
        if holding is not None:
            if holding.is_counted and self._books.takes_traffic(holding.lease, demand.needs):
                self._table.ask_again(holding, demand, now)
                return holding.lease
            self._end(holding)
        (asked, chosen), self._found = self._found, (None, None)
        if asked is not demand or chosen is None or not self._books.suits(chosen, demand.needs):
            chosen = self._room_for(demand) or self._books.least(needs=demand.needs)
        self._prefixes.note(demand.shared_prefixes(demand.num_prompt_tokens), chosen)
        lease = self._grant(chosen)
        self._begin(Holding(demand, lease, prompt_tokens=float(demand.num_prompt_tokens)), now)
        return lease

    def adopt(self, demand: Demand, lease: Lease, now: float) -> None:
        """Count a lease that an earlier coordinator granted. No-op if the holder or the lease is known.

        Its replica need not have joined this coordinator yet.
        """
        if self._table.of_holder(demand.holder_id) is None and self._table.of_lease(lease.lease_id) is None:
            self._begin(Holding(demand, lease, prompt_tokens=float(demand.num_prompt_tokens)), now)

    def move(self, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Grant the holder of `lease` another one in its place.

        After a failure it is on another replica if there is one. Without a failure it stays where the KV is if that
        replica can serve what it `needs`, now and from here on; a holder that was told to ask may have to wait for
        room. Raises NoHealthyReplica if it has to, or if no replica takes traffic, and UnsupportedParameter if no
        engine can serve it, WeightVersionNotServed or ModelNotFound: the holder keeps its lease. Raises NotFound
        for a lease that is not known (`adopt` it first).
        """
        self._fleet.check_weights(needs)
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            raise NotFound(f"lease {lease.lease_id} is not known", param="lease")
        holding.demand = self._books.needing(holding.demand, needs)
        if lease.lease_id != holding.lease.lease_id and self._books.takes_traffic(holding.lease, needs):
            self._table.obeyed(holding)  # it has moved already
            return holding.lease
        chosen = self._choose_again(holding, is_failed)
        self._leave_line(holding)
        self._go(holding, chosen, is_told=True)
        return holding.lease

    def callers(self, lease: Lease) -> tuple[str, ...]:
        """Return the processes that call at the replica of a lease, its own first; none for an ended lease."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            return ()
        own = holding.demand.process_id
        there = {one.demand.process_id for one in self._table.on_replica(lease.replica_id)}
        return (own, *sorted(there - {own}))

    def release(self, lease: Lease, num_tokens: int | None, now: float) -> None:
        """End a lease. Idempotent. `num_tokens` is the growth of a trajectory that ran to its end."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is not None:
            self._table.renew(holding.demand.process_id, now)
            if num_tokens is not None and not holding.demand.is_session:
                self._books.promise.end(num_tokens)
            self._end(holding)

    def expire(self, now: float) -> int:
        """End the leases whose time is over, and those of silent processes. Returns their number."""
        over = self._table.expired(now, self._config.lease_ttl_s)
        for holding in over:
            self._end(holding)
        return len(over)

    def drop_replica(self, replica_id: str) -> None:
        """Count a replica's leases no more: it, or its KV, is lost. Holders move at their next call."""
        for holding in self._table.on_replica(replica_id):
            self._uncount(holding)
            holding.is_counted = holding.is_warm = False
        for holder_id in self._books.book(replica_id).line:
            del self._waits_for[holder_id]
        self._lines.pop(replica_id, None)
        self._books.forget(replica_id)
        self._prefixes.forget(replica_id)
        self._is_freed = True

    # --- news of processes ---

    def took(self, report: LeaseReport, now: float) -> LeaseOrders:
        """Apply a report of a process's leases, each report once (`ReportDesk`). Returns the orders to the process.

        A lease that is another process's, or has ended, is ordered to ask.
        """
        process_id = report.process_id
        self._table.renew(process_id, now)
        if report.leases is not None:
            self._compare(process_id, report.leases, now)
        unknown: dict[str, None] = {}
        for lease_id in (*report.taken, *(turn.lease_id for turn in report.turns)):
            holding = self._table.of_lease(lease_id)
            if holding is None or not self._table.heard(holding, process_id, now):
                unknown[lease_id] = None
        for turn in report.turns:
            if turn.lease_id in unknown:
                continue
            if isinstance(turn, TurnBegun):
                self.turn_begun(turn.lease_id)
            else:
                self.turn_ended(turn, now)
        for lease_id in report.released:
            holding = self._table.of_lease(lease_id)
            if holding is not None and holding.demand.process_id == process_id:
                self._end(holding)
        return LeaseOrders((*((lease_id, None) for lease_id in unknown), *self._table.orders(process_id)))

    def _compare(self, process_id: str, leases: Sequence[HeldLease], now: float) -> None:
        """Have the table agree with all that a process holds: leases that an earlier coordinator granted are
        adopted, and those of sessions that it had and has no more end. A trajectory's end with its record."""
        for held in leases:
            is_session = is_session_holder(held.holder_id)
            num_tokens = max(1, held.num_context_tokens)  # a lease without work would make a replica look idle
            facts = held.holder_id, process_id, held.group_id, num_tokens
            demand = Demand(*facts, is_session=is_session, prefixes=held.prefixes)
            self.adopt(demand, held.lease, now)
            holding = self._table.of_lease(held.lease.lease_id)
            if holding is not None:
                self._table.heard(holding, process_id, now)
        kept = {held.lease.lease_id for held in leases}
        for holding in self._table.of_process(process_id):
            demand, names = holding.demand, {holding.lease.lease_id, *holding.earlier}
            if demand.is_session and demand.expires_at is None and names.isdisjoint(kept):
                self._end(holding)

    def orders(self, process_id: str) -> tuple[tuple[str, Lease | None], ...]:
        """Return a process's orders for the next turns: lease id -> another lease, or None: ask first."""
        return self._table.orders(process_id)

    def turn_begun(self, lease_id: str) -> None:
        """Note that a holder begins a turn: its first, or after its tools. Unknown leases: no-op."""
        holding = self._table.of_lease(lease_id)
        if holding is None:
            return
        if lease_id == holding.lease.lease_id:
            self._table.obeyed(holding)
        holding.idle_since = None
        if not holding.is_kept:  # it went on before it heard that it is to ask
            self._recount(holding, is_kept=True)

    def turn_ended(self, turn: TurnEnded, now: float) -> None:
        """Count a turn that has ended. Unknown leases: no-op."""
        holding = self._table.of_lease(turn.lease_id)
        if holding is None:
            return
        holding.idle_since = now
        if turn.num_context_tokens <= 0:  # it failed, and is begun again
            return
        is_here = holding.is_counted and turn.lease_id == holding.lease.lease_id
        if is_here and turn.num_cached_tokens is not None:
            self._count_lost(holding, turn, turn.num_cached_tokens)
        is_kept = holding.is_kept
        self._uncount(holding)
        num_prompt_tokens = turn.num_context_tokens - turn.num_sampled_tokens
        if holding.num_turns == 0:
            holding.prompt_tokens = float(num_prompt_tokens)
        self._books.promise.turn(turn.num_context_tokens - (turn.num_known_tokens or num_prompt_tokens))
        holding.context_tokens = float(turn.num_context_tokens)
        holding.num_turns += 1
        holding.is_warm, holding.is_flushed = is_here, False
        self._count(holding, is_kept=is_kept)
        if is_here:
            self._let_go_beyond_capacity(holding.lease.replica_id)
            self._balance_tail(holding)
            self._clear(holding)

    def new_epoch(self, *, is_flushed: bool, adapter: str = "") -> None:
        """Note new weights: new prompts share no KV of the old ones. If it was flushed, no holder finds its own
        either. A new version of an adapter concerns only prompts and holders under it."""
        self._prefixes.clear(adapter)
        for holding in self._table if is_flushed else ():
            if not adapter or holding.demand.needs.adapter == adapter:
                holding.is_flushed |= holding.is_warm or holding.idle_since is None
                holding.is_warm = False

    def look(self, now: float) -> None:
        """Adapt the KV share to the engines' loads, and count holders at long tools no more. Call about once a
        second."""
        replicas = self._fleet.placeable()
        loads = [replica.report.load for replica in replicas]
        idle = [one for one in self._table if one.is_counted and one.idle_since is not None]
        is_waited_for, self._is_refusing = self._is_refusing or bool(self._waits_for), False
        used_tokens = sum(load.kv_used_tokens for load in loads) + sum(one.context_tokens for one in idle)
        if is_waited_for and not any(load.num_waiting for load in loads):
            self._is_freed |= self.share.grow(used_tokens, sum(one.capacity_tokens for one in replicas))
        for replica in self._fleet.drained():
            for holding in self._table.on_replica(replica.replica_id):
                self._clear(holding)
        for holding in idle if is_waited_for else ():
            if holding.idle_since is not None and now - holding.idle_since > _IDLE_S:
                self._let_go(holding)

    def check(self) -> None:
        """Raise InvariantBroken unless every count is what the leases add up to."""
        self._table.check()
        self._books.check(one for one in self._table if one.is_counted)
        if set(self._waits_for.values()) != self._lines.keys():
            raise InvariantBroken("a line has no holder, or a holder no line")
        if not self._waits_for.keys() <= set(self._table.holders):
            raise InvariantBroken("a holder whose lease has ended waits for room")

    # --- choosing ---

    def _room_for(self, demand: Demand, over: float = 0.0) -> str | None:
        """Return the replica of a new trajectory: with its prefix within the slack, else the least loaded one."""
        books = self._books
        least = books.least(needs=demand.needs)
        share = self.share.value * (1.0 + over)
        for name in (*self._homes(demand, least), least):
            if books.fits(name, demand, float(demand.num_prompt_tokens), share):
                return name
        return None

    def _homes(self, demand: Demand, least: str) -> Iterator[str]:
        """Yield the replicas that its longest known prefix went to, within the slack, the least loaded first."""
        books = self._books
        for key, num_tokens in demand.shared_prefixes(demand.num_prompt_tokens):
            homes = books.by_load(self._prefixes.replicas(key), demand.needs)
            if homes:
                slack = _PREFIX_SLACK * num_tokens / books.placeable[least].capacity_tokens
                yield from (name for name in homes if books.load(name) <= books.load(least) + slack)
                return

    def _choose_again(self, holding: Holding, is_failed: bool) -> str:
        """Return the replica of a trajectory that has begun. Raises NoHealthyReplica."""
        books, here, demand = self._books, holding.lease.replica_id, holding.demand
        if is_failed:
            return books.least(here, demand.needs)
        is_here = holding.is_counted and books.takes_traffic(holding.lease, demand.needs)
        if is_here and not holding.must_ask:
            return here
        least = books.least(needs=demand.needs)
        if not is_here and not holding.must_ask:
            return least
        names = (here, least) if holding.is_warm else (least, here)
        for name in names if is_here else (least,):
            if books.fits(name, demand, holding.num_tokens, self.share.value):
                return name
        if demand.holder_id not in self._waits_for:
            self._waits_for[demand.holder_id] = line = here if is_here else least
            books.book(line).line[demand.holder_id] = self._lines[line] = None
        raise NoHealthyReplica("no replica has room for a trajectory that returns from its tools")

    def _balance_tail(self, holding: Holding) -> None:
        """Move a trajectory whose turn has ended, if few are left and another replica has much less."""
        books, here = self._books, holding.lease.replica_id
        if len(self._table) >= _TAIL * len(books.placeable) or holding.earlier or holding.demand.is_session:
            return
        if not books.takes_traffic(holding.lease, holding.demand.needs):
            return
        gain_tokens = _TAIL_GAIN * (holding.num_tokens + books.promise.tokens)
        load, gain = books.load(here), gain_tokens / books.placeable[here].capacity_tokens
        if load <= gain:
            return  # an empty replica has not so much less: the others need no look
        least = books.least(here, holding.demand.needs)
        if load - books.load(least) > gain:
            self._go(holding, least, is_told=False)

    def _clear(self, holding: Holding) -> None:
        """Order a holder to another replica for its next turn, if its own is to be free of work."""
        here, books = holding.lease.replica_id, self._books
        if not holding.is_counted or holding.idle_since is None:
            return
        if any(one.replica_id == here for one in self._fleet.drained()):
            with suppress(NoHealthyReplica, UnsupportedParameter):  # then it stays
                self._go(holding, books.least(here, holding.demand.needs), is_told=False)

    # --- counting ---

    def _count_lost(self, holding: Holding, turn: TurnEnded, num_cached: int) -> None:
        """Count the part of a turn's prompt that was computed again although an earlier turn had computed it."""
        num_known = turn.num_known_tokens  # 0 where a session's prompt extends none of its turns: nothing is lost
        prompt_tokens = turn.num_context_tokens - turn.num_sampled_tokens
        lost_tokens = 0.0
        if holding.is_flushed:
            lost_tokens = num_known
        elif holding.is_warm and num_known:
            self._books.book(holding.lease.replica_id).hits.take(num_known, num_cached)
            lost_tokens = num_known - num_cached
            replica = self._fleet.get(holding.lease.replica_id)
            if replica is None or lost_tokens <= _LOST_BLOCKS * max(replica.registration.info.block_size, 1):
                lost_tokens = 0.0
        self.share.turn(prompt_tokens, lost_tokens, len(self._table))

    def _grant(self, replica_id: str) -> Lease:
        return self._table.grant(self._books.placed(replica_id))

    def _go(self, holding: Holding, replica_id: str, *, is_told: bool) -> None:
        """Give a holder another lease, by an answer or, not told so, by an order with its process's next report."""
        holding.is_warm &= replica_id == holding.lease.replica_id
        self._uncount(holding)
        self._table.change(holding, self._grant(replica_id), is_told=is_told)
        holding.is_counted = True
        self._count(holding, is_kept=True)
        self._is_freed = True

    def _begin(self, holding: Holding, now: float) -> None:
        self._table.hold(holding, now)
        self._count(holding, is_kept=True)

    def _end(self, holding: Holding) -> None:
        self._leave_line(holding)
        self._uncount(holding)
        self._table.drop(holding)
        self._is_freed = True

    def _leave_line(self, holding: Holding) -> None:
        replica_id = self._waits_for.pop(holding.demand.holder_id, None)
        if replica_id is not None:
            line = self._books.book(replica_id).line
            del line[holding.demand.holder_id]
            if not line:
                del self._lines[replica_id]
            self._is_freed = True

    def _count(self, holding: Holding, *, is_kept: bool) -> None:
        holding.is_kept = is_kept
        if holding.is_counted:
            self._books.book(holding.lease.replica_id).add(holding)

    def _uncount(self, holding: Holding) -> None:
        if holding.is_counted:
            self._books.book(holding.lease.replica_id).remove(holding)

    def _let_go(self, holding: Holding) -> None:
        """Give the room of a holder that is at its tools to others: it asks before its next turn."""
        if holding.is_counted and holding.is_kept and holding.idle_since is not None and not holding.earlier:
            self._recount(holding, is_kept=False)
            self._table.have_ask(holding)
            self._is_freed = True

    def _let_go_beyond_capacity(self, replica_id: str) -> None:
        """Let holders at their tools go until the contexts of the others fit the engine's KV."""
        if not self._config.limits_kv or not self._books.is_over(replica_id):
            return
        idle = [one for one in self._table.on_replica(replica_id) if one.is_kept and one.idle_since is not None]
        # The oldest ones end soonest; of equally old ones the fewest that free enough. Ids: a run can be repeated.
        for holding in sorted(idle, key=lambda one: (one.num_turns, -one.num_tokens, one.demand.holder_id)):
            if self._books.is_over(replica_id):
                self._let_go(holding)

    def _recount(self, holding: Holding, *, is_kept: bool) -> None:
        self._uncount(holding)
        self._count(holding, is_kept=is_kept)


def _session_row(holding: Holding, now: float) -> FlightRow:
    idle_s = 0.0 if holding.idle_since is None else now - holding.idle_since
    doing = Doing.DECODE if holding.idle_since is None else Doing.LOOP
    flight = Flight(doing, idle_s, idle_s, turn=holding.num_turns, num_tokens=round(holding.context_tokens))
    return FlightRow(holding.demand.holder_id.removeprefix("/"), flight, "", holding.lease.replica_id)
