"""Placement: what each replica is charged with, and the replicas in the order of that.

Ownership: the Balancer alone. A replica is charged with the seconds of work and with the KV that its trajectories
are expected to need; both are kept in an index, so that no placement walks over all replicas. Seconds are those of
the largest replica: one with half its KV is taken to be half as fast.

Replicas whose engines can do the same are a class, with indexes of its own: who needs something is placed on the
least of the classes that suit, so a fleet of one kind has one class and pays for no other.

Invariants: a replica's work and forecast are the sums of the charges counted on it; each replica that takes traffic
is in both indexes of its class with its present value, and in no other's.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from agentloop.capabilities import NO_NEEDS, Capabilities, Needs
from agentloop.errors import InvariantBroken, NoHealthyReplica
from agentloop.fleet.registry import Fleet, ReplicaRecord
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

    def order(self, replica_id: str) -> LoadOrder:
        """Return a replica's order as it was put in. Raises KeyError."""
        return self._orders[replica_id]

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
class Demand:
    """A trajectory's or a session's need of a place."""

    holder_id: str
    process_id: str = ""  # of the worker or ingress that calls under the lease; empty: silence does not end it
    group_id: str = ""  # siblings have one in common; empty: it has none
    num_prompt_tokens: int = 0
    group_size: int = 1
    is_session: bool = False  # it is charged with `num_prompt_tokens` alone, and teaches nothing
    expires_at: float | None = None  # its end, unless its process has said before that it holds it
    needs: Needs = NO_NEEDS  # of an engine, as far as is known: what a turn has needed it may need again


@dataclass(frozen=True, slots=True)
class Charge:
    """One trajectory's part in its replica's load, as it was last estimated."""

    work_s: float
    kv: KVNeed
    shared_tokens: float = 0.0  # of its group's prompt
    left_tokens: float = 0.0  # that it will still grow by: who has most goes first
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


@dataclass(slots=True, eq=False)
class ReplicaClass:
    """The replicas that take traffic and whose engines can do the same."""

    can: Capabilities
    by_work: LoadIndex = field(default_factory=LoadIndex)
    by_kv: LoadIndex = field(default_factory=LoadIndex)


class Placement:
    """The books of all replicas, and the choice among those that take traffic."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._num_changes_seen = -1  # of the fleet's
        self._placeable: dict[str, ReplicaRecord] = {}
        self._largest_tokens = 1
        self._max_context_tokens = math.inf
        self._books: defaultdict[str, ReplicaBook] = defaultdict(ReplicaBook)
        self._classes: list[ReplicaClass] = []
        self._class_of: dict[str, ReplicaClass] = {}
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
        self._classify()
        for replica_id in before.keys() | self._placeable.keys():
            self._put(replica_id)

    @property
    def max_context_tokens(self) -> float:
        """The longest context of those replicas, or of the last ones that did; infinite before the first."""
        self.follow()
        return self._max_context_tokens

    def takes_traffic(self, lease: Lease, needs: Needs = NO_NEEDS) -> bool:
        """Tell if the replica of a lease takes traffic, is the process that the lease is for, and suits."""
        self.follow()
        replica = self._placeable.get(lease.replica_id)
        return replica is not None and replica.url == lease.url and self._suits(lease.replica_id, needs)

    def needing(self, demand: Demand, needs: Needs) -> Demand:
        """Return a trajectory's demand with what it needs from here on: all that it ever needed, if an engine has
        it all, for it may need that again. Raises UnsupportedParameter if none has what it needs now."""
        joined = demand.needs.joined(needs)
        if joined is demand.needs:
            return demand
        if not self._fleet.may_serve(joined):
            self._fleet.check_needs(needs)
            joined = needs
        return replace(demand, needs=joined)

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

    def least(self, without: str | None = None, needs: Needs = NO_NEEDS) -> str:
        """Return the replica of least work of those that suit, but for `without` if there is another.

        Raises NoHealthyReplica if none takes traffic, and UnsupportedParameter if the fleet has none that suits.
        """
        return self._least([one.by_work for one in self._suiting(needs)], without, needs)

    def roomiest(self, needs: Needs = NO_NEEDS) -> str:
        """Return the replica with the least of its KV spoken for, of those that suit. Raises as `least`."""
        return self._least([one.by_kv for one in self._suiting(needs)], None, needs)

    def _suits(self, replica_id: str, needs: Needs) -> bool:
        of = self._class_of.get(replica_id)
        return of is not None and (needs is NO_NEEDS or of.can.suits(self._fleet.bounded(needs)))

    def work(self, replica_id: str) -> float:
        """Return the seconds of work of a replica that takes traffic."""
        return self._class_of[replica_id].by_work.order(replica_id)[0]

    def homes(self, group_id: str, needs: Needs = NO_NEEDS) -> list[str]:
        """Return the replicas that suit and have samples of a group, the least work first."""
        found = [name for name in self._homes.get(group_id, ()) if self._suits(name, needs)]
        return sorted(found, key=self.work)

    def num_siblings(self, group_id: str) -> int:
        """Return how many samples of a group are counted."""
        return sum(self._homes[group_id].values()) if group_id in self._homes else 0

    def fits(self, replica_id: str, group_id: str, charge: Charge, rho: float) -> bool:
        """Tell if the share `rho` of a replica's KV has room for one more trajectory.

        An empty one holds any, and one that does not say how much KV it has holds all.
        """
        forecast = self.book(replica_id).forecast
        if forecast.num_trajectories == 0 or self._placeable[replica_id].registration.info.kv_capacity_tokens <= 0:
            return True
        num_tokens = forecast.with_one(charge.kv, group_id, charge.shared_tokens)
        return num_tokens <= rho * self._placeable[replica_id].capacity_tokens

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

    def _suiting(self, needs: Needs) -> list[ReplicaClass]:
        self.follow()
        if needs is NO_NEEDS:
            return self._classes
        bounded = self._fleet.bounded(needs)
        return [one for one in self._classes if one.can.suits(bounded)]

    def _least(self, indexes: list[LoadIndex], without: str | None, needs: Needs) -> str:
        if len(indexes) == 1:
            found = indexes[0].least(without) or indexes[0].least()
        else:
            found = _first(indexes, without) or _first(indexes, None)
        if found is None:
            self._fleet.check_needs(needs)
            raise NoHealthyReplica(
                f"no replica {'that can serve this ' if self._placeable else ''}takes traffic now"
            )
        return found

    def _classify(self) -> None:
        """Put each replica that takes traffic into the class of its engine; those of others leave the indexes."""
        classes = {one.can: one for one in self._classes}
        class_of: dict[str, ReplicaClass] = {}
        for replica_id, replica in self._placeable.items():
            can = replica.registration.info.can
            class_of[replica_id] = classes.setdefault(can, ReplicaClass(can))
        for replica_id, before in self._class_of.items():
            if class_of.get(replica_id) is not before:
                before.by_work.remove(replica_id)
                before.by_kv.remove(replica_id)
        self._class_of = class_of
        used = {one.can for one in class_of.values()}
        self._classes = [one for can, one in classes.items() if can in used]

    def _put(self, replica_id: str) -> None:
        """Bring the indexes up to date with a replica's book."""
        replica = self._placeable.get(replica_id)
        if replica is None:
            return
        book = self.book(replica_id)
        work_s = book.work_s * self._largest_tokens / replica.capacity_tokens
        spoken_for = book.forecast.soon_tokens / replica.capacity_tokens
        of = self._class_of[replica_id]
        of.by_work.put(replica_id, (work_s, book.num_leases, book.placed_at))
        of.by_kv.put(replica_id, (spoken_for, book.num_leases, book.placed_at))


def _first(indexes: list[LoadIndex], without: str | None) -> str | None:
    """Return the replica of the least order in any of the indexes, but for `without`."""
    firsts = [(index.order(name), name) for index in indexes if (name := index.least(without)) is not None]
    return min(firsts)[1] if firsts else None
