"""The KV cache of a simulated engine: blocks, prefix reuse, least-recently-used eviction. Synchronous.

The name of a full block is a hash of its ids and its parent's name. A block stores the policy's state after its
last token. Invariants: a block held by a request is never evicted; the parent of a cached block is cached; held,
cached and free blocks sum to `num_blocks`.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash


class BlockChain:
    """The names of one context's full blocks. Appending takes O(new tokens).

    The KV version is the parent name of the first block, so contexts with different KV versions share no block.
    """

    __slots__ = ("_block_size", "_kv_version", "_tail", "names", "num_tokens")

    def __init__(self, block_size: int, kv_version: int) -> None:
        self._block_size = block_size
        self._kv_version = kv_version
        self.names: array[int] = array("Q")
        self.num_tokens = 0
        self._tail = b""  # packed ids after the last full block

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append ids, each in [0, 2**32), and the names of the blocks that they complete."""
        packed = array("I", token_ids)
        self.num_tokens += len(packed)
        data, size = self._tail + packed.tobytes(), 4 * self._block_size
        end = len(data) - len(data) % size
        digest, parent = xxhash.xxh3_64_intdigest, self.names[-1] if self.names else self._kv_version
        blocks = struct.iter_unpack(f"{size}s", data[:end])
        self.names.extend(array("Q", [parent := digest(block, parent) for (block,) in blocks]))
        self._tail = data[end:]


@dataclass(slots=True)
class KVSequence:
    """The KV of one request."""

    kv_version: int
    chain: BlockChain  # covers all ids, cached or not
    num_held: int = 0  # full blocks held
    tail: list[int] = field(default_factory=list)  # ids in the partial last block; empty without such a block
    num_tokens: int = 0  # ids in the cache
    state: int = 0  # the policy's state after these ids


@dataclass(slots=True)
class _Block:
    state: int
    num_holders: int


class KVCache:
    """All blocks of one engine."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks: dict[int, _Block] = {}  # full blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks without holder, least recently used first
        self._num_tails = 0  # partial blocks; each belongs to one sequence

    @property
    def num_held_blocks(self) -> int:
        """Blocks held by requests. The others are free or can be evicted."""
        return len(self._blocks) - len(self._idle) + self._num_tails

    def sequence(self, kv_version: int) -> KVSequence:
        """Return the empty KV of a request that may share blocks of `kv_version`."""
        return KVSequence(kv_version, BlockChain(self.block_size, kv_version))

    def admit(
        self, sequence: KVSequence, token_ids: Sequence[int], advance: Callable[[int, Sequence[int]], int]
    ) -> int | None:
        """Allocate the KV of all `token_ids` for an empty sequence; `advance` computes the uncached part.

        Returns the number of cached tokens, which excludes the last token because sampling needs its output.
        Returns None, without a change, if there are not enough blocks.
        """
        size, names = self.block_size, sequence.chain.names
        sequence.chain.extend(token_ids[sequence.chain.num_tokens :])
        num_full = len(token_ids) // size
        num_cached, num_reusable = 0, (len(token_ids) - 1) // size
        while num_cached < num_reusable and names[num_cached] in self._blocks:
            num_cached += 1
        num_needed = -(-len(token_ids) // size) - num_cached
        num_idle_reused = sum(names[index] in self._idle for index in range(num_cached))
        if num_needed > self.num_blocks - self.num_held_blocks - num_idle_reused:
            return None
        for name in names[:num_cached]:
            self._hold(name)
        state = self._blocks[names[num_cached - 1]].state if num_cached else 0
        sequence.num_held, sequence.state = num_cached, state
        for index in range(num_cached, num_full):
            sequence.state = advance(sequence.state, token_ids[index * size : (index + 1) * size])
            self._take()
            self._store(sequence, names[index])
        sequence.tail = list(token_ids[num_full * size :])
        if sequence.tail:
            self._take()
            sequence.state = advance(sequence.state, sequence.tail)
        sequence.num_tokens = len(token_ids)
        return num_cached * size

    def append(self, sequence: KVSequence, token_id: int, state: int) -> bool:
        """Add the KV of one token; `state` is the policy's state after it. Returns False if no block is left."""
        if not sequence.tail and not self._take():
            return False
        sequence.tail.append(token_id)
        sequence.state = state
        sequence.num_tokens += 1
        if len(sequence.tail) == self.block_size:
            index, chain = sequence.num_held, sequence.chain
            if index == len(chain.names):
                chain.extend(sequence.tail[chain.num_tokens - index * self.block_size :])
            sequence.tail = []
            self._store(sequence, chain.names[index])
        return True

    def release(self, sequence: KVSequence) -> None:
        """Release all blocks of a sequence; full blocks stay cached. Idempotent."""
        if sequence.tail:
            self._num_tails -= 1
        # In reverse, so that the last block is evicted first and a cached block never loses its parent.
        for name in reversed(sequence.chain.names[: sequence.num_held]):
            block = self._blocks[name]
            block.num_holders -= 1
            if block.num_holders == 0:
                self._idle[name] = None
        sequence.tail, sequence.num_held, sequence.num_tokens, sequence.state = [], 0, 0, 0

    def clear(self) -> None:
        """Drop all blocks that no request holds."""
        for name in self._idle:
            del self._blocks[name]
        self._idle.clear()

    def _hold(self, name: int) -> None:
        self._blocks[name].num_holders += 1
        self._idle.pop(name, None)

    def _take(self) -> bool:
        """Allocate a partial block, evicting one if none is free. Returns False if all blocks are held."""
        if len(self._blocks) + self._num_tails >= self.num_blocks:
            if not self._idle:
                return False
            evicted, _ = self._idle.popitem(last=False)
            del self._blocks[evicted]
        self._num_tails += 1
        return True

    def _store(self, sequence: KVSequence, name: int) -> None:
        """Convert the sequence's partial block to a full one, or release it if an equal block is cached."""
        self._num_tails -= 1
        if name not in self._blocks:
            self._blocks[name] = _Block(sequence.state, 0)
        self._hold(name)
        sequence.num_held += 1
