"""The balancer: which replica a trajectory runs on, for all its turns.

Ownership: one object, in the coordinator's event loop, pure and synchronous, time passed in; it reads the `Fleet`
and owns the lease table. A trajectory is charged with its predicted tokens (prompt plus the running mean of what
finished trajectories used) from its lease to its release: requests in flight would make a replica full of
trajectories that wait for tools look idle. Load is predicted tokens over the replica's KV capacity.

Invariants: a holder has at most one lease; lease ids are never used twice; a replica's work is the sum of the
predictions of the leases counted on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.api import HeldLease, KVChanges, LeaseOrders, LeaseReport, is_session_holder
from agentloop.errors import InvariantBroken, NoHealthyReplica, NotFound
from agentloop.fleet import Fleet, ReplicaRecord
from agentloop.scheduling.lease_table import Demand, Holding, LeaseTable
from agentloop.scheduling.placement import LoadIndex
from agentloop.scheduling.replica_caches import ReplicaCaches
from agentloop.types import Lease


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of the leases, of the prediction of work, and of how far siblings may pull."""

    lease_ttl_s: float = 60.0  # silence of a process after which its leases end
    prior_trajectory_tokens: int = 2048  # predicted until the first trajectory has finished
    num_averaged: int = 1024  # finished trajectories that the running mean remembers, about
    group_slack_trajectories: float = 8.0  # extra load, in mean trajectories, that shared prompt KV is worth


@dataclass(slots=True)
class _Replica:
    """The counts of a replica that has leases, or has had them."""

    num_leases: int = 0
    work_tokens: float = 0.0
    placed_at: int = 0  # number of its last placement


class Balancer:
    """Leases, and the predicted work behind them."""

    def __init__(self, fleet: Fleet, config: BalancerConfig | None = None) -> None:
        self._fleet = fleet
        self._config = config or BalancerConfig()
        self._table = LeaseTable()
        self._replicas: defaultdict[str, _Replica] = defaultdict(_Replica)
        self._placeable: dict[str, ReplicaRecord] = {}
        self._index = LoadIndex()  # of the placeable ones
        self._num_changes_seen = -1  # of the fleet's
        self._group_homes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._caches = ReplicaCaches(fleet)
        self._mean_tokens = float(self._config.prior_trajectory_tokens)
        self._num_finished = 0
        self._num_placed = 0

    @property
    def num_holders(self) -> int:
        """Trajectories and sessions that hold a lease, on whatever replica."""
        return len(self._table)

    def num_leases(self, replica_id: str) -> int:
        """Return how many leases count on a replica."""
        return self._replicas[replica_id].num_leases if replica_id in self._replicas else 0

    def work_tokens(self, replica_id: str) -> float:
        """Predicted tokens of the trajectories leased to a replica."""
        return self._replicas[replica_id].work_tokens if replica_id in self._replicas else 0.0

    def lease_of(self, holder_id: str) -> Lease | None:
        """Return the lease that a trajectory or a session holds."""
        holding = self._table.of_holder(holder_id)
        return None if holding is None else holding.lease

    def acquire(self, demand: Demand, now: float) -> Lease:
        """Return a place for a trajectory or a session.

        Asked again it is the one that it holds, as long as that replica takes traffic. Raises NoHealthyReplica.
        """
        holding = self._table.of_holder(demand.holder_id)
        if holding is not None:
            if holding.is_counted and self._takes_traffic(holding.lease):
                self._table.ask_again(holding, demand, now)
                return holding.lease
            self._drop(holding)
        chosen = self._choose(demand.group_id, None)
        granted = Holding(demand, self._grant(chosen), self._work_of(demand))
        self._hold(granted, now)
        return granted.lease

    def adopt(self, demand: Demand, lease: Lease, now: float) -> None:
        """Count a lease that an earlier coordinator granted, whether or not its replica has joined this one yet.

        No-op if the holder or the lease is known.
        """
        if self._table.of_holder(demand.holder_id) is not None or self._table.of_lease(lease.lease_id) is not None:
            return
        self._hold(Holding(demand, lease, self._work_of(demand)), now)

    def move(self, lease: Lease, is_failed: bool, now: float) -> Lease:
        """Return another lease for the holder of `lease`, which ends.

        Asked without a failure, the trajectory stays where its KV is unless that replica is overloaded by more
        than the slack. After a failure it goes to another replica, and stays only if there is no other. Raises
        NoHealthyReplica, and the holder then keeps the lease it has; NotFound for a lease that is not known
        (`adopt` it first).
        """
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            raise NotFound(f"lease {lease.lease_id} is not known", param="lease")
        self._count(holding, -1)
        try:
            stays = None if is_failed or not holding.is_counted else lease
            chosen = self._choose(holding.demand.group_id, lease.replica_id if is_failed else None, stays)
        finally:
            self._count(holding, +1)
        self._drop(holding)
        moved = Holding(holding.demand, self._grant(chosen), holding.work_tokens)
        self._hold(moved, now)
        return moved.lease

    def release(self, lease: Lease, num_tokens: int | None, now: float) -> None:
        """Give a place back; idempotent. `num_tokens`, of one that ran to its end, teach the running mean."""
        holding = self._table.of_lease(lease.lease_id)
        if holding is None:
            return
        self._table.renew(holding.demand.process_id, now)
        self._drop(holding)
        if num_tokens is not None:
            self._num_finished = min(self._num_finished + 1, self._config.num_averaged)
            self._mean_tokens += (num_tokens - self._mean_tokens) / self._num_finished

    def took(self, report: LeaseReport, now: float) -> LeaseOrders:
        """Take the news of a process's leases, each report once (`ReportDesk`); returns what it is to do.

        Of leases that are not its own, or have ended, it is told to ask.
        """
        process_id = report.process_id
        self._table.renew(process_id, now)
        if report.leases is not None:
            self._compare(process_id, report.leases, now)
        moves: list[tuple[str, Lease | None]] = []
        for lease_id in dict.fromkeys((*report.taken, *(turn.lease_id for turn in report.turns))):
            holding = self._table.of_lease(lease_id)
            if holding is None or not self._table.heard(holding, process_id, now):
                moves.append((lease_id, None))
        for lease_id in report.released:
            holding = self._table.of_lease(lease_id)
            if holding is not None and holding.demand.process_id == process_id:
                self._drop(holding)
        return LeaseOrders(tuple(moves))

    def _compare(self, process_id: str, leases: Sequence[HeldLease], now: float) -> None:
        """Have the table agree with all that a process holds: leases that an earlier coordinator granted are
        adopted, and those of sessions that it had and has no more end. A trajectory's end with its record."""
        for held in leases:
            is_session = is_session_holder(held.holder_id)
            num_tokens = max(1, held.num_context_tokens)  # a lease without work would make a replica look idle
            demand = Demand(held.holder_id, process_id, held.group_id, num_tokens, is_session=is_session)
            self.adopt(demand, held.lease, now)
            holding = self._table.of_lease(held.lease.lease_id)
            if holding is not None:
                self._table.heard(holding, process_id, now)
        kept = {held.lease.lease_id for held in leases}
        for holding in self._table.of_process(process_id):
            demand = holding.demand
            if demand.is_session and demand.expires_at is None and holding.lease.lease_id not in kept:
                self._drop(holding)

    def renew(self, process_id: str, now: float) -> None:
        """Keep the leases of a process that gave a sign of life."""
        self._table.renew(process_id, now)

    def expire(self, now: float) -> int:
        """End the leases whose time is over, and those of processes that fell silent. Returns how many."""
        over = self._table.expired(now, self._config.lease_ttl_s)
        for holding in over:
            self._drop(holding)
        return len(over)

    def drop_replica(self, replica_id: str) -> None:
        """Count the leases of a replica that is lost, or whose KV is, no more: they move at their next call."""
        for holding in self._table.on_replica(replica_id):
            self._count(holding, -1)
            holding.is_counted = False
        self._replicas.pop(replica_id, None)
        self._caches.drop(replica_id)
        self._put(replica_id)

    def kv_changed(self, replica_id: str, changes: KVChanges) -> bool:
        """Take in what a replica tells of its prefix cache. False: it has to tell all that it holds."""
        return self._caches.changed(replica_id, changes)

    def check(self) -> None:
        """Raise InvariantBroken unless every count is what the leases add up to."""
        num_leases, homes = Counter[str](), Counter[tuple[str, str]]()
        for holding in self._table:
            if holding.is_counted:
                num_leases[holding.lease.replica_id] += 1
                if holding.demand.group_id:
                    homes[holding.demand.group_id, holding.lease.replica_id] += 1
        if num_leases != Counter({name: one.num_leases for name, one in self._replicas.items()}):
            raise InvariantBroken("the leases of replicas are miscounted")
        if any((one.work_tokens > 0) != (one.num_leases > 0) for one in self._replicas.values()):
            raise InvariantBroken("a replica has work without leases, or leases without work")
        if homes != {(group, name): num for group, at in self._group_homes.items() for name, num in at.items()}:
            raise InvariantBroken("the homes of groups are miscounted")
        self._table.check()

    # --- inside ---

    def _work_of(self, demand: Demand) -> float:
        return demand.num_prompt_tokens + (0.0 if demand.is_session else self._mean_tokens)

    def _choose(self, group_id: str, failed_id: str | None, stays: Lease | None = None) -> ReplicaRecord:
        self._follow_fleet()
        least = self._index.least(without=failed_id) or self._index.least()
        if least is None:
            raise NoHealthyReplica("no replica takes traffic now")
        bound = self._index.load(least)
        if stays is not None and self._takes_traffic(stays) and self._is_within(stays.replica_id, bound):
            return self._placeable[stays.replica_id]
        homes = self._group_homes.get(group_id, ())
        siblings = [
            name for name in homes if name != failed_id and name in self._index and self._is_within(name, bound)
        ]
        return self._placeable[min(siblings, key=self._index.order) if siblings else least]

    def _is_within(self, replica_id: str, bound: float) -> bool:
        """Tell if a replica's load is above the least one by no more than the slack."""
        slack_tokens = self._config.group_slack_trajectories * self._mean_tokens
        return self._index.load(replica_id) <= bound + slack_tokens / self._placeable[replica_id].capacity_tokens

    def _follow_fleet(self) -> None:
        """Take in which replicas take traffic, if that may have changed."""
        if self._num_changes_seen == self._fleet.num_placement_changes:
            return
        self._num_changes_seen = self._fleet.num_placement_changes
        before, self._placeable = self._placeable, {one.replica_id: one for one in self._fleet.placeable()}
        for replica_id in before.keys() | self._placeable.keys():
            self._put(replica_id)

    def _takes_traffic(self, lease: Lease) -> bool:
        self._follow_fleet()
        replica = self._placeable.get(lease.replica_id)
        return replica is not None and replica.url == lease.url

    def _put(self, replica_id: str) -> None:
        """Bring the index up to date with a replica's counts."""
        replica = self._placeable.get(replica_id)
        if replica is None:
            self._index.remove(replica_id)
            return
        counts = self._replicas[replica_id]
        load = counts.work_tokens / replica.capacity_tokens
        self._index.put(replica_id, (load, counts.num_leases, counts.placed_at))

    def _grant(self, replica: ReplicaRecord) -> Lease:
        self._num_placed += 1
        self._replicas[replica.replica_id].placed_at = self._num_placed
        return self._table.grant(replica.replica_id, replica.url, replica.registration.info.block_size)

    def _hold(self, holding: Holding, now: float) -> None:
        self._table.hold(holding, now)
        self._count(holding, +1)

    def _drop(self, holding: Holding) -> None:
        self._table.drop(holding)
        self._count(holding, -1)

    def _count(self, holding: Holding, sign: int) -> None:
        if not holding.is_counted:
            return
        replica_id, group_id = holding.lease.replica_id, holding.demand.group_id
        counts = self._replicas[replica_id]
        counts.num_leases += sign
        # An empty replica has exactly no work: the sums of floats must not drift over millions of leases.
        counts.work_tokens = counts.work_tokens + sign * holding.work_tokens if counts.num_leases else 0.0
        self._put(replica_id)
        if group_id:
            homes = self._group_homes[group_id]
            homes[replica_id] += sign
            if homes[replica_id] <= 0:
                del homes[replica_id]
            if not homes:
                del self._group_homes[group_id]
