"""Names of KV blocks: 64-bit hashes that chain, so that the name of a block names every token before its end.

Workers, ingress processes, replicas, the coordinator and the simulated engine name blocks by these functions and no
others. The hash is xxh3_64 of a full block's ids, packed as uint32, under the parent's hash as its seed; the first
block's parent is the root, which stands for the weight version whose KV may be shared. A partial block has no name:
no engine shares it. On a wire a list of names is their little-endian uint64 (`array("Q").tobytes()`), as our hosts
have it in memory.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

import xxhash


def root_hash(kv_version: int, image_digests: bytes = b"") -> int:
    """Return the parent of a first block.

    `kv_version` is the version whose KV may be shared (an adapter is a version). `image_digests` are those of all
    images of the context, in their order, joined: contexts with different images share no block, not even those
    before the first image, which an engine may share.
    """
    return xxhash.xxh3_64_intdigest(kv_version.to_bytes(8, "little", signed=True) + image_digests)


def num_reusable_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of a context of so many tokens an engine can reuse, and how many it leaves behind.

    Both are all full blocks before the last token: of a prompt, the last token is computed again because sampling
    needs its output; of a finished turn, the last sampled token was never computed.
    """
    return max(0, num_tokens - 1) // block_size


def hashes_of(data: bytes) -> array[int]:
    """Return the names that `array.tobytes` of them wrote. Raises ValueError if it is no whole number of names."""
    hashes = array("Q")
    hashes.frombytes(data)
    return hashes


class BlockChain:
    """The names of one context's full blocks; it grows at its end, and costs O(new tokens) a time.

    `hashes` is read by all and written here alone.
    """

    __slots__ = ("_tail", "block_size", "hashes", "num_tokens", "root")

    def __init__(self, block_size: int, root: int) -> None:
        self.block_size = block_size
        self.root = root
        self.hashes: array[int] = array("Q")
        self.num_tokens = 0
        self._tail = b""  # packed ids after the last full block

    def cut(self, num_blocks: int) -> None:
        """Go back to the first `num_blocks`: what followed them has changed."""
        del self.hashes[num_blocks:]
        self.num_tokens, self._tail = len(self.hashes) * self.block_size, b""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append ids, each in [0, 2**32), and name the blocks that are full now."""
        packed = array("I", token_ids)
        self.num_tokens += len(packed)
        data, size = self._tail + packed.tobytes(), 4 * self.block_size
        end = len(data) - len(data) % size
        digest, parent = xxhash.xxh3_64_intdigest, self.hashes[-1] if self.hashes else self.root
        blocks = struct.iter_unpack(f"{size}s", data[:end])
        self.hashes.extend(array("Q", [parent := digest(block, parent) for (block,) in blocks]))
        self._tail = data[end:]
