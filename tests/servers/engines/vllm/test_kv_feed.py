"""Our feed of KV events against vLLM's own publisher: gaps, replays, ranks, groups, and blocks that show images."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.engine import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from agentloop_servers.engines.common.kv_feed import KVEventFeed, kv_endpoint, kv_endpoints, replay_endpoint
from agentloop_servers.engines.vllm.kv_events import VllmKVEvents

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # vLLM takes seconds to import

SIZE = 2


def stored(number: int, **fields: Any) -> Any:
    """vLLM's event for one block of our engine, whose hash and ids are `number`."""
    from vllm.distributed.kv_events import BlockStored  # noqa: PLC0415 - slow to import, and only wanted here

    ids = [number] * SIZE
    given = {"parent_block_hash": None, "extra_keys": [("3",)], "group_idx": 0, "medium": "GPU"}
    rest = {"block_size": SIZE, "lora_id": None, "lora_name": None, "kv_cache_spec_kind": "full_attention"}
    return BlockStored(**{"block_hashes": [number], "token_ids": ids, **given, **rest, **fields})


def removed(number: int, group: int = 0) -> Any:
    from vllm.distributed.kv_events import BlockRemoved  # noqa: PLC0415

    return BlockRemoved([number], "GPU", group_idx=group)


def heard(number: int, parent: int | None = None, version: int | None = 3) -> BlocksStored:
    return BlocksStored((number,), parent, (number,) * SIZE, version)


class Ranks:
    """The publishers of an engine's data-parallel ranks, and a feed that reads them."""

    def __init__(self, folder: Path, num_ranks: int, num_kept: int) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher  # noqa: PLC0415

        endpoint = kv_endpoint(str(folder))
        replay = replay_endpoint(endpoint)
        self.publishers = [
            ZmqEventPublisher(rank, endpoint, replay, buffer_steps=num_kept) for rank in range(num_ranks)
        ]
        self.feed = KVEventFeed(VllmKVEvents().decode)
        self.events = self.feed.events.subscribe()
        self._endpoints = kv_endpoints(endpoint, num_ranks), kv_endpoints(replay, num_ranks)

    def publish(self, *events: Any, rank: int = 0) -> None:
        """Publish one step's events."""
        from vllm.distributed.kv_events import KVEventBatch  # noqa: PLC0415

        self.publishers[rank].publish(KVEventBatch(ts=0.0, events=list(events)))

    def start(self) -> None:
        self.feed.start(*self._endpoints)

    async def until_heard(self, number: int, rank: int = 0) -> list[KVEvent]:
        """Publish a block until the feed tells of it; it may still be connecting. Returns all before."""
        found: list[KVEvent] = []
        async with asyncio.timeout(30):
            while heard(number) not in found:
                self.publish(stored(number), rank=rank)
                await asyncio.sleep(0.05)
                with contextlib.suppress(TimeoutError):
                    while True:
                        found.append(await asyncio.wait_for(anext(self.events), 0.05))
        return found[: found.index(heard(number))]

    async def next(self, num: int) -> list[KVEvent]:
        async with asyncio.timeout(30):
            return [await anext(self.events) for _ in range(num)]


@contextlib.asynccontextmanager
async def ranks(folder: Path, num_ranks: int = 1, num_kept: int = 100) -> AsyncIterator[Ranks]:
    made = Ranks(folder, num_ranks, num_kept)
    try:
        yield made
    finally:
        await made.feed.close()
        for publisher in made.publishers:
            publisher.shutdown()


async def connected(site: Ranks) -> None:
    """Start the feed, and read until nothing more of the beginning is on its way."""
    site.start()
    await site.until_heard(99)
    site.publish(stored(98))
    while (await site.next(1)) != [heard(98)]:
        pass


async def test_what_was_published_before_the_feed_was_there_is_sent_again(tmp_path):
    async with ranks(tmp_path) as site:
        for number in range(5):
            site.publish(stored(number))
        await asyncio.sleep(0.5)  # nobody reads: these are gone
        site.start()
        assert await site.until_heard(50) == [heard(number) for number in range(5)]


async def test_what_cannot_be_had_any_more_counts_as_cleared(tmp_path):
    async with ranks(tmp_path, num_kept=2) as site:
        for number in range(5):
            site.publish(stored(number))
        await asyncio.sleep(0.5)
        site.start()
        assert (await site.until_heard(50))[:1] == [AllBlocksCleared()]
        site.publish(stored(6))
        while (await site.next(1)) != [heard(6)]:
            pass


async def test_a_rank_has_its_own_sequence_and_its_own_replay(tmp_path):
    async with ranks(tmp_path, num_ranks=2) as site:
        site.publish(stored(0))
        for number in range(10, 13):
            site.publish(stored(number), rank=1)
        await asyncio.sleep(0.5)
        site.start()
        first = await site.until_heard(50)
        assert first == [heard(0)]
        second = await site.until_heard(51, rank=1)
        assert [event for event in second if event != heard(50)] == [heard(number) for number in range(10, 13)]


async def test_a_steps_removals_are_one_event_in_their_place(tmp_path):
    async with ranks(tmp_path) as site:
        await connected(site)
        site.publish(removed(1), removed(2), stored(3), removed(4), removed(3))
        assert await site.next(3) == [BlocksRemoved((1, 2)), heard(3), BlocksRemoved((4, 3))]


async def test_only_the_device_and_the_group_that_keeps_whole_contexts_are_told(tmp_path):
    async with ranks(tmp_path) as site:
        site.start()
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
        site.publish(stored(1, **window))
        await site.until_heard(50)
        site.publish(stored(2, **window), stored(3, medium="CPU"), removed(50, group=1), stored(4), removed(4))
        while (event := (await site.next(1))[0]) == heard(50):
            pass
        assert [event, *await site.next(1)] == [heard(4), BlocksRemoved((4,))]


IMAGE = ["sha@3", -1]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([("3",), None, None], 3),
        ([("adapter", "3"), ("adapter",), ("adapter",)], 3),
        ([("3",), (IMAGE,), None], 1),
        ([("3",), None, ("adapter", IMAGE)], 2),
        ([(IMAGE, "3"), None, None], 0),
        ([("3", b"embeddings"), None, None], 0),
    ],
)
async def test_blocks_from_an_image_on_are_not_told(tmp_path, keys: Sequence[Any], told: int):
    async with ranks(tmp_path) as site:
        await connected(site)
        ids = [1, 2, 3, 4, 5, 6]
        site.publish(stored(0, block_hashes=[11, 12, 13], token_ids=ids, extra_keys=keys), stored(7))
        expected: list[KVEvent] = [heard(7)]
        if told:
            expected.insert(0, BlocksStored((11, 12, 13)[:told], None, tuple(ids[: told * SIZE]), 3))
        assert await site.next(len(expected)) == expected


async def test_a_block_within_a_context_has_no_version_of_its_own(tmp_path):
    async with ranks(tmp_path) as site:
        await connected(site)
        site.publish(stored(5, parent_block_hash=4, extra_keys=[None]))
        site.publish(stored(6, parent_block_hash=5, extra_keys=None))
        assert await site.next(2) == [heard(5, 4, None), heard(6, 5, None)]
