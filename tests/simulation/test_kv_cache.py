"""The KV cache, compared with a brute-force model that identifies blocks by all ids before their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.simulation.kv_cache import KVCache, KVSequence

BLOCK = 2
NUM_BLOCKS = 6

Prefix = tuple[int, tuple[int, ...]]  # KV version, and every id up to a block's end


def summed(state: int, token_ids: Sequence[int]) -> int:
    return state + sum(token_ids)


@dataclass
class Model:
    """A direct implementation of the same cache."""

    held: list[list[Prefix | None]] = field(default_factory=list)  # blocks of each holder; None is a partial block
    idle: list[Prefix] = field(default_factory=list)  # least recently used first

    @property
    def cached(self) -> set[Prefix]:
        return {block for blocks in self.held for block in blocks if block is not None} | set(self.idle)

    @property
    def num_held(self) -> int:
        partial = sum(block is None for blocks in self.held for block in blocks)
        return len({block for blocks in self.held for block in blocks if block is not None}) + partial

    def make_room(self) -> bool:
        if self.num_held + len(self.idle) < NUM_BLOCKS:
            return True
        if not self.idle:
            return False
        self.idle.pop(0)
        return True

    def hold(self, holder: list[Prefix | None], block: Prefix) -> None:
        if block in self.idle:
            self.idle.remove(block)
        holder.append(block)

    def admit(self, version: int, ids: tuple[int, ...]) -> int | None:
        full = [(version, ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        hits = 0
        while hits < (len(ids) - 1) // BLOCK and full[hits] in self.cached:
            hits += 1
        num_new = -(-len(ids) // BLOCK) - hits
        num_evictable = sum(block not in full[:hits] for block in self.idle)
        num_pinned = self.num_held + len(self.idle) - num_evictable
        if num_new > NUM_BLOCKS - num_pinned:
            return None
        holder: list[Prefix | None] = []
        self.held.append(holder)
        for block in full[:hits]:
            self.hold(holder, block)
        for block in full[hits:]:
            assert self.make_room()
            self.hold(holder, block)
        if len(ids) % BLOCK:
            assert self.make_room()
            holder.append(None)
        return hits * BLOCK

    def append(self, holder: list[Prefix | None], version: int, ids: tuple[int, ...]) -> bool:
        if (len(ids) - 1) % BLOCK == 0:
            if not self.make_room():
                return False
            holder.append(None)
        if len(ids) % BLOCK == 0:
            holder.pop()
            self.hold(holder, (version, ids))
        return True

    def release(self, holder: list[Prefix | None]) -> None:
        self.held = [blocks for blocks in self.held if blocks is not holder]  # two holders may have equal blocks
        still_held = {block for blocks in self.held for block in blocks}
        self.idle += [block for block in reversed(holder) if block is not None and block not in still_held]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
        st.tuples(st.just("append"), st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=1)),
        st.tuples(st.just("release"), st.integers(0, 5), st.just([])),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(operations)
@settings(max_examples=400)
def test_the_cache_does_what_the_model_does(steps: list[tuple[str, int, list[int]]]) -> None:
    model, kv = Model(), KVCache(NUM_BLOCKS, BLOCK)
    live: list[tuple[KVSequence, tuple[int, ...], list[Prefix | None]]] = []
    for kind, number, token_ids in steps:
        if kind == "admit":
            sequence, ids = kv.sequence(number), tuple(token_ids)
            num_cached = kv.admit(sequence, ids, summed)
            assert num_cached == model.admit(number, ids)
            if num_cached is not None:
                live.append((sequence, ids, model.held[-1]))
        elif live:
            sequence, ids, holder = live.pop(number % len(live))
            if kind == "release":
                kv.release(sequence)
                kv.release(sequence)  # idempotent
                model.release(holder)
            else:
                longer = ids + tuple(token_ids)
                has_room = kv.append(sequence, token_ids[0], sum(longer))
                assert has_room == model.append(holder, sequence.kv_version, longer)
                live.append((sequence, longer if has_room else ids, holder))
        assert kv.num_held_blocks == model.num_held <= NUM_BLOCKS
        for sequence, ids, _ in live:
            assert (sequence.num_tokens, sequence.state) == (len(ids), sum(ids))
