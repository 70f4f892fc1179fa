"""A trainer on a host: it pushes a tensor of N MiB as a version, and prints the report as JSON.

python -m tests.hosts.push URL VERSION MIB
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import torch

from agentloop.client.client import RolloutClient
from tests.hosts.cluster import ADMIN_KEY, KEY


def values_of(version: int, mib: int) -> torch.Tensor:
    """Return the large tensor of a version."""
    return torch.arange(mib * 2**18, dtype=torch.float32) + version


async def main(url: str, version: int, mib: int) -> None:
    values = values_of(version, mib)
    async with RolloutClient(url, api_key=KEY, admin_key=ADMIN_KEY) as client:
        report = await client.update_weights({"w": values, "b": torch.full((3,), float(version))}, version=version)
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
