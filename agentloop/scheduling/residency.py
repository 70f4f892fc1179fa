"""The KV blocks that a replica holds, as a tree of extents: who uses them, and which of them would go first.

An extent is a run of consecutive blocks that were last used together. It is kept as the names of its blocks
(`kv_hashes.py`, eight bytes each) and one node of a tree, so a turn costs O(its new blocks + the extents on its
path), however long its context is. As names chain, two contexts share a run if they share its last name: an extent
is compared by one name, and searched by halving where a context leaves it.

Modelled is the prefix cache of vLLM 0.32 (`v1/core/block_pool.py`, `kv_cache_manager.py`) for full attention:

- blocks that requests hold are never evicted;
- a request that ends gives its blocks back last one first, to the end of the queue of free blocks; those without
  a name (a partial block, one that holds nothing yet) are taken again before any that has one;
- a request that reuses blocks takes them off the queue; new blocks are taken from its front, and the name that one
  had is forgotten then.

Not modelled: second copies of a block (requests that compute the same block at the same time, or the last block of
a prompt that is cached whole), the order in which running requests take turns at the queue, preemption, and layers
that keep less than all. What comes of these the engine's events correct: `remove`, `clear` and `keep_only`.

Invariants: a block whose parent is not there is not there; a block that is held has its parent held by the same
holder; there are no more blocks than the capacity unless all are held. Synchronous; nothing here looks at a clock,
since only the order of use counts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Names: TypeAlias = npt.NDArray[np.uint64]

_REMEMBERED_SHARE = 8  # of evicted names, one for so many blocks of capacity are remembered


class _Extent:
    """A run of blocks. Its first is number `start` of every context that has it. The root is an empty one."""

    __slots__ = ("children", "hashes", "num_holders", "parent", "start")

    def __init__(self, parent: _Extent | None, start: int, hashes: array[int]) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes  # empty once it was removed; its holders still find their way up from it
        self.children: dict[int, _Extent] = {}  # by their first name
        self.num_holders = 0  # whose path it is on

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


class _Hold:
    """The extents that one holder uses, by the last of them, and its blocks without a name."""

    __slots__ = ("leaf", "num_reserved")

    def __init__(self, leaf: _Extent) -> None:
        self.leaf = leaf
        self.num_reserved = 0


class ReplicaKV:
    """The blocks of one replica. A context is given as the names of its full blocks (`BlockChain.hashes`)."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` are those that requests can use: one less than vLLM's `num_gpu_blocks`."""
        if capacity_blocks < 1:
            raise ValueError(f"a replica has at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._root = _Extent(None, 0, array("Q"))
        self._holds: dict[str, _Hold] = {}
        self._idle: OrderedDict[_Extent, None] = OrderedDict()  # held by nobody, the first to go in front
        self._tails: dict[int, _Extent] = {}  # by their last name
        self._num_named = 0
        self._num_idle = 0
        self._num_reserved = 0
        self._evicted: OrderedDict[int, None] = OrderedDict()  # names that events will tell of again, oldest first
        self._hears_events = False

    @property
    def num_blocks(self) -> int:
        """Blocks in use, held or not."""
        return self._num_named + self._num_reserved

    @property
    def num_held_blocks(self) -> int:
        """Blocks that are held, those without a name too. The rest of the capacity can be had by a request."""
        return self.num_blocks - self._num_idle

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a context are here. Changes nothing."""
        node, child, num_common = self._descend(self._root, hashes)
        return node.end if child is None else node.end + num_common

    def hold(self, holder_id: str, hashes: Sequence[int]) -> int:
        """Let a holder use the leading blocks of its context that are here, and no others; return how many."""
        node = self._split_at(*self._descend(self._root, hashes))
        self._use(node)
        held = self._holds.get(holder_id)
        if held is None:
            self._holds[holder_id] = _Hold(node)
        else:
            before, held.leaf = held.leaf, node
            self._leave(before)
            self._evict()
        return node.end

    def reserve(self, holder_id: str, num_blocks: int) -> None:
        """Let a holder have so many blocks in all that have no name yet. Idle blocks make room for them."""
        held = self._holds.get(holder_id)
        if held is None:
            held = self._holds[holder_id] = _Hold(self._root)
        self._num_reserved += num_blocks - held.num_reserved
        held.num_reserved = num_blocks
        self._evict()

    def store(self, holder_id: str, hashes: array[int]) -> int:
        """Put all blocks of a holder's context here, held by it; return how many were not here before.

        They take the places that the holder reserved. Idle blocks make room for the rest. That a request has a
        block is a fact: if all blocks are held, there are more than the capacity until some are released.
        """
        held = self._holds.get(holder_id)
        if held is None or not self._is_on_path(held.leaf, hashes):
            self.hold(holder_id, hashes)
            held = self._holds[holder_id]
        node = self._split_at(*self._descend(held.leaf, hashes))
        if node is not held.leaf:
            self._use(node)
            self._leave(held.leaf)
            held.leaf = node
        new = hashes[node.end :]
        if new:
            self._grow(held, new)
            filled = min(held.num_reserved, len(new))
            held.num_reserved -= filled
            self._num_reserved -= filled
            self._evict()
        return len(new)

    def release(self, holder_id: str) -> None:
        """Take from a holder what it has; its named blocks stay until room is needed. Idempotent."""
        held = self._holds.pop(holder_id, None)
        if held is not None:
            self._num_reserved -= held.num_reserved
            self._leave(held.leaf)
            self._evict()

    def remove(self, hashes: Iterable[int]) -> None:
        """Forget blocks that the engine evicted, held or not, and those that follow them, which nothing can reach.

        Cheap for blocks at the end of an extent, the order in which engines evict, and for those that were evicted
        here too. Others are searched for in all blocks.
        """
        self._hears_events = True
        lost: set[int] = set()
        for block_hash in hashes:
            extent = self._tails.get(block_hash)
            if extent is not None:
                self._cut(extent, len(extent.hashes) - 1)
            elif block_hash in self._evicted:
                del self._evicted[block_hash]
            else:
                lost.add(block_hash)
        if lost:
            self._cut_where(lambda names: _places_of(lost, names))

    def keep_only(self, resident: Iterable[int]) -> None:
        """Forget all blocks but these, which are all that the engine has. Those unknown here stay unknown."""
        kept = set(resident)
        self._evicted.clear()
        self._cut_where(lambda names: np.flatnonzero([name not in kept for name in names.tolist()]))

    def clear(self) -> None:
        """Forget all named blocks. Holders hold none of them any more; what they reserved stays theirs."""
        self._root = _Extent(None, 0, array("Q"))
        for held in self._holds.values():
            held.leaf = self._root
        self._idle.clear()
        self._tails.clear()
        self._evicted.clear()
        self._num_named = self._num_idle = 0

    # --- the tree ---

    def _descend(self, node: _Extent, hashes: Sequence[int]) -> tuple[_Extent, _Extent | None, int]:
        """Follow a context from the end of `node`, which it has.

        Returns the last extent that it has whole; the one after that of which it has a part, and how many blocks.
        """
        num, depth = len(hashes), node.end
        while depth < num:
            child = node.children.get(hashes[depth])
            if child is None:
                break
            run = child.hashes
            end = depth + len(run)
            if end > num or run[-1] != hashes[end - 1]:
                low, high = 1, min(len(run), num - depth)
                while low < high:
                    middle = (low + high + 1) // 2
                    if run[middle - 1] == hashes[depth + middle - 1]:
                        low = middle
                    else:
                        high = middle - 1
                return node, child, low
            node, depth = child, end
        return node, None, 0

    def _split_at(self, node: _Extent, child: _Extent | None, num_common: int) -> _Extent:
        """Return the extent at whose end a context left the tree (`_descend`), made by a split if there is none.

        The rest of a split extent keeps its place in the queue; the new one has none, and is to be used at once.
        """
        if child is None:
            return node
        upper = _Extent(node, child.start, child.hashes[:num_common])
        upper.num_holders = child.num_holders
        node.children[upper.hashes[0]] = upper
        del child.hashes[:num_common]
        child.parent, child.start = upper, upper.end
        upper.children[child.hashes[0]] = child
        self._tails[upper.hashes[-1]] = upper
        return upper

    def _is_on_path(self, extent: _Extent, hashes: Sequence[int]) -> bool:
        if extent is self._root:
            return True
        end = extent.end
        return bool(extent.hashes) and end <= len(hashes) and hashes[end - 1] == extent.hashes[-1]

    def _use(self, extent: _Extent) -> None:
        """Count one more holder of the path to an extent."""
        while extent.parent is not None:
            if extent.num_holders == 0:
                self._idle.pop(extent, None)
                self._num_idle -= len(extent.hashes)
            extent.num_holders += 1
            extent = extent.parent

    def _leave(self, extent: _Extent) -> None:
        """Count one holder less of the path to an extent. What nobody holds is queued, the last block first."""
        freed: _Extent | None = None
        while extent.parent is not None:
            extent.num_holders -= 1
            if extent.num_holders == 0 and extent.hashes:
                self._num_idle += len(extent.hashes)
                if freed is not None and len(extent.children) == 1:
                    self._join(extent, freed)
                self._idle[extent] = None
                freed = extent
            extent = extent.parent

    def _join(self, extent: _Extent, child: _Extent) -> None:
        """Make an extent and its only child, which were released together, one."""
        del self._idle[child]
        del self._tails[extent.hashes[-1]]
        extent.hashes.extend(child.hashes)
        extent.children = child.children
        for grandchild in extent.children.values():
            grandchild.parent = extent
        self._tails[extent.hashes[-1]] = extent

    def _grow(self, held: _Hold, new: array[int]) -> None:
        """Append new blocks to a holder's path: to its last extent if nobody else has that, else as another one."""
        extent = held.leaf
        if extent is self._root or extent.children or extent.num_holders > 1:
            held.leaf = extent.children[new[0]] = _Extent(extent, extent.end, new)
            held.leaf.num_holders = 1
        else:
            del self._tails[extent.hashes[-1]]
            extent.hashes.extend(new)
        self._tails[new[-1]] = held.leaf
        self._num_named += len(new)
        if self._evicted:
            for block_hash in new:
                self._evicted.pop(block_hash, None)

    # --- going ---

    def _evict(self) -> None:
        """Forget idle blocks, the least recently used first, until the rest fits or all is held."""
        surplus = self.num_blocks - self.capacity_blocks
        while surplus > 0 and self._idle:
            extent = next(iter(self._idle))  # it has no children: they were queued before it, and are gone
            num_gone = min(surplus, len(extent.hashes))
            if self._hears_events:
                self._evicted.update(dict.fromkeys(reversed(extent.hashes[-num_gone:])))
            self._cut(extent, len(extent.hashes) - num_gone)
            surplus -= num_gone
        while len(self._evicted) > self.capacity_blocks // _REMEMBERED_SHARE:
            self._evicted.popitem(last=False)

    def _cut(self, extent: _Extent, num_kept: int) -> None:
        """Forget the blocks of an extent from number `num_kept` on, and all that follow them."""
        if extent.children:
            for below in list(self._below(extent)):
                self._shorten(below, 0)
            extent.children.clear()
        if num_kept == 0 and extent.parent is not None:
            del extent.parent.children[extent.hashes[0]]
        self._shorten(extent, num_kept)

    def _cut_where(self, find: Callable[[_Names], npt.NDArray[np.intp]]) -> None:
        """Cut every extent at the first of its places that `find` returns, of all names in a row."""
        extents = list(self._below(self._root))
        ends = np.cumsum([len(extent.hashes) for extent in extents])
        starts = ends - [len(extent.hashes) for extent in extents]
        places = find(np.frombuffer(b"".join(extent.hashes for extent in extents), np.uint64))
        numbers, first = np.unique(np.searchsorted(ends, places, side="right"), return_index=True)
        for number, index in zip(numbers.tolist(), (places[first] - starts[numbers]).tolist(), strict=True):
            if extents[number].hashes:  # it may follow one that was cut
                self._cut(extents[number], index)

    def _shorten(self, extent: _Extent, num_kept: int) -> None:
        num_gone = len(extent.hashes) - num_kept
        del self._tails[extent.hashes[-1]]
        del extent.hashes[num_kept:]
        self._num_named -= num_gone
        if extent.num_holders == 0:
            self._num_idle -= num_gone
        if num_kept:
            self._tails[extent.hashes[-1]] = extent
        else:
            self._idle.pop(extent, None)

    def _below(self, extent: _Extent) -> Iterator[_Extent]:
        """Yield the descendants of an extent, parents first."""
        pending = list(extent.children.values())
        while pending:
            child = pending.pop()
            yield child
            pending.extend(child.children.values())


def _places_of(wanted: set[int], names: _Names) -> npt.NDArray[np.intp]:
    """Return where names are wanted ones, in order. Most are told apart by 16 bits, all at once."""
    is_near = np.zeros(1 << 16, np.bool_)
    is_near[np.fromiter(wanted, np.uint64).astype(np.uint16)] = True
    near = np.flatnonzero(is_near[names.astype(np.uint16)])
    is_wanted = [name in wanted for name in names[near].tolist()]
    return near[np.array(is_wanted, np.bool_)]
