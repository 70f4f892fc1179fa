"""The residency model against vLLM: its own cache manager step by step, and a running engine's cached tokens.

The figures that the second test prints are those of one engine with fewer blocks than the second workload needs.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from agentloop.kv_hashes import BlockChain, num_reusable_blocks, root_hash
from agentloop.scheduling.residency import ReplicaKV
from agentloop_servers.engines.vllm.config import VllmConfig, prepare_environment
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.servers.recompute import POLICY
from tests.support.engine.residency_replay import ReplayShape, capacity_blocks, replay

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


@pytest.mark.parametrize("seed", range(4))
def test_the_model_follows_vllms_cache_manager_block_by_block(seed: int) -> None:
    rng, both = random.Random(seed), Managers()
    known: list[list[int]] = []
    live: list[Running] = []
    num_cached = 0
    for number in range(150):
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
    assert num_cached > 50


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


async def test_the_model_foretells_what_an_engine_says_was_cached(engine: VllmEngine) -> None:
    info = engine.info
    kv = ReplicaKV(capacity_blocks(info.kv_capacity_tokens, info.block_size))
    fitting = await replay(engine.generate, kv, info.block_size, FITS, seed=1, name="fits")
    print(f"without eviction: {fitting}")
    assert kv.num_blocks < kv.capacity_blocks
    larger = await replay(engine.generate, kv, info.block_size, LARGER, seed=2, name="larger")
    print(f"with eviction: {larger}")
    assert kv.num_blocks == kv.capacity_blocks
    assert fitting.num_cached > 50
    assert larger.num_cached > 200
    assert fitting.share >= 0.99, fitting.wrong_turns
    assert larger.share >= 0.95, larger.wrong_turns
