"""Names of blocks: equal exactly for equal prefixes, however the ids arrived."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from agentloop.kv_hashes import BlockChain, hashes_of, num_reusable_blocks, root_hash

pieces = st.lists(st.lists(st.integers(0, 3), max_size=7), max_size=5)


def chain_of(token_ids: list[int], root: int = 1, block_size: int = 2) -> BlockChain:
    chain = BlockChain(block_size, root)
    chain.extend(token_ids)
    return chain


def test_a_name_is_the_hash_of_packed_ids_under_the_parent() -> None:
    root = xxhash.xxh3_64_intdigest((7).to_bytes(8, "little", signed=True) + b"cat")
    first = xxhash.xxh3_64_intdigest(bytes([1, 0, 0, 0, 2, 0, 0, 0]), seed=root)
    second = xxhash.xxh3_64_intdigest(bytes([3, 0, 0, 0, 0, 0, 2, 0]), seed=first)
    chain = chain_of([1, 2, 3, 2**17, 5], root_hash(7, b"cat"))
    assert list(chain.hashes) == [first, second]
    assert chain.num_tokens == 5


@given(pieces)
def test_pieces_give_the_names_of_the_whole(parts: list[list[int]]) -> None:
    chain = BlockChain(3, root_hash(0))
    for part in parts:
        chain.extend(part)
    whole = [token_id for part in parts for token_id in part]
    assert chain.hashes == chain_of(whole, root_hash(0), 3).hashes
    assert len(chain.hashes) == len(whole) // 3
    assert hashes_of(chain.hashes.tobytes()) == chain.hashes


@given(st.lists(st.integers(0, 1), max_size=8), st.lists(st.integers(0, 1), max_size=8))
def test_contexts_share_the_names_of_their_common_blocks_only(ours: list[int], theirs: list[int]) -> None:
    shared = 0
    while shared < min(len(ours), len(theirs)) // 2 and ours[: 2 * shared + 2] == theirs[: 2 * shared + 2]:
        shared += 1
    mine, other = chain_of(ours).hashes, chain_of(theirs).hashes
    assert mine[:shared] == other[:shared]
    assert set(mine[shared:]).isdisjoint(other[shared:])
    assert set(mine).isdisjoint(chain_of(ours, root=2).hashes)


def test_the_roots_of_versions_and_images_differ() -> None:
    roots = {root_hash(-1), root_hash(0), root_hash(1), root_hash(0, b"a"), root_hash(0, b"b")}
    assert len(roots) == 5


def test_the_last_token_is_never_reusable() -> None:
    assert [num_reusable_blocks(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_a_torn_list_of_names_is_refused() -> None:
    with pytest.raises(ValueError, match="item size"):
        hashes_of(b"123")
