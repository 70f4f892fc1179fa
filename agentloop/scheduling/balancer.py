"""The balancer: which replica a trajectory runs on, for all its turns, and how many run at a time.

Ownership: one object, in the coordinator's event loop, pure and synchronous, time passed in; it reads the `Fleet`
and owns the lease table, the books of the replicas, the models of their KV, and what it has learned of lengths and
tools. A trajectory is charged to its replica from its lease to its release with the seconds of work and the KV that
it is still expected to need (`expected_work.py`, `kv_forecast.py`): requests in flight would make a replica full of
trajectories that wait for tools look idle.

The life of a trajectory here: `has_room`, then `acquire`; `turn_begun` and `turn_ended` at each turn, told in
batches by the process that runs it; perhaps an order to go elsewhere or to ask first, followed at the next turn
(`move`); `release`.

Invariants: a holder has at most one lease; lease ids are never used twice; a replica's book is the sum of the
charges of the leases counted on it; whoever waits for room waits behind a bounded number of others.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentloop.api.coordinator import (
    HeldLease,
    KVChanges,
    LeaseOrders,
    LeaseReport,
    TurnBegun,
    TurnEnded,
    is_session_holder,
)
from agentloop.capabilities import NO_NEEDS, Needs
from agentloop.errors import InvariantBroken, NoHealthyReplica, NotFound
from agentloop.fleet.registry import Fleet
from agentloop.kv_hashes import hashes_of
from agentloop.scheduling.admission import Admission, AdmissionConfig
from agentloop.scheduling.charges import Charges
from agentloop.scheduling.expected_work import WorkPriors
from agentloop.scheduling.lease_table import Holding, LeaseTable
from agentloop.scheduling.placement import Charge, Demand, Placement
from agentloop.scheduling.rebalance import Rebalance, RebalanceConfig
from agentloop.scheduling.replica_caches import ReplicaCaches
from agentloop.scheduling.retention import Retention
from agentloop.scheduling.step_times import StepTimes
from agentloop.types import Lease


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of the leases, of the prediction of work, and of how far siblings may pull."""

    lease_ttl_s: float = 60.0  # silence of a process after which its leases end
    group_slack_trajectories: float = 8.0  # extra load, in fresh trajectories, that shared prompt KV is worth
    min_stagger_s: float = 0.5  # siblings wait for the leader's prefill if that saves at least so much
    retention_factor: float = 3.0  # of the break-even, that KV is kept for while a tool runs
    growth_turns: float = 4.0  # that each trajectory is given room to grow by
    step_times: StepTimes = field(default_factory=StepTimes)
    priors: WorkPriors = field(default_factory=WorkPriors)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    rebalance: RebalanceConfig = field(default_factory=RebalanceConfig)


@dataclass(frozen=True, slots=True)
class KVUse:
    """A replica's KV: what is predicted to be held soon, what may be, and its hits."""

    predicted_tokens: int
    limit_tokens: int
    hit_rate: float | None  # of the contexts of turns that returned
    agreement: float | None  # of predicted and reported hits
    is_thrashing: bool


class Balancer:
    """Leases, and the predicted work and KV behind them."""

    def __init__(self, fleet: Fleet, config: BalancerConfig | None = None) -> None:
        self._fleet = fleet
        self._config = config or BalancerConfig()
        self._times = self._config.step_times
        self._table = LeaseTable()
        self._placement = Placement(fleet)
        self._charges = Charges(self._placement, self._times, self._config.priors, self._config.growth_turns)
        self._retention = Retention(self._times, self._config.retention_factor)
        self.admission = Admission(self._config.admission)
        self._rebalance = Rebalance(self._placement, self._times, self._config.rebalance)
        self._caches = ReplicaCaches(fleet)
        self._leaders: dict[str, float] = {}  # group -> when its first prompt is prefilled, by our count

    # --- what others see ---

    @property
    def num_holders(self) -> int:
        """Trajectories and sessions that hold a lease, on whatever replica."""
        return len(self._table)

    @property
    def holders(self) -> Iterable[str]:
        """The trajectories and sessions that hold a lease."""
        return self._table.holders

    def num_leases(self, replica_id: str) -> int:
        """Return how many leases count on a replica."""
        return self._placement.book(replica_id).num_leases

    def kv_use(self, replica_id: str) -> KVUse:
        """Return how much of a replica's KV is spoken for, and how its turns find theirs."""
        replica, hits = self._fleet.get(replica_id), self._caches.hits
        limit_tokens = 0.0 if replica is None else self.admission.rho * replica.capacity_tokens
        return KVUse(
            predicted_tokens=round(self._placement.book(replica_id).forecast.soon_tokens),
            limit_tokens=round(limit_tokens),
            hit_rate=hits.hit_rate(replica_id),
            agreement=hits.agreement(replica_id),
            is_thrashing=hits.is_thrashing(replica_id),
        )

    def lease_of(self, holder_id: str) -> Lease | None:
        """Return the lease that a trajectory or a session holds."""
        holding = self._table.of_holder(holder_id)
        return None if holding is None else holding.lease

    def holder_of(self, lease_id: str) -> str | None:
        """Return who holds a lease; None for one that is not known."""
        holding = self._table.of_lease(lease_id)
        return None if holding is None else holding.demand.holder_id

    def hoped_tokens(self, group_id: str) -> float:
        """Return the growth that a group's next sample may well have: who may have most begins first."""
        return self._charges.hoped(group_id)

    def tokens_left(self, holder_id: str) -> float:
        """Return the tokens that a trajectory was expected to grow by at its last turn; 0: it has no lease."""
        holding = self._table.of_holder(holder_id)
        return 0.0 if holding is None else holding.charge.left_tokens

    # --- leases ---

    def has_room(
        self,
        group_id: str = "",
        num_prompt_tokens: int | None = None,
        over: float = 0.0,
        needs: Needs = NO_NEEDS,
    ) -> bool:
        """Tell if one more trajectory, of this group, may begin.

        It may take the share `over` of the room beyond it. Who comes back from a long tool goes first: nothing
        begins on a replica that one of those waits for. Raises UnsupportedParameter as `acquire`.
        """
        if self._placement.num_placeable == 0:
            return False
        prompt_tokens = self._charges.mean_prompt_tokens if num_prompt_tokens is None else float(num_prompt_tokens)
        charge = self._charges.fresh(group_id, prompt_tokens, 2)
        try:
            homes, roomiest = self._placement.homes(group_id, needs), self._placement.roomiest(needs)
        except NoHealthyReplica:
            return False
        has_room = any(self._fits(name, group_id, charge, over=over) for name in (*homes, roomiest))
        if not has_room:
            self.admission.refused()
        return has_room

    def acquire(self, demand: Demand, now: float) -> Lease:
        """Return a place for a trajectory or a session.

        Asked again it is the one that it holds, as long as that replica takes traffic. It is given even if there is
        no room (`has_room`). Raises NoHealthyReplica, or UnsupportedParameter if no engine can serve what it needs.
        """
        holding = self._table.of_holder(demand.holder_id)
        if holding is not None:
            if holding.is_counted and self._placement.takes_traffic(holding.lease, demand.needs):
                self._table.ask_again(holding, demand, now)
                return holding.lease
            self._end(holding, None)
        charge = self._charges.first(demand)
        chosen = self._choose_fresh(demand, charge)
        self.admission.placed(chosen)
        lease = self._grant(chosen)
        self._begin(Holding(demand, lease, charge, now, prompt_tokens=float(demand.num_prompt_tokens)), now)
        self._lead(demand, chosen, now)
        return lease

    def adopt(self, demand: Demand, lease: Lease, now: float) -> None:
        """Count a lease that an earlier coordinator granted, whether or not its replica has joined this one yet.

        No-op if the holder or the lease is known.
        """
        if self._table.of_holder(demand.holder_id) is not None or self._table.of_lease(lease.lease_id) is not None:
            return
        prompt_tokens = float(demand.num_prompt_tokens)
        charge = self._charges.fresh(demand.group_id, prompt_tokens, demand.group_size)
        self._begin(Holding(demand, lease, charge, now, prompt_tokens=prompt_tokens), now)

    def move(self, lease: Lease, is_failed: bool, now: float, needs: Needs = NO_NEEDS) -> Lease:
        """Return another lease for the holder of `lease`, which ends.

        After a failure it goes to another replica, and stays only if there is no other. Asked without a failure,
        it stays where its KV is, unless that replica is overloaded or cannot serve what it `needs`, now and from
        here on; one that was told to ask may have to wait for room. Raises NoHealthyReplica if it has to, or if no
        replica takes traffic, and UnsupportedParameter if no engine can serve it: the holder keeps its lease.
        Raises NotFound for a lease that is not known (`adopt` it first).
        """
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            raise NotFound(f"lease {lease.lease_id} is not known", param="lease")
        holding.demand = self._placement.needing(holding.demand, needs)
        if lease.lease_id != holding.lease.lease_id and self._placement.takes_traffic(holding.lease, needs):
            self._table.obeyed(holding)  # it has moved already
            return holding.lease
        chosen = self._choose_again(holding, is_failed)
        self.admission.leave(holding.demand.holder_id)
        self.admission.placed(chosen)
        is_elsewhere = chosen != holding.lease.replica_id or not holding.is_counted
        self._uncount(holding)
        self._table.change(holding, self._grant(chosen), now, is_told=True)
        if is_elsewhere or not holding.charge.is_kept:
            holding.is_warm = False
        holding.is_counted = True
        self._count(holding, self._charges.of(holding, is_kept=True))
        return holding.lease

    def callers(self, lease: Lease) -> tuple[str, ...]:
        """Return the processes that call at the replica of a lease, its own first; none if the lease has ended."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            return ()
        own = holding.demand.process_id
        there = {one.demand.process_id for one in self._table.on_replica(lease.replica_id)}
        return (own, *sorted(there - {own}))

    def release(self, lease: Lease, num_tokens: int | None, now: float) -> None:
        """Give a place back; idempotent. `num_tokens`, of one that ran to its end, are what it grew by."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is not None:
            self._table.renew(holding.demand.process_id, now)
            self._end(holding, num_tokens)

    def renew(self, process_id: str, now: float) -> None:
        """Keep the leases of a process that gave a sign of life."""
        self._table.renew(process_id, now)

    def expire(self, now: float) -> int:
        """End the leases whose time is over, and those of processes that fell silent. Returns how many."""
        over = self._table.expired(now, self._config.lease_ttl_s)
        for holding in over:
            self._end(holding, None)
        return len(over)

    def drop_replica(self, replica_id: str) -> None:
        """Count the leases of a replica that is lost, or whose KV is, no more: they move at their next call."""
        for holding in self._table.on_replica(replica_id):
            self._uncount(holding)
            holding.is_counted = holding.is_warm = False
        self._caches.drop(replica_id)
        self.admission.dissolve(replica_id)
        self._placement.forget(replica_id)

    def kv_changed(self, replica_id: str, changes: KVChanges) -> bool:
        """Take in what a replica tells of its prefix cache. False: it has to tell all that it holds."""
        return self._caches.changed(replica_id, changes)

    # --- news of processes ---

    def took(self, report: LeaseReport, now: float) -> LeaseOrders:
        """Take the news of a process's leases, each report once (`ReportDesk`); returns what it is to do.

        Of leases that are not its own, or have ended, it is told to ask.
        """
        process_id = report.process_id
        self._table.renew(process_id, now)
        if report.leases is not None:
            self._compare(process_id, report.leases, now)
        unknown: list[tuple[str, Lease | None]] = []
        for lease_id in dict.fromkeys((*report.taken, *(turn.lease_id for turn in report.turns))):
            holding = self._table.of_lease(lease_id)
            if holding is None or not self._table.heard(holding, process_id, now):
                unknown.append((lease_id, None))
        for turn in report.turns:
            if (turn.lease_id, None) not in unknown:
                self._take_turn(turn, now)
        for lease_id in report.released:
            holding = self._table.of_lease(lease_id)
            if holding is not None and holding.demand.process_id == process_id:
                self._end(holding, None)
        return LeaseOrders((*unknown, *self._table.orders(process_id)))

    def _take_turn(self, turn: TurnBegun | TurnEnded, now: float) -> None:
        if isinstance(turn, TurnBegun):
            self.turn_begun(turn.lease_id, now)
            return
        counts = turn.num_context_tokens, turn.num_sampled_tokens, turn.num_cached_tokens
        self.turn_ended(turn.lease_id, *counts, turn.first_block, hashes_of(turn.block_hashes), turn.tool, now)

    def _compare(self, process_id: str, leases: Sequence[HeldLease], now: float) -> None:
        """Have the table agree with all that a process holds: leases that an earlier coordinator granted are
        adopted, and those of sessions that it had and has no more end. A trajectory's end with its record."""
        for held in leases:
            is_session = is_session_holder(held.holder_id)
            num_tokens = max(1, held.num_context_tokens)  # a lease without work would make a replica look idle
            demand = Demand(held.holder_id, process_id, held.group_id, num_tokens, is_session=is_session)
            self.adopt(demand, held.lease, now)
            holding = self._table.of_lease(held.lease.lease_id)
            if holding is not None and self._table.heard(holding, process_id, now):
                holding.hashes = hashes_of(held.block_hashes)
        kept = {held.lease.lease_id for held in leases}
        for holding in self._table.of_process(process_id):
            demand, names = holding.demand, {holding.lease.lease_id, *holding.earlier}
            if demand.is_session and demand.expires_at is None and names.isdisjoint(kept):
                self._end(holding, None)

    def orders(self, process_id: str) -> tuple[tuple[str, Lease | None], ...]:
        """Return what a process is to do from the next turns on: lease id -> another lease, or None: ask first."""
        return self._table.orders(process_id)

    def turn_begun(self, lease_id: str, now: float) -> None:
        """Take in that a holder is back from its tools, or begins its first turn. Unknown leases: no-op."""
        holding = self._table.of_lease(lease_id)
        if holding is None:
            return
        if lease_id == holding.lease.lease_id:
            self._table.obeyed(holding)
        if holding.is_at_tool:
            self._retention.times.returned(holding.tool, now - holding.ended_at)
            if not holding.charge.is_kept:
                self._recount(holding, is_kept=True)
        self._set_at_tool(holding, is_at_tool=False)

    def turn_ended(
        self,
        lease_id: str,
        num_context_tokens: int,
        num_sampled_tokens: int,
        num_cached_tokens: int | None,
        first_block: int,
        block_hashes: array[int],
        tool: str,
        now: float,
    ) -> None:
        """Take in a turn (`api.TurnEnded` tells what each is), and decide where the next one runs."""
        holding = self._table.of_lease(lease_id)
        if holding is None:
            return
        if num_context_tokens <= 0:  # it failed, and is begun again
            self._set_at_tool(holding, is_at_tool=True)
            holding.tool, holding.ended_at = "", now
            return
        demand, is_here = holding.demand, lease_id == holding.lease.lease_id
        if not demand.is_session:
            self._charges.turn(holding, num_context_tokens, num_sampled_tokens)
            self._rebalance.prompted(num_context_tokens - num_sampled_tokens)
            if is_here and num_cached_tokens is not None:
                self._count_lost(holding, num_sampled_tokens, num_cached_tokens)
        num_left = holding.context_tokens if holding.is_warm else 0.0
        holding.context_tokens = float(num_context_tokens)
        holding.num_turns += 1
        if first_block <= len(holding.hashes):
            del holding.hashes[first_block:]
            holding.hashes.extend(block_hashes)
        self._set_at_tool(holding, is_at_tool=True)
        holding.tool, holding.ended_at = tool, now
        self._leaders.pop(demand.group_id, None)  # its prompt is there
        if not is_here or demand.is_session or not holding.is_counted:
            return
        num_prompt_tokens = num_context_tokens - num_sampled_tokens
        self._caches.turn(holding, num_left, num_prompt_tokens, num_cached_tokens)
        holding.is_warm = True
        if not self._keeps_kv(holding, now):
            self._table.have_ask(holding)
            return
        target = self._rebalance.target(holding, self.admission.rho, now)
        if target is not None:
            self._order(holding, target, now)

    def new_epoch(self, is_flushed: bool, now: float) -> None:
        """Take in new weights. Flushed, no KV is left: whoever is at a tool is placed anew, the most work first.

        Those that are not moved ask for room before they go on: there is nothing to come back to.
        """
        self._table.epoch += 1
        if not is_flushed:
            return
        self._caches.flushed()
        waiting: list[Holding] = []
        lost_s = 0.0
        for holding in self._table:
            if holding.is_warm or (holding.is_sampling and not holding.demand.is_session):
                lost_s += self._times.prefill(max(holding.context_tokens, holding.prompt_tokens))
            holding.is_warm = False
            if holding.is_at_tool and holding.is_counted and holding.charge.is_kept and not holding.earlier:
                waiting.append(holding)
        self.admission.flushed(lost_s)
        for holding, target in self._rebalance.spread(waiting):
            self._order(holding, target, now)
        for holding in waiting:
            if not holding.earlier and not holding.demand.is_session:  # somebody waits for its calls
                self._let_go(holding)

    def look(self, now: float) -> None:
        """Let go of the KV of tools that take long; about once a second."""
        for holding in self._retention.due(now):
            if holding.is_counted and holding.is_at_tool and holding.charge.is_kept and not holding.earlier:
                self._let_go(holding)

    def check(self) -> None:
        """Raise InvariantBroken unless every count is what the leases add up to."""
        self._table.check()
        counted = [one for one in self._table if one.is_counted]
        homes = Counter((one.demand.group_id, one.lease.replica_id) for one in counted if one.demand.group_id)
        self._placement.check(Counter(one.lease.replica_id for one in counted), homes)
        if self.admission.num_waiting > len(self._table):
            raise InvariantBroken("a holder whose lease has ended waits for room")

    # --- choosing ---

    def _choose_fresh(self, demand: Demand, charge: Charge) -> str:
        """Return the replica of a new trajectory: with its siblings within the slack, else where there is least."""
        placement, group_id, needs = self._placement, demand.group_id, demand.needs
        least = placement.least(needs=needs)
        bound = placement.work(least) + self._config.group_slack_trajectories * charge.work_s
        homes = [name for name in placement.homes(group_id, needs) if placement.work(name) <= bound]
        for name in (*homes, least, roomiest := placement.roomiest(needs)):
            if self._fits(name, group_id, charge):
                return name
        return homes[0] if homes else roomiest  # nobody asked for room: it is crowded anywhere

    def _choose_again(self, holding: Holding, is_failed: bool) -> str:
        """Return the replica of a trajectory that has begun. Raises NoHealthyReplica."""
        placement, here, needs = self._placement, holding.lease.replica_id, holding.demand.needs
        if is_failed:
            return placement.least(here, needs)
        is_here = holding.is_counted and placement.takes_traffic(holding.lease, needs)
        charge = self._charges.of(holding, is_kept=True)
        if not holding.must_ask:
            bound = (
                placement.work(placement.least(needs=needs)) + self._config.group_slack_trajectories * charge.work_s
            )
            stays = is_here and placement.work(here) <= bound
            return here if stays else self._choose_fresh(holding.demand, charge)
        candidates = [here] if is_here else []
        holder_id, group_id = holding.demand.holder_id, holding.demand.group_id
        for name in (*candidates, placement.least(needs=needs), placement.roomiest(needs)):
            if self._fits(name, group_id, charge, holder_id):
                return name
        self.admission.wait(holder_id, here if is_here else placement.roomiest(needs), charge.left_tokens)
        raise NoHealthyReplica("no replica has room for a trajectory that returns from its tools")

    def _fits(self, replica_id: str, group_id: str, charge: Charge, holder_id: str = "", over: float = 0.0) -> bool:
        admission = self.admission
        is_free = admission.is_free(replica_id, holder_id)
        return is_free and self._placement.fits(replica_id, group_id, charge, admission.rho * (1.0 + over))

    # --- siblings ---

    def _lead(self, demand: Demand, replica_id: str, now: float) -> None:
        """Note when the prompt of a group's first sample will be there, if siblings shall wait for it."""
        book = self._placement.book(replica_id)
        prefill_s = self._times.prefill(demand.num_prompt_tokens)
        is_first = self._placement.num_siblings(demand.group_id) == 1
        if is_first and (demand.group_size - 1) * prefill_s >= self._config.min_stagger_s:
            book.prefilled_at = max(book.prefilled_at, now) + prefill_s
            self._leaders[demand.group_id] = book.prefilled_at

    def waits_for_leader(self, group_id: str, now: float) -> bool:
        """Tell if a group's samples shall wait until the prompt of the first one is there, by our count."""
        ready_at = self._leaders.get(group_id)
        if ready_at is None or now >= ready_at:
            self._leaders.pop(group_id, None)
            return False
        return True

    # --- counting ---

    def _count_lost(self, holding: Holding, sampled_tokens: int, cached_tokens: int) -> None:
        """Tell admission of a turn: seconds computed again if its KV was to be there, its part of fixed times."""
        num_lost = holding.context_tokens - cached_tokens
        is_lost = holding.is_warm and num_lost > 2 * max(holding.lease.block_size, 1)
        lost_s = self._times.prefill(holding.context_tokens, float(cached_tokens)) if is_lost else 0.0
        num_sampling = max(self._placement.book(holding.lease.replica_id).num_sampling, 1)
        self.admission.turn(lost_s, self._times.step_s * sampled_tokens / num_sampling, self._placement.num_counted)

    def _keeps_kv(self, holding: Holding, now: float) -> bool:
        """Charge anew a trajectory that goes to its tool, and tell if its KV stays spoken for."""
        replica = self._fleet.get(holding.lease.replica_id)
        capacity_tokens = 0 if replica is None else replica.registration.info.kv_capacity_tokens
        is_kept = capacity_tokens <= 0 or self._retention.keeps(holding, capacity_tokens, now)
        self._recount(holding, is_kept=is_kept)
        held_tokens = self._placement.book(holding.lease.replica_id).forecast.now_tokens
        if is_kept and 0 < self.admission.rho * capacity_tokens < held_tokens:
            is_kept = False  # the replica has grown beyond its KV: who goes to a tool makes room
            self._recount(holding, is_kept=False)
        return is_kept

    def _set_at_tool(self, holding: Holding, *, is_at_tool: bool) -> None:
        """Count a turn that begins or ends on its replica."""
        if holding.is_sampling == is_at_tool:
            holding.is_sampling = not is_at_tool
            if holding.is_counted:
                self._placement.book(holding.lease.replica_id).num_sampling += -1 if is_at_tool else 1
        holding.is_at_tool = is_at_tool

    def _grant(self, replica_id: str) -> Lease:
        self._placement.placed(replica_id)
        replica = self._placement.record(replica_id)
        return self._table.grant(replica_id, replica.url, replica.registration.info)

    def _begin(self, holding: Holding, now: float) -> None:
        self._table.hold(holding, now)
        self._charges.begin(holding.demand.group_id)
        if holding.is_counted:
            self._placement.add(holding.lease.replica_id, holding.demand.group_id, holding.charge)

    def _end(self, holding: Holding, num_tokens: int | None) -> None:
        self._set_at_tool(holding, is_at_tool=True)
        self._uncount(holding)
        holding.is_counted = holding.is_at_tool = False
        self._table.drop(holding)
        self.admission.leave(holding.demand.holder_id)
        self._charges.end(holding, num_tokens)

    def _uncount(self, holding: Holding) -> None:
        if holding.is_counted:
            self.admission.freed(holding.lease.replica_id)
            self._placement.book(holding.lease.replica_id).num_sampling -= holding.is_sampling
            self._placement.remove(holding.lease.replica_id, holding.demand.group_id, holding.charge)

    def _count(self, holding: Holding, charge: Charge) -> None:
        holding.charge = charge
        if holding.is_counted:
            self._placement.add(holding.lease.replica_id, holding.demand.group_id, charge)
            self._placement.book(holding.lease.replica_id).num_sampling += holding.is_sampling

    def _recount(self, holding: Holding, *, is_kept: bool) -> None:
        before, holding.charge = holding.charge, self._charges.of(holding, is_kept=is_kept)
        if holding.is_counted:
            replica_id, group_id = holding.lease.replica_id, holding.demand.group_id
            self._placement.change(replica_id, group_id, before, holding.charge)
            self.admission.freed(replica_id)

    def _let_go(self, holding: Holding) -> None:
        """Give the room of a trajectory that is at a tool to others: it asks before its next turn."""
        self._recount(holding, is_kept=False)
        self._table.have_ask(holding)

    def _order(self, holding: Holding, replica_id: str, now: float) -> None:
        """Move a trajectory that is at a tool; its process hears of it with its next report."""
        holding.is_warm = False
        self._uncount(holding)
        self._table.change(holding, self._grant(replica_id), now, is_told=False)
        self._count(holding, self._charges.of(holding, is_kept=True))
