"""The blocks in an engine's prefix cache under our names, kept from its KV events: what heartbeats tell of it.

An engine's hashes are its own business: vLLM's chain from a seed that may be random. So each block is named again
(`kv_hashes.py`) from the ids that its event brings and the name of the block before it. Invariants:

- a block has a name only if all before it had one: blocks that show images, of another size than the engine's, or
  that follow what an event did not tell, have none, and are taken for no other block;
- an engine may hold a block several times (two requests that computed it at the same time): it is told as removed
  when the last copy is gone;
- what is told may be too little, after lost events, never too much but for the events on their way.

Memory is bounded by the engine's capacity, and removals that nobody hears by what is resident.
"""

from __future__ import annotations

from array import array

from agentloop.api.coordinator import KVChanges
from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from agentloop.kv_hashes import BlockChain, root_hash


class CachedBlocks:
    """The named blocks of one engine. Synchronous; its replica reads the events and sends the changes."""

    def __init__(self, block_size: int, capacity_blocks: int) -> None:
        """Raises ValueError unless both are at least 1. `capacity_blocks` are those of all data-parallel ranks."""
        if block_size < 1 or capacity_blocks < 1:
            raise ValueError(f"{capacity_blocks} blocks of {block_size} tokens")
        self._block_size = block_size
        self._capacity_blocks = capacity_blocks
        self._names: dict[int, int] = {}  # by the engine's hash
        self._num_more_copies: dict[int, int] = {}  # by the engine's hash, where there are several
        self._num_hashes: dict[
            int, int
        ] = {}  # engine hashes that a name stands for, of all names that are resident
        self._removed: set[int] = set()  # names, since they were last told
        self._tells_all = True
        self._sequence = 0

    def take_in(self, event: KVEvent) -> None:
        """Follow one event of the engine."""
        if isinstance(event, BlocksStored):
            self._store(event)
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                self._remove(block_hash)
        else:
            assert isinstance(event, AllBlocksCleared)
            self._forget_all()

    def tell_all(self) -> None:
        """Have the next changes name everything: what was told before may not have arrived."""
        self._tells_all = True
        self._removed.clear()

    def take_changes(self) -> KVChanges | None:
        """Return what to tell, which then counts as told; None if nothing changed."""
        if self._tells_all:
            self._tells_all = False
            self._sequence += 1
            return KVChanges(self._sequence, resident=_packed(self._num_hashes))
        if not self._removed:
            return None
        removed, self._removed = self._removed, set()
        self._sequence += 1
        return KVChanges(self._sequence, removed=_packed(removed))

    def _store(self, event: BlocksStored) -> None:
        parent = self._parent_name(event)
        if parent is None or len(event.token_ids) != len(event.block_hashes) * self._block_size:
            return
        chain = BlockChain(self._block_size, parent)
        chain.extend(event.token_ids)
        for block_hash, name in zip(event.block_hashes, chain.hashes, strict=True):
            if block_hash in self._names:
                self._num_more_copies[block_hash] = self._num_more_copies.get(block_hash, 0) + 1
                continue
            self._names[block_hash] = name
            self._num_hashes[name] = self._num_hashes.get(name, 0) + 1
            self._removed.discard(name)
        if len(self._names) > self._capacity_blocks:  # removals that were never told
            self._forget_all()

    def _parent_name(self, event: BlocksStored) -> int | None:
        if event.parent_hash is not None:
            return self._names.get(event.parent_hash)
        return None if event.kv_version is None else root_hash(event.kv_version)

    def _remove(self, block_hash: int) -> None:
        num_more = self._num_more_copies.pop(block_hash, 0)
        if num_more:
            if num_more > 1:
                self._num_more_copies[block_hash] = num_more - 1
            return
        name = self._names.pop(block_hash, None)
        if name is None:
            return
        num_others = self._num_hashes.pop(name) - 1
        if num_others:
            self._num_hashes[name] = num_others
        elif not self._tells_all:
            self._removed.add(name)
            if len(self._removed) > self._capacity_blocks:
                self.tell_all()

    def _forget_all(self) -> None:
        self._names.clear()
        self._num_more_copies.clear()
        self._num_hashes.clear()
        self.tell_all()


def _packed(names: dict[int, int] | set[int]) -> bytes:
    return array("Q", names).tobytes()
