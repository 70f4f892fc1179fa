"""SGLang's KV-cache events as ours.

A batch is msgpack `[timestamp, [event, ...], rank]`; in SGLang 0.5.17 an event is an array that begins with its
tag. Hashes are signed; a page has an event of its own. `lora_id` is the KV version of a context's first block
(`scheduler.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from agentloop_servers.engines.common.kv_feed import KVBatch


class _PageStored(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _PagesRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]
    medium: str | None = None


class _PagesCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _PageBatch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[_PageStored | _PagesRemoved | _PagesCleared]
    rank: int | None = None


class SglangKVEvents:
    """The reader of one engine's batches. `page_size`: smaller blocks, at the end of a context, are not told."""

    def __init__(self, page_size: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(_PageBatch)
        self._page_size = page_size

    def decode(self, payload: bytes) -> KVBatch:
        """Read one batch."""
        batch = self._decoder.decode(payload)
        return KVBatch(tuple(self._translate(batch)), batch.rank or 0)

    def _translate(self, batch: _PageBatch) -> Iterator[KVEvent]:
        run: list[_PageStored] = []  # pages that follow one another are one event of ours
        for event in batch.events:
            if isinstance(event, _PageStored) and (event.medium != "GPU" or event.block_size != self._page_size):
                continue
            if run and not (isinstance(event, _PageStored) and event.parent_block_hash == run[-1].block_hashes[-1]):
                yield _joined(run)
                run = []
            if isinstance(event, _PageStored):
                run.append(event)
            elif isinstance(event, _PagesCleared):
                yield AllBlocksCleared()
            elif event.medium == "GPU":
                yield BlocksRemoved(tuple(event.block_hashes))
        if run:
            yield _joined(run)


def _joined(run: list[_PageStored]) -> BlocksStored:
    first = run[0]
    hashes = tuple(block_hash for event in run for block_hash in event.block_hashes)
    token_ids = tuple(token_id for event in run for token_id in event.token_ids)
    return BlocksStored(hashes, first.parent_block_hash, token_ids, first.lora_id)
