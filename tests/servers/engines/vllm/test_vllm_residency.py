"""The residency model against vLLM: its own cache manager step by step, and a running engine's cached tokens; and
what a replica makes of the engine's events, against both.

The figures that the second test prints are those of one engine with fewer blocks than the second workload needs.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from agentloop.engine import BlocksRemoved, BlocksStored, KVEvent
from agentloop.kv_hashes import BlockChain, hashes_of, num_reusable_blocks, root_hash
from agentloop.scheduling.residency import ReplicaKV
from agentloop.types import GenerateRequest, KVPolicy, PauseMode, SamplingParams
from agentloop_servers.engines.vllm.config import VllmConfig, prepare_environment
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.replica.cached_blocks import CachedBlocks
from tests.servers.recompute import POLICY
from tests.support.engine.residency_replay import ReplayShape, replay

pytestmark = pytest.mark.engine

BLOCK, NUM_BLOCKS = 4, 40
BYTES_PER_BLOCK = 2 * 4 * 2 * 32 * 4 * 32  # keys and values, layers, heads, head size, float32, tokens
FITS = ReplayShape(4, 4, 5, num_together=4, system=48, prompt=80, observation=24, max_sampled=24, vocab=(16, 1000))
LARGER = ReplayShape(
    12, 4, 5, num_together=5, system=48, prompt=160, observation=40, max_sampled=24, vocab=(16, 1000)
)


# --- vLLM's own cache manager --------------------------------------------------------------------------------


@dataclass
class Running:
    """A request in vLLM's cache manager, and the same one in the model."""

    request: Any
    chain: BlockChain


class Managers:
    """vLLM's cache manager, without an engine, and the model of it."""

    def __init__(self) -> None:
        prepare_environment(VllmConfig(str(POLICY / "v0"), 0, kv_cache_memory_bytes=2**20))
        # An engine is imported only where one is started.
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )

        kv_cache_utils.init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.manager = KVCacheManager(
            KVCacheConfig(NUM_BLOCKS + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=1024,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        self.kv = ReplicaKV(NUM_BLOCKS)

    def begin(self, number: int, ids: list[int]) -> Running | None:
        """Schedule a prompt in both, and compare what is cached of it. None if vLLM has no room."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.v1.request import Request  # noqa: PLC0415

        request = Request(str(number), list(ids), SamplingParams(max_tokens=64), None, block_hasher=self.hasher)
        chain = BlockChain(BLOCK, root_hash(0))
        chain.extend(ids)
        found, num_cached, _ = self.manager.get_computed_blocks(request)
        num_reusable = num_reusable_blocks(len(ids), BLOCK)
        assert self.kv.match(chain.hashes[:num_reusable]) * BLOCK == num_cached
        if self.manager.allocate_slots(request, len(ids) - num_cached, num_cached, found) is None:
            return None
        request.num_computed_tokens = len(ids)
        self.kv.store(request.request_id, chain.hashes)
        self.kv.reserve(request.request_id, 1 if len(ids) % BLOCK else 0)
        return Running(request, chain)

    def sample(self, running: Running, token_id: int) -> bool:
        """Compute the token sampled before, as a decoding step does. False if vLLM has no room."""
        request = running.request
        request.append_output_token_ids(token_id)
        if self.manager.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        running.chain.extend([token_id])
        self.kv.store(request.request_id, running.chain.hashes)
        self.kv.reserve(request.request_id, 1 if running.chain.num_tokens % BLOCK else 0)
        return True

    def end(self, running: Running) -> None:
        self.manager.free(running.request)
        self.kv.release(running.request.request_id)

    def check(self) -> None:
        assert self.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - self.kv.num_held_blocks


def prompt_of(rng: random.Random, known: list[list[int]]) -> list[int]:
    """A context that goes on, forks from another one or is new. Its last block is not whole: vLLM would compute
    that again beside the cached one, and have it twice."""
    base = rng.choice(known) if known and rng.random() < 0.8 else []
    ids = base[: rng.choice((len(base), len(base), rng.randint(0, len(base))))]
    ids = [*ids, *(rng.randrange(10**6) for _ in range(rng.randint(1, 3 * BLOCK)))]
    return ids if len(ids) % BLOCK else ids[:-1]


@pytest.mark.parametrize("seed", range(8))
def test_the_model_follows_vllms_cache_manager_block_by_block(seed: int) -> None:
    rng, both = random.Random(seed), Managers()
    known: list[list[int]] = []
    live: list[Running] = []
    num_cached = 0
    for number in range(300):
        ids = prompt_of(rng, known)
        started = both.begin(number, ids) if len(live) < 4 and len(ids) < BLOCK * NUM_BLOCKS // 5 else None
        if started is not None:
            live.append(started)
            known = [*known[-12:], ids]
            num_cached += both.kv.match(started.chain.hashes)
        for running in rng.sample(live, len(live)):
            if rng.random() < 0.25 or not all(both.sample(running, rng.randrange(10**6)) for _ in range(3)):
                both.end(running)
                live.remove(running)
                known[-1:] = [list(running.request.all_token_ids)] if rng.random() < 0.5 else known[-1:]
            both.check()
    assert num_cached > 100


# --- a running engine ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    config = VllmConfig(
        str(POLICY / "v0"),
        0,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=160 * BYTES_PER_BLOCK,
    )
    vllm = VllmEngine(config)
    await vllm.start()
    yield vllm
    await vllm.close()


@pytest.mark.slow
async def test_the_model_foretells_what_an_engine_says_was_cached(engine: VllmEngine) -> None:
    info = engine.info
    kv = ReplicaKV(info.kv_capacity_tokens // info.block_size)
    fitting = await replay(engine.generate, kv, info.block_size, FITS, seed=1, name="fits")
    print(f"without eviction: {fitting}")
    assert kv.num_blocks < kv.capacity_blocks
    larger = await replay(engine.generate, kv, info.block_size, LARGER, seed=2, name="larger")
    print(f"with eviction: {larger}")
    assert kv.num_blocks == kv.capacity_blocks
    assert fitting.num_cached > 100
    assert larger.num_cached > 200
    assert fitting.share >= 0.99, fitting.wrong_turns
    assert larger.share >= 0.95, larger.wrong_turns


# --- its events ----------------------------------------------------------------------------------------------


class Follower:
    """An engine's events as a replica reads them, beside a count of each copy by all the ids up to its end."""

    def __init__(self, engine: VllmEngine) -> None:
        size = engine.info.block_size
        self.engine, self.size = engine, size
        self.cached = CachedBlocks(size, engine.info.kv_capacity_tokens // size)
        self.num_removed = self.num_second_copies = self.num_turns = 0
        self._ids: dict[int, tuple[int, ...]] = {}  # by the engine's hash
        self._copies: Counter[int] = Counter()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.engine.kv_events():
            self.cached.take_in(event)
            self._count(event)

    def _count(self, event: KVEvent) -> None:
        if isinstance(event, BlocksStored):
            ids = () if event.parent_hash is None else self._ids[event.parent_hash]
            for index, block_hash in enumerate(event.block_hashes):
                ids += event.token_ids[index * self.size : (index + 1) * self.size]
                self._ids[block_hash] = ids
                self.num_second_copies += self._copies[block_hash] > 0
                self._copies[block_hash] += 1
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                if self._copies[block_hash]:  # else of before
                    self._copies[block_hash] -= 1
                    self.num_removed += 1
        else:
            self._copies.clear()

    def names(self, ids: Sequence[int]) -> list[int]:
        chain = BlockChain(self.size, root_hash(0))
        chain.extend(ids)
        return list(chain.hashes)

    async def turn(self, ids: Sequence[int], num_sampled: int = 1) -> tuple[tuple[int, ...], int]:
        """Sample a turn; return the context after it, and the tokens of it that were cached."""
        self.num_turns += 1
        sampling = SamplingParams(max_tokens=num_sampled)
        answer = await self.engine.generate(GenerateRequest(f"turn-{self.num_turns}", tuple(ids), sampling))
        return (*ids, *answer.token_ids), answer.cached_tokens

    async def told(self) -> set[int]:
        """What the replica tells, once all events of before have come; and prove that the raw ones say the same."""
        mark = tuple(random.Random(self.num_turns).choices(range(16, 1000), k=self.size + 1))
        await self.turn(mark)
        async with asyncio.timeout(30):
            while not any(mark[: self.size] == self._ids[one] for one, num in self._copies.items() if num):
                await asyncio.sleep(0.005)
        self.cached.tell_all()
        changes = self.cached.take_changes()
        assert changes is not None
        assert changes.resident is not None
        told = set(hashes_of(changes.resident))
        assert told == {self.names(self._ids[one])[-1] for one, num in self._copies.items() if num}
        return told

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def test_a_replica_names_exactly_what_its_engine_holds(engine: VllmEngine) -> None:
    rng, follower = random.Random(5), Follower(engine)
    size = follower.size

    async def trajectory(number: int) -> tuple[int, ...]:
        ids = tuple(random.Random(number // 2).choices(range(16, 1000), k=12 * size))  # pairs share a prompt
        for _ in range(4):
            ids, _ = await follower.turn(ids, rng.randint(1, size))
            ids = (*ids, *rng.choices(range(16, 1000), k=rng.randint(1, size)))
        return ids

    await asyncio.sleep(0)  # it subscribes
    contexts: list[tuple[int, ...]] = []
    for start in range(0, 36, 4):
        contexts += await asyncio.gather(*(trajectory(number) for number in range(start, start + 4)))
        assert len(await follower.told()) <= engine.info.kv_capacity_tokens // size
    for _ in range(2):  # all of it is cached but for its last block, which is computed once more
        await asyncio.gather(*(follower.turn(contexts[-1][: 12 * size]) for _ in range(2)))
    assert follower.num_removed > 100
    assert follower.num_second_copies > 0

    num_found = 0
    for ids in contexts:  # the engine itself says what it has of each
        told, num = await follower.told(), 0
        reusable = follower.names(ids)[: num_reusable_blocks(len(ids), size)]
        while num < len(reusable) and reusable[num] in told:
            num += 1
        _, num_cached = await follower.turn(ids)
        assert num_cached == num * size
        num_found += num
    assert num_found > 20

    await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    await engine.resume()
    assert len(await follower.told()) == 1
    await follower.close()
