"""The KV accounting of each replica: loads, cache hits, the fleet's KV share, and routed prefixes.

A replica's load is the share of its KV that its holders use or are expected to need. Reports of turns give each
holder's context; a prefix that several prompts share counts once. The expected growth is a running mean over all
trajectories. A holder whose reservation was released while its tool runs counts as a lease without KV.

Only the Balancer changes these objects. Invariant: an account is the sum of its lease entries, each counted once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from agentloop.errors import InvariantBroken, NoHealthyReplica
from agentloop.fleet.registry import Fleet, ReplicaRecord
from agentloop.scheduling.lease_table import Demand, Holding
from agentloop.types import Lease
from agentloop.values.capabilities import NO_NEEDS, Needs

_NUM_REMEMBERED = 256  # the number of turns that the means cover, about
_MIN_HIT_RATE = 0.5  # below this rate, most of the returning contexts are computed again
_MIN_TURNS = 32.0  # fewer turns give no reliable rate


@dataclass(slots=True)
class CacheHits:
    """The prefix cache hits of one replica."""

    num_turns: float = 0.0  # turns that returned to the replica with their KV
    left: float = 0.0  # tokens of the contexts that earlier turns left there
    found: float = 0.0

    def take(self, num_left: float, num_cached: int) -> None:
        """Count a returning turn: the tokens that its last turn left, and the cached ones."""
        keep = 1 - 1 / _NUM_REMEMBERED
        self.num_turns = self.num_turns * keep + 1
        self.left = self.left * keep + num_left
        self.found = self.found * keep + min(num_cached, num_left)

    @property
    def rate(self) -> float | None:
        """The cached share of returning contexts; None before the first turn."""
        return self.found / self.left if self.left else None

    @property
    def is_thrashing(self) -> bool:
        """True if returning turns compute most of their contexts again."""
        return self.num_turns >= _MIN_TURNS and self.found < _MIN_HIT_RATE * self.left


_UNUSED = 0.85  # use below this share of the fleet's KV lets the share grow
_GROWTH = 0.02  # per second
_MUCH_LOST, _SHRINKAGE = 0.12, 0.08
_THRASHING, _CUT = 0.30, 0.25
_WINDOW_TURNS = 48  # turns per decision; at least two turns of each trajectory, four after a reduction


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """The bounds of the share."""

    least: float = 0.3
    most: float = 4.0


class KVShare:
    """The part of the fleet's KV that holders may reserve; 1.0 is the engines' whole KV.

    It grows while work waits and the engines' KV is partly unused. It shrinks when turns compute much of their
    prompts again although the KV should have them, because then too many contexts compete for the KV.
    """

    def __init__(self, bounds: ShareBounds) -> None:
        self._bounds = bounds
        self.value = min(max(1.0, bounds.least), bounds.most)
        self._num_turns = 0
        self._prompt_tokens = 0.0
        self._lost_tokens = 0.0
        self._turns_each = 2

    def turn(self, prompt_tokens: float, lost_tokens: float, num_holders: int) -> None:
        """Count a turn's prompt tokens and the recomputed ones, and adapt the share at the end of each window."""
        self._num_turns += 1
        self._prompt_tokens += prompt_tokens
        self._lost_tokens += lost_tokens
        if self._num_turns < max(_WINDOW_TURNS, self._turns_each * num_holders):
            return
        lost = self._lost_tokens / max(self._prompt_tokens, 1.0)
        self._turns_each = 4 if lost > _MUCH_LOST else 2
        if lost > _THRASHING:
            self._scale(1 - _CUT)
        elif lost > _MUCH_LOST:
            self._scale(1 - _SHRINKAGE)
        self._num_turns, self._prompt_tokens, self._lost_tokens = 0, 0.0, 0.0

    def grow(self, used_tokens: float, capacity_tokens: float) -> bool:
        """Grow if engines have unused KV. Returns True if it grew. Call once a second while work waits."""
        before = self.value
        if used_tokens < _UNUSED * capacity_tokens:
            self._scale(1 + _GROWTH)
        return self.value > before

    def _scale(self, factor: float) -> None:
        self.value = min(max(self.value * factor, self._bounds.least), self._bounds.most)


class RoutedPrefixes:
    """The replicas to which prompts with the same beginning were sent, in order of use.

    The keys are group ids, and hashes of a prompt's first tokens (`api.prefixes_of`) or of a task's first message.
    A replica is assumed to have a prefix until new weights arrive or `max_prefixes` others were used later.
    """

    def __init__(self, max_prefixes: int = 32768) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[str, set[str]] = OrderedDict()

    def note(self, prefixes: Iterable[tuple[str, float]], replica_id: str) -> None:
        """Record that a prompt with these prefixes was sent to a replica."""
        for key, _ in prefixes:
            self._replicas.setdefault(key, set()).add(replica_id)
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def replicas(self, key: str) -> Iterable[str]:
        """Return the replicas that received a prefix."""
        return self._replicas.get(key, ())

    def forget(self, replica_id: str) -> None:
        """Remove a replica that is lost or whose KV is lost."""
        for key in [key for key, replicas in self._replicas.items() if replica_id in replicas]:
            self._replicas[key].discard(replica_id)
            if not self._replicas[key]:
                del self._replicas[key]

    def clear(self, adapter: str) -> None:
        """Remove the prefixes of an adapter, or all for "", because no engine has KV that new prompts can share."""
        for key in [key for key in self._replicas if not adapter or key.startswith(f"{adapter} ")]:
            del self._replicas[key]


_GROWTH_TURNS = 4.0  # turns of growth that are reserved for each holder
_NUM_AVERAGED = 1024  # number of trajectories in the running mean
_NUM_TURNS_AVERAGED = 128  # few, so that the mean follows a new load: 64 holders have them in half a minute
_NUM_PRIOR = 4  # weight of the initial values, in turns or trajectories
_USUAL_TURN_TOKENS = 800.0

LoadOrder: TypeAlias = tuple[float, int, int]  # load, leases, number of the last placement; the lowest is next


@dataclass(slots=True)
class Promise:
    """The expected growth that is reserved for each holder: some turns, or the whole trajectory if that is less."""

    _growth_tokens: float  # mean growth of a trajectory; the initial value is configured
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
        """Update the mean with a turn that grew a context by `num_tokens`."""
        self._num_turns = min(self._num_turns + 1, _NUM_TURNS_AVERAGED)
        self._turn_tokens += (num_tokens - self._turn_tokens) / (self._num_turns + _NUM_PRIOR)

    def end(self, num_tokens: float) -> None:
        """Update the mean with a completed trajectory that grew by `num_tokens`."""
        self._num_ended = min(self._num_ended + 1, _NUM_AVERAGED)
        self._growth_tokens += (num_tokens - self._growth_tokens) / (self._num_ended + _NUM_PRIOR)


@dataclass(slots=True)
class _SharedPart:
    """A part of prompts that holders on one replica share, and their number."""

    num_holders: int
    num_tokens: float


@dataclass(slots=True, eq=False)
class ReplicaBook:
    """The lease entries on one replica, and the holders that wait for capacity there."""

    num_leases: int = 0
    num_kept: int = 0  # leases whose KV counts
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
        """Count a lease on this replica, and its KV unless the reservation was released."""
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
        """Remove an entry as it was added."""
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
        if self.num_kept == 0:  # rounding errors of float sums must not accumulate
            self.own_tokens = self.shared_tokens = 0.0


class ReplicaBooks:
    """The accounts of all replicas, and the choice of a replica."""

    def __init__(self, fleet: Fleet, usual_growth_tokens: float) -> None:
        self._fleet = fleet
        self._num_changes_seen = -1  # the fleet's change count at the last refresh
        self._placeable: dict[str, ReplicaRecord] = {}
        self._books: dict[str, ReplicaBook] = {}
        self._num_placed = 0
        self.promise = Promise(usual_growth_tokens)

    def book(self, replica_id: str) -> ReplicaBook:
        """Return a replica's account; created at the first use."""
        return self._books.setdefault(replica_id, ReplicaBook())

    def forget(self, replica_id: str) -> None:
        """Remove the account of a replica without leases."""
        self._books.pop(replica_id, None)

    @property
    def placeable(self) -> dict[str, ReplicaRecord]:
        """The replicas that take traffic."""
        if self._num_changes_seen != self._fleet.num_placement_changes:
            self._num_changes_seen = self._fleet.num_placement_changes
            self._placeable = {one.replica_id: one for one in self._fleet.placeable()}
        return self._placeable

    def suits(self, replica_id: str, needs: Needs) -> bool:
        """Return True if a replica takes traffic and meets the needs."""
        replica = self.placeable.get(replica_id)
        return (replica is not None and self._fleet.accepts(needs, replica)) and (
            needs is NO_NEEDS
            or (
                needs.adapter not in replica.lacks
                and replica.registration.info.can.suits(self._fleet.bounded(needs))
            )
        )

    def takes_traffic(self, lease: Lease, needs: Needs = NO_NEEDS) -> bool:
        """Return True if the lease's replica meets the needs and is still the process that the lease names."""
        return self.suits(lease.replica_id, needs) and self.placeable[lease.replica_id].url == lease.url

    def needing(self, demand: Demand, needs: Needs) -> Demand:
        """Return a demand with the new needs, joined with the earlier ones if one engine meets both.

        Raises UnsupportedParameter if no engine meets the new ones.
        """
        joined = demand.needs.joined(needs)
        if joined is demand.needs:
            return demand
        if not self._fleet.may_serve(joined):
            self._fleet.check_needs(needs)
            joined = needs
        return replace(demand, needs=joined)

    # Choice of a replica

    def load(self, replica_id: str) -> float:
        """Return the share of a replica's KV that its holders use or are expected to need."""
        return self._order()(replica_id)[0]

    def least(self, without: str | None = None, needs: Needs = NO_NEEDS) -> str:
        """Return the least loaded replica that meets the needs; `without` only if there is no other.

        Raises NoHealthyReplica if none takes traffic, and UnsupportedParameter if no engine of the fleet meets the
        needs.
        """
        suiting: Collection[str] = self.placeable
        if needs is not NO_NEEDS or self._fleet.held_versions:
            suiting = [name for name in suiting if self.suits(name, needs)]
        if not suiting:
            self._fleet.check_needs(needs)
            which = "that meets the request's needs " if self.placeable else ""
            raise NoHealthyReplica(f"no replica {which}takes traffic now")
        if without in suiting and len(suiting) > 1:
            suiting = [name for name in suiting if name != without]
        return min(suiting, key=self._order())

    def by_load(self, replica_ids: Iterable[str], needs: Needs) -> list[str]:
        """Return the replicas of `replica_ids` that meet the needs, least loaded first."""
        return sorted((name for name in replica_ids if self.suits(name, needs)), key=self._order())

    def fits(self, replica_id: str, demand: Demand, num_tokens: float, share: float) -> bool:
        """Return True if a replica has capacity for a holder with `num_tokens` of KV.

        The contexts of all holders, each with its next turn, must fit into the engine's KV capacity, and their
        expected growth into `share` of it. An empty replica has capacity for any holder, and a replica that does
        not report its KV for all.
        """
        book, replica = self.book(replica_id), self.placeable[replica_id]
        # Holders that wait for this replica go first, so that a large context is not overtaken forever.
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
        """Record a placement, so that equally loaded replicas take turns. Returns the replica."""
        self._num_placed += 1
        self.book(replica_id).placed_at = self._num_placed
        return self.placeable[replica_id]

    def check(self, counted: Iterable[Holding]) -> None:
        """Raise InvariantBroken unless the accounts have exactly these entries."""
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
                raise InvariantBroken(f"the KV account of replica {name} differs from the sum of its leases")

    def _order(self) -> Callable[[str], LoadOrder]:
        """Return a sort key of replicas by load. Reads all replicas, about 0.5 µs each."""
        books, placeable, promised = self._books, self.placeable, self.promise.tokens
        empty = ReplicaBook()

        def order(name: str) -> LoadOrder:
            book = books.get(name, empty)
            tokens = book.own_tokens + book.shared_tokens + book.num_kept * promised
            return tokens / placeable[name].capacity_tokens, book.num_leases, book.placed_at

        return order
