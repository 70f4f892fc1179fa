"""The KV cache of a simulated engine: blocks, prefix reuse, least-recently-used eviction, events. Synchronous.

A full block is known by a hash that chains from the block before it and starts from the weight version its KV
may be shared under, and it holds the policy's state after its last token. Invariants: a block that any request
holds is never evicted; a block in the cache has its parent in the cache; blocks held, cached and free sum to
`num_blocks`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEventPublisher


@dataclass(slots=True)
class KVSequence:
    """One request's KV. `num_tokens` of its ids are in the cache; `state` is the policy's after them."""

    kv_version: int
    hashes: list[int] = field(default_factory=list)  # of the full blocks of all ids seen, cached or not
    num_held: int = 0  # full blocks held
    tail: list[int] = field(default_factory=list)  # ids in the last, partial block; it has one unless empty
    num_tokens: int = 0
    state: int = 0


@dataclass(slots=True)
class _Block:
    state: int
    num_holders: int


class KVCache:
    """All blocks of one engine; `events` hears what becomes of them."""

    def __init__(self, num_blocks: int, block_size: int, events: KVEventPublisher) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks: dict[int, _Block] = {}  # full blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by no request, least recently used first
        self._num_tails = 0  # partial blocks; each belongs to one sequence
        self._events = events

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold; the rest is free or can be evicted."""
        return len(self._blocks) - len(self._idle) + self._num_tails

    def admit(
        self, sequence: KVSequence, token_ids: Sequence[int], advance: Callable[[int, Sequence[int]], int]
    ) -> int | None:
        """Give a sequence that holds nothing the KV of all `token_ids`; `advance` computes what is not cached.

        Returns how many tokens were cached (never all: the last one is always computed, as sampling needs its
        output), or None if blocks do not suffice; then nothing changed.
        """
        size, hashes = self.block_size, sequence.hashes
        _extend(sequence, token_ids[len(hashes) * size :], size)
        num_full = len(token_ids) // size
        num_cached = 0
        while num_cached < (len(token_ids) - 1) // size and hashes[num_cached] in self._blocks:
            num_cached += 1
        num_needed = -(-len(token_ids) // size) - num_cached
        num_idle_reused = sum(hashes[index] in self._idle for index in range(num_cached))
        if num_needed > self.num_blocks - self.num_held_blocks - num_idle_reused:
            return None
        for block_hash in hashes[:num_cached]:
            self._hold(block_hash)
        state = self._blocks[hashes[num_cached - 1]].state if num_cached else 0
        sequence.num_held, sequence.state = num_cached, state
        stored: list[int] = []
        for index in range(num_cached, num_full):
            sequence.state = advance(sequence.state, token_ids[index * size : (index + 1) * size])
            self._take()
            if self._store(sequence, hashes[index]):
                stored.append(index)
        sequence.tail = list(token_ids[num_full * size :])
        if sequence.tail:
            self._take()
            sequence.state = advance(sequence.state, sequence.tail)
        sequence.num_tokens = len(token_ids)
        if stored:
            ids = token_ids[stored[0] * size : (stored[-1] + 1) * size]
            self._announce_stored(sequence, stored[0], stored[-1] + 1, ids)
        return num_cached * size

    def append(self, sequence: KVSequence, token_id: int, state: int) -> bool:
        """Add the KV of one token, after which the policy's state is `state`. False if no block is left."""
        if not sequence.tail and not self._take():
            return False
        sequence.tail.append(token_id)
        sequence.state = state
        sequence.num_tokens += 1
        if len(sequence.tail) == self.block_size:
            index = sequence.num_held
            if index == len(sequence.hashes):
                _extend(sequence, sequence.tail, self.block_size)
            ids, sequence.tail = sequence.tail, []
            if self._store(sequence, sequence.hashes[index]):
                self._announce_stored(sequence, index, index + 1, ids)
        return True

    def release(self, sequence: KVSequence) -> None:
        """Take back all a sequence holds. Full blocks stay cached, its last one first to be evicted. Idempotent."""
        if sequence.tail:
            self._num_tails -= 1
        for block_hash in reversed(sequence.hashes[: sequence.num_held]):
            block = self._blocks[block_hash]
            block.num_holders -= 1
            if block.num_holders == 0:
                self._idle[block_hash] = None
        sequence.tail, sequence.num_held, sequence.num_tokens, sequence.state = [], 0, 0, 0

    def clear(self) -> None:
        """Forget every block that no request holds."""
        for block_hash in self._idle:
            del self._blocks[block_hash]
        self._idle.clear()
        self._events.publish(AllBlocksCleared())

    def _hold(self, block_hash: int) -> None:
        self._blocks[block_hash].num_holders += 1
        self._idle.pop(block_hash, None)

    def _take(self) -> bool:
        """Take a free block as a partial one, evicting if none is free. False if all are held."""
        if len(self._blocks) + self._num_tails >= self.num_blocks:
            if not self._idle:
                return False
            evicted, _ = self._idle.popitem(last=False)
            del self._blocks[evicted]
            self._events.publish(BlocksRemoved((evicted,)))
        self._num_tails += 1
        return True

    def _store(self, sequence: KVSequence, block_hash: int) -> bool:
        """Turn the sequence's partial block into a full one. False if an equal one was there and is shared now."""
        self._num_tails -= 1
        is_new = block_hash not in self._blocks
        if is_new:
            self._blocks[block_hash] = _Block(sequence.state, 0)
        self._hold(block_hash)
        sequence.num_held += 1
        return is_new

    def _announce_stored(self, sequence: KVSequence, start: int, end: int, token_ids: Sequence[int]) -> None:
        if self._events.has_subscribers:
            parent = sequence.hashes[start - 1] if start else None
            hashes = tuple(sequence.hashes[start:end])
            self._events.publish(BlocksStored(hashes, parent, tuple(token_ids), sequence.kv_version))


def _extend(sequence: KVSequence, token_ids: Sequence[int], block_size: int) -> None:
    """Hash the full blocks of the ids that follow those hashed so far."""
    packed = array("I", token_ids)
    if sequence.hashes:
        parent = sequence.hashes[-1]
    else:
        parent = xxhash.xxh3_64_intdigest(sequence.kv_version.to_bytes(8, "little", signed=True))
    for end in range(block_size, len(packed) + 1, block_size):
        parent = xxhash.xxh3_64_intdigest(packed[end - block_size : end], seed=parent)
        sequence.hashes.append(parent)
