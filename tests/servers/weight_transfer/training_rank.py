"""One rank of a training job on CPU, run as a separate process by `test_trainer_group.py`. Prints its results.

python -m tests.servers.weight_transfer.training_rank RANK RENDEZVOUS_FILE URL
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import orjson
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from agentloop.client.client import RolloutClient
from agentloop.client.push import PushOptions
from agentloop.errors import AgentLoopError
from agentloop_servers.weight_transfer.trainer import TensorPusher
from tests.support.transfer.receiving import FakeSender

WORLD_SIZE = 2
HANGS, REFUSED, MANY_PASSES = 8, 5, 7  # versions that the test's fleet handles this way


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(13, 8), torch.nn.Linear(8, 3), torch.nn.Linear(3, 5))


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


async def said(work: Callable[[], object]) -> str:
    """Return the outcome of an update as a line."""
    try:
        report = await work()
    except AgentLoopError as error:
        return f"{error.code}: {error.message}"
    except asyncio.CancelledError:
        return "cancelled"
    return f"version {report.version} from {report.previous_version}, {len(report.replicas)} replica(s)"


async def cancelled_update(client: RolloutClient, weights: object, is_sender: bool) -> object:
    updating = asyncio.create_task(client.update_weights(weights, version=HANGS))
    if is_sender:
        await asyncio.sleep(1.0)
        updating.cancel()
    return await updating


async def main(rank: int, url: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    model = sharded(make_model(1))
    replicated = DistributedDataParallel(make_model(2))
    senders: list[FakeSender] = []

    def make_sender(host: str, transport: str, is_encrypted: bool) -> FakeSender:
        senders.append(FakeSender(host, transport, num_attempts=3))
        return senders[-1]

    async with RolloutClient(url, retry_timeout_s=5.0) as client:

        def update(weights: object, version: int, **options: object) -> Callable[[], object]:
            return lambda: client.update_weights(weights, version=version, **options)

        seen["fsdp"] = await said(update(model.named_parameters(), 1))
        seen["ddp"] = await said(update(replicated.named_parameters(), 2))
        fewer = list(model.named_parameters())[rank:]
        seen["mismatch"] = await said(update(fewer, 3))
        seen["version mismatch"] = await said(update(model.state_dict(), 3 + rank))
        seen["no tensor"] = await said(update({"a": torch.ones(1) if rank == 0 else "text"}, 3))
        seen["refused"] = await said(update(model.named_parameters(), REFUSED))
        if rank == 0:
            seen["alone"] = await said(update(make_model(6).named_parameters(), 6, all_ranks=False))
            seen["a shard alone"] = await said(update(model.named_parameters(), 7, all_ranks=False))
        pusher = TensorPusher(client, make_sender=make_sender)
        options = PushOptions(MANY_PASSES)
        seen["passes"] = await said(lambda: pusher.push(model.named_parameters(), options))
        await pusher.close()
        seen["equal passes"] = str([len(sender.attempts) for sender in senders])
        for sender in senders:
            for one in sender.attempts[1:]:
                assert all(a.equal(b) for a, b in zip(sender.attempts[0], one, strict=True))
        seen["cancelled"] = await said(lambda: cancelled_update(client, model.named_parameters(), rank == 0))
        seen["after it"] = await said(update(model.named_parameters(), 9))
        if rank == 0:
            seen["nobody came"] = await said(update(model.named_parameters(), 10, timeout_s=1.0))
            seen["broken"] = await said(update(model.named_parameters(), 11))
        else:
            await asyncio.sleep(4.0)
    return seen


if __name__ == "__main__":
    own_rank = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=own_rank, world_size=WORLD_SIZE)
    found = asyncio.run(main(own_rank, sys.argv[3]))
    sys.stdout.buffer.write(orjson.dumps(found))
    dist.destroy_process_group()
