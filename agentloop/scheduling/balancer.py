"""The balancer: which replica a trajectory runs on, for all its turns.

Ownership: one object, in the coordinator's event loop, pure and synchronous; it reads the `Fleet` and owns the
leases. A trajectory is charged with its predicted tokens (prompt plus the running mean of what finished
trajectories used) from its lease to its release: requests in flight would make a replica full of trajectories
that wait for tools look idle. Load is predicted tokens over the replica's KV capacity.

Invariants: a holder has at most one lease; lease ids are never used twice; a replica's work is the sum of the
predictions of the leases counted on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from uuid import uuid4

from agentloop.errors import NoHealthyReplica
from agentloop.fleet import Fleet, ReplicaRecord
from agentloop.types import Lease


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of the prediction of work, and of how far siblings may pull."""

    prior_trajectory_tokens: int = 2048  # predicted until the first trajectory has finished
    num_averaged: int = 1024  # finished trajectories that the running mean remembers, about
    group_slack_trajectories: float = 8.0  # extra load, in mean trajectories, that shared prompt KV is worth


@dataclass(slots=True)
class _Holding:
    """One lease and what it is charged with. Not counted once its replica was dropped."""

    lease: Lease
    holder_id: str
    group_id: str
    work_tokens: float
    expires_at: float | None
    is_counted: bool = True


class Balancer:
    """Leases, and the predicted work behind them."""

    def __init__(self, fleet: Fleet, config: BalancerConfig | None = None) -> None:
        self._fleet = fleet
        self._config = config or BalancerConfig()
        self._by_holder: dict[str, _Holding] = {}
        self._by_lease: dict[str, _Holding] = {}
        self._work_tokens: dict[str, float] = {}
        self._num_leases: Counter[str] = Counter()
        self._group_homes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._placed_at: dict[str, int] = {}  # replica id -> number of its last placement
        self._mean_tokens = float(self._config.prior_trajectory_tokens)
        self._num_finished = 0
        self._num_granted = 0
        self._prefix = uuid4().hex[:12]  # lease ids stay unique over coordinators

    def num_leases(self, replica_id: str) -> int:
        return self._num_leases[replica_id]

    def work_tokens(self, replica_id: str) -> float:
        """Predicted tokens of the trajectories leased to a replica."""
        return self._work_tokens.get(replica_id, 0.0)

    def acquire(self, assignment_id: str, group_id: str, num_prompt_tokens: int) -> Lease:
        """A place for a trajectory. Asking again returns the lease it holds, while its replica takes traffic.

        Raises NoHealthyReplica.
        """
        return self._acquire(assignment_id, group_id, num_prompt_tokens + self._mean_tokens, expires_at=None)

    def acquire_direct(self, session_id: str, num_tokens: int, expires_at: float) -> Lease:
        """A place for a direct call or a session of `num_tokens`, until it is released or has expired.

        Raises NoHealthyReplica.
        """
        return self._acquire(session_id, session_id, float(num_tokens), expires_at=expires_at)

    def adopt(self, assignment_id: str, group_id: str, num_prompt_tokens: int, lease: Lease) -> None:
        """Count a lease that an earlier coordinator granted. No-op if the holder or the lease is known."""
        if assignment_id in self._by_holder or lease.lease_id in self._by_lease:
            return
        work_tokens = num_prompt_tokens + self._mean_tokens
        is_counted = self._fleet.get(lease.replica_id) is not None
        self._hold(_Holding(lease, assignment_id, group_id, work_tokens, None, is_counted))

    def release(self, lease: Lease, num_tokens: int | None = None) -> None:
        """Give a place back. `num_tokens`, if the trajectory ran to its end, teaches the running mean."""
        holding = self._by_lease.get(lease.lease_id)
        if holding is None:
            return
        self._drop(holding)
        if num_tokens is not None:
            self._num_finished = min(self._num_finished + 1, self._config.num_averaged)
            self._mean_tokens += (num_tokens - self._mean_tokens) / self._num_finished

    def lease_of(self, holder_id: str) -> Lease | None:
        """The lease that a trajectory or a session holds."""
        holding = self._by_holder.get(holder_id)
        return None if holding is None else holding.lease

    def move(self, lease: Lease, is_failed: bool) -> Lease:
        """Another lease for the holder of `lease`, which ends.

        Asked without a failure, the trajectory stays where its KV is unless that replica is overloaded by more
        than the slack. After a failure it goes to another replica, and stays only if there is no other. Raises
        NoHealthyReplica, and the holder then keeps the lease it has. The lease must be known (`adopt` it first).
        """
        holding = self._by_lease[lease.lease_id]
        failed_id = lease.replica_id if is_failed else None
        self._count(holding, -1)
        try:
            chosen = self._choose(holding, failed_id)
        except NoHealthyReplica:
            self._count(holding, +1)
            raise
        self._count(holding, +1)
        self._drop(holding)
        moved = _Holding(
            self._grant(chosen), holding.holder_id, holding.group_id, holding.work_tokens, holding.expires_at
        )
        self._hold(moved)
        return moved.lease

    def drop_replica(self, replica_id: str) -> None:
        """A replica is lost or its KV is: its leases count no more, and move at their next call."""
        for holding in self._by_lease.values():
            if holding.lease.replica_id == replica_id:
                self._count(holding, -1)
                holding.is_counted = False
        for counts in (self._work_tokens, self._num_leases, self._placed_at):
            counts.pop(replica_id, None)

    def expire(self, now: float) -> int:
        """Release direct leases whose time is over. Returns how many."""
        old = [h for h in self._by_lease.values() if h.expires_at is not None and h.expires_at <= now]
        for holding in old:
            self._drop(holding)
        return len(old)

    # --- inside ---

    def _acquire(self, holder_id: str, group_id: str, work_tokens: float, expires_at: float | None) -> Lease:
        holding = self._by_holder.get(holder_id)
        if holding is not None:
            place = (holding.lease.replica_id, holding.lease.url)
            if holding.is_counted and place in [(r.replica_id, r.url) for r in self._fleet.placeable()]:
                holding.expires_at = expires_at
                return holding.lease
            self._drop(holding)
        placing = _Holding(Lease("", "", ""), holder_id, group_id, work_tokens, expires_at, is_counted=False)
        placing.lease = self._grant(self._choose(placing, None))
        placing.is_counted = True
        self._hold(placing)
        return placing.lease

    def _choose(self, holding: _Holding, failed_id: str | None) -> ReplicaRecord:
        placeable = self._fleet.placeable()
        candidates = [r for r in placeable if r.replica_id != failed_id] or list(placeable)
        if not candidates:
            raise NoHealthyReplica("no replica takes traffic now")
        least = min(candidates, key=self._order)
        bound = self._load(least)
        slack_tokens = self._config.group_slack_trajectories * self._mean_tokens
        within = [r for r in candidates if self._load(r) <= bound + slack_tokens / r.capacity_tokens]
        if failed_id is None and holding.is_counted:
            stays = [r for r in within if r.replica_id == holding.lease.replica_id and r.url == holding.lease.url]
            if stays:
                return stays[0]
        homes = self._group_homes.get(holding.group_id, Counter())
        siblings = [r for r in within if homes[r.replica_id] > 0]
        return min(siblings, key=self._order) if siblings else least

    def _order(self, replica: ReplicaRecord) -> tuple[float, int, int]:
        """Least load first; equals take turns, so that a fleet of idle replicas shares short calls."""
        replica_id = replica.replica_id
        return self._load(replica), self._num_leases[replica_id], self._placed_at.get(replica_id, 0)

    def _load(self, replica: ReplicaRecord) -> float:
        return self.work_tokens(replica.replica_id) / replica.capacity_tokens

    def _grant(self, replica: ReplicaRecord) -> Lease:
        self._num_granted += 1
        self._placed_at[replica.replica_id] = self._num_granted
        return Lease(f"{self._prefix}-{self._num_granted}", replica.replica_id, replica.url)

    def _hold(self, holding: _Holding) -> None:
        self._by_holder[holding.holder_id] = holding
        self._by_lease[holding.lease.lease_id] = holding
        self._count(holding, +1)

    def _drop(self, holding: _Holding) -> None:
        del self._by_lease[holding.lease.lease_id]
        del self._by_holder[holding.holder_id]
        self._count(holding, -1)

    def _count(self, holding: _Holding, sign: int) -> None:
        if not holding.is_counted:
            return
        replica_id = holding.lease.replica_id
        self._num_leases[replica_id] += sign
        # An empty replica has exactly no work: the sums of floats must not drift over millions of leases.
        is_empty = self._num_leases[replica_id] == 0
        work_tokens = self.work_tokens(replica_id) + sign * holding.work_tokens
        self._work_tokens[replica_id] = 0.0 if is_empty else work_tokens
        homes = self._group_homes[holding.group_id]
        homes[replica_id] += sign
        if homes[replica_id] <= 0:
            del homes[replica_id]
        if not homes:
            del self._group_homes[holding.group_id]
