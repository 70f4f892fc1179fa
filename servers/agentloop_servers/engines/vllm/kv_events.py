"""vLLM's KV-cache events, read from its publisher socket and handed to subscribers as our own.

Wire: multipart `[topic, sequence (8 bytes big-endian), msgpack [timestamp, [event, ...], rank]]`; an event is a map
tagged by `type`. One task reads; a gap in the sequence means lost events, and says so as `AllBlocksCleared`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agentloop.engine import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventPublisher,
)


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None  # of the data-parallel engine


class KVEventFeed:
    """Owner of the subscriber socket and the task that reads it. Data-parallel ranks are one cache to its readers:
    what one of them clears counts as cleared."""

    def __init__(self) -> None:
        self.events = KVEventPublisher()
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._next_sequence: dict[int | None, int] = {}  # by rank
        self._version_by_hash: dict[int, int] = {}  # one entry a cached block
        self._task: asyncio.Task[None] | None = None

    def start(self, endpoints: Sequence[str]) -> None:
        """Connect to every rank's publisher and start reading, before the first request: nothing is missed."""
        self._task = asyncio.create_task(self._read(endpoints), name="vllm-kv-events")

    def clear(self) -> None:
        """Announce that the cache was cleared: vLLM publishes that with its next step only, and once more."""
        self.events.publish(AllBlocksCleared())

    async def close(self) -> None:
        """Stop reading; subscriptions end. Idempotent. Raises what ended the reading before, if something did."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _read(self, endpoints: Sequence[str]) -> None:
        try:
            await self._receive(endpoints)
        finally:
            self.events.close()

    async def _receive(self, endpoints: Sequence[str]) -> None:
        import zmq
        import zmq.asyncio

        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)  # the publisher's own bound applies
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            for endpoint in endpoints:
                socket.connect(endpoint)
            while True:
                _, sequence, payload = await socket.recv_multipart()
                for event in self._translate(int.from_bytes(sequence, "big"), payload):
                    self.events.publish(event)

    def _translate(self, sequence: int, payload: bytes) -> Iterator[KVEvent]:
        batch = self._decoder.decode(payload)
        if sequence != self._next_sequence.get(batch.rank, 0):
            self._version_by_hash.clear()
            yield AllBlocksCleared()
        self._next_sequence[batch.rank] = sequence + 1
        for event in batch.events:
            if isinstance(event, _Cleared):
                self._version_by_hash.clear()
                yield AllBlocksCleared()
            elif event.medium not in (None, "GPU"):
                continue  # a slower tier; "GPU" is the device's own cache, on CPU too
            elif isinstance(event, _Removed):
                for block_hash in event.block_hashes:
                    self._version_by_hash.pop(block_hash, None)
                yield BlocksRemoved(tuple(event.block_hashes))
            else:
                yield self._stored(event)

    def _stored(self, event: _Stored) -> BlocksStored:
        """The salt, our KV version, stands in the keys of a chain's first block only."""
        version: int | None = None
        if event.parent_block_hash is not None:
            version = self._version_by_hash.get(event.parent_block_hash)
        elif event.extra_keys and event.extra_keys[0]:
            version = int(event.extra_keys[0][-1])
        if version is not None:
            self._version_by_hash.update(dict.fromkeys(event.block_hashes, version))
        return BlocksStored(tuple(event.block_hashes), event.parent_block_hash, tuple(event.token_ids), version)
