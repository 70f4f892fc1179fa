"""The lease table: who holds a place on which replica, renewed by the processes that call under the leases.

Ownership: the Balancer alone; synchronous, time is passed in. A lease belongs to one holder (a trajectory or a
session) and to the process that calls under it. A process renews all its leases at once, by any sign of life.

Invariants: a holder has at most one lease; a lease id is never used twice, over coordinators too; every index has
exactly the holdings that `hold` put in and `drop` has not taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import uuid4

from agentloop.errors import InvariantBroken
from agentloop.types import Lease


@dataclass(frozen=True, slots=True)
class Demand:
    """A trajectory's or a session's need of a place."""

    holder_id: str
    process_id: str = ""  # of the worker or ingress that calls under the lease; empty: silence does not end it
    group_id: str = ""  # siblings have one in common; empty: it has none
    num_prompt_tokens: int = 0
    group_size: int = 1
    is_session: bool = False  # it is charged with `num_prompt_tokens` alone, and teaches nothing
    expires_at: float | None = None  # its end, unless its process has said before that it holds it


@dataclass(slots=True, eq=False)
class Holding:
    """One lease and what it is charged with. Not counted once its replica was dropped."""

    demand: Demand
    lease: Lease
    work_tokens: float
    is_counted: bool = True


class LeaseTable:
    """All holdings, by holder, lease, process and replica."""

    def __init__(self) -> None:
        self.epoch = 0  # of the leases granted from now on
        self._by_holder: dict[str, Holding] = {}
        self._by_lease: dict[str, Holding] = {}
        self._by_process: dict[str, set[Holding]] = {}
        self._by_replica: dict[str, set[Holding]] = {}
        self._ending: set[Holding] = set()  # those with an `expires_at`
        self._seen_at: dict[str, float] = {}  # the last sign of life of each process that has leases
        self._num_granted = 0
        self._prefix = uuid4().hex[:12]

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._by_lease.values())

    def __len__(self) -> int:
        return len(self._by_lease)

    def of_holder(self, holder_id: str) -> Holding | None:
        """Return what a trajectory or a session holds."""
        return self._by_holder.get(holder_id)

    def of_lease(self, lease_id: str) -> Holding | None:
        """Return the holding of a lease that has not ended."""
        return self._by_lease.get(lease_id)

    def of_process(self, process_id: str) -> tuple[Holding, ...]:
        """Return what a process calls under."""
        return tuple(self._by_process.get(process_id, ()))

    def on_replica(self, replica_id: str) -> tuple[Holding, ...]:
        """Return the holdings of a replica, those that count no more too."""
        return tuple(self._by_replica.get(replica_id, ()))

    def grant(self, replica_id: str, url: str, block_size: int) -> Lease:
        """Return a lease of a new id, of this epoch."""
        self._num_granted += 1
        lease_id = f"{self._prefix}-{self._num_granted}"
        return Lease(lease_id, replica_id, url, epoch=self.epoch, block_size=block_size)

    def hold(self, holding: Holding, now: float) -> None:
        """Enter a holding; its holder must have none."""
        demand, lease = holding.demand, holding.lease
        self._by_holder[demand.holder_id] = holding
        self._by_lease[lease.lease_id] = holding
        self._by_process.setdefault(demand.process_id, set()).add(holding)
        self._by_replica.setdefault(lease.replica_id, set()).add(holding)
        if demand.expires_at is not None:
            self._ending.add(holding)
        self.renew(demand.process_id, now)

    def drop(self, holding: Holding) -> None:
        """Take a holding out."""
        demand, lease = holding.demand, holding.lease
        del self._by_holder[demand.holder_id]
        del self._by_lease[lease.lease_id]
        self._ending.discard(holding)
        on_replica = self._by_replica[lease.replica_id]
        on_replica.remove(holding)
        if not on_replica:
            del self._by_replica[lease.replica_id]
        self._leave_process(holding)

    def ask_again(self, holding: Holding, demand: Demand, now: float) -> None:
        """Note that a holder has asked again, perhaps from another process, or for longer."""
        self._leave_process(holding)
        self._ending.discard(holding)
        holding.demand = demand
        self._by_process.setdefault(demand.process_id, set()).add(holding)
        if demand.expires_at is not None:
            self._ending.add(holding)
        self.renew(demand.process_id, now)

    def heard(self, holding: Holding, process_id: str, now: float) -> bool:
        """Note that a process holds this lease. False: it is another's."""
        if holding.demand.process_id not in ("", process_id):
            return False
        if holding.demand.process_id != process_id or holding.demand.expires_at is not None:
            self.ask_again(holding, replace(holding.demand, process_id=process_id, expires_at=None), now)
        return True

    def renew(self, process_id: str, now: float) -> None:
        """Note a sign of life of a process, if it has leases."""
        if process_id in self._by_process:
            self._seen_at[process_id] = now

    def expired(self, now: float, ttl_s: float) -> tuple[Holding, ...]:
        """Return the holdings whose time is over, and those of processes that were silent for `ttl_s`."""
        silent = [name for name, seen_at in self._seen_at.items() if name and now - seen_at >= ttl_s]
        over = {holding for name in silent for holding in self._by_process[name]}
        return (*over, *(one for one in self._ending - over if _ends_at(one) <= now))

    def check(self) -> None:
        """Raise InvariantBroken unless all indexes have the same holdings."""
        held = set(self._by_lease.values())
        by_process = [one for members in self._by_process.values() for one in members]
        by_replica = [one for members in self._by_replica.values() for one in members]
        if not len(held) == len(self._by_holder) == len(by_process) == len(by_replica):
            raise InvariantBroken("a lease is missing in an index, or in it twice")
        if not held == set(self._by_holder.values()) == set(by_process) == set(by_replica):
            raise InvariantBroken("the indexes hold different leases")
        if self._seen_at.keys() != self._by_process.keys():
            raise InvariantBroken("a process has leases and no sign of life, or the other way round")

    def _leave_process(self, holding: Holding) -> None:
        process_id = holding.demand.process_id
        of_process = self._by_process[process_id]
        of_process.remove(holding)
        if not of_process:
            del self._by_process[process_id]
            self._seen_at.pop(process_id, None)


def _ends_at(holding: Holding) -> float:
    return float("inf") if holding.demand.expires_at is None else holding.demand.expires_at
