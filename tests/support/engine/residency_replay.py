"""A multi-turn workload on a real engine, each turn's cached tokens compared with those a `ReplicaKV` foretells.

Groups of samples share their prompt, all groups a system prompt; what the engine samples becomes part of the next
prompt, and so does a random observation. A round sends a few turns together and waits for all of them, so that what
is in flight together is the same at every run. The model is told what a balancer knows: the ids of a turn when it
begins and when it ends, and the order of ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from agentloop.kv_hashes import BlockChain, num_reusable_blocks, root_hash
from agentloop.scheduling.residency import ReplicaKV
from agentloop.types import GenerateRequest, Generation, SamplingParams

Generate = Callable[[GenerateRequest], Awaitable[Generation]]


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """The sizes of a workload, in tokens but for the counts."""

    num_groups: int
    num_samples: int
    num_turns: int
    num_together: int  # turns in flight
    system: int
    prompt: int  # up to half more or less
    observation: int  # the same
    max_sampled: int
    vocab: tuple[int, int]  # ids [start, end) that prompts and observations are drawn from


@dataclass(slots=True)
class _Live:
    number: int
    ids: list[int]
    chain: BlockChain
    num_turns_left: int


@dataclass(slots=True)
class Agreement:
    """Blocks that could have been cached over all turns, and how often prediction and engine said the same."""

    num_turns: int = 0
    num_equal_turns: int = 0
    num_blocks: int = 0
    num_wrong_blocks: int = 0
    num_foretold: int = 0
    num_cached: int = 0
    wrong_turns: list[tuple[int, int, int]] = field(default_factory=list)  # turn, blocks foretold, blocks cached

    @property
    def share(self) -> float:
        """Of all blocks of all prompts that could have been cached, those of which both said the same."""
        return 1.0 - self.num_wrong_blocks / max(1, self.num_blocks)

    def add(self, num_reusable: int, num_foretold: int, num_cached: int) -> None:
        self.num_turns += 1
        self.num_blocks += num_reusable
        self.num_foretold += num_foretold
        self.num_cached += num_cached
        self.num_wrong_blocks += abs(num_foretold - num_cached)
        if num_foretold == num_cached:
            self.num_equal_turns += 1
        else:
            self.wrong_turns.append((self.num_turns, num_foretold, num_cached))

    def __str__(self) -> str:
        turns = f"{self.num_equal_turns} of {self.num_turns} turns equal"
        cached = f"{self.num_foretold} blocks foretold, {self.num_cached} cached"
        return f"{self.share:.2%} of {self.num_blocks} blocks agree, {turns}, {cached}"


async def replay(
    generate: Generate, kv: ReplicaKV, block_size: int, shape: ReplayShape, *, seed: int, name: str
) -> Agreement:
    """Run a workload to its end and return how well the model foretold it. `kv` is what the engine holds before."""
    rng, agreement = random.Random(seed), Agreement()
    live = list(_trajectories(shape, rng, block_size))
    while live:
        together = rng.sample(live, min(shape.num_together, len(live)))
        observed = {
            one.number: _ids(rng, shape, _about(rng, shape.observation)) for one in together
        }  # drawn first: rounds must not depend on which turn ends first
        async with asyncio.timeout(600.0), asyncio.TaskGroup() as tasks:
            for one in together:
                tasks.create_task(_turn(generate, kv, shape, one, f"{name}-{seed}", agreement))
        for one in together:
            _extend(one, observed[one.number])
            one.num_turns_left -= 1
        live = [one for one in live if one.num_turns_left]
    return agreement


async def _turn(
    generate: Generate, kv: ReplicaKV, shape: ReplayShape, one: _Live, name: str, agreement: Agreement
) -> None:
    holder_id, size, num_prompt = f"{name}-{one.number}", one.chain.block_size, len(one.ids)
    num_reusable = num_reusable_blocks(num_prompt, size)
    num_foretold = kv.hold(holder_id, one.chain.hashes[:num_reusable])
    kv.store(holder_id, one.chain.hashes)  # vLLM names a prompt's blocks when it schedules them
    kv.reserve(holder_id, 1 if num_prompt % size else 0)
    sampling = SamplingParams(max_tokens=shape.max_sampled, seed=one.number)
    request = GenerateRequest(f"{holder_id}-{one.num_turns_left}", tuple(one.ids), sampling)
    generation = await generate(request)
    agreement.add(num_reusable, num_foretold, generation.cached_tokens // size)
    _extend(one, generation.token_ids)
    kv.store(holder_id, one.chain.hashes[: num_reusable_blocks(len(one.ids), size)])
    kv.release(holder_id)


def _trajectories(shape: ReplayShape, rng: random.Random, block_size: int) -> Iterator[_Live]:
    system, number = _ids(rng, shape, shape.system), 0
    for _ in range(shape.num_groups):
        prompt = system + _ids(rng, shape, _about(rng, shape.prompt))
        for _ in range(shape.num_samples):
            one = _Live(number, [], BlockChain(block_size, root_hash(0)), max(1, _about(rng, shape.num_turns)))
            _extend(one, prompt)
            number += 1
            yield one


def _extend(one: _Live, ids: list[int] | tuple[int, ...]) -> None:
    one.ids.extend(ids)
    one.chain.extend(ids)


def _about(rng: random.Random, num: int) -> int:
    return rng.randint(num - num // 2, num + num // 2)


def _ids(rng: random.Random, shape: ReplayShape, num: int) -> list[int]:
    return [rng.randrange(*shape.vocab) for _ in range(num)]
