"""The tree of extents against a brute-force model that knows every block by itself."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.kv_hashes import BlockChain, root_hash
from agentloop.scheduling.residency import ReplicaKV

DEPTH = 6
CAPACITY = 9

Context = tuple[int, ...]


def names(context: Context) -> array[int]:
    chain = BlockChain(1, root_hash(0))
    chain.extend(context)
    return chain.hashes


CONTEXTS = list(product((0, 1), repeat=DEPTH))  # with their beginnings all there are
CHAINS = {context: names(context) for context in CONTEXTS}
NAME_OF = {context[: n + 1]: CHAINS[context][n] for context in CONTEXTS for n in range(DEPTH)}


@dataclass
class Blocks:
    """The same, a block being named by all ids up to its end."""

    present: set[Context] = field(default_factory=set)
    queue: list[Context] = field(default_factory=list)  # of those that nobody holds, the first to go in front
    held: dict[str, list[Context]] = field(default_factory=dict)
    reserved: Counter[str] = field(default_factory=Counter)

    @property
    def num_blocks(self) -> int:
        return len(self.present) + self.reserved.total()

    def is_held(self, block: Context) -> bool:
        return any(block in blocks for blocks in self.held.values())

    def match(self, context: Context) -> int:
        return next((n for n in range(len(context)) if context[: n + 1] not in self.present), len(context))

    def hold(self, holder: str, context: Context) -> int:
        before, num = self.held.get(holder, []), self.match(context)
        self.held[holder] = [context[: n + 1] for n in range(num)]
        self.queue = [block for block in self.queue if block not in self.held[holder]]
        self.queue += [block for block in reversed(before) if not self.is_held(block)]
        self.make_room()
        return num

    def make_room(self) -> None:
        while self.num_blocks > CAPACITY and self.queue:
            self.present.remove(self.queue.pop(0))

    def reserve(self, holder: str, num_blocks: int) -> None:
        self.held.setdefault(holder, [])
        self.reserved[holder] = num_blocks
        self.make_room()

    def store(self, holder: str, context: Context) -> int:
        num_here = self.hold(holder, context)
        new = [context[: n + 1] for n in range(num_here, len(context))]
        self.held[holder] += new
        self.present |= set(new)
        self.reserved[holder] = max(0, self.reserved[holder] - len(new))
        self.make_room()
        return len(new)

    def release(self, holder: str) -> None:
        before = self.held.pop(holder, [])
        self.queue += [block for block in reversed(before) if not self.is_held(block)]
        del self.reserved[holder]
        self.make_room()

    def remove(self, gone: set[Context]) -> None:
        dead = {block for block in self.present if any(block[: len(first)] == first for first in gone)}
        self.present -= dead
        self.queue = [block for block in self.queue if block not in dead]
        for holder, blocks in self.held.items():
            self.held[holder] = [block for block in blocks if block not in dead]

    def keep_only(self, resident: set[Context]) -> None:
        self.remove(self.present - resident)


holders = st.sampled_from(["a", "b", "c"])
contexts = st.lists(st.integers(0, 1), max_size=DEPTH).map(tuple)
blocks = st.sets(contexts.filter(bool), max_size=4)
operations = st.one_of(
    st.tuples(st.just("store"), holders, contexts),
    st.tuples(st.just("store"), holders, contexts),
    st.tuples(st.just("release"), holders),
    st.tuples(st.just("release"), holders),
    st.tuples(st.just("hold"), holders, contexts),
    st.tuples(st.just("reserve"), holders, st.integers(0, 4)),
    st.tuples(st.just("remove"), blocks),
    st.tuples(st.just("keep_only"), st.sets(contexts.filter(bool), max_size=40)),
    st.tuples(st.just("clear")),
)


def do(kv: ReplicaKV, model: Blocks, operation: tuple) -> None:
    kind, *values = operation
    if kind in ("hold", "store"):
        assert getattr(kv, kind)(values[0], names(values[1])) == getattr(model, kind)(*values)
    elif kind in ("reserve", "release"):
        getattr(kv, kind)(*values)
        getattr(model, kind)(*values)
    elif kind in ("remove", "keep_only"):
        getattr(kv, kind)([NAME_OF[block] for block in sorted(values[0])])
        getattr(model, kind)(values[0])
    else:
        kv.clear()
        model.remove(set(model.present))


def check(kv: ReplicaKV, model: Blocks) -> None:
    assert kv.num_blocks == model.num_blocks
    assert kv.num_held_blocks == model.num_blocks - len(model.queue)
    assert {context: kv.match(CHAINS[context]) for context in CONTEXTS} == {
        context: model.match(context) for context in CONTEXTS
    }


@given(st.lists(operations, max_size=40))
@settings(max_examples=150)
def test_the_tree_holds_what_the_model_holds(steps: list[tuple]) -> None:
    kv, model = ReplicaKV(CAPACITY), Blocks()
    for step in steps:
        do(kv, model, step)
        check(kv, model)


@given(st.lists(operations, max_size=25))
@settings(max_examples=100)
def test_idle_blocks_go_one_by_one_in_the_models_order(steps: list[tuple]) -> None:
    kv, model = ReplicaKV(CAPACITY), Blocks()
    for step in steps:
        do(kv, model, step)
    for num_blocks in range(1, CAPACITY + 1):
        do(kv, model, ("reserve", "new", num_blocks))
        check(kv, model)
    do(kv, model, ("release", "new"))
    for holder in ("a", "b", "c"):
        do(kv, model, ("release", holder))
    assert kv.num_held_blocks == 0
    check(kv, model)


def test_the_oldest_request_goes_first_and_its_last_block_before_its_first() -> None:
    kv = ReplicaKV(6)
    for holder, context in (("old", (0, 0, 0)), ("new", (1, 1, 1))):
        kv.store(holder, names(context))
        kv.release(holder)
    seen = []
    for num_blocks in range(7):
        kv.reserve("next", num_blocks)
        seen.append((kv.match(names((0, 0, 0))), kv.match(names((1, 1, 1)))))
    assert seen == [(3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_shared_prompt_stays_while_one_sibling_runs() -> None:
    kv = ReplicaKV(5)
    kv.store("a", names((0, 0, 0, 1)))
    kv.store("b", names((0, 0, 0, 0)))
    kv.release("a")
    kv.release("b")
    kv.hold("a", names((0, 0, 0, 1)))
    kv.reserve("long", 9)
    assert (kv.match(names((0, 0, 0, 1))), kv.match(names((0, 0, 0, 0)))) == (4, 3)


def test_a_request_with_more_blocks_than_there_are_is_a_fact() -> None:
    kv = ReplicaKV(2)
    kv.store("a", names((0, 0, 0)))
    assert (kv.num_blocks, kv.num_held_blocks) == (3, 3)
    kv.release("a")
    assert (kv.num_blocks, kv.num_held_blocks, kv.match(names((0, 0, 0)))) == (2, 0, 2)


def test_a_context_that_got_shorter_leaves_no_more_than_the_capacity() -> None:
    kv = ReplicaKV(2)
    kv.store("a", names((0, 0, 0)))
    kv.hold("a", names((0,)))
    assert (kv.num_blocks, kv.num_held_blocks) == (2, 1)


def test_events_of_blocks_evicted_here_too_change_nothing() -> None:
    kv = ReplicaKV(16)
    kv.remove([])  # from now on names are remembered
    old, new = array("Q", range(1, 17)), array("Q", range(101, 103))
    kv.store("a", old)
    kv.release("a")
    kv.store("b", new)
    kv.remove(reversed(old[14:]))
    assert (kv.match(old), kv.match(new)) == (14, 2)


def test_a_block_stored_again_can_be_removed_again() -> None:
    kv = ReplicaKV(16)
    kv.remove([])
    for round_number in range(3):
        kv.store("a", array("Q", range(1, 17)))
        kv.release("a")
        kv.reserve("b", 2)
        kv.reserve("b", 0)
        kv.store("a", array("Q", range(1, 17)))
        kv.release("a")
        kv.remove([16])
        assert kv.match(array("Q", range(1, 17))) == 15, round_number


def test_a_replica_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        ReplicaKV(0)
