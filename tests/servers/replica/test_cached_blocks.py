"""The names of cached blocks, kept from events, against an engine that knows a block by all its ids."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.api.coordinator import KVChanges
from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from agentloop.kv_hashes import BlockChain, hashes_of, root_hash
from agentloop_servers.replica.cached_blocks import CachedBlocks

SIZE = 2
CAPACITY = 64


def names(version: int, *ids: int) -> list[int]:
    """Our names of the full blocks of a context."""
    chain = BlockChain(SIZE, root_hash(version))
    chain.extend(ids)
    return list(chain.hashes)


def stored(
    hashes: tuple[int, ...], ids: tuple[int, ...], parent: int | None = None, version: int | None = 0
) -> KVEvent:
    return BlocksStored(hashes, parent, ids, version if parent is None else None)


class Listener:
    """Believes what it is told, as the coordinator does."""

    def __init__(self) -> None:
        self.cached = CachedBlocks(SIZE, CAPACITY)
        self.believed: set[int] = set()
        self.sequence = 0

    def hear(self) -> KVChanges | None:
        changes = self.cached.take_changes()
        if changes is not None:
            assert changes.sequence == self.sequence + 1
            self.sequence = changes.sequence
            self.believed -= set(hashes_of(changes.removed))
            if changes.resident is not None:
                self.believed = set(hashes_of(changes.resident))
        return changes

    def miss(self) -> None:
        """Hear nothing of a report, after which the replica tells all."""
        if self.cached.take_changes() is not None:
            self.sequence += 1
        self.cached.tell_all()

    def resident(self) -> set[int]:
        """What the engine holds, asked for anew."""
        self.cached.tell_all()
        self.hear()
        return self.believed


def test_blocks_have_the_names_that_workers_give_them():
    listener = Listener()
    listener.cached.take_in(stored((101, 102), (1, 2, 3, 4)))
    listener.cached.take_in(stored((103,), (5, 6), parent=102))
    listener.cached.take_in(stored((201,), (1, 2), version=7))
    assert listener.resident() == {*names(0, 1, 2, 3, 4, 5, 6), *names(7, 1, 2)}


def test_changes_are_numbered_and_told_once():
    listener = Listener()
    assert listener.hear() == KVChanges(1, resident=b"")
    assert listener.hear() is None
    listener.cached.take_in(stored((101, 102), (1, 2, 3, 4)))
    assert listener.hear() is None  # what is stored is known from the turns
    listener.cached.take_in(BlocksRemoved((102,)))
    assert listener.hear() == KVChanges(2, removed=array("Q", names(0, 1, 2, 3, 4)[1:]).tobytes())
    assert listener.hear() is None


def test_a_block_that_came_back_before_it_was_told_is_not_told_as_gone():
    listener = Listener()
    listener.cached.take_in(stored((101,), (1, 2)))
    listener.hear()
    listener.cached.take_in(BlocksRemoved((101,)))
    listener.cached.take_in(stored((101,), (1, 2)))
    assert listener.hear() is None
    assert listener.resident() == set(names(0, 1, 2))


def test_a_block_is_gone_with_its_last_copy():
    listener = Listener()
    for _ in range(3):
        listener.cached.take_in(stored((101,), (1, 2)))
    listener.hear()
    for _ in range(2):
        listener.cached.take_in(BlocksRemoved((101,)))
        assert listener.hear() is None
    listener.cached.take_in(BlocksRemoved((101,)))
    assert listener.hear() == KVChanges(2, removed=array("Q", names(0, 1, 2)).tobytes())
    listener.cached.take_in(BlocksRemoved((101,)))  # of nothing
    assert listener.resident() == set()


def test_two_ranks_that_hash_differently_hold_one_block():
    listener = Listener()
    listener.cached.take_in(stored((101,), (1, 2)))
    listener.cached.take_in(stored((901,), (1, 2)))
    listener.cached.take_in(BlocksRemoved((101,)))
    assert listener.resident() == set(names(0, 1, 2))
    listener.cached.take_in(BlocksRemoved((901,)))
    assert listener.resident() == set()


@pytest.mark.parametrize(
    "event",
    [
        stored((102,), (3, 4), parent=999),  # its parent was never told: it shows an image, or was lost
        stored((102,), (3, 4), version=None),  # no version says who may share it
        stored((102,), (3, 4, 5), parent=101),  # no whole blocks, or blocks of another size
        stored((102, 103), (3, 4), parent=101),
    ],
)
def test_what_cannot_be_named_is_taken_for_nothing_and_neither_is_what_follows_it(event):
    listener = Listener()
    listener.cached.take_in(stored((101,), (1, 2)))
    listener.cached.take_in(event)
    listener.cached.take_in(stored((104,), (5, 6), parent=102))
    assert listener.resident() == set(names(0, 1, 2))
    listener.cached.take_in(BlocksRemoved((102, 104)))
    assert listener.hear() is None


def test_a_clear_tells_what_is_there_since():
    listener = Listener()
    listener.cached.take_in(stored((101,), (1, 2)))
    listener.hear()
    listener.cached.take_in(AllBlocksCleared())
    listener.cached.take_in(stored((101,), (3, 4)))  # nothing holds hashes together over a clear
    assert listener.hear() == KVChanges(2, resident=array("Q", names(0, 3, 4)).tobytes())


def test_what_may_not_have_arrived_is_told_again():
    listener = Listener()
    listener.cached.take_in(stored((101, 102), (1, 2, 3, 4)))
    listener.hear()
    listener.cached.take_in(BlocksRemoved((102,)))
    listener.cached.take_changes()  # the call failed
    listener.cached.tell_all()
    again = listener.cached.take_changes()
    assert again == KVChanges(3, resident=array("Q", names(0, 1, 2)).tobytes())


def test_memory_is_bounded_where_removals_are_lost_or_nobody_listens():
    cached = CachedBlocks(SIZE, 4)
    cached.take_changes()
    for number in range(1000):  # an engine of four blocks cannot hold five
        cached.take_in(stored((number,), (number, number)))
    changes = cached.take_changes()
    assert changes is not None
    assert changes.resident is not None
    assert len(hashes_of(changes.resident)) <= 4
    for number in range(2000, 3000):
        cached.take_in(stored((number,), (number, number)))
        cached.take_in(BlocksRemoved((number,)))
    changes = cached.take_changes()
    assert changes is not None
    assert len(changes.removed) + len(changes.resident or b"") <= 8 * 4


@dataclass
class CopyingEngine:
    """An engine that hashes at random, and holds copies. A block is known by its version and all ids to its end."""

    seed: int
    copies: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    hashes: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def hash_of(self, block: tuple[int, tuple[int, ...]]) -> int:
        return self.hashes.setdefault(block, random.Random(f"{self.seed} {block}").getrandbits(64))

    def compute(self, version: int, ids: tuple[int, ...], num_reused: int) -> KVEvent | None:
        """Store the blocks of a context again from number `num_reused` on, or from the first that is not there."""
        blocks = [(version, ids[:end]) for end in range(SIZE, len(ids) + 1, SIZE)]
        held = next((n for n, block in enumerate(blocks) if block not in self.copies), len(blocks))
        start = min(num_reused, held)
        new = blocks[start:]
        if not new:
            return None
        self.copies += new
        parent = self.hash_of(blocks[start - 1]) if start else None
        return stored(tuple(map(self.hash_of, new)), ids[start * SIZE : len(blocks) * SIZE], parent, version)

    def evict(self, number: int) -> KVEvent | None:
        if not self.copies:
            return None
        return BlocksRemoved((self.hash_of(self.copies.pop(number % len(self.copies))),))

    def clear(self) -> KVEvent:
        self.copies.clear()
        return AllBlocksCleared()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=8)),
        st.tuples(st.just("evict"), st.integers(0, 99), st.just([])),
        st.tuples(st.just("clear"), st.just(0), st.just([])),
        st.tuples(st.just("hear"), st.just(0), st.just([])),
        st.tuples(st.just("miss"), st.just(0), st.just([])),
    ),
    max_size=40,
)


@given(steps, st.integers(0, 3))
def test_the_names_are_those_of_what_the_engine_holds(steps, num_reused):
    engine, listener = CopyingEngine(num_reused), Listener()
    for kind, number, ids in steps:
        event: KVEvent | None = None
        if kind == "compute":
            event = engine.compute(number, tuple(ids), num_reused)
            listener.believed |= set(names(number, *ids))  # a turn's report says so
        elif kind == "evict":
            event = engine.evict(number)
        elif kind == "clear":
            event = engine.clear()
        elif kind == "miss":
            listener.miss()
        else:
            listener.hear()
            assert listener.believed == {names(version, *block)[-1] for version, block in engine.copies}
        if event is not None:
            listener.cached.take_in(event)
    assert listener.resident() == {names(version, *block)[-1] for version, block in engine.copies}
