"""Placement: what each replica is charged with, and the replicas in the order of that.

Ownership: the Balancer alone. A replica is charged with the seconds of work and with the KV that its trajectories
are expected to need; both are kept in an index, so that no placement walks over all replicas. Seconds are those of
the largest replica: one with half its KV is taken to be half as fast.

Invariants: a replica's work and forecast are the sums of the charges counted on it; each replica that takes traffic
is in both indexes with its present value.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

from agentloop.errors import InvariantBroken, NoHealthyReplica
from agentloop.fleet import Fleet, ReplicaRecord
from agentloop.scheduling.kv_forecast import KVForecast, KVNeed
from agentloop.types import Lease

LoadOrder: TypeAlias = tuple[float, int, int]  # load, leases, number of the last placement: the least is next

_MAX_OLD_ENTRIES = 64  # beside three times the present ones, before a heap is made anew


class LoadIndex:
    """Replicas by load, the least first; equal loads take turns by the rest of the order.

    A heap has an entry for every change of a load. An entry is good while it is the replica's present one, and
    others are thrown away when they come to the top, so `put` and `least` cost O(log replicas), amortised.
    """

    def __init__(self) -> None:
        self._orders: dict[str, LoadOrder] = {}
        self._heap: list[tuple[LoadOrder, str]] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._orders

    def put(self, replica_id: str, order: LoadOrder) -> None:
        """Enter a replica, or its new load."""
        if self._orders.get(replica_id) == order:
            return
        self._orders[replica_id] = order
        heapq.heappush(self._heap, (order, replica_id))
        if len(self._heap) > 4 * len(self._orders) + _MAX_OLD_ENTRIES:
            self._heap = [(order, replica_id) for replica_id, order in self._orders.items()]
            heapq.heapify(self._heap)

    def remove(self, replica_id: str) -> None:
        """Take a replica out. Unknown ids: no-op."""
        self._orders.pop(replica_id, None)

    def load(self, replica_id: str) -> float:
        """Return a replica's load as it was put in. Raises KeyError."""
        return self._orders[replica_id][0]

    def least(self, without: str | None = None) -> str | None:
        """Return the replica of the least order but for `without`; None if there is no other."""
        heap, aside = self._heap, []
        found = None
        while heap:
            order, replica_id = heap[0]
            if self._orders.get(replica_id) != order:
                heapq.heappop(heap)
            elif replica_id == without:
                aside.append(heapq.heappop(heap))
            else:
                found = replica_id
                break
        for entry in aside[:1]:
            heapq.heappush(heap, entry)
        return found


@dataclass(frozen=True, slots=True)
class Charge:
    """One trajectory's part in its replica's load, as it was last estimated."""

    work_s: float
    kv: KVNeed
    shared_tokens: float = 0.0  # of its group's prompt
    is_kept: bool = True  # its KV is spoken for: not so while a long tool runs


@dataclass(slots=True, eq=False)
class ReplicaBook:
    """The charges counted on one replica."""

    num_leases: int = 0
    num_sampling: int = 0  # of them, whose turns run
    work_s: float = 0.0
    placed_at: int = 0  # number of its last placement
    prefilled_at: float = 0.0  # when what it has to prefill is done, by our count
    forecast: KVForecast = field(default_factory=KVForecast)


class Placement:
    """The books of all replicas, and the choice among those that take traffic."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._num_changes_seen = -1  # of the fleet's
        self._placeable: dict[str, ReplicaRecord] = {}
        self._largest_tokens = 1
        self._max_context_tokens = math.inf
        self._books: defaultdict[str, ReplicaBook] = defaultdict(ReplicaBook)
        self._by_work = LoadIndex()
        self._by_kv = LoadIndex()
        self._homes: defaultdict[str, Counter[str]] = defaultdict(Counter)  # group -> its replicas
        self._num_placed = 0
        self.num_counted = 0  # leases, on all replicas

    def book(self, replica_id: str) -> ReplicaBook:
        """Return a replica's book; an empty one that is not kept if it has none."""
        return self._books[replica_id] if replica_id in self._books else ReplicaBook()

    def record(self, replica_id: str) -> ReplicaRecord:
        """Return a replica that takes traffic. Raises KeyError."""
        return self._placeable[replica_id]

    @property
    def num_placeable(self) -> int:
        self.follow()
        return len(self._placeable)

    def follow(self) -> None:
        """Take in which replicas take traffic, if that may have changed."""
        if self._num_changes_seen == self._fleet.num_placement_changes:
            return
        self._num_changes_seen = self._fleet.num_placement_changes
        before, self._placeable = self._placeable, {one.replica_id: one for one in self._fleet.placeable()}
        self._largest_tokens = max((one.capacity_tokens for one in self._placeable.values()), default=1)
        if self._placeable:
            infos = [one.registration.info for one in self._placeable.values()]
            self._max_context_tokens = max(info.max_context_tokens for info in infos)
        for replica_id in before.keys() | self._placeable.keys():
            self._put(replica_id)

    @property
    def max_context_tokens(self) -> float:
        """The longest context of those replicas, or of the last ones that did; infinite before the first."""
        self.follow()
        return self._max_context_tokens

    def takes_traffic(self, lease: Lease) -> bool:
        """Tell if the replica of a lease takes traffic, and is the process that the lease was granted for."""
        self.follow()
        replica = self._placeable.get(lease.replica_id)
        return replica is not None and replica.url == lease.url

    def placed(self, replica_id: str) -> None:
        """Note that a lease on this replica is granted: equal replicas take turns."""
        self._num_placed += 1
        self._books[replica_id].placed_at = self._num_placed
        self._put(replica_id)

    def add(self, replica_id: str, group_id: str, charge: Charge) -> None:
        """Count a charge on a replica."""
        self._add(replica_id, group_id, charge)
        self._put(replica_id)

    def change(self, replica_id: str, group_id: str, before: Charge, after: Charge) -> None:
        """Count a charge on a replica in the place of another one."""
        self._add(replica_id, group_id, after)
        self.remove(replica_id, group_id, before)

    def remove(self, replica_id: str, group_id: str, charge: Charge) -> None:
        """Take a charge out again, as it was added."""
        book = self._books[replica_id]
        book.num_leases -= 1
        self.num_counted -= 1
        # An empty replica has exactly no work: the sums of floats must not drift over millions of leases.
        book.work_s = book.work_s - charge.work_s if book.num_leases else 0.0
        if charge.is_kept:
            book.forecast.remove(charge.kv, group_id)
        if group_id:
            homes = self._homes[group_id]
            homes[replica_id] -= 1
            if homes[replica_id] <= 0:
                del homes[replica_id]
            if not homes:
                del self._homes[group_id]
        self._put(replica_id)

    def forget(self, replica_id: str) -> None:
        """Drop a replica's book, on which nothing is counted any more."""
        self._books.pop(replica_id, None)
        self._put(replica_id)

    def least(self, without: str | None = None) -> str:
        """Return the replica of least work, but for `without` if there is another. Raises NoHealthyReplica."""
        self.follow()
        found = self._by_work.least(without) or self._by_work.least()
        if found is None:
            raise NoHealthyReplica("no replica takes traffic now")
        return found

    def roomiest(self, without: str | None = None) -> str:
        """Return the replica with the least of its KV spoken for. Raises NoHealthyReplica."""
        self.follow()
        found = self._by_kv.least(without) or self._by_kv.least()
        if found is None:
            raise NoHealthyReplica("no replica takes traffic now")
        return found

    def work(self, replica_id: str) -> float:
        """Return the seconds of work of a replica that takes traffic."""
        return self._by_work.load(replica_id)

    def homes(self, group_id: str, without: str | None = None) -> list[str]:
        """Return the replicas that take traffic and have samples of a group, the least work first."""
        found = [name for name in self._homes.get(group_id, ()) if name != without and name in self._by_work]
        return sorted(found, key=self._by_work.load)

    def fits(self, replica_id: str, group_id: str, charge: Charge, rho: float) -> bool:
        """Tell if the share `rho` of a replica's KV holds one more trajectory to its end.

        An empty one holds any, and one that does not say how much KV it has holds all.
        """
        forecast = self.book(replica_id).forecast
        if forecast.num_trajectories == 0 or self._placeable[replica_id].registration.info.kv_capacity_tokens <= 0:
            return True
        shared = 0.0 if forecast.shares(group_id) else charge.shared_tokens
        return forecast.peak(charge.kv, shared) <= rho * self._placeable[replica_id].capacity_tokens

    def check(self, counted: Counter[str], homes: Counter[tuple[str, str]]) -> None:
        """Raise InvariantBroken unless the books have these leases, by replica, and by group and replica."""
        if counted != Counter({name: one.num_leases for name, one in self._books.items()}):
            raise InvariantBroken("the leases of replicas are miscounted")
        if any(book.work_s and not book.num_leases for book in self._books.values()):
            raise InvariantBroken("a replica has work without leases")
        if homes != {(group, name): num for group, at in self._homes.items() for name, num in at.items()}:
            raise InvariantBroken("the homes of groups are miscounted")

    def _add(self, replica_id: str, group_id: str, charge: Charge) -> None:
        book = self._books[replica_id]
        book.num_leases += 1
        self.num_counted += 1
        book.work_s += charge.work_s
        if charge.is_kept:
            book.forecast.add(charge.kv, group_id, charge.shared_tokens)
        if group_id:
            self._homes[group_id][replica_id] += 1

    def _put(self, replica_id: str) -> None:
        """Bring the indexes up to date with a replica's book."""
        replica = self._placeable.get(replica_id)
        if replica is None:
            self._by_work.remove(replica_id)
            self._by_kv.remove(replica_id)
            return
        book = self.book(replica_id)
        work_s = book.work_s * self._largest_tokens / replica.capacity_tokens
        spoken_for = book.forecast.outlook_tokens / replica.capacity_tokens
        self._by_work.put(replica_id, (work_s, book.num_leases, book.placed_at))
        self._by_kv.put(replica_id, (spoken_for, book.num_leases, book.placed_at))
