"""Placement: the replicas in order of their load, kept so that no placement walks over all of them.

Ownership: the Balancer alone. A heap holds an entry for every change of a replica's load; an entry is good while
it is the replica's present one, and others are thrown away when they come to the top (lazy deletion). The heap is
made anew when most of it is old, so `put` and `least` cost O(log replicas), amortised.

Invariant: each replica's present load has an entry in the heap.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

LoadOrder: TypeAlias = tuple[float, int, int]  # load, leases, number of the last placement: the least is next

_MAX_OLD_ENTRIES = 64  # beside three times the present ones, before the heap is made anew


class LoadIndex:
    """Replicas by load, the least first. Equal loads take turns by the rest of the order."""

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

    def order(self, replica_id: str) -> LoadOrder:
        """Return a replica's whole order. Raises KeyError."""
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
