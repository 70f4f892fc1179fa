"""FSDP2 on two CPU processes: train a step, then every rank gives its shards, and rank 0 sends them whole.

First, in another terminal: agentloop serve --config servers/cpu_push.yaml, or with servers/standalone.yaml on
a GPU. Not servers/cpu.yaml: in its mode, debug, nobody pushes tensors.
Then: torchrun --nproc-per-node 2 examples/07_fsdp_push.py http://127.0.0.1:8000
On GPUs: "nccl" for "gloo", and one torch.cuda.set_device(local rank) before it.
"""

import asyncio
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from agentloop.client import RolloutClient


async def main(url: str, version: int = 1) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained("examples/tiny_policy/v1", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(
        model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    async with RolloutClient(url) as client:
        for step in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # All ranks call it, and all get the same report. The service gets its own dtype.
            report = await client.update_weights(model.named_parameters(), version=version + step)
            if dist.get_rank() == 0:
                print(
                    f"loss {loss.item():.2f}, version {report.version}: stall {report.stall_ms:.0f} ms", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
