"""vLLM's KV-cache events as ours.

A batch is msgpack `[timestamp, [event, ...], rank]`; an event is a map tagged by `type`. Of a model whose layers
are cached in several groups, the first is told that keeps whole contexts; the others share its blocks' hashes,
and keep less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from agentloop_servers.engines.common.kv_feed import KVBatch


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None  # of the data-parallel engine


_WHOLE_CONTEXT = ("full_attention", "mla_attention", "sink_full_attention")


class VllmKVEvents:
    """The reader of one engine's batches."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._group: int | None = None  # the one that is told

    def decode(self, payload: bytes) -> KVBatch:
        """Read one batch."""
        batch = self._decoder.decode(payload)
        return KVBatch(tuple(self._translate(batch)), batch.rank or 0)

    def _translate(self, batch: _Batch) -> Iterator[KVEvent]:
        removed: list[int] = []  # one event of ours for many of vLLM's, which have a block each
        for event in batch.events:
            if not isinstance(event, _Cleared) and not self._is_told(event):
                continue
            if isinstance(event, _Removed):
                removed += event.block_hashes
                continue
            if removed:
                yield BlocksRemoved(tuple(removed))
                removed = []
            if isinstance(event, _Cleared):
                yield AllBlocksCleared()
            elif (stored := _stored(event)) is not None:
                yield stored
        if removed:
            yield BlocksRemoved(tuple(removed))

    def _is_told(self, event: _Stored | _Removed) -> bool:
        if event.medium not in (None, "GPU"):
            return False  # a slower tier; "GPU" is the device's own cache, on CPU too
        if self._group is None and isinstance(event, _Stored) and event.kv_cache_spec_kind in _WHOLE_CONTEXT:
            self._group = event.group_idx
        return event.group_idx == self._group


def _stored(event: _Stored) -> BlocksStored | None:
    """Return our event for vLLM's, without its blocks from the first one on that shows an image; None: all do.

    A block's keys are the adapter's name, a pair for each image, and the salt: our KV version, in the keys of a
    context's first block only.
    """
    keys, num_told = event.extra_keys or [], len(event.block_hashes)
    for index, of_block in enumerate(keys):
        if of_block and any(not isinstance(key, str) for key in of_block):
            num_told = index
            break
    if num_told == 0:
        return None
    version: int | None = None
    if event.parent_block_hash is None and keys and keys[0]:
        version = int(keys[0][-1])
    hashes, token_ids = event.block_hashes, event.token_ids
    if num_told < len(hashes):
        hashes, token_ids = hashes[:num_told], token_ids[: num_told * event.block_size]
    return BlocksStored(tuple(hashes), event.parent_block_hash, tuple(token_ids), version)
