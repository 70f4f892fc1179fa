"""A torch process pushes its parameters into a running service: no files, no shared disk.

First, in another terminal: agentloop serve --config servers/cpu_push.yaml, or with servers/standalone.yaml on
a GPU. Not servers/cpu.yaml: in its mode, debug, nobody pushes tensors.
Then: python examples/06_torch_push.py http://127.0.0.1:8000
"""

import asyncio
import sys

from transformers import AutoModelForCausalLM

from agentloop.client import RolloutClient


async def main(url: str, version: int = 1) -> None:
    model = AutoModelForCausalLM.from_pretrained("examples/tiny_policy/v1")
    async with RolloutClient(url) as client:
        await client.wait_until_ready()
        report = await client.update_weights(model.named_parameters(), version=version)
    print(f"version {report.version}: moved in {report.transfer_ms:.0f} ms, paused for {report.stall_ms:.0f} ms")
    for replica in report.replicas:
        print(f"{replica.replica_id}: {replica.num_bytes:,} bytes over {replica.transport}, error: {replica.error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
