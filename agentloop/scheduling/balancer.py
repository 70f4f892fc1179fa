"""The balancer: chooses a replica for each trajectory and session, and limits how many run at a time.

A new holder of a lease goes to the replica with the longest shared prefix of its prompt, or to the least loaded
one if the loads differ by more than a multiple of that prefix. It starts if the KV of all holders and their
expected growth fit into the share of KV in use (`KVShare`). Later turns stay on that replica, where the
trajectory's KV is. The steps: `has_room`, `acquire`, then `turn_begun` and `turn_ended` for each turn, perhaps
`move`, and `release`.

One synchronous object in the coordinator's event loop; callers pass the time. It reads the `Fleet` and owns the
lease table and the KV accounting. Invariants: a holder has at most one lease; lease ids are never reused; a
replica's account is the sum of its leases; a holder that waits for capacity on a replica goes before all later
ones.
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

_PREFIX_SLACK = 4.0  # in units of the shared prefix: the extra load that its replica may have
_IDLE_S = 5.0  # seconds at a tool after which a holder's KV reservation is released, while others wait
_TAIL = 8  # trajectories per replica on average; below it balance matters more than cached KV
_TAIL_GAIN = 2.0  # in units of the trajectory's own KV: the advantage that a move in the tail requires
_LOST_BLOCKS = 2  # blocks that count as cached, because the end of a context does not fill a block


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of leases and KV use."""

    lease_ttl_s: float = 60.0  # the leases of a process end after this silence
    # Expected growth of a trajectory beyond its prompt, until trajectories have ended
    usual_growth_tokens: float = 8192.0
    share: ShareBounds = field(default_factory=ShareBounds)
    limits_kv: bool = True  # False: no holder has to ask before a turn because contexts exceed the KV


@dataclass(frozen=True, slots=True)
class KVUse:
    """A replica's KV: expected use and limit in tokens, and cache hits."""

    predicted_tokens: int
    limit_tokens: int
    hit_rate: float | None  # cached share of the contexts of returning turns
    is_thrashing: bool


class Balancer:
    """Places trajectories and sessions on replicas, with their leases and KV reservations."""

    def __init__(self, fleet: Fleet, config: BalancerConfig | None = None) -> None:
        self._fleet = fleet
        self._config = config or BalancerConfig()
        self._table = LeaseTable()
        self._books = ReplicaBooks(fleet, self._config.usual_growth_tokens)
        self._prefixes = RoutedPrefixes()
        self.share = KVShare(self._config.share)
        self._waits_for: dict[str, str] = {}  # holder id -> the replica in whose queue it is
        self._queued_replicas: dict[str, None] = {}  # replicas with a nonempty queue
        self._is_refusing = False  # a holder was refused since the last `look`
        self._is_freed = False  # capacity was freed since the last `next_up`
        # The demand and replica that `has_room` chose last, because a choice reads all replicas.
        self._last_choice: tuple[Demand | None, str | None] = (None, None)

    # Queries

    @property
    def num_holders(self) -> int:
        return len(self._table)

    @property
    def holders(self) -> Iterable[str]:
        return self._table.holders

    def num_leases(self, replica_id: str) -> int:
        """Return the number of leases on a replica."""
        return self._books.book(replica_id).num_leases

    def kv_use(self, replica_id: str) -> KVUse:
        """Return a replica's KV use: expected, limit, and cache hits."""
        book, replica = self._books.book(replica_id), self._fleet.get(replica_id)
        capacity_tokens = 0 if replica is None else replica.capacity_tokens
        return KVUse(
            predicted_tokens=round(book.held_tokens + book.num_kept * self._books.promise.tokens),
            limit_tokens=round(self.share.value * capacity_tokens),
            hit_rate=book.hits.rate,
            is_thrashing=book.hits.is_thrashing,
        )

    def lease_of(self, holder_id: str) -> Lease | None:
        """Return the lease of a trajectory or session."""
        holding = self._table.of_holder(holder_id)
        return None if holding is None else holding.lease

    def holder_of(self, lease_id: str) -> str | None:
        """Return the holder of a lease; None if the lease is unknown."""
        holding = self._table.of_lease(lease_id)
        return None if holding is None else holding.demand.holder_id

    def sessions(self, limit: int, now: float, name: str = "") -> tuple[FlightRow, ...]:
        """Return sessions and direct calls with a lease, the longest idle first, and `name` in addition."""
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
        """Return the id of the first trajectory or session in each replica's queue.

        Returns no ids if no capacity was freed since the last call.
        """
        if not self._is_freed:
            return ()
        self._is_freed = False
        return tuple(next(iter(self._books.book(name).line)) for name in self._queued_replicas)

    # Leases

    def has_room(self, demand: Demand, over: float = 0.0) -> bool:
        """Return True if one more trajectory or session may start. `over` times the capacity may be used beyond
        it.

        Raises UnsupportedParameter as `acquire`.
        """
        try:
            found = self._room_for(demand, over)
        except NoHealthyReplica:
            return False
        self._last_choice = demand, found
        self._is_refusing |= found is None
        return found is not None

    def acquire(self, demand: Demand, now: float) -> Lease:
        """Grant a holder a lease, or return its present lease if that replica takes traffic.

        Does not check capacity (`has_room`). Raises NoHealthyReplica, UnsupportedParameter if no engine meets the
        demand's needs, WeightVersionNotServed, or ModelNotFound if the adapter is not served.
        """
        self._fleet.check_weights(demand.needs)
        holding = self._table.of_holder(demand.holder_id)
        if holding is not None:
            if holding.is_counted and self._books.takes_traffic(holding.lease, demand.needs):
                self._table.ask_again(holding, demand, now)
                return holding.lease
            self._end(holding)
        (asked, chosen), self._last_choice = self._last_choice, (None, None)
        if asked is not demand or chosen is None or not self._books.suits(chosen, demand.needs):
            chosen = self._room_for(demand) or self._books.least(needs=demand.needs)
        self._prefixes.note(demand.shared_prefixes(demand.num_prompt_tokens), chosen)
        lease = self._grant(chosen)
        self._begin(Holding(demand, lease, prompt_tokens=float(demand.num_prompt_tokens)), now)
        return lease

    def adopt(self, demand: Demand, lease: Lease, now: float) -> None:
        """Add a lease that an earlier coordinator granted. No effect if the holder or the lease is known.

        The replica may not have joined this coordinator yet.
        """
        if self._table.of_holder(demand.holder_id) is None and self._table.of_lease(lease.lease_id) is None:
            self._begin(Holding(demand, lease, prompt_tokens=float(demand.num_prompt_tokens)), now)

    def move(self, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Replace the lease of a holder.

        After a failure the new lease is on another replica if there is one. Otherwise the holder stays where its
        KV is if that replica meets its `needs`; a holder that must ask may have to wait for capacity. Raises
        NotFound if the lease is unknown (call `adopt` first), NoHealthyReplica if the holder has to wait or no
        replica takes traffic, UnsupportedParameter, WeightVersionNotServed or ModelNotFound. After an error the
        holder keeps its lease.
        """
        self._fleet.check_weights(needs)
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            raise NotFound(f"unknown lease {lease.lease_id}", param="lease")
        holding.demand = self._books.needing(holding.demand, needs)
        if lease.lease_id != holding.lease.lease_id and self._books.takes_traffic(
            holding.lease, holding.demand.needs
        ):
            self._table.obeyed(holding)  # it has moved already
            return holding.lease
        chosen = self._choose_again(holding, is_failed)
        self._leave_queue(holding)
        self._replace_lease(holding, chosen, is_told=True)
        return holding.lease

    def callers(self, lease: Lease) -> tuple[str, ...]:
        """Return the processes with leases on this lease's replica, its own first; empty if the lease has ended."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            return ()
        own = holding.demand.process_id
        there = {one.demand.process_id for one in self._table.on_replica(lease.replica_id)}
        return (own, *sorted(there - {own}))

    def release(self, lease: Lease, num_tokens: int | None, now: float) -> None:
        """End a lease. Idempotent. `num_tokens` is the growth of a trajectory that completed, else None."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is not None:
            self._table.renew(holding.demand.process_id, now)
            if num_tokens is not None and not holding.demand.is_session:
                self._books.promise.end(num_tokens)
            self._end(holding)

    def expire(self, now: float) -> int:
        """End the leases that have expired and those of silent processes. Returns their number."""
        over = self._table.expired(now, self._config.lease_ttl_s)
        for holding in over:
            self._end(holding)
        return len(over)

    def drop_replica(self, replica_id: str) -> None:
        """Remove a lost replica, or one whose KV is lost, from the accounts.

        Its holders move at their next call.
        """
        for holding in self._table.on_replica(replica_id):
            self._uncount(holding)
            holding.is_counted = holding.is_warm = False
        for holder_id in self._books.book(replica_id).line:
            del self._waits_for[holder_id]
        self._queued_replicas.pop(replica_id, None)
        self._books.forget(replica_id)
        self._prefixes.forget(replica_id)
        self._is_freed = True

    # Reports of processes

    def took(self, report: LeaseReport, now: float) -> LeaseOrders:
        """Apply a process's lease report, and return orders for it. Each report counts once (`ReportDesk`).

        For a lease that has ended or belongs to another process, the order is to ask for a new one.
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
        """Reconcile the table with all leases of a process.

        Leases that an earlier coordinator granted are adopted. Leases of sessions that the process no longer has
        end; a trajectory's lease ends with its record.
        """
        for held in leases:
            is_session = is_session_holder(held.holder_id)
            num_tokens = max(1, held.num_context_tokens)  # a replica whose leases count nothing would look idle
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
        """Return a process's orders for the next turns: lease id -> the new lease, or None to ask first."""
        return self._table.orders(process_id)

    def turn_begun(self, lease_id: str) -> None:
        """Record the start of a turn. Unknown leases are ignored."""
        holding = self._table.of_lease(lease_id)
        if holding is None:
            return
        if lease_id == holding.lease.lease_id:
            self._table.obeyed(holding)
        holding.idle_since = None
        if not holding.is_kept:  # it started before it received the order to ask first
            self._recount(holding, is_kept=True)

    def turn_ended(self, turn: TurnEnded, now: float) -> None:
        """Record the end of a turn. Unknown leases are ignored."""
        holding = self._table.of_lease(turn.lease_id)
        if holding is None:
            return
        holding.idle_since = now
        if turn.num_context_tokens <= 0:  # the turn failed and will be retried
            return
        is_here = holding.is_counted and turn.lease_id == holding.lease.lease_id
        if is_here and turn.num_cached_tokens is not None:
            self._count_recomputed(holding, turn, turn.num_cached_tokens)
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
            self._release_beyond_capacity(holding.lease.replica_id)
            self._balance_tail(holding)
            self._leave_replica(holding)

    def new_epoch(self, *, is_flushed: bool, adapter: str = "") -> None:
        """Record new weights. New prompts share no KV of the old weights; after a flush, holders do not either.

        A new version of an adapter affects only prompts and holders with this adapter.
        """
        self._prefixes.clear(adapter)
        for holding in self._table if is_flushed else ():
            if not adapter or holding.demand.needs.adapter == adapter:
                holding.is_flushed |= holding.is_warm or holding.idle_since is None
                holding.is_warm = False

    def look(self, now: float) -> None:
        """Adapt the KV share to the engines' loads, and release reservations of holders at long tools.

        Call once a second.
        """
        replicas = self._fleet.placeable()
        loads = [replica.report.load for replica in replicas]
        idle = [one for one in self._table if one.is_counted and one.idle_since is not None]
        is_waited_for, self._is_refusing = self._is_refusing or bool(self._waits_for), False
        used_tokens = sum(load.kv_used_tokens for load in loads) + sum(one.context_tokens for one in idle)
        # A request in an engine's queue means that the KV is full, even if the reports show less.
        if is_waited_for and not any(load.num_waiting for load in loads):
            self._is_freed |= self.share.grow(used_tokens, sum(one.capacity_tokens for one in replicas))
        for replica in (*self._fleet.drained(), *self._fleet.held()):
            for holding in self._table.on_replica(replica.replica_id):
                self._leave_replica(holding)
        for holding in idle if is_waited_for else ():
            if holding.idle_since is not None and now - holding.idle_since > _IDLE_S:
                self._release_reservation(holding)

    def check(self) -> None:
        """Raise InvariantBroken unless all accounts are the sums of their leases."""
        self._table.check()
        self._books.check(one for one in self._table if one.is_counted)
        waiting, queued = set(self._waits_for.values()), set(self._queued_replicas)
        if waiting != queued:
            raise InvariantBroken(
                f"holders wait for replicas {sorted(waiting)}, but queues exist for {sorted(queued)}"
            )
        if not self._waits_for.keys() <= set(self._table.holders):
            raise InvariantBroken("a holder without a lease waits for capacity")

    # Choice of a replica

    def _room_for(self, demand: Demand, over: float = 0.0) -> str | None:
        """Return the replica for a new holder; None if no replica has capacity."""
        books = self._books
        least = books.least(needs=demand.needs)
        share = self.share.value * (1.0 + over)
        for name in (*self._prefix_replicas(demand, least), least):
            if books.fits(name, demand, float(demand.num_prompt_tokens), share):
                return name
        return None

    def _prefix_replicas(self, demand: Demand, least: str) -> Iterator[str]:
        """Yield the replicas that received its longest known prefix, within the slack, least loaded first."""
        books = self._books
        for key, num_tokens in demand.shared_prefixes(demand.num_prompt_tokens):
            replicas = books.by_load(self._prefixes.replicas(key), demand.needs)
            if replicas:
                slack = _PREFIX_SLACK * num_tokens / books.placeable[least].capacity_tokens
                yield from (name for name in replicas if books.load(name) <= books.load(least) + slack)
                return

    def _choose_again(self, holding: Holding, is_failed: bool) -> str:
        """Return the next replica of a holder with a lease. Raises NoHealthyReplica."""
        books, here, demand = self._books, holding.lease.replica_id, holding.demand
        moved = demand.needs.of_moved
        if is_failed:
            return books.least(here, moved)
        is_here = holding.is_counted and books.takes_traffic(holding.lease, demand.needs)
        if is_here and not holding.must_ask:
            return here
        least = books.least(needs=moved)
        if not is_here and not holding.must_ask:
            return least
        # With warm KV the present replica saves a prefill, otherwise the least loaded one is as good.
        names = (here, least) if holding.is_warm else (least, here)
        for name in names if is_here else (least,):
            if books.fits(name, demand, holding.num_tokens, self.share.value):
                return name
        if demand.holder_id not in self._waits_for:
            self._waits_for[demand.holder_id] = line = here if is_here else least
            books.book(line).line[demand.holder_id] = self._queued_replicas[line] = None
        raise NoHealthyReplica(
            "no replica has KV capacity for this trajectory's next turn now: it waits in the queue"
        )

    def _balance_tail(self, holding: Holding) -> None:
        """Move a trajectory after its turn, if few are left and another replica has much less load."""
        books, here = self._books, holding.lease.replica_id
        if len(self._table) >= _TAIL * len(books.placeable) or holding.earlier or holding.demand.is_session:
            return
        if not books.takes_traffic(holding.lease, holding.demand.needs):
            return
        gain_tokens = _TAIL_GAIN * (holding.num_tokens + books.promise.tokens)
        load, gain = books.load(here), gain_tokens / books.placeable[here].capacity_tokens
        if load <= gain:
            return  # even an empty replica would not have so much less load
        least = books.least(here, holding.demand.needs.of_moved)
        if load - books.load(least) > gain:
            self._replace_lease(holding, least, is_told=False)

    def _leave_replica(self, holding: Holding) -> None:
        """Move a holder at its next turn off a drained host, or off a held replica whose version it does not
        accept."""
        here, books, needs = holding.lease.replica_id, self._books, holding.demand.needs
        if not holding.is_counted or holding.idle_since is None:
            return
        is_drained = any(one.replica_id == here for one in self._fleet.drained())
        if is_drained or (here in books.placeable and not books.suits(here, needs)):
            with suppress(NoHealthyReplica, UnsupportedParameter):  # no other replica can serve it, so it stays
                self._replace_lease(holding, books.least(here, needs.of_moved), is_told=False)

    # Accounting

    def _count_recomputed(self, holding: Holding, turn: TurnEnded, num_cached: int) -> None:
        """Count the prompt tokens of a turn that were computed again although an earlier turn had computed them."""
        num_known = turn.num_known_tokens  # 0 if a session's prompt extends none of its turns: nothing is lost
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

    def _replace_lease(self, holding: Holding, replica_id: str, *, is_told: bool) -> None:
        """Replace a holder's lease.

        Its process learns of it by this call's response (`is_told`) or by an order.
        """
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
        self._leave_queue(holding)
        self._uncount(holding)
        self._table.drop(holding)
        self._is_freed = True

    def _leave_queue(self, holding: Holding) -> None:
        replica_id = self._waits_for.pop(holding.demand.holder_id, None)
        if replica_id is not None:
            line = self._books.book(replica_id).line
            del line[holding.demand.holder_id]
            if not line:
                del self._queued_replicas[replica_id]
            self._is_freed = True

    def _count(self, holding: Holding, *, is_kept: bool) -> None:
        holding.is_kept = is_kept
        if holding.is_counted:
            self._books.book(holding.lease.replica_id).add(holding)

    def _uncount(self, holding: Holding) -> None:
        if holding.is_counted:
            self._books.book(holding.lease.replica_id).remove(holding)

    def _release_reservation(self, holding: Holding) -> None:
        """Release the KV reservation of a holder that runs a tool: it asks before its next turn."""
        if holding.is_counted and holding.is_kept and holding.idle_since is not None and not holding.earlier:
            self._recount(holding, is_kept=False)
            self._table.have_ask(holding)
            self._is_freed = True

    def _release_beyond_capacity(self, replica_id: str) -> None:
        """Release reservations of holders that run tools until the other contexts fit into the engine's KV."""
        if not self._config.limits_kv or not self._books.is_over(replica_id):
            return
        idle = [one for one in self._table.on_replica(replica_id) if one.is_kept and one.idle_since is not None]
        # Holders with the fewest turns first, because they occupy KV the longest; among equals the largest, so
        # that few are released. Holder ids make the order reproducible.
        for holding in sorted(idle, key=lambda one: (one.num_turns, -one.num_tokens, one.demand.holder_id)):
            if self._books.is_over(replica_id):
                self._release_reservation(holding)

    def _recount(self, holding: Holding, *, is_kept: bool) -> None:
        self._uncount(holding)
        self._count(holding, is_kept=is_kept)


def _session_row(holding: Holding, now: float) -> FlightRow:
    idle_s = 0.0 if holding.idle_since is None else now - holding.idle_since
    doing = Doing.DECODE if holding.idle_since is None else Doing.LOOP
    flight = Flight(doing, idle_s, idle_s, turn=holding.num_turns, num_tokens=round(holding.context_tokens))
    return FlightRow(holding.demand.holder_id.removeprefix("/"), flight, "", holding.lease.replica_id)
