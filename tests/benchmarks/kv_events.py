"""The cost of KV events: CPU of a replica that reads them, and of the coordinator that hears of removals.

    python -m tests.benchmarks.kv_events [blocks evicted a second]

A child process publishes, as vLLM does, a step every 20 ms: contexts of new blocks, and one event for each block
that they evict. The replica's process decodes, names the blocks and makes a report a second; then a coordinator's
model of that replica takes in the same reports. Prints milliseconds of CPU for a second of events.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from array import array
from pathlib import Path

import msgspec
import zmq

from agentloop.api.coordinator import KVChanges, ReplicaRegistration, ReplicaReport
from agentloop.codec import decode, encode
from agentloop.engine import EngineInfo
from agentloop.fleet.registry import Fleet
from agentloop.kv_hashes import BlockChain, root_hash
from agentloop.scheduling.replica_caches import ReplicaCaches
from agentloop.types import Load
from agentloop_servers.engines.common.kv_feed import KVEventFeed
from agentloop_servers.engines.vllm.kv_events import VllmKVEvents
from agentloop_servers.replica.cached_blocks import CachedBlocks

BLOCK_SIZE, CAPACITY_BLOCKS, STEPS_A_SECOND, SECONDS = 32, 40_000, 50, 10
CONTEXT_BLOCKS = 100


def context(number: int) -> tuple[list[int], list[int]]:
    """The ids of a context, and the hashes that an engine gives its blocks."""
    rng = random.Random(number)
    return rng.choices(range(150_000), k=CONTEXT_BLOCKS * BLOCK_SIZE), [
        rng.getrandbits(64) for _ in range(CONTEXT_BLOCKS)
    ]


def batches(num_evicted: int) -> list[bytes]:
    """The steps of `SECONDS`: so many blocks a second are evicted and as many stored, once the cache is full."""
    num_steps, num_full = STEPS_A_SECOND * SECONDS, CAPACITY_BLOCKS // CONTEXT_BLOCKS
    num_a_step = num_evicted // CONTEXT_BLOCKS / STEPS_A_SECOND
    made, number, written = [], 0, 0.0
    for step in range(num_steps + 1):
        events: list[dict[str, object]] = []
        written = written + num_a_step if step else float(num_full)
        while number < written:
            if number >= num_full:
                gone = {"type": "BlockRemoved", "medium": "GPU", "group_idx": 0}
                events += [gone | {"block_hashes": [one]} for one in reversed(context(number - num_full)[1])]
            ids, hashes = context(number)
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": None,
                    "token_ids": ids,
                    "block_size": BLOCK_SIZE,
                    "medium": "GPU",
                    "extra_keys": [["0"], *[None] * (CONTEXT_BLOCKS - 1)],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
            number += 1
        made.append(msgspec.msgpack.encode([0.0, events, 0]))
    return made


def publish(endpoint: str, num_evicted: int) -> None:
    """Publish the first step until it was heard, then the others in their time."""
    made = batches(num_evicted)
    with zmq.Context() as zmq_context, zmq_context.socket(zmq.PUB) as socket:
        socket.bind(endpoint)
        time.sleep(1.0)
        for sequence, payload in enumerate(made):
            socket.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
            time.sleep(1.0 if sequence == 0 else 1 / STEPS_A_SECOND)
        time.sleep(1.0)


async def read(endpoint: str) -> tuple[float, list[bytes]]:
    """Return the CPU seconds of a replica's process for a second of events, and its reports."""
    feed, cached = KVEventFeed(VllmKVEvents().decode), CachedBlocks(BLOCK_SIZE, CAPACITY_BLOCKS)
    feed.start([endpoint], [f"{endpoint}-replay"])
    reports: list[bytes] = []

    async def follow() -> None:
        async for event in feed.events.subscribe():
            cached.take_in(event)

    following = asyncio.create_task(follow())
    while (changes := cached.take_changes()) is None or not changes.resident:
        cached.tell_all()
        await asyncio.sleep(0.5)
    began_at = time.process_time()
    for _ in range(SECONDS):
        await asyncio.sleep(1.0)
        reports.append(encode(ReplicaReport(Load(), True, kv=cached.take_changes())))
    spent_s = time.process_time() - began_at
    following.cancel()
    await feed.close()
    return spent_s / SECONDS, reports


def hear(reports: list[bytes]) -> float:
    """Return the CPU seconds of a coordinator whose model holds what is removed, for a second of events."""
    fleet = Fleet()
    info = EngineInfo("vllm", 32_768, 150_000, BLOCK_SIZE, 2 * CAPACITY_BLOCKS * BLOCK_SIZE, 256)
    fleet.register(ReplicaRegistration("a", "http://a", info, 0), 0.0)
    caches = ReplicaCaches(fleet)
    model = caches.of("a")
    assert model is not None
    names = array("Q")
    for number in range(CAPACITY_BLOCKS // CONTEXT_BLOCKS * 2):
        chain = BlockChain(BLOCK_SIZE, root_hash(0))
        chain.extend(context(number)[0])
        model.store(str(number), array("Q", chain.hashes))
        model.release(str(number))
        names += chain.hashes
    assert reports
    first = decode(reports[0], ReplicaReport).kv
    assert first is not None
    caches.changed("a", KVChanges(first.sequence - 1, resident=names.tobytes()))
    began_at = time.process_time()
    for body in reports:
        changes = decode(body, ReplicaReport).kv
        if changes is not None:
            caches.changed("a", changes)
    return (time.process_time() - began_at) / SECONDS


def main() -> None:
    """Measure, and print one line."""
    num_evicted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'events'}"
        child = multiprocessing.get_context("spawn").Process(target=publish, args=(endpoint, num_evicted))
        child.start()
        replica_s, reports = asyncio.run(read(endpoint))
        child.join()
    num_told = sum(len(decode(body, ReplicaReport).kv.removed) // 8 for body in reports)  # type: ignore[union-attr]
    print(
        f"{num_told / SECONDS:.0f} blocks removed a second: replica {1e3 * replica_s:.1f} ms, "
        f"coordinator {1e3 * hear(reports):.1f} ms of CPU a second, {max(map(len, reports))} bytes a report"
    )


if __name__ == "__main__":
    main()
