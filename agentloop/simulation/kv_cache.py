"""The KV cache of a simulated engine: blocks, prefix reuse, least-recently-used eviction, events. Synchronous.

A full block is known by its name (`kv_hashes.py`), and it holds the policy's state after its last token.
Invariants: a block that any request holds is never evicted; a block in the cache has its parent in the cache;
blocks held, cached and free sum to `num_blocks`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEventPublisher
from agentloop.kv_hashes import BlockChain, num_reusable_blocks, root_hash


@dataclass(slots=True)
class KVSequence:
    """One request's KV. `num_tokens` of its ids are in the cache; `state` is the policy's after them."""

    kv_version: int
    chain: BlockChain  # of all ids seen, cached or not
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

    def sequence(self, kv_version: int) -> KVSequence:
        """Return the KV of a request that holds nothing yet and may share that of `kv_version`."""
        return KVSequence(kv_version, BlockChain(self.block_size, root_hash(kv_version)))

    def admit(
        self, sequence: KVSequence, token_ids: Sequence[int], advance: Callable[[int, Sequence[int]], int]
    ) -> int | None:
        """Give a sequence that holds nothing the KV of all `token_ids`; `advance` computes what is not cached.

        Returns how many tokens were cached (never all: the last one is always computed, as sampling needs its
        output), or None if blocks do not suffice; then nothing changed.
        """
        size, hashes = self.block_size, sequence.chain.hashes
        sequence.chain.extend(token_ids[sequence.chain.num_tokens :])
        num_full = len(token_ids) // size
        num_cached, num_reusable = 0, num_reusable_blocks(len(token_ids), size)
        while num_cached < num_reusable and hashes[num_cached] in self._blocks:
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
            index, chain = sequence.num_held, sequence.chain
            if index == len(chain.hashes):
                chain.extend(sequence.tail[chain.num_tokens - index * self.block_size :])
            ids, sequence.tail = sequence.tail, []
            if self._store(sequence, chain.hashes[index]):
                self._announce_stored(sequence, index, index + 1, ids)
        return True

    def release(self, sequence: KVSequence) -> None:
        """Take back all a sequence holds. Full blocks stay cached, its last one first to be evicted. Idempotent."""
        if sequence.tail:
            self._num_tails -= 1
        for block_hash in reversed(sequence.chain.hashes[: sequence.num_held]):
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
            known = sequence.chain.hashes
            parent = known[start - 1] if start else None
            hashes = tuple(known[start:end])
            self._events.publish(BlocksStored(hashes, parent, tuple(token_ids), sequence.kv_version))
