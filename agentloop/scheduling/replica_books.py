"""Replica books: the KV that holders of leases have on each replica, and the choice of the least loaded replica.

A replica's load is the share of its KV that its holders have and are promised. What they have is known from their
turns' reports: the context of each, and once what several prompts begin with. Each is promised the growth of its
next turns, a running mean over all trajectories. A holder that was let go of while its tool runs counts as a lease,
and with no KV.

Ownership: the Balancer alone. Invariants: a book is the sum of the holdings counted in it; each is counted once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from agentloop.errors import InvariantBroken, NoHealthyReplica
from agentloop.fleet.registry import Fleet, ReplicaRecord
from agentloop.scheduling.cache_hits import CacheHits
from agentloop.scheduling.lease_table import Demand, Holding
from agentloop.types import Lease
from agentloop.values.capabilities import NO_NEEDS, Needs

_GROWTH_TURNS = 4.0  # that each holder is promised room for
_NUM_AVERAGED = 1024  # trajectories, by their running mean
_NUM_TURNS_AVERAGED = 128  # few: 64 holders have them in half a minute, and the estimate follows a new load
_NUM_PRIOR = 4  # turns and trajectories that the values before the first are worth
_USUAL_TURN_TOKENS = 800.0

LoadOrder: TypeAlias = tuple[float, int, int]  # load, leases, number of the last placement: the least is next


@dataclass(slots=True)
class Promise:
    """The growth that is promised to each holder: of some turns, or of a whole trajectory if that is less."""

    _growth_tokens: float  # of a whole trajectory; given for the first ones
    _turn_tokens: float = _USUAL_TURN_TOKENS
    _num_turns: int = 0
    _num_ended: int = 0

    @property
    def tokens(self) -> float:
        return min(_GROWTH_TURNS * self._turn_tokens, self._growth_tokens)

    @property
    def next_turn_tokens(self) -> float:
        return self.tokens / _GROWTH_TURNS

    def turn(self, num_tokens: float) -> None:
        """Learn from a turn that grew a context by so many tokens."""
        self._num_turns = min(self._num_turns + 1, _NUM_TURNS_AVERAGED)
        self._turn_tokens += (num_tokens - self._turn_tokens) / (self._num_turns + _NUM_PRIOR)

    def end(self, num_tokens: float) -> None:
        """Learn from a trajectory that ended by itself after it grew by so many tokens."""
        self._num_ended = min(self._num_ended + 1, _NUM_AVERAGED)
        self._growth_tokens += (num_tokens - self._growth_tokens) / (self._num_ended + _NUM_PRIOR)


@dataclass(slots=True)
class _SharedPart:
    """A part of prompts that several holders on a replica may have, and their number."""

    num_holders: int
    num_tokens: float


@dataclass(slots=True, eq=False)
class ReplicaBook:
    """The holdings counted on one replica, and the holders that wait for room there."""

    num_leases: int = 0
    num_kept: int = 0  # of them, whose KV counts
    own_tokens: float = 0.0
    shared_tokens: float = 0.0
    shared: dict[str, _SharedPart] = field(default_factory=dict)
    placed_at: int = 0  # number of its last placement
    line: OrderedDict[str, None] = field(default_factory=OrderedDict)
    hits: CacheHits = field(default_factory=CacheHits)

    @property
    def held_tokens(self) -> float:
        return self.own_tokens + self.shared_tokens

    def add(self, holding: Holding) -> None:
        """Count a holding, with its KV unless it was let go of."""
        self.num_leases += 1
        if not holding.is_kept:
            return
        self.num_kept += 1
        parts = tuple(holding.demand.shared_parts(holding.prompt_tokens))
        holding.counted_parts = tuple(key for key, _ in parts)
        holding.counted_tokens = holding.num_tokens - sum(num_tokens for _, num_tokens in parts)
        for key, num_tokens in parts:
            part = self.shared.setdefault(key, _SharedPart(0, num_tokens))
            part.num_holders += 1
            if part.num_holders == 1:
                self.shared_tokens += part.num_tokens
        self.own_tokens += holding.counted_tokens

    def remove(self, holding: Holding) -> None:
        """Take a holding out, as it was added."""
        self.num_leases -= 1
        if not holding.is_kept:
            return
        self.num_kept -= 1
        self.own_tokens -= holding.counted_tokens
        for key in holding.counted_parts:
            part = self.shared[key]
            part.num_holders -= 1
            if part.num_holders == 0:
                self.shared_tokens -= part.num_tokens
                del self.shared[key]
        if self.num_kept == 0:  # the sums of floats must not drift
            self.own_tokens = self.shared_tokens = 0.0


class ReplicaBooks:
    """The books of all replicas, and the choice among those that take traffic."""

    def __init__(self, fleet: Fleet, usual_growth_tokens: float) -> None:
        self._fleet = fleet
        self._num_changes_seen = -1  # of the fleet's
        self._placeable: dict[str, ReplicaRecord] = {}
        self._books: dict[str, ReplicaBook] = {}
        self._num_placed = 0
        self.promise = Promise(usual_growth_tokens)

    def book(self, replica_id: str) -> ReplicaBook:
        """Return the leases and KV that are counted on a replica; made at the first use."""
        return self._books.setdefault(replica_id, ReplicaBook())

    def forget(self, replica_id: str) -> None:
        """Drop the book of a replica on which no lease is counted any more."""
        self._books.pop(replica_id, None)

    @property
    def placeable(self) -> dict[str, ReplicaRecord]:
        """The replicas that take traffic."""
        if self._num_changes_seen != self._fleet.num_placement_changes:
            self._num_changes_seen = self._fleet.num_placement_changes
            self._placeable = {one.replica_id: one for one in self._fleet.placeable()}
        return self._placeable

    def suits(self, replica_id: str, needs: Needs) -> bool:
        """Tell if a replica takes traffic and can serve these needs."""
        replica = self.placeable.get(replica_id)
        return replica is not None and (
            needs is NO_NEEDS
            or (
                needs.adapter not in replica.lacks
                and replica.registration.info.can.suits(self._fleet.bounded(needs))
            )
        )

    def takes_traffic(self, lease: Lease, needs: Needs = NO_NEEDS) -> bool:
        """Tell if a lease's replica suits, and is the same process as when the lease was granted."""
        return self.suits(lease.replica_id, needs) and self.placeable[lease.replica_id].url == lease.url

    def needing(self, demand: Demand, needs: Needs) -> Demand:
        """Return a demand with its new needs, and its holder's earlier ones if one engine can serve all.

        Raises UnsupportedParameter if no engine can serve the new ones.
        """
        joined = demand.needs.joined(needs)
        if joined is demand.needs:
            return demand
        if not self._fleet.may_serve(joined):
            self._fleet.check_needs(needs)
            joined = needs
        return replace(demand, needs=joined)

    # --- the choice ---

    def load(self, replica_id: str) -> float:
        """Return the share of a replica's KV that its holders have and are promised."""
        return self._order()(replica_id)[0]

    def least(self, without: str | None = None, needs: Needs = NO_NEEDS) -> str:
        """Return the least loaded replica that suits, but for `without` if there is another.

        Raises NoHealthyReplica if none takes traffic, and UnsupportedParameter if the fleet has none that suits.
        """
        suiting: Collection[str] = self.placeable
        if needs is not NO_NEEDS:
            suiting = [name for name in suiting if self.suits(name, needs)]
        if not suiting:
            self._fleet.check_needs(needs)
            which = "that can serve this " if self.placeable else ""
            raise NoHealthyReplica(f"no replica {which}takes traffic now")
        if without in suiting and len(suiting) > 1:
            suiting = [name for name in suiting if name != without]
        return min(suiting, key=self._order())

    def by_load(self, replica_ids: Iterable[str], needs: Needs) -> list[str]:
        """Return those of the replicas that suit, the least loaded first."""
        return sorted((name for name in replica_ids if self.suits(name, needs)), key=self._order())

    def fits(self, replica_id: str, demand: Demand, num_tokens: float, share: float) -> bool:
        """Return True if a replica has room for a holder with `num_tokens` of KV, after the holders waiting there.

        The contexts of holders, each with its next turn, are within the capacity that the engine reported; with all
        promised growth they are within `share` of that. An empty replica has room for any holder, and one that does
        not report its KV for all.
        """
        book, replica = self.book(replica_id), self.placeable[replica_id]
        if book.line and next(iter(book.line)) != demand.holder_id:
            return False
        if book.num_kept == 0 or replica.registration.info.kv_capacity_tokens <= 0:
            return True
        parts = (book.shared.get(key) for key, _ in demand.shared_parts(num_tokens))
        own_tokens = max(0.0, num_tokens - sum(part.num_tokens for part in parts if part is not None))
        held_tokens, num_kept = book.held_tokens + own_tokens, book.num_kept + 1
        is_held = held_tokens + num_kept * self.promise.next_turn_tokens <= replica.capacity_tokens
        return is_held and held_tokens + num_kept * self.promise.tokens <= share * replica.capacity_tokens

    def is_over(self, replica_id: str) -> bool:
        """Return True if the contexts of a replica's holders, each with its next turn, exceed the engine's KV."""
        book, replica = self.book(replica_id), self._fleet.get(replica_id)
        if replica is None or replica.registration.info.kv_capacity_tokens <= 0:
            return False
        return book.held_tokens + book.num_kept * self.promise.next_turn_tokens > replica.capacity_tokens

    def placed(self, replica_id: str) -> ReplicaRecord:
        """Note that a lease on a replica is granted, so that equal replicas take turns. Returns the replica."""
        self._num_placed += 1
        self.book(replica_id).placed_at = self._num_placed
        return self.placeable[replica_id]

    def check(self, counted: Iterable[Holding]) -> None:
        """Raise InvariantBroken unless the books have exactly these holdings."""
        expected: dict[str, ReplicaBook] = {}
        for holding in counted:
            book = expected.setdefault(holding.lease.replica_id, ReplicaBook())
            book.num_leases += 1
            book.num_kept += holding.is_kept
            book.own_tokens += holding.counted_tokens if holding.is_kept else 0.0
            for key in holding.counted_parts if holding.is_kept else ():
                book.shared.setdefault(key, _SharedPart(0, 0.0)).num_holders += 1
        for name in expected.keys() | self._books.keys():
            found, wanted = self.book(name), expected.get(name, ReplicaBook())
            members = [{key: one.num_holders for key, one in book.shared.items()} for book in (found, wanted)]
            is_right = found.num_leases == wanted.num_leases and found.num_kept == wanted.num_kept
            if not is_right or members[0] != members[1] or abs(found.own_tokens - wanted.own_tokens) > 1.0:
                raise InvariantBroken(f"the book of replica {name} is not what its leases add up to")

    def _order(self) -> Callable[[str], LoadOrder]:
        """Return the key of replicas by load. It looks at all of them: about 0.5 µs each."""
        books, placeable, promised = self._books, self.placeable, self.promise.tokens
        empty = ReplicaBook()

        def order(name: str) -> LoadOrder:
            book = books.get(name, empty)
            tokens = book.own_tokens + book.shared_tokens + book.num_kept * promised
            return tokens / placeable[name].capacity_tokens, book.num_leases, book.placed_at

        return order
